"""The run directory of a training. A directory belongs to one training, with one config and one data set.

Only one training at a time can use a run directory.
"""

import contextlib
import datetime
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from configs.options import BY_NAME, flatten
from configs.versions import config_text
from input_pipeline.data import Data
from input_pipeline.kept_data import KEPT
from model.evaluation import Objective
from run_directory.checksums import checksums
from run_directory.fingerprints import FINGERPRINTS, TRAINING_SPLITS, changed_data, has_fingerprints
from run_directory.records import (
    CHOSEN,
    CONFIG,
    EXPORTED,
    LOWERED,
    MEASURED,
    METRICS_FILE,
    RECIPE,
    finished_at,
    finished_message,
    lowered_options,
    read_saved_config,
)
from runtime.agreement import different, exchange, from_leader
from runtime.errors import UserError
from runtime.files import RESTORE, check_folder, check_name, expanded, naming, read_bytes, read_json, write_text
from runtime.locks import lock_directory
from runtime.rendezvous import listed

CHANGES = 'changes.jsonl'  # changes of the config: one line for each resumption that changes options
TEACHER = 'teacher.json'  # checksums of the objective's arrays, such as a teacher's parameters
LOCK = 'lock'
OWNER = 'owner'  # the file with the lease, a line that identifies the training that uses the directory
VISIBLE = 20  # maximum time, in seconds, that the other processes wait for a file that the leader has written
READABLE = 5  # seconds for which the leader tries to read the lease again after an error
# Files of a run. Other commands must not replace these files with their outputs.
OWN = (CONFIG, CHANGES, EXPORTED, LOCK, OWNER, KEPT, METRICS_FILE, RECIPE, 'checkpoints')
# Options that name the data and the teacher. Their values may change if the content is the same, which training checks.
NAMING_INPUTS = ('data.dir', 'data.file', 'train.teacher', 'train.teacher_checkpoint')

log = logging.getLogger('allyouneed.train')


class RunDirectory:
    """A run directory that is open for training. The directory is locked until this object is closed.

    `claim` creates the files of a new run. So an error before `claim` leaves no files behind.

    A resumed run keeps its behaviour if an option was added to the code after the run started. If neither the saved
    config nor the command line sets such an option, `config` gets the value that keeps the old behaviour. In the same
    way, `config` keeps the value of an option that was lowered when the run started, because there was too little data
    (`input_pipeline.data.learned_tokenizers`).

    Attributes:
      path: the directory.
      asked: the names of the options that the command line sets.
      resumed: True if the directory already contained a run when it was opened.
      finished_at: the step at which this run finished, according to its records. None if the run is not finished.
    """

    def __init__(self, path: str | None, config: ConfigDict, *, asked: Collection[str] = ()):
        """Opens the directory. Only the leader reads, writes and locks the directory.

        The leader sends its decisions to the other processes.

        Args:
          path: the directory.
          config: the config of this training. If the run is resumed, some options must keep the value that they have in
            the run. `config` is changed accordingly.
          asked: the names of the options that the command line sets.

        Raises:
          UserError: if the directory contains files but no run, if another training uses the directory, if an option
            that must stay the same has changed, or if a process cannot see the leader's directory.
        """
        if not path:
            raise UserError('--workdir is missing. Set it to the directory of the run, such as --workdir=runs/demo')
        self.path = expanded(path)
        if '..' in self.path.parts:  # D/new/.. does not exist if D/new does not exist, but its files would be in D
            self.path = Path(os.path.realpath(self.path))
        check_name(self.path.absolute())
        self.finished_at: int | None = None
        self._lock, self._changed, self._lease, self.asked = None, {}, '', asked
        try:
            kept = from_leader('the run directory', lambda: self._open(config, asked))
            self.resumed = kept is not None
            if kept is not None:
                config.update_from_flattened_dict(kept)
                self._check_shared()
                self.finished_at = from_leader('the records', lambda: finished_at(self.path, config))
        except BaseException:  # in a notebook, the traceback keeps this object, and so its lock
            self.close()
            raise
        self._opened = flatten(config)

    def _open(self, config: ConfigDict, asked: Collection[str]) -> dict[str, Any] | None:
        """Returns {option: value} for options that keep the value of the resumed run. Returns None for a new run."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f'--workdir={self.path} is a file. Use a directory')
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        # A training that was killed in `claim` may have left these files. Without a lock, the folder KEPT is not from a
        # training, and may contain files of the user.
        names -= {LOCK, OWNER, *([KEPT] if names & {LOCK, OWNER} else []),
                  *(name for name in names if name.startswith((f'{OWNER}.', f'{CONFIG}.')) and name.endswith('.tmp'))}
        if CONFIG not in names:
            if names:
                raise UserError(f'--workdir={self.path} is not empty and has no {CONFIG}. Use a new or an empty '
                                'directory')
            check_folder(self.path)
            return None
        if EXPORTED in names:
            raise UserError(f'--workdir={self.path} is an exported model, which cannot be trained further. Use another '
                            '--workdir')
        read_saved_config(self.path)  # so that a folder that is not a run gets no lock
        self._hold()
        saved, unset = read_saved_config(self.path)
        kept, lowered = {}, lowered_options(self.path)
        for key, (old, new) in changed_keys(saved, config).items():
            if (key, new) == MEASURED and (old in CHOSEN or key not in asked):
                kept[key] = old
                log.info('config.%s=%r is used instead of %r, because a run keeps the precision with which it began',
                         key, old, new)
                continue
            if key in asked or may_change(key) is not None:
                continue
            if key in unset:
                kept[key] = old
                log.info('config.%s=%r is used instead of %r, because the run began before this option existed',
                         key, old, new)
            elif lowered.get(key) == new:
                kept[key] = old
                log.info('config.%s=%r is used instead of %r, because the value was lowered when the run began: there '
                         'was too little data', key, old, new)
        self._changed = {key: change for key, change in changed_keys(saved, config).items() if key not in kept}
        if refused := [key for key in self._changed if may_change(key) is None]:
            changes = '; '.join(f'{key}: {old!r} in the run, {new!r} now'
                                for key, (old, new) in self._changed.items() if key in refused)
            raise UserError(f'--workdir={self.path} contains a run, and these options must not change when a run '
                            f'resumes ({changes}). Use another --workdir, or the values of that run')
        return kept

    def check_data(self, data: Data) -> None:
        """Raises UserError if `data` differs from the data of the resumed run. The message names the changes."""
        if not self.resumed or not (changed := changed_data(self.path, data, TRAINING_SPLITS)):
            return
        before, now = read_json(self.path / KEPT / FINGERPRINTS, RESTORE).get('train', {}), data.fingerprint('train')
        names, held_out = self._opened['data.splits.test'], [before.get('cut_off'), now.get('cut_off')]
        if held_out == [['validation', 'test'], ['validation']]:
            if 'test' in names.split(','):
                raise UserError(f'config.data.dir={self._opened["data.dir"]} now has files of the test split, but this '
                                f'split was held out from the training data when the run in {self.path} began. Rename '
                                f'the files to another name NAME, and use config.data.splits.test={names},NAME')
            advice = f'Use test,{names}' if '/' not in names and names not in TRAINING_SPLITS else (
                f'Move or link the files of {names} into config.data.dir under another name NAME, and use test,NAME')
            raise UserError(f'config.data.splits.test={names}: the test data that was held out when the run began '
                            f'would return to the training data. {advice}')
        raise UserError(f'the data has changed since the run in {self.path} began: {"; ".join(changed)}. Restore the '
                        'previous data, or use another --workdir')

    def check_objective(self, objective: Objective) -> None:
        """Raises UserError if the teacher in `objective` differs from the teacher of the resumed run.

        A teacher also differs from no teacher. An imported run that has not been trained yet may get any teacher.
        """
        if not self.resumed or not has_fingerprints(self.path):
            return
        path, now = self.path / KEPT / TEACHER, _arrays(objective)
        before = read_json(path, RESTORE) if path.exists() else {}
        if now and not before:
            raise UserError(f'config.train.teacher: the run in {self.path} began without a teacher. Remove this option '
                            'and config.train.teacher_checkpoint, or use another --workdir')
        if before and not now:
            teacher = read_saved_config(self.path)[0].train.teacher
            raise UserError(f'config.train.teacher is not set, but the run in {self.path} began with a teacher. Set '
                            f'config.train.teacher={teacher}, or use another --workdir')
        if now != before:
            raise UserError(f'the parameters of the teacher have changed since the run in {self.path} began. Restore '
                            'the previous teacher, or use another --workdir. If the teacher has been trained further, '
                            'set config.train.teacher_checkpoint to the step with which this run began')

    def claim(self, config: ConfigDict, data: Data, objective: Objective) -> None:
        """Writes the files of a new run that decode.py needs, or records the changed options of a resumed run.

        A run that was imported gets the fingerprints of its data when it is first trained.
        """
        if self.resumed:
            from_leader('the fingerprints', lambda: None if has_fingerprints(self.path) else self._record_inputs(
                data, objective))
            self._record_changes(config)
            # The first training of an imported run has chosen the precision of products (MEASURED).
            measured = flatten(config) != self._opened
            return from_leader('the config', lambda: self._write_config(config) if measured else None)
        from_leader('the run directory', lambda: self._create(config, data, objective))
        self._check_shared()

    def report_finished(self, config: ConfigDict) -> None:
        """Records the changed options of a run that is already finished, and logs at which step and why it finished.

        Two kinds of changes are not recorded, and `config` then gets the values of the run. The first kind is new paths
        of the data and the teacher, because a finished run does not read or check the data and the teacher. The second
        kind is a config.train.steps that is below the number of steps that the run has made, if the run is also
        finished without this change.
        """
        assert self.finished_at is not None, 'the run is finished'
        if 'train.steps' in self._changed:  # only in the leader
            old, new = self._changed['train.steps']
            config.train.steps = old
            if new < self.finished_at and finished_at(self.path, config) is not None:
                del self._changed['train.steps']
                log.info('config.train.steps=%d is not recorded, because this run has made %d steps. The run keeps %d',
                         new, self.finished_at, old)
            else:
                config.train.steps = new
        for key in [key for key in NAMING_INPUTS if key in self._changed]:
            old, new = self._changed.pop(key)
            config.update_from_flattened_dict({key: old})
            log.info('config.%s=%r is not recorded, because this run is finished and does not read its data or its '
                     'teacher again. The run keeps %r', key, new, old)
        self._record_changes(config)
        log.info('%s', finished_message(self.finished_at, config))

    def _create(self, config: ConfigDict, data: Data, objective: Objective) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._hold(new=True)
        data.keep(self.path / KEPT)
        self._record_inputs(data, objective)
        now = flatten(config)
        (self.path / LOWERED).unlink(missing_ok=True)  # a start that was killed may have left this file
        if lowered := {key: value for key, value in self._opened.items()
                       if now[key] != value and (key, value) != MEASURED}:
            write_text(self.path / LOWERED, json.dumps(lowered, indent=2) + '\n')
        self._write_config(config)

    def _record_inputs(self, data: Data, objective: Objective) -> None:
        """Writes the checksums of the teacher, and then the fingerprints of the data.

        The file with the fingerprints is written last. If it exists, both are recorded.
        """
        (self.path / KEPT / TEACHER).unlink(missing_ok=True)  # a start that was killed may have left this file
        if arrays := _arrays(objective):
            write_text(self.path / KEPT / TEACHER, json.dumps(arrays, indent=2) + '\n')
        write_text(self.path / KEPT / FINGERPRINTS,
                   json.dumps({split: data.fingerprint(split) for split in TRAINING_SPLITS}, indent=2) + '\n')

    def _record_changes(self, config: ConfigDict) -> None:
        def record():
            for key, (old, new) in self._changed.items():
                note = may_change(key)
                if key == 'train.steps' and config.optimizer.schedule == 'cosine' and self.finished_at is None:
                    note = 'the cosine schedule ends at the new value, so the learning rate changes from now on'
                log.info('option changed since the run began: %s %r -> %r%s', key, old, new, note and f' ({note})')
            when = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
            with naming(self.path / CHANGES), open(self.path / CHANGES, 'a', encoding='utf-8') as file:
                file.write(json.dumps({'time': when, 'changed': self._changed}) + '\n')
            self._write_config(config)

        from_leader('the changes', lambda: record() if self._changed else None)

    def _write_config(self, config: ConfigDict) -> None:
        write_text(self.path / CONFIG, config_text(config))

    def _check_shared(self) -> None:
        """Raises UserError if a process cannot see the file OWNER that the leader has written to the run directory."""
        self._lease = from_leader('the lease', lambda: self._lease)
        deadline = time.monotonic() + VISIBLE
        while not (visible := self._visible_lease() == self._lease) and time.monotonic() < deadline:
            time.sleep(0.2)
        hosts = exchange(f'reading {self.path}', None if visible else socket.gethostname())
        if blind := [f'process {number} on {host}' for number, host in enumerate(hosts) if host]:
            raise UserError(f'--workdir={self.path}: {", ".join(blind)} cannot see the file {self.path / OWNER}, '
                            'which process 0 has written. Use a directory on a file system that all processes share')

    def check_lease(self) -> None:
        """Raises UserError if another training has taken over the directory, or the files of the run have been deleted.

        Another training can take over the directory only on file systems without locks. If only the lease is missing,
        this method writes it again.
        """
        def check():
            deadline = time.monotonic() + READABLE
            while True:
                try:
                    holder = self._read_lease()
                    break
                except FileNotFoundError:
                    # deleted by another program: another training would have replaced the file
                    if not (self.path / CONFIG).exists():  # without this file, the run could not be resumed or used
                        raise UserError(f'{self.path}: the files of the run have been deleted. This training stops '
                                        'without saving. Restore the directory from a copy, or use another --workdir'
                                        ) from None
                    return self._write_lease()
                except OSError as error:  # may be temporary, such as ESTALE and EIO on network file systems
                    if time.monotonic() > deadline:
                        raise UserError(f'{self.path / OWNER} cannot be read: {error.strerror or error}. Without this '
                                        'file, another training could use the same directory. Restore access to the '
                                        'file, or delete it, then run the same command again') from error
                    time.sleep(0.2)
            if holder != self._lease:
                raise UserError(f'{self.path} is now in use by another training ({holder or "unknown"}). This training '
                                'stops without saving. Stop one of the two trainings, or use another --workdir')

        from_leader('the lease', check)

    def _read_lease(self) -> str:
        """Returns the lease (the content of the file OWNER). Raises OSError if the file cannot be read."""
        return ' '.join(read_bytes(self.path / OWNER).decode(errors='replace').split())

    def _visible_lease(self) -> str:
        """Returns the lease, or '' if the file OWNER cannot be read."""
        with contextlib.suppress(OSError):
            return self._read_lease()
        return ''

    def _write_lease(self) -> None:
        write_text(self.path / OWNER, f'{self._lease}\n')

    def close(self) -> None:
        """Releases the lock of the run directory."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> 'RunDirectory':
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _hold(self, *, new: bool = False) -> None:
        """Locks the directory and writes the lease. The system releases the lock when the process ends or crashes.

        Some file systems have no locks, or no locks between machines. On such a file system, a later training can
        replace the lease of an earlier training. Then the earlier training stops (`check_lease`).

        Raises:
          UserError: if another training holds the lock, or `new` is True and another training has begun a run.
        """
        with naming(self.path / LOCK):
            try:
                self._lock = lock_directory(self.path, LOCK, 'runs')
            except BlockingIOError:
                raise UserError(f'{self.path} is in use by another training ({self._visible_lease() or "unknown"}). '
                                'Wait until that training ends, stop it, or use another --workdir') from None
        if new and (self.path / CONFIG).exists():  # checked before the lease of that training would be replaced
            raise UserError(f'--workdir={self.path}: another training has just started in this directory. Use another '
                            '--workdir')
        started = datetime.datetime.now().astimezone().isoformat(' ', timespec='seconds')
        lease = f'process {os.getpid()} on {socket.gethostname()}, started {started}, lease {uuid.uuid4().hex[:8]}'
        # As `_read_lease` returns it. A host name may contain several spaces, and bytes that are not UTF-8.
        self._lease = ' '.join(lease.encode(errors='backslashreplace').decode().split())
        self._write_lease()


def check_same_inputs(config: ConfigDict, data: Data) -> None:
    """Raises UserError if a process has other options or other data than process 0. Paths of files may differ."""
    options = {key: value for key, value in flatten(config).items() if not getattr(BY_NAME[key].allowed, 'file', False)}
    first, *others = exchange('the config', options)
    for number, other in enumerate(others, 1):
        if changed := [f'{key}: {other.get(key)!r}, in process 0 {value!r}' for key, value in first.items()
                       if other.get(key) != value]:
            raise UserError(f'process {number} has another config than process 0 ({"; ".join(changed)}). Start all '
                            'processes with the same flags')
    if processes := different('the data', [data.fingerprint(split) for split in TRAINING_SPLITS]):
        raise UserError(f'{listed(processes)} and process 0 read different data. Use the same files in all processes')


def changed_keys(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Returns {option: (old value, new value)} for the options that differ between two configs."""
    before, after = flatten(old), flatten(new)
    return {key: (before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)}


def may_change(key: str) -> str | None:
    """Returns a note about the effect of changing the option `key` of a run, or None if the option must not change."""
    return BY_NAME[key].resume if key in BY_NAME else None


def _arrays(objective: Objective) -> dict[str, list[int]]:
    """Returns {path: checksum} of the objective's arrays, such as the parameters of a teacher."""
    return checksums(objective.args) if isinstance(objective, jax.tree_util.Partial) else {}
