"""Checkpoints by Orbax: the last few, the best one, and averages of them.

Layout: RUN/checkpoints/STEP/{state,progress}. A step that is being written has another name until it is
complete, so a run that is killed finds only whole ones.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from errors import UserError

LOWER_IS_BETTER = ('loss', 'perplexity', 'bits_per_character', 'absolute_error')  # metrics of an evaluation


class Checkpoints:
    """The checkpoints of a run directory; `metric` is the evaluation's by which one is best."""

    def __init__(self, workdir: Path, *, metric: str = 'loss', keep_last: int = 1):
        self._folder = Path(workdir).absolute() / 'checkpoints'
        sign = -1 if metric in LOWER_IS_BETTER else 1

        def goodness(metrics):
            return sign * metrics[f'validation_{metric}']

        # BestN keeps the end of an ascending order; only evaluated steps have metrics.
        policy = checkpoint_managers.AnyPreservationPolicy([
            checkpoint_managers.LatestN(keep_last),
            checkpoint_managers.BestN(get_metric_fn=goodness, n=1,
                                      keep_checkpoints_without_metrics=False)])
        self._manager = ocp.CheckpointManager(
            self._folder, options=ocp.CheckpointManagerOptions(
                preservation_policy=policy, best_fn=goodness, best_mode='max'))

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, progress: dict[str, Any], metrics: dict[str, float] | None) -> None:
        """Writes `state` in the background. `progress` is JSON: what the loop knows beside the state."""
        self._manager.save(step, metrics=metrics, args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress)))

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """(state, progress) of `step`, with the shapes, dtypes and shardings of `like`."""
        restored = self._manager.restore(step, args=ocp.args.Composite(
            state=ocp.args.StandardRestore(like), progress=ocp.args.JsonRestore()))
        return restored['state'], restored['progress']

    def close(self) -> None:
        """Waits until all that was saved is on disk, and frees Orbax's threads."""
        self._manager.close()

    def resolve(self, choice: str) -> list[int]:
        """The steps that 'latest', 'best', a step number or 'average:K' (the last K) stand for.

        Raises:
          UserError: if there is no such checkpoint.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f'{self._folder} holds no checkpoint: train first, or give the run directory of a training')
        kind, _, count = choice.partition(':')
        if choice == 'latest':
            return steps[-1:]
        if choice == 'best':
            best = self._manager.best_step()
            return steps[-1:] if best is None else [best]
        if kind == 'average' and count.isdecimal() and int(count):
            if int(count) > len(steps):
                raise UserError(f'checkpoint={choice}: only {len(steps)} checkpoints are kept, at steps '
                                f'{", ".join(map(str, steps))}; see config.checkpoint.keep_last')
            return steps[-int(count):]
        if choice.isdecimal() and int(choice) in steps:
            return [int(choice)]
        raise UserError(f'checkpoint={choice!r} is not best, latest, average:K or one of the steps '
                        f'{", ".join(map(str, steps))}')

    def parameters(self, choice: str) -> Any:
        """The parameters of a checkpoint, or the mean of several (see `resolve`), on the default device."""
        total, steps = None, self.resolve(choice)
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        for step in steps:
            path = self._folder / str(step) / 'state'
            with contextlib.closing(ocp.StandardCheckpointer()) as reader:
                like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
                                    reader.metadata(path).item_metadata.tree)
                params = reader.restore(path, like)['params']
            params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
            total = params if total is None else jax.tree.map(np.add, total, params)
        return jax.tree.map(lambda leaf: jax.device_put((leaf / len(steps)).astype(np.float32), device), total)


@contextlib.contextmanager
def open_checkpoints(workdir: Path, **options) -> Iterator[Checkpoints]:
    """Checkpoints that are closed at the end, all saves complete."""
    checkpoints = Checkpoints(workdir, **options)
    try:
        yield checkpoints
    finally:
        checkpoints.close()
