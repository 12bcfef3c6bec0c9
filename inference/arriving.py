"""Lines that come when they come: from a slow pipe, or typed at a prompt. Each is answered as soon as it is there."""

import collections
import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from input_pipeline.sources import decode_lines, read_lines
from runtime.cache import cache_folder
from runtime.errors import UserError

PAUSE = 0.05  # seconds that a line waits for others: a fast pipe fills a batch in that time
HISTORY = 1000  # typed lines that are kept


class Arriving(Iterator[str]):
    """Lines, and whether there is one to read: `ready(deadline)`, which waits until then on the monotonic clock."""

    def __init__(self, lines: Iterator[str], ready: Callable[[float], bool]):
        self._lines, self.ready = lines, ready

    def __next__(self) -> str:
        return next(self._lines)


def input_lines(path: str) -> Iterator[str]:
    """The lines of a file, of stdin (-), or those that are typed ('').

    Raises:
      UserError: if it cannot be read, or with the line where it is not UTF-8.
    """
    if not path:
        return typed_lines(cache_folder('') / 'typed_lines')
    return piped_lines() if path == '-' else read_lines(path)


def piped_lines() -> Iterator[str]:
    """The lines of stdin, as `read_lines` has them.

    Raises:
      UserError: if it cannot be read, or with the line where it is not UTF-8.
    """
    try:
        pipe = _Pipe(sys.stdin.fileno())
    except (AttributeError, OSError, ValueError):  # it is closed, or no file of the system's
        return read_lines('-')
    return Arriving(decode_lines(pipe, 'stdin'), pipe.ready)


class _Pipe(Iterator[bytes]):
    """The lines of a file descriptor, as bytes."""

    def __init__(self, descriptor: int):
        self._descriptor, self._ended = descriptor, False
        self._lines: collections.deque[bytes] = collections.deque()
        self._rest: list[bytes] = []  # of a line whose end has not come

    def __next__(self) -> bytes:
        while not self._lines and not self._ended:
            self._read()
        if not self._lines:
            raise StopIteration
        return self._lines.popleft()

    def ready(self, deadline: float) -> bool:
        """Whether a line or the end is there, or comes before the deadline."""
        while not self._lines and not self._ended and select.select(
                [self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            self._read()
        return bool(self._lines) or self._ended

    def _read(self):
        try:
            part = os.read(self._descriptor, 2 ** 16)
        except OSError as error:
            raise UserError(f'stdin cannot be read: {error.strerror}') from None
        if not part:
            self._ended = True
            self._lines.extend([b''.join(self._rest)] if self._rest else [])
        elif b'\n' not in part:
            self._rest.append(part)
        else:
            *lines, rest = b''.join([*self._rest, part]).split(b'\n')
            self._lines.extend(line + b'\n' for line in lines)
            self._rest = [rest] if rest else []


def typed_lines(history: Path) -> Arriving:
    """Lines that are typed at a prompt, with those of former times to go back to. Ctrl-D ends them.

    Raises:
      UserError: if what is typed is not UTF-8.
    """
    def lines():
        with _remembered(history):
            while True:
                try:
                    yield input('> ' if sys.stdout.isatty() else '')  # a prompt is no result
                except EOFError:
                    sys.stderr.write('\n')  # behind the prompt
                    return
                except UnicodeDecodeError as error:
                    raise UserError(f'what was typed is not UTF-8: {error.reason}') from None

    return Arriving(lines(), lambda deadline: False)


@contextlib.contextmanager
def _remembered(history: Path) -> Iterator[None]:
    """Within this, `input` edits lines and has a history. Where there is no readline it has neither."""
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):  # there is none yet, or not for us
        readline.read_history_file(history)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)
