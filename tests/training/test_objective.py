"""Objectives against their definitions in NumPy, and R-Drop on every way to compute a batch."""

import functools
import types
from unittest.mock import Mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.modes import Mode, compiled, train
from configs import base, digits_vit, pendulum, stdlib_lm
from input_pipeline.data import Data, open_data
from model.blocks import BlockConfig
from model.dropout import WordDropout
from model.evaluation import forward, supervised
from model.language_model import LanguageModel
from model.losses import cross_entropy, divergence, symmetric_divergence
from training.objective import OBJECTIVES, distilled, make_objective, of_mixed, r_drop, simcut
from training.step import init_state, train_step

SMOOTHED = functools.partial(cross_entropy, label_smoothing=0.1)
R_DROP = r_drop(SMOOTHED, alpha=5.0)
SIMCUT = simcut(SMOOTHED, alpha=3.0, word_dropout=0.4)


class Noisy(nn.Module):
    """Logits that dropout changes much; sows a loss of its own if asked."""
    sows: float = 0.0
    word_dropout: float = 0.0

    @nn.compact
    def __call__(self, inputs, deterministic=True):
        inputs = WordDropout(self.word_dropout)(inputs, deterministic)
        x = nn.Dropout(0.5)(nn.Dense(16)(inputs), deterministic=deterministic)
        if self.sows:
            self.sow('losses', 'balance', self.sows * jnp.mean(x ** 2))
        return nn.Dense(5)(x)


def batch_of(rows=12, seed=0):
    rng = np.random.default_rng(seed)
    return {'inputs': {'inputs': jnp.float32(rng.normal(size=(rows, 4)))},
            'targets': jnp.int32(rng.integers(0, 5, rows)), 'weights': jnp.float32(rng.integers(0, 2, rows))}


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_the_worked_value_of_the_divergence():
    found = symmetric_divergence(jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.9, 0.1])))
    assert float(found) == pytest.approx((0.51083 + 0.36806) / 2, abs=1e-5)
    one, other = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.9, 0.1]))
    assert float(divergence(one, other)) == pytest.approx(0.51083, abs=1e-5)
    assert float(divergence(other, one)) == pytest.approx(0.36806, abs=1e-5)


def noisy_pass(module, params, batch, key):
    """Returns the log-probabilities of a pass with dropout, and the loss that the module sows."""
    logits, sown = module.apply({'params': params}, batch['inputs']['inputs'], deterministic=False,
                                rngs={'dropout': key}, mutable=['losses'])
    return log_softmax(logits), float(sown['losses']['balance'][0])


def test_r_drop_is_its_definition():
    batch, module = batch_of(), Noisy(sows=3.0)
    params = module.init(jax.random.key(0), batch['inputs']['inputs'])['params']
    sums = R_DROP(forward(module), params, batch, jax.random.key(3))
    (log_p, sown_p), (log_q, sown_q) = (noisy_pass(module, params, batch, key)
                                        for key in jax.random.split(jax.random.key(3)))
    assert min(sown_p, sown_q) > 0.1
    assert np.abs(log_p - log_q).max() > 0.1
    smooth = 0.9 * np.eye(5)[batch['targets']] + 0.1 / 5
    cross = -(smooth * (log_p + log_q)).sum(axis=-1)
    apart = (np.exp(log_p) * (log_p - log_q) + np.exp(log_q) * (log_q - log_p)).sum(axis=-1) / 2
    weights = np.asarray(batch['weights'], np.float64)
    assert float(sums.loss) == pytest.approx(((cross + 5 * apart + sown_p + sown_q) * weights).sum(), rel=1e-5)
    assert float(sums.others['divergence']) == pytest.approx((apart * weights).sum(), rel=1e-5)
    assert sums.tokens == weights.sum()
    right = sum((each.argmax(axis=-1) == batch['targets']) @ weights for each in (log_p, log_q)) / 2
    assert float(sums.others['accuracy']) == pytest.approx(right)


def test_simcut_is_its_definition():
    batch, module = batch_of(), Noisy(sows=3.0)
    params = module.init(jax.random.key(0), batch['inputs']['inputs'])['params']
    sums = SIMCUT(forward(module), params, batch, jax.random.key(3))
    whole_key, cut_key = jax.random.split(jax.random.key(3))
    (log_p, sown), (log_q, _) = (noisy_pass(model, params, batch, key) for model, key in (
        (module, whole_key), (Noisy(sows=3.0, word_dropout=0.4), cut_key)))
    assert sown > 0.1
    smooth = 0.9 * np.eye(5)[batch['targets']] + 0.1 / 5
    cross = -(smooth * log_p).sum(axis=-1)
    apart = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    weights = np.asarray(batch['weights'], np.float64)
    assert (apart * weights).sum() > 0.1
    assert float(sums.loss) == pytest.approx(((cross + 3 * apart + sown) * weights).sum(), rel=1e-5)
    assert float(sums.others['divergence']) == pytest.approx((apart * weights).sum(), rel=1e-5)
    assert sums.tokens == weights.sum()
    assert float(sums.others['accuracy']) == pytest.approx((log_p.argmax(axis=-1) == batch['targets']) @ weights)


def test_a_cut_adds_to_the_words_that_a_model_drops_anyhow():
    """A token is there if neither drops it: (1 - 0.25) (1 - 0.2) = 0.6. The whole pass is that of the model."""
    config = base.get_config()
    config.update_from_flattened_dict({'train.simcut': 2.0, 'train.cutoff': 0.25, 'model.word_dropout': 0.2})
    seen = []

    def apply(params, inputs, key, **attributes):
        seen.append(attributes)
        return jnp.zeros((12, 5)), {}

    make_objective(config, open_data(digits_vit.get_config()))(apply, {}, batch_of(), jax.random.key(0))
    assert seen == [{}, {'word_dropout': pytest.approx(0.4)}]


@pytest.mark.slow
@pytest.mark.parametrize('objective', [R_DROP, SIMCUT], ids=['R-Drop', 'SimCut'])
def test_the_gradient_goes_through_both_passes(objective):
    """Beside finite differences of the definition, in one direction."""
    with jax.enable_x64(True):
        module = Noisy()
        batch = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, batch_of())
        params = jax.tree.map(lambda x: x.astype(jnp.float64), module.init(
            jax.random.key(0), batch['inputs']['inputs'])['params'])

        def loss(params):
            return objective(forward(module), params, batch, jax.random.key(3)).loss

        direction = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float64)).reshape(x.shape), params)
        ends = [loss(jax.tree.map(lambda p, d, by=by: p + by * d, params, direction)) for by in (1e-4, -1e-4)]
        slope = sum(map(jnp.vdot, jax.tree.leaves(jax.grad(loss)(params)), jax.tree.leaves(direction)))
    assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / 2e-4, rel=1e-5)


@pytest.mark.parametrize('variant', [R_DROP, SIMCUT], ids=['R-Drop', 'SimCut'])
def test_an_evaluation_is_one_pass_without_dropout(variant):
    batch, module = batch_of(), Noisy()
    params = module.init(jax.random.key(0), batch['inputs']['inputs'])['params']
    for one, other in zip(*(jax.tree.leaves(objective(forward(module), params, batch, None))
                            for objective in (variant, supervised(SMOOTHED))), strict=True):
        assert one == other


def test_what_modules_sow_is_part_of_the_loss():
    batch, module = batch_of(), Noisy(sows=3.0)
    params = module.init(jax.random.key(0), batch['inputs']['inputs'])['params']
    outputs, sown = module.apply({'params': params}, batch['inputs']['inputs'], mutable=['losses'])
    balance = float(sown['losses']['balance'][0])
    bare = SMOOTHED(outputs, batch['targets'], batch['weights'])
    found = supervised(SMOOTHED)(forward(module), params, batch, None)
    assert balance > 0.1
    assert float(found.loss) == pytest.approx(float(bare.loss) + balance * float(bare.tokens), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('mode, exact', [
    (Mode(data=2, fsdp=2, tensor=2, dropout=0.5), True),
    (Mode(data=4, mode='pmap'), True),
    (Mode(data=3, accumulate=2), True),
    (Mode(data=4, mode='pmap', dropout=0.5), False)])
def test_r_drop_on_every_mesh_is_that_of_one_device(mode, exact):
    """With pmap each device draws its own dropout, so there the two runs only resemble each other."""
    one = train(compiled(Mode(dropout=mode.dropout), objective=R_DROP))
    state, losses = train(compiled(mode, objective=R_DROP))
    if exact:
        np.testing.assert_allclose(losses, one[1], atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, one[0].params)
    else:
        np.testing.assert_allclose(losses, one[1], rtol=0.2)
    plain = train(compiled(Mode(dropout=mode.dropout)))[1]
    assert losses[0] > 1.5 * plain[0]  # two cross-entropies


def test_the_passes_of_a_step_differ_and_the_steps_too():
    module, batch = Noisy(), batch_of()
    state = init_state(module, optax.sgd(0.0), batch, seed=0)
    step = jax.jit(functools.partial(train_step, objective=R_DROP, apply=forward(module), optimizer=optax.sgd(0.0),
                                     dropout_key=jax.random.key(1)))
    after, first = step(state, batch)
    _, second = step(after, batch)
    assert first.others['divergence'] > 0.01 and first.others['divergence'] != second.others['divergence']


@pytest.mark.parametrize('recipe, options, measures', [
    (base, {}, {'nll', 'accuracy'}), (base, {'r_drop': 2.0}, {'nll', 'accuracy', 'divergence'}),
    (base, {'simcut': 2.0}, {'nll', 'accuracy', 'divergence'}),
    (digits_vit, {'r_drop': 1.0}, {'nll', 'accuracy', 'divergence'}), (pendulum, {}, {'absolute_error'})])
def test_a_config_chooses_its_objective(recipe, options, measures):
    config = recipe.get_config()
    config.train.update(options)
    batch = batch_of()
    if config.task == 'regression':
        batch['targets'] = jnp.zeros((12, 5))
    module = Noisy()
    params = module.init(jax.random.key(0), batch['inputs']['inputs'])['params']
    objective = make_objective(config, open_data(digits_vit.get_config()))  # on which these do not depend
    assert objective(forward(module), params, batch, jax.random.key(0)).others.keys() == measures


@pytest.mark.parametrize('options, expected', [
    ({'r_drop': 2.0}, lambda teacher: r_drop(SMOOTHED, alpha=2.0)),
    ({'simcut': 2.0, 'cutoff': 0.4}, lambda teacher: simcut(SMOOTHED, alpha=2.0, word_dropout=0.4)),
    ({'r_drop': 2.0, 'teacher': 'run', 'teacher_weight': 0.3}, lambda teacher: distilled(
        functools.partial(r_drop, alpha=2.0), SMOOTHED, 0.3, forward(Noisy()), teacher))],
    ids=['r_drop', 'simcut', 'teacher'])
def test_the_numbers_of_a_config_are_those_of_its_objective(options, expected, monkeypatch):
    batch, module, config = batch_of(40), Noisy(), base.get_config()
    params, teacher = (module.init(jax.random.key(seed), batch['inputs']['inputs'])['params'] for seed in (0, 1))
    monkeypatch.setattr('training.objective.read_teacher',
                        lambda *_: types.SimpleNamespace(module=module, params=teacher))
    config.train.update(options)
    found, wanted = (float(each(forward(module), params, batch, jax.random.key(3)).loss)
                     for each in (make_objective(config, Mock(Data, sizes={})), expected(teacher)))
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_config_with_mixup_takes_several_classes_of_an_example():
    batch, module, config = batch_of(), Noisy(), digits_vit.get_config()
    config.data.mixup = 0.2
    params = module.init(jax.random.key(0), batch['inputs']['inputs'])['params']
    batch |= {'targets': jnp.stack([batch['targets'], (batch['targets'] + 1) % 5], axis=1),
              'weights': jnp.tile(jnp.array([0.7, 0.3]), (12, 1))}
    found, wanted = (each(forward(module), params, batch, jax.random.key(3)) for each in (
        make_objective(config, None), supervised(of_mixed(SMOOTHED))))
    assert float(found.loss) == float(wanted.loss) and float(found.tokens) == pytest.approx(12)


def test_an_objective_may_depend_on_the_data(monkeypatch):
    config = digits_vit.get_config()
    monkeypatch.setitem(OBJECTIVES, 'cross_entropy', lambda config, data: supervised(functools.partial(
        cross_entropy, label_smoothing=1 / data.sizes['outputs'])))
    logits, batch = jnp.zeros((12, 10)).at[:, 0].set(1.0), batch_of()
    found = make_objective(config, open_data(config))(lambda *_: (logits, {}), {}, batch, None)
    expected = supervised(SMOOTHED)(lambda *_: (logits, {}), {}, batch, None)  # 0.1, as there are 10 digits
    assert float(found.loss) == float(expected.loss) > 1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('options', [{}, {'r_drop': 5.0}, {'simcut': 3.0}], ids=str)
def test_every_objective_smooths_over_the_tokens_that_can_occur(options):
    config = stdlib_lm.get_config()
    config.train.update(options | {'label_smoothing': 0.1})
    module = LanguageModel(BlockConfig(8, 16, 2, dropout=0.0), 1, vocab_size=9, absent=(0, 3))
    tokens = jnp.int32(np.random.default_rng(0).choice([1, 2, 4, 5, 6, 7, 8], (2, 6)))
    batch = {'inputs': {'tokens': tokens}, 'targets': tokens, 'weights': jnp.ones((2, 6))}
    params = nn.unbox(module.init(jax.random.key(0), tokens))['params']
    data = open_data(digits_vit.get_config())
    data.sizes = {'vocab_size': 9, 'absent': [0, 3]}
    sums = make_objective(config, data)(forward(module), params, batch, jax.random.key(1))

    logits = np.delete(np.asarray(module.apply({'params': params}, tokens), np.float64), [0, 3], axis=-1)
    targets = np.searchsorted([1, 2, 4, 5, 6, 7, 8], tokens)
    smoothed = 0.9 * np.eye(7)[targets] + 0.1 / 7  # of the 7 tokens that can occur
    cross = -(smoothed * log_softmax(logits)).sum()
    apart = 3.0 * float(sums.others['divergence']) if 'simcut' in options else 0.0
    assert float(sums.loss) == pytest.approx((2 if 'r_drop' in options else 1) * cross + apart, rel=1e-5)


@pytest.mark.slow
def test_the_loss_of_a_mixed_example_is_the_weighted_mean_of_the_losses_of_its_classes():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(3, 5)), np.array([[0, 1], [2, 2], [4, 3]])
    weights = np.array([[0.3, 0.7], [0.6, 0.4], [0.0, 0.0]])  # the last row is padding
    sums = of_mixed(SMOOTHED)(jnp.float32(logits), jnp.int32(targets), jnp.float32(weights))
    smoothed = 0.9 * np.eye(5)[targets] + 0.1 / 5
    mixed = (weights[..., None] * smoothed).sum(axis=1)  # one distribution for each example
    assert float(sums.loss) == pytest.approx(-np.sum(mixed * log_softmax(logits)), rel=1e-5)
    assert float(sums.tokens) == pytest.approx(2)
    whole = of_mixed(SMOOTHED)(jnp.float32(logits), jnp.int32(targets[:, 0]), jnp.ones(3))
    assert float(whole.loss) == float(SMOOTHED(jnp.float32(logits), jnp.int32(targets[:, 0]), jnp.ones(3)).loss)
