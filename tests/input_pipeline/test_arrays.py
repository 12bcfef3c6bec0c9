"""Array data sets: the built-in ones, TFDS, what splits must have in common, preprocessing, and the batch plan."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from configs.tasks import BUILTIN_ARRAYS
from input_pipeline import dynamics, splits
from input_pipeline.array_batches import ArrayPlan
from input_pipeline.arrays import BUILTIN, ArrayData, open_arrays
from input_pipeline.examples import Examples
from input_pipeline.preprocessing import Preprocessing
from input_pipeline.splits import Parts
from runtime.errors import UserError
from tests.input_pipeline.helpers import CLASSES, INPUTS, SPLITS, assert_filled_up, options


def in_memory(inputs, targets, labelled=True, **others):
    """A data set whose splits are the same unless `others` has them."""
    return ArrayData(lambda split: Examples(*others.get(split, (inputs, targets)), where=f'file of {split}'), labelled)


def images(count=21, side=6, channels=1):
    """Each holds its number, in a corner alone: random places are seen."""
    array = np.zeros((count, side, side, channels), np.uint8)
    array[:, 0, 0, 0] = np.arange(count) + 1
    return array


def image_data(count=21, **sizes):
    return in_memory(images(count, **sizes), np.arange(count) % 3)


# Built-in data

def open_builtin(name, **changes):
    return open_arrays(options(source='builtin', name=name, **changes),
                       labelled=name != 'pendulum')


@pytest.fixture(scope='module', params=[
    pytest.param(name, marks=[pytest.mark.slow] if name == 'dynamics' else []) for name in BUILTIN_ARRAYS])
def builtin(request):
    return request.param, open_builtin(request.param)


def test_builtin_data_depend_on_the_seed_alone(builtin):
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
    assert set(BUILTIN_ARRAYS) == set(BUILTIN)


def test_digits_are_split_evenly_and_apart():
    data = open_builtin('digits')
    assert data.inputs('train').dtype == np.uint8
    assert data.inputs('train').min() == 0 and data.inputs('train').max() == 255
    for split in SPLITS:
        counts = np.bincount(data.targets(split), minlength=10)
        assert counts.max() - counts.min() <= 0.06 * len(data.targets(split))
    together = np.concatenate([data.inputs(split).reshape(-1, 64) for split in SPLITS])
    assert len(np.unique(together, axis=0)) == 1797  # no image twice, hence none in two splits

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
def test_the_task_and_not_the_type_says_what_targets_are(kind):
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
    (np.full(10, 2.0 ** 40), 'file of train: class 1099511627776.0 of example 0'),
])
def test_what_is_no_class_is_refused(targets, message):
    with pytest.raises(UserError, match=message):
        in_memory(INPUTS, targets).targets('train')


# Warnings

def logged(caplog, data, *splits_to_read):
    splits.warn.cache_clear()
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


def test_series_that_look_like_greyscale_images_are_logged(caplog):
    squares = np.random.default_rng(0).normal(size=(10, 32, 32))
    text = logged(caplog, in_memory(squares, CLASSES), 'train')
    assert ('inputs of shape (10, 32, 32) are read as series of 32 steps with 32 channels. If they are greyscale '
            'images, add the axis of channels: inputs[..., None]') in text
    assert 'greyscale' not in logged(caplog, in_memory(INPUTS, CLASSES), 'train')
    with pytest.raises(UserError, match=r'crop=1 .* series of shape \(10, 32, 32\)\. .*inputs\[\.\.\., None'):
        ArrayPlan(in_memory(squares, CLASSES), 'train', rows=4, seed=0, crop=1)


# TFDS. The dataset is built by a process of its own, as in test_sources.py; PNG bytes, which need no TensorFlow.

BUILD = """
import io, sys
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

class TinyImages(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            'image': tfds.features.Image(shape=(4, 4, 3)), 'label': tfds.features.ClassLabel(names=['cat', 'dog'])}))

    def _split_generators(self, dl_manager):
        return {'train': self._generate_examples(10), 'test': self._generate_examples(4)}

    def _generate_examples(self, count):
        for number in range(count):
            file = io.BytesIO()
            Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(file, 'png')
            file.seek(0)
            yield number, {'image': file, 'label': number % 2}

class NoLabels(TinyImages):
    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            'image': tfds.features.Image(shape=(None, None, 3)), 'label': tfds.features.Scalar(np.int64)}))

class NoImages(TinyImages):
    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            'text': tfds.features.Text(), 'label': tfds.features.ClassLabel(names=['cat', 'dog'])}))

    def _generate_examples(self, count):
        yield 0, {'text': 'meow', 'label': 0}

for builder in TinyImages, NoLabels, NoImages:
    builder(data_dir=sys.argv[1], file_format='array_record').download_and_prepare()
"""


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tfds')
    subprocess.run([sys.executable, '-c', BUILD, folder], check=True, capture_output=True)
    return folder


def open_tiny(folder, name='tiny_images', **splits):
    names = {'train': 'train[:80%]', 'validation': 'train[80%:]', 'test': 'test'} | splits
    return open_arrays(options(source='tfds', name=name, dir=str(folder), splits=names), labelled=True)


def test_tfds_images(prepared):
    data = open_tiny(prepared)
    assert data.classes == ['cat', 'dog'] and data.sizes == {'outputs': 2, 'shape': [4, 4, 3]}
    assert [len(data.inputs(split)) for split in SPLITS] == [8, 2, 4]
    numbers = np.concatenate([data.inputs(split)[:, 0, 0, 0] for split in ('train', 'validation')])
    assert data.inputs('train').dtype == np.uint8 and sorted(numbers) == list(range(10))
    np.testing.assert_array_equal(data.targets('train'), data.inputs('train')[:, 1, 2, 2] % 2)


@pytest.mark.parametrize('changes, message', [
    ({'name': 'no_such'}, r"data\.name='no_such' cannot be opened in .*: Dataset no_such not found"),
    ({'name': 'no_labels'}, r'name=no_labels: the dataset has images of shape \(None, None, 3\) and the label .*'),
    ({'name': 'no_images'}, r'name=no_images: the dataset has the features label, text, but it must have image and'),
    ({'train': 'training'}, r"splits\.train='training' cannot be read from .*Unknown split"),
    ({'name': 'mnist'}, r'mnist is not in .* TensorFlow .*tfds build mnist --file_format=array_record'),
])
def test_tfds_mistakes_are_explained(prepared, monkeypatch, changes, message):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)  # no TensorFlow
    with pytest.raises(UserError, match=message):
        open_tiny(prepared, **changes).inputs('train')


# Preprocessing

def test_images_become_minus_one_to_one():
    preprocessing = in_memory(np.zeros((2, 4, 4, 3), np.uint8), CLASSES[:2]).preprocessing
    raw = np.array([0, 51, 255] * 4, np.uint8).reshape(1, 2, 2, 3)
    np.testing.assert_allclose(preprocessing.inputs(raw)[0, 0, 0], [-1, -0.6, 1], atol=1e-6)


def test_channels_and_values_are_standardised_by_the_training_split():
    constant = np.concatenate([INPUTS, np.full((10, 7, 1), 5.0)], axis=-1)
    data = in_memory(constant, INPUTS[:, 0], False, test=(constant + 1, INPUTS[:, 1]))
    preprocessing = Preprocessing(**json.loads(json.dumps(dataclasses.asdict(data.preprocessing))))
    inputs = preprocessing.inputs(data.inputs('train'))
    np.testing.assert_allclose(inputs.mean(axis=(0, 1)), 0, atol=1e-5)
    np.testing.assert_allclose(inputs.std(axis=(0, 1)), [1, 1, 0], atol=1e-5)
    np.testing.assert_allclose(preprocessing.inputs(data.inputs('test')), inputs + 1 / constant.std(axis=(0, 1)).clip(
        1e-9) * [1, 1, 0] + [0, 0, 1], atol=1e-5)
    targets = preprocessing.targets(data.targets('train'))
    np.testing.assert_allclose([targets.mean(axis=0), targets.std(axis=0)], [[0, 0], [1, 1]], atol=1e-5)
    np.testing.assert_allclose(preprocessing.values(preprocessing.targets(data.targets('test'))), INPUTS[:, 1],
                               atol=1e-5)


# The plan

def epoch_of(plan, epoch):
    return [plan.batch(step) for step in range(epoch * len(plan), (epoch + 1) * len(plan))]


def equal(first, second):
    return all(np.array_equal(one, other) for one, other in zip(
        (first['inputs']['inputs'], first['targets'], first['weights']),
        (second['inputs']['inputs'], second['targets'], second['weights']), strict=True))


@pytest.mark.parametrize('seed', [None, 3])
@pytest.mark.parametrize('count', [1, 8, 21])
def test_every_example_is_in_an_epoch_once(count, seed):
    data = image_data(count)
    plan = ArrayPlan(data, 'train', rows=8, seed=seed)
    assert plan.rows == [8] and len(plan) == -(-count // 8)
    orders = []
    for epoch in range(2):
        batches = epoch_of(plan, epoch)
        assert {batch['inputs']['inputs'].shape for batch in batches} == {(8, 6, 6, 1)}
        inputs, targets, weights = (np.concatenate([part(batch) for batch in batches]) for part in (
            lambda batch: batch['inputs']['inputs'], lambda batch: batch['targets'], lambda batch: batch['weights']))
        assert inputs.dtype == weights.dtype == np.float32 and targets.dtype == np.int32
        assert np.array_equal(weights, np.arange(len(weights)) < count)
        assert not inputs[count:].any() and not targets[count:].any()
        numbers = np.round(inputs[:count, 0, 0, 0] * 127.5 + 127.5).astype(int) - 1
        assert sorted(numbers) == list(range(count))
        np.testing.assert_array_equal(targets[:count], numbers % 3)
        orders.append(numbers.tolist())
    assert (orders[0] == list(range(count))) == (seed is None or count == 1)
    assert (orders[0] == orders[1]) == (seed is None or count == 1)


@pytest.mark.parametrize('augmentation', [{}, {'crop': 1}, {'flip': True}, {'crop': 2, 'flip': True},
                                          {'crop': 1, 'mixup': 0.2}])
def test_a_batch_is_a_function_of_seed_and_step(augmentation):
    def plan(seed):
        return ArrayPlan(image_data(), 'train', rows=8, seed=seed, **augmentation)

    forwards = [plan(1).batch(step) for step in range(8)]
    one = plan(1)
    backwards = [one.batch(step) for step in reversed(range(8))][::-1]
    assert all(map(equal, forwards, backwards))
    assert not equal(plan(2).batch(0), forwards[0])


def test_crop_moves_an_image_by_up_to_its_pixels():
    whole = np.random.default_rng(0).integers(1, 256, (16, 6, 5, 2), np.uint8)
    plan = ArrayPlan(in_memory(whole, CLASSES[:1].repeat(16)), 'train', rows=16, seed=0, crop=2)
    padded = np.pad(whole, ((0, 0), (2, 2), (2, 2), (0, 0))) / 127.5 - 1
    places = set()
    for step in range(20):
        members = plan(step)
        for image, member in zip(plan.batch(step)['inputs']['inputs'], members, strict=True):
            found = [(top, left) for top in range(5) for left in range(5)
                     if np.allclose(padded[member, top:top + 6, left:left + 5], image, atol=1e-5)]
            assert len(found) == 1
            places.update(found)
    assert len(places) == 25


def test_flip_mirrors_half_of_the_images():
    data = image_data(16)
    plan = ArrayPlan(data, 'train', rows=16, seed=0, flip=True)
    mirrored = 0
    for step in range(20):
        images = plan.batch(step)['inputs']['inputs']
        left, right = images[:, 0, 0, 0] > -1, images[:, 0, -1, 0] > -1
        assert np.array_equal(left, ~right) and (images[:, 1:] == -1).all()
        mirrored += right.sum()
    assert 120 < mirrored < 200


def test_mixup_is_the_weighted_mean_of_two_examples_of_the_batch():
    whole = np.random.default_rng(0).normal(size=(12, 3, 3, 1))
    plan = ArrayPlan(in_memory(whole, np.arange(12)), 'train', rows=8, seed=0, mixup=1.0)  # the class is the example
    scaled, shares = float64_standardised(whole), []
    for step in range(40):
        batch, members = plan.batch(step), plan(step)
        assert not batch['weights'][len(members):].any()
        for row, member in enumerate(members):
            (first, second), (share, rest) = batch['targets'][row], batch['weights'][row]
            assert first == member and second in members and share + rest == pytest.approx(1)
            mixed = np.float64(share) * scaled[first] + np.float64(rest) * scaled[second]
            np.testing.assert_allclose(batch['inputs']['inputs'][row], mixed, atol=1e-5)
            shares.append(share)
    assert 0.45 < np.mean(shares) < 0.55 and 0.07 < np.var(shares) < 0.1  # Beta(1, 1): 1/2 and 1/12


@pytest.mark.parametrize('rows', [1, 12, 30])
@pytest.mark.parametrize('shares, accumulate, processes', [(1, 1, 1), (3, 1, 3), (5, 3, 5), (8, 1, 2), (16, 2, 4)])
def test_any_number_of_devices_shares_a_batch(rows, shares, accumulate, processes):
    plan = ArrayPlan(image_data(21), 'train', rows=rows, seed=1, crop=2, flip=True, mixup=0.2)
    for step in range(len(plan) + 1):
        assert_filled_up(plan, step, shares, accumulate, processes)


@pytest.mark.parametrize('augmentation', [{'crop': 1}, {'flip': True}])
def test_series_are_not_cropped(augmentation):
    with pytest.raises(UserError, match=r'data\.crop=\d and flip=\w+ are for images, but the inputs are series'):
        ArrayPlan(in_memory(INPUTS, CLASSES), 'train', rows=8, seed=0, **augmentation)


def test_description():
    assert ArrayPlan(image_data(), 'train', rows=8, seed=0).describe() == (
        'train: 21 examples of 6 x 6 x 1; 3 batches of 8 per epoch; 12.5 % of the rows are padding')


# Numbers of every type and size

EARLIER = 'be8e46494923f6e91446084869cc0f5bd4877970e265a39dedf986cc7fb08893'  # computed by an earlier version


def float64_standardised(raw):
    wide = raw.astype(np.float64)
    axes = tuple(range(raw.ndim - 1))
    return (wide - wide.mean(axis=axes)) / wide.std(axis=axes)


@pytest.mark.parametrize('kind', [np.uint8, np.int8, np.int16, np.int64, np.float32, np.float64, '>f8', '>i2'])
def test_a_series_is_standardised_whatever_the_type_of_its_numbers(kind):
    raw = np.random.default_rng(0).integers(0, 4, (40, 16, 2)).astype(kind)
    data = in_memory(raw, np.arange(40) % 3)
    batch = ArrayPlan(data, 'train', rows=40, seed=None).batch(0)['inputs']['inputs']
    assert batch.dtype == np.float32
    np.testing.assert_allclose(batch, float64_standardised(raw), atol=1e-6)
    np.testing.assert_allclose(batch.std(axis=(0, 1)), 1, atol=1e-5)


def test_large_values_keep_their_differences():
    rng = np.random.default_rng(0)
    raw = np.stack([1.7e9 + rng.uniform(0, 64, (400, 128)), rng.normal(size=(400, 128))], axis=-1)
    values = 1.7e9 + rng.uniform(0, 64, (400, 1))
    data = in_memory(raw, values, labelled=False)
    batch = ArrayPlan(data, 'train', rows=400, seed=None).batch(0)
    inputs, targets = batch['inputs']['inputs'], batch['targets']
    assert inputs.dtype == targets.dtype == np.float32
    np.testing.assert_allclose(inputs, float64_standardised(raw), atol=3e-7)
    np.testing.assert_allclose(targets, float64_standardised(values), atol=3e-7)
    assert len(np.unique(inputs[..., 0])) > 0.999 * 51_200
    np.testing.assert_allclose(data.preprocessing.values(targets), values, rtol=0, atol=1e-5)


def test_large_whole_numbers_keep_their_differences():
    raw = np.arange(40 * 16, dtype=np.int64).reshape(40, 16, 1) + 2 ** 40
    batch = ArrayPlan(in_memory(raw, CLASSES.repeat(4)), 'train', rows=40, seed=None).batch(0)
    np.testing.assert_allclose(batch['inputs']['inputs'], float64_standardised(raw), atol=1e-6)


def test_byte_images_have_the_bits_of_float32_arithmetic():
    raw = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    found = in_memory(raw, CLASSES[:1]).preprocessing.inputs(raw)
    np.testing.assert_array_equal(found, (raw.astype(np.float32) - np.float32(127.5)) / np.float32(127.5), strict=True)


def test_a_change_that_float32_hides_changes_the_fingerprint_of_large_values_only():
    def fingerprints(raw):
        return in_memory(raw, CLASSES).fingerprint('train')

    large = 1.7e9 + np.arange(140.0).reshape(10, 7, 2) / 4
    assert fingerprints(large) != fingerprints(large + 0.25)


@pytest.mark.parametrize('raw', [INPUTS, 1.7e9 + np.arange(140.0).reshape(10, 7, 2)], ids=['ordinary', 'large'])
def test_every_different_example_counts_for_the_held_out_splits(raw):
    def held_out(inputs):
        data = ArrayData(lambda split: Examples(inputs, INPUTS[:, 0, :1], 'file'), False,
                         parts=Parts(('validation',), 0.3))
        return {split: data.inputs(split) for split in ('train', 'validation')}

    found = held_out(raw)
    assert [len(found[split]) for split in ('train', 'validation')] == [7, 3]
    assert np.array_equal(np.sort(np.concatenate([*found.values()]), axis=0), np.sort(raw, axis=0))
    if raw is INPUTS:  # as earlier versions, which converted the numbers to float32, chose them
        np.testing.assert_array_equal(found['validation'].astype(np.float32),
                                      held_out(raw.astype(np.float32))['validation'])


def test_ordinary_numbers_have_the_fingerprints_of_earlier_versions():
    """float32 as an earlier version converted them, so that its runs resume; a constant channel is ordinary, too."""
    raw = np.concatenate([INPUTS, np.full((10, 7, 1), 0.1)], axis=-1)
    for kind in np.float64, np.float32, '>f8':
        assert in_memory(raw.astype(kind), CLASSES).fingerprint('train') == in_memory(
            raw.astype(np.float32), CLASSES).fingerprint('train') == {
                'source': 'arrays', 'files': [['file of train', EARLIER]]}


@pytest.mark.parametrize('kind', [np.uint8, np.int16])
def test_splits_may_be_of_different_types(kind):
    raw = np.random.default_rng(0).integers(0, 4, (10, 7, 2))
    data = in_memory(raw.astype(np.uint8), CLASSES, test=(raw.astype(kind), CLASSES))
    np.testing.assert_array_equal(data.inputs('test'), raw)


def test_a_split_of_images_in_another_encoding_is_converted_if_this_is_exact():
    pictures = images(10)
    data = in_memory(pictures, CLASSES, test=(pictures.astype(np.float32) / 255, CLASSES),
                     validation=(pictures / 510, CLASSES))
    np.testing.assert_array_equal(data.inputs('test'), pictures, strict=True)
    with pytest.raises(UserError, match=r'file of validation: inputs: value 0\.\d+ of example 0 is neither a byte'):
        data.inputs('validation')
