"""Builds each folder of the cache only once. A folder is either complete or absent.

If several processes build the same folder at the same time, all builds succeed. If a build is killed, the next build
removes its temporary folder (runtime/folders.py).

Each folder has a file CHECKSUMS with the checksums of the other files, and a file VERIFIED with the size, the inode
and the change time (ctime) of each file. While these values are unchanged, the checksums are not compared. If a value
has changed, as in a copied folder, the checksums are compared when the folder is opened, and VERIFIED is written again.
Programs cannot set the change time, so a file that was changed or copied is always noticed. A damaged folder is built
again.
"""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from runtime.errors import UserError
from runtime.files import file_checksum, write_text
from runtime.folders import written_folder
from runtime.schema import Count, read_as

CHECKSUMS = 'checksums.json'  # {name: CRC-32 of the file}
VERIFIED = 'verified.json'
ADVICE = 'Set config.cache_dir to a folder with space'

Content = TypeVar('Content')

log = logging.getLogger('allyouneed.data')


class Damaged(Exception):
    """Raised if the files of a folder have changed since the folder was built."""


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Builds a folder of the cache if it does not exist, and returns the folder.

    `build` writes the files into a temporary folder, which is then renamed to `folder`.

    Raises:
      UserError: if the folder cannot be written, for example because of missing space or permission.
    """
    if folder.is_dir():
        return folder
    with cache_errors(folder):
        try:
            with written_folder(folder, ADVICE) as temporary:
                build(temporary)
                checksums = {path.name: file_checksum(path) for path in sorted(temporary.iterdir())}
                (temporary / CHECKSUMS).write_text(json.dumps(checksums))
                _write_verified(temporary)
        except OSError:
            if not folder.is_dir():  # if the folder exists, another process has built the same folder
                raise
    return folder


def open_built(folder: Path, build: Callable[[], object], read: Callable[[Path, bool], Content]) -> Content:
    """Returns the content of a folder. Builds the folder first if it does not exist or is damaged.

    Args:
      folder: the folder.
      build: a function that calls `build_once` for the folder.
      read: a function that returns the content, and raises UserError if the content is damaged. The second argument of
        `read` is True if the checksums have just been compared. Then `read` should check the content thoroughly.

    Raises:
      UserError: if the folder cannot be written, or is damaged immediately after it was built.
    """
    for is_last in False, True:
        build()
        version = _version(folder)
        try:
            return read(folder, verify(folder))
        except (Damaged, UserError) as error:
            if is_last:
                raise UserError(str(error)) from None
            log.warning('%s is damaged: %s. The folder is built again', folder, error)
            with cache_errors(folder):
                _remove(folder, version)
    raise AssertionError('the loop returns or raises')


def verify(folder: Path) -> bool:
    """Compares the files of a folder with their checksums, and returns True.

    If the files have not changed since an earlier comparison, returns False without a new comparison.

    Raises:
      Damaged: if a file differs from its checksum, or is a folder or a pipe. The message has the name of the file.
        Also if the folder does not exist, because another process has found it damaged.
    """
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        raise Damaged(f'another process has removed {folder}') from None
    for path in paths:  # before any file is opened, because opening a pipe would wait for its writer
        if (path.name == VERIFIED or not path.name.startswith(VERIFIED)) and not path.is_file():
            raise Damaged(f'{path.name} is not a regular file')
    try:
        checksums = read_as(folder / CHECKSUMS, dict[str, Count], 'An earlier version may have written it')
    except UserError as error:
        raise Damaged(str(error)) from None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if json.loads((folder / VERIFIED).read_bytes()) == _stamps(folder):
            return False

    for name, checksum in checksums.items():
        try:
            if os.sep in name or file_checksum(folder / name) != checksum:
                raise Damaged(f'{name} does not match its checksum')
        except OSError as error:
            raise Damaged(f'{name}: {error.strerror}') from None
    with contextlib.suppress(UserError):  # the cache may be read-only
        _write_verified(folder)
    return True


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Runs the body, which writes a folder of the cache. Converts an OSError to a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f'{folder} cannot be written: {error}. {ADVICE}') from None


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Returns {name: [size, inode, change time in nanoseconds]} for all files except VERIFIED."""
    stats = {path.name: path.stat() for path in folder.iterdir() if not path.name.startswith(VERIFIED)}
    return {name: [stat.st_size, stat.st_ino, stat.st_ctime_ns] for name, stat in sorted(stats.items())}


def _write_verified(folder: Path) -> None:
    """Writes the file VERIFIED of a folder. Several processes may call this function at the same time."""
    write_text(folder / VERIFIED, json.dumps(_stamps(folder)))


def _version(folder: Path) -> dict[str, list[int]] | None:
    """Returns a value that changes if the folder is built again, or None if the folder or a file is missing."""
    with contextlib.suppress(OSError):
        return _stamps(folder)
    return None


def _remove(folder: Path, version: dict[str, list[int]] | None) -> None:
    """Removes a damaged folder, unless another process has already built it again.

    `version` is the `_version` of the damaged folder. The folder is renamed before it is deleted, so that other
    processes never see a folder with missing files.
    """
    if _version(folder) != version:
        return
    with contextlib.suppress(FileNotFoundError), tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f'{folder.name}.damaged-', ignore_cleanup_errors=True) as temporary:
        os.rename(folder, Path(temporary) / folder.name)


def remove_damaged(folders: list[Path]) -> list[Path]:
    """Removes every damaged folder in `folders`, and returns the removed folders. Ignores missing folders."""
    damaged = []
    for folder in filter(Path.is_dir, folders):
        try:
            verify(folder)
        except Damaged as error:
            log.warning('%s is damaged: %s. The folder is built again', folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            damaged.append(folder)
    return damaged
