"""Checks of configs: all recipes are valid, and the message about a wrong value names the option."""

import dataclasses
import importlib
import math
import pathlib
import re

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import base, checks
from configs.allowed import Between, Fraction, OneOf, Switch, Text
from configs.options import BY_NAME, OPTIONS, choices
from configs.tasks import TASKS
from configs.versions import config_text
from model.build import check_fits
from runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted({path.stem for path in (ROOT / 'configs').glob('*.py')}
                 - {'__init__', 'allowed', 'base', 'checks', 'fine_tune', 'options', 'rules', 'tasks', 'versions'})


def changed(values):
    """The base config with other values, by their keys."""
    config = base.get_config()
    config.update_from_flattened_dict(values)
    return config


LANGUAGE = {'task': 'language_model', 'model.kind': 'language_model', 'eval.metric': 'loss'}
REGRESSION = {'task': 'regression', 'model.kind': 'patches', 'eval.metric': 'loss', 'data.name': 'pendulum'}


def leaves(config, path=''):
    """Key and value of everything in a config."""
    for name, value in config.items():
        yield from leaves(value, f'{path}{name}.') if isinstance(value, ConfigDict) else [(f'{path}{name}', value)]


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_is_possible(name):
    recipe = importlib.import_module(f'configs.{name}')
    config = recipe.get_config()
    if config.data.source == 'files' and not config.data.file:
        with pytest.raises(UserError, match=r"config\.data\.dir='': must name the folder of the files"):
            checks.check_config(config)
        config.data.dir = 'somewhere'
    checks.check_config(config)
    assert not checks.new_run_problems(config, [])
    assert set(dict(leaves(config))) == set(dict(leaves(base.get_config())))  # base.py has every option
    assert f'python train.py --config=configs/{name}.py' in recipe.__doc__


@pytest.mark.parametrize('name', ['rnnsearch_demo', 'rnnsearch_multi30k'])
def test_the_recipes_of_rnnsearch_are_possible_without_attention(name):
    config = importlib.import_module(f'configs.{name}').get_config()
    config.data.dir = 'somewhere' if config.data.source == 'files' else ''
    config.model.recurrent.attention = False
    checks.check_config(config)


def test_base_is_possible():
    checks.check_config(base.get_config())


@pytest.mark.parametrize('values, key', [
    ({'model.num_heads': 7}, 'model.num_heads'),
    ({'model.num_heads': 7, 'model.d_k': 64}, 'model.num_heads'),
    ({'model.num_heads': 0}, 'model.num_heads'),
    ({'model.d_model': 9, 'model.num_heads': 3}, 'model.d_model'),
    ({'model.d_k': -1}, 'model.d_k'),
    ({'model.dropout': -0.1}, 'model.dropout'),
    ({'model.dropout': 1.0}, 'model.dropout'),
    ({'model.dropout': float('nan')}, 'model.dropout'),
    ({'model.attention_dropout': 1.5}, 'model.attention_dropout'),
    ({'train.label_smoothing': 1.0}, 'train.label_smoothing'),
    ({'optimizer.beta2': 1.0}, 'optimizer.beta2'),
    ({'optimizer.eps': -1e-9}, 'optimizer.eps'),
    ({'optimizer.peak': float('nan')}, 'optimizer.peak'),
    ({'model.norm': 'batch'}, 'model.norm'),
    ({'model.activation': 'relu6'}, 'model.activation'),
    ({'model.position': 'sinusoid'}, 'model.position'),
    ({'model.dtype': 'float16'}, 'model.dtype'),
    ({'model.share_embeddings': 'source'}, 'model.share_embeddings'),
    ({'data.tokenizer.joint': False}, 'model.share_embeddings'),
    ({'data.tokenizer.vocab_size': 260}, 'data.tokenizer.vocab_size'),
    ({'data.tokenizer.kind': 'word'}, 'data.tokenizer.kind'),
    ({'data.tokenizer.normalization': 'NFKC'}, 'data.tokenizer.normalization'),
    ({'data.source': 'csv'}, 'data.source'),
    ({'data.source': 'files'}, 'data.dir'),
    (LANGUAGE | {'data.source': 'files', 'data.dir': 'a', 'data.file': 'b'}, 'data.file'),
    ({'data.source': 'tfds'}, 'data.name'),
    ({'data.max_length': 300, 'model.position': 'learned'}, 'data.max_length'),
    ({'optimizer.schedule': 'linear'}, 'optimizer.schedule'),
    ({'parallel.mode': 'shard_map'}, 'parallel.mode'),
    ({'parallel.data': 0}, 'parallel.data'),
    ({'parallel.tensor': -2}, 'parallel.tensor'),
    ({'parallel.fsdp': -1}, 'parallel.data'),
    ({'parallel.mode': 'pmap', 'parallel.fsdp': 2}, 'parallel.fsdp'),
    ({'optimizer.schedule': 'cosine', 'optimizer.warmup': 1, 'train.steps': 1}, 'train.steps'),
    ({'train.steps': 0}, 'train.steps'),
    ({'task': 'language_model', 'model.kind': 'language_model', 'data.source': 'files', 'data.file': 'a.txt',
      'data.validation_share': 0.0}, 'data.validation_share'),
    ({'task': 'parsing'}, 'task'),
    ({'task': 'language_model'}, 'task'),
    ({'model.kind': 'lstm'}, 'model.kind'),
    ({'model.score': 'cosine'}, 'model.score'),
    ({'model.d_k': 5, 'model.position': 'rotary'}, 'model.position'),
    ({'model.num_key_value_heads': 3}, 'model.num_key_value_heads'),
    ({'model.num_key_value_heads': 16}, 'model.num_key_value_heads'),
    ({'model.norm_epsilon': 0.0}, 'model.norm_epsilon'),
    ({'model.window': -1}, 'model.window'),
    (REGRESSION | {'model.window': 2}, 'model.window'),
    ({'model.attention_kernel': 'fused', 'model.attention_dropout': 0.1}, 'model.attention_kernel'),
    ({'model.attention_kernel': 'fused', 'model.d_v': 32}, 'model.attention_kernel'),
    ({'model.attention_kernel': 'fused', 'model.score': 'additive'}, 'model.attention_kernel'),
    ({'decode.temperature': 0.0}, 'decode.temperature'),
    ({'decode.top_p': 0.0}, 'decode.top_p'),
    ({'train.r_drop': 1.0, 'model.dropout': 0.0}, 'train.r_drop'),
    ({'eval.metric': 'rouge'}, 'eval.metric'),
    ({'eval.method': 'best'}, 'eval.method'),
    ({'decode.method': 'best'}, 'decode.method'),
    (REGRESSION | {'data.name': 'co2'}, 'data.name'),
])
def test_impossible_value_is_named(values, key):
    with pytest.raises(UserError, match=rf'^config\.{key}=.+: (must|needs) '):
        checks.check_config(changed(values))


def test_kinds_of_imported_tokenizers_are_accepted_but_not_offered():
    with pytest.raises(UserError, match="kind='word': must be one of bpe, unigram, char, byte$"):
        checks.check_config(changed({'data.tokenizer.kind': 'word'}))
    checks.check_config(changed({'data.tokenizer.kind': 'sentencepiece'}))


def test_all_impossible_values_are_reported_together_one_per_line():
    config = changed({'train.steps': 0, 'seed': -1, 'model.dropout': 1.5, 'model.num_heads': 7, 'data.context': 9})
    assert [line.partition('=')[0] for line in checks.config_problems(config)] == [
        'config.seed', 'config.model.dropout', 'config.data.context', 'config.train.steps']  # as in the table
    with pytest.raises(UserError) as error:
        checks.check_config(config)
    assert str(error.value).splitlines() == checks.config_problems(config)
    assert checks.config_problems(base.get_config()) == []


@pytest.mark.parametrize('shape, values, key', [
    ([8, 8, 1], {'model.patches.patch': 3}, 'model.patches.patch'),
    ([10, 2], {'model.patches.patch': 4}, 'model.patches.patch'),
    ([8, 8, 1], {'model.d_model': 66}, 'model.d_model'),
    ([12, 2], {'model.patches.patch': 4, 'model.patches.stem': 'convolutions'}, 'model.patches.stem'),
    ([6, 6, 1], {'model.patches.patch': 3, 'model.patches.stem': 'convolutions'}, 'model.patches.stem'),
])
def test_a_model_of_patches_that_does_not_fit_the_data_is_named(shape, values, key):
    config = changed(REGRESSION | {'model.position': 'sinusoidal'} | values)
    with pytest.raises(ValueError, match=rf'^{re.escape(key)}: '):
        check_fits(config.model, {'shape': shape})
    check_fits(changed(REGRESSION | {'model.d_model': 64, 'model.patches.patch': 2}).model, {'shape': shape})


def test_convolutions_fit_images_with_patches_of_4_x_4_pixels():
    config = changed(REGRESSION | {'model.patches.patch': 4, 'model.patches.stem': 'convolutions'})
    check_fits(config.model, {'shape': [8, 8, 1]})


@pytest.mark.parametrize('option, word, meant', [
    ('model.position', 'sinusoid', 'sinusoidal'), ('model.norm', 'Pre', 'pre'), ('eval.metric', 'blue', 'bleu'),
    ('task', 'clasification', 'classification')])
def test_misspelt_choice_gets_the_nearest(option, word, meant):
    with pytest.raises(UserError, match=f': did you mean {meant}\\?$'):
        checks.check_config(changed({option: word}))


@pytest.mark.parametrize('values', [
    {'model.num_heads': 7, 'model.d_k': 64, 'model.d_v': 64},
    {'model.d_model': 9, 'model.num_heads': 3, 'model.position': 'learned'},
    {'model.kind': 'rnnsearch', 'model.d_model': 9},
    {'data.tokenizer.joint': False, 'model.share_embeddings': 'target'},
    {'data.max_length': 256, 'model.position': 'learned'},
    {'data.max_length': 300},
    {'data.seed': 1},
    REGRESSION | {'data.seed': 1},
    {'data.tokenizer.kind': 'char'},
    {'data.tokenizer.kind': 'byte'},
    {'optimizer.schedule': 'cosine', 'optimizer.warmup': 500, 'train.steps': 500},
    {'model.dropout': 0.0, 'train.label_smoothing': 0.0, 'optimizer.clip': 0.0},
    {'model.dropout': 0.0, 'model.word_dropout': 0.1, 'train.r_drop': 1.0},
    {'model.dropout': 0.0, 'train.simcut': 1.0},
    {'train.simcut': 1.0, 'train.cutoff': 0.0},
    {'model.dropout': 1e-6},
    {'train.lora_rank': 1, 'train.lora_alpha': 0.0},
    {'optimizer.schedule': 'cosine', 'optimizer.final': 1.0},
    {'data.plain_spaces': 1.0},
    {'model.position': 'rotary', 'model.rotary_scaling': 'linear', 'model.rotary_factor': 2.0},
])
def test_unusual_value_is_possible(values):
    checks.check_config(changed(values))


@pytest.mark.parametrize('values, message', [
    ({'data.context': 9}, 'config.data.context=9: has no effect with task=translation. Set it to its default, 256'),
    ({'model.recurrent.d_hidden': 9}, 'config.model.recurrent.d_hidden=9: has no effect with model.kind=transformer'),
    ({'batch.rows': 9}, 'config.batch.rows=9: has no effect with task=translation'),
    ({'train.r_drop': 1.0, 'train.simcut': 1.0}, 'config.train.simcut=1.0: must not be combined with r_drop=1.0'),
    ({'train.cutoff': 0.1}, 'config.train.cutoff=0.1: has no effect without train.simcut'),
    ({'train.simcut': 1.0, 'train.cutoff': 0.0, 'model.dropout': 0.0},
     'config.train.simcut=1.0: needs train.cutoff or dropout, because without them both passes are equal. Set '
     'train.cutoff, or set simcut to 0 and cutoff to its default, 0.05'),
    ({'model.position': 'rotary', 'model.rotary_scaling': 'llama3'},
     "config.model.rotary_scaling='llama3': has no effect with rotary_factor=1. Set rotary_factor above 1"),
    ({'train.guided_alignment': 0.1, 'model.layer_dropout': 0.2},
     'config.train.guided_alignment=0.1: must not be combined with model.layer_dropout=0.2'),
    ({'model.kind': 'rnnsearch', 'model.layer_dropout': 0.1}, 'dropout=0.1: has no effect with model.kind=rnnsearch'),
    ({'task': 'classification', 'model.kind': 'patches', 'train.simcut': 1.0}, 'has no effect with model.kind=patches'),
    ({'model.kind': 'rnnsearch', 'model.recurrent.attention': False, 'model.recurrent.d_align': 9},
     'd_align=9: has no effect with model.recurrent.attention=False. Set it to its default, 0'),
    ({'model.kind': 'rnnsearch', 'model.norm': 'pre'}, "model.norm='pre': has no effect with model.kind=rnnsearch"),
    ({'data.dir': 'x'}, "config.data.dir='x': has no effect with data.source=builtin. Set it to its default, ''"),
    ({'data.splits.test': 'x'}, "data.splits.test='x': has no effect with data.source=builtin."),
    *((LANGUAGE | {'data.source': 'files', 'data.file': 'x.txt', f'data.splits.{split}': name},
       f'data.splits.{split}={name!r}: has no effect with data.file=x.txt. Set it to its default, {split!r}')
      for split, name in (('train', 'x'), ('validation', 'dev'), ('test', 'x'), ('test', 'a,b'))),
    (LANGUAGE | {'data.seed': 1}, 'config.data.seed=1: has no effect with task=language_model'),
    ({'optimizer.peak': 0.5}, 'config.optimizer.peak=0.5: has no effect with optimizer.schedule=paper'),
    (LANGUAGE | {'data.tokenizer.joint': False}, 'data.tokenizer.joint=False: has no effect with task=language_model'),
    (LANGUAGE | {'data.tokenizer.kind': 'byte', 'data.tokenizer.vocab_size': 300},
     'config.data.tokenizer.vocab_size=300: has no effect with data.tokenizer.kind=byte'),
    (LANGUAGE | {'eval.bleu_sentences': 9}, 'config.eval.bleu_sentences=9: has no effect with task=language_model'),
    (LANGUAGE | {'eval.method': 'beam'}, "config.eval.method='beam': has no effect with task=language_model"),
    (REGRESSION | {'train.label_smoothing': 0.2}, 'train.label_smoothing=0.2: has no effect with task=regression'),
    ({'model.dtype': 'bfloat16', 'train.matmul_precision': 'bfloat16'},
     "train.matmul_precision='bfloat16': has no effect with model.dtype=bfloat16. Set it to its default, 'default'"),
    (REGRESSION | {'decode.beam': 9}, 'config.decode.beam=9: has no effect with task=regression'),
    ({'train.teacher_checkpoint': 'latest'}, "config.train.teacher_checkpoint='latest': has no effect without "
     "train.teacher. Set it to its default, 'best', or set train.teacher"),
    ({'train.init_vocabulary': False}, 'config.train.init_vocabulary=False: has no effect without train.init_from. Set '
     'it to its default, True, or set train.init_from'),
    ({'train.lora_parts': 'head'}, "config.train.lora_parts='head': has no effect without train.lora_rank. Set it to "
     "its default, '*attention/query,*attention/value', or set train.lora_rank"),
    ({'train.teacher': 'runs/teacher', 'train.init_from': 'runs/demo', 'train.init_vocabulary': False},
     'config.train.init_vocabulary=False: must be True with a teacher'),
])
def test_an_option_without_a_meaning_is_refused(values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        checks.check_config(changed(values))


def test_a_source_of_files_needs_a_folder_whatever_its_name(monkeypatch):
    sources = dataclasses.replace(BY_NAME['data.source'], allowed=OneOf((*choices('data.source'), 'tables')))
    monkeypatch.setitem(checks.BY_NAME, 'data.source', sources)
    with pytest.raises(UserError, match='^config.data.dir=\'\': must name the folder of the files$'):
        checks.check_config(changed({'data.source': 'tables'}))


def test_a_text_for_a_language_model_may_be_a_folder_or_a_file():
    message = '^config.data.dir=\'\': must name the folder of the files, or set data.file to one text$'
    with pytest.raises(UserError, match=message):
        checks.check_config(changed(LANGUAGE | {'data.source': 'files'}))
    checks.check_config(changed(LANGUAGE | {'data.source': 'files', 'data.file': 'text.txt'}))


def test_what_decides_over_an_option_is_an_option_or_a_part_of_a_task_with_such_values():
    for option in OPTIONS:
        for decider, values in option.only.items():
            part = decider.removeprefix('task.')
            if part != decider:
                there = {getattr(task, part) for task in TASKS.values()}
            else:
                set_or_not = {Switch: (False, True), Text: ('', 'a name')}
                there = set_or_not.get(type(BY_NAME[decider].allowed)) or choices(decider)
            assert set(values) < set(there), (option.name, decider)


def test_an_option_without_effect_decides_over_no_other():
    values = {'data.source': 'files', 'data.dir': 'a', 'data.file': 'b.txt', 'data.splits.train': 'mine'}
    assert [line.partition('=')[0] for line in checks.config_problems(changed(values))] == ['config.data.file']
    values |= {'data.dir': '', 'data.validation_share': 0.0}
    assert [line.partition('=')[0] for line in checks.config_problems(changed(values))] == [
        'config.data.dir', 'config.data.file']


def test_what_a_task_needs_of_decoding_is_what_its_answerer_uses():
    for values in LANGUAGE | {'decode.batch_size': 9}, REGRESSION | {'decode.batch_size': 9}:
        checks.check_config(changed(values))


@pytest.mark.parametrize('key, value', [
    *((key, beyond) for key, option in BY_NAME.items() if isinstance(option.allowed, Between)
      for beyond in (option.allowed.least - 1, option.allowed.most + 1)),
    *((key, beyond) for key, value in leaves(base.get_config()) if isinstance(value, float)
      for beyond in (math.nan, math.inf, -math.inf)),
    *((key, beyond) for key, option in BY_NAME.items() if isinstance(option.allowed, Fraction)
      for beyond in (-0.01, 1.0)),
    *((key, '?') for key, option in BY_NAME.items() if isinstance(option.allowed, OneOf))])
def test_every_bound_holds(key, value):
    with pytest.raises(UserError, match=rf'^config\.{key}=.+: must '):
        checks.check_config(changed({key: value}))


def test_every_number_has_a_bound_and_every_word_its_choices():
    free = {'cache_dir', 'data.source_lang', 'data.target_lang', 'data.dir', 'data.name', 'data.file', 'data.feature',
            'data.splits.train', 'data.splits.validation', 'data.splits.test',
            # the run directory determines the allowed values
            'train.teacher', 'train.teacher_checkpoint', 'train.init_from',
            # a rule checks the value
            'train.guided_head',
            # the model determines the allowed values
            'train.frozen', 'train.lora_parts', 'train.edits', 'track.places',
            # any name is allowed
            'track.wandb', 'track.mlflow',
            # the task determines the allowed values
            'eval.metric'}
    assert {option.name for option in OPTIONS if isinstance(option.allowed, Text)} == free
    kinds = {Between: (int, float), Fraction: float, OneOf: str, Text: str, Switch: bool}
    for option in OPTIONS:
        assert isinstance(option.default, kinds[type(option.allowed)]), option.name
        assert not option.allowed.problem(option.default), option.name


@pytest.mark.parametrize('arguments, message', [
    ([], '--config is missing. Set it to a recipe, for example --config=configs/demo.py'),
    (['--config='], '--config is missing. Set it to a recipe'),
    (['--config=configs/dmeo.py'], '--config=configs/dmeo.py does not exist: did you mean configs/demo.py?'),
    (['--config=configs/demo'], '--config=configs/demo does not exist: did you mean configs/demo.py?'),
    (['--config=nothing_like_it.py'], 'does not exist. Use the file of a recipe, for example configs/demo.py'),
    ([f'--config={ROOT}/configs/multi30k.py'], "config.data.dir='': must name the folder of the files"),
])
def test_flag_without_a_recipe(monkeypatch, arguments, message):
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file('config', None, 'The recipe.', flag_values=values, sys_argv=[])
    values(['script', *arguments])
    monkeypatch.setattr(flags, 'FLAGS', values)
    with pytest.raises(UserError, match=re.escape(message)):
        checks.config_from(holder)


def test_flag_with_a_recipe(monkeypatch):
    values = flags.FlagValues()
    arguments = ['script', f'--config={ROOT}/configs/demo.py', '--config.model.num_layers=3']
    holder = config_flags.DEFINE_config_file('config', None, 'The recipe.', flag_values=values, sys_argv=arguments)
    values(arguments)
    monkeypatch.setattr(flags, 'FLAGS', values)
    assert checks.config_from(holder).model.num_layers == 3


@pytest.mark.parametrize('saved, override, message, fix', [
    (LANGUAGE | {'data.source': 'files', 'data.file': 'a'}, 'data.dir=b', "data.file='a': must not be combined with "
     'data.dir=b. Clear one option: --config.data.file= or --config.data.dir=', 'data.file='),
    (LANGUAGE | {'data.source': 'files', 'data.dir': 'a'}, 'data.file=b', "data.file='b': must not be combined with "
     'data.dir=a. Clear one option: --config.data.file= or --config.data.dir=', 'data.dir='),
    ({'data.plain_spaces': 0.0}, 'data.dir=b', 'data.plain_spaces=0.0: has no effect with data.source=files. Set it to '
     'its default, 0.5', 'data.plain_spaces=0.5')])
def test_a_fine_tuning_that_inherits_an_option_without_effect_is_fixed_by_the_advice_of_the_message(
        saved, override, message, fix, monkeypatch, tmp_path):
    def read(*overrides):
        values = flags.FlagValues()
        arguments = ['script', f'--config={ROOT}/configs/fine_tune.py:{tmp_path}', '--config.data.source=files',
                     *(f'--config.{override}' for override in overrides)]
        holder = config_flags.DEFINE_config_file('config', None, 'The recipe.', flag_values=values, sys_argv=arguments)
        values(arguments)
        monkeypatch.setattr(flags, 'FLAGS', values)
        return checks.config_from(holder)

    (tmp_path / 'config.json').write_text(config_text(changed(saved)))
    with pytest.raises(UserError, match=f'^config.{re.escape(message)}$'):
        read(override)
    assert read(override, fix).train.init_from == str(tmp_path)


def test_numbers_of_numpy_in_a_recipe_are_numbers_of_python(monkeypatch, tmp_path):
    (tmp_path / 'recipe.py').write_text('import numpy as np\nfrom configs import demo\n\n\ndef get_config():\n'
                                        '    config = demo.get_config()\n'
                                        '    config.optimizer.peak = np.sqrt(2) * 1e-3\n    return config\n')
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file('config', None, 'The recipe.', flag_values=values, sys_argv=[])
    values(['script', f'--config={tmp_path}/recipe.py'])
    monkeypatch.setattr(flags, 'FLAGS', values)
    config = checks.config_from(holder)
    assert type(config.optimizer.peak) is float and config.optimizer.peak == math.sqrt(2) * 1e-3
    assert config.is_locked and {type(value) for _, value in leaves(config)} == {bool, int, float, str}


def given(monkeypatch, recipe, *options):
    """Returns the flag --config of a command line with a recipe and options."""
    values = flags.FlagValues()
    arguments = ['script', f'--config={ROOT}/configs/{recipe}.py', *(f'--config.{option}' for option in options)]
    holder = config_flags.DEFINE_config_file('config', None, 'The recipe.', flag_values=values, sys_argv=arguments)
    values(arguments)
    monkeypatch.setattr(flags, 'FLAGS', values)
    return holder


@pytest.mark.parametrize('warmup, asked, resumes, wrong', [
    (60, True, False, True), (60, False, False, False), (49, True, False, False), (60, True, True, False)])
def test_a_warmup_that_is_too_long_is_an_error_only_if_the_user_set_it_for_a_new_run(
        monkeypatch, warmup, asked, resumes, wrong):
    holder = given(monkeypatch, 'digits_vit', 'train.steps=50', *([f'optimizer.warmup={warmup}'] if asked else []))
    if wrong:
        with pytest.raises(UserError, match='config.optimizer.warmup=60: must be below train.steps=50'):
            checks.config_from(holder, resumes=resumes)
    else:
        assert checks.config_from(holder, resumes=resumes).optimizer.warmup == (warmup if asked else 200)


@pytest.mark.parametrize('values, message', [
    ({'train.frozen': ' ,'}, "config.train.frozen=' ,': must contain a pattern of names of parameters"),
    (REGRESSION | {'data.name': 'digits'}, "config.data.name='digits': must be pendulum for task=regression"),
    (REGRESSION | {'data.name': 'dynamics'}, "config.data.name='dynamics': must be pendulum"),
    (REGRESSION | {'task': 'classification'}, "config.data.name='pendulum': must be digits or dynamics for task=")])
def test_only_a_run_that_exists_may_have_built_in_data_of_another_task_or_an_empty_pattern(values, message):
    config = changed(values)
    checks.check_config(config)
    assert [problem.startswith(message) for problem in checks.new_run_problems(config, ())] == [True]


@pytest.mark.parametrize('recipe, options, resumes, wrong', [
    ('llama_tiny', ['data.context=64', 'decode.method=beam'], False, True),
    ('llama_tiny', ['data.context=64', 'decode.method=mbr'], False, True), ('lm_1b', ['data.context=49'], False, True),
    ('llama_tiny', ['data.context=64', 'decode.method=beam'], True, False),
    ('llama_tiny', ['data.context=64', 'decode.method=beam', 'decode.extra_length=64'], False, False),
    ('llama_tiny', ['data.context=64', 'decode.method=greedy'], False, False)])
def test_beam_search_of_a_new_language_model_must_fit_into_a_window(monkeypatch, recipe, options, resumes, wrong):
    holder = given(monkeypatch, recipe, *options)
    if wrong:
        with pytest.raises(UserError, match=r'config\.decode\.extra_length=\d+: must be at most data\.context=\d+'):
            checks.config_from(holder, resumes=resumes)
    else:
        checks.config_from(holder, resumes=resumes)
