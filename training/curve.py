"""Shows a training in a notebook: prints the log, and draws a live plot of the losses and the metric."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from run_directory.records import EVALUATED, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTERVAL = 2.0  # seconds between two drawings of the plot; a drawing takes 0.1 s


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which can show pictures."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), 'kernel', None) is not None


class LiveCurve:
    """A live plot of the losses and of the metric in config.eval.metric, in the output of a notebook cell."""

    def __init__(self, workdir: Path, metric: str):
        """Starts a plot of the metrics in metrics.jsonl of a run. `metric` is config.eval.metric."""
        self._workdir, self._metric, self._drawn = workdir, EVALUATED + metric, 0.0
        self._display = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Redraws the plot after each evaluation, and otherwise every INTERVAL seconds."""
        if self._metric in metrics or time.monotonic() - self._drawn > INTERVAL:
            self._draw()

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Does nothing, because the log already shows the samples of an evaluation."""

    def close(self, failed: bool = False) -> None:
        """Draws the plot for the last time."""
        self._draw()

    def figure(self) -> 'Figure':
        """Returns the plot of the metrics so far as a matplotlib figure.

        Reads metrics.jsonl, from which `MetricsWriter` has dropped the steps that a resumed run repeats.
        """
        from matplotlib.figure import Figure

        lines = read_metrics(self._workdir)
        losses = 'train_loss', EVALUATED + 'loss'
        parts = [losses] if self._metric in losses else [losses, (self._metric,)]
        figure = Figure(figsize=(4.5 * len(parts), 3), layout='constrained')
        for names, axes in zip(parts, figure.subplots(1, len(parts), squeeze=False)[0], strict=True):
            for name in names:
                points = {line['step']: line[name] for line in lines if name in line}
                if points:
                    axes.plot([*points], [*points.values()], marker='.' if len(points) < 50 else '', label=name)
            axes.set(xlabel='step', ylabel='loss' if names == losses else self._metric)
            if len(axes.lines) > 1:
                axes.legend()
        return figure

    def _draw(self) -> None:
        from IPython.core.display_functions import display
        from IPython.core.pylabtools import print_figure
        from IPython.display import Image

        picture = Image(print_figure(self.figure()))  # without %matplotlib inline, a notebook shows a figure as text
        if self._display is None:
            self._display = display(picture, display_id=True)
        else:
            self._display.update(picture)
        self._drawn = time.monotonic()


@contextlib.contextmanager
def log_shown() -> Iterator[None]:
    """In a notebook, prints the project's log while the body runs, unless the notebook itself shows this log.

    A handler that shows only warnings does not count, because orbax's import adds such a handler to the root logger.
    """
    top = logging.getLogger('allyouneed')
    if not in_notebook() or top.hasHandlers() and top.isEnabledFor(logging.INFO):
        yield
        return
    handler, level, propagate = logging.StreamHandler(sys.stderr), top.level, top.propagate
    handler.setFormatter(logging.Formatter('%(message)s'))
    top.addHandler(handler)
    top.setLevel(logging.INFO)
    top.propagate = False  # otherwise orbax's handler would print each line again
    try:
        yield
    finally:
        top.removeHandler(handler)
        top.setLevel(level)
        top.propagate = propagate
