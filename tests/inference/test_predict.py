"""Predictor.predict: the inputs that it accepts, and the messages about all other inputs."""

import dataclasses
from unittest import mock

import flax.linen as nn
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from inference.options import SearchOptions
from inference.predict import Predictor
from inference.predictions import Prediction
from input_pipeline.data import ExampleData
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing
from runtime.errors import UserError

SERIES = np.random.default_rng(0).normal(5, 2, (3, 4, 2))


@pytest.fixture(scope='module')
def predictor():
    """Its outputs are the standardised numbers of the first step."""
    module = nn.Sequential([lambda inputs: inputs[:, 0], nn.Dense(2, use_bias=False)])
    params = jax.tree.map(lambda kernel: np.eye(2, dtype=np.float32),
                          module.init(jax.random.key(0), np.zeros((1, 4, 2), np.float32))['params'])
    return Predictor(module, params, InputFormat(
        (4, 2), Preprocessing([5.0, 5.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]), targets=('0', '1')))


@pytest.mark.parametrize('inputs', [SERIES, SERIES.astype(np.float32), SERIES.tolist(), SERIES[:0]])
@pytest.mark.parametrize('batch_size', [2, np.int64(64)])
def test_arrays_and_lists_are_predicted_from(predictor, inputs, batch_size):
    expected = [[(value - 5) / 2 for value in series[0]] for series in inputs]
    np.testing.assert_allclose(predictor.predict(inputs, batch_size).outputs, np.reshape(expected, (-1, 2)), rtol=1e-5)


@pytest.mark.parametrize('inputs, message', [
    (SERIES[0], r'inputs have the shape \(4, 2\), but the model reads \[n, 4, 2\]'),
    (SERIES[:, :3], r'inputs have the shape \(3, 3, 2\)'),
    (SERIES[..., None], r'inputs have the shape \(3, 4, 2, 1\)'),
    (SERIES.astype(object), r'inputs must be finite numbers, but their type is object'),
    (SERIES.astype(complex), r'inputs must be finite numbers, but their type is complex128'),
    (SERIES.astype(str), 'inputs must be finite numbers'),
    (SERIES > 5, r'inputs must be finite numbers, but their type is bool'),
    (SERIES * np.nan, 'inputs must be finite numbers'),
    (SERIES * 1e300, 'inputs must be finite numbers'),
    (SERIES * 1e37, 'inputs cannot be standardised: index . of the last axis has a value of .*e[+]3'),
    ([[1.0, 2.0], [3.0]], 'inputs are not an array'),
])
def test_other_inputs_are_refused(predictor, inputs, message):
    with pytest.raises(UserError, match=message):
        predictor.predict(inputs)


def test_the_attention_of_a_raw_input_is_that_of_its_prediction(predictor, monkeypatch):
    form, passed = dataclasses.replace(predictor.form, padded=True), []
    series = Predictor(predictor.module, predictor.params, form)
    monkeypatch.setattr(series, '_attention', lambda params, arguments: passed.append(arguments) or {'attention': {}})
    series.attention(Prediction(np.vstack([SERIES[0, :3], [[np.nan, np.nan]]]), np.zeros(2), form))
    series.attention(SERIES[0, :3])
    for name in 'inputs', 'visible':
        np.testing.assert_array_equal(passed[0][name], passed[1][name])
    for wrong in SERIES, SERIES[0, :, :1], SERIES[0] > 5:
        with pytest.raises(UserError, match='^inputs'):
            series.attention(wrong)


def test_predicted_values_have_names_and_no_probabilities(predictor):
    predictions = predictor.predict_raw(SERIES, names=['a', 'b', 'c'])
    np.testing.assert_allclose(predictions.values, (SERIES[:, 0] - 5) / 2, rtol=1e-5)
    prediction = predictions[1]
    assert prediction.name == 'b' and prediction.values == pytest.approx(
        {'0': (SERIES[1, 0, 0] - 5) / 2, '1': (SERIES[1, 0, 1] - 5) / 2}, rel=1e-5)
    assert prediction.cells == tuple(f'{value:.10g}' for value in predictions.values[1])
    assert predictor.named_target(np.array([1700000013.0, 0.25])) == '1700000013 0.25'
    assert prediction.as_json(1) == {'name': 'b', 'values': prediction.values}
    for name in 'classes', 'labels', 'probabilities':
        with pytest.raises(UserError, match='this run predicts values, not classes. Use .values'):
            getattr(predictions, name)
    with pytest.raises(UserError, match='predicts values'):
        prediction.label  # noqa: B018


def test_results_of_a_split_have_the_names_of_the_examples(predictor):
    arrays = mock.Mock(prepared=lambda split, form: SERIES, targets=lambda split: SERIES[:, 1],
                       names=lambda split: ['a.csv:2', 'a.csv:6', 'a.csv:10'])
    _, [header, *rows] = predictor.score(mock.Mock(ExampleData, arrays=arrays), 'test', ConfigDict(), SearchOptions())
    assert header == ('target_0', 'target_1', 'value_0', 'value_1', 'name')
    assert [row[-1] for row in rows] == ['a.csv:2', 'a.csv:6', 'a.csv:10'] and {*map(len, rows)} == {5}


@pytest.mark.parametrize('count, batch_size, expected', [(3, 100_000, [4]), (3, 2, [2, 2]), (0, 64, [1])])
def test_a_batch_is_not_much_larger_than_the_number_of_inputs(predictor, monkeypatch, count, batch_size, expected):
    rows, apply = [], predictor._apply
    monkeypatch.setattr(predictor, '_apply', lambda params, arguments: (
        rows.append(len(arguments['inputs'])) or apply(params, arguments)))
    assert len(predictor.predict(SERIES[:count], batch_size)) == count and rows == expected


@pytest.mark.parametrize('batch_size', [0, -1, np.int64(0), 10 ** 9])
def test_other_batch_sizes_are_refused(predictor, batch_size):
    with pytest.raises(UserError, match='batch_size='):
        predictor.predict(SERIES, batch_size)
