"""Reads lines from a slow pipe or a prompt, and yields each line as soon as it arrives."""

import collections
import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from input_pipeline.text_files import decode_lines, divided, read_lines
from runtime.cache import cache_folder
from runtime.errors import UserError

PAUSE = 0.05  # seconds to wait for more lines after the first line; a fast pipe fills a batch in this time
HISTORY = 1000  # number of typed lines in the history


class Arriving(Iterator[str]):
    """Lines that arrive over time. `ready(deadline)` waits for a line until `deadline`, a value of `time.monotonic`."""

    def __init__(self, lines: Iterator[str], ready: Callable[[float], bool]):
        self._lines, self.ready = lines, ready

    def __next__(self) -> str:
        return next(self._lines)


def arriving_documents(lines: Arriving) -> Arriving:
    """Divides arriving lines at blank lines. A document is ready if a blank line or the end of the input follows it."""
    ahead: collections.deque[str | None] = collections.deque()  # lines that `ready` has read; None is the end

    def read() -> Iterator[str]:
        while (line := ahead.popleft() if ahead else next(lines, None)) is not None:
            yield line

    def ready(deadline: float) -> bool:
        while not (whole := bool(ahead) and not (ahead[-1] or '').strip()) and lines.ready(deadline):
            line = next(lines, None)
            if ahead or line is None or line.strip():  # blank lines before a document have no meaning
                ahead.append(line)
        return whole

    return Arriving(divided(read(), 'blank_line', 'stdin'), ready)


def input_lines(path: str) -> Iterator[str]:
    """Returns the lines of a file, of stdin (-), or of a prompt ('').

    Raises:
      UserError: if the lines cannot be read, or a line is not UTF-8. The message has the number of that line.
    """
    if not path:
        return typed_lines(cache_folder('') / 'typed_lines')
    return piped_lines() if path == '-' else read_lines(path)


def piped_lines() -> Iterator[str]:
    """Returns the lines of stdin, decoded as in `read_lines`.

    Raises:
      UserError: if stdin cannot be read, or a line is not UTF-8. The message has the number of that line.
    """
    try:
        pipe = _Pipe(sys.stdin.fileno())
    except (AttributeError, OSError, ValueError):  # stdin is closed, or has no file descriptor
        return read_lines('-')
    return Arriving(decode_lines(pipe, 'stdin'), pipe.ready)


class _Pipe(Iterator[bytes]):
    """The lines of a pipe as bytes, read from its file descriptor."""

    def __init__(self, descriptor: int):
        self._descriptor, self._ended = descriptor, False
        self._lines: collections.deque[bytes] = collections.deque()
        self._rest: list[bytes] = []  # the parts of an incomplete line

    def __next__(self) -> bytes:
        while not self._lines and not self._ended:
            self._read()
        if not self._lines:
            raise StopIteration
        return self._lines.popleft()

    def ready(self, deadline: float) -> bool:
        """Returns whether a line or the end of the input arrives before the deadline."""
        while not self._lines and not self._ended and select.select(
                [self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            self._read()
        return bool(self._lines) or self._ended

    def _read(self):
        try:
            part = os.read(self._descriptor, 2 ** 16)
        except OSError as error:
            raise UserError(f'stdin cannot be read: {error.strerror}. Use --input=FILE') from None
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
    """Reads lines from an interactive prompt with history. Ctrl-D ends the input.

    Raises:
      UserError: if the typed bytes are not UTF-8.
    """
    def lines():
        with _history(history):
            while True:
                try:
                    yield input('> ' if sys.stdout.isatty() else '')  # redirected output has no prompts
                except EOFError:
                    sys.stderr.write('\n')  # ends the line of the prompt
                    return
                except UnicodeDecodeError as error:
                    raise UserError(f'the typed line is not UTF-8: {error.reason}. Set the encoding of the terminal to '
                                    'UTF-8, or write the lines into a UTF-8 file and use --input=FILE') from None

    return Arriving(lines(), lambda deadline: False)


@contextlib.contextmanager
def _history(path: Path) -> Iterator[None]:
    """Enables line editing and a history for `input` within this context, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):  # no such file yet, or no permission
        readline.read_history_file(path)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
