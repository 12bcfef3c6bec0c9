"""Runs of images and series: how they begin with the parameters of other runs, and what they keep when they resume."""

import json
import logging
import math
import re
from pathlib import Path
from unittest import mock

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import inference
from configs import demo, stdlib_lm
from input_pipeline.data import Data
from input_pipeline.tokenizer import CharTokenizer
from run_directory import initial
from run_directory.initial import read_initial
from run_directory.records import read_config
from runtime.errors import UserError
from tests.random_run import SIZES
from tests.scripts import script
from tests.tiny_run import start, steps, tiny_config


def write_series(folder, kind=np.uint8, classes=3, values=False, count=24):
    """Series of four different numbers."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ('train', 'validation', 'test'):
        targets = rng.normal(5, 2, (count, 2)) if values else np.arange(count) % classes
        np.savez(folder / f'{split}.npz', inputs=rng.integers(0, 4, (count, 8, 2)).astype(kind), targets=targets)
    return folder


def series_config(cache, folder, **changes):
    return tiny_config(cache, data__source='files', data__name='', data__dir=str(folder), data__crop=0, **{
        'batch__rows': 24, 'train__steps': 2, 'eval__every': 2, 'checkpoint__every': 2, 'optimizer__warmup': 1,
        'model__position': 'sinusoidal'} | changes)


def preprocessing(workdir):
    return json.loads((workdir / 'data' / 'sizes.json').read_text())['preprocessing']


def params(workdir):
    return flatten_dict(jax.device_get(inference.load(workdir, 'latest').model.params), sep='/')


@pytest.fixture(scope='module')
def three(tmp_path_factory, cache):
    """A run on three classes of series."""
    folder = tmp_path_factory.mktemp('three')
    start(folder / 'run', series_config(cache, write_series(folder / 'data')))
    return folder / 'run'


@pytest.mark.slow
def test_a_run_on_series_of_bytes_has_the_preprocessing_of_one_on_series_of_other_numbers(three, cache, tmp_path):
    start(tmp_path / 'run', series_config(cache, write_series(tmp_path / 'data', np.int16)))
    assert preprocessing(tmp_path / 'run') == preprocessing(three)
    assert all(mean == pytest.approx(1.5, abs=0.2) for mean in preprocessing(three)['input_mean'])
    for name, leaf in params(three).items():
        np.testing.assert_array_equal(leaf, params(tmp_path / 'run')[name], err_msg=name)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_preprocessing(cache, tmp_path):
    """As a run of an earlier version, which scaled series of bytes as images."""
    config = series_config(cache, write_series(tmp_path / 'data'))
    start(tmp_path / 'run', config)
    sizes = json.loads((tmp_path / 'run' / 'data' / 'sizes.json').read_text())
    sizes['preprocessing'] |= {'input_mean': [127.5] * 2, 'input_std': [127.5] * 2}
    (tmp_path / 'run' / 'data' / 'sizes.json').write_text(json.dumps(sizes))
    (tmp_path / 'run' / 'data' / 'checksums.json').unlink()
    data = inference.load(tmp_path / 'run').data()
    raw = np.load(tmp_path / 'data' / 'validation.npz')['inputs']
    np.testing.assert_allclose(data.plan('validation').batch(0)['inputs']['inputs'], raw / 127.5 - 1, atol=1e-6)
    config.train.steps = 4
    start(tmp_path / 'run', config)
    assert steps(tmp_path / 'run')[-1] == 4 and preprocessing(tmp_path / 'run') == sizes['preprocessing']


@pytest.mark.slow
def test_data_of_other_sizes_than_those_of_the_run_are_refused(three, cache, tmp_path):
    config = series_config(cache, write_series(tmp_path / 'data', classes=5))
    config.train.steps += 2  # a finished run reads no data
    with pytest.raises(UserError, match='examples of 8 x 2 with 5 classes or values, but the run in .* with 3 classes'):
        start(three, config)


@pytest.mark.slow
def test_a_classifier_of_another_number_of_classes_begins_with_a_fresh_head(three, cache, tmp_path, caplog):
    classes = 5
    caplog.set_level(logging.INFO)
    config = series_config(cache, write_series(tmp_path / 'data', classes=classes), train__init_from=str(three),
                           optimizer__peak=1e-12)
    start(tmp_path / 'run', config)
    theirs, found = params(three), params(tmp_path / 'run')
    for name in theirs:
        if name.startswith('head/'):
            assert found[name].shape[-1] == classes
        else:
            np.testing.assert_allclose(found[name], theirs[name], atol=1e-9, err_msg=name)
    for name, shapes in (('head/bias', rf'\(3,\) in that run, \({classes},\) in this run'),
                         ('head/kernel', rf'\(16, 3\) in that run, \(16, {classes}\) in this run')):
        line = next(record.getMessage() for record in caplog.records if 'randomly: ' in record.getMessage())
        assert re.search(f'{name} \\({shapes}\\)', line), line
    assert np.abs(found['head/kernel']).max() > 0.01 and np.abs(found['head/bias']).max() < 1e-6


@pytest.mark.slow
def test_a_classifier_of_other_classes_begins_with_a_fresh_head(three, cache, tmp_path, caplog):
    """The number of classes is the same. The encoder is frozen."""
    caplog.set_level(logging.INFO)
    folder = write_series(tmp_path / 'data')
    for split in 'train', 'validation', 'test':
        with np.load(folder / f'{split}.npz') as arrays:
            np.savez(folder / f'{split}.npz', inputs=arrays['inputs'],
                     targets=np.array(['ape', 'bee', 'cat'])[arrays['targets']])
    start(tmp_path / 'run', series_config(cache, folder, train__init_from=str(three), train__frozen='encoder',
                                            seed=1))
    theirs, found = params(three), params(tmp_path / 'run')
    assert np.abs(found['head/kernel'] - theirs['head/kernel']).max() > 0.05
    assert all(np.array_equal(found[name], theirs[name]) for name in theirs if name.startswith('encoder'))
    assert ('the head starts with random values, because the outputs differ: the classes 0, 1, 2 in '
            f'{three}, the classes ape, bee, cat in this run') in caplog.text


@pytest.mark.slow
def test_a_regression_begins_from_a_classifier_with_a_fresh_head(three, cache, tmp_path):
    folder = write_series(tmp_path / 'data', values=True)
    config = series_config(cache, folder)
    flags = [f'--config.{name}={value}' for name, value in {
        'task': 'regression', 'eval.metric': 'loss', 'train.init_from': three, 'data.source': 'files',
        'data.name': '', 'data.dir': folder, 'data.crop': 0, 'cache_dir': cache,
        **{name: config[name.split('.')[0]][name.split('.')[1]] for name in (
            'batch.rows', 'train.steps', 'eval.every', 'checkpoint.every', 'optimizer.warmup', 'optimizer.schedule',
            'model.position', 'model.num_layers', 'model.d_model', 'model.d_ff', 'model.num_heads')}}.items()]
    done = script('train.py', '--config=configs/digits_vit.py', f'--workdir={tmp_path}/run', *flags)
    assert done.returncode == 0, done.stderr.decode()
    assert b'initialised randomly: ' in done.stderr and b'vocabulary' not in done.stderr
    assert preprocessing(tmp_path / 'run')['target_mean'] is not None
    assert inference.load(tmp_path / 'run').config.task == 'regression'


def test_a_forecaster_keeps_its_head_with_another_horizon_or_other_names_but_not_with_more_channels(monkeypatch):
    def sizes(horizon, *channels):
        names = [f'{channel}+{step}' for step in range(1, horizon + 1) for channel in channels]
        return SIZES | {'outputs': len(names), 'classes': None, 'targets': names, 'inputs': {'channels': [*channels]}}

    monkeypatch.setattr(initial, 'read_sizes', lambda path, task: sizes(4, 'a', 'b'))
    for data, differ in (sizes(8, 'a', 'b'), False), (sizes(4, 'a', 'c'), False), (sizes(4, 'a', 'b', 'c'), True):
        assert initial._outputs_differ(Path('run'), 'forecasting', mock.Mock(Data, sizes=data), 'forecasting') == differ


@pytest.mark.parametrize('old, new, differ', [
    (['0'], ['height'], False), (['0', '1'], ['b', 'a'], False), (['a', 'b'], ['0', '1'], False),
    (['0', '1'], ['height'], True), (['a', 'b'], ['b', 'a'], True), (['a'], ['b'], True)])
def test_values_without_names_do_not_change_the_head(old, new, differ, monkeypatch):
    """A run of an earlier version has no name for the single value of a table."""
    def sizes(names):
        return SIZES | {'outputs': len(names), 'classes': None, 'targets': names}

    monkeypatch.setattr(initial, 'read_sizes', lambda path, task: sizes(old))
    data = mock.Mock(Data, sizes=sizes(new))
    assert initial._outputs_differ(Path('run'), 'regression', data, 'regression') == differ


def taken(monkeypatch, params, boxed, configs, sizes=({}, {}), tokenizers=({}, {})):
    """The initial values that a run takes from `params` of another run. Pairs are of the other run and of this run."""
    checkpoints = mock.Mock(parameters=lambda choice: (params, [1]))
    for name, value in {'read_config': configs[0], 'read_sizes': sizes[0], 'load_tokenizers': tokenizers[0],
                        'Checkpoints': checkpoints}.items():
        monkeypatch.setattr(initial, name, lambda *_, value=value, **options: value)
    configs[1].train.init_from = 'parent'
    return read_initial(configs[1], mock.Mock(Data, sizes=sizes[1], tokenizers=tokenizers[1]), boxed)


@pytest.mark.parametrize('old, new, sources', [
    (('class_token', 8, 8), ('mean', 8, 8), [1, 2, 3, 4]),
    (('mean', 8, 8), ('class_token', 8, 8), [None, 0, 1, 2, 3]),
    (('class_token', 8, 8), ('class_token', 12, 12), [0, 1, 2, None, 3, 4, None, None, None, None]),
    (('mean', 8, 8), ('class_token', 4, 12), [None, 0, 1, None]),  # the tables have equally many rows
    (('class_token', 8), ('mean', 12), [1, 2, None])])
def test_a_patch_keeps_its_learned_position_with_another_pooling_or_size(old, new, sources, monkeypatch, cache, caplog):
    """Patches have 4 x 4 pixels or 4 steps. `sources` are the rows of the old table for each row of the new table."""
    caplog.set_level(logging.INFO)
    configs = [tiny_config(cache, model__patches__pooling=pooling, model__patches__patch=4)
               for pooling, *_ in (old, new)]
    sizes = [SIZES | {'shape': (*space, 1)} for _, *space in (old, new)]
    rows = (old[0] == 'class_token') + math.prod(side // 4 for side in old[1:])
    table = np.arange(2.0 * rows).reshape(rows, 2)
    boxed = {'positions': nn.LogicallyPartitioned(np.zeros((len(sources), 2)), ('position', 'embed'))}
    found = taken(monkeypatch, {'positions': table}, boxed, configs, sizes)['positions']
    assert found.rows[:, 0].tolist() == [source is not None for source in sources]
    for values, source in zip(found.values, sources, strict=True):
        assert source is None or values.tolist() == table[source].tolist()
    count = len(sources) - sources.count(None)
    assert (f'positions ({count} of {len(sources)})' in caplog.text) == (None in sources)


def test_a_translator_takes_the_rows_of_its_pieces_from_a_language_model_whose_vocabulary_has_the_same_size(
        monkeypatch):
    theirs, ours = (CharTokenizer(json.dumps({'kind': 'char', 'characters': characters}).encode())
                    for characters in ('abc', 'bcd'))
    table = np.arange(14.0).reshape(2, 7)
    boxed = {'output': {'kernel': nn.LogicallyPartitioned(np.zeros((2, 7)), ('embed', 'vocab'))}}
    found = taken(monkeypatch, {'output': {'kernel': table}}, boxed, (stdlib_lm.get_config(), demo.get_config()),
                  tokenizers=({'text': theirs}, {'source': ours, 'target': ours}))['output/kernel']
    assert found.rows.tolist() == [[True] * 6 + [False]]  # four special tokens, b, c and d
    np.testing.assert_array_equal(found.values[:, :6], table[:, [0, 1, 2, 3, 5, 6]])


@pytest.mark.parametrize('task', ['translation', 'language_model'])
def test_a_run_on_images_and_one_on_text_cannot_begin_from_each_other(cache, tmp_path, task):
    text, images = tmp_path / 'text', tmp_path / 'images'
    recipe = demo.get_config() if task == 'translation' else stdlib_lm.get_config()
    for folder, config in (text, recipe), (images, tiny_config(cache)):
        folder.mkdir()
        (folder / 'config.json').write_text(config.to_json())
    for config, parent in (tiny_config(cache), text), (recipe, images):
        config.train.init_from = str(parent)
        with pytest.raises(UserError, match=f'config.train.init_from={parent}: .* text'):
            read_initial(config, mock.Mock(Data), {})


def tune(parent, workdir, *flags):
    """Fine-tunes by the command line, for two steps."""
    return script('train.py', f'--config=configs/fine_tune.py:{parent}', f'--workdir={workdir}',
                  '--config.train.steps=2', '--config.optimizer.warmup=1',
                  f'--config.cache_dir={read_config(parent).cache_dir}', *flags)


@pytest.mark.slow
def test_a_run_with_adapters_is_fine_tuned(three, cache, tmp_path):
    adapted = read_config(three)
    adapted.train.update(init_from=str(three), lora_rank=2, lora_alpha=32.0, lora_parts='*attention/key')
    start(tmp_path / 'adapted', adapted)
    done = tune(tmp_path / 'adapted', tmp_path / 'tuned')
    assert done.returncode == 0, done.stderr.decode()
    config, theirs, found = read_config(tmp_path / 'tuned'), params(tmp_path / 'adapted'), params(tmp_path / 'tuned')
    assert config.train.lora_rank == 0 and config.train.lora_alpha == 16.0
    assert all(not np.array_equal(found[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_pattern_that_ends_in_value_freezes_what_it_names(three, tmp_path):
    done = tune(three, tmp_path / 'tuned', '--config.train.frozen=*/value')
    assert done.returncode == 0, done.stderr.decode()
    theirs, found = params(three), params(tmp_path / 'tuned')
    assert {name for name in theirs if np.array_equal(found[name], theirs[name])} == {
        'encoder/layers_0/self_attention/value/kernel'}
