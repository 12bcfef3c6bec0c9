"""Writes checkpoints with Orbax. Reads the newest checkpoint, the best checkpoint, or an average of checkpoints.

Layout: RUN/checkpoints/STEP/{state,progress}. A checkpoint has a temporary name until it is complete, so a killed run
leaves only complete checkpoints under the names of their steps. Orbax does not detect changed bits. Therefore
`progress` contains a checksum of every array, and the checksums are compared when the checkpoint is read. If a checksum
differs, the checkpoint is damaged and is not used. If the arrays of a checkpoint differ from the requested arrays in
name, shape or dtype, the checkpoint is not damaged. But reading such a checkpoint is an error, because Orbax would
silently cast and pad the arrays.
"""

import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from configs.tasks import goodness
from model import Params
from model.adapters import merged
from run_directory.checksums import by_path, checksums, path_tree, refuse_other_arrays, shapes
from run_directory.damage import Damaged, compare_checksums, damage_agreed, digest, read_progress
from run_directory.records import METRICS_FILE, STEP, evaluations, is_imported, saved_steps
from run_directory.stored import read_arrays, stored_paths
from runtime.agreement import different, exchange, from_leader, is_leader
from runtime.errors import UserError, full_disk_explained
from runtime.files import check_name
from runtime.rendezvous import listed

if TYPE_CHECKING:  # slow to import, and not needed to read parameters
    import orbax.checkpoint as ocp

CHOICES = 10  # maximum number of times that checkpoints are chosen, if a training deletes them while they are read
RAW = 'raw:'  # prefix of a checkpoint choice, as in 'raw:best': use the parameters, not their moving average

log = logging.getLogger('allyouneed.checkpoints')


def described(folder: Path) -> Any:
    """Returns the train state of a checkpoint as a tree whose leaves are shapes and dtypes. `folder` is STEP/state."""
    import orbax.checkpoint as ocp  # slow to import, so only where it is used

    # Orbax's Checkpointer is not used: it would look for the metadata of the step in the parent folder, and warn.
    with contextlib.closing(ocp.StandardCheckpointHandler()) as reader:
        return reader.metadata(Path(os.path.realpath(folder))).tree  # pyright: ignore[reportArgumentType] (it accepts any path)


def parameters_to_use(params: PyTree, opt_state: Any) -> PyTree:
    """Returns the parameters for evaluation and decoding: their moving average if `opt_state` has one, else `params`.

    `opt_state` is the state of an optimizer from `training.optimizer.make_optimizer`. It may also be a state read from
    a checkpoint, where the tuples are lists or dictionaries.
    """
    last = opt_state[-1] if isinstance(opt_state, tuple | list) and opt_state else None
    if isinstance(last, Mapping):
        return last.get('average', params)
    return getattr(last, 'average', params)


def checkpoint_options(config: ConfigDict) -> dict[str, Any]:
    """Returns the arguments of `Checkpoints` for a run with this config."""
    return {'metric': config.eval.metric, 'keep_last': config.checkpoint.keep_last,
            'keep_best': config.checkpoint.keep_best}


class _Replaced(Exception):
    """Raised if a training may have deleted a checkpoint while it was read."""


class Checkpoints:
    """The checkpoints of a run directory. The values of `metric` decide which checkpoint is the best.

    A checkpoint that was saved only because of a signal does not count as one of the last checkpoints, so that an
    interruption does not change which checkpoints are kept and averaged. If there are only such checkpoints, they
    count. Such a checkpoint also counts after it was evaluated, for example because the training was shortened to its
    step. Each checkpoint contains the steps that counted when it was saved, because a resumed run may have other
    intervals and another `keep_last`.

    Attributes:
      values: {step: value of `metric`} of all evaluations, from metrics.jsonl. `restore` removes the evaluations of
        steps after the restored step. The training loop adds new evaluations.
    """

    def __init__(self, workdir: Path, *, metric: str = 'loss', keep_last: int = 1, keep_best: int = 1):
        # The real path, because Orbax removes '..' without following symbolic links, and TensorStore refuses '..'.
        self._folder = Path(os.path.realpath(workdir)) / 'checkpoints'
        check_name(self._folder)
        if self._folder.exists() and not self._folder.is_dir():
            raise UserError(f'{self._folder} must be a folder, but is a file. Move the file to another place')
        self._metric, self._keep_last, self._keep_best = metric, keep_last, keep_best
        self.values = self._read_values()
        self._manager = None  # writes and deletes checkpoints; created by the first save
        self._scheduled: list[int] = []  # the last scheduled steps; read when the manager is created
        self._saving = 0      # the last step for which a save was started
        self._restored: int | None = None  # the step of the restored checkpoint, or -1 if the leader found none

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first."""
        return saved_steps(self._folder.parent)

    def save(self, step: int, state: Any, progress: dict[str, Any], *, scheduled: bool = True) -> None:
        """Creates the folders of a checkpoint, and writes its files in the background. `progress` must be valid JSON.

        `scheduled` is False if the step is saved only because of a signal.

        Raises:
          UserError: if this checkpoint or the previous checkpoint cannot be written, for example because the disk is
            full; if an old checkpoint cannot be deleted; if the processes have different copies of the state; or if
            another program has written checkpoints.
        """
        self.wait()
        if self._manager is None:
            self._manager = self._open_manager()
        import orbax.checkpoint as ocp  # slow to import, so only where it is used

        if scheduled:
            self._scheduled = [*self._scheduled, step][-self._keep_last:]
        content = {'progress': progress, 'leaves': checksums(state), 'shapes': shapes(state),
                   'last_scheduled': self._scheduled}
        self._compare(step, content['leaves'])
        self._saving = step
        with self._explained():
            saved = self._manager.save(step, args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                progress=ocp.args.JsonSave(content | {'sha256': digest(content)})))
        if not saved:
            raise UserError(f'step {step} was not saved: another program has written the checkpoint of step '
                            f'{self.steps()[-1]} in {self._folder}. Stop that program, then run the same command again')

    def compare(self, state: Any) -> None:
        """Raises UserError if the processes of the job have different copies of the train state."""
        if jax.process_count() > 1:
            self._compare(int(state.step), checksums(state))

    def _compare(self, step: int, leaves: Mapping[str, list[int]]) -> None:
        # Each process computes the checksum of a replicated array from its own copy, so different copies are detected.
        if processes := different(f'the checksums of step {step}', digest(leaves)):
            raise UserError(f'{listed(processes)} and process 0 have different parameters or optimizer states at step '
                            f'{step}. This step is not saved. {_still_valid(self.steps())}. Run the same command '
                            'again. If the error occurs again, compare the library versions and the machines')

    def check(self) -> None:
        """Raises the error of a background save that has failed. Does not wait for a save that is still running."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until all checkpoints are on disk. Raises UserError if a checkpoint cannot be written or deleted."""
        if self._manager is not None:
            with self._explained():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for all saves, and ends Orbax's threads. Raises UserError if a save has failed."""
        if self._manager is not None:
            with self._explained():
                self._manager.close()

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Returns (state, progress) of the newest readable checkpoint, or None if the run has no checkpoint.

        The state has the structure and the shardings of `like`. The leaves of `like` are arrays, or
        jax.ShapeDtypeStructs with shardings. Damaged checkpoints are logged and left in place. The next `save` renames
        the damaged checkpoints to STEP.damaged.

        Raises:
          UserError: if all checkpoints are damaged; if there is no checkpoint, but the run has evaluated steps or was
            imported; or if the arrays of the newest readable checkpoint differ from `like` in name, shape or dtype.
        """
        steps = from_leader('the checkpoints', self.steps)
        for step in reversed(steps):
            try:
                restored = self._read(step, like)
                self._restored = step
                # Training repeats the later steps. Their previous values must not decide which checkpoints are kept.
                self.values = {other: value for other, value in self.values.items() if other <= step}
                return restored
            except Damaged as damage:
                # Logs the text, not the exception. The traceback of the exception refers to the arrays, so a handler
                # that keeps log records would keep the arrays in memory.
                _warn(f'{damage}. The damaged checkpoint is left unchanged, and an older checkpoint is used')
        if steps:
            raise UserError(f'every checkpoint in {self._folder} is damaged (steps {_listed(steps)}). Restore a '
                            'checkpoint from a copy, or start again in another --workdir')
        if self.values:
            raise UserError(f'{self._folder} has no checkpoint, but {METRICS_FILE} has evaluations of saved steps, up '
                            f'to step {max(self.values)}. Restore the checkpoints from a copy, or start again in '
                            'another --workdir')
        if from_leader('the recipe of an import', lambda: is_imported(self._folder.parent)):
            raise UserError(f'{self._folder / "0"} with the weights of the imported model is missing. Restore this '
                            'folder from a copy, or import the model again into another --workdir')
        self._restored = -1
        return None

    def resolve(self, choice: str) -> list[int]:
        """Returns the steps that a checkpoint choice refers to, in ascending order.

        `choice` is 'latest', 'best', a step, 'average:K' (the last K checkpoints) or 'best:K' (the best K checkpoints).
        For 'average:K', K is at most `keep_last`, because older checkpoints are kept only if they are the best. For
        'best:K', at least the best `keep_best` checkpoints are kept.

        Raises:
          UserError: if the checkpoint does not exist, or training has not kept all K checkpoints.
        """
        steps, choice = from_leader('the checkpoints', self.steps), choice.removeprefix(RAW)
        if not steps:
            raise UserError(f'{self._folder} has no checkpoint. Train first, or use the run directory of a training')
        kind, _, count = choice.partition(':')
        if choice == 'latest':
            return steps[-1:]
        if choice == 'best':
            return self._best_first(steps)[:1] or steps[-1:]
        if kind in ('average', 'best') and STEP.fullmatch(count) and int(count):
            order, option = ('last', 'keep_last') if kind == 'average' else ('best', 'keep_best')
            ranking = self._last(self._read_scheduled(steps), steps)[::-1] if kind == 'average' else (
                self._best_first(self.values))
            candidates = [*itertools.takewhile(steps.__contains__, ranking)]
            if int(count) > len(candidates):
                raise UserError(f'checkpoint={choice}: training has kept only {len(candidates)} of the {order} '
                                f'checkpoints, at steps {_listed(sorted(candidates)) or "none"}. Use a smaller number. '
                                f'config.checkpoint.{option} sets the number of checkpoints that training keeps')
            return sorted(candidates[:int(count)])
        if STEP.fullmatch(choice) and int(choice) in steps:
            return [int(choice)]
        raise UserError(f'checkpoint={choice!r} does not exist. Use best, latest, average:K, best:K or one of the '
                        f'steps {_listed(steps)}')

    def parameters(self, choice: str) -> tuple[Params, list[int]]:
        """Returns the parameters of a checkpoint, or their mean over several checkpoints, and the steps that were read.

        `choice` is explained in `resolve`. The parameters are on the first local device. If the optimizer kept a moving
        average of the parameters (config.optimizer.ema), the moving average is used. If `choice` begins with RAW, as in
        'raw:average:5', the parameters themselves are used. 'latest' is the newest readable checkpoint. Newer
        checkpoints that are damaged are logged. If a training deletes a checkpoint while it is read, the checkpoints
        are chosen again.

        Raises:
          UserError: if the checkpoint does not exist (see `resolve`) or is damaged, or if `choice` begins with RAW and
            the checkpoint has no moving average.
        """
        for _ in range(CHOICES):
            with contextlib.suppress(_Replaced):
                return self._chosen_parameters(choice, from_leader('the checkpoints', self.steps))
            self.values = self._read_values()
        raise UserError(f'a training deletes the checkpoints in {self._folder} faster than they can be read. Wait '
                        'until the training has ended, or increase config.checkpoint.every')

    def _chosen_parameters(self, choice: str, steps: list[int]) -> tuple[Params, list[int]]:
        """Does the work of `parameters`. Raises _Replaced if `steps` are no longer the steps of the checkpoints."""
        chosen, raw = self.resolve(choice), choice.startswith(RAW)
        if choice.removeprefix(RAW) == 'latest':
            for step in reversed(steps):
                try:
                    return _on_device(self._read_parameters(step, raw, steps)), [step]
                except Damaged as damage:
                    _warn(f'{damage}. An older checkpoint is used')
            raise UserError(f'every checkpoint in {self._folder} is damaged (steps {_listed(steps)}). Restore a '
                            'checkpoint from a copy of the run')
        total = None
        for step in chosen:
            try:
                params = self._read_parameters(step, raw, steps)
            except Damaged as damage:
                others = _listed([other for other in self.steps() if other != step]) or 'none'
                raise UserError(f'{damage}. Choose another checkpoint: --checkpoint=latest, or one of the other steps '
                                f'({others})') from damage
            params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
            total = params if total is None else jax.tree.map(np.add, total, params)
        return _on_device(jax.tree.map(lambda leaf: leaf / len(chosen), total)), chosen

    def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads the checkpoint of `step`. Returns its state, with the structure of `like`, and its progress.

        Raises:
          Damaged: if the checkpoint cannot be read, or if its values differ from the values that were written.
          UserError: if the arrays in the checkpoint differ from the arrays of `like` in name, shape or dtype.
        """
        import orbax.checkpoint as ocp  # slow to import, so only where it is used

        folder = self._folder / str(step)
        with damage_agreed(folder):
            content, stored = read_progress(folder), described(folder / 'state')
            expected, unchecked = content['leaves'], shapes(stored)
            # `progress` contains the shapes, protected by a checksum. Earlier versions did not write the shapes there.
            saved = content.get('shapes') or {path: unchecked[path] for path in expected}
            refuse_other_arrays(folder, saved, shapes(like))
            places = by_path(like)
            # Matches the arrays by path, because parts of an optimizer state that have no arrays are not on disk.
            asked = jax.tree.map(lambda path: places.get(path, ocp.PLACEHOLDER), path_tree(stored))
        with damage_agreed(folder), contextlib.closing(ocp.PyTreeCheckpointHandler()) as reader:
            # Orbax's Checkpointer is not used, because it would wait for all processes. A process that has found
            # damaged arrays would never arrive.
            read = by_path(reader.restore(folder / 'state', args=ocp.args.PyTreeRestore(  # pyright: ignore[reportArgumentType]
                asked, restore_args=ocp.checkpoint_utils.construct_restore_args(asked))))
        with damage_agreed(folder):  # now all processes have their shards, and compute the checksums together
            compare_checksums({path: read[path] for path in places}, expected)
        return jax.tree.map(read.__getitem__, path_tree(like)), content['progress']

    def _read_parameters(self, step: int, raw: bool, steps: list[int]) -> Params:
        """Returns the parameters of the checkpoint of `step` as NumPy arrays. Adapters are merged into the matrices.

        Reads no arrays of the optimizer state, except the moving average if it is used.

        Raises:
          Damaged: if the checkpoint cannot be read, or if its values differ from the values that were written.
          _Replaced: instead of Damaged, if `steps` are no longer the steps of the checkpoints.
          UserError: if `raw` is True and the checkpoint has no moving average.
        """
        def without_average(params, opt_state):
            if parameters_to_use(params, opt_state) is params:
                raise UserError(f'{RAW} does not apply to the checkpoint of step {step} in {self._folder}, because '
                                f'this checkpoint has no moving average (config.optimizer.ema). Remove {RAW}')
            return params

        use, folder = without_average if raw else parameters_to_use, self._folder / str(step)
        try:
            with damage_agreed(folder):
                expected, stored = read_progress(folder)['leaves'], stored_paths(folder / 'state')
                wanted = use(stored['params'], stored.get('opt_state'))
                read = read_arrays(folder / 'state', jax.tree.leaves(wanted))
                compare_checksums(read, {path: expected.get(path) for path in read})
        except Damaged:
            if from_leader('the checkpoints', self.steps) != steps:
                raise _Replaced from None
            raise
        return merged(jax.tree.map(read.__getitem__, wanted))

    def _open_manager(self) -> 'ocp.CheckpointManager':
        """Renames checkpoints that are newer than the restored checkpoint, and opens Orbax's checkpoint manager.

        A newer checkpoint is damaged, or the leader did not see it at the start because the leader's view of a shared
        file system was out of date. Newer checkpoints are renamed for two reasons: Orbax's manager does not replace the
        checkpoint of a step, and does not save a step below the newest step.
        """
        import orbax.checkpoint as ocp  # slow to import, so only where it is used

        newer = {step for steps in exchange('newer checkpoints', self.steps()) for step in steps
                 if self._restored is not None and step > self._restored}

        def rename():
            for step in sorted(newer):
                numbers = ['', *(f'-{number}' for number in range(2, 1000))]
                names = (self._folder / f'{step}.damaged{number}' for number in numbers)
                (self._folder / str(step)).rename(next(path for path in names if not path.exists()))

        from_leader('damaged checkpoints', rename)
        self._scheduled = self._read_scheduled(self.steps())
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(self._folder, options=ocp.CheckpointManagerOptions(
            preservation_policy=_Kept(self), cleanup_tmp_directories=True,  # left by a killed run
            # Orbax could also create the folders of a checkpoint in the background. But if this failed, Orbax's threads
            # would wait for the folders for 5 minutes before the process could exit. On a local disk, `save` creates
            # the folders in about 5 ms.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False)))

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Returns the steps to keep: the newest, the last `keep_last` that were scheduled and the best `keep_best`.

        Steps that are symbolic links, for example to another disk, are also kept. `steps` are in ascending order.
        """
        linked = (step for step in steps if (self._folder / str(step)).is_symlink())  # Orbax cannot delete links
        return {*steps[-1:], *self._last(self._scheduled, steps), *self._best_first(steps)[:self._keep_best], *linked}

    def _last(self, scheduled: Sequence[int], steps: Sequence[int]) -> list[int]:
        """Returns the last `keep_last` of the scheduled steps. If no step was scheduled, all steps count."""
        return [*(scheduled or steps)][-self._keep_last:]

    def _read_values(self) -> dict[int, float]:
        workdir = self._folder.parent
        return dict(from_leader('the evaluations', lambda: list(evaluations(workdir, self._metric).items())))

    def _read_scheduled(self, steps: Sequence[int]) -> list[int]:
        """Returns the last scheduled steps, oldest first, as the newest checkpoint of `steps` contains them.

        An evaluated step also counts, even if its checkpoint was saved only because of a signal. Damaged checkpoints
        and checkpoints of earlier versions do not contain these steps. Such a checkpoint itself counts as scheduled,
        unless it contains the information that it was saved only because of a signal.
        """
        def read() -> list[int]:
            last = []
            for step in steps:
                content = {}
                with contextlib.suppress(Exception):  # a damaged file may raise any type of exception
                    content = read_progress(self._folder / str(step))
                last = content.get('last_scheduled', [*last, step] if content.get('scheduled', True) else last)
                if step in self.values and step not in last:
                    last = [*last, step]
            return last

        return from_leader('the scheduled checkpoints', read)

    def _best_first(self, steps: Iterable[int]) -> list[int]:
        """Returns the evaluated steps among `steps`, best first. If values are equal, the earlier step comes first."""
        return sorted((step for step in steps if step in self.values),
                      key=lambda step: (-goodness(self._metric, self.values[step]), step))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Runs the body, which writes and deletes checkpoints. Turns system errors about files into a UserError."""
        try:
            with full_disk_explained(self._no_room):
                yield
        except OSError as error:
            if error.filename is None:  # such as a TimeoutError of Orbax
                raise
            valid = ''
            with contextlib.suppress(OSError):  # the folder itself may have lost its permissions
                valid = f' {_still_valid(self.steps())}.'
            raise UserError(f'{self._folder}: a checkpoint cannot be written, or an old checkpoint cannot be deleted: '
                            f'{error.strerror or error}.{valid} Remove the cause, such as a missing permission, then '
                            'run the same command again') from error

    def _no_room(self, _, reason: str) -> str:
        still = _still_valid([step for step in self.steps() if step != self._saving])
        return (f'{self._folder / str(self._saving)} cannot be written: {reason}. {still}. Free space, then run the '
                'same command again')


class _Kept:
    """Orbax's preservation policy. Orbax deletes all checkpoints except the steps that `Checkpoints.kept` returns."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = self._checkpoints.kept(steps)
        return [step in kept for step in steps]


@contextlib.contextmanager
def open_checkpoints(workdir: Path, **options) -> Iterator[Checkpoints]:
    """Yields the checkpoints of a run directory. At the end, waits until all checkpoints are on disk."""
    checkpoints = Checkpoints(workdir, **options)
    try:
        yield checkpoints
    except BaseException:
        with contextlib.suppress(Exception):  # so that the first error is reported
            checkpoints.close()
        raise
    checkpoints.close()


def _on_device(params: Params) -> Params:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf).astype(np.float32), device), params)


def _still_valid(steps: Sequence[int]) -> str:
    return f'The checkpoint of step {steps[-1]} is still valid' if steps else 'There is no earlier checkpoint'


def _warn(message: str) -> None:
    """Logs a message as a warning in the leader, and at a lower level in the other processes."""
    log.log(logging.WARNING if is_leader() else logging.INFO, '%s', message)


def _listed(steps: Sequence[int]) -> str:
    return ', '.join(map(str, steps))
