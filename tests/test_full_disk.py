"""Commands whose disk is full: one message with the path, no incomplete file, and the same command works afterwards."""

import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

from runtime.errors import UserError
from tests.scripts import STEPS, script, train_arguments
from tools.ahead import keep

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


def fill(disk, left=0):
    """Leaves `left` bytes of the file system free."""
    with open(disk / 'filler', 'wb') as filler:
        space = os.statvfs(disk)
        os.posix_fallocate(filler.fileno(), 0, space.f_bavail * space.f_frsize - left)


LEFT = {'train': 2 ** 13, 'save': 2 ** 15}  # bytes: space for the first files of a run, and until a checkpoint is saved
COMMANDS = {
    'train': lambda disk, data, cache: train_arguments(disk / 'new', data, cache),
    'evaluate': lambda disk, data, cache: ['decode.py', f'--workdir={disk}/run', '--split=test'],
    'explore': lambda disk, data, cache: ['decode.py', f'--workdir={disk}/run', f'--input={disk}/lines',
                                          f'--explain={disk}/page.html'],
    'save': lambda disk, data, cache: train_arguments(disk / 'run', data, cache, train__steps=STEPS + 6),
    'distil': lambda disk, data, cache: ['-m', 'tools.distil', f'--workdir={disk}/run', f'--output={disk}/new',
                                         '--sentences=8', '--beam=1'],
    'store': lambda disk, data, cache: ['-m', 'tools.show_batch', *train_arguments(
        disk / 'new', data, disk / 'cache')[1:2], *train_arguments(disk / 'new', data, disk / 'cache')[3:]],
    'export': lambda disk, data, cache: ['-m', 'tools.export', f'--workdir={disk}/run', '--to=safetensors',
                                         f'--output={disk}/new'],
    'import': lambda disk, data, cache: ['-m', 'tools.import_weights', f'--from={disk}/small', f'--workdir={disk}/new'],
    'sweep': lambda disk, data, cache: ['sweep.py', f'--sweep={disk}/grid.py', *train_arguments(
        disk / 'new', data, cache, train__steps=2, optimizer__warmup=1)[1:]],
}
MADE = {  # {name of the command: a path that exists only after the command has succeeded}
    'train': f'new/checkpoints/{STEPS}', 'evaluate': 'run/results/test.json', 'explore': 'page.html',
    'save': f'run/checkpoints/{STEPS + 6}', 'distil': 'new/train.xx', 'store': 'cache/tokens',
    'export': 'new/model.safetensors', 'import': 'new/config.json', 'sweep': 'new/report.md'}


@pytest.mark.slow
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.interchange) if name in ('export', 'import') else name for name in COMMANDS])
def test_a_full_disk_leaves_nothing_incomplete(name, disk, run, data, cache):
    shutil.copytree(run[0], disk / 'run', ignore=shutil.ignore_patterns('results'))
    (disk / 'lines').write_text('one two\n')
    if name == 'import':
        from tests.interchange.small_models import write_small  # imports the extra 'interchange'

        write_small('gpt2', disk / 'small')
    command = COMMANDS[name](disk, data, cache)
    (disk / 'grid.py').write_text("def get_sweep(config):\n    return [{'seed': 3}]\n")
    fill(disk, LEFT.get(name, 0))
    before = sorted(disk.rglob('*'))
    done = script(*command)
    stderr = done.stderr.decode()
    assert done.returncode == 2 and 'Traceback' not in stderr, stderr
    assert str(disk) in stderr.splitlines()[-1] and 'No space left' in stderr.splitlines()[-1], stderr
    new = {*disk.rglob('*')} - {*before}
    assert not [path for path in new if path.suffix in ('.tmp', '.html') or 'tmp-' in path.name], new
    assert not (disk / MADE[name]).exists()
    (disk / 'filler').unlink()
    done = script(*command)
    assert done.returncode == 0, done.stderr.decode()
    assert (disk / MADE[name]).exists()


def test_a_full_disk_leaves_no_incomplete_program(disk):
    """tools.plan --keep writes a program. Without libtpu, only this part of it can be tested."""
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
    keep(program, disk / 'step')
    before = (disk / 'step').read_bytes()
    fill(disk)
    with pytest.raises(UserError, match=f'{disk}/step cannot be written: No space left'):
        keep(program, disk / 'step')
    assert {path.name for path in disk.iterdir()} == {'step', 'filler'} and (disk / 'step').read_bytes() == before
    (disk / 'filler').unlink()
    keep(program, disk / 'step')
