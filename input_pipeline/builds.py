"""Folders of the cache that are built once, and are complete or absent.

Two concurrent builds both succeed. The next build removes the folders of killed builds (runtime/folders.py).

A folder has checksums of its files, in CHECKSUMS. They are compared when it is opened for the first time after its
files have changed or were copied: VERIFIED has the size, the inode and the time of the last change of each file that
was verified. This time cannot be set back, so later openings need to look at it only. A damaged folder is built again.
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
from runtime.files import file_checksum
from runtime.folders import written_folder
from runtime.schema import Count, read_as

CHECKSUMS = 'checksums.json'  # {name: CRC-32 of the file}
VERIFIED = 'verified.json'
ADVICE = 'Set config.cache_dir to a folder with space'

Content = TypeVar('Content')

log = logging.getLogger('allyouneed.data')


class Damaged(Exception):
    """Raised for a folder whose files differ from those that were built."""


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`. If it does not exist yet, `build` fills a temporary folder, which is then renamed.

    Raises:
      UserError: if the folder cannot be written: no space, no permission.
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
            if not folder.is_dir():  # if it exists, another process was faster and has built the same
                raise
    return folder


def open_built(folder: Path, build: Callable[[], object], read: Callable[[Path, bool], Content]) -> Content:
    """Returns the content of a folder that `build` builds if it does not exist. Builds a damaged folder again.

    Args:
      folder: the folder.
      build: calls `build_once`.
      read: returns the content, and raises UserError if it is damaged. Its second argument says whether the checksums
        have just been compared, so that the content deserves a closer look.

    Raises:
      UserError: if the folder cannot be written, or is damaged again as soon as it is built.
    """
    for is_last in False, True:
        build()
        try:
            return read(folder, verify(folder))
        except (Damaged, UserError) as error:
            if is_last:
                raise UserError(str(error)) from None
            log.warning('%s is damaged: %s. It is built again', folder, error)
            _remove(folder)
    raise AssertionError('the loop returns or raises')


def verify(folder: Path) -> bool:
    """Compares the files of a folder with their checksums. Returns False if they have been compared before.

    Raises:
      Damaged: naming a file that differs.
    """
    try:
        checksums = read_as(folder / CHECKSUMS, dict[str, Count], 'It may be of an earlier version')
    except UserError as error:
        raise Damaged(str(error)) from None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if json.loads((folder / VERIFIED).read_bytes()) == _stamps(folder):
            return False
    for name, checksum in checksums.items():
        try:
            if os.sep in name or file_checksum(folder / name) != checksum:
                raise Damaged(f'the checksum of {name} differs')
        except OSError as error:
            raise Damaged(f'{name}: {error.strerror}') from None
    with contextlib.suppress(OSError):  # the cache may be read-only
        _write_verified(folder)
    return True


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turns the system's refusal to write in the cache into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f'{folder} cannot be written: {error}. {ADVICE}') from None


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Returns {name: [size, inode, nanoseconds of the last change]} of the files except VERIFIED."""
    stats = {path.name: path.stat() for path in folder.iterdir() if not path.name.startswith(VERIFIED)}
    return {name: [stat.st_size, stat.st_ino, stat.st_ctime_ns] for name, stat in sorted(stats.items())}


def _write_verified(folder: Path) -> None:
    """Records that the files of a folder have been verified. Several processes may do this at the same time."""
    with tempfile.NamedTemporaryFile('w', dir=folder, prefix=VERIFIED, delete=False) as file:
        json.dump(_stamps(folder), file)
    os.chmod(file.name, 0o644)
    os.replace(file.name, folder / VERIFIED)


def _remove(folder: Path) -> None:
    """Removes a damaged folder, unless another process has already built it again.

    It is renamed first: other processes then see it complete or not at all.
    """
    with contextlib.suppress(Damaged):
        if not verify(folder):
            return
    with contextlib.suppress(FileNotFoundError), tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f'{folder.name}.damaged-', ignore_cleanup_errors=True) as temporary:
        os.rename(folder, Path(temporary) / folder.name)


def remove_damaged(folders: list[Path]) -> list[Path]:
    """Removes the damaged ones of `folders`, and returns them. Ignores folders that do not exist."""
    damaged = []
    for folder in filter(Path.is_dir, folders):
        try:
            verify(folder)
        except Damaged as error:
            log.warning('%s is damaged: %s. It is built again', folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            damaged.append(folder)
    return damaged
