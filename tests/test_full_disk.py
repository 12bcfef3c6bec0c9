"""Commands whose disk is full: one message with the path, no incomplete file, and the same command works afterwards."""

import os
import shutil
import subprocess

import pytest

from tests.scripts import STEPS, script, train_arguments

DISK = 64 * 2 ** 20


@pytest.fixture
def disk(tmp_path):
    """A small file system."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={DISK}', 'tmpfs', folder], capture_output=True).returncode:
        pytest.skip('only root can mount a file system')
    yield folder
    subprocess.run(['umount', '-l', folder], check=True)


COMMANDS = {
    'train': lambda disk, data, cache: train_arguments(disk / 'new', data, cache),
    'evaluate': lambda disk, data, cache: ['decode.py', f'--workdir={disk}/run', '--split=test'],
    'explore': lambda disk, data, cache: ['decode.py', f'--workdir={disk}/run', f'--input={disk}/lines',
                                          f'--explain={disk}/page.html'],
}


@pytest.mark.slow
@pytest.mark.parametrize('name', COMMANDS)
def test_a_full_disk_leaves_nothing_incomplete(name, disk, run, data, cache):
    shutil.copytree(run[0], disk / 'run')
    (disk / 'lines').write_text('one two\n')
    command = COMMANDS[name](disk, data, cache)
    left = 8192 if name == 'train' else 0  # a training fails when it writes its tokenizers
    with open(disk / 'filler', 'wb') as filler:
        space = os.statvfs(disk)
        os.posix_fallocate(filler.fileno(), 0, space.f_bavail * space.f_frsize - left)
    before = sorted(disk.rglob('*'))
    done = script(*command)
    said = done.stderr.decode()
    assert done.returncode == 2 and 'Traceback' not in said, said
    assert str(disk) in said.splitlines()[-1] and 'No space left' in said.splitlines()[-1], said
    new = {*disk.rglob('*')} - {*before}
    assert not [path for path in new if path.suffix in ('.tmp', '.html') or 'tmp-' in path.name], new
    (disk / 'filler').unlink()
    done = script(*command)
    assert done.returncode == 0, done.stderr.decode()
    assert name != 'train' or (disk / 'new' / 'checkpoints' / str(STEPS)).is_dir()
