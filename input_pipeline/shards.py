"""Tokenises a large text in shards, on all cores and in all processes of a job at the same time.

The rows of a text are divided into shards of about SHARD characters, in order. Each core has a worker, which is a
separate process. A worker reads the text and tokenises the next shard that no other worker has taken. A shard is a
token store in a folder next to the final store. A worker locks the shard that it builds. If a worker is killed, only
this shard is lost, and another worker builds the shard again. If a build is interrupted and started again, the existing
shards are used. The joined store has the same bits as a store that is built without shards.

Locks only prevent duplicate work. On a file system without locks, several workers may build the same shard, and several
processes may join the shards. The first process that finishes gives its result the final name. The other processes use
that result.
"""

import contextlib
import functools
import itertools
import json
import logging
import operator
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from input_pipeline.builds import build_once, cache_errors, remove_damaged
from input_pipeline.stores import join
from runtime.errors import UserError
from runtime.locks import locked

LARGE = 2 ** 22  # characters; a smaller text is tokenised in this process, in one or two seconds
SHARD = 2 ** 24  # characters
PAUSE = 0.2  # seconds between checks for the progress of other processes

log = logging.getLogger('allyouneed.data')

Rows = Callable[[], Iterable[Any]]  # returns all rows of a text; a row is a string or a tuple of strings
Write = Callable[[Iterable[Any], Path], None]  # writes rows into a folder, as a token store


def build_together(folder: Path, rows: Rows, write: Write) -> Path:
    """Builds the token store of `rows()` in `folder` if it is missing, and returns `folder`.

    The store of a large text is built in shards.

    Every process of a job may call this function at the same time. Each process starts a worker for each of its cores.
    `rows` and `write` are pickled for the workers.

    Raises:
      UserError: if the text has an error, or the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    with contextlib.suppress(_Large):
        return build_once(folder, lambda temporary: write(_small(rows()), temporary))
    shards = folder.with_name(f'{folder.name}.shards-{SHARD}')
    try:
        with cache_errors(folder):
            shards.mkdir(parents=True, exist_ok=True)
        parts = _tokenise(shards, rows, write)
        # A process that joins the shards builds `folder` before it removes the shards.
        if not shards.is_dir() and not folder.is_dir():
            raise UserError(f'{shards} was removed while this process tokenised the text, because another process '
                            'found an error. The log of that process has the message')
        with _alone(shards / 'join'):
            if not folder.is_dir() and remove_damaged(parts):  # an interrupted build may leave damaged shards
                _tokenise(shards, rows, write)
            build_once(folder, lambda temporary: join(parts, temporary))
    except UserError:
        # The shards are removed when the store has its final name. So without locks, another process may have built the
        # store and removed shards that this process needed.
        if not folder.is_dir():
            raise
    shutil.rmtree(shards, ignore_errors=True)
    return folder


class _Large(Exception):
    """Raised if a text is too large to be tokenised without shards."""


def _small(rows: Iterable[Any]) -> Iterator[Any]:
    """Yields the rows of a text. Raises _Large if the text has LARGE characters or more."""
    size = 0
    for row in rows:
        if (size := size + _characters(row)) >= LARGE:
            raise _Large
        yield row


def _characters(row: Any) -> int:
    return len(row) if isinstance(row, str) else sum(map(len, row))


def _shards(rows: Rows, size: int) -> Iterator[tuple[int, Iterator[Any]]]:
    """Yields (index of the shard, its rows); `size` is the size of a shard in characters."""
    def numbered():
        number = filled = 0
        for row in rows():
            yield number, row
            if (filled := filled + _characters(row)) >= size:
                number, filled = number + 1, 0

    for number, group in itertools.groupby(numbered(), key=operator.itemgetter(0)):
        yield number, map(operator.itemgetter(1), group)


def _place(folder: Path, number: int) -> Path:
    return folder / f'{number:06d}'


def _tokenise(shards: Path, rows: Rows, write: Write) -> list[Path]:
    """Builds all shards with workers, together with other processes. Returns the folders of the shards.

    Raises:
      UserError: if a worker fails, or all workers are killed.
    """
    task = cloudpickle.dumps((shards, functools.partial(_shards, rows, SHARD), write))
    cores = len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count() or 1
    log.info('%s: tokenising a large text with %d processes on this machine', shards.name, cores)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(task)) for _ in range(cores)]
        answers = [json.loads(line) for worker in workers if worker.stdout and (line := worker.stdout.read())]
    if errors := [answer['error'] for answer in answers if 'error' in answer]:
        shutil.rmtree(shards, ignore_errors=True)  # the user will change the text
        raise UserError(errors[0])
    if not answers:
        raise UserError(f'All {cores} tokenising processes were killed, perhaps because there is too little memory. '
                        'The finished shards are kept. Run the same command again to continue')
    return [_place(shards, number) for number in range(answers[0]['shards'])]


@contextlib.contextmanager
def _worker(task: bytes) -> Iterator[subprocess.Popen]:
    """Starts a worker. The worker ends when its work is finished, the context ends or this process ends."""
    code = 'from input_pipeline.shards import work; work()'
    path = os.pathsep.join(filter(None, sys.path)) or os.curdir
    with subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env=os.environ | {'PYTHONPATH': path}) as process:
        assert process.stdin is not None, 'it is a pipe'
        try:
            with contextlib.suppress(BrokenPipeError):  # the worker was killed
                process.stdin.write(task)
                process.stdin.flush()
            yield process
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def work() -> None:
    """Runs a worker: reads its task from stdin, and builds shards until all shards exist.

    Writes the number of shards, or the message of a UserError, to stdout as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignores Ctrl-C, because the parent process ends this process
    folder, shards, write = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = {'shards': _build_all(folder, shards, write)}
    except UserError as error:
        answer = {'error': str(error)}
    print(json.dumps(answer), flush=True)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the parent process closes the pipe, or ends
    os._exit(1)


def _build_all(folder: Path, shards: Callable[[], Iterable[tuple[int, Iterator[Any]]]], write: Write) -> int:
    """Builds every free shard, waits for the remaining shards, and returns the number of all shards."""
    count, missing = _build_free(folder, shards(), write)
    while missing := [number for number in missing if not _place(folder, number).is_dir()]:
        if not folder.is_dir():
            break  # another process of the job has joined the shards
        if any(_is_free(folder, number) for number in missing):  # the worker of this shard was killed
            count, missing = _build_free(folder, shards(), write)
        time.sleep(PAUSE)
    return count


def _build_free(folder: Path, shards: Iterable[tuple[int, Iterator[Any]]], write: Write) -> tuple[int, list[int]]:
    """Builds every missing shard that is not locked. Returns the number of all shards, and the list of locked shards.

    Stops if another process has already joined the shards into a store and removed the shards.
    """
    count, taken = 0, []
    for number, rows in shards:
        if not folder.is_dir():
            break
        count, place = number + 1, _place(folder, number)
        if place.is_dir():
            continue
        with _claimed(folder, number) as mine:
            if mine and not place.is_dir():
                build_once(place, functools.partial(write, rows))
            elif not mine:
                taken.append(number)
    return count, taken


@contextlib.contextmanager
def _claimed(folder: Path, number: int) -> Iterator[bool]:
    """Locks a shard. Yields False if another worker has the lock. Yields True if the file system has no locks."""
    try:
        lock = locked(folder / f'{number:06d}.lock')
    except (BlockingIOError, FileNotFoundError):  # not found: the shards have been joined
        yield False
        return
    except OSError:
        lock = contextlib.nullcontext()
    with lock:
        yield True


def _is_free(folder: Path, number: int) -> bool:
    with _claimed(folder, number) as mine:
        return mine


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Runs the body in only one process at a time. On a file system without locks, this function has no effect."""
    while True:
        try:
            lock = locked(path)
            break
        except BlockingIOError:
            time.sleep(PAUSE)
        except OSError:  # there are no locks, or another process has joined the shards and removed them
            lock = contextlib.nullcontext()
            break
    with lock:
        yield
