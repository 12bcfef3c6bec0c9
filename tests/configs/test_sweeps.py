"""Sweeps: the functions that build them, the names of runs, and a check that our sweeps are valid."""

import importlib
import pathlib
import re

import pytest

from analysis.sweeping import planned_runs
from configs import (
    base,
    checks,
    co2_forecast,
    demo,
    llama_tiny,
    lm_1b,
    multi30k,
    pendulum,
    rnnsearch_demo,
    shakespeare_char,
)
from configs.options import flatten
from configs.sweeps import differing, over, product, run_names, seeds, short_names, zipped
from runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
SWEEPS = sorted(path.stem for path in (ROOT / 'configs/sweeps').glob('[!_]*.py'))
OPTIONS = checks.flatten(base.get_config())


def test_the_words():
    heads, norms = over('model.num_heads', [1, 2]), over('model.norm', ['pre', 'post'])
    assert heads == [{'model.num_heads': 1}, {'model.num_heads': 2}]
    assert seeds(2) == [{'seed': 0}, {'seed': 1}]
    assert product(heads, norms) == [{'model.num_heads': 1, 'model.norm': 'pre'},
                                     {'model.num_heads': 1, 'model.norm': 'post'},
                                     {'model.num_heads': 2, 'model.norm': 'pre'},
                                     {'model.num_heads': 2, 'model.norm': 'post'}]
    assert zipped(heads, norms) == [{'model.num_heads': 1, 'model.norm': 'pre'},
                                    {'model.num_heads': 2, 'model.norm': 'post'}]
    assert product([{}] + heads, seeds(2)) == product([{}], seeds(2)) + product(heads, seeds(2))
    assert differing(product(heads, over('train.steps', [9]), seeds(2))) == ['model.num_heads', 'seed']


def test_sweeps_that_cannot_be_combined_are_refused():
    with pytest.raises(UserError, match='sets seed twice'):
        product(seeds(2), over('seed', [7]))
    with pytest.raises(UserError, match='have 2, 3 runs'):
        zipped(seeds(2), over('model.num_layers', [1, 2, 3]))


def test_short_names_are_never_another_options():
    short = short_names(OPTIONS)
    assert len(set(short.values())) == len(OPTIONS)
    assert (short['seed'], short['data.seed']) == ('seed', 'data.seed')
    assert (short['model.num_heads'], short['data.tokenizer.kind']) == ('num_heads', 'tokenizer.kind')


@pytest.mark.parametrize('sweep, names', [
    (product(over('model.num_heads', [2, 4]), seeds(2)),
     ['num_heads=2,seed=0', 'num_heads=2,seed=1', 'num_heads=4,seed=0', 'num_heads=4,seed=1']),
    (product(seeds(1), over('model.num_heads', [2, 4])), ['num_heads=2,seed=0', 'num_heads=4,seed=0']),
    ([{}, {'optimizer.peak': 3e-4}], ['base', 'peak=0.0003']),
    ([{'model.norm': 'pre', 'train.steps': 5}, {'model.norm': 'post', 'train.steps': 5}], ['norm=pre', 'norm=post']),
    ([{'model.norm': 'pre'}], ['norm=pre']),
])
def test_names_list_the_options_that_differ(sweep, names):
    assert run_names(sweep, OPTIONS) == names


def test_names_are_unique_and_fit_a_file_system():
    directories = ['/a/b', '/a b', 'ä?*', 'x' * 300, 'x' * 301, '../..']
    names = run_names(over('data.dir', directories), OPTIONS)
    assert len(set(names)) == len(directories)
    assert all(re.fullmatch(r'[\w.=,~+-]+', name, re.ASCII) and len(name) < 200 for name in names)
    assert names == run_names(over('data.dir', directories[::-1]), OPTIONS)[::-1]


def test_runs_keep_their_recorded_names_and_other_runs_do_not_get_these_names():
    first, *added = [{'model.num_heads': 4, 'model.norm': 'pre'}, {'model.num_heads': 4}, {'model.num_heads': 8}]
    names = run_names([*added, first], OPTIONS, {'num_heads=4': first})
    assert re.fullmatch('num_heads=4~.{8} num_heads=8 num_heads=4', ' '.join(names))
    recorded = dict(zip(names, [*added, first], strict=True))
    assert run_names([first, *added], OPTIONS, recorded) == [names[2], *names[:2]]


def every(sweep, config):
    """The configs of all runs of one of our sweeps, checked."""
    return every_of(importlib.import_module(f'configs.sweeps.{sweep}').get_sweep(config), config)


def every_of(sweep, config):
    """The configs of all runs of a sweep, checked."""
    for overrides in sweep:
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(overrides)
        checks.check_config(changed)
        yield changed


@pytest.mark.parametrize('name', SWEEPS)
@pytest.mark.parametrize('recipe', [demo, multi30k, shakespeare_char, llama_tiny, lm_1b, co2_forecast, pendulum])
def test_our_sweeps_are_possible(name, recipe):
    config = recipe.get_config()
    needed = {multi30k: {'dir': 'somewhere'}, shakespeare_char: {'file': 'somewhere'}, lm_1b: {'dir': 'somewhere'}}
    config.data.update(needed.get(recipe, {}))
    assert len({str(changed) for changed in every(name, config)}) > 1
    module = importlib.import_module(f'configs.sweeps.{name}')
    assert f'--sweep=configs/sweeps/{name}.py' in module.__doc__


def test_the_warmups_of_a_sweep_fit_a_short_training():
    config = demo.get_config()
    config.train.steps = 200
    runs = [*every('norm_and_warmup', config)]
    assert {run.optimizer.warmup for run in runs} == {1, 20}
    assert not any(map(checks.warmup_problems, runs))


def test_beam_search_of_each_run_of_a_language_model_must_fit_into_a_window():
    config, method = llama_tiny.get_config(), {'decode.method': 'beam'}
    config.data.context = 64
    with pytest.raises(UserError, match=r'decode.method.*extra_length=300: must be at most data\.context=64'):
        planned_runs('sweep.py', config, [method], {})
    assert planned_runs('sweep.py', config, [method | {'decode.extra_length': 64}], {})
    config.decode.method = 'beam'
    with pytest.raises(UserError, match=r"'seed': 1.*extra_length=300: must be at most data\.context=64"):
        planned_runs('sweep.py', config, [{'seed': 1}], {})
    runs = {'seed=1': {'seed': 1}}
    assert planned_runs('sweep.py', config, [{'seed': 1}], {}, runs) == runs  # a run that exists may keep this length
    with pytest.raises(UserError, match=r"'seed': 2.*extra_length=300: must be at most data\.context=64"):
        planned_runs('sweep.py', config, [{'seed': 1}, {'seed': 2}], {}, runs)


@pytest.mark.parametrize('option, value, message', [
    ('optimizer.clip', True, 'must be a number'), ('model.num_layers', 2.0, 'must be a whole number'),
    ('model.num_layers', '2', 'must be a whole number'), ('model.remat', 1, 'must be True or False')])
def test_a_value_of_a_wrong_type_is_refused(option, value, message):
    with pytest.raises(UserError, match=f'config.{option}={value!r}: {message}$'):
        planned_runs('sweep.py', demo.get_config(), [{option: value}], {})


def test_numbers_of_heads_that_do_not_divide_the_widths_are_not_in_table_3():
    config = demo.get_config()
    config.model.update(d_v=2)
    heads = [run['model.num_heads'] for run in importlib.import_module('configs.sweeps.table3').get_sweep(config)
             if 'model.num_heads' in run]
    assert heads == [1, 2, 8]  # not 16, because the width of all values is 4 * 2


def test_table_3_of_the_papers_model_is_the_papers():
    sweep = importlib.import_module('configs.sweeps.table3').get_sweep(base.get_config())
    heads = [(run['model.num_heads'], run['model.d_k'], run['model.d_v']) for run in sweep if 'model.num_heads' in run]
    assert heads == [(1, 512, 512), (4, 128, 128), (16, 32, 32), (32, 16, 16)]
    alone = {option: [run[option] for run in sweep if list(run) == [option]] for option in differing(sweep)}
    assert alone['model.d_k'] == [16, 32]
    assert alone['model.num_layers'] == [2, 4, 8]
    assert alone['model.d_ff'] == [1024, 4096]
    assert alone['model.dropout'] == [0.0, 0.2] and alone['train.label_smoothing'] == [0.0, 0.2]
    assert alone['model.position'] == ['learned']
    assert [run for run in sweep if 'model.d_model' in run] == [
        {'model.d_model': 256, 'model.d_k': 32, 'model.d_v': 32},
        {'model.d_model': 1024, 'model.d_k': 128, 'model.d_v': 128}]


def test_the_changes_of_the_llama_family_lead_from_the_papers_block_to_the_recipe():
    config = llama_tiny.get_config()
    runs = [flatten(each) for each in every('llama_block', config)][::3]
    first, *alone, last = ({option: run[option] for option in run if option.startswith('model.')} for run in runs)
    assert last == {option: value for option, value in flatten(config).items() if option.startswith('model.')}
    paper = {option: base.get_config().model[option] for option in
             ('norm', 'norm_function', 'feed_forward', 'feed_forward_bias', 'activation', 'position',
              'num_key_value_heads', 'attention_bias')}
    assert {option: first[f'model.{option}'] for option in paper} == paper
    changed = [{option for option in run if run[option] != first[option]} for run in alone]
    assert sum(map(len, changed)) == len(set.union(*changed)) and set.union(*changed) == {
        option for option in last if last[option] != first[option]}


def test_a_sweep_over_an_option_without_effect_is_refused():
    with pytest.raises(UserError, match='has no effect with model.kind=rnnsearch'):
        list(every('table3', rnnsearch_demo.get_config()))


def test_each_regulariser_is_used_by_itself_with_any_recipe():
    """The recipe without any, and one that has some: the same runs, but for the recipe's strengths."""
    sweep = importlib.import_module('configs.sweeps.regularisers')
    config = demo.get_config()
    config.update_from_flattened_dict({'train.simcut': 2.0, 'train.cutoff': 0.2, 'model.word_dropout': 0.3})
    strengths = {'train.r_drop': 5.0, 'train.simcut': 2.0, 'model.word_dropout': 0.3}
    for recipe, changed in (demo.get_config(), {}), (config, strengths):
        wanted = {option: changed.get(option, strength) for option, strength in sweep.STRENGTHS.items()}
        runs = [flatten(each) for each in every_of(sweep.get_sweep(recipe), recipe)]
        on = [{option: run[option] for option in wanted if run[option]} for run in runs[:len(runs) // 3]]
        together = {option: strength for option, strength in wanted.items() if option != 'train.simcut'}
        assert on == [{}, *({option: strength} for option, strength in wanted.items()), together]
        assert [run['seed'] for run in runs] == [seed for seed in range(3) for _ in on]
        assert all({**run, 'seed': 0} == {**runs[index % len(on)], 'seed': 0} for index, run in enumerate(runs))
        assert {run['train.steps'] * (2 if run['train.r_drop'] or run['train.simcut'] else 1) for run in runs} == {
            recipe.train.steps * (2 if changed else 1)}
    alone = [run for run in sweep.get_sweep(rnnsearch_demo.get_config()) if run['seed'] == 0]
    assert not any('model.layer_dropout' in run for run in alone) and {'model.word_dropout': 0.1, 'seed': 0} in alone
    for cutoff in 0.0, 0.2:  # without the recipe's dropout
        config.update_from_flattened_dict({'model.dropout': 0.0, 'train.cutoff': cutoff})
        runs = map(flatten, every_of(sweep.get_sweep(config), config))
        on = [{option for option in sweep.STRENGTHS if run[option]} for run in runs]
        assert {'train.r_drop'} not in on and ({'train.simcut'} in on) == (cutoff > 0)
