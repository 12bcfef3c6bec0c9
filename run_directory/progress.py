"""The progress of a training besides its state, and the actions due after a step. Needs no JAX."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs.tasks import goodness


@dataclasses.dataclass(frozen=True)
class Progress:
    """The values that the training loop keeps besides the state.

    A checkpoint stores the values before the evaluation of its step.

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
        """Returns the progress after an evaluation with the value `value` of `metric`.

        The run stops after `patience` evaluations in a row without a better value. With 0 it never stops early.
        """
        better = self.best is None or goodness(metric, value) > goodness(metric, self.best)
        without_better = 0 if better else self.without_better + 1
        return dataclasses.replace(self, best=value if better else self.best, without_better=without_better,
                                   stopped=0 < patience <= without_better)

    def clear_sums(self) -> 'Progress':
        """Returns the progress without sums, after they were logged."""
        return dataclasses.replace(self, sums=None, seconds=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON. `Progress(**content)` is the inverse."""
        return dataclasses.asdict(self)


def judge_all(values: Iterable[float], *, metric: str, patience: int) -> Progress:
    """Returns the progress after evaluations with these values, in this order."""
    return functools.reduce(lambda progress, value: progress.judge(value, metric=metric, patience=patience), values,
                            Progress())


class Due(NamedTuple):
    """The actions of the training loop after a step, in their order."""
    log: bool
    save: bool
    stop: bool
    evaluate: bool


def due_at(step: int, config: ConfigDict, *, minutes: float = 0.0, stop_requested: bool = False) -> Due:
    """Returns the actions that are due after `step`, counted from 1.

    The last step is logged, saved and evaluated. A step is saved before it is evaluated and before the run stops.

    Args:
      step: the number of steps so far.
      config: the config of the run.
      minutes: the time since the last checkpoint or the start.
      stop_requested: whether a signal has asked the run to stop.
    """
    last = step == config.train.steps
    evaluate = last or step % config.eval.every == 0
    overdue = 0 < config.checkpoint.every_minutes <= minutes
    return Due(log=last or step % config.train.log_every == 0,
               save=evaluate or stop_requested or overdue or step % config.checkpoint.every == 0,
               stop=stop_requested, evaluate=evaluate)
