"""Arrays in memory: built-in data, splits, classes, and what is logged about them."""

import json
import re

import numpy as np
import pytest

from configs.tasks import TASKS
from input_pipeline import dynamics
from input_pipeline.array_batches import ArrayPlan
from input_pipeline.arrays import BUILTIN, ArrayData
from input_pipeline.examples import Examples
from input_pipeline.splits import Parts
from runtime import once
from runtime.errors import UserError
from tests.input_pipeline.helpers import CLASSES, INPUTS, SPLITS, in_memory, open_arrays, options

# Built-in data

def open_builtin(name, **changes):
    return open_arrays(options(source='builtin', name=name, **changes),
                       labelled=name != 'pendulum')


@pytest.fixture(scope='module', params=[
    pytest.param(name, marks=[pytest.mark.slow] if name == 'dynamics' else []) for name in BUILTIN])
def builtin(request):
    return request.param, open_builtin(request.param)


def test_builtin_data_depend_only_on_the_seed(builtin):
    name, data = builtin
    same, other = (open_builtin(name, seed=seed) for seed in (0, 1))
    for split in SPLITS:
        np.testing.assert_array_equal(data.inputs(split), same.inputs(split))
        np.testing.assert_array_equal(data.targets(split), same.targets(split))
    assert not np.array_equal(data.inputs('test'), other.inputs('test'))


def test_builtin_sizes(builtin):
    name, data = builtin
    counts, sizes, classes = {
        'digits': ([1297, 200, 300], {'outputs': 10, 'shape': [8, 8, 1]}, list('0123456789')),
        'dynamics': ([4000, 500, 500], {'outputs': 6, 'shape': [128, 2]}, list(dynamics.SYSTEMS)),
        'pendulum': ([4000, 500, 500], {'outputs': 2, 'shape': [128, 1]}, None)}[name]
    assert [len(data.inputs(split)) for split in SPLITS] == [len(data.targets(split)) for split in SPLITS] == counts
    assert json.loads(json.dumps(data.sizes)) == sizes and data.classes == classes
    assert {*TASKS['classification'].builtin, *TASKS['regression'].builtin} == set(BUILTIN)


def test_digits_are_split_evenly_and_apart():
    data = open_builtin('digits')
    assert data.inputs('train').dtype == np.uint8
    assert data.inputs('train').min() == 0 and data.inputs('train').max() == 255
    for split in SPLITS:
        counts = np.bincount(data.targets(split), minlength=10)
        assert counts.max() - counts.min() <= 0.06 * len(data.targets(split))
    together = np.concatenate([data.inputs(split).reshape(-1, 64) for split in SPLITS])
    assert len(np.unique(together, axis=0)) == 1797  # no image twice, hence none in two splits

    from sklearn.datasets import load_digits  # here, because this import takes a second of each worker
    bunch = load_digits()
    labels = {image.tobytes(): label for image, label in zip(
        np.round(bunch.data * (255 / 16)).astype(np.uint8), bunch.target, strict=True)}
    assert [labels[image.tobytes()] for image in together] == [
        label for split in SPLITS for label in data.targets(split)]


@pytest.mark.parametrize('changes, message', [
    ({'source': 'text'}, r"data\.source='text': must be one of builtin, files, tfds for this task"),
    ({'dir': 'nowhere'}, r"data\.dir='nowhere' is not a folder"),
])
def test_unknown_sources(changes, message):
    with pytest.raises(UserError, match=message):
        open_arrays(options(**changes), labelled=True)


def test_folder_without_a_data_set(tmp_path):
    with pytest.raises(UserError, match=r'has no data set\. It must have train-images-idx3-ubyte .* or train\.csv'):
        open_arrays(options(dir=str(tmp_path)), labelled=True)


# Splits

@pytest.mark.parametrize('test, message', [
    ((INPUTS[:, :6], CLASSES), r'file of test: inputs are float64 \(6, 2\), but .* split they are float64 \(7, 2\)'),
    ((INPUTS, CLASSES + 1), 'file of test: example 3 has class 4, but the classes of the training split are 0 to 3'),
    ((INPUTS, CLASSES / 2), r'file of test: class 0\.5 of example 1: classes must be whole numbers from 0'),
])
def test_splits_must_fit_the_training_split(test, message):
    with pytest.raises(UserError, match=message):
        in_memory(INPUTS, CLASSES, test=test).targets('test')


@pytest.mark.parametrize('inputs, targets, message', [
    (INPUTS * 1e30, INPUTS[:, 0], 'file of train: inputs are too large: index [01] .* has the mean .*e\\+30'),
    (INPUTS * [1, 1e37], INPUTS[:, 0], 'file of train: inputs are too large: index 1 of the last axis'),
    (np.full_like(INPUTS, 3e38), INPUTS[:, 0], 'file of train: inputs are too large: index 0 .* mean 3e\\+38'),
    (INPUTS, INPUTS[:, 0] * 1e30, 'file of train: targets are too large'),
    (np.where(INPUTS.mean() < INPUTS, 3.4e38, -3.4e38), INPUTS[:, 0], 'file of train: inputs are too large'),
])
def test_numbers_too_large_to_be_standardised(inputs, targets, message):
    with pytest.raises(UserError, match=message):
        in_memory(inputs, targets, False).preprocessing  # noqa: B018


@pytest.mark.parametrize('split', ['validation', 'test'])
@pytest.mark.parametrize('name, inputs, targets', [
    ('inputs', INPUTS * 1e30, INPUTS[:, 0]), ('inputs', np.full_like(INPUTS, -3e38), INPUTS[:, 0]),
    ('targets', INPUTS, INPUTS[:, 0] * [1, 1e35])])
def test_a_split_too_far_from_the_training_split(split, name, inputs, targets):
    data = in_memory(INPUTS, INPUTS[:, 0], False, **{split: (inputs, targets)})
    with pytest.raises(UserError, match=f'file of {split}: {name} cannot be standardised: index .* training split'):
        data.inputs(split)


@pytest.mark.parametrize('scale', [1.4e-45, 1e-40, 1e-30, 1.0, 1e24])
def test_what_is_accepted_is_standardised_to_finite_numbers(scale):
    raw = np.where(INPUTS.mean() < INPUTS, scale, 0)
    data = in_memory(raw, raw[:, 0], False)
    with np.errstate(all='raise', under='ignore'):
        batch = ArrayPlan(data, 'train', rows=10, seed=None).batch(0)
    for array in batch['inputs']['inputs'], batch['targets']:
        assert np.isfinite(array).all() and np.abs(array).max() < 10
    assert scale < 1e-37 or batch['inputs']['inputs'].std() == pytest.approx(1, rel=1e-3)


def test_a_split_has_as_many_values_as_the_training_split():
    with pytest.raises(UserError, match=r'targets have the shape \(10, 1\), but in the training split .* \(10, 2\)'):
        in_memory(INPUTS, INPUTS[:, 0], False, test=(INPUTS, CLASSES)).targets('test')


@pytest.mark.parametrize('kind', [np.int8, np.uint8, np.int64, np.float32, np.float64])
def test_the_task_and_not_the_type_determines_what_targets_are(kind):
    classes, values = (in_memory(INPUTS, CLASSES.astype(kind), labelled) for labelled in (True, False))
    assert classes.classes == list('0123') and classes.targets('test').dtype == np.int32
    assert classes.targets('train').tolist() == CLASSES.tolist()
    assert values.classes is None and values.sizes['outputs'] == 1 and values.targets('test').dtype == np.float64
    assert values.targets('train').tolist() == CLASSES[:, None].tolist()
    assert values.preprocessing.target_mean == [1.3] and classes.preprocessing.target_mean is None


@pytest.mark.parametrize('targets, message', [
    (CLASSES + 0.25, r'file of train: class 0\.25 of example 0: classes must be whole numbers from 0'),
    (np.where(CLASSES == 3, 2.5, CLASSES), r'file of train: class 2\.5 of example 3: .* Use task=regression'),
    (CLASSES - 1.0, r'file of train: class -1\.0 of example 0: classes must be'),
    (INPUTS[:, 0], r'train: the targets have the shape \(10, 2\), but an example has one class\. .* task=regression'),
    (np.full((10, 2), 'a'), r'train: the targets have the shape \(10, 2\), but an example has one class'),
    (np.full(10, 2.0 ** 40), 'file of train: class 1099511627776.0 of example 0'),
])
def test_targets_that_are_not_classes_are_refused(targets, message):
    with pytest.raises(UserError, match=message):
        in_memory(INPUTS, targets).targets('train')


# Warnings

def logged(caplog, data, *splits_to_read):
    once.warn_once.cache_clear()
    caplog.clear()
    for split in splits_to_read:
        data.targets(split)
    return caplog.text


@pytest.mark.parametrize('targets, message', [
    (CLASSES * 0 + 1, r"file of train: all 10 examples have the class '1'\. A model cannot learn to distinguish"),
    (CLASSES * 7, r'file of train: 18 of 22 classes have no training examples: 1, 2, 3, 4, 5 and 13 more\. Number the'),
    (np.arange(10), r'file of train: 10 of 10 classes have only one example: 0, 1, 2, 3, 4 and 5 more\. Check that'),
    (np.array(['cat'] * 10), "all 10 examples have the class 'cat'"),
])
def test_classes_that_cannot_be_learned_are_logged_with_counts(caplog, targets, message):
    assert re.search(message, logged(caplog, in_memory(INPUTS, targets), 'train'))


def test_examples_and_groups_that_are_also_in_training_are_logged_with_counts(caplog):
    def load(split):
        mixed = np.concatenate([INPUTS[7:] + 1, INPUTS[3:5]])
        inputs = {'train': INPUTS, 'validation': INPUTS + 1, 'test': mixed}[split]
        groups = {'train': list('aabbccddee'), 'validation': list('xyxyxyxyae'), 'test': list('uvwxy')}[split]
        return Examples(inputs, np.arange(len(inputs)) % 4, f'file of {split}', np.array(groups))

    data = ArrayData(load, True)
    assert 'also in the training data' not in logged(caplog, data, 'train')
    text = logged(caplog, data, 'validation', 'test')
    assert 'file of validation: 2 of 4 groups are also in the training data, such as \'a\'' in text
    assert 'file of test: 2 of 5 examples are also in the training data, such as example 3. Their scores do' in text
    assert 'file of validation: ' not in text.replace('file of validation: 2 of 4 groups', '')


def test_equal_examples_in_groups_that_a_hash_divides_are_logged(caplog):
    examples = Examples(np.repeat(INPUTS[:1], 10, axis=0), INPUTS[:, 0], 'file', np.array(list('abcdefghij')))
    data = ArrayData(lambda split: examples, False, parts=Parts(('validation', 'test'), 0.25))
    assert '2 of 2 examples are also in the training data' in logged(caplog, data, 'validation')


@pytest.mark.parametrize('train, test', [
    (np.arange(140, dtype=np.uint8).reshape(10, 7, 2), np.arange(42, 70).reshape(2, 7, 2)),
    # The range of one series is 0, so `recorded` converts it to float32, but all series to float64.
    (np.full((10, 7, 2), 1.7e9) + np.arange(10.0)[:, None, None], np.full((1, 7, 2), 1.7e9 + 3))])
def test_equal_examples_of_another_type_are_logged(caplog, train, test):
    data = in_memory(train, CLASSES, test=(test, CLASSES[:len(test)]))
    assert f'{len(test)} of {len(test)} examples are also in the training data' in logged(caplog, data, 'test')


@pytest.mark.parametrize('most, warned', [(1, True), (2, False)])
def test_black_and_white_images_as_bytes_of_0_and_1_are_logged(caplog, most, warned):
    once.warn_once.cache_clear()
    images = np.zeros((4, 2, 2, 1), np.uint8)
    images[2:] = most
    in_memory(images, np.array([0, 0, 1, 1])).inputs('train')
    assert ('the images are unsigned bytes, but all values are 0 or 1' in caplog.text) == warned


def test_the_names_of_the_classes_are_logged(caplog):
    once.log_once.cache_clear()
    caplog.set_level('INFO', logger='allyouneed')
    for targets, classes in ((np.array(['dog', 'cat'] * 5), '2 classes (cat, dog)'),
                             (np.arange(10), '10 classes (0, 1, 2, 3, 4 and 5 more)')):
        assert f'file of train: {classes}' in logged(caplog, in_memory(INPUTS, targets), 'train')


def test_series_that_look_like_greyscale_images_are_logged(caplog):
    squares = np.random.default_rng(0).normal(size=(10, 32, 32))
    text = logged(caplog, in_memory(squares, CLASSES), 'train')
    assert ('inputs of shape (10, 32, 32) are read as series of 32 steps with 32 channels. If they are greyscale '
            'images, add the axis of channels: inputs[..., None]') in text
    assert 'greyscale' not in logged(caplog, in_memory(INPUTS, CLASSES), 'train')
    with pytest.raises(UserError, match=r'crop=1 .* series of shape \(10, 32, 32\)\. .*inputs\[\.\.\., None'):
        ArrayPlan(in_memory(squares, CLASSES), 'train', rows=4, seed=0, crop=1)
