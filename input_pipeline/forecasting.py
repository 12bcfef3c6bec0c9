"""Windows of time series, for forecasting. The validation and test splits are the last steps of each series.

    steps of a series:  0 ........ training | validation | test ...... n

The targets of a window are the `horizon` steps after the context. All targets of a window are in one split, so no step
is a target in two splits. The context of a validation or test window may reach back into the previous split, because
these steps are already known at the time of the forecast.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict
from typing_extensions import override

from input_pipeline.arrays import ArrayData
from input_pipeline.examples import Examples
from input_pipeline.preprocessing import Preprocessing, mean_and_std
from input_pipeline.series_tables import read_histories
from input_pipeline.splits import SPLITS
from runtime.errors import UserError
from runtime.files import expanded
from runtime.once import log_once

Series = Mapping[str, Float[np.ndarray, 'time channels']]


class SeriesWindows(ArrayData):
    """The windows of time series.

    An input is a context, [context, channels]. The target of an input is the values of the following `horizon` steps,
    flattened to [horizon x channels].
    """

    def __init__(self, series: Series, channels: Sequence[str], where: str, data: ConfigDict):
        """Divides the series by time.

        Args:
          series: {name: values}.
          channels: the names of the channels.
          where: the name of the data in messages.
          data: config.data.

        Raises:
          UserError: if a series is too short.
        """
        self._series, self._where, self._season = series, where, data['season']
        self._context, self._horizon, self._channels = data['context'], data['horizon'], channels
        self._ends = {name: self._checked_ends(name, len(values), data['validation_share'])
                      for name, values in series.items()}
        names = tuple(f'{channel}+{step}' for step in range(1, self._horizon + 1) for channel in channels)

        def load(split: str) -> Examples:
            windows = np.concatenate([self._windows(name, split) for name in series])
            return Examples(windows[:, :self._context], windows[:, self._context:].reshape(len(windows), -1),
                            f'{where} ({split})', channels=tuple(channels), values=names)

        super().__init__(load, labelled=False)

    @override
    def _warn_of_shared(self, examples: Examples) -> None:
        """Logs nothing. The windows of two splits have targets at different times, even if their values are equal."""

    @functools.cached_property
    def preprocessing(self) -> Preprocessing:
        """The standardisation of inputs and targets, with mean and standard deviation of the training contexts."""
        mean, std = mean_and_std(self.inputs('train'), f'{self._where} (train): inputs')
        return Preprocessing(mean, std, mean * self._horizon, std * self._horizon)

    @override
    def names(self, split: str) -> list[str]:
        """Returns the name of the series and the index of the first target step of each window, as 'SERIES:STEP'."""
        return [f'{name}:{step}' if name else str(step) for name in self._series
                for step in self._first_steps(name, split)]

    def naive_errors(self, split: str) -> Float[np.ndarray, 'windows channels']:
        """Returns, for each window, the divisor of the scaled error (Hyndman and Koehler 2006, section 3).

        The forecast that repeats the value of one season earlier has an absolute error at each step. The divisor is the
        mean of these errors over the training steps of the series. The divisor of a channel that repeats exactly after
        each season is 0. Logs the number of such series.
        """
        constant = sum(not self._seasonal_error(name).all() for name in self._series)
        if constant:
            log_once(f'{self._where}: the training steps of {constant} of {len(self._series)} series repeat exactly '
                     f'after config.data.season={self._season} steps. The mean absolute scaled error does not include '
                     'them' + ' (only the channels that repeat)' * (len(self._channels) > 1))
        return np.concatenate([np.tile(self._seasonal_error(name), (len(self._windows(name, split)), 1))
                               for name in self._series])

    def check_scaled_error(self) -> None:
        """Checks that the scaled error is defined.

        Raises:
          UserError: if a channel repeats exactly after each season, so that the divisor of its error is 0.
        """
        for name in self._series:
            if not self._seasonal_error(name).all():
                remove = ', or remove the series' if len(self._series) > 1 else ''
                raise UserError(f'{self._named(name)} repeats exactly after config.data.season={self._season} steps, '
                                'so config.eval.metric=mean_absolute_scaled_error is not defined. Use '
                                f'--config.eval.metric=absolute_error{remove}')

    def _seasonal_error(self, name: str) -> Float[np.ndarray, ' channels']:
        """Returns the mean absolute error of the forecast that repeats the last season, over the training steps."""
        past = self._series[name][:self._ends[name][0]]
        return np.abs(past[self._season:] - past[:-self._season]).mean(axis=0)

    def _named(self, name: str) -> str:
        """Returns the name of a series in messages."""
        return f'{self._where}: series {name!r}' if name else f'{self._where}: the series'

    def _windows(self, name: str, split: str) -> Float[np.ndarray, 'windows steps channels']:
        """Returns the windows of a series with all targets in the split `split`, in the order of time."""
        steps = self._first_steps(name, split)
        values = self._series[name][steps.start - self._context:steps.stop - 1 + self._horizon]
        views = np.lib.stride_tricks.sliding_window_view(values, self._context + self._horizon, axis=0)
        return views.transpose(0, 2, 1)

    def _first_steps(self, name: str, split: str) -> range:
        """Returns the index of the first target step of each window of a series in `split`."""
        index = SPLITS.index(split)
        begin, end = (self._context, *self._ends[name])[index:index + 2]
        return range(begin, end - self._horizon + 1)

    def _checked_ends(self, name: str, steps: int, share: float) -> tuple[int, int, int]:
        """Returns the end indices of the training, validation and test steps of a series.

        Raises UserError if the series is too short.
        """
        held_out, window = round(steps * share), self._context + self._horizon
        series = self._named(name)
        if steps - 2 * held_out < window:
            raise UserError(f'{series} has {steps} steps, of which {max(0, steps - 2 * held_out)} are for training '
                            f'(config.data.validation_share={share}). At least config.data.context + '
                            f'config.data.horizon = {window} are needed. Decrease one of these options, or remove the '
                            'series')
        if held_out < self._horizon:
            raise UserError(f'{series} has {steps} steps, of which {held_out} are for validation and {held_out} for '
                            f'the test (config.data.validation_share={share}). At least config.data.horizon='
                            f'{self._horizon} are needed. Increase the share, or decrease the horizon')
        return steps - 2 * held_out, steps - held_out, steps


def open_series(data: ConfigDict, metric: str) -> SeriesWindows:
    """Opens the series that `config.data` describes: a table, or a built-in data set.

    Args:
      data: config.data.
      metric: config.eval.metric.

    Raises:
      UserError: if the series cannot be read, a series is too short, or `metric` is not defined for the series.
    """
    if data['source'] == 'builtin':
        windows = SeriesWindows({'': BUILTIN[data['name']]()}, (data['name'],), data['name'], data)
    else:
        path = expanded(data['file'])
        series, channels = read_histories(path)
        windows = SeriesWindows(series, channels, str(path), data)
    if metric == 'mean_absolute_scaled_error':
        windows.check_scaled_error()
    return windows


def co2() -> Float[np.ndarray, 'weeks 1']:
    """Returns the weekly CO2 concentration of the air at Mauna Loa, Hawaii, in ppm: 2,284 weeks from 1958 to 2001.

    The data (Keeling and Whorf, Scripps Institution of Oceanography) is in the package statsmodels. The 59 missing
    weeks, all in the training split, are interpolated linearly.

    Raises:
      UserError: if statsmodels is not installed.
    """
    try:
        from statsmodels.datasets import co2 as data  # an optional package
    except ImportError:
        raise UserError('config.data.name=co2 needs the package statsmodels, which contains the data. Run '
                        'pip install statsmodels') from None
    frame: Any = data.load_pandas().data
    return frame['co2'].interpolate().to_numpy()[:, None]


# Built-in series: the value of config.data.name -> the function that returns the series.
BUILTIN = {'co2': co2}
