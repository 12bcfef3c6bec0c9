"""The form of a model's inputs: conversions that are exact, and inputs that are refused."""

import dataclasses
import json

import numpy as np
import pytest

from input_pipeline.arrays import ArrayData
from input_pipeline.examples import Examples
from input_pipeline.input_format import InputFormat
from runtime import once
from runtime.errors import UserError

BYTES = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 1)).astype(np.uint8)
BINARY = (BYTES > 100).astype(np.uint8)
SERIES = np.linspace(0, 1, 40).reshape(4, 5, 2)


def form_of(inputs, labelled=True):
    """Returns the form that a run stores after a training on these inputs, written to JSON and read again."""
    data = ArrayData(lambda split: Examples(inputs, np.arange(len(inputs)) % 2, 'file'), labelled)
    return InputFormat.of(json.loads(json.dumps(data.sizes | data.described)))


@pytest.mark.parametrize('trained', [BYTES, BYTES.astype(np.float64), BYTES / 255, (BYTES / 255).astype(np.float32)])
@pytest.mark.parametrize('new', [BYTES, BYTES.astype(np.int64), BYTES.astype(np.float32), BYTES / 255,
                                 (BYTES / 255).astype(np.float32), BYTES.astype(np.float32) / 255, BYTES.tolist()])
def test_bytes_and_bytes_divided_by_255_are_converted_into_each_other(trained, new):
    form = form_of(trained)
    expected = form.preprocessing.inputs(trained)
    np.testing.assert_allclose(form.preprocessing.inputs(form.prepare(new)), expected, rtol=1e-5, atol=1e-6)
    if trained.dtype == np.uint8:
        np.testing.assert_array_equal(form.prepare(new), trained, strict=True)


@pytest.mark.parametrize('trained, new, message', [
    (BYTES, BYTES / 510, r'value 0\.\d+ of example \d is neither a byte \(0 to 255\) nor .* Convert .* to uint8'),
    (BYTES, BYTES.astype(np.int64) - 300, 'inputs: value -.* of example 0 is neither a byte'),
    (BYTES, BYTES * np.int64(2), 'is neither a byte'),
    (BYTES, BINARY.astype(np.float32), 'inputs have the type float32 and only the values 0 and 1.* 1 or 255'),
    (BYTES / 255, BYTES / 100, 'is neither a byte'),
    (BYTES / 128 - 1, BYTES, r'6 of 6 examples are far outside .*value \d+ in channel 0 of example 0\. In training, '
                             r'this channel was -1 to 0\.9'),
])
def test_images_of_another_encoding_are_refused(trained, new, message):
    with pytest.raises(UserError, match=message):
        form_of(trained).prepare(new)


def test_images_that_are_only_0_and_1_keep_their_numbers():
    for trained in BINARY.astype(np.float32), BINARY.astype(np.int64):
        np.testing.assert_array_equal(form_of(trained).prepare(BINARY), BINARY)


def test_series_far_outside_the_range_of_training_are_predicted_with_a_warning(caplog):
    once.warn_once.cache_clear()
    form = form_of(SERIES)
    np.testing.assert_array_equal(form.prepare(SERIES + 0.5), SERIES + 0.5)
    assert 'far outside' not in caplog.text
    form.prepare(SERIES + [0, 7])
    assert ('4 of 4 examples are far outside the range of the training data, such as value 7.02564 in channel 1 of '
            'example 0. In training, this channel was 0.025641 to 1') in caplog.text


def test_a_run_of_an_earlier_version_accepts_what_it_can_convert():
    sizes = {'outputs': 2, 'shape': [5, 4, 1], 'classes': ['0', '1'],
             'preprocessing': dataclasses.asdict(form_of(BYTES).preprocessing)}
    form = InputFormat.of(sizes)
    np.testing.assert_array_equal(form.prepare(BYTES / 255), BYTES, strict=True)
    with pytest.raises(UserError, match='neither a byte'):
        form.prepare(BYTES / 510)
    sizes['preprocessing'] |= {'input_mean': [0.0], 'input_std': [1.0]}
    np.testing.assert_array_equal(InputFormat.of(sizes).prepare(BYTES - 1e5), BYTES - 1e5)


@pytest.mark.parametrize('inputs, message', [
    (BYTES[0], r'have the shape \(5, 4, 1\), but the model reads \[n, 5, 4, 1\]\. A single example .*inputs\[None\]'),
    (BYTES[..., 0], r'Greyscale images need an axis of channels: inputs\[\.\.\., None\]'),
    (np.where(BYTES[3, 1, 1] == BYTES, np.nan, BYTES), r'must be finite numbers .* example \d contains nan'),
    (np.where(np.arange(6)[:, None, None, None] == 4, np.inf, BYTES), 'but example 4 contains inf'),
    (BYTES.astype(str), "must be finite numbers, but their type is <U., such as np.str_"),
    (BYTES * 1j, r'their type is complex128, such as np\.complex128'),
])
def test_the_example_of_a_mistake_is_named(inputs, message):
    with pytest.raises(UserError, match=message):
        form_of(BYTES).prepare(inputs)


@pytest.mark.parametrize('kind', ['padded', 'missing', 'latest'])
@pytest.mark.parametrize('inputs, message', [
    (np.array(1.0), r'inputs have the shape \(\), but the model reads \[n, 5, 2\]$'),
    ([[[1.0, 2.0], [3.0]], [[4.0, 5.0]]], 'inputs: example 0 is not an array'),
    (SERIES * 1j, r'inputs must be finite numbers, but their type is complex128, such as'),
    (SERIES > 0.5, 'inputs must be finite numbers, but their type is bool, such as'),
    (np.ones((50, 2)), r'inputs have the shape \(50, 2\), .* A single example needs an axis of examples: inputs\['),
])
def test_inputs_that_are_no_series_are_refused_by_models_of_series_of_several_lengths(kind, inputs, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(form_of(SERIES), **{kind: True}).prepare(inputs)


def test_series_without_an_axis_of_channels_are_not_called_images():
    with pytest.raises(UserError, match=r'\[n, 5, 1\]\. Series of one channel need an axis of channels: inputs\['):
        form_of(SERIES[..., :1]).prepare(SERIES[..., 0])


def test_padding_beyond_the_longest_training_series_is_ignored():
    form = dataclasses.replace(form_of(SERIES), padded=True)
    series = np.pad(SERIES, [(0, 0), (0, 3), (0, 0)], constant_values=np.nan)
    np.testing.assert_array_equal(form.prepare(series), SERIES)
    series[2, 6] = 0.5
    with pytest.raises(UserError, match=r'example 2 has the shape \(7, 2\), but the model reads series of at most 5 '):
        form.prepare(series)
