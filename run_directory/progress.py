"""The progress of a training besides its state, and what is due after a step: plain values, without JAX."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs.tasks import goodness


@dataclasses.dataclass(frozen=True)
class Progress:
    """The values that the training loop keeps besides the state.

    Every checkpoint stores them as they were before its step was evaluated.

    Attributes:
      best: the best metric of the evaluations so far; None before the first.
      without_better: the number of evaluations since the best one.
      stopped: whether patience has run out.
      skipped: the number of steps whose update was skipped because loss or gradient was not finite.
      sums: the fields of a `Sums`, added over the steps since the last line of the log; None without such steps.
      seconds: the duration of these steps.
    """
    best: float | None = None
    without_better: int = 0
    stopped: bool = False
    skipped: int = 0
    sums: Mapping[str, Any] | None = None
    seconds: float = 0.0

    def judge(self, value: float, *, metric: str, patience: int) -> 'Progress':
        """Returns the progress after an evaluation with the metric `value`.

        The run stops after `patience` evaluations without a better value; 0 means never.
        """
        better = self.best is None or goodness(metric, value) > goodness(metric, self.best)
        without_better = 0 if better else self.without_better + 1
        return dataclasses.replace(self, best=value if better else self.best, without_better=without_better,
                                   stopped=0 < patience <= without_better)

    def clear_sums(self) -> 'Progress':
        """Returns the progress after a line of the log: without sums."""
        return dataclasses.replace(self, sums=None, seconds=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for JSON, for a checkpoint; `Progress(**content)` reads it."""
        return dataclasses.asdict(self)


def judge_all(values: Iterable[float], *, metric: str, patience: int) -> Progress:
    """Returns the progress after evaluations with these values, in their order."""
    return functools.reduce(lambda progress, value: progress.judge(value, metric=metric, patience=patience), values,
                            Progress())


class Due(NamedTuple):
    """What the training loop does after a step, in this order."""
    log: bool
    save: bool
    stop: bool
    evaluate: bool


def due_at(step: int, config: ConfigDict, *, minutes: float = 0.0, stop_requested: bool = False) -> Due:
    """Returns what is due after `step`, counted from 1.

    The last step is logged, saved and evaluated. A step is saved before it is evaluated, and before the run stops.

    Args:
      step: the number of steps made.
      config: the config of the run.
      minutes: the time since the last checkpoint, or since the start.
      stop_requested: whether a signal has asked the run to stop.
    """
    last = step == config.train.steps
    evaluate = last or step % config.eval.every == 0
    overdue = 0 < config.checkpoint.every_minutes <= minutes
    return Due(log=last or step % config.train.log_every == 0,
               save=evaluate or stop_requested or overdue or step % config.checkpoint.every == 0,
               stop=stop_requested, evaluate=evaluate)
