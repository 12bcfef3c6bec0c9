"""The progress of a training, and the actions that are due after a step. This module does not import JAX."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs.tasks import goodness


@dataclasses.dataclass(frozen=True)
class Progress:
    """The values that the training loop needs to resume, in addition to the train state.

    A checkpoint is written before its step is evaluated, and contains the values at that time.

    Attributes:
      best: the best value of the metric in the evaluations so far, or None before the first evaluation.
      without_better: the number of evaluations since the best evaluation.
      stopped: True if the run stops early, because the metric has not improved for config.eval.patience evaluations.
      skipped: the number of steps whose update was skipped because the loss or the gradient was not finite.
      sums: the fields of a `Sums`, summed over the steps since metrics were last logged. None if there was no step
        since then.
      seconds: the total duration of the steps in `sums`.
    """
    best: float | None = None
    without_better: int = 0
    stopped: bool = False
    skipped: int = 0
    sums: Mapping[str, Any] | None = None
    seconds: float = 0.0

    def judge(self, value: float, *, metric: str, patience: int) -> 'Progress':
        """Returns the progress after an evaluation with the value `value` of `metric`.

        The run stops after `patience` evaluations in a row without a better value. With patience=0, the run never stops
        early.
        """
        better = self.best is None or goodness(metric, value) > goodness(metric, self.best)
        without_better = 0 if better else self.without_better + 1
        return dataclasses.replace(self, best=value if better else self.best, without_better=without_better,
                                   stopped=0 < patience <= without_better)

    def clear_sums(self) -> 'Progress':
        """Returns the progress with empty sums. The training loop calls this after it has logged the sums."""
        return dataclasses.replace(self, sums=None, seconds=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the progress as a dictionary for JSON. `Progress(**content)` restores the progress."""
        return dataclasses.asdict(self)


def judge_all(values: Iterable[float], *, metric: str, patience: int) -> Progress:
    """Returns the progress after several evaluations. `values` are the values of `metric`, oldest first."""
    return functools.reduce(lambda progress, value: progress.judge(value, metric=metric, patience=patience), values,
                            Progress())


class Due(NamedTuple):
    """The actions that are due after a training step. The fields have the order in which the loop does the actions.

    `save` is True if the config schedules a checkpoint. The loop also saves a checkpoint before it stops.
    """
    log: bool
    save: bool
    stop: bool
    evaluate: bool


def due_at(step: int, config: ConfigDict, *, minutes: float = 0.0, stop_requested: bool = False) -> Due:
    """Returns the actions that are due after `step`, counted from 1.

    The last step is logged, saved and evaluated. A step is saved before it is evaluated and before the run stops. If
    the evaluation may end the training (config.eval.patience), the step is also logged, because it may be the last
    step. A step is logged before it is saved, so that a resumed run does not log the same sums again.

    Args:
      step: the number of steps so far.
      config: the config of the run.
      minutes: the time since the last checkpoint or, before the first checkpoint, since the start.
      stop_requested: True if a signal has asked the run to stop.
    """
    last = step == config.train.steps
    evaluate = last or step % config.eval.every == 0
    overdue = 0 < config.checkpoint.every_minutes <= minutes
    return Due(log=last or step % config.train.log_every == 0 or (evaluate and config.eval.patience > 0),
               save=evaluate or overdue or step % config.checkpoint.every == 0,
               stop=stop_requested, evaluate=evaluate)
