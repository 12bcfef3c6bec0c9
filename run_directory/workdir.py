"""The run directory: it belongs to one config and one set of data, and one process at a time uses it."""

import datetime
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from configs.options import BY_NAME, flatten
from configs.versions import VERSION
from input_pipeline.data import KEPT, Data
from model.evaluation import Objective
from run_directory.checksums import checksums
from run_directory.records import CONFIG, METRICS_FILE, read_said_config
from runtime.agreement import different, exchange, from_leader
from runtime.errors import UserError
from runtime.files import check_folder, check_name, expanded, naming, read_bytes, read_json, write_text
from runtime.locks import lock_directory
from runtime.rendezvous import listed

CHANGES = 'changes.jsonl'  # changes of the config, one line for each start that makes some
FINGERPRINTS = 'fingerprints.json'  # of the data, by split
LOWERED = 'lowered.json'  # {option: its value before the data lowered it}
TEACHER = 'teacher.json'  # checksums of the arrays of the objective, if it has any: a teacher's parameters
LOCK = 'lock'
OWNER = 'owner'  # which training uses the directory: its lease
VISIBLE = 20  # seconds in which a file that the leader has written must be visible to the other processes
# Parts of a run, which other outputs must not replace.
OWN = (CONFIG, CHANGES, LOCK, OWNER, KEPT, METRICS_FILE, 'checkpoints')
SPLITS = ('train', 'validation')  # what training reads

log = logging.getLogger('allyouneed.train')


class RunDirectory:
    """A run directory opened for training: new, or `resumed` if it already has a run. Locked until it is closed.

    A new directory is not created before `claim`, so that an error found earlier leaves nothing behind.

    A run that started before an option existed keeps its behaviour: if its config does not set the option, and the
    command line does not either, `config` gets the value that the run started with. The same applies to an option that
    the data lowered when the run started (`input_pipeline.data.learned_tokenizers`).
    """

    def __init__(self, path: str | None, config: ConfigDict, *, asked: Collection[str] = ()):
        """Opens the directory. Only the leader reads it, writes to it and locks it; the other processes follow.

        Args:
          path: the directory.
          config: the config of this start. Of a resumed run, options that the run began without may get other values.
          asked: the options that the command line sets.

        Raises:
          UserError: if the directory has other files but no run, another training uses it, options differ that must
            not change, or a process does not see the leader's directory.
        """
        if not path:
            raise UserError('--workdir is missing: give the directory that the run is to be kept in')
        self.path = expanded(path)
        check_name(self.path.absolute())
        self._lock, self._changed, self._lease, self.asked = None, {}, '', asked
        kept = from_leader('the run directory', lambda: self._open(config, asked))
        self.resumed = kept is not None
        if kept is not None:
            config.update_from_flattened_dict(kept)
            self._check_shared()
        self._opened = flatten(config)

    def _open(self, config: ConfigDict, asked: Collection[str]) -> dict[str, Any] | None:
        """Returns the options that keep the value of a resumed run, with these values; None for a new run."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f'--workdir={self.path} is a file: give a directory')
        # A start that was killed while it claimed the directory may have left these files.
        there = {each.name for each in self.path.iterdir()} if self.path.exists() else set()
        others = there - {LOCK, OWNER, f'{OWNER}.tmp', KEPT, f'{CONFIG}.tmp'}
        if CONFIG not in others:
            if others:
                raise UserError(f'--workdir={self.path} holds files but no run ({CONFIG}): give a new or an empty '
                                'directory')
            check_folder(self.path)
            return None
        self._hold()
        there, unsaid = read_said_config(self.path)
        kept, lowered = {}, self._lowered()
        for key, (then, now) in changed_keys(there, config).items():
            if key in asked or may_change(key) is not None:
                continue
            if key in unsaid:
                kept[key] = then
                log.info('config.%s=%r, not %r: the run began before there was this option', key, then, now)
            elif lowered.get(key) == now:
                kept[key] = then
                log.info('config.%s=%r, not %r: the data lowered it when the run began', key, then, now)
        self._changed = {key: change for key, change in changed_keys(there, config).items() if key not in kept}
        if refused := [key for key in self._changed if may_change(key) is None]:
            self.close()
            raise UserError(
                f'{self.path} holds a run of another config. These keys differ:\n'
                + '\n'.join(f'  {key}: {there!r} there, {here!r} asked for'
                            for key, (there, here) in self._changed.items() if key in refused)
                + '\nGive another --workdir, or the config of that run to resume it')
        return kept

    def _lowered(self) -> dict[str, Any]:
        """Returns {option: its value before the data lowered it} for a run that has begun."""
        path = self.path / KEPT / LOWERED
        return read_json(path, 'Take it from a copy of the run') if path.exists() else {}

    def check_data(self, data: Data) -> None:
        """Raises UserError, naming the changes, if the run started on other data."""
        if self.resumed and (changed := changed_data(self.path, data, SPLITS)):
            raise UserError(f'the data has changed since {self.path} began: {"; ".join(changed)}. A run that went on '
                            'would be of neither: bring the former data back, or give another --workdir')

    def check_objective(self, objective: Objective) -> None:
        """Raises UserError if the run started with another teacher, whose parameters are arrays of the objective."""
        path = self.path / KEPT / TEACHER
        if self.resumed and path.exists() and read_json(path, 'Take it from a copy of the run') != _arrays(objective):
            raise UserError(f'the parameters of the teacher are others than when {self.path} began. A run that went on '
                            'would be of neither: give the former ones by config.train.teacher and, where the teacher '
                            'has gone on training, config.train.teacher_checkpoint=STEP; or give another --workdir')

    def claim(self, config: ConfigDict, data: Data, objective: Objective) -> None:
        """Writes all that decode.py needs into the directory, and logs the changes of the config."""
        from_leader('the run directory', lambda: self._claim(config, data, objective))
        if not self.resumed:
            self._check_shared()

    def _claim(self, config: ConfigDict, data: Data, objective: Objective) -> None:
        if not self.resumed:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
            if (self.path / CONFIG).exists():
                raise UserError(f'another run has begun in {self.path} meanwhile: give another --workdir')
            data.keep(self.path / KEPT)
            write_text(self.path / KEPT / FINGERPRINTS,
                       json.dumps({split: data.fingerprint(split) for split in SPLITS}, indent=2) + '\n')
            now = flatten(config)
            if lowered := {key: value for key, value in self._opened.items() if now[key] != value}:
                write_text(self.path / KEPT / LOWERED, json.dumps(lowered, indent=2) + '\n')
            if arrays := _arrays(objective):
                write_text(self.path / KEPT / TEACHER, json.dumps(arrays, indent=2) + '\n')
        elif self._changed:
            for key, (there, here) in self._changed.items():
                note = may_change(key)
                if key == 'train.steps' and config.optimizer.schedule == 'cosine':
                    note = 'the cosine ends there now: the learning rate follows the new curve from here on'
                log.info('changed since the run began: %s %r -> %r%s', key, there, here, note and f' ({note})')
            when = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
            with naming(self.path / CHANGES), open(self.path / CHANGES, 'a', encoding='utf-8') as file:
                file.write(json.dumps({'time': when, 'changed': self._changed}) + '\n')
        else:
            return
        write_text(self.path / CONFIG, json.dumps({'version': VERSION, **config.to_dict()}, indent=2) + '\n')

    def _check_shared(self) -> None:
        """Raises UserError if a process does not see the lease that the leader has written."""
        self._lease = from_leader('the lease', lambda: self._lease)
        deadline = time.monotonic() + VISIBLE
        while not (visible := self._read_lease() == self._lease) and time.monotonic() < deadline:
            time.sleep(0.2)
        hosts = exchange(f'a look at {self.path}', None if visible else socket.gethostname())
        if blind := [f'process {number} on {host}' for number, host in enumerate(hosts) if host]:
            self.close()
            raise UserError(f'--workdir={self.path}: {", ".join(blind)} cannot see the file {OWNER} that process 0 has '
                            'written there. Use a directory on a file system that all processes share')

    def check_lease(self) -> None:
        """Raises UserError if another training has taken over the directory, where locks do not prevent it."""
        def check():
            if (holder := self._read_lease()) != self._lease:
                raise UserError(f'{self.path} is in use by another training now ({holder or "unknown"}): this one '
                                'ends, and saves nothing more. Stop one of them, or give it another --workdir')

        from_leader('the lease', check)

    def _read_lease(self) -> str:
        """Returns who uses the directory, or ''."""
        try:
            return ' '.join(read_bytes(self.path / OWNER).decode(errors='replace').split())
        except OSError:
            return ''

    def close(self) -> None:
        """Releases the lock."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> 'RunDirectory':
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _hold(self) -> None:
        """Locks the directory. The system releases the lock when the process ends, however it ends.

        Where file systems do not support locks, or not between machines, the newest training has the lease.
        """
        with naming(self.path / LOCK):
            try:
                self._lock = lock_directory(self.path, LOCK, 'runs')
            except BlockingIOError:
                raise UserError(f'{self.path} is in use by another training ({self._read_lease() or "unknown"}): wait '
                                'for its end or stop it, or give another --workdir') from None
        started = datetime.datetime.now().astimezone().isoformat(' ', timespec='seconds')
        self._lease = (f'process {os.getpid()} on {socket.gethostname()}, started {started}, '
                       f'lease {uuid.uuid4().hex[:8]}')
        write_text(self.path / OWNER, f'{self._lease}\n')


def check_same_inputs(config: ConfigDict, data: Data) -> None:
    """Raises UserError if processes have other options than process 0, or other data. Locations may differ."""
    options = {key: value for key, value in flatten(config).items() if not getattr(BY_NAME[key].allowed, 'file', False)}
    both = exchange('the config', options)
    for number, theirs in enumerate(both):
        if changed := [f'{key}: {theirs.get(key)!r}, in process 0 {value!r}' for key, value in both[0].items()
                       if theirs.get(key) != value]:
            raise UserError(f'process {number} has another config than process 0 ({"; ".join(changed)}). Start all '
                            'processes with the same flags')
    if others := different('the data', [data.fingerprint(split) for split in SPLITS]):
        raise UserError(f'{listed(others)} and process 0 read different data. Give all processes the same files')


def changed_keys(there: ConfigDict, here: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Returns {option: (value there, value here)} for the options that differ."""
    before, now = flatten(there), flatten(here)
    return {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)}


def may_change(key: str) -> str | None:
    """Returns a note about changing the option `key` of a resumed run, or None if it must not change."""
    return BY_NAME[key].resume if key in BY_NAME else None


def changed_data(workdir: Path, data: Data, splits: Iterable[str]) -> list[str]:
    """Returns 'train: train.en, train.de' for each of `splits` whose data differs from the run's."""
    path = workdir / KEPT / FINGERPRINTS
    kept = read_json(path, 'Take it from a copy of the run')
    changed = []
    for split in splits:
        if not isinstance(kept.get(split, {}), dict):
            raise UserError(f'{path} is damaged: its {split} is no object. Take it from a copy of the run')
        now = json.loads(json.dumps(data.fingerprint(split)))  # tuples become lists, as in the file
        if split in kept and now != kept[split]:
            before = _files(kept[split])
            names = [name for name, digest in _files(now).items() if before.get(name) != digest]
            changed.append(f'{split}: {", ".join(names) or "its text"}')
    return changed


def _arrays(objective: Objective) -> dict[str, list[int]]:
    """Returns the checksum of each array that is an argument of the objective."""
    return checksums(objective.args) if isinstance(objective, jax.tree_util.Partial) else {}


def _files(fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """Returns {name: digest} of the files in a fingerprint."""
    files = fingerprint.get('files', [fingerprint.get('file')])
    return {str(file[0]): file[1] for file in files if isinstance(file, list) and len(file) == 2
            } if isinstance(files, list) else {}
