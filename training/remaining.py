"""The progress bar of a training. The remaining time is estimated from measured steps and evaluations."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from runtime.agreement import is_leader
from runtime.process_setup import Lossy
from training.curve import in_notebook
from training.summary import duration

MEASURED = 10  # number of measured steps before an estimate is logged

log = logging.getLogger('allyouneed.train')


class RemainingTime:
    """Estimates the remaining time of a training from the steps and evaluations since this process started.

    Devices compute steps in the background, so the duration of a call is not the duration of a step. Instead, the steps
    that finish in an interval of time are counted. `restart` begins a new interval, and `step_done` counts a finished
    step.
    """

    def __init__(self, config: ConfigDict):
        self._last, self._every = config.train.steps, config.eval.every
        self._seconds, self._steps = 0.0, 0          # the totals of all earlier intervals
        self._evaluation = 0.0                       # seconds of the latest evaluation
        self._began, self._now, self._done = time.perf_counter(), 0.0, 0  # the current interval
        self._logged = False

    def restart(self) -> None:
        """Begins a new interval. Do not call `step_done` for steps that have begun before this call."""
        self._seconds, self._steps = self._seconds + self._now, self._steps + self._done
        self._began, self._now, self._done = time.perf_counter(), 0.0, 0

    def step_done(self) -> None:
        """Counts a finished step in the current interval."""
        self._now, self._done = time.perf_counter() - self._began, self._done + 1

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Measures the duration of the body, which must be one evaluation."""
        began = time.perf_counter()
        yield
        self._evaluation = time.perf_counter() - began

    def seconds_after(self, step: int) -> float | None:
        """Returns the estimated remaining seconds after `step`, or None if no step has been measured yet.

        After the first evaluation, the estimate includes the remaining evaluations. The estimate is logged once, after
        MEASURED steps.
        """
        count = self._steps + self._done
        if not count:
            return None
        per_step = (self._seconds + self._now) / count
        evaluations = -(-self._last // self._every) - (step - 1) // self._every  # the last step is evaluated, too
        seconds = (self._last - step) * per_step + evaluations * self._evaluation
        if count >= MEASURED and step < self._last and not self._logged:
            self._logged = True
            log.info('%.2g s per step: about %s remaining (%s steps%s)', per_step, duration(seconds),
                     f'{self._last - step:,}', '' if self._evaluation else ', without evaluations')
        return seconds


class ProgressBar(tqdm):
    """A progress bar on stderr. The training loop sets the remaining time.

    tqdm's own estimate would include the compile time.
    """

    remaining = '?'

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values for the placeholders in `bar_format`, as a dictionary."""
        return {**super().format_dict, 'left': self.remaining}

    def show_step(self, seconds: float | None) -> None:
        """Advances the bar by one step. `seconds` is the remaining time, or None if it is unknown."""
        self.remaining = '?' if seconds is None else duration(seconds)
        self.update()


@contextlib.contextmanager
def show_bar(first: int, last: int) -> Iterator[ProgressBar]:
    """Shows a progress bar on stderr, below the log."""
    # In a notebook, the root logger may print the log. tqdm also adds a handler to a logger that does not print, which
    # would print each line again.
    loggers = [logger for logger in (logging.getLogger('allyouneed'), logging.root) if any(
        isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)
        for handler in logger.handlers)]
    bar = ProgressBar(total=last, initial=first, unit='step', file=Lossy(sys.stderr), dynamic_ncols=True,
                      disable=not is_leader(), mininterval=0.2 if sys.stderr.isatty() or in_notebook() else 30,
                      bar_format='{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, remaining {left}{postfix}]')
    with bar, logging_redirect_tqdm(loggers):
        yield bar
