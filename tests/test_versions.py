"""Runs of earlier versions open, decode and resume.

tests/runs/first.tar.gz contains a run directory of the first version, stopped at step 6, the data of the run, and the
scores that this version computed. The model is a translator of 1+1 layers. Its task is to reverse the source.
"""

import dataclasses
import json
import tarfile
from pathlib import Path

import pytest

import inference
from analysis.compare import load_runs, recorded_sweep
from configs import base, versions
from configs.allowed import Fraction, Switch
from configs.options import BY_NAME, DEFAULTS, Option, flatten
from configs.versions import read_config_file
from inference.options import search_options
from run_directory.records import CONFIG, read_config
from run_directory.workdir import RunDirectory
from runtime.errors import UserError
from tests.tiny_run import start, steps

ROOT = Path(__file__).parent


@pytest.fixture
def first(tmp_path, cache):
    """The run directory, and a config as a user would ask for it again, with the data where it is now."""
    with tarfile.open(ROOT / 'runs' / 'first.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    config = read_config(tmp_path / 'run')
    config.update_from_flattened_dict({'data.dir': str(tmp_path / 'data'), 'cache_dir': str(cache)})
    return tmp_path / 'run', config


def edit(workdir, file=CONFIG, /, **changes):
    """Changes to config.json, or another file, as it is written; None leaves out."""
    config = json.loads((workdir / file).read_text())
    for path, value in changes.items():
        *sections, name = path.split('__')
        node = config
        for section in sections:
            node = node[section]
        if value is None:
            del node[name]
        else:
            node[name] = value
    (workdir / file).write_text(json.dumps(config))


def test_it_opens_and_scores_as_it_did(first):
    workdir, config = first
    before = json.loads((workdir / 'results' / 'test.json').read_text())
    run = inference.load(workdir)
    run.config.data.dir = config.data.dir
    results, table = run.model.score(run.data(), 'test', run.config, search_options(run.config, method='greedy'))
    assert run.checkpoint == before['checkpoint_steps'] == [6]
    assert results['perplexity'] == pytest.approx(before['perplexity'], rel=1e-5)
    assert len(table) == before['n'] == 8
    assert load_runs(workdir)[0].config == flatten(read_config(workdir))


@pytest.mark.slow
def test_it_resumes_and_is_of_today_then(first):
    workdir, config = first
    config.train.steps = 9
    start(workdir, config)
    assert steps(workdir) == [6, 9] or steps(workdir) == [9]
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines if 'train_loss' in line] == [2, 4, 6, 8, 9]
    assert json.loads((workdir / CONFIG).read_text())['version'] == versions.VERSION
    assert read_config(workdir) == config
    assert inference.load(workdir, 'latest').checkpoint == [9]


@pytest.fixture
def tomorrow(monkeypatch):
    """The options of a later version: one is new, one is new and had another effect before it, one has a new name."""
    version, smoothing = versions.VERSION + 1, BY_NAME['train.label_smoothing']
    for table in BY_NAME, DEFAULTS:
        monkeypatch.delitem(table, smoothing.name)
    for option in (dataclasses.replace(smoothing, name='train.smoothing'),
                   Option('model.gate', 0.5, 'of a later version', Fraction()),
                   Option('train.fold', True, 'of a later version', Switch())):
        monkeypatch.setitem(BY_NAME, option.name, option)
        monkeypatch.setitem(DEFAULTS, option.name, option.default)
    monkeypatch.setattr(versions, 'VERSION', version)
    monkeypatch.setitem(versions.RENAMED, version, {'train.label_smoothing': 'train.smoothing'})
    monkeypatch.setitem(versions.BEFORE, version, {'train.fold': False})
    return version


def test_options_that_come_and_go_orphan_no_run(tomorrow):
    values = {'model.d_model': 32, 'train.label_smoothing': 0.25}
    config = versions.upgraded(values, tomorrow - 1)
    assert config['model.d_model'] == 32 and config['train.smoothing'] == 0.25
    assert config['model.gate'] == 0.5 and config['train.fold'] is False
    assert config.keys() == flatten(base.get_config()).keys()
    assert versions.upgraded(values, 1) == config | {'data.plain_spaces': 0.0}
    now = versions.upgraded({'train.smoothing': 0.25}, tomorrow)
    assert now['train.fold'] is True and now['train.smoothing'] == 0.25
    with pytest.raises(UserError, match='there is no option train.label_smoothing: did you mean train.smoothing?'):
        versions.upgraded(values, tomorrow)


def test_options_without_effect_in_an_earlier_run_are_accepted():
    """On files the built-in corpus's option means nothing, and a share of nothing was once let pass."""
    assert versions.upgraded({}, 1)['data.plain_spaces'] == 0.0
    assert versions.upgraded({'data.source': 'files'}, 1)['data.plain_spaces'] == 0.5
    builtin = {'data.source': 'builtin', 'data.validation_share': 0.3}
    assert versions.upgraded(builtin, 1)['data.validation_share'] == 0.1
    assert versions.upgraded({'data.validation_share': 0.3}, versions.VERSION)['data.validation_share'] == 0.3
    assert versions.upgraded({'data.splits.train': 'mine'}, 2)['data.splits.train'] == 'train'  # refused since 3
    assert versions.upgraded({'data.splits.train': 'mine'}, versions.VERSION)['data.splits.train'] == 'mine'
    text = {'task': 'language_model', 'model.kind': 'language_model', 'data.source': 'files', 'data.file': 'a.txt'}
    names = {'data.splits.validation': 'dev', 'data.splits.test': 'a,b'}
    assert versions.upgraded(text | names, 3) == versions.upgraded(text, 4)  # refused since 4
    assert names.items() <= versions.upgraded(text | names, versions.VERSION).items()
    # data.file has no effect on a translation, so the names have an effect.
    pairs = {'data.source': 'files', 'data.dir': 'a'}
    assert versions.upgraded(pairs | names | {'data.file': 'b.txt'}, 3) == versions.upgraded(pairs | names, 3)
    single = {'model.dropout': 0.0, 'train.r_drop': 1.0}
    assert versions.upgraded(single, 4)['train.r_drop'] == 0.0  # refused since 5
    assert versions.upgraded(single | {'model.word_dropout': 0.1}, 4)['train.r_drop'] == 1.0
    assert versions.upgraded(single, versions.VERSION)['train.r_drop'] == 1.0
    fixed = {'model.kind': 'rnnsearch', 'model.recurrent.attention': False, 'model.recurrent.d_align': 9}
    assert versions.upgraded(fixed, 4)['model.recurrent.d_align'] == 0  # refused since 5
    assert versions.upgraded(fixed, versions.VERSION)['model.recurrent.d_align'] == 9
    rotary = {'model.position': 'rotary'}
    unscaled = rotary | {'model.rotary_scaling': 'llama3', 'model.rotary_original_length': 64}
    assert versions.upgraded(unscaled, 5) == versions.upgraded(rotary, 5)  # refused since 6
    assert versions.upgraded(unscaled | {'model.rotary_factor': 2.0}, 5)['model.rotary_scaling'] == 'llama3'
    uncut = {'model.dropout': 0.0, 'train.simcut': 3.0, 'train.cutoff': 0.0}
    assert versions.upgraded(uncut, 5) == versions.upgraded({'model.dropout': 0.0}, 5)  # refused since 6
    assert versions.upgraded(uncut | {'train.cutoff': 0.1}, 5)['train.simcut'] == 3.0


@pytest.mark.parametrize('values', [
    dict.fromkeys(('model.dropout', 'model.layer_dropout'), 1e-6), {'train.simcut': 1.0, 'train.cutoff': 1e-6},
    {'train.lora_rank': 2, 'train.lora_alpha': 0.0}, {'train.frozen': ' ,'},
    *({'task': 'regression', 'model.kind': 'patches', 'eval.metric': 'loss', 'data.name': name}
      for name in ('digits', 'dynamics')),
])
def test_runs_with_values_that_version_6_allowed_can_be_opened(values):
    config = base.get_config()
    config.update_from_flattened_dict(values)
    assert versions.read_saved({'version': 6, **config.to_dict()}) == (config, set())


def test_runs_of_earlier_recipes_of_rnnsearch_have_the_options_of_the_recipes_of_today():
    """The recipes set d_align to d_hidden, and now leave it at 0, which means the same."""
    widths = {'model.kind': 'rnnsearch', 'model.recurrent.d_hidden': 128, 'model.recurrent.d_align': 128}
    assert versions.upgraded(widths, 4)['model.recurrent.d_align'] == 0
    assert versions.upgraded(widths | {'model.recurrent.d_align': 64}, 4)['model.recurrent.d_align'] == 64
    assert versions.upgraded(widths, 5)['model.recurrent.d_align'] == 128  # was set by the user


def test_a_run_that_is_older_than_an_option_resumes_without_it(first, caplog, monkeypatch):
    """The recipe's value is for new runs; the user's own is refused as any other change."""
    workdir, config = first
    edit(workdir, model__tie_embeddings=None, seed=None)
    monkeypatch.setitem(versions.BEFORE, 2, {'seed': 7})
    caplog.set_level('INFO', logger='allyouneed')
    with RunDirectory(str(workdir), config):
        assert config.seed == 7
    assert 'config.seed=7 is used instead of 0, because the run began before this option existed' in caplog.text
    config.seed = 0
    with pytest.raises(UserError, match='seed: 7 in the run, 0 now'):
        RunDirectory(str(workdir), config, asked=['seed'])


def test_a_sweep_of_an_earlier_version_is_read_with_the_options_of_today(tmp_path, tomorrow):
    (tmp_path / 'sweep.json').write_text(json.dumps({
        'config': {'train.label_smoothing': 0.25}, 'runs': {'one': {'train.label_smoothing': 0.0}}}))
    sweep = recorded_sweep(tmp_path)
    assert sweep['config']['train.smoothing'] == 0.25 and sweep['config']['train.fold'] is False
    assert sweep['runs'] == {'one': {'train.smoothing': 0.0}}


def test_each_config_of_a_sweep_of_an_earlier_version_is_converted_as_a_whole(tmp_path):
    """Only the recipe has a factor of 1, with which the scaling has no effect."""
    (tmp_path / 'sweep.json').write_text(json.dumps({
        'version': 5, 'config': {'model.position': 'rotary', 'model.rotary_scaling': 'linear'},
        'runs': {f'rotary_factor={factor}': {'model.rotary_factor': factor} for factor in (1.0, 2.0, 4.0)}}))
    runs = load_runs(tmp_path)
    assert [run.config['model.rotary_factor'] for run in runs] == [1.0, 2.0, 4.0]
    assert [run.config['model.rotary_scaling'] for run in runs] == ['none', 'linear', 'linear']


@pytest.mark.parametrize('changes, message', [
    ({'version': 99}, 'the config has version 99, but this program supports versions 1 to '),
    ({'version': '2'}, "the config has version '2'"),
    ({'version': True}, 'the config has version True'),
    ({'model__d_modle': 8}, 'there is no option model.d_modle: did you mean model.d_model?'),
    ({'model__d_model': '8'}, "model.d_model='8': must be a whole number, such as 512"),
    ({'model__d_model': 8.0}, 'model.d_model=8.0: must be a whole number'),
    ({'model__dropout': True}, 'model.dropout=True: must be a number'),
    ({'model': 3}, 'model'),
    ({'model__num_heads': 3}, 'config.model.num_heads=3: must divide d_model=8'),
    ({'task': ['translation']}, 'task'),
])
def test_a_config_that_no_version_wrote_is_refused(first, changes, message):
    workdir, config = first
    edit(workdir, **changes)
    for open_it in (lambda: inference.load(workdir), lambda: RunDirectory(str(workdir), config),
                    lambda: load_runs(workdir)):
        with pytest.raises(UserError) as refused:
            open_it()
        assert str(workdir / CONFIG) in str(refused.value) and message in str(refused.value)


@pytest.mark.parametrize('section, changes, message', [
    ('config.json', {'model__d_model': 16}, 'in the checkpoint, '),
    ('config.json', {'model__num_layers': 2}, "none in the checkpoint"),
    ('config.json', {'model__share_embeddings': 'target'}, 'parameters do not fit'),
    ('data/sizes.json', {'source_vocab_size': 286}, 'source.model has 285 tokens'),
    ('data/sizes.json', {'source_vocab_size': None}, ''),
    ('data/sizes.json', {'source_vocab_size': '285'}, ''),
    ('data/sizes.json', {'source_vocab_size': [285]}, ''),
])
def test_files_that_do_not_make_the_model_of_the_checkpoint_are_refused(first, section, changes, message):
    workdir, _ = first
    edit(workdir, section, **changes)
    with pytest.raises(UserError) as refused:
        inference.load(workdir)
    assert str(workdir) in str(refused.value) and message in str(refused.value)


@pytest.mark.parametrize('content, folder, message', [
    ('{', 'run', 'Restore the file from a copy of the run$'),
    ('{', 'model', 'Restore the file from a copy of the folder. .* must have the field model_type$'),
    ('{"n_embd": 8}', 'run', 'there is no option n_embd. configs/options.py lists all options$'),
    ('{"n_embd": 8}', 'model', 'there is no option n_embd.* must have the field model_type$'),
    ('{"model_type": "gpt2"}', 'model', "a model of Hugging Face's library, not a run. .*tools.import_weights$")])
def test_the_advice_for_a_damaged_config_fits_the_folder(content, folder, message, tmp_path):
    (tmp_path / 'config.json').write_text(content)
    if folder == 'run':
        (tmp_path / 'data').mkdir()
    with pytest.raises(UserError, match=message):
        read_config_file(tmp_path / 'config.json')
