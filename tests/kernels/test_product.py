import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.dense import Dense
from kernels.heads import einsum_per_head
from kernels.product import add_bias, dot_general, products


def scores_product(query, key):
    return einsum_per_head('bthk,bshk->bhts', query, key, jnp.float32)


def pooling_product(weights, value):
    return einsum_per_head('bhts,bshv->bthv', weights, value, value.dtype)


SHAPES = {  # shape of the inputs, features, and axes that are summed over
    'row': ((5,), (4,), (-1,)),
    'rows': ((3, 5), (4,), (-1,)),
    'sentences': ((2, 3, 5), (4,), (-1,)),
    'to heads': ((2, 3, 5), (2, 7), (-1,)),
    'from heads': ((2, 3, 4, 5), (7,), (-2, -1)),
    'wide': ((4, 33, 64), (130,), (-1,)),
}


@pytest.fixture(params=['one device', pytest.param('several', marks=pytest.mark.slow)])
def devices(request, monkeypatch):
    """Sets the number of devices: with one, gradients have another form."""
    monkeypatch.setattr(jax, 'device_count', lambda: 1 if request.param == 'one device' else 8)


def of(layer, inputs, params):
    """Returns the values of a layer, and the gradients of a function of them."""
    outputs, gradients = jax.vjp(layer.apply, params, inputs)
    return outputs, gradients(jnp.cos(outputs))


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('shape', SHAPES)
def test_values_and_gradients_are_those_of_jax(shape, dtype, devices):
    inputs, features, axes = SHAPES[shape]
    inputs = jnp.float32(np.random.default_rng(0).normal(size=inputs))
    ours, plain = (nn.DenseGeneral(features, axis=axes, dtype=dtype, dot_general=each)
                   for each in (dot_general, jax.lax.dot_general))
    params = plain.init(jax.random.key(0), inputs)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    found, expected = (jax.jit(lambda *args, layer=layer: of(layer, *args))(inputs, params) for layer in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)
    several = jax.vmap(lambda each: of(ours, each, params))(jnp.stack([inputs, 2 * inputs]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=tolerance, atol=tolerance), several, expected)


def test_hessian_vector_products_are_those_of_jax(devices):
    rng = np.random.default_rng(0)
    arguments, directions = (tuple(jnp.float32(rng.normal(size=size)) for size in ((3, 5), (5, 4))) for _ in range(2))

    def hessian_vector_product(dot):
        def total(inputs, matrix):
            return jnp.sin(dot(inputs, matrix, (((1,), (0,)), ((), ())))).sum()

        return jax.jit(lambda *arguments: jax.jvp(jax.grad(total, (0, 1)), arguments, directions)[1])(*arguments)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
                 *map(hessian_vector_product, (dot_general, jax.lax.dot_general)))


@pytest.mark.parametrize('rows, d, f', [(1, 1, 1), (1, 64, 3), (2, 7, 33), (96, 64, 130), (257, 31, 1)])
def test_at_bfloat16_the_factors_are_rounded_and_the_sums_are_not(rows, d, f, devices):
    """Compares with sums in float64 of factors that NumPy rounds to bfloat16."""
    rng = np.random.default_rng(rows)
    inputs, matrix, gradient = (rng.normal(size=size).astype(np.float32) for size in ((rows, d), (d, f), (rows, f)))

    def product(inputs, matrix):
        return dot_general(inputs, matrix, (((1,), (0,)), ((), ())))

    with jax.default_matmul_precision('bfloat16'):
        values, gradients = jax.jit(
            lambda *args: (jax.vjp(product, *args[:2])[0], jax.vjp(product, *args[:2])[1](args[2])))(
                inputs, matrix, gradient)
    assert {each.dtype for each in (values, *gradients)} == {np.dtype('float32')}
    x, w, g = (each.astype(jnp.bfloat16).astype(np.float64) for each in (inputs, matrix, gradient))
    for found, expected in zip((values, *gradients), (x @ w, g @ w.T, x.T @ g), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    exact = product(jnp.asarray(inputs), jnp.asarray(matrix))  # not rounded outside the context
    np.testing.assert_allclose(exact, inputs.astype(np.float64) @ matrix, rtol=1e-4, atol=1e-5)
    assert rows * d * f == 1 or not np.allclose(values, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('batch, target, source, heads, width', [
    (2, 5, 7, 3, 8), (16, 24, 24, 4, 64), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [
        (1, 1, 1, 1, 1), (3, 1, 9, 2, 4), (3, 9, 1, 2, 4), (5, 33, 20, 8, 16), (1, 128, 129, 1, 3)])])
def test_products_within_heads_and_their_gradients(batch, target, source, heads, width, devices):
    """Compares with the sums of equation 1 in float64, for each head of each example."""
    rng = np.random.default_rng(target)
    query, key, value, weights, of_scores, of_pooled = (rng.normal(size=size) for size in (
        (batch, target, heads, width), (batch, source, heads, width), (batch, source, heads, width + 1),
        (batch, heads, target, source), (batch, heads, target, source), (batch, target, heads, width + 1)))
    expected = {name: np.zeros_like(like) for name, like in dict(
        scores=weights, query=query, key=key, pooled=of_pooled, weights=weights, value=value).items()}
    for b, h in np.ndindex(batch, heads):
        q, k, v, dp = (each[b, :, h] for each in (query, key, value, of_pooled))
        w, ds = weights[b, h], of_scores[b, h]
        expected['scores'][b, h], expected['query'][b, :, h], expected['key'][b, :, h] = q @ k.T, ds @ k, ds.T @ q
        expected['pooled'][b, :, h], expected['weights'][b, h], expected['value'][b, :, h] = w @ v, dp @ v.T, w.T @ dp

    def values_and_gradients(product, *arrays):
        *inputs, gradient = (jnp.float32(each) for each in arrays)
        values, gradients = jax.vjp(product, *inputs)
        return values, *gradients(gradient)

    def both(scale):
        return (*values_and_gradients(scores_product, scale * query, key, of_scores),
                *values_and_gradients(pooling_product, scale * weights, value, of_pooled))

    for found, wanted in zip(jax.jit(both)(1.0), expected.values(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    for found, wanted in zip(jax.vmap(both)(jnp.ones(2)), expected.values(), strict=True):
        np.testing.assert_allclose(found, np.stack([wanted] * 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('keys', [40, 160])  # the second one is too long for the gradients with transposed copies
def test_few_queries_pool_the_values_of_a_past(keys, devices):
    rng = np.random.default_rng(0)
    weights, past = (jnp.float32(rng.normal(size=size)) for size in ((2, 4, 5, keys), (2, 4, keys, 8)))
    value = jnp.moveaxis(past, 1, 2)
    expected = np.einsum('bhts,bhsv->bthv', np.float64(weights), np.float64(past))
    np.testing.assert_allclose(jax.jit(pooling_product)(weights, value), expected, rtol=1e-4, atol=1e-4)
    gradients = [jax.jit(jax.grad(lambda *factors, product=product: jnp.cos(product(*factors)).sum(), (0, 1)))(
        weights, value) for product in (pooling_product, lambda *factors: jnp.einsum('bhts,bshv->bthv', *factors))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *gradients)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('groups', [1, 2, 6])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_grouped_products_are_those_of_repeated_keys(groups, dtype):
    rng = np.random.default_rng(0)
    query, key, weights = (jnp.asarray(rng.normal(size=size), dtype)
                           for size in ((2, 5, 6, 8), (2, 7, groups, 8), (2, 6, 5, 7)))
    repeated = jnp.repeat(key, 6 // groups, axis=2)
    for grouped, plain in ((scores_product(query, key), jnp.einsum('bthk,bshk->bhts', query, repeated)),
                           (pooling_product(weights, key), jnp.einsum('bhts,bshv->bthv', weights, repeated))):
        tolerance = 1e-5 if dtype == jnp.float32 else 0.05
        np.testing.assert_allclose(np.float32(grouped), np.float32(plain), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('biased', [True, False])
def test_one_product_of_several_matrices_is_a_product_of_each(biased):
    rng = np.random.default_rng(0)
    inputs, *matrices = (jnp.float32(rng.normal(size=size)) for size in ((2, 3, 5), (5, 2, 4), (5, 7)))
    biases = [jnp.float32(rng.normal(size=matrix.shape[1:])) for matrix in matrices] if biased else None
    found = products(inputs, matrices, biases, jnp.float32)
    for product, matrix, bias in zip(found, matrices, biases or (0, 0), strict=True):
        np.testing.assert_allclose(product, np.tensordot(inputs, matrix, 1) + bias, rtol=1e-5, atol=1e-5)


def test_at_bfloat16_the_factors_of_joint_products_are_rounded():
    rng = np.random.default_rng(0)
    inputs, *matrices = (rng.normal(size=size).astype(np.float32) for size in ((2, 3, 64), (64, 2, 4), (64, 7)))
    with jax.default_matmul_precision('bfloat16'):
        found = products(jnp.asarray(inputs), [jnp.asarray(matrix) for matrix in matrices], None, jnp.float32)
    rounded = [each.astype(jnp.bfloat16).astype(np.float64) for each in (inputs, *matrices)]
    for product, matrix in zip(found, rounded[1:], strict=True):
        np.testing.assert_allclose(product, np.tensordot(rounded[0], matrix, 1), rtol=1e-4, atol=1e-4)


def test_the_sums_of_products_in_bfloat16_are_rounded_once(devices):
    """Sums that were kept in bfloat16 would differ by many roundings."""
    rng = np.random.default_rng(0)
    inputs, matrix, grad = (rng.normal(size=size).astype(jnp.bfloat16) for size in ((96, 1000), (1000, 40), (96, 40)))
    values, vjp = jax.vjp(lambda *factors: dot_general(*factors, (((1,), (0,)), ((), ()))), *map(jnp.asarray, (
        inputs, matrix)))
    x, w, g = (each.astype(np.float64) for each in (inputs, matrix, grad))
    for found, expected in zip((values, *vjp(jnp.asarray(grad))), (x @ w, g @ w.T, x.T @ g), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float64(found), expected, rtol=2 ** -8, atol=1e-3)


def test_products_within_heads_keep_bfloat16(devices):
    rng = np.random.default_rng(0)
    query, key, weights = (jnp.bfloat16(rng.normal(size=size)) for size in ((2, 5, 3, 8), (2, 7, 3, 8), (2, 3, 5, 7)))
    scores, of_query = jax.vjp(lambda query: scores_product(query, key), query)
    pooled, of_weights = jax.vjp(lambda weights: pooling_product(weights, key), weights)
    assert scores.dtype == jnp.float32 and pooled.dtype == jnp.bfloat16
    assert of_query(jnp.ones_like(scores))[0].dtype == of_weights(pooled)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize('shape', [(1, 1), (7,), (5, 3, 4), (80, 24, 130), (4000, 2)])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_bias_gets_the_sum_of_the_gradients(shape, dtype, devices):
    rng = np.random.default_rng(0)
    inputs, gradient = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    bias = jnp.asarray(rng.normal(size=shape[-1:]), dtype)
    values, gradients = jax.vjp(jax.jit(add_bias), inputs, bias)
    of_inputs, of_bias = gradients(gradient)
    assert values.dtype == of_inputs.dtype == of_bias.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(values, np.float64(inputs) + np.float64(bias), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(of_inputs, gradient)
    wanted = np.float64(gradient).reshape(-1, shape[-1]).sum(axis=0)
    np.testing.assert_allclose(of_bias, wanted, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize('use_bias', [True, False])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('features, summed', [(6, 1), ((3, 2), 1), (6, 2)])
def test_dense_is_that_of_flax(features, summed, use_bias, dtype):
    """Compares the initial parameters, the values and the gradients."""
    inputs, found = jnp.float32(np.random.default_rng(0).normal(size=(3, 5, 4, 2))), []
    tolerance = 1e-5 if dtype == 'float32' else 0.05
    init = nn.initializers.xavier_uniform()
    axes = tuple('abcd'[:summed + np.size(features)])
    last = tuple(range(-summed, 0))
    for layer in (Dense(features, axes, use_bias, dtype, summed),
                  nn.DenseGeneral(features, last, use_bias=use_bias, dtype=dtype, kernel_init=init)):
        params = nn.unbox(layer.init(jax.random.key(1), inputs))
        outputs, gradients = jax.vjp(layer.apply, params, inputs)
        found.append((params, outputs, gradients(jnp.cos(outputs))))
    assert found[0][1].dtype == dtype
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), *found)


def test_the_gradient_of_a_bias_in_bfloat16_is_summed_in_float32():
    """XLA for CPUs adds in bfloat16, where 256 + 1 is 256: with nn.DenseGeneral, the gradient is 7,168."""
    layer, inputs = Dense((2, 3), ('a', 'b', 'c'), dtype=jnp.bfloat16), jnp.ones((50, 400, 2))
    params = nn.unbox(layer.init(jax.random.key(0), inputs))
    gradient = jax.jit(jax.grad(lambda params: layer.apply(params, inputs).astype(jnp.float32).sum()))(params)
    np.testing.assert_allclose(gradient['params']['bias'], np.full((2, 3), 20_000), rtol=2 ** -8)
