import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.embedding import ABSENT, Projection
from model.losses import cross_entropy, squared_error


def random_batch(seed=0, shape=(3, 5), classes=7):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*shape, classes)) * 3
    return logits, rng.integers(0, classes, shape), rng.integers(0, 2, shape).astype(float)


@pytest.mark.parametrize('absent', [(), (0, 4)])
@pytest.mark.parametrize('smoothing', [0.0, 0.1, 0.5])
def test_label_smoothing_equals_the_explicit_sum(smoothing, absent):
    logits, targets, weights = random_batch()
    possible = np.isin(np.arange(7), absent, invert=True)
    logits, targets = np.where(possible, logits, ABSENT), np.flatnonzero(possible)[targets % possible.sum()]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    q = (1 - smoothing) * np.eye(7)[targets] + smoothing * possible / possible.sum()
    expected = -(weights[..., None] * q * log_p).sum()
    sums = cross_entropy(jnp.float32(logits), jnp.int32(targets), jnp.float32(weights), smoothing, absent)
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


@pytest.mark.parametrize('in_tiles', [False, True])
def test_the_loss_of_1000_tokens_with_2_absent(in_tiles):
    bias = jnp.zeros(1000).at[:2].set(ABSENT).at[2].set(14.0)
    projection = Projection(jnp.ones((1, 3, 4)), jnp.zeros((1000, 4)), bias)
    sums = cross_entropy(projection if in_tiles else projection.logits(), jnp.array([[3, 4, 5]]), jnp.ones((1, 3)), 0.1,
                         absent=(0, 1))
    # One token has a logit of 14; all other tokens that can occur have 0.
    expected = np.log(np.exp(14) + 997) - 0.1 * 14 / 998
    assert float(sums.loss) / 3 == pytest.approx(expected, rel=1e-5)


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
