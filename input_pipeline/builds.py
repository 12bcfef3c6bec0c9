"""Folders of the cache that are built once, and are whole or not there.

A folder is built under a temporary name and then renamed. So a killed build never leaves an incomplete folder, and two
concurrent builds both succeed. The next build removes what a killed build left.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.errors import UserError
from runtime.locks import locked

BUILDING = '.building-'  # in the names of temporary folders

log = logging.getLogger('allyouneed.data')


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`. If it does not exist yet, `build` fills a temporary folder, which is then renamed.

    Raises:
      UserError: if the folder cannot be written: no space, no permission.
    """
    if folder.is_dir():
        return folder
    with cache_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        with _workshop(folder) as temporary:
            build(temporary)
            for path in temporary.iterdir():  # a power cut after the rename must not leave empty files
                with open(path, 'rb') as file:
                    os.fsync(file.fileno())
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.is_dir():  # if it exists, another process was faster and has built the same
                    raise
    return folder


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turns the system's refusal to write in the cache into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f'{folder} cannot be written: {error}. Set config.cache_dir to a folder with space') from None


@contextlib.contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """Makes a temporary folder next to `folder`, which is locked while it is in use, and removed at the end."""
    with contextlib.ExitStack() as afterwards:
        while True:
            place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f'{folder.name}{BUILDING}'))
            try:
                afterwards.enter_context(locked(place / 'lock'))
            except (FileNotFoundError, BlockingIOError):
                continue  # another process removed it as abandoned before it was locked: try again
            except OSError:
                pass  # a file system without locks: no process removes folders there
            break
        afterwards.callback(shutil.rmtree, place, ignore_errors=True)
        (place / 'content').mkdir()
        yield place / 'content'


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of killed builds. They are unlocked: the system releases a lock when its process ends."""
    for place in parent.glob(f'*{BUILDING}*'):
        try:
            # A new file would keep the owner of the folder from removing it.
            lock = locked(place / 'lock', create=False)
        except OSError:  # it is in use, already gone, or we may not remove it
            continue
        with lock:
            log.info('%s is what a killed build left: removed', place)
            shutil.rmtree(place, ignore_errors=True)
