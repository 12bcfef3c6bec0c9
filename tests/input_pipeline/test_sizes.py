"""sizes.json of images and series: a file that training did not write so is refused by its key."""

import json

import pytest

from input_pipeline.data import read_sizes
from input_pipeline.kept_data import save_kept_data
from runtime.errors import UserError

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


def test_values_have_no_classes(tmp_path):
    with pytest.raises(UserError, match=r"classes=\['a', 'b'\] does not fit task=regression"):
        read(tmp_path, VALUES | {'classes': ['a', 'b']}, 'regression')
