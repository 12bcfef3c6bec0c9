"""Checkpoints by Orbax: the last few, the best ones, and averages of them.

Layout: RUN/checkpoints/STEP/{state,progress}. A checkpoint has another name until it is complete, so a killed run
leaves only complete ones under their step. Orbax restores flipped bits without an error, so `progress` has a checksum
of every array, which is compared when a checkpoint is read. A checkpoint that fails the comparison is damaged and is
not used. A checkpoint whose arrays differ in name, shape or type from the requested ones is not damaged; Orbax would
cast and pad such arrays silently, and we refuse them.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PyTree

from configs.tasks import goodness
from model import Params
from model.adapters import merged
from run_directory.checksums import by_path, checksums, path_tree, refuse_other_arrays, shapes
from run_directory.records import METRICS_FILE, evaluations
from run_directory.stored import read_arrays, stored_paths
from runtime.agreement import different, exchange, from_leader, is_leader
from runtime.errors import UserError, full_disk_explained
from runtime.files import check_name
from runtime.processes import lost
from runtime.rendezvous import listed

if TYPE_CHECKING:  # slow to import, and not needed to read parameters
    import orbax.checkpoint as ocp

RAW = 'raw:'  # before a choice of checkpoints: their parameters, and not a moving average that they hold of them
STEP = re.compile('0|[1-9][0-9]{0,17}')  # names of the folders; 060 is not one

log = logging.getLogger('allyouneed.checkpoints')


class Damaged(Exception):
    """Raised for a checkpoint that cannot be read, or whose values differ from those written."""


def refuse_pipes(folder: Path) -> None:
    """Raises Damaged if `folder` contains anything but files and folders: reading a pipe would never end."""
    for path in [folder, *sorted(folder.rglob('*'))]:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise Damaged(f'{path.relative_to(folder)} is a pipe or a device, and no file')


def described(folder: Path) -> Any:
    """Returns the tree in a checkpoint's folder `state`, with shapes and dtypes in place of arrays."""
    import orbax.checkpoint as ocp  # slow to import, so only where it is used

    # A Checkpointer would look for the metadata of the whole step, which is one folder above, and warn.
    with contextlib.closing(ocp.StandardCheckpointHandler()) as reader:
        return reader.metadata(folder.absolute()).tree  # pyright: ignore[reportArgumentType] (any path will do)


def parameters_to_use(params: PyTree, opt_state: Any) -> PyTree:
    """Returns the parameters for evaluation and decoding: the average in the optimizer's state, or else `params`.

    The state is that of `training.optimizer.make_optimizer`, or its form in a checkpoint: lists and dictionaries.
    """
    last = opt_state[-1] if isinstance(opt_state, tuple | list) and opt_state else None
    if isinstance(last, Mapping):
        return last.get('average', params)
    return getattr(last, 'average', params)


class Checkpoints:
    """The checkpoints of a run directory; `metric`, of the evaluations, decides which one is best.

    Attributes:
      values: {step: value of `metric`} of the evaluations so far, from metrics.jsonl; the training loop adds to it.
    """

    def __init__(self, workdir: Path, *, metric: str = 'loss', keep_last: int = 1, keep_best: int = 1):
        self._folder = Path(workdir).absolute() / 'checkpoints'
        check_name(self._folder)
        if self._folder.exists() and not self._folder.is_dir():
            raise UserError(f'{self._folder} is a file, where the folder of the checkpoints should be: move it away')
        self._metric, self._keep_last, self._keep_best = metric, keep_last, keep_best
        self.values = dict(from_leader('the evaluations', lambda: list(evaluations(workdir, metric).items())))
        self._manager = None  # writes and deletes checkpoints; created by the first save
        self._saving = 0      # the last step that the manager was asked to save
        self._restored: int | None = None  # the step that `restore` returned; -1 if the leader saw no checkpoint

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if STEP.fullmatch(path.name))

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Writes `state` in the background. `progress`, as JSON, is what the training loop needs besides the state.

        Raises:
          UserError: if the disk is full, now or since the last save.
        """
        self.wait()
        if self._manager is None:
            self._manager = self._open_manager()
        import orbax.checkpoint as ocp  # slow to import, so only where it is used

        content = {'progress': progress, 'leaves': checksums(state), 'shapes': shapes(state)}
        self._compare(step, content['leaves'])
        self._saving = step
        with full_disk_explained(self._no_room):
            saved = self._manager.save(step, args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                progress=ocp.args.JsonSave(content | {'sha256': _digest(content)})))
        if not saved:
            raise UserError(f'step {step} was not saved: {self._folder} has a checkpoint of step {self.steps()[-1]}, '
                            'which another program has written. Stop it, then run the same command again')

    def compare(self, state: Any) -> None:
        """Raises UserError if the processes have different copies of the state."""
        if jax.process_count() > 1:
            self._compare(int(state.step), checksums(state))

    def _compare(self, step: int, leaves: Mapping[str, list[int]]) -> None:
        # Of an array that is whole in each process, the checksum is that of the process's own copy.
        if others := different(f'the checksums of step {step}', _digest(leaves)):
            raise UserError(f'the parameters or the optimizer state of {listed(others)} differ from those of process 0 '
                            f'at step {step}, which is not saved. {_still_valid(self.steps())}. Run the same command '
                            'again; if they differ again, compare the versions of the libraries and the machines')

    def check(self) -> None:
        """Raises the error of the background save, if it has ended; does not wait for it."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until all saves are on disk. Raises as `save` does."""
        if self._manager is not None:
            with full_disk_explained(self._no_room):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for all saves, and frees Orbax's threads."""
        if self._manager is not None:
            with full_disk_explained(self._no_room):
                self._manager.close()

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Returns (state, progress) of the newest readable checkpoint, or None if the run has no checkpoint.

        The state has the structure and the shardings of `like`, whose leaves are arrays or jax.ShapeDtypeStructs with
        shardings. Damaged checkpoints are named in the log and left in place; the next `save` renames them to
        STEP.damaged.

        Raises:
          UserError: if there are checkpoints, but all are damaged; if there are none, but the run has evaluated steps;
            or if the arrays of the newest readable one differ from `like` in name, shape or type.
        """
        steps = from_leader('the checkpoints', self.steps)
        for step in reversed(steps):
            try:
                restored = self._read(step, like)
                self._restored = step
                return restored
            except Damaged as damage:
                # As text: the traceback refers to all that was read, and log records may be kept.
                _warn(f'{damage}; it is left as it is, and an older one is used')
        if steps:
            raise UserError(f'every checkpoint in {self._folder} is damaged (steps {_listed(steps)}): restore '
                            'one from a copy, or begin again in another --workdir')
        if self.values:
            raise UserError(f'{self._folder} holds no checkpoint, but {METRICS_FILE} beside it tells of evaluations up '
                            f'to step {max(self.values)}, and each is of a step that was saved: take the checkpoints '
                            'from a copy, or begin again in another --workdir')
        self._restored = -1
        return None

    def resolve(self, choice: str) -> list[int]:
        """Returns the steps that `choice` means: 'latest', 'best', a step, 'average:K' (the last K), 'best:K'.

        Raises:
          UserError: if there is no such checkpoint.
        """
        steps, choice = from_leader('the checkpoints', self.steps), choice.removeprefix(RAW)
        if not steps:
            raise UserError(f'{self._folder} holds no checkpoint: train first, or give the run directory of a training')
        kind, _, count = choice.partition(':')
        if choice == 'latest':
            return steps[-1:]
        if choice == 'best':
            return self._best_first(steps)[:1] or steps[-1:]
        if kind in ('average', 'best') and STEP.fullmatch(count) and int(count):
            among = steps[::-1] if kind == 'average' else self._best_first(steps)
            if int(count) > len(among):
                evaluated, option = ('', 'keep_last') if kind == 'average' else (' and evaluated', 'keep_best')
                raise UserError(f'checkpoint={choice}: only {len(among)} checkpoints are kept{evaluated}, at steps '
                                f'{_listed(sorted(among)) or "none"}; see config.checkpoint.{option}')
            return sorted(among[:int(count)])
        if STEP.fullmatch(choice) and int(choice) in steps:
            return [int(choice)]
        raise UserError(f'checkpoint={choice!r} is not best, latest, average:K, best:K or one of the steps '
                        f'{_listed(steps)}')

    def parameters(self, choice: str) -> tuple[Params, list[int]]:
        """Returns the parameters of a checkpoint, or the mean of several, on the default device; and their steps.

        If the optimizer kept an average of the parameters (config.optimizer.ema), it replaces the parameters of its
        step, unless `choice` begins with RAW, as in 'raw:average:5'. 'latest' is the newest readable checkpoint;
        damaged ones that it skips are named in the log.

        Raises:
          UserError: if there is no such checkpoint (see `resolve`), it is damaged, or it has no average to leave out.
        """
        chosen, read = self.resolve(choice), self._read_raw if choice.startswith(RAW) else self._read_parameters
        if choice.removeprefix(RAW) == 'latest':
            steps = from_leader('the checkpoints', self.steps)
            for step in reversed(steps):
                try:
                    return _on_device(read(step)), [step]
                except Damaged as damage:
                    _warn(f'{damage}; an older one is used')
            raise UserError(f'every checkpoint in {self._folder} is damaged (steps {_listed(steps)})')
        total = None
        for step in chosen:
            try:
                params = read(step)
            except Damaged as damage:
                others = ', '.join(str(other) for other in self.steps() if other != step) or 'none'
                raise UserError(f'{damage}. Choose another with --checkpoint: latest, or one of the steps there are '
                                f'besides ({others})') from damage
            params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
            total = params if total is None else jax.tree.map(np.add, total, params)
        return _on_device(jax.tree.map(lambda leaf: leaf / len(chosen), total)), chosen

    def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the state and the progress of a checkpoint exactly as they were written.

        The state has the structure of `like`.

        Raises:
          Damaged: if it cannot be read, or the values that are read differ from those written.
          UserError: if its arrays differ from those of `like`.
        """
        import orbax.checkpoint as ocp  # slow to import, so only where it is used

        folder = self._folder / str(step)
        with damage_agreed(folder):
            content, stored = _progress(folder), described(folder / 'state')
            expected, known = content['leaves'], shapes(stored)  # no checksum covers them; old versions kept no others
            saved = content.get('shapes') or {path: known[path] for path in expected}
            refuse_other_arrays(folder, saved, shapes(like))
            places = by_path(like)
            # By path, since parts of an optimizer without arrays are not on disk.
            asked = jax.tree.map(lambda path: places.get(path, ocp.PLACEHOLDER), path_tree(stored))
        with damage_agreed(folder), contextlib.closing(ocp.PyTreeCheckpointHandler()) as reader:
            # Not by a Checkpointer, which waits for all processes: in one of them the arrays may be damaged.
            read = by_path(reader.restore(folder / 'state', args=ocp.args.PyTreeRestore(  # pyright: ignore[reportArgumentType]
                asked, restore_args=ocp.checkpoint_utils.construct_restore_args(asked))))
        with damage_agreed(folder):  # now all processes have their shards: checksums are computed by all together
            _compare_checksums({path: read[path] for path in places}, expected)
        return jax.tree.map(read.__getitem__, path_tree(like)), content['progress']

    def _read_some(self, step: int, use: Callable[[Any, Any], Any]) -> Any:
        """Returns the arrays of a checkpoint that `use(params, opt_state)` chooses, as NumPy arrays.

        Other arrays, which may be twice as large, are not read.

        Raises:
          Damaged: if they cannot be read, or the values that are read differ from those written.
        """
        folder = self._folder / str(step)
        with damage_agreed(folder):
            expected, stored = _progress(folder)['leaves'], stored_paths(folder / 'state')
            wanted = use(stored['params'], stored.get('opt_state'))
            read = read_arrays(folder / 'state', jax.tree.leaves(wanted))
            _compare_checksums(read, {path: expected.get(path) for path in read})
        return jax.tree.map(read.__getitem__, wanted)

    def _read_parameters(self, step: int) -> Params:
        return merged(self._read_some(step, parameters_to_use))

    def _read_raw(self, step: int) -> Params:
        def use(params, opt_state):
            if parameters_to_use(params, opt_state) is params:
                raise UserError(f'{RAW} means nothing to the checkpoint of step {step} in {self._folder}, which holds '
                                'no moving average (config.optimizer.ema): leave it out')
            return params

        return merged(self._read_some(step, use))

    def _open_manager(self) -> 'ocp.CheckpointManager':
        """Opens Orbax's manager, which neither replaces a step nor saves one below the newest.

        So checkpoints that are newer than the restored one are renamed first: damaged checkpoints, and checkpoints that
        the leader did not see at the start, because its view of the file system lagged.
        """
        import orbax.checkpoint as ocp  # slow to import, so only where it is used

        newer = {step for steps in exchange('newer checkpoints', self.steps()) for step in steps
                 if self._restored is not None and step > self._restored}

        def put_aside():
            for step in sorted(newer):
                aside = (self._folder / f'{step}.damaged{again}' for again in ['', *(f'-{n}' for n in range(2, 1000))])
                (self._folder / str(step)).rename(next(path for path in aside if not path.exists()))

        from_leader('damaged checkpoints', put_aside)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(self._folder, options=ocp.CheckpointManagerOptions(
            preservation_policy=_Kept(self), cleanup_tmp_directories=True))  # of a run that was killed

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Returns those of `steps`, which ascend, that are kept: the last and the best."""
        return {*steps[-self._keep_last:], *self._best_first(steps)[:self._keep_best]}

    def _best_first(self, steps: Sequence[int]) -> list[int]:
        """Returns the evaluated steps, best first; of equally good steps, the earlier comes first."""
        return sorted((step for step in steps if step in self.values),
                      key=lambda step: (-goodness(self._metric, self.values[step]), step))

    def _no_room(self, _, reason: str) -> str:
        still = _still_valid([step for step in self.steps() if step != self._saving])
        return (f'{self._folder / str(self._saving)} cannot be written: {reason}. {still}: free space, then run the '
                'same command again')


class _Kept:
    """An Orbax preservation policy that asks `Checkpoints.kept`."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [each.step for each in checkpoints]
        kept = self._checkpoints.kept(steps)
        return [step in kept for step in steps]


@contextlib.contextmanager
def damage_agreed(folder: Path) -> Iterator[None]:
    """In the body, files of the checkpoint `folder` are read. What fails in one process fails in all of them.

    Raises:
      Damaged: if the files cannot be read, or their values differ from those written.
      UserError: if the body raises one.
    """
    refused = damaged = cause = None
    try:
        yield
    except UserError as error:
        refused, cause = str(error), error
    except (jax.errors.JaxRuntimeError, MemoryError):  # not the file's fault
        raise
    except Exception as error:  # Orbax and TensorStore raise many types
        if lost(error):
            raise
        damaged, cause = next(iter(str(error).strip().splitlines()), '')[:200] or type(error).__name__, error
    for number, (refusal, damage) in enumerate(exchange(f'the check of {folder.name}', (refused, damaged))):
        where = f' for process {number}' if jax.process_count() > 1 else ''
        if refusal is not None:
            raise UserError(refusal) from cause
        if damage is not None:
            raise Damaged(f'{folder} is damaged{where}: {damage}') from cause


@contextlib.contextmanager
def open_checkpoints(workdir: Path, **options) -> Iterator[Checkpoints]:
    """Opens the checkpoints of a run directory, and closes them at the end, when all saves are complete."""
    checkpoints = Checkpoints(workdir, **options)
    try:
        yield checkpoints
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            checkpoints.close()
        raise
    checkpoints.close()


def _progress(folder: Path) -> dict[str, Any]:
    """Reads the file of a checkpoint that has its checksums and the progress of the training loop."""
    refuse_pipes(folder)
    content = json.loads((folder / 'progress' / 'metadata').read_text('utf-8'))  # written by Orbax's JsonSave
    if content.pop('sha256') != _digest(content):
        raise Damaged('its progress does not match its checksum')
    return content


def _compare_checksums(arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises Damaged if the checksums of arrays differ from those that were saved."""
    found = checksums(arrays)
    if changed := sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path)):
        raise Damaged(f'{len(changed)} of {len(expected)} arrays do not match their checksums, such as {changed[0]}')


def _on_device(params: Params) -> Params:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf).astype(np.float32), device), params)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _still_valid(steps: Sequence[int]) -> str:
    return f'The checkpoint of step {steps[-1]} is still valid' if steps else 'There is no earlier checkpoint'


def _warn(message: str) -> None:
    """Logs a warning that all processes have in common: in the leader only."""
    log.log(logging.WARNING if is_leader() else logging.INFO, '%s', message)


def _listed(steps: Sequence[int]) -> str:
    return ', '.join(map(str, steps))
