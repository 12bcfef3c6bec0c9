"""Profiles a range of steps with JAX's profiler."""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import jax

from run_directory.records import tensorboard
from runtime.agreement import is_leader
from runtime.errors import UserError

log = logging.getLogger('allyouneed.train')


class ProfilerWindow:
    """Profiles the steps FIRST to LAST, both included, and writes the trace to RUN/tensorboard.

    TensorBoard's profile plugin (the package xprof) shows the trace. The website ui.perfetto.dev can open the file
    `perfetto_trace.json.gz` of the trace. With several processes, only the leader is traced, because JAX writes this
    file only if a single process has written a trace.
    """

    def __init__(self, steps: str | None, workdir: Path, num_steps: int = sys.maxsize):
        """Parses `steps`, which is 'FIRST:LAST' or None. `num_steps` is the number of steps of the run.

        Raises:
          UserError: if `steps` has another form, or FIRST is after the last step of the run.
        """
        self._folder, self._tracing = workdir / 'tensorboard', False
        match = re.fullmatch(r'(\d{1,18}):(\d{1,18})', '0:0' if steps is None else steps)
        self._first, self._last = map(int, match.groups()) if match else (1, 0)
        if steps is not None and not 1 <= self._first <= self._last:
            raise UserError(f'--profile_steps={steps} must be FIRST:LAST, counted from 1, such as 100:110')
        if self._first > num_steps:
            raise UserError(f'--profile_steps={steps} is after the last step. Use steps up to '
                            f'config.train.steps={num_steps}')

    def check_resumed(self, done: int) -> None:
        """Logs a warning if a run that resumes after `done` steps makes no step in the range.

        This is not an error, because a scheduler starts the same command again after an interruption.
        """
        if 0 < self._last <= done:
            log.warning('--profile_steps=%d:%d has no effect, because this run resumes at step %d. To profile this '
                        'run, use later steps', self._first, self._last, done)

    def before(self, step: int) -> None:
        """Starts the trace before the first step in the range. A resumed run may begin inside the range."""
        if not self._tracing and self._first <= step <= self._last and is_leader():
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True

    def after(self, step: int, results: Any) -> None:
        """Ends the trace after the last step in the range. First waits for the `results` of this step."""
        if self._tracing and step >= self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Ends the trace if it has started, and logs how to view the trace, or a warning if it cannot be written."""
        if self._tracing:
            self._tracing = False
            try:
                jax.profiler.stop_trace()
            except Exception as error:  # jaxlib does not document which exceptions it raises
                log.warning('--profile_steps=%d:%d: the profile cannot be written (%s). This does not affect the '
                            'training', self._first, self._last, error)
                return
            log.info('to view the profile, run %s, or open perfetto_trace.json.gz below %s in ui.perfetto.dev',
                     tensorboard(self._folder, 'xprof'), self._folder / 'plugins' / 'profile')
