"""Forecasts: autoregressive decoding, the naive forecasts, and the scores."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from analysis.explain import explain_example
from inference.forecast import Forecaster, forecast_scores, naive_forecasts
from inference.inspection import inspect
from inference.options import SearchOptions
from input_pipeline.data import SeriesData
from input_pipeline.forecasting import SeriesWindows
from model import forecaster
from model.blocks import BlockConfig
from model.losses import Sums
from tests.input_pipeline.helpers import options
from tests.model.helpers import random_params

SETTINGS = {'context': 6, 'horizon': 4, 'season': 3, 'validation_share': 0.2}
SERIES = np.random.default_rng(0).normal(5, 2, (40, 2))


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """The data of a run, with windows of a series in memory."""
    class InMemory(SeriesData):
        def _open(self, config):
            return SeriesWindows({'': SERIES}, ['x', 'y'], 'memory', config.data)
    return InMemory(ConfigDict({'data': options(**SETTINGS), 'seed': 0, 'batch': {'rows': 4}}), None, ())


def forecaster_of(data, horizon):
    """Returns a forecaster with random parameters and patches of 2 steps."""
    module = forecaster.Forecaster(BlockConfig(d_model=8, d_ff=12, num_heads=2, dropout=0.0, norm='pre',
                                               position='learned'), num_layers=1, patch=2)
    params = random_params(module, jnp.zeros((1, 6, 2)), jnp.zeros((1, horizon, 2)))
    names = tuple(f'{name}+{step}' for step in range(1, horizon + 1) for name in 'xy')
    scale = data.arrays.preprocessing
    scale = dataclasses.replace(scale, target_mean=scale.input_mean * horizon, target_std=scale.input_std * horizon)
    form = dataclasses.replace(data.arrays.form, latest=True, targets=names, preprocessing=scale)
    return Forecaster(module, params, form, horizon=horizon, season=3)


@pytest.fixture(scope='module')
def model(data):
    return forecaster_of(data, SETTINGS['horizon'])


@pytest.mark.slow
@pytest.mark.parametrize('horizon', [2, 4, 8])
def test_each_patch_of_a_forecast_is_read_by_the_next_prediction(data, horizon):
    model = forecaster_of(data, horizon)
    contexts = model.form.prepare(SERIES[None, :10])
    scaled = model.preprocessing.inputs(contexts)
    forecast = np.zeros((1, 0, 2), np.float32)
    while forecast.shape[1] < horizon:  # a longer input in each pass: no step is read before it is predicted
        read = np.pad(forecast, ((0, 0), (0, horizon - forecast.shape[1]), (0, 0)), constant_values=7.0)
        outputs = model.module.apply({'params': model.params}, jnp.asarray(scaled),
                                     jnp.asarray(read)).reshape(1, horizon, 2)
        forecast = outputs[:, :forecast.shape[1] + 2]
    expected = forecast * np.array(model.preprocessing.input_std) + np.array(model.preprocessing.input_mean)
    predictions = model.predict(SERIES[None, :10])
    np.testing.assert_allclose(predictions.values, expected.reshape(1, -1), rtol=1e-5)
    np.testing.assert_allclose(model.seen(predictions[0])[6:].ravel(), predictions.values[0, :-4], rtol=1e-5)
    assert model.attention(predictions[0])['encoder'].shape == (1, 2, 2 + horizon // 2, 2 + horizon // 2)


def test_the_values_of_a_forecast_have_the_names_of_their_channels_and_steps(data, model):
    assert data.arrays.form.targets == model.form.targets
    assert list(model.predict(SERIES[None, :10])[0].values) == [
        'x+1', 'y+1', 'x+2', 'y+2', 'x+3', 'y+3', 'x+4', 'y+4']


def test_values_inside_a_forecast_can_be_read(model):
    forecast = model.predict(SERIES[None, :6])[0]
    inspected, = inspect(model, SERIES[None, :6], ['head', 'encoder/layers_0/self_attention/weights'], SearchOptions())
    weights = inspected['encoder/layers_0/self_attention/weights'].values
    np.testing.assert_allclose(weights, model.attention(forecast)['encoder'][0], rtol=1e-5)
    assert inspected['head'].values.shape == (8,)
    explanation = explain_example(model, forecast)
    assert explanation.attention[0].keys == ['window 1', 'window 2', 'window 3', 'window 4']


@pytest.mark.parametrize('count, parts', [(0, [0]), (3, [2, 1])])
def test_many_series_are_forecast_in_batches(model, count, parts, monkeypatch):
    rows, decode = [], model._decode
    contexts = np.lib.stride_tricks.sliding_window_view(SERIES, 6, axis=0)[:count].swapaxes(1, 2)
    expected = decode(model.params, model.preprocessing.inputs(contexts))
    monkeypatch.setattr('inference.forecast.ROWS', 2)
    monkeypatch.setattr(model, '_decode', lambda params, inputs: rows.append(len(inputs)) or decode(params, inputs))
    following = model.arguments(contexts)['following']
    assert rows == parts
    np.testing.assert_allclose(following, expected, rtol=1e-5, atol=1e-6)


def test_naive_forecasts_repeat_the_last_value_or_the_last_season():
    contexts = np.arange(12.0).reshape(1, 6, 2)
    naive, seasonal = naive_forecasts(contexts, 4, 3).values()
    np.testing.assert_array_equal(naive[0], [[10, 11]] * 4)
    np.testing.assert_array_equal(seasonal[0], [[6, 7], [8, 9], [10, 11], [6, 7]])


def test_scores_are_means_over_windows_steps_and_channels():
    rng = np.random.default_rng(1)
    forecasts, targets = rng.normal(size=(2, 3, 4, 2))
    scale = rng.uniform(1, 2, (3, 2))
    expected = np.mean([abs(forecasts[n, t, c] - targets[n, t, c]) / scale[n, c] for n, t, c in np.ndindex(3, 4, 2)])
    scores = forecast_scores(forecasts, targets, scale)
    assert scores['mean_absolute_scaled_error'] == pytest.approx(expected)
    assert scores['root_mean_squared_error'] == pytest.approx(np.sqrt(np.mean((forecasts - targets) ** 2)))
    assert scores['mean_absolute_error'] == pytest.approx(np.abs(forecasts - targets).mean())
    assert 'mean_absolute_scaled_error' not in forecast_scores(forecasts, targets, 0 * scale)
    scale[1] = 0  # a constant series
    scores = forecast_scores(forecasts, targets, scale)
    assert scores['mean_absolute_scaled_error'] == pytest.approx(
        forecast_scores(forecasts[[0, 2]], targets[[0, 2]], scale[[0, 2]])['mean_absolute_scaled_error'])


def test_results_have_the_baselines_and_each_step(model, data):
    results, table = model.score(data, 'test', ConfigDict(), SearchOptions())
    assert results['n'] == 5 == len(table) - 1 and results['horizon'] == 4
    assert list(results['by_step']) == [1, 2, 3, 4]
    assert table[1][:2] == tuple(f'{value:.10g}' for value in SERIES[32])
    assert [row[-1] for row in table] == ['name', '32', '33', '34', '35', '36']
    assert {len(row) for row in table} == {2 * 4 * 2 + 1}
    for system in 'naive', 'seasonal_naive', 'model':
        whole = results if system == 'model' else results['baselines'][system]
        by_step = [step[system]['mean_absolute_error'] for step in results['by_step'].values()]
        assert whole['mean_absolute_error'] == pytest.approx(np.mean(by_step))
    last = np.stack([SERIES[t - 1] for t in range(32, 37)])
    truth = np.stack([SERIES[t + 3] for t in range(32, 37)])
    assert results['by_step'][4]['naive']['mean_absolute_error'] == pytest.approx(np.abs(last - truth).mean())
    evaluation = model.validate(data, Sums(0.0, 1.0, {}), ConfigDict())
    assert list(evaluation.metrics) == ['mean_absolute_scaled_error']
