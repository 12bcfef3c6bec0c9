"""Fine-tuning: frozen and trained parameters, adapters, and the parameters that come from another run."""

import contextlib
import json
import shutil
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import inference
from benchmarks.modes import ADAM, CROSS_ENTROPY, Mode, ragged_batch
from configs import base, fine_tune
from input_pipeline.data import PairData
from model.adapters import ADAPTERS, merged, without_adapters
from model.attention import MultiHeadAttention
from model.blocks import BlockConfig
from model.transformer import Transformer
from run_directory import initial
from run_directory.initial import split_choice
from runtime.errors import UserError
from tests.scripts import parameters, script, train_arguments
from tests.tiny_run import start, tiny_config
from training.compiled import Compiled
from training.optimizer import make_optimizer
from training.tuning import Tuning, make_tuning, matches

PARTS = ('*attention/query', '*attention/output', 'encoder*inner', '*embedding/embedding')
ONE = Mode()
LORA = Tuning(rank=3, alpha=6.0, adapted=PARTS)
FROZEN = Tuning(frozen=('encoder', '*norm', '*embedding'))


def compiled(tuning, mode=ONE, optimizer=ADAM):
    blocks = BlockConfig(d_model=16, d_ff=32, num_heads=8, d_k=4, d_v=4, dropout=0.0)
    return Compiled(Transformer(blocks, 1, 32, 32), tuning.restrict(optimizer), ragged_batch(0), parallel=vars(mode),
                    objective=CROSS_ENTROPY, dropout_key=jax.random.key(1), tuning=tuning,
                    devices=jax.devices()[:mode.devices])


def trained(steps, count=3):
    state = steps.init(seed=0)
    before = jax.device_get(state.params)
    for step in range(count):
        state, _ = steps.train(state, ragged_batch(step, steps.part))
    return flatten_dict(before, sep='/'), flatten_dict(jax.device_get(state.params), sep='/'), state


@pytest.mark.parametrize('name, patterns, expected', [
    ('encoder/layers_0/self_attention/query/kernel', ['encoder'], True),
    ('encoder/layers_0/self_attention/query/kernel', ['*attention/query'], True),
    ('encoder/layers_0/self_attention/query/kernel', ['decoder', '*_0'], True),
    ('encoder/layers_0/self_attention/query/kernel', ['query', 'enc', 'encoder/layers_1', 'Encoder'], False),
    ('encoder/layers_10/x', ['encoder/layers_1'], False), ('encoder/layers_1/x', ['encoder/layers_[01]'], True)])
def test_a_pattern_matches_a_name_or_a_part_of_it(name, patterns, expected):
    assert matches(name, patterns) == expected


def test_initial_adapters_are_random_and_change_nothing():
    boxed = {name: {'kernel': jnp.ones((400, 300))} for name in ('query', 'key')}
    adapters = Tuning(rank=8, alpha=2.0, adapted=('*',)).prepare(boxed, jax.random.key(0))[ADAPTERS]
    assert adapters['scale'] == 2 / 8
    factors = [nn.unbox(adapters['of'][name]['kernel']) for name in ('query', 'key')]
    for factor in factors:
        assert factor['a'].shape == (400, 8) and factor['b'].shape == (8, 300) and not factor['b'].any()
        assert factor['a'].std() == pytest.approx(400 ** -0.5, rel=0.1)
    assert abs(np.corrcoef(*(factor['a'].ravel() for factor in factors))[0, 1]) < 0.1


def test_adapters_are_float32_with_jax_enable_x64():
    with jax.enable_x64(True):
        params = Tuning(rank=2, adapted=('query',)).prepare({'query': {'kernel': jnp.ones((4, 3))}}, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params[ADAPTERS])} == {np.dtype(np.float32)}


@pytest.mark.slow
def test_frozen_parameters_keep_every_bit_and_the_others_learn_as_ever():
    """Weight decay and an average are no reason to change; Adam's first step treats each parameter by itself."""
    settings = base.get_config().optimizer.to_dict() | {'weight_decay': 0.5, 'ema': 0.9}
    optimizers = [make_optimizer(settings, optax.constant_schedule(1e-2), tuning) for tuning in (FROZEN, Tuning())]
    steps = [Compiled(Transformer(BlockConfig(d_model=16, d_ff=32, num_heads=2), 1, 32, 32), optimizer, ragged_batch(0),
                      parallel=vars(ONE), objective=CROSS_ENTROPY, dropout_key=jax.random.key(1), tuning=tuning,
                      devices=jax.devices()[:1])
             for optimizer, tuning in zip(optimizers, (FROZEN, Tuning()), strict=True)]
    before, after, state = trained(steps[0])
    frozen = {name for name in before if matches(name, FROZEN.frozen)}
    assert frozen and all(name.startswith('encoder') or 'norm' in name or 'embedding' in name for name in frozen)
    for name in before:
        assert np.array_equal(before[name], after[name]) == (name in frozen), name
    moments = [leaf.size for leaf in jax.tree.leaves(state.opt_state[0])]
    assert sum(moments) < 2.1 * sum(leaf.size for name, leaf in before.items() if name not in frozen)
    (_, one, _), (_, all_of_them, _) = (trained(each, count=1) for each in steps)
    for name in before.keys() - frozen:
        np.testing.assert_allclose(one[name], all_of_them[name], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('pattern', ['*/value', '*l[ue]*'])
def test_a_pattern_names_the_same_parameters_in_every_step(pattern):
    """Also where Flax's boxes, whose content is an attribute `value`, are around the parameters."""
    tuning = Tuning(frozen=(pattern,))
    before, after, _ = trained(compiled(tuning, optimizer=optax.adam(1e-2)), count=2)
    frozen = {name for name in before if matches(name, [pattern])}
    assert 0 < len(frozen) < len(before)
    for name in before:
        assert np.array_equal(before[name], after[name]) == (name in frozen), name


def test_merged_is_the_sum():
    rng = np.random.default_rng(0)
    matrix, a, b = rng.normal(size=(4, 5, 6)), rng.normal(size=(4, 5, 2)), rng.normal(size=(2, 6))
    other = rng.normal(size=3)
    found = merged({'one': {'output': {'kernel': matrix}, 'bias': other},
                    ADAPTERS: {'scale': np.float64(1.5), 'of': {'one': {'output': {'kernel': {'a': a, 'b': b}}}}}})
    expected = matrix + 1.5 * np.einsum('hkr,re->hke', a, b)
    np.testing.assert_allclose(found['one']['output']['kernel'], expected, rtol=1e-5, atol=1e-6)
    assert found['one']['bias'] is other and {*found} == {'one'}


def test_the_adapter_of_general_scores_has_low_rank_in_each_head():
    module, x = MultiHeadAttention(num_heads=3, d_model=6, d_k=5, d_v=5, score='general'), jnp.ones((1, 2, 6))
    boxed = jax.jit(module.init)(jax.random.key(0), x, x)['params']
    params = nn.unbox(Tuning(rank=2, alpha=2.0, adapted=('score_weight',)).prepare(boxed, jax.random.key(1)))
    a, b = (params[ADAPTERS]['of']['score_weight'][factor] for factor in 'ab')
    params[ADAPTERS]['of']['score_weight']['b'] = jax.random.normal(jax.random.key(2), b.shape)
    update = merged(params)['score_weight'] - params['score_weight']
    assert np.linalg.matrix_rank(update, rtol=1e-4).tolist() == [2, 2, 2]
    assert a.size + b.size < update.size


@pytest.mark.slow
def test_adapters_begin_as_nothing_and_are_all_that_is_trained():
    steps = compiled(LORA)
    state = steps.init(seed=0)
    fresh = compiled(Tuning()).init(seed=0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(merged(state.params)), jax.device_get(fresh.params))
    before, after, _ = trained(steps)
    adapted = {name.removeprefix(f'{ADAPTERS}/of/')[:-2] for name in before if name.startswith(f'{ADAPTERS}/of/')}
    assert adapted == {name for name, leaf in before.items() if matches(name, PARTS) and leaf.ndim > 1
                       and not name.startswith(ADAPTERS)} and len(adapted) == 3 * 2 + 1 + 1
    for name in before:
        changes = name.startswith(f'{ADAPTERS}/of/')
        assert np.array_equal(before[name], after[name]) != changes, name
    for name in adapted:
        shape, a, b = before[name].shape, *(after[f'{ADAPTERS}/of/{name}/{factor}'] for factor in 'ab')
        assert (*a.shape[:-1], *b.shape[1:]) == shape and a.shape[-1] == len(b) == 3
        delta = np.tensordot(a, b, 1).reshape(int(np.prod(a.shape[:-1])), -1)
        assert np.linalg.matrix_rank(delta, tol=1e-6) <= 3


@pytest.mark.slow
def test_the_gradient_of_adapters_is_that_of_the_matrix_through_its_factors():
    """dL/dA = scale dL/dW B^T and dL/dB = scale A^T dL/dW, of a step of plain gradient descent."""
    lora, plain = (compiled(each, optimizer=optax.sgd(1.0)) for each in (LORA, Tuning()))
    state = lora.init(seed=0)
    name = 'decoder/layers_0/self_attention/output/kernel'
    state = state.replace(params=jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size).reshape(
        leaf.shape)).astype(leaf.dtype), state.params))
    here = jax.device_get(state.params)
    whole = plain.init(seed=0).replace(params=jax.tree.map(jnp.array, merged(here)))
    batch = ragged_batch(0)
    moved, _ = lora.train(state, batch)
    stepped, _ = plain.train(whole, batch)
    gradient = flatten_dict(jax.device_get(merged(here)), sep='/')[name] - flatten_dict(
        jax.device_get(stepped.params), sep='/')[name]
    before, after = (flatten_dict(jax.device_get(each), sep='/') for each in (here, moved.params))
    a, b = (f'{ADAPTERS}/of/{name}/{factor}' for factor in 'ab')
    scale = before[f'{ADAPTERS}/scale']
    np.testing.assert_allclose(before[a] - after[a], scale * np.einsum('hke,re->hkr', gradient, before[b]), atol=1e-5)
    np.testing.assert_allclose(before[b] - after[b], scale * np.einsum('hkr,hke->re', before[a], gradient), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('tuning', [LORA, FROZEN], ids=['LoRA', 'frozen'])
@pytest.mark.parametrize('mode', [Mode(data=2, fsdp=2, tensor=2), pytest.param(Mode(data=4, mode='pmap'),
                                                                              marks=pytest.mark.slow)], ids=str)
def test_a_mesh_learns_what_one_device_learns(mode, tuning):
    steps = [compiled(tuning, each) for each in (ONE, mode)]
    (_, one, first), (_, other, state) = map(trained, steps)
    for name in one:
        np.testing.assert_allclose(other[name], one[name], atol=2e-5, err_msg=name)
    losses = [float(each.eval(each.gather(its.params), ragged_batch(9, each.part)).loss)
              for each, its in zip(steps, (first, state), strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert steps[1].gather(state.params).keys() == without_adapters(state.params).keys()


@pytest.mark.parametrize('tuning, message', [
    (Tuning(frozen=('encodr',)), "'encodr' matches no parameter of this model: did you mean encoder?"),
    (Tuning(frozen=('encoder', 'decoder', '*')), 'freezes all parameters'),
    (Tuning(rank=2, adapted=('*norm',)), "config.train.lora_parts: '*norm' matches no matrix"),
    (Tuning(rank=2), 'config.train.lora_parts is empty')])
def test_patterns_that_mean_nothing_are_refused(tuning, message):
    with pytest.raises(UserError) as error:
        compiled(tuning)
    assert message in str(error.value)


def test_of_the_default_patterns_of_adapters_one_must_match():
    """RNNsearch has no matrix with the name '*attention/value'. Each pattern that the user set must match."""
    config, key = base.get_config().train, jax.random.key(0)
    boxed = {'cross_attention': {name: {'kernel': jnp.ones((2, 3))} for name in ('query', 'key')}}
    config.lora_rank = 1
    adapters = make_tuning(config).prepare(boxed, key)[ADAPTERS]['of']
    assert adapters['cross_attention'].keys() == {'query'}
    with pytest.raises(UserError, match="lora_parts: '.attention/query' matches no matrix of this model"):
        make_tuning(config).prepare({'head': boxed['cross_attention']['key']}, key)
    config.lora_parts += ',*attention/key'
    with pytest.raises(UserError, match="lora_parts: '.attention/value' matches no matrix of this model"):
        make_tuning(config).prepare(boxed, key)


@pytest.mark.parametrize('tuning, message', [
    (Tuning(rank=2, adapted=('*query',)), 'rank=2: .* no adapter, .*: head/kernel. Add them to config.train.lora_p'),
    (Tuning(rank=2, adapted=('*query', 'head')), None),
    (Tuning(frozen=('head', '*query')), "frozen='head,.query': these matrices .*: head/kernel. Use patterns that do n"),
    (Tuning(frozen=('*query',)), None)])
def test_a_matrix_that_starts_with_random_values_must_be_trained(tuning, message):
    boxed = {'query': {'kernel': jnp.ones((2, 2))}, 'head': {'kernel': jnp.ones((2, 3)), 'bias': jnp.ones(3)}}
    taken = {name: initial.InitialValues(np.ones(leaf.shape), np.ones((), bool))
             for name, leaf in flatten_dict(boxed, sep='/').items()}
    tuning.check_initial(boxed, taken)
    some_rows = initial.InitialValues(np.ones((2, 3)), np.array([[True], [False]]))
    for values in {'query/kernel': taken['query/kernel']}, taken | {'head/kernel': some_rows}:
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            tuning.check_initial(boxed, values)


@pytest.mark.parametrize('option, value, message', [
    ('lora_rank', 2, 'lora_rank=2: these matrices .* have no adapter, .* head/kernel'),
    ('frozen', '*query', "frozen='.query': these matrices .* must be trained: encoder/layers_0/self_attention/query")])
def test_random_matrices_of_a_run_without_init_from_must_be_trained(option, value, message, cache, tmp_path):
    with pytest.raises(UserError, match=rf'{message}.*\. Set config\.train\.init_from to a trained run$'):
        start(tmp_path / 'run', tiny_config(cache, **{f'train__{option}': value}))
    assert not (tmp_path / 'run' / 'config.json').exists()


def test_a_run_and_its_checkpoint_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('a', 'b:c'):
        (tmp_path / name).mkdir()
    for choice, expected in {'a': ('a', 'best'), 'a:latest': ('a', 'latest'), 'a:average:5': ('a', 'average:5'),
                             'b:c': ('b:c', 'best'), 'b:c:20': ('b:c', '20'), 'none:3': ('none:3', 'best')}.items():
        path, checkpoint = split_choice(choice)
        assert (path.name, checkpoint) == expected


# Runs

def tuned(workdir, run, data, cache, **changes):
    return train_arguments(workdir, data, cache, **{'train__init_from': run[0], 'seed': 3, **changes})


def checkpoint(workdir, choice='best'):
    return flatten_dict(jax.device_get(inference.load(workdir, choice).model.params), sep='/')


@pytest.mark.slow
def test_an_adapted_run_resumes_bit_for_bit_and_is_read_without_its_parent(run, data, cache, tmp_path):
    arguments = tuned(tmp_path / 'lora', run, data, cache, train__lora_rank=2, train__steps=12, eval__every=6)
    done = script(*arguments)
    assert done.returncode == 0 and b'initialised ' in done.stderr, done.stderr.decode()
    whole = parameters(tmp_path / 'lora')
    shutil.rmtree(tmp_path / 'lora' / 'checkpoints' / '12')
    resumed = script(*arguments)
    assert resumed.returncode == 0 and b'resuming from step 6' in resumed.stderr, resumed.stderr.decode()
    for one, other in zip(whole, parameters(tmp_path / 'lora'), strict=True):
        np.testing.assert_array_equal(one, other)
    theirs, found = checkpoint(run[0]), checkpoint(tmp_path / 'lora', 'latest')
    assert theirs.keys() == found.keys()
    for name in theirs:
        assert np.array_equal(theirs[name], found[name]) != matches(name, ['*attention/query', '*attention/value'])
    done = script('decode.py', f'--workdir={tmp_path}/lora', '--split=test', '--checkpoint=average:2')
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize('sharing', ['all', 'target'])
def test_another_vocabulary_keeps_the_rows_of_the_pieces_that_both_have(sharing, run, data, cache, tmp_path):
    folder = tmp_path / 'data'
    shutil.copytree(data, folder)
    for path in folder.iterdir():
        path.write_text(path.read_text().replace('o', 'u'))
    arguments = tuned(tmp_path / 'new', run, folder, cache, train__init_vocabulary=False, train__steps=1,
                      optimizer__warmup=1, optimizer__schedule='inverse_sqrt', optimizer__peak=1e-12,
                      model__share_embeddings=sharing)
    done = script(*arguments)
    assert done.returncode == 0 and b'initialised only in the rows that both runs have: ' in done.stderr, (
        done.stderr.decode())
    theirs, found = checkpoint(run[0]), checkpoint(tmp_path / 'new', 'latest')
    vocabularies = [[each.pieces(range(len(each))) for each in (inference.load(path).model.tokenizers['target'],)][0]
                    for path in (run[0], tmp_path / 'new')]
    assert vocabularies[0] != vocabularies[1]
    name = 'target_embedding/embedding'
    both = [(vocabularies[0].index(piece), place) for place, piece in enumerate(vocabularies[1])
            if piece in vocabularies[0]]
    assert 260 <= len(both) < len(vocabularies[1])
    for there, here in both:
        for table in (name,) if sharing == 'all' else (name, 'source_embedding/embedding'):
            np.testing.assert_allclose(found[table][here], theirs[name][there], atol=1e-9)
    fresh = [place for place, piece in enumerate(vocabularies[1]) if piece not in vocabularies[0]]
    assert np.abs(found[name][fresh]).min() > 0
    np.testing.assert_allclose(found['encoder/layers_0/self_attention/query/kernel'],
                               theirs['encoder/layers_0/self_attention/query/kernel'], atol=1e-9)


@pytest.mark.slow
def test_an_impossible_initial_run_is_reported(run, data, cache, tmp_path):
    for changes, message in (
            ({'train__init_from': tmp_path / 'none'}, 'none is not a run directory'),
            ({'train__init_from': f'{run[0]}:bset'}, "checkpoint='bset' does not exist"),
            ({'data__tokenizer__vocab_size': 290}, 'set config.train.init_vocabulary=False'),
            ({'model__d_model': 4, 'model__d_ff': 6}, 'the model of that run does not fit this model: '),
            ({'train__frozen': 'encoder', 'train__lora_rank': 2}, 'train.frozen'),
            ({'train__lora_alpha': 3.0}, 'train.lora_alpha=3.0: has no effect without train.lora_rank')):
        done = script(*tuned(tmp_path / 'run', run, data, cache, **changes))
        assert done.returncode == 2 and message in done.stderr.decode(), done.stderr.decode()
        assert 'Traceback' not in done.stderr.decode() and not (tmp_path / 'run' / 'config.json').exists()


@pytest.mark.slow
def test_the_recipe_fine_tunes_a_run(run, cache, tmp_path):
    config = fine_tune.get_config(str(run[0]))
    there = json.loads((run[0] / 'config.json').read_text())
    assert config.model.to_dict() == there['model'] and config.data.to_dict() == there['data']
    assert config.train.init_from == str(run[0])
    done = script('train.py', f'--config=configs/fine_tune.py:{run[0]}', '--config.train.steps=2',
                  '--config.optimizer.warmup=1', '--config.train.frozen=encoder', f'--workdir={tmp_path}/tuned',
                  f'--config.cache_dir={cache}')
    assert done.returncode == 0, done.stderr.decode()
    for where in ('', f':{tmp_path}/nowhere'):
        done = script('train.py', f'--config=configs/fine_tune.py{where}', f'--workdir={tmp_path}/bad')
        assert done.returncode == 2 and b'configs/fine_tune.py:RUN' in done.stderr and b'Traceback' not in done.stderr


def test_the_recipe_does_not_take_over_the_folder_of_compiled_programs(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps({'cache_dir': '/theirs'}))
    assert fine_tune.get_config(str(tmp_path)).cache_dir == ''


def test_learned_positions_are_taken_as_far_as_they_go():
    values, model = np.arange(12.0).reshape(4, 3), base.get_config().model
    for length in (2, 4, 6):
        old, new = (initial._positions('encoder_positions/table', rows, model, {}) for rows in (4, length))
        found = initial._by_name(values, 0, old, new)
        assert found.rows[:, 0].tolist() == [row < 4 for row in range(length)]
        np.testing.assert_array_equal(found.values[:4], values[:length])


@pytest.mark.parametrize('name', ['target_embedding', 'embedding'])
def test_a_shared_table_is_also_the_table_of_sources_unless_the_other_run_is_a_language_model(name, monkeypatch):
    saved = {name: {'embedding': np.ones((5, 2))}, 'encoder': {'scale': np.ones(2)}}
    opened = types.SimpleNamespace(parameters=lambda choice: (saved, [1]))
    for function, result in (('read_config', base.get_config()), ('Checkpoints', opened), ('read_sizes', {}),
                             ('load_tokenizers', {})):
        monkeypatch.setattr(initial, function, lambda *_, result=result, **__: result)
    config, data = base.get_config(), object.__new__(PairData)
    data.sizes, data.tokenizers = {}, {'source': None, 'target': None}
    config.train.init_from = 'run'
    table = {'embedding': np.zeros((5, 2))}
    boxed = {'source_embedding': table, 'target_embedding': table, 'encoder': {'scale': np.zeros(2)}}
    expected = {'target_embedding': {'source_embedding/embedding', 'target_embedding/embedding', 'encoder/scale'},
                'embedding': {'encoder/scale'}}
    assert initial.read_initial(config, data, boxed).keys() == expected[name]


def test_options_become_patterns():
    config = base.get_config().train
    assert make_tuning(config).frozen == () and make_tuning(config).rank == 0
    config.update(frozen=' encoder , *norm,', lora_rank=4)
    assert make_tuning(config)[:2] == (('encoder', '*norm'), 4)
