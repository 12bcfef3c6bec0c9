"""Locks on files. The system releases a lock when its file is closed, or when the process ends or crashes.

The library filelock is not used, for three reasons. First, filelock always creates the file. Second, the commands that
a process starts do not inherit the locks of the process. Third, on a file system without locks, the behaviour depends
on the version of filelock. Some versions report that the lock is held, some raise an error, and some create a file that
a killed process leaves behind.
"""

import fcntl
import logging
import os
from pathlib import Path
from typing import IO

log = logging.getLogger('allyouneed.files')


def locked(path: Path, create: bool = True) -> IO[bytes]:
    """Opens and locks a file, and returns the open file. If `create` is True, a missing file is created.

    Raises:
      BlockingIOError: if another process holds the lock.
      FileNotFoundError: if the file does not exist, or another process has removed its folder.
      OSError: if the file cannot be opened, or the file system does not support locks.
    """
    file = open(path, 'ab' if create else 'r+b')  # noqa: SIM115 (open while it is locked)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)
    except OSError:
        file.close()
        raise
    return file


def lock_directory(directory: Path, name: str, users: str, *, waiting: str = '',
                   inheritable: bool = False) -> IO[bytes]:
    """Locks a directory by a lock on its file `name`, and returns the open file.

    On file systems without locks, logs a warning and returns the open file without a lock.

    Args:
      directory: the directory.
      name: the name of the file.
      users: a plural noun for the warning, such as 'runs' in 'Make sure that no two runs use this directory'.
      waiting: the text of a log line. If it is not empty and another process holds the lock, this process logs the text
        and waits for the lock.
      inheritable: if True, commands that this process starts also hold the lock, until the last command ends.

    Raises:
      BlockingIOError: if another process holds the lock and `waiting` is empty.
    """
    file = open(directory / name, 'ab')  # noqa: SIM115 (open while it is locked)
    os.set_inheritable(file.fileno(), inheritable)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not waiting:
            file.close()
            raise
        log.warning('%s', waiting)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        log.warning('%s cannot be locked (%s). Make sure that no two %s use this directory', directory, error.strerror,
                    users)
    return file
