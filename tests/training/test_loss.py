import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.loss import cross_entropy, squared_error


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
