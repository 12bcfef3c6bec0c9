import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from input_pipeline.batches import Batch
from model.blocks import BlockConfig
from model.evaluation import eval_step, evaluate, forward, supervised
from model.losses import Sums, cross_entropy, squared_error
from model.transformer import Transformer
from training.optimizer import make_optimizer, make_schedule
from training.step import TrainState, init_state, train_step

MODULE = Transformer(BlockConfig(d_model=16, d_ff=32, num_heads=2, dropout=0.0), num_layers=1,
                     source_vocab_size=20, target_vocab_size=20)


def ragged_batch(rows=8, length=6, seed=0) -> Batch:
    """Rows of very different lengths, so that a mean of means would be far off."""
    rng = np.random.default_rng(seed)
    lengths = np.array([1, 6, 2, 1, 6, 1, 3, 5])[:rows]
    tokens = rng.integers(4, 20, (rows, length)) * (np.arange(length) < lengths[:, None])
    tokens = jnp.asarray(tokens, jnp.int32)
    return {'inputs': {'source': tokens, 'target': tokens}, 'targets': tokens,
            'weights': (tokens != 0).astype(jnp.float32)}


def step(module=MODULE, optimizer=None, label_smoothing=0.0, **options):
    return functools.partial(train_step, apply=forward(module), objective=smoothed(label_smoothing),
                             optimizer=optimizer or optax.sgd(1.0), dropout_key=jax.random.key(1), **options)


def smoothed(label_smoothing):
    return supervised(functools.partial(cross_entropy, label_smoothing=label_smoothing))


@pytest.fixture(scope='module')
def state():
    return init_state(MODULE, optax.sgd(1.0), ragged_batch(), seed=0)


def assert_same_update(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), one.params, other.params)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('parts', [2, 8])
def test_accumulation_does_not_change_the_update(state, parts):
    whole, sums = jax.jit(step(label_smoothing=0.1))(state, ragged_batch())
    split, split_sums = jax.jit(step(label_smoothing=0.1, accumulate=parts))(state, ragged_batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums, split_sums)
    assert_same_update(whole, split)


@pytest.mark.slow
def test_products_of_bfloat16_change_the_update_by_their_rounding(state):
    exact, rounded, default = (jax.jit(step(precision=each))(state, ragged_batch())[0].params
                               for each in ('float32', 'bfloat16', 'default'))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), default, exact)  # on a CPU
    gradient, error = (jax.tree.map(jnp.subtract, exact, other) for other in (state.params, rounded))
    assert 2 ** -12 < optax.tree.norm(error) / optax.tree.norm(gradient) < 2 ** -6  # a rounding is at most 2 ** -9


@pytest.mark.slow  # tests/training/test_parallel.py trains by pmap
def test_an_axis_of_devices_does_not_change_the_update(state):
    # vmap with an axis name does what pmap does, on one device.
    whole, sums = jax.jit(step())(state, ragged_batch())
    shards = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), ragged_batch())
    split, split_sums = jax.jit(jax.vmap(step(axis_name='data'), (None, 0), axis_name='data'))(state, shards)
    np.testing.assert_allclose(split_sums.loss, np.full(4, sums.loss), rtol=1e-5)
    assert_same_update(whole, jax.tree.map(lambda x: x[3], split))


@pytest.mark.parametrize('options', [{'accumulate': 4}, {'axis_name': 'data'}], ids=str)
def test_every_part_of_a_batch_has_its_own_random_key(options):
    def objective(apply, params, batch, key):
        draw = jax.random.uniform(key)
        return Sums(params['w'] * draw, jnp.float32(1), {'draws': draw * batch['inputs'].reshape(4)})

    optimizer, params = optax.sgd(1.0), {'w': jnp.ones(())}
    run = functools.partial(train_step, apply=forward(MODULE), objective=objective, optimizer=optimizer,
                            dropout_key=jax.random.key(1), **options)
    if 'axis_name' in options:
        run = jax.vmap(run, (None, 0), axis_name='data')
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    _, sums = jax.jit(run)(state, {'inputs': jnp.eye(4)[:, None]})  # each part has one row of the identity
    assert np.all(sums.tokens == 4)
    draws = sums.others['draws'].reshape(-1, 4)[0]
    assert len(np.unique(draws)) == 4


def test_the_update_is_the_gradient_of_the_mean_over_real_tokens(state):
    batch = ragged_batch()
    new, sums = jax.jit(step(label_smoothing=0.1))(state, batch)

    def mean_loss(params):
        sums = eval_step(params, batch, apply=forward(MODULE), objective=smoothed(0.1))
        return sums.loss / sums.tokens

    gradient = jax.jit(jax.grad(mean_loss))(state.params)
    expected = jax.tree.map(lambda p, g: p - g, state.params, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), new.params, expected)
    assert sums.tokens == batch['weights'].sum()
    assert new.step == 1


@pytest.mark.slow
@pytest.mark.parametrize('options, bad', [
    ({}, np.nan), ({'accumulate': 4}, np.inf), ({'axis_name': 'data'}, np.nan)])
def test_an_update_that_is_not_finite_is_left_out(options, bad):
    """One bad weight in one part is enough; the step counts on."""
    optimizer = optax.adam(0.1)
    state = init_state(MODULE, optimizer, ragged_batch(), seed=0)
    good = ragged_batch()
    batch = good | {'weights': good['weights'].at[5, 0].set(bad)}
    run = step(optimizer=optimizer, **options)
    if options.get('axis_name'):
        shards = [jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), each) for each in (good, batch)]
        mapped = jax.jit(jax.vmap(run, (None, 0), axis_name='data'))
        (after_good, good_sums), (after, sums) = (
            jax.tree.map(lambda x: x[1], mapped(state, each)) for each in shards)
    else:
        (after_good, good_sums), (after, sums) = (jax.jit(run)(state, each) for each in (good, batch))
    assert good_sums.skipped == 0 and after_good.step == 1 and good_sums.tokens > 0
    assert sums.skipped == 1 and after.step == 1 and sums.tokens == sums.loss == 0
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))


def test_a_batch_without_targets_has_no_gradient(state):
    """The last window of a text may have no target. This is no error."""
    batch = ragged_batch()
    after, sums = jax.jit(step())(state, batch | {'weights': jnp.zeros_like(batch['weights'])})
    assert sums.skipped == sums.tokens == 0 and after.step == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


def test_counts_above_two_to_the_24_are_exact():
    """In float32, each of these additions would be rounded up."""
    batches = [Sums(jnp.float32(2.5), jnp.float32(count), {}) for count in (2 ** 24, *[255] * 1000)]
    sums = evaluate(lambda _, batch: batch, {}, batches)
    assert (sums.tokens, sums.loss) == (2 ** 24 + 255_000, 2.5 * 1001)


@pytest.mark.parametrize('weight_decay', [0.0, 0.3])
def test_left_out_steps_count_for_the_learning_rate_and_not_for_adam(weight_decay):
    """Against Adam and a cosine written out in float64: 10 steps, of which 3 and 7 are left out."""
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, inputs, deterministic=True):
            return inputs @ self.param('w', nn.initializers.ones, (2, 1))

    rng, steps, warmup, peak, final, beta1, beta2, eps = np.random.default_rng(0), 10, 3, 0.1, 0.1, 0.8, 0.9, 1e-3
    config = {'schedule': 'cosine', 'peak': peak, 'warmup': warmup, 'final': final, 'beta1': beta1, 'beta2': beta2,
              'eps': eps, 'clip': 0.0, 'weight_decay': weight_decay, 'ema': 0.0}
    optimizer = make_optimizer(config, make_schedule(config, d_model=1, steps=steps))
    batches = [{'inputs': {'inputs': rng.normal(size=(4, 2)).astype(np.float32)},
                'targets': rng.normal(size=(4, 1)).astype(np.float32), 'weights': np.ones(4, np.float32)}
               for _ in range(steps)]
    state = init_state(Scaled(), optimizer, jax.tree.map(jnp.asarray, batches[0]), seed=0)
    run = jax.jit(functools.partial(train_step, apply=forward(Scaled()), optimizer=optimizer,
                                    objective=supervised(squared_error),
                                    dropout_key=jax.random.key(0)))
    w, mean, square, updates = np.ones((2, 1)), np.zeros((2, 1)), np.zeros((2, 1)), 0
    for step, batch in enumerate(batches):
        left_out = step in (3, 7)
        state, sums = run(state, batch | {'weights': batch['weights'] * (np.nan if left_out else 1)})
        assert sums.skipped == left_out
        if left_out:
            continue
        inputs, targets = batch['inputs']['inputs'].astype(np.float64), batch['targets'].astype(np.float64)
        gradient = 2 * inputs.T @ (inputs @ w - targets) / 4
        updates += 1
        mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient ** 2
        direction = mean / (1 - beta1 ** updates) / (np.sqrt(square / (1 - beta2 ** updates)) + eps)
        falling = (1 + np.cos(np.pi * (step - warmup) / (steps - warmup))) / 2
        rate = peak * step / warmup if step < warmup else peak * (final + (1 - final) * falling)
        w = w - rate * (direction + weight_decay * w)
        np.testing.assert_allclose(state.params['w'], w, rtol=2e-5)
    assert state.step == steps and updates == 8


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_left_out():
    """The loss is finite: sqrt(0) = 0, whose slope is not."""
    class Root(nn.Module):
        @nn.compact
        def __call__(self, inputs, deterministic=True):
            return jnp.sqrt(self.param('w', nn.initializers.zeros, (1,)) * inputs)

    batch = {'inputs': {'inputs': jnp.ones((8, 1))}, 'targets': jnp.zeros((8, 1)), 'weights': jnp.ones(8)}
    state = init_state(Root(), optax.sgd(1.0), batch, seed=0)
    after, sums = train_step(state, batch, apply=forward(Root()), optimizer=optax.sgd(1.0),
                             dropout_key=jax.random.key(0), objective=supervised(squared_error))
    assert sums.skipped == 1 and after.params['w'] == 0 and after.step == 1


@pytest.mark.slow
def test_dropout_follows_the_step_and_nothing_else():
    module = Transformer(BlockConfig(d_model=16, d_ff=32, num_heads=2, dropout=0.5), 1, 20, 20)
    state = init_state(module, optax.sgd(0.0), ragged_batch(), seed=0)
    run = jax.jit(step(module=module, optimizer=optax.sgd(0.0)))
    after, first = run(state, ragged_batch())
    _, again = run(state, ragged_batch())
    _, second = run(after, ragged_batch())
    assert first.loss == again.loss
    assert first.loss != second.loss


def test_training_fits_one_batch(state):
    optimizer = optax.adam(1e-2)
    run = jax.jit(step(optimizer=optimizer))
    state = init_state(MODULE, optimizer, ragged_batch(), seed=0)
    losses = []
    for _ in range(60):
        state, sums = run(state, ragged_batch())
        losses.append(float(sums.loss / sums.tokens))
    assert losses[-1] < 0.1 < losses[0]
