"""The forecaster against NumPy in float64, and its causal mask."""

import jax.numpy as jnp
import numpy as np
import pytest

from model.blocks import BlockConfig
from model.forecaster import SMALLEST_VARIANCE, Forecaster
from tests.model import reference
from tests.model.helpers import close, float64, normal, random_params

CONTEXT, FOLLOWING = normal(1, 2, 6, 2) + 3, normal(2, 2, 4, 2) + 3  # patches of 2 steps: 3 of context, 2 to forecast


def build(position):
    model = Forecaster(BlockConfig(d_model=8, d_ff=12, num_heads=2, dropout=0.0, norm='pre', position=position),
                       num_layers=2, patch=2)
    return model, {'params': random_params(model, CONTEXT, FOLLOWING)}


def plain_forecast(params, context, following, position):
    """Computes the predictions of one example: one channel and one patch at a time."""
    mean, scale = context.mean(axis=0), np.sqrt(context.var(axis=0) + SMALLEST_VARIANCE)
    series = (np.concatenate([context, following[:-2]]) - mean) / scale
    x = np.stack([series[begin:begin + 2].reshape(-1) @ params['embedding']['kernel'] + params['embedding']['bias']
                  for begin in (0, 2, 4, 6)])
    if position == 'sinusoidal':
        x = x + reference.sinusoids(4, 8)
    if position == 'learned':
        x = x + params['positions']
    x = reference.stack(params['encoder'], reference.encoder_block, x, np.tril(np.ones((4, 4), bool)), norm='pre')
    predictions = []
    for patch in (2, 3):  # the last patch of the context, and the first patch after it
        change = (x[patch] @ params['head']['kernel'] + params['head']['bias']).reshape(2, 2)
        predictions += [(series[2 * patch + 1] + row) * scale + mean for row in change]
    return np.stack(predictions)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('position', ['sinusoidal', 'learned', 'none'])
def test_forecasts_are_the_equations(position):
    model, variables = build(position)
    params = float64(variables['params'])
    pairs = zip(float64(CONTEXT), float64(FOLLOWING), strict=True)
    expected = [plain_forecast(params, *pair, position) for pair in pairs]
    close(model.apply(variables, CONTEXT, FOLLOWING), np.reshape(expected, (2, 8)))


def test_no_series_have_no_forecasts():
    model, variables = build('sinusoidal')
    assert model.apply(variables, CONTEXT[:0], FOLLOWING[:0]).shape == (0, 8)


def test_a_prediction_does_not_depend_on_the_steps_that_it_predicts():
    model, variables = build('sinusoidal')
    predictions = model.apply(variables, CONTEXT, FOLLOWING).reshape(2, 4, 2)
    changed = model.apply(variables, CONTEXT, FOLLOWING.at[:, 1].add(5)).reshape(2, 4, 2)
    close(changed[:, :2], predictions[:, :2], atol=0)
    assert not np.allclose(changed[:, 2:], predictions[:, 2:], atol=1e-2)


def test_level_and_scale_of_a_series_only_change_level_and_scale_of_its_forecast():
    model, variables = build('sinusoidal')
    predictions = model.apply(variables, 100 * CONTEXT, 100 * FOLLOWING)
    close(model.apply(variables, 300 * CONTEXT - 50, 300 * FOLLOWING - 50), 3 * predictions - 50, atol=1e-3)
    assert jnp.isfinite(model.apply(variables, jnp.ones_like(CONTEXT), FOLLOWING)).all()  # a constant context
