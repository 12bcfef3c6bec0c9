"""Text files in UTF-8, plain or .gz, and stdin: whole texts, lines, and the documents that lines are divided into."""

import codecs
import contextlib
import errno
import gzip
import io
import itertools
import json
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from runtime.errors import UserError


def read_lines(path: Path | str) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, plain or .gz, without line ends (line feed, or carriage return and line feed).

    A byte order mark at the beginning of the file is removed. Windows programs write such marks. The path '-' stands
    for stdin.

    Raises:
      UserError: if the file cannot be read or is not UTF-8. The message has file:line of an invalid byte.
    """
    with open_binary(path) as file:
        yield from decode_lines(file, 'stdin' if path == '-' else str(path))


def read_text(path: Path | str) -> str:
    """Reads a whole UTF-8 file, plain or .gz, or stdin (-). Line ends are kept, and a byte order mark is removed.

    Raises:
      UserError: if the file cannot be read or is not UTF-8. The message has file:line of an invalid byte.
    """
    with open_binary(path) as file:
        content = file.read()
    try:
        return decode_text(content)
    except UnicodeDecodeError:
        name = 'stdin' if path == '-' else str(path)
        for _ in decode_lines(io.BytesIO(content), name):  # raises UserError with file:line
            continue
        raise


def divided(lines: Iterable[str], kind: str, name: str, first: int = 1) -> Iterator[str]:
    """Divides lines of text into documents.

    Args:
      lines: the lines.
      kind: 'line', 'blank_line' or 'jsonl', as in FileDocuments.
      name: the name of the file in messages.
      first: the number of the first line in messages.

    Raises:
      UserError: if `kind` is 'jsonl' and a line is not JSON with a text.
    """
    if kind == 'line':
        yield from lines
        return
    if kind == 'jsonl':
        yield from (_json_text(line, f'{name}:{number}') for number, line in enumerate(lines, first))
        return
    for blank, together in itertools.groupby(lines, lambda line: not line.strip()):
        if not blank:
            yield '\n'.join(together)


def _json_text(line: str, where: str) -> str:
    """Returns the text of a line of JSON Lines: a string, or the entry 'text' of an object."""
    try:
        value = json.loads(line)
        text = value['text'] if isinstance(value, dict) else value
        text.encode()
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise UserError(f'{where}: must be a JSON string or an object with a string "text", but is {line[:40]!r}'
                        ) from None
    return text


@contextlib.contextmanager
def open_binary(path: Path | str) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Opens a file, plain or .gz, for reading. The path '-' stands for stdin.

    Raises:
      UserError: if the file cannot be opened, or if reading fails inside the context.
    """
    try:
        if path == '-':
            if sys.stdin is None:
                raise UserError('stdin is closed. Use --input=FILE')
            yield sys.stdin.buffer
            return
        mode = os.stat(path)
        if stat.S_ISCHR(mode.st_mode) and mode.st_rdev != os.stat(os.devnull).st_rdev and not _is_terminal(path):
            raise OSError(errno.EINVAL, 'it is a device')
        opened = gzip.open if str(path).endswith('.gz') else open
        with opened(path, 'rb') as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:  # the last two are for a truncated or damaged .gz
        raise UserError(f'{path} cannot be read: {error}') from None


def _is_terminal(path: Path | str) -> bool:
    with open(path, 'rb') as file:
        return file.isatty()


def decode_text(content: bytes) -> str:
    """Decodes a UTF-8 file, or its first part. Removes a byte order mark, which Windows programs write."""
    return content.removeprefix(codecs.BOM_UTF8).decode()


def has_mark(path: Path) -> bool:
    """Returns whether a file, plain or .gz, begins with a byte order mark."""
    with open_binary(path) as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Yields the lines of an open binary file as text. `name` is the name of the file in error messages."""
    for number, line in enumerate(file, 1):
        try:
            text = decode_text(line) if number == 1 else line.decode()
        except UnicodeDecodeError as error:
            column = len(error.object[:error.start].decode()) + 1  # counted in characters, as in an editor
            raise UserError(f'{name}:{number}: not UTF-8 (byte {error.object[error.start]:#04x} at column {column}). '
                            'Convert the file, for example with iconv -f ENCODING -t UTF-8, where ENCODING is the '
                            'encoding of the file, such as WINDOWS-1252 or UTF-16') from None
        yield text.removesuffix('\n').removesuffix('\r')
