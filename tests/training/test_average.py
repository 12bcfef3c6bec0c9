"""The moving average of the parameters: its definition, its place in the state, and its use in evaluations."""

import contextlib
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import inference
from benchmarks.modes import Mode, compiled, train
from run_directory.checkpoints import open_checkpoints, parameters_to_use
from tests.tiny_run import outcome, start, tiny_config
from tests.training.test_step import MODULE, ragged_batch, step
from training.optimizer import AverageState, make_optimizer, make_schedule
from training.step import TrainState, init_state

SETTINGS = {'schedule': 'inverse_sqrt', 'peak': 0.05, 'warmup': 4, 'beta1': 0.9, 'beta2': 0.98, 'eps': 1e-9,
            'clip': 1.0, 'weight_decay': 0.0, 'ema': 0.9}


def optimizer_of(**changes):
    config = SETTINGS | changes
    return make_optimizer(config, make_schedule(config, d_model=1, steps=20))


def average_of(state):
    [found] = [each for each in jax.tree.leaves(state.opt_state, is_leaf=lambda each: isinstance(each, AverageState))
               if isinstance(each, AverageState)]
    return found


@pytest.mark.parametrize('decay', [0.5, 0.9, 0.9999])
def test_it_is_the_debiased_average_of_the_parameters_after_each_update(decay):
    """Against the sum with Adam's correction, in float64. The parameters are those without an average, bit for bit."""
    rng, plain, averaging = np.random.default_rng(0), optimizer_of(ema=0.0), optimizer_of(ema=decay)
    params = {'w': jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), 'b': jnp.asarray(rng.normal(size=2), jnp.float32)}
    beside, state, state_beside = params, averaging.init(params), plain.init(params)
    assert parameters_to_use(params, state_beside) is params
    jax.tree.map(np.testing.assert_array_equal, parameters_to_use(params, state), params)  # no update yet
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    for count in range(1, 13):
        gradient = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
        updates, state = averaging.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        updates, state_beside = plain.update(gradient, state_beside, beside)
        beside = optax.apply_updates(beside, updates)
        total = jax.tree.map(lambda sum, new: decay * sum + (1 - decay) * np.asarray(new, np.float64), total, params)
        expected = jax.tree.map(lambda sum, count=count: sum / (1 - decay ** count), total)
        jax.tree.map(lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7),
                     parameters_to_use(params, state), expected)
        jax.tree.map(np.testing.assert_array_equal, params, beside)
    apart = jax.tree.map(lambda mean, new: float(jnp.abs(mean - new).max()), parameters_to_use(params, state), params)
    assert max(jax.tree.leaves(apart)) > 0.01


def test_without_an_average_the_state_has_no_average():
    params = {'w': jnp.ones((2, 2))}
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.constant_schedule(0.1)))
    assert jax.tree.structure(optimizer_of(ema=0.0).init(params)) == jax.tree.structure(plain.init(params))


@pytest.mark.slow
@pytest.mark.parametrize('accumulate', [1, 4])
def test_an_update_that_is_left_out_leaves_it_too(accumulate):
    run = jax.jit(step(optimizer=optimizer_of(), accumulate=accumulate))
    good = ragged_batch()
    state, _ = run(init_state(MODULE, optimizer_of(), good, seed=0), good)
    after, sums = run(state, good | {'weights': good['weights'].at[5, 0].set(np.nan)})
    assert sums.skipped == 1 and after.step == 2 and average_of(after).updates == 1
    jax.tree.map(np.testing.assert_array_equal, average_of(after), average_of(state))


@pytest.mark.slow
@pytest.mark.parametrize('mode', [Mode(data=4, mode='pmap'), Mode(fsdp=4), Mode(data=2, fsdp=2, tensor=2),
                                  Mode(accumulate=4)], ids=str)
def test_it_is_the_same_on_every_mesh_and_lies_as_the_parameters_do(mode):
    # Adam divides a gradient by its size: a gradient that is only a rounding error would become a whole step with
    # eps 1e-9.
    (expected, _), (state, _) = (train(compiled(each, optimizer=optimizer_of(eps=1e-3))) for each in (Mode(), mode))
    assert average_of(state).updates == 4
    jax.tree.map(lambda found, wanted: np.testing.assert_allclose(found, wanted, atol=1e-5),
                 average_of(state).average, average_of(expected).average)
    there = jax.tree.map(lambda mean, leaf: mean.sharding == leaf.sharding, average_of(state).average, state.params)
    assert all(jax.tree.leaves(there))
    table = average_of(state).average['target_embedding']['embedding']
    whole = mode.fsdp * mode.tensor == 1
    assert (table.addressable_shards[0].data.shape == table.shape) == whole


def test_a_checkpoint_gives_the_average(tmp_path):
    params, optimizer = {'w': jnp.ones((2, 3))}, optimizer_of()
    with open_checkpoints(tmp_path, keep_last=3) as checkpoints:
        for number in (1, 2, 3):
            opt_state = optimizer.init(jax.tree.map(lambda leaf, number=number: leaf * 10 * number, params))
            checkpoints.save(number, TrainState(step=jnp.int32(number), params=params, opt_state=opt_state), {})
    with open_checkpoints(tmp_path, keep_last=3) as checkpoints:
        found = {choice: float(checkpoints.parameters(choice)[0]['w'][0, 0])
                 for choice in ('latest', 'best', '1', 'average:2', 'raw:latest', 'raw:average:2', 'raw:best')}
    assert found == {'latest': 30, 'best': 30, '1': 10, 'average:2': 25, 'raw:latest': 1, 'raw:average:2': 1,
                     'raw:best': 1}


@pytest.mark.slow
def test_a_run_evaluates_and_answers_with_it_and_resumes_bit_for_bit(tmp_path):
    config = tiny_config(tmp_path / 'cache', optimizer__ema=0.8, optimizer__peak=0.01, train__label_smoothing=0.0)
    start(tmp_path / 'whole', config)
    shutil.copytree(tmp_path / 'whole', tmp_path / 'killed')
    for step_number in (9, 12):
        shutil.rmtree(tmp_path / 'killed' / 'checkpoints' / str(step_number))
    start(tmp_path / 'killed', config)
    assert outcome(tmp_path / 'killed') == outcome(tmp_path / 'whole')

    run = inference.load(tmp_path / 'whole', 'latest')
    data: Any = run.data()
    with contextlib.closing(ocp.StandardCheckpointer()) as reader:
        state = jax.device_get(reader.restore(tmp_path / 'whole' / 'checkpoints' / '12' / 'state'))
    average, last = state['opt_state'][-1], state['params']
    assert average['updates'] == 12
    jax.tree.map(np.testing.assert_array_equal, run.model.params, average['average'])
    assert float(jnp.abs(run.model.params['head']['kernel'] - last['head']['kernel']).max()) > 1e-3
    logged = json.loads((tmp_path / 'whole' / 'metrics.jsonl').read_text().splitlines()[-1])
    scores, _ = run.model.score(data, 'validation', run.config, run.options)
    assert scores['loss'] == pytest.approx(logged['validation_loss'], rel=1e-5)
    run.model.params = last
    scores, _ = run.model.score(data, 'validation', run.config, run.options)
    assert scores['loss'] != pytest.approx(logged['validation_loss'], rel=1e-3)
