"""Writes folders atomically: a folder has a temporary name until it is complete."""

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import UserError, full_disk
from runtime.locks import locked

UNFINISHED = '.building-'  # part of the names of temporary folders
SUFFIX = '[a-z0-9_]{8}'  # the last part of these names, as tempfile.mkdtemp makes it
ATTEMPTS = 100  # how often the parents of a folder are made again, if other processes remove them

log = logging.getLogger('allyouneed.files')


@contextlib.contextmanager
def written_folder(folder: Path, advice: str = 'Free some space, then run the same command again') -> Iterator[Path]:
    """Yields a temporary folder beside `folder`, and renames it to `folder` at the end.

    `folder` must not exist, or must be empty. Temporary folders of killed processes are removed first. After a failure,
    no temporary folder remains.

    Raises:
      UserError: if `folder` is a mount point, or the disk is full. For a full disk, the message names the folder and
        the file, and ends with `advice`.
      OSError: if the folder cannot be written for another reason.
    """
    folder = Path(os.path.realpath(folder))
    if os.path.ismount(folder):
        raise UserError(f'{folder} is a mount point, which cannot be renamed. Use a folder inside it')
    created = [parent for parent in folder.parents if not parent.exists()]
    _remove_abandoned(folder.parent)
    with contextlib.ExitStack() as afterwards:
        temporary = None
        try:
            temporary = _create(folder, afterwards)
            yield temporary
            for path in temporary.rglob('*'):  # a power failure after the rename must not leave empty files
                if path.is_file():
                    with open(path, 'rb') as file:
                        os.fsync(file.fileno())
            os.rename(temporary, folder)
        except BaseException as error:
            reason, name = full_disk(error), _newest_file(temporary) if temporary else ''
            afterwards.close()
            _remove_empty(created)
            if isinstance(error, Exception) and reason:
                raise UserError(f'{folder} cannot be written: {reason}{f" ({name})" if name else ""}. The incomplete '
                                f'folder was removed. {advice}') from error
            raise


def _create(folder: Path, afterwards: contextlib.ExitStack) -> Path:
    """Makes a locked temporary folder next to `folder`. Closing the exit stack `afterwards` removes this folder."""
    while True:
        place = _empty_folder(folder)
        try:
            afterwards.enter_context(locked(place / 'lock'))
        except (FileNotFoundError, BlockingIOError):
            continue  # before the lock, another process removed the folder, which seemed abandoned: try again
        except OSError:
            pass  # a file system without locks: no process removes folders there
        break
    afterwards.callback(shutil.rmtree, place, ignore_errors=True)
    (place / 'content').mkdir()
    return place / 'content'


def _empty_folder(folder: Path) -> Path:
    """Makes an empty temporary folder next to `folder`, and the missing parents."""
    for attempt in range(ATTEMPTS):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            return Path(tempfile.mkdtemp(dir=folder.parent, prefix=f'{folder.name}{UNFINISHED}'))
        except FileNotFoundError:  # another process has failed, and has removed the parents that it had made
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError('the loop returns or raises')


def _remove_abandoned(parent: Path) -> None:
    """Removes the temporary folders of killed processes.

    Such folders are not locked, because the system releases a lock when the process that holds it ends.
    """
    for place in parent.glob(f'*{UNFINISHED}*'):
        if not re.fullmatch(SUFFIX, place.name.rpartition(UNFINISHED)[2]):
            continue
        try:
            if any(path.name not in ('lock', 'content') for path in place.iterdir()):
                continue  # a folder of the user, such as a run directory, which also has a file `lock`
            # create=False, because a new lock file would prevent the owner from removing the folder.
            lock = locked(place / 'lock', create=False)
        except FileNotFoundError:  # killed before the lock existed, so the folder is empty. A live owner tries again
            _remove_empty([place])
            continue
        except OSError:  # the folder is in use or already removed, or this process has no permission to remove it
            continue
        with lock:
            log.info('removed %s, which a killed process had left', place)
            shutil.rmtree(place, ignore_errors=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # another process has put files there
            folder.rmdir()


def _newest_file(folder: Path) -> str:
    """Returns the name of the newest file in a folder, or '' if there is no file."""
    files = [path for path in folder.rglob('*') if path.is_file()]
    return str(max(files, key=lambda path: path.stat().st_mtime_ns).relative_to(folder)) if files else ''
