import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.product import dot_general

SHAPES = {  # of the inputs, the features and the axes that are summed over
    'row': ((5,), (4,), (-1,)),
    'rows': ((3, 5), (4,), (-1,)),
    'sentences': ((2, 3, 5), (4,), (-1,)),
    'to heads': ((2, 3, 5), (2, 7), (-1,)),
    'from heads': ((2, 3, 4, 5), (7,), (-2, -1)),
    'wide': ((4, 33, 64), (130,), (-1,)),
}


@pytest.fixture(params=['one device', 'several'])
def devices(request, monkeypatch):
    """On one device the gradient of a matrix is computed in another way; these tests have eight."""
    monkeypatch.setattr(jax, 'device_count', lambda: 1 if request.param == 'one device' else 8)


def of(layer, inputs, params):
    """The values of a layer, and the gradients of a function of them."""
    outputs, gradients = jax.vjp(layer.apply, params, inputs)
    return outputs, gradients(jnp.cos(outputs))


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


@pytest.mark.parametrize('rows, d, f', [(1, 1, 1), (1, 64, 3), (2, 7, 33), (96, 64, 130), (257, 31, 1)])
def test_at_bfloat16_the_factors_are_rounded_and_the_sums_are_not(rows, d, f, devices):
    """Against sums in float64 of what NumPy's bfloat16 makes of the factors."""
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
    exact = product(jnp.asarray(inputs), jnp.asarray(matrix))  # outside, nothing is rounded
    np.testing.assert_allclose(exact, inputs.astype(np.float64) @ matrix, rtol=1e-4, atol=1e-5)
    assert rows * d * f == 1 or not np.allclose(values, exact, rtol=1e-4, atol=1e-4)
