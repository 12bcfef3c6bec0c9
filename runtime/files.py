"""The user's files: atomic writes, checks for write access before the work starts, and JSON."""

import contextlib
import errno
import glob
import json
import logging
import os
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from runtime.errors import UserError

PARTIAL = '.partial'  # at the end of the name of an incomplete file that the user may want to keep

log = logging.getLogger('allyouneed.files')


def expanded(path: str | Path) -> Path:
    """Returns the path with ~ and ~NAME expanded: shells do not expand them after an =.

    Raises:
      UserError: if there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f'{path}: {error}') from None


def check_name(path: Path) -> None:
    """Raises UserError if the path is not UTF-8: libraries that write checkpoints could not open it."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise UserError(f'{path}: this path is not UTF-8, which checkpoints need: rename what is not') from None


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Turns the system's refusal to write into a UserError that names `path`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f'{path} cannot be written: {error.strerror or error}') from error


@contextlib.contextmanager
def written_whole(path: Path, ending: str = '.tmp') -> Iterator[TextIO]:
    """Opens a UTF-8 text file that gets its name only when it is complete: a failure keeps the old file.

    Until then, the new file is named PATH`ending`. After a failure, it is removed, unless `ending` is PARTIAL. A link
    is followed; a device or a pipe is written to directly.

    Raises:
      UserError: naming the file, if it cannot be written.
    """
    path = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):
        with naming(path), open(path, 'w', encoding='utf-8', errors='backslashreplace', newline='\n') as file:
            yield file
        return
    partial = path.with_name(path.name + ending)
    try:
        with naming(path):
            with open(partial, 'w', encoding='utf-8', errors='backslashreplace', newline='\n') as file:
                yield file
            os.replace(partial, path)
    except BaseException:
        if ending != PARTIAL:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise


@contextlib.contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """stdout, or a file that appears under its name when it is whole.

    A failure leaves the file that was there, and what was written until then in PATH.partial. A device or a pipe is
    written to directly.
    """
    if path is None:
        if sys.stdout is None:
            raise UserError('stdout is closed: give --output=FILE')
        yield sys.stdout
        sys.stdout.flush()
        return
    try:
        with written_whole(Path(path), PARTIAL) as file:
            yield file
    finally:
        if (partial := Path(f'{os.path.realpath(path)}{PARTIAL}')).exists():
            log.info('not complete: what was answered until then is in %s', partial)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to a file as `written_whole` does."""
    with written_whole(path) as file:
        file.write(text)


def check_folder(folder: Path) -> None:
    """Checks that files can be written in a folder, which need not exist yet; leaves nothing behind.

    Raises:
      UserError: naming the folder, if they cannot.
    """
    made = []
    try:
        with naming(folder):
            for each in [*reversed(folder.parents), folder]:
                if not each.exists():
                    each.mkdir()
                    made.append(each)
            tempfile.TemporaryFile(dir=folder).close()
    finally:
        for each in reversed(made):
            with contextlib.suppress(OSError):  # another process has put something there
                each.rmdir()


def check_file(path: Path) -> None:
    """Checks that a file can be written in an existing folder; leaves nothing behind.

    Raises:
      UserError: naming the file, if it cannot.
    """
    with naming(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG  # what it will be
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISREG(mode):  # a device or a pipe is not replaced
            tempfile.TemporaryFile(dir=path.parent).close()


def named_files(folder: Path, names: str, suffixes: Sequence[str]) -> list[Path]:
    """Returns DIR/NAME for each of `names`, which have commas between them.

    A pattern (with *, ? or [) stands for all names, in their order, that with one of `suffixes` are files there.

    Raises:
      UserError: if a name is empty, which would be the folder itself.
    """
    found = []
    for name in names.split(','):
        if not name.strip():
            raise UserError(f'config.data.splits: {names!r} has an empty name beside a comma')
        if glob.has_magic(name):
            found += sorted({Path(str(path).removesuffix(suffix)) for suffix in suffixes
                             for path in map(Path, glob.glob(f'{glob.escape(str(folder))}/{name}{suffix}'))
                             if path.is_file()})
        else:
            found.append(folder / name)
    return found


def plain_or_gz(base: Path, suffix: str) -> Path | None:
    """Returns the file BASE.SUFFIX or BASE.SUFFIX.gz, or None if there is neither."""
    files = (Path(f'{base}.{suffix}{gz}') for gz in ('', '.gz'))
    return next((file for file in files if os.path.isfile(file)), None)


def read_bytes(path: Path) -> bytes:
    """Reads a whole file. Raises OSError for a pipe or a device, which may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, 'it is a pipe or a device, and no file', str(path))
    return path.read_bytes()


def file_checksum(path: Path) -> int:
    """Returns the CRC-32 of a file. Raises OSError if it cannot be read."""
    checksum = 0
    with open(path, 'rb') as file:
        while block := file.read(2 ** 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Raises:
      UserError: naming the file, if it cannot be read or is damaged; the message ends with `advice`.
    """
    try:
        found = json.loads(read_bytes(path).decode())
        if not isinstance(found, dict):
            raise ValueError('it holds no object')
        return found
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise UserError(f'{path} cannot be read: {reason}. {advice}') from None
