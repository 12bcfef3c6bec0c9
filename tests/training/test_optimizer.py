import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.optimizer import make_optimizer, make_schedule

SETTINGS = {'factor': 1.0, 'peak': 3e-3, 'warmup': 4000, 'beta1': 0.9, 'beta2': 0.98, 'eps': 1e-9, 'clip': 0.0,
            'final': 0.0, 'weight_decay': 0.0, 'ema': 0.0}


def schedule(name, **changes):
    return make_schedule(SETTINGS | {'schedule': name} | changes, d_model=512, steps=10_000)


@pytest.mark.parametrize('step', [1, 100, 4000, 4001, 100_000])
def test_the_papers_schedule(step):
    expected = 512 ** -0.5 * min(step ** -0.5, step * 4000 ** -1.5)
    assert float(schedule('paper')(step - 1)) == pytest.approx(expected, rel=1e-5)
    assert float(schedule('paper', factor=2.0)(step - 1)) == pytest.approx(2 * expected, rel=1e-5)


def test_inverse_sqrt_is_named_by_its_peak():
    rates = [float(schedule('inverse_sqrt')(step - 1)) for step in (2000, 4000, 16_000)]
    np.testing.assert_allclose(rates, [1.5e-3, 3e-3, 1.5e-3], rtol=1e-5)


def test_cosine_rises_to_the_peak_and_ends_at_zero():
    rates = [float(schedule('cosine')(count)) for count in (0, 4000, 7000, 10_000)]
    np.testing.assert_allclose(rates, [0, 3e-3, 1.5e-3, 0], atol=1e-9)


@pytest.mark.parametrize('steps, warmup, message', [
    (50, 5, 'the warm-up has 5 steps instead of config.optimizer.warmup=60, because the training has only'),
    (60, 6, 'train.steps=60'), (61, 60, ''), (5, 1, 'the warm-up has 1 steps')])
def test_a_warmup_of_a_cosine_that_is_too_long_is_a_tenth_of_the_steps(caplog, steps, warmup, message):
    short = make_schedule(SETTINGS | {'schedule': 'cosine', 'warmup': 60}, d_model=512, steps=steps)
    rates = [float(short(count)) for count in range(steps + 1)]
    np.testing.assert_allclose(rates[warmup], max(rates), rtol=1e-6)
    np.testing.assert_allclose([rates[warmup], rates[-1]], [3e-3, 0], atol=1e-9)
    assert message in caplog.text and bool(message) == bool(caplog.text)
    for name in 'paper', 'inverse_sqrt':
        caplog.clear()
        make_schedule(SETTINGS | {'schedule': name, 'warmup': 60}, d_model=512, steps=steps)
        assert not caplog.text


def test_clipping_bounds_the_gradient_that_adam_sees():
    params = {'w': jnp.zeros(4)}
    huge = {'w': jnp.full(4, 1e6)}
    clipped = make_optimizer(SETTINGS | {'clip': 1.0}, optax.constant_schedule(1.0))
    state = clipped.update(huge, clipped.init(params), params)[1]
    first_moment = optax.tree_utils.tree_get(state, 'mu')['w']
    np.testing.assert_allclose(jnp.linalg.norm(first_moment), 0.1, rtol=1e-5)  # (1 - beta1) * 1
    free = make_optimizer(SETTINGS, optax.constant_schedule(1.0))
    state = free.update(huge, free.init(params), params)[1]
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, 'mu')['w'], 1e5, rtol=1e-5)


def test_cosine_can_end_above_zero():
    assert float(schedule('cosine', final=0.1)(10_000)) == pytest.approx(3e-4, rel=1e-4)
    rates = [float(schedule('cosine', final=1.0)(count)) for count in (2000, 4000, 7000, 10_000)]
    np.testing.assert_allclose(rates, [1.5e-3, 3e-3, 3e-3, 3e-3], rtol=1e-5)


def test_weight_decay_shrinks_matrices_and_not_vectors():
    params = {'matrix': jnp.ones((2, 2)), 'vector': jnp.ones(2)}
    still = {'matrix': jnp.zeros((2, 2)), 'vector': jnp.zeros(2)}
    optimizer = make_optimizer(SETTINGS | {'weight_decay': 0.1}, optax.constant_schedule(0.5))
    updates, _ = optimizer.update(still, optimizer.init(params), params)
    np.testing.assert_allclose(updates['matrix'], -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates['vector'], 0)


def test_weight_decay_leaves_biases_that_are_one_array():
    # In the boxes of a fresh state, and out of them.
    boxed = {'experts': {name: nn.Partitioned(jnp.ones((3, 2)), names=('expert', 'embed'))
                         for name in ('inner_bias', 'bias', 'kernel')}}
    optimizer = make_optimizer(SETTINGS | {'weight_decay': 0.1}, optax.constant_schedule(0.5))
    state, params = nn.unbox(optimizer.init(boxed)), nn.unbox(boxed)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
    np.testing.assert_array_equal(updates['experts']['inner_bias'], 0)
    np.testing.assert_array_equal(updates['experts']['bias'], 0)
    np.testing.assert_allclose(updates['experts']['kernel'], -0.05, rtol=1e-6)
