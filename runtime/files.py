"""Reads and writes files of the user: atomic writes, checks for write access, and JSON."""

import contextlib
import errno
import glob
import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from runtime.errors import UserError

PARTIAL = '.partial'  # suffix of an incomplete file that the user may want to keep
RESTORE = 'Restore the file from a copy of the run'  # advice for a damaged file of a run, see `read_json`

log = logging.getLogger('allyouneed.files')


def expanded(path: str | Path) -> Path:
    """Returns the path with ~ and ~NAME expanded, because shells do not expand ~ after an = sign.

    Raises:
      UserError: if the user NAME does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f'{path}: {error}') from None


def check_name(path: Path) -> None:
    """Raises UserError if the path is not UTF-8. The libraries that write checkpoints cannot open such a path."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise UserError(f'{path}: this path is not UTF-8, but checkpoints need UTF-8. Rename the folder') from None


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Runs the body, which writes the file at `path`. Turns an OSError into a UserError that names the file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f'{path} cannot be written: {error.strerror or error}') from error


@contextlib.contextmanager
def replaced(path: Path, ending: str = '') -> Iterator[Path]:
    """Yields the path to which the body writes a new file. The new file replaces the file at `path` after the body.

    In the body, the name of the new file is the name of `path` followed by `ending`. By default, the ending is unique
    (.XXXXXXXX.tmp), because several processes may write the same file. After a failure, the old file remains. The
    incomplete new file is then removed, unless `ending` is PARTIAL. If `path` is a symbolic link, the target of the
    link is replaced. Devices and pipes are written directly.

    Raises:
      UserError: if the file cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # if stdout is a pipe, realpath('/dev/stdout') does not exist
        with naming(path):
            yield path
        return
    path = Path(os.path.realpath(path))
    partial = path.with_name(path.name + (ending or f'.{uuid.uuid4().hex[:8]}.tmp'))
    try:
        with naming(path):
            yield partial
            with open(partial, 'rb') as file:
                os.fsync(file.fileno())  # a power failure after the replacement must not leave an empty file
            os.replace(partial, path)
    except BaseException:
        if ending != PARTIAL:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise


@contextlib.contextmanager
def written_whole(path: Path, ending: str = '') -> Iterator[TextIO]:
    """Opens a UTF-8 text file for writing, and replaces the old file only when the new file is complete.

    `replaced` explains `ending` and the errors.
    """
    with (replaced(path, ending) as partial,
          open(partial, 'w', encoding='utf-8', errors='backslashreplace', newline='\n') as file):
        yield file


@contextlib.contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """Yields stdout if `path` is None. Otherwise, opens the file at `path` for writing.

    The old file is replaced only when the new file is complete. After a failure, the old file remains, and the
    incomplete output is in PATH.partial.
    """
    if path is None:
        if sys.stdout is None:
            raise UserError('stdout is closed. Use --output=FILE')
        yield sys.stdout
        sys.stdout.flush()
        return
    try:
        with written_whole(Path(path), PARTIAL) as file:
            yield file
    finally:
        if (partial := Path(f'{os.path.realpath(path)}{PARTIAL}')).exists():
            log.info('the incomplete output is in %s', partial)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to a file. An old file is replaced only when the new file is complete."""
    with written_whole(path) as file:
        file.write(text)


def check_folder(folder: Path) -> None:
    """Checks that files can be written in `folder`, which need not exist yet. Leaves no files or folders behind.

    Raises:
      UserError: if files cannot be written in this folder.
    """
    with naming(folder):
        existing, missing = folder, []
        while not _exists(existing):
            missing.append(existing.name)
            existing = existing.parent
        for name in missing:
            _exists(existing / name)  # raises an OSError for a name that is too long
        # The folder is not created, because a process that is killed here must not leave an empty folder behind.
        tempfile.TemporaryFile(dir=existing).close()


def check_new_folder(folder: Path, name: str) -> None:
    """Checks that `folder` does not exist or is empty, and that files can be written in it.

    Raises:
      UserError: if not. The message begins with `name`, the option that sets the folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'{name}={folder} exists and is not an empty folder. Use a new or an empty folder')
    check_folder(folder)


def _exists(path: Path) -> bool:
    """Returns whether a path exists. Unlike Path.exists, raises OSError if the path is invalid or not accessible."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def check_file(path: Path) -> None:
    """Checks that a file can be written in an existing folder. Leaves no file behind.

    Raises:
      UserError: if the file cannot be written.
    """
    with naming(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG  # it will be a regular file
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISREG(mode):  # a device or a pipe is not replaced
            tempfile.TemporaryFile(dir=path.parent).close()


def files_in(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and its subfolders, in any order. Hidden files and folders are ignored.

    Symbolic links to folders are followed, except links to a folder that contains the link. Such a link would be an
    endless loop, or would lead to files beside `folder`. Broken symbolic links are files.
    """
    for name, subfolders, files in os.walk(folder, followlinks=True):
        path = Path(name)
        walked = [Path(os.path.realpath(parent)) for parent in (path, *path.parents) if parent.is_relative_to(folder)]
        above = {str(parent) for real in walked for parent in (real, *real.parents)}
        subfolders[:] = [subfolder for subfolder in subfolders if not subfolder.startswith('.')
                         and os.path.realpath(path / subfolder) not in above]  # os.walk skips the removed folders
        yield from (path / file for file in files if not file.startswith('.'))


def named_files(folder: Path, names: str, suffixes: Sequence[str]) -> list[Path]:
    """Returns the path FOLDER/NAME, without a suffix, for each name in `names`. The names are separated by commas.

    A name with *, ? or [ is a pattern. Each pattern is expanded to the sorted names of the files in the folder that
    match the pattern and have one of the `suffixes`. Broken symbolic links count as files, so that they
    cause an error when they are read. A pattern without such files is not expanded, so that errors about missing files
    name the pattern.

    Raises:
      UserError: if a name is empty, because an empty name would refer to the folder itself.
    """
    paths = []
    for name in names.split(','):
        if not name.strip():
            raise UserError(f'config.data.splits: {names!r} has an empty name. Remove the extra comma')
        pattern = os.path.join(glob.escape(str(folder)), name)  # an absolute name replaces the folder
        matches = {Path(path.removesuffix(suffix)) for suffix in suffixes
                   for path in glob.glob(f'{pattern}{suffix}') if os.path.isfile(path) or is_broken_link(path)}
        paths += sorted(matches) or [folder / name]
    return paths


def plain_or_gz(path: Path) -> Path | None:
    """Returns `path` or PATH.gz, or None if neither file exists.

    Raises:
      UserError: if `path` is a broken symbolic link, or if `path` does not exist and PATH.gz is a broken symbolic link.
    """
    for file in path, Path(f'{path}.gz'):
        check_link(file)
        if os.path.isfile(file):
            return file
    return None


def is_broken_link(path: Path | str) -> bool:
    """Returns whether a path is a symbolic link to a file or folder that does not exist."""
    return os.path.islink(path) and not os.path.exists(path)


def check_link(path: Path) -> None:
    """Raises UserError if a path is a broken symbolic link.

    If the link were ignored, data of the user would be missing.
    """
    if is_broken_link(path):
        raise UserError(f'{path} is a broken symbolic link. Repair or remove the link')


def sha256(path: Path) -> str:
    """Returns the SHA-256 digest of a file's content.

    Raises:
      UserError: if the file cannot be read.
    """
    try:
        with open(path, 'rb') as file:
            return hashlib.file_digest(file, 'sha256').hexdigest()
    except OSError as error:
        raise UserError(f'{path} cannot be read: {error}') from None


def read_bytes(path: Path) -> bytes:
    """Reads a whole file. Raises OSError for a pipe or a device, because reading from these might never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, 'it is a pipe or a device, not a file', str(path))
    return path.read_bytes()


def file_checksum(path: Path) -> int:
    """Returns the CRC-32 checksum of a file. Raises OSError if the file cannot be read."""
    checksum, buffer = 0, memoryview(bytearray(2 ** 18))  # this buffer fits into the cache of a core
    with open(path, 'rb', buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Raises:
      UserError: if the file cannot be read or is damaged. The message ends with `advice`.
    """
    try:
        content = json.loads(read_bytes(path).decode())
        if not isinstance(content, dict):
            raise ValueError('the content is not a JSON object')
        return content
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise UserError(f'{path} cannot be read: {reason}. {advice}') from None
