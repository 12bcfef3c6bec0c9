"""Folders that have a temporary name until they are complete."""

import errno
import os
import tempfile

import pytest

from runtime.errors import UserError
from runtime.folders import UNFINISHED, written_folder


def test_what_killed_processes_left_is_removed(tmp_path):
    before_the_lock, after_the_lock = (tmp_path / f'{name}{UNFINISHED}ab_4567z' for name in ('one', 'two'))
    for folder in before_the_lock, after_the_lock:
        folder.mkdir()
    (after_the_lock / 'lock').touch()
    (after_the_lock / 'content').mkdir()
    with written_folder(tmp_path / 'new') as temporary:
        assert not before_the_lock.exists() and not after_the_lock.exists()
        with written_folder(tmp_path / 'other'):  # a folder in use is not removed
            assert temporary.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['new', 'other']


@pytest.mark.parametrize('name', ['lm.building-blocks', 'lm.building-material'])  # 6 and 8 letters at the end
def test_a_run_directory_with_a_similar_name_is_not_removed(tmp_path, name):
    (tmp_path / name).mkdir()
    for file in ('lock', 'config.json') if name.endswith('material') else ('lock',):
        (tmp_path / name / file).touch()
    with written_folder(tmp_path / 'new'):
        pass
    assert (tmp_path / name / 'lock').exists()


def test_parents_that_a_failing_process_removes_are_made_again(tmp_path, monkeypatch):
    """Two processes build the same folder in a new cache, and one of them fails and removes the empty cache."""
    make, removals = tempfile.mkdtemp, iter([True, True])

    def removed_before(**options):
        if next(removals, False):
            (tmp_path / 'cache').rmdir()
        return make(**options)

    monkeypatch.setattr(tempfile, 'mkdtemp', removed_before)
    with written_folder(tmp_path / 'cache' / 'store') as temporary:
        (temporary / 'file').touch()
    assert (tmp_path / 'cache' / 'store' / 'file').exists() and next(removals, None) is None


def test_a_full_disk_leaves_no_parents_of_a_folder(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(tempfile, 'mkdtemp', full)
    with pytest.raises(UserError, match='new/a/b cannot be written: No space left'), \
            written_folder(tmp_path / 'new' / 'a' / 'b'):
        pass
    assert not list(tmp_path.iterdir())


def test_files_are_on_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    """A power failure after the rename must not leave empty files."""
    calls, rename = [], os.rename
    monkeypatch.setattr(os, 'fsync', lambda descriptor: calls.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(os, 'rename', lambda *paths: calls.append('renamed') or rename(*paths))
    with written_folder(tmp_path / 'new') as temporary:
        (temporary / 'folder').mkdir()
        (temporary / 'file').write_bytes(b'abc')
        (temporary / 'folder' / 'file').write_bytes(b'ab')
    assert sorted(calls[:-1]) == [2, 3] and calls[-1] == 'renamed'
