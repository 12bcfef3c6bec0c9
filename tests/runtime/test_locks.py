"""Locks on files: which process holds a lock, which processes inherit it, and file systems without locks."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from runtime.locks import lock_directory, locked


def test_a_lock_excludes_others_until_its_file_is_closed(tmp_path):
    with locked(tmp_path / 'lock'), pytest.raises(BlockingIOError):
        locked(tmp_path / 'lock')
    with lock_directory(tmp_path, 'lock', 'runs'), pytest.raises(BlockingIOError):
        lock_directory(tmp_path, 'lock', 'runs')
    locked(tmp_path / 'lock', create=False).close()


def test_no_file_is_created_where_none_is_wanted(tmp_path):
    with pytest.raises(FileNotFoundError):
        locked(tmp_path / 'lock', create=False)
    with pytest.raises(FileNotFoundError):
        locked(tmp_path / 'removed' / 'lock')
    assert not list(tmp_path.iterdir())


def test_a_lock_on_a_file_that_has_been_removed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, 'flock', lambda *_: os.unlink(tmp_path / 'lock'))
    with pytest.raises(FileNotFoundError):
        locked(tmp_path / 'lock')


def test_where_there_are_no_locks_a_directory_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', no_locks)
    for _ in range(2):
        lock_directory(tmp_path, 'lock', 'runs').close()
        assert caplog.messages.pop() == (f'{tmp_path} cannot be locked (No locks available). Make sure that no two '
                                         'runs use this directory')
    with pytest.raises(OSError, match='No locks available'):
        locked(tmp_path / 'lock')


@pytest.mark.parametrize('inheritable', [True, False])
def test_child_processes_hold_a_lock_that_is_inheritable(inheritable, tmp_path):
    with lock_directory(tmp_path, 'lock', 'sweeps', inheritable=inheritable):
        child = subprocess.Popen([sys.executable, '-c', 'input("started\\n")'], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, close_fds=False)
    try:
        child.stdout.readline()  # Linux closes files of the parent after Popen has returned
        if inheritable:
            with pytest.raises(BlockingIOError):
                locked(tmp_path / 'lock')
        else:
            locked(tmp_path / 'lock').close()
    finally:
        child.communicate(b'\n')
    locked(tmp_path / 'lock').close()


def test_a_process_that_waits_for_a_lock_logs_a_message(tmp_path, caplog):
    second = threading.Thread(target=lambda: lock_directory(tmp_path, 'lock', 'sweeps', waiting='wait').close())
    with lock_directory(tmp_path, 'lock', 'sweeps'):  # a test that fails here must not leave a thread that waits
        second.start()
        deadline = time.monotonic() + 60
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
        second.join(0.1)
        assert second.is_alive() and caplog.messages == ['wait']
    second.join(60)
    assert not second.is_alive()
