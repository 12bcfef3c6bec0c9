"""The tiled cross-entropy: sums and gradients are those of `model.losses.cross_entropy` of the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import cross_entropy as tiled
from model.embedding import ABSENT, Projection
from model.losses import Sums, cross_entropy

ABSENT_TOKENS = (0, 4)


def random_inputs(shape=(3, 5), biased=True, seed=9):
    """Returns a projection of 11 tokens, targets and weights. With a bias, two tokens are absent."""
    rng = np.random.default_rng(seed)
    bias = jnp.float32(rng.normal(size=11)).at[jnp.array(ABSENT_TOKENS)].set(ABSENT) if biased else None
    projection = Projection(jnp.float32(rng.normal(size=(*shape, 6))), jnp.float32(rng.normal(size=(11, 6))), bias)
    targets = rng.choice(np.delete(np.arange(11), ABSENT_TOKENS), shape)
    return projection, jnp.int32(targets), jnp.float32(rng.integers(0, 3, shape))


def gradients(loss, projection, *arguments):
    """Returns the sums, and the gradient of three times the loss."""
    def total(projection):
        sums = loss(projection, *arguments)
        return 3 * sums.loss, sums
    (_, sums), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(projection)
    return sums, grads


def one_product(projection, targets, weights, *arguments):
    factors = projection.states, projection.table, projection.bias
    (loss, nll, accuracy), grads = tiled.one_product(factors, targets, weights, *arguments)
    sums = Sums(loss, weights.sum(), {'nll': nll, 'accuracy': accuracy})
    return sums, jax.tree.map(lambda grad: 3 * grad, Projection(*grads))


FORMS = {'training': functools.partial(gradients, cross_entropy), 'one product': one_product,
         'evaluation': lambda *arguments: (cross_entropy(*arguments), None)}


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('shape, tile, smoothing, biased', [
    ((3, 5), 60, 0.1, True), ((3, 5), 1, 0.0, False), ((4, 13), 200, 0.1, False), ((2, 3, 4), 10 ** 6, 0.1, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ((4,), 60, 0.5, True), ((2, 1), 200, 0.1, False), ((6,), 1, 0.0, True)))], ids=str)
def test_sums_and_gradients_are_those_of_the_logits(monkeypatch, form, shape, tile, smoothing, biased):
    monkeypatch.setattr(tiled, 'TILE', tile)
    arguments = *random_inputs(shape, biased), smoothing, ABSENT_TOKENS if biased else ()
    sums, grads = FORMS[form](*arguments)
    expected, expected_grads = gradients(lambda outputs, *rest: cross_entropy(outputs.logits(), *rest), *arguments)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, sums, expected)
    if grads is not None:
        jax.tree.map(close, grads, expected_grads)
        assert not biased or np.all(grads.table[jnp.array(ABSENT_TOKENS)] == 0)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('shape', [(0, 5), (3, 0)])
def test_the_sums_and_gradients_of_no_positions_are_0(form, shape):
    sums = FORMS[form](*random_inputs(shape), 0.1, ABSENT_TOKENS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(sums))


@pytest.mark.slow
@pytest.mark.parametrize('tile', [1 << 20, 1000])
def test_in_bfloat16_the_sums_are_of_float32(monkeypatch, tile):
    monkeypatch.setattr(tiled, 'TILE', tile)
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


@pytest.mark.fast_cases(3)
# With one device, the gradient of the table has another form. `one_product` is the form of accelerators.
@pytest.mark.parametrize('devices, form', [(1, 'scan_tiles'), (8, 'scan_tiles'), (1, 'one_product')])
@pytest.mark.parametrize('tile', [1 << 20, 1000])
def test_at_bfloat16_the_factors_are_rounded(monkeypatch, tile, devices, form):
    monkeypatch.setattr(tiled, 'scan_tiles', getattr(tiled, form))
    monkeypatch.setattr(tiled, 'TILE', tile)
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


@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize('rows, length, classes', [(128, 32, 8000), (16, 64, 32_000), (1, 1, 5), (3, 7, 10 ** 8),
                                                   (0, 7, 5), (3, 0, 5)])
def test_tiles_cover_the_positions_and_are_small(rows, length, classes, devices):
    count, tile = tiled.tiles(rows, length, classes, devices)
    assert length <= count * tile < length + count
    assert tile <= 1 or rows * tile * classes <= tiled.TILE * devices * (1 + 1 / tile)


def test_the_logits_of_a_batch_are_never_in_memory(monkeypatch):
    monkeypatch.setattr(tiled, 'TILE', 2 ** 21)
    states, table = jnp.ones((64, 128, 8)), jnp.ones((20_000, 8))
    targets, weights = jnp.ones((64, 128), jnp.int32), jnp.ones((64, 128))

    def total(states, table):
        return cross_entropy(Projection(states, table), targets, weights, 0.1).loss

    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(states, table).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * 4 * 64 * 128 * 20_000


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('form', ['whole', 'tiled', 'gradient', 'one product'])
def test_accuracy_is_the_rate_at_which_the_target_is_the_argmax(form):
    rng = np.random.default_rng(10)  # logits are small integers, so many are equal
    states, table = jnp.float32(rng.integers(-1, 2, (8, 40, 2))), jnp.float32(rng.integers(-1, 2, (9, 2)))
    targets, weights = jnp.int32(rng.integers(0, 9, (8, 40))), jnp.float32(rng.integers(0, 2, (8, 40)))
    projection = Projection(states, table)
    if form == 'one product':
        accuracy = tiled.one_product((states, table, None), targets, weights, 0.1)[0][2]
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
    assert (tied * np.asarray(weights)).sum() > accuracy  # targets whose logit equals the maximum, after the argmax


@pytest.mark.slow
def test_a_gradient_that_a_tiled_loss_lacks_raises():
    projection, targets, weights = random_inputs()
    with pytest.raises(NotImplementedError, match=r"but not of 'nll'. Use cross_entropy\(projection.logits\(\)"):
        jax.grad(lambda projection: cross_entropy(projection, targets, weights, 0.1).others['nll'])(projection)
    with pytest.raises(NotImplementedError, match='no gradient with respect to `weights`'):
        jax.jit(jax.grad(lambda weights: cross_entropy(projection, targets, weights, 0.1).loss))(weights)
    gradient = jax.grad(lambda weights: cross_entropy(projection.logits(), targets, weights, 0.1).loss)(weights)
    assert np.all(gradient > 0)  # logits have this gradient


@pytest.mark.slow
def test_the_accuracy_of_a_tiled_loss_may_be_in_what_is_differentiated():
    projection, targets, weights = random_inputs()

    def total(projection):
        sums = cross_entropy(projection, targets, weights, 0.1)
        return sums.loss + sums.others['accuracy']

    expected = jax.grad(lambda projection: cross_entropy(projection, targets, weights, 0.1).loss)(projection)
    found = jax.jit(jax.grad(total))(projection)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize('form', ['scan', 'one product'])
@pytest.mark.parametrize('biased', [False, True])
def test_sums_are_of_float32_with_jax_enable_x64(form, biased):
    projection, targets, weights = random_inputs(biased=biased)
    with jax.enable_x64(True):
        form = tiled.scan_tiles if form == 'scan' else tiled.one_product
        factors = projection.states, projection.table, projection.bias
        sums, gradients = jax.jit(functools.partial(form, label_smoothing=0.1))(factors, targets, weights)
    assert {leaf.dtype for leaf in jax.tree.leaves((sums, gradients))} == {np.dtype(np.float32)}
