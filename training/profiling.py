"""Profiles a range of steps with JAX's profiler."""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import jax

from run_directory.records import tensorboard
from runtime.errors import UserError

log = logging.getLogger('allyouneed.train')


class ProfilerWindow:
    """Traces the steps FIRST to LAST, both included, into RUN/tensorboard.

    TensorBoard's profile plugin (the package xprof) shows the trace; ui.perfetto.dev opens its file
    `perfetto_trace.json.gz`.
    """

    def __init__(self, steps: str | None, workdir: Path, of: int = sys.maxsize):
        """`steps` is 'FIRST:LAST' or None; `of` is the number of steps of the run.

        Raises:
          UserError: if `steps` has another form, or FIRST is after the last step.
        """
        self._folder, self._tracing = workdir / 'tensorboard', False
        found = re.fullmatch(r'(\d{1,18}):(\d{1,18})', '0:0' if steps is None else steps)
        self._first, self._last = map(int, found.groups()) if found else (1, 0)
        if steps is not None and not 1 <= self._first <= self._last:
            raise UserError(f'--profile_steps={steps}: give the first and the last step, counted from 1, as in 100:110')
        if self._first > of:
            raise UserError(f'--profile_steps={steps} is behind the last step, config.train.steps={of}')

    def before(self, step: int) -> None:
        """Starts the trace before the first step in the range, or before the step at which a run resumes inside it."""
        if not self._tracing and self._first <= step <= self._last:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True

    def after(self, step: int, results: Any) -> None:
        """Ends the trace after the last step, once its `results` are computed."""
        if self._tracing and step >= self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Ends the trace, if one has started, and logs how to view it."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            log.info('profile: %s, or perfetto_trace.json.gz below %s in ui.perfetto.dev',
                     tensorboard(self._folder, 'xprof'), self._folder / 'plugins' / 'profile')
