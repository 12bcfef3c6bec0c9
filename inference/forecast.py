"""Forecasts time series, and compares the errors with the errors of naive forecasts."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Float, Num
from ml_collections import ConfigDict
from typing_extensions import override

from inference.options import SearchOptions
from inference.predict import Predictor, Table
from inference.predictions import Prediction, value_cells
from inference.scores import Evaluation
from input_pipeline.data import ExampleData, SeriesData
from input_pipeline.input_format import InputFormat
from model import Params
from model.losses import Sums

ROWS = 256  # maximum number of contexts at a time, in an evaluation and in `Forecaster.arguments`

Steps = Float[np.ndarray, 'windows horizon channels']


class Forecaster(Predictor):
    """A model that forecasts time series, with its parameters. The forecast of a series is a `Prediction` of values.

    Attributes:
      horizon: the number of steps of a forecast.
      season: the number of steps of a season, for the seasonal-naive forecast.
    """

    def __init__(self, module: nn.Module, params: Params, form: InputFormat, horizon: int, season: int):
        super().__init__(module, params, form)
        self.horizon, self.season = horizon, season
        self._decode = jax.jit(self._decoded)

    @override
    def example_arguments(self) -> dict[str, Any]:
        return super().example_arguments() | {'following': jnp.zeros((1, self.horizon, self.shape[-1]))}

    @override
    def arguments(self, raw: Num[np.ndarray, 'examples context channels']) -> dict[str, np.ndarray]:
        """Returns the arguments of the module for the contexts `raw`.

        The argument 'following' is the forecast of the model for the steps after the context, in standardised units.
        """
        arguments = super().arguments(raw)
        inputs = arguments['inputs']
        following = [process_allgather(self._decode(self.params, inputs[begin:begin + ROWS]), tiled=True)
                     for begin in range(0, max(1, len(inputs)), ROWS)]
        return arguments | {'following': np.concatenate(following)}

    def _decoded(self, params: Params, inputs: jax.Array) -> jax.Array:
        """Returns the autoregressive forecast [batch, horizon, channels]: each patch is an input for the next patches.

        A pass computes all patches. Because of the causal mask, patch k depends only on the patches before it. So after
        k passes, the first k patches no longer change. A cache would save time only for long series.
        """
        following = jnp.zeros((len(inputs), self.horizon, self.shape[-1]))

        def one_pass(_, following):
            outputs: Any = self.module.apply({'params': params}, inputs=inputs, following=following)
            return outputs.reshape(following.shape)

        patch: int = self.module.patch
        return jax.lax.fori_loop(0, self.horizon // patch, one_pass, following)

    @override
    def seen(self, prediction: Prediction) -> Num[np.ndarray, 'steps channels']:
        """Returns the steps that the model reads: the context, and the forecast without its last patch."""
        forecast = prediction.output.reshape(self.horizon, -1)
        return np.concatenate([prediction.example, forecast[:-self.module.patch]])

    @override
    def validate(self, data: ExampleData, sums: Sums, config: ConfigDict) -> Evaluation:
        """Returns the errors of the forecasts of the validation split, and the first forecast with its attention."""
        assert isinstance(data, SeriesData), 'forecasts need windows of series'
        forecasts, answer = self._forecasts(data, 'validation', ROWS)
        scores = forecast_scores(forecasts, self._targets(data, 'validation'), data.arrays.naive_errors('validation'))
        return Evaluation({name: scores[name] for name in ('mean_absolute_scaled_error',) if name in scores},
                          answer=answer, weights=self.attention(answer))

    @override
    def score(self, data: ExampleData, split: str, config: ConfigDict,
              options: SearchOptions) -> tuple[dict[str, Any], Table]:
        """Returns the errors of the forecasts and of the naive forecasts, and the forecast of each window.

        'by_step' has the errors of each step of the horizon.
        """
        assert isinstance(data, SeriesData), 'forecasts need windows of series'
        targets, scale = self._targets(data, split), data.arrays.naive_errors(split)
        forecasts, _ = self._forecasts(data, split, options.batch_size)
        contexts = data.arrays.inputs(split)
        systems = {'model': forecasts, **naive_forecasts(contexts, self.horizon, self.season)}
        scores = {name: forecast_scores(steps, targets, scale) for name, steps in systems.items()}
        by_step = {step + 1: {name: forecast_scores(steps[:, step:step + 1], targets[:, step:step + 1], scale)
                              for name, steps in systems.items()} for step in range(self.horizon)}
        header = tuple(f'{kind}_{name}' for kind in ('target', 'value') for name in self.form.targets)
        rows = [(*value_cells(target), *value_cells(forecast), name) for target, forecast, name in zip(
            targets.reshape(len(targets), -1), forecasts.reshape(len(targets), -1), data.arrays.names(split),
            strict=True)]
        model = scores.pop('model')
        return {'n': len(targets), 'horizon': self.horizon, 'season': self.season, **model, 'baselines': scores,
                'by_step': by_step}, [(*header, 'name'), *rows]

    def _forecasts(self, data: SeriesData, split: str, batch_size: int) -> tuple[Steps, Prediction]:
        """Returns the forecasts for the windows of a split, and the first forecast as a Prediction."""
        predictions = self.predict_raw(data.arrays.inputs(split), batch_size)
        return predictions.outputs.reshape(len(predictions), self.horizon, -1), predictions[0]

    def _targets(self, data: SeriesData, split: str) -> Steps:
        targets = data.arrays.targets(split)
        return targets.reshape(len(targets), self.horizon, -1)


def naive_forecasts(contexts: Num[np.ndarray, 'windows context channels'], horizon: int,
                    season: int) -> Mapping[str, Steps]:
    """Returns two forecasts: 'naive' repeats the last value, and 'seasonal_naive' repeats the last season."""
    def repeated(period: int) -> Steps:
        steps = contexts.shape[1] - period + np.arange(horizon) % period
        return contexts[:, steps].astype(np.float64)
    return {'naive': repeated(1), 'seasonal_naive': repeated(season)}


def forecast_scores(forecasts: Steps, targets: Steps, scale: Float[np.ndarray, 'windows channels']
                    ) -> dict[str, float]:
    """Returns the errors of forecasts, as means over all windows, steps and channels.

    The scaled error is the absolute error divided by `scale` (`SeriesWindows.naive_errors`), so it has no unit. It does
    not include windows and channels whose scale is 0. If all scales are 0, the result has no scaled error. The root
    mean squared error and the absolute error are in the unit of the series.
    """
    error = np.abs(forecasts.astype(np.float64) - targets)
    scores = {'root_mean_squared_error': float(np.mean(error ** 2) ** 0.5), 'mean_absolute_error': float(error.mean())}
    if scale.any():
        scaled = np.divide(error, scale[:, None], where=(scale > 0)[:, None], out=np.full_like(error, np.nan))
        scores['mean_absolute_scaled_error'] = float(np.nanmean(scaled))
    return scores
