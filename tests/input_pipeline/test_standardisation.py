"""Scaling and standardisation of inputs and values, and their fingerprints."""

import dataclasses
import json

import numpy as np
import pytest

from input_pipeline.array_batches import ArrayPlan
from input_pipeline.arrays import ArrayData
from input_pipeline.examples import Examples
from input_pipeline.preprocessing import Preprocessing, recorded
from input_pipeline.splits import Parts
from runtime.errors import UserError
from tests.input_pipeline.helpers import CLASSES, INPUTS, float64_standardised, images, in_memory

# Preprocessing

def test_images_become_minus_one_to_one():
    preprocessing = in_memory(np.zeros((2, 4, 4, 3), np.uint8), CLASSES[:2]).preprocessing
    raw = np.array([0, 51, 255] * 4, np.uint8).reshape(1, 2, 2, 3)
    np.testing.assert_allclose(preprocessing.inputs(raw)[0, 0, 0], [-1, -0.6, 1], atol=1e-6)


@pytest.mark.parametrize('value', [5.0, 0.1, 9.81])  # the computed mean of 70 times 0.1 is not 0.1
def test_channels_and_values_are_standardised_by_the_training_split(value):
    constant = np.concatenate([INPUTS, np.full((10, 7, 1), value)], axis=-1)
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


# Numbers of every type and size

EARLIER = 'be8e46494923f6e91446084869cc0f5bd4877970e265a39dedf986cc7fb08893'  # computed by an earlier version


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


@pytest.mark.parametrize('raw, kind', [(INPUTS, np.float32), (1.7e9 + np.arange(140.0).reshape(10, 7, 2), np.float64)],
                         ids=['ordinary', 'large'])
def test_padding_does_not_hide_large_values_from_the_fingerprint(raw, kind):
    padded = raw.copy()
    padded[3:, 5:] = np.nan
    assert recorded(padded).dtype == recorded(raw).dtype == kind
    np.testing.assert_array_equal(recorded(padded), padded.astype(kind))


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
