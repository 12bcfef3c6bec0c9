"""Folders that have a temporary name until they are complete."""

from runtime.folders import UNFINISHED, written_folder


def test_what_killed_processes_left_is_removed(tmp_path):
    before_the_lock, after_the_lock = (tmp_path / f'{name}{UNFINISHED}x' for name in ('one', 'two'))
    for folder in before_the_lock, after_the_lock:
        folder.mkdir()
    (after_the_lock / 'lock').touch()
    (after_the_lock / 'content').mkdir()
    with written_folder(tmp_path / 'new') as temporary:
        assert not before_the_lock.exists() and not after_the_lock.exists()
        with written_folder(tmp_path / 'other'):  # a folder in use is not removed
            assert temporary.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['new', 'other']
