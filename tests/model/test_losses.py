import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import losses as loss
from model.embedding import ABSENT, Projection
from model.losses import cross_entropy, squared_error, tiles


def random_batch(seed=0, shape=(3, 5), classes=7):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*shape, classes)) * 3
    return logits, rng.integers(0, classes, shape), rng.integers(0, 2, shape).astype(float)


@pytest.mark.parametrize('smoothing', [0.0, 0.1, 0.5])
def test_label_smoothing_equals_the_explicit_sum(smoothing):
    logits, targets, weights = random_batch()
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    q = (1 - smoothing) * np.eye(7)[targets] + smoothing / 7
    expected = -(weights[..., None] * q * log_p).sum()
    sums = cross_entropy(jnp.float32(logits), jnp.int32(targets), jnp.float32(weights), smoothing)
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-5)
    nll = -(weights * np.take_along_axis(log_p, targets[..., None], -1)[..., 0]).sum()
    np.testing.assert_allclose(sums.others['nll'], nll, rtol=1e-5)


def test_accuracy_and_tokens_count_weighted_positions_only():
    logits, targets, weights = random_batch(1)
    sums = cross_entropy(jnp.float32(logits), jnp.int32(targets), jnp.float32(weights), 0.1)
    assert sums.tokens == weights.sum()
    assert sums.others['accuracy'] == ((logits.argmax(-1) == targets) * weights).sum()


def test_perplexity_is_of_the_unsmoothed_loss():
    logits = jnp.zeros((1, 4, 8))
    sums = cross_entropy(logits, jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4)), 0.3)
    assert sums.means('x_')['x_perplexity'] == pytest.approx(8.0, rel=1e-5)


def test_padding_has_no_gradient():
    logits, targets, weights = random_batch(2)
    gradient = jax.grad(lambda x: cross_entropy(x, jnp.int32(targets), jnp.float32(weights), 0.1).loss)(
        jnp.float32(logits))
    assert np.all(np.asarray(gradient)[weights == 0] == 0)
    assert np.any(np.asarray(gradient)[weights == 1] != 0)


def test_squared_error_is_a_mean_over_values_and_a_sum_over_examples():
    rng = np.random.default_rng(3)
    outputs, targets, weights = rng.normal(size=(4, 3)), rng.normal(size=(4, 3)), np.array([1.0, 0, 1, 1])
    sums = squared_error(jnp.float32(outputs), jnp.float32(targets), jnp.float32(weights))
    np.testing.assert_allclose(sums.loss, (((outputs - targets) ** 2).mean(-1) * weights).sum(), rtol=1e-5)
    assert sums.means()['absolute_error'] == pytest.approx(np.abs(outputs - targets)[weights > 0].mean(), rel=1e-5)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('shape', [(3, 5), (2, 3, 4), *(
    pytest.param(shape, marks=pytest.mark.slow) for shape in [(2, 1), (4, 13), (6,)])], ids=str)
@pytest.mark.parametrize('tile', [1, 200, 10 ** 6])
def test_without_the_logits_sums_and_gradients_are_those_of_the_logits(monkeypatch, tile, shape, smoothing):
    monkeypatch.setattr(loss, 'TILE', tile)
    rng = np.random.default_rng(4)
    states, table = jnp.float32(rng.normal(size=(*shape, 6))), jnp.float32(rng.normal(size=(11, 6)))
    targets, weights = jnp.int32(rng.integers(0, 11, shape)), jnp.float32(rng.integers(0, 2, shape))

    def of(outputs):
        def total(states, table):
            sums = cross_entropy(outputs(Projection(states, table)), targets, weights, smoothing)
            return 3 * sums.loss, sums
        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(states, table)

    found, expected = of(lambda projection: projection), of(lambda projection: projection.logits())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
    alone = cross_entropy(Projection(states, table), targets, weights, smoothing)  # as an evaluation does
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), alone, expected[0][1])


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_a_bias_is_in_sums_and_gradients(monkeypatch, smoothing):
    monkeypatch.setattr(loss, 'TILE', 60)
    rng = np.random.default_rng(6)
    arrays = [jnp.float32(rng.normal(size=size)) for size in ((3, 5, 6), (11, 6), (11,))]
    targets, weights = jnp.int32(rng.integers(0, 11, (3, 5))), jnp.float32(rng.integers(0, 2, (3, 5)))

    def of(outputs):
        def total(*arrays):
            sums = cross_entropy(outputs(Projection(*arrays)), targets, weights, smoothing)
            return 3 * sums.loss, sums
        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)

    found, expected = of(lambda projection: projection), of(lambda projection: projection.logits())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
    assert np.abs(found[1][2]).max() > 0.1
    close = np.einsum('btd,vd->btv', *arrays[:2]) + arrays[2]
    np.testing.assert_allclose(Projection(*arrays).logits(), close, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('tile', [1 << 20, 1000])
def test_in_bfloat16_the_sums_are_of_float32(monkeypatch, tile):
    monkeypatch.setattr(loss, 'TILE', tile)
    rng = np.random.default_rng(5)
    states, table = jnp.bfloat16(rng.normal(size=(8, 64, 16))), jnp.float32(rng.normal(size=(50, 16)))
    targets, weights = jnp.int32(rng.integers(0, 50, (8, 64))), jnp.ones((8, 64))
    found = cross_entropy(Projection(states, table), targets, weights, 0.1)
    expected = cross_entropy(Projection(states, table).logits(), targets, weights, 0.1)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-3)
    gradient = jax.jit(jax.grad(
        lambda table: cross_entropy(Projection(states, table), targets, weights, 0.1).loss))(table)
    assert gradient.dtype == jnp.float32
    expected = jax.grad(lambda table: cross_entropy(
        Projection(states.astype(jnp.float32), table).logits(), targets, weights, 0.1).loss)(table)
    np.testing.assert_allclose(gradient, expected, atol=0.02 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize('devices', [1, 8])  # on one, the gradient of the table is computed in another way
@pytest.mark.parametrize('tile', [1 << 20, 1000])
def test_at_bfloat16_the_factors_are_rounded(monkeypatch, tile, devices):
    monkeypatch.setattr(loss, 'TILE', tile)
    monkeypatch.setattr(jax, 'device_count', lambda: devices)
    rng = np.random.default_rng(8)
    states, table = jnp.float32(rng.normal(size=(8, 64, 16))), jnp.float32(rng.normal(size=(50, 16)))
    targets, weights = jnp.int32(rng.integers(0, 50, (8, 64))), jnp.ones((8, 64))

    def total(outputs, states, table):
        return cross_entropy(outputs(Projection(states, table)), targets, weights, 0.1).loss

    with jax.default_matmul_precision('bfloat16'):
        value, gradients = jax.jit(jax.value_and_grad(
            lambda *arrays: total(lambda projection: projection, *arrays), argnums=(0, 1)))(states, table)
    rounded = [each.astype(jnp.bfloat16).astype(jnp.float32) for each in (states, table)]
    np.testing.assert_allclose(value, total(lambda projection: projection.logits(), *rounded), rtol=1e-4)
    expected = jax.grad(lambda *arrays: total(lambda projection: projection.logits(), *arrays), (0, 1))(states, table)
    for found, exact in zip(gradients, expected, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, exact, atol=0.02 * float(jnp.abs(exact).max()))


@pytest.mark.parametrize('biased', [False, True])
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('shape', [(3, 5), (4,)])
def test_accelerators_have_the_same_sums_and_gradients(monkeypatch, shape, smoothing, biased):
    monkeypatch.setattr(loss, 'TILE', 60)
    rng = np.random.default_rng(7)
    projection = Projection(jnp.float32(rng.normal(size=(*shape, 6))), jnp.float32(rng.normal(size=(11, 6))),
                            jnp.float32(rng.normal(size=11)) if biased else None)
    targets, weights = jnp.int32(rng.integers(0, 11, shape)), jnp.float32(rng.integers(0, 3, shape))
    sums, gradients = loss._one_product(projection, targets, weights, label_smoothing=smoothing)
    expected = loss._scan(projection, targets, weights, smoothing, gradients=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), (sums, gradients), expected)

    def total(projection):
        return cross_entropy(projection.logits(), targets, weights, smoothing).loss

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), gradients,
                 jax.grad(total)(projection))


@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize('rows, length, classes', [(128, 32, 8000), (16, 64, 32_000), (1, 1, 5), (3, 7, 10 ** 8)])
def test_tiles_cover_the_positions_and_are_small(rows, length, classes, devices):
    count, tile = tiles(rows, length, classes, devices)
    assert length <= count * tile < length + count
    assert tile == 1 or rows * tile * classes <= loss.TILE * devices * (1 + 1 / tile)


def test_the_logits_of_a_batch_are_never_in_memory(monkeypatch):
    monkeypatch.setattr(loss, 'TILE', 2 ** 21)
    states, table = jnp.ones((64, 128, 8)), jnp.ones((20_000, 8))
    targets, weights = jnp.ones((64, 128), jnp.int32), jnp.ones((64, 128))

    def total(states, table):
        return cross_entropy(Projection(states, table), targets, weights, 0.1).loss

    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(states, table).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * 4 * 64 * 128 * 20_000


# Smoothing over the tokens that can occur

ABSENT_TOKENS = (0, 4)


def with_absent_tokens(seed=9, shape=(3, 5)):
    """A projection of 11 tokens, two of which are absent, its targets and weights."""
    rng = np.random.default_rng(seed)
    bias = jnp.float32(rng.normal(size=11)).at[jnp.array(ABSENT_TOKENS)].set(ABSENT)
    projection = Projection(jnp.float32(rng.normal(size=(*shape, 6))), jnp.float32(rng.normal(size=(11, 6))), bias)
    targets = rng.choice(np.delete(np.arange(11), ABSENT_TOKENS), shape)
    return projection, jnp.int32(targets), jnp.float32(rng.integers(0, 3, shape))


def smoothed_in_float64(projection, targets, weights, smoothing):
    """Returns the loss and its gradients (states, table, bias), with the smoothed distribution spelled out."""
    states, table, bias = (np.asarray(array, np.float64) for array in jax.tree.leaves(projection))
    targets, weights, possible = np.asarray(targets), np.asarray(weights, np.float64), np.ones(11)
    possible[list(ABSENT_TOKENS)] = 0
    smoothed = (1 - smoothing) * np.eye(11)[targets] + smoothing * possible / possible.sum()
    logits = states @ table.T + bias
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    log_p = logits - logits.max(axis=-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
    grad_logits = weights[..., None] * (probabilities - smoothed)
    rows = grad_logits.reshape(-1, 11)
    gradients = grad_logits @ table, rows.T @ states.reshape(-1, 6), rows.sum(axis=0)
    return -(weights[..., None] * smoothed * log_p).sum(), gradients


FORMS = {
    'whole': lambda *arguments: jax.value_and_grad(
        lambda projection: cross_entropy(projection.logits(), *arguments[1:], ABSENT_TOKENS).loss)(arguments[0]),
    'tiled': lambda *arguments: jax.value_and_grad(
        lambda projection: cross_entropy(projection, *arguments[1:], ABSENT_TOKENS).loss)(arguments[0]),
    'evaluated': lambda *arguments: (cross_entropy(*arguments, ABSENT_TOKENS).loss, None),
    'one product': lambda *arguments: (lambda sums, gradients: (sums[0], gradients))(*loss._one_product(
        *arguments[:3], label_smoothing=arguments[3], absent=ABSENT_TOKENS))}


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('shape', [(3, 5), (4,)], ids=str)
@pytest.mark.parametrize('smoothing', [0.0, 0.1, 0.5])
def test_smoothing_spreads_over_the_tokens_that_can_occur(monkeypatch, form, shape, smoothing):
    monkeypatch.setattr(loss, 'TILE', 60)
    projection, targets, weights = with_absent_tokens(shape=shape)
    value, gradients = FORMS[form](projection, targets, weights, smoothing)
    expected, expected_gradients = smoothed_in_float64(projection, targets, weights, smoothing)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    if gradients is not None:
        for found, exact in zip(jax.tree.leaves(gradients), expected_gradients, strict=True):
            np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5)
        assert np.all(gradients.table[jnp.array(ABSENT_TOKENS)] == 0)


@pytest.mark.parametrize('tiled', [False, True])
def test_the_loss_of_1000_tokens_with_2_absent(tiled):
    bias = jnp.zeros(1000).at[:2].set(ABSENT).at[2].set(14.0)
    projection = Projection(jnp.ones((1, 3, 4)), jnp.zeros((1000, 4)), bias)
    sums = cross_entropy(projection if tiled else projection.logits(), jnp.array([[3, 4, 5]]), jnp.ones((1, 3)), 0.1,
                         absent=(0, 1))
    # All but the absent tokens and one have a logit of 0, and that one has 14.
    expected = np.log(np.exp(14) + 997) - 0.1 * 14 / 998
    assert float(sums.loss) / 3 == pytest.approx(expected, rel=1e-5)


# Accuracy

@pytest.mark.parametrize('form', ['whole', 'tiled', 'gradient', 'one product'])
def test_accuracy_is_the_rate_at_which_the_target_is_the_argmax(form):
    rng = np.random.default_rng(10)  # logits are small whole numbers, so many are equal
    states, table = jnp.float32(rng.integers(-1, 2, (8, 40, 2))), jnp.float32(rng.integers(-1, 2, (9, 2)))
    targets, weights = jnp.int32(rng.integers(0, 9, (8, 40))), jnp.float32(rng.integers(0, 2, (8, 40)))
    projection = Projection(states, table)
    if form == 'one product':
        accuracy = loss._one_product(projection, targets, weights, label_smoothing=0.1)[0][2]
    elif form == 'gradient':
        accuracy = jax.grad(lambda projection: (lambda sums: (sums.loss, sums.others['accuracy']))(
            cross_entropy(projection, targets, weights, 0.1)), has_aux=True)(projection)[1]
    else:
        outputs = projection if form == 'tiled' else projection.logits()
        accuracy = cross_entropy(outputs, targets, weights, 0.1).others['accuracy']
    logits = np.asarray(states, np.float64) @ np.asarray(table, np.float64).T
    chosen = logits.argmax(axis=-1)
    assert accuracy == (np.asarray(weights) * (chosen == np.asarray(targets))).sum()
    tied = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0] >= logits.max(axis=-1)
    assert (tied * np.asarray(weights)).sum() > accuracy  # targets that equal the argmax's logit, behind it


# What a tiled loss has no gradient of

def test_a_gradient_that_a_tiled_loss_lacks_raises():
    projection, targets, weights = with_absent_tokens()
    with pytest.raises(NotImplementedError, match=r"not of 'nll'. Use cross_entropy\(projection.logits\(\)"):
        jax.grad(lambda projection: cross_entropy(projection, targets, weights, 0.1).others['nll'])(projection)
    with pytest.raises(NotImplementedError, match='no gradient with respect to its weights'):
        jax.jit(jax.grad(lambda weights: cross_entropy(projection, targets, weights, 0.1).loss))(weights)
    gradient = jax.grad(lambda weights: cross_entropy(projection.logits(), targets, weights, 0.1).loss)(weights)
    assert np.all(gradient > 0)  # the whole logits have it


def test_the_accuracy_of_a_tiled_loss_may_be_in_what_is_differentiated():
    projection, targets, weights = with_absent_tokens()

    def total(projection):
        sums = cross_entropy(projection, targets, weights, 0.1)
        return sums.loss + sums.others['accuracy']

    expected = jax.grad(lambda projection: cross_entropy(projection, targets, weights, 0.1).loss)(projection)
    found = jax.jit(jax.grad(total))(projection)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


# JAX_ENABLE_X64

@pytest.mark.parametrize('form', ['scan', 'one product'])
@pytest.mark.parametrize('biased', [False, True])
def test_sums_are_of_float32_with_jax_enable_x64(form, biased):
    projection, targets, weights = with_absent_tokens()
    projection = projection if biased else projection.replace(bias=None)
    with jax.enable_x64(True):
        form = functools.partial(loss._scan, gradients=True) if form == 'scan' else loss._one_product
        sums, gradients = jax.jit(functools.partial(form, label_smoothing=0.1))(projection, targets, weights)
    assert {leaf.dtype for leaf in jax.tree.leaves((sums, gradients))} == {np.dtype(np.float32)}


# config.train.matmul_precision

def test_at_bfloat16_the_whole_logits_and_their_gradients_are_of_rounded_factors():
    rng = np.random.default_rng(11)
    states, table, cotangent = (jnp.float32(rng.normal(size=size)) for size in ((3, 5, 64), (40, 64), (3, 5, 40)))
    with jax.default_matmul_precision('bfloat16'):
        logits, transposed = jax.vjp(lambda *factors: Projection(*factors).logits(), states, table)
        gradients = transposed(cotangent)
    states, table, cotangent = (np.asarray(array.astype(jnp.bfloat16), np.float64)
                                for array in (states, table, cotangent))
    expected = states @ table.T, cotangent @ table, np.einsum('btv,btd->vd', cotangent, states)
    for found, exact in zip((logits, *gradients), expected, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)
