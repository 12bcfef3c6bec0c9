"""sizes.json of images and series: it has the form that training writes, and the names of the run's data."""

import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from input_pipeline.data import LabelledData, MeasuredData, read_sizes
from input_pipeline.kept_data import load_tokenizers, save_kept_data
from input_pipeline.tokenizer import CharTokenizer
from runtime.errors import UserError
from tests.input_pipeline.helpers import options, write_csv

VALUES = {'outputs': 2, 'shape': [8, 3], 'classes': None, 'preprocessing': {
    'input_mean': [0.0, 1.5, -2], 'input_std': [1.0, 1e-30, 2], 'target_mean': [0.5, 0], 'target_std': [1.0, 2.0]}}
CLASSES = {'outputs': 2, 'shape': [8, 8, 3], 'classes': ['a cat', 'chien é\u00a0猫'], 'preprocessing': {
    'input_mean': [127.5] * 3, 'input_std': [127.5] * 3, 'target_mean': None, 'target_std': None}}


def read(folder, sizes, task):
    (folder / 'data').mkdir(exist_ok=True)
    (folder / 'data/sizes.json').write_text(json.dumps(sizes))
    return read_sizes(folder, task)


def test_what_training_writes_is_read(tmp_path):
    for sizes, task in (VALUES, 'regression'), (CLASSES, 'classification'):
        assert read(tmp_path, sizes, task) == sizes


@pytest.mark.parametrize('std', [0, -1.0, 1e-300, 1e-40, float('inf'), float('nan'), 1e300, 10 ** 400, '1', None, True])
@pytest.mark.parametrize('part', ['input_std', 'target_std'])
def test_impossible_deviations(tmp_path, part, std):
    scale = VALUES['preprocessing'] | {part: [1.0, std, 1.0][:len(VALUES['preprocessing'][part])]}
    with pytest.raises(UserError, match='sizes.json is damaged: preprocessing has'):
        read(tmp_path, VALUES | {'preprocessing': scale}, 'regression')


@pytest.mark.parametrize('part, numbers', [
    ('input_mean', [0.0] * 2), ('input_mean', [0.0]), ('input_std', [1.0] * 4), ('input_std', []), ('input_mean', None),
    ('target_mean', [0.0]), ('target_std', [1.0] * 3), ('target_std', None), ('target_mean', None)])
def test_scales_are_of_every_channel_and_value(tmp_path, part, numbers):
    with pytest.raises(UserError, match=rf'sizes\.json.*preprocessing.*{part}'):
        read(tmp_path, VALUES | {'preprocessing': VALUES['preprocessing'] | {part: numbers}}, 'regression')


@pytest.mark.parametrize('changes, message', [
    ({'classes': None}, 'sizes.json: classes=None does not fit task=classification'),
    ({'classes': ['a', 'a']}, 'damaged: classes has'),
    ({'classes': ['a']}, 'sizes.json: 1 classes, but outputs=2'),
    ({'preprocessing': CLASSES['preprocessing'] | {'target_mean': [0.0] * 2}}, 'preprocessing: target_mean='),
    ({'preprocessing': CLASSES['preprocessing'] | {'target_std': [1.0] * 2}}, 'preprocessing: target_std='),
    *(({'classes': ['a', f'b{character}c']}, 'damaged: classes has')
      for character in '\t\n\r\v\f\0\x1b\x85\u2028\u2029\ud800')])
def test_classes_that_cannot_be(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, CLASSES | changes, 'classification')


@pytest.mark.parametrize('old, new', [('a cat', 'a bat'), ('"shape"', '"shapE"'), ('127.5', '126.5'), ('8', '9')])
def test_a_changed_byte_is_found_by_the_checksum(tmp_path, old, new):
    save_kept_data(tmp_path / 'data', {}, CLASSES | {'absent': [0]})
    assert read_sizes(tmp_path, 'classification') == CLASSES | {'absent': [0]}
    path = tmp_path / 'data/sizes.json'
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match='sizes.json is damaged: it does not match its checksum'):
        read_sizes(tmp_path, 'classification')


def test_a_changed_byte_of_a_tokenizer_is_found_by_the_checksum(tmp_path):
    save_kept_data(tmp_path, {'text': CharTokenizer(b'{"kind": "char", "characters": "abc"}')}, {'vocab_size': 7})
    assert len(load_tokenizers(tmp_path)['text']) == 7
    path = tmp_path / 'text.model'
    path.write_bytes(path.read_bytes().replace(b'abc', b'abd'))
    with pytest.raises(UserError, match='text.model is damaged: it does not match its checksum'):
        load_tokenizers(tmp_path)


def test_values_have_no_classes(tmp_path):
    with pytest.raises(UserError, match=r"classes=\['a', 'b'\] does not fit task=regression"):
        read(tmp_path, VALUES | {'classes': ['a', 'b']}, 'regression')


# The data of a run that is opened again

def opened(kind, folder, *lines, kept=None):
    """Opens a table with these lines, as the data of a new run, or of a run whose folder `data` is `kept`."""
    write_csv(folder, *lines)
    config = {'data': options(dir=str(folder)), 'model': {'patches': {'patch': 1}}, 'batch': {'rows': 2}}
    return kind(ConfigDict(config), kept, ())


@pytest.mark.parametrize('kind, before, now, message', [
    (LabelledData, ['series,x,target', 'a,1,cat', 'b,2,dog'], ['series,x,target', 'a,1,cow', 'b,2,dog'],
     "class 0 is 'cow', but it is 'cat' in the run in"),
    (MeasuredData, ['series,x,y,target', 'a,1,2,3', 'b,4,5,6'], ['series,y,x,target', 'a,2,1,3', 'b,5,4,6'],
     "channel 0 is 'y', but it is 'x' in the run in"),
    (MeasuredData, ['series,x,target_v,target_w', 'a,1,2,3'], ['series,x,target_v,target_z', 'a,1,2,3'],
     "target 1 is 'z', but it is 'w' in the run in"),
])
def test_data_with_other_names_than_the_data_of_the_run_are_refused(tmp_path, kind, before, now, message):
    opened(kind, tmp_path, *before).keep(tmp_path / 'run/data')
    opened(kind, tmp_path, *before, kept=tmp_path / 'run/data')
    with pytest.raises(UserError, match=f'config.data: {message} .*run. Use the data of that run, or a new run direct'):
        opened(kind, tmp_path, *now, kept=tmp_path / 'run/data')


@pytest.mark.parametrize('targets', [{}, {'targets': ['0']}])
def test_names_that_a_run_of_an_earlier_version_does_not_have_are_not_compared(tmp_path, targets):
    table = ['series,x,target_height', 'a,1,2', 'b,3,4']
    sizes = opened(MeasuredData, tmp_path, *table).sizes
    earlier = {name: value for name, value in sizes.items() if name not in ('targets', 'inputs')} | targets
    save_kept_data(tmp_path / 'run/data', {}, earlier)
    assert opened(MeasuredData, tmp_path, *table, kept=tmp_path / 'run/data').sizes == earlier


def test_batches_have_the_preprocessing_of_the_run(tmp_path):
    table = ['series,x,target', 'a,1,2', 'b,2,4']
    sizes = opened(MeasuredData, tmp_path, *table).sizes
    scale = sizes['preprocessing'] | {'input_mean': [5.0], 'input_std': [2.0]}
    save_kept_data(tmp_path / 'run/data', {}, sizes | {'preprocessing': scale})
    batch = opened(MeasuredData, tmp_path, *table, kept=tmp_path / 'run/data').plan('validation').batch(0)
    np.testing.assert_allclose(batch['inputs']['inputs'].ravel(), [-2.0, -1.5])
