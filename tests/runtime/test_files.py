"""Files of the user: atomic writes, early errors for paths that cannot be written, and errors in Python files."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

import jax
import jax.numpy as jnp
import pytest

from runtime import files
from runtime.errors import UserError, faults_in, little_memory_explained
from training.mesh import check_memory

ROOT = pathlib.Path(__file__).parents[2]


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / 'results.json'
    files.write_text(path, 'präzise\n')
    assert path.read_bytes() == 'präzise\n'.encode()
    with pytest.raises(KeyError), files.written_whole(path, files.PARTIAL) as file:
        file.write('other')
        raise KeyError
    assert path.read_bytes() == 'präzise\n'.encode()
    with pytest.raises(KeyError), files.written_whole(path) as file:
        file.write('other')
        raise KeyError
    assert {each.name for each in tmp_path.iterdir()} == {'results.json', 'results.json.partial'}


def test_a_file_is_on_disk_before_it_replaces_the_old_file(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr(os, 'fsync', lambda number: calls.append(os.fstat(number).st_size))
    monkeypatch.setattr(os, 'replace', lambda *paths: calls.append('replaced') or replace(*paths))
    files.write_text(tmp_path / 'results.json', 'new')
    assert calls == [3, 'replaced']


@pytest.mark.parametrize('name', ['file/x', 'x' * 300, 'folder/' + 'x' * 300, 'loop/x'])
def test_what_cannot_be_written_is_named_and_nothing_is_left(tmp_path, name):
    (tmp_path / 'file').write_text('precious')
    (tmp_path / 'loop').symlink_to('loop')
    before = sorted(tmp_path.rglob('*'))
    for attempt in files.check_folder, files.check_file, lambda path: files.write_text(path, ''):
        with pytest.raises(UserError, match='cannot be written: .') as error:
            attempt(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
        assert sorted(tmp_path.rglob('*')) == before


def test_checks_of_files_and_folders_change_nothing(tmp_path, monkeypatch):
    (tmp_path / 'old').write_text('precious')
    made = []
    monkeypatch.setattr(pathlib.Path, 'mkdir', lambda path, *_, **__: made.append(path))
    files.check_folder(tmp_path / 'a/b/c')
    assert not made, 'a process that is killed here would leave this folder behind'
    files.check_file(tmp_path / 'old')
    files.check_file(tmp_path / 'new')
    files.check_file(pathlib.Path('/dev/null'))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [('old', 'precious')]


def test_a_folder_that_takes_no_files_is_named(tmp_path, monkeypatch):
    """As root all may be written, so the system's answer is played."""
    def refuse(*_, **__):
        raise OSError(30, 'Read-only file system')
    monkeypatch.setattr(files.tempfile, 'TemporaryFile', refuse)
    with pytest.raises(UserError, match=f'{tmp_path}/a cannot be written: Read-only file system'):
        files.check_folder(tmp_path / 'a')
    assert not list(tmp_path.iterdir())


def test_only_a_missing_or_an_empty_folder_is_new(tmp_path):
    (tmp_path / 'old').mkdir()
    (tmp_path / 'file').touch()
    for folder in tmp_path / 'old', tmp_path / 'missing':
        files.check_new_folder(folder, '--output')
    for folder in tmp_path, tmp_path / 'file':
        with pytest.raises(UserError, match=f'^--output={folder} exists and is not an empty folder'):
            files.check_new_folder(folder, '--output')


@pytest.mark.parametrize('content', ['', '3', '{', '[]', 'null', '\udcff', '[' * 100_000, None])
def test_damaged_json_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / 'x.json').write_text(content, errors='surrogateescape')
    with pytest.raises(UserError, match=f'{tmp_path}/x.json cannot be read: .+ Delete it'):
        files.read_json(tmp_path / 'x.json', 'Delete it')


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / 'x.json')
    with pytest.raises(UserError, match='x.json cannot be read: it is a pipe'):
        files.read_json(tmp_path / 'x.json', '')


@pytest.mark.parametrize('code, message', [
    ('\n1 / 0\n', '2: ZeroDivisionError: division by zero'), ('x = (\n', '1: SyntaxError: '),
    ('import sys\nsys.exit(0)\n', '2: SystemExit: 0'),
    ('from runtime.errors import UserError\nraise UserError("so")\n', '2: so'),
    ('def f():\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        raise KeyError("k")\nf()\n',
     '5: KeyError'),
])
def test_a_fault_of_the_user_s_file_has_its_line(tmp_path, code, message):
    path = str(tmp_path / 'recipe.py')
    with pytest.raises(UserError) as error, faults_in(path, only=True):
        exec(compile(code, path, 'exec'), {})
    assert str(error.value).startswith(f'{path}:{message}')


def test_an_error_of_other_code_is_raised_unchanged():
    with pytest.raises(ZeroDivisionError), faults_in('recipe.py', only=True):
        raise ZeroDivisionError


@pytest.mark.parametrize('error', [MemoryError('cannot allocate 9 GB'), RuntimeError('RESOURCE_EXHAUSTED: 9 GB\nat x')])
def test_little_memory_is_reported_with_the_sizes_to_lower(error):
    with pytest.raises(UserError, match='not enough memory .*9 GB.*batch.tokens.*--beam'), little_memory_explained():
        raise error


@pytest.mark.parametrize('kind', [RuntimeError, ValueError])
@pytest.mark.parametrize('text', [
    'ours', 'RESOURCE_EXHAUSTED: Error writing "/a": No space left on device',
    '''RESOURCE_EXHAUSTED: Error reading local file "/a": Too many open files [os_error_code='24']'''])
def test_another_fault_is_not_called_little_memory(kind, text):
    with pytest.raises(kind, match=f'^{re.escape(text)}$'), little_memory_explained():
        raise kind(text)


def test_a_state_larger_than_the_machine_is_refused():
    shape = jax.ShapeDtypeStruct((2 ** 30, 2 ** 20), jnp.float32)
    with pytest.raises(UserError, match=r'take 4,194,304 GiB, .*Lower config\.model\.d_model'):
        check_memory({'kernel': shape}, jax.local_devices())
    check_memory({'kernel': jax.ShapeDtypeStruct((8, 8), jnp.float32)}, jax.local_devices())


def test_a_name_that_is_no_text_is_refused_before_a_checkpoint_is_lost(tmp_path):
    files.check_name(tmp_path / 'läuft')
    with pytest.raises(UserError, match='not UTF-8'):
        files.check_name(tmp_path / os.fsdecode(b'l\xe4uft'))


def test_a_locale_without_utf8_finds_a_sound_checkpoint_sound(tmp_path):
    with tarfile.open(ROOT / 'tests/runs/first.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    shutil.move(tmp_path / 'run', tmp_path / 'läuft')
    environment = os.environ | {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
    done = subprocess.run([sys.executable, '-m', 'tools.show_run', tmp_path / 'läuft'], cwd=ROOT, env=environment,
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert f'{tmp_path}/läuft: finished' in done.stdout.decode() and '3,688 parameters' in done.stdout.decode()


def test_a_link_to_a_folder_above_adds_no_files(tmp_path):
    for folder in 'train', 'validation', 'elsewhere/a':
        (tmp_path / folder).mkdir(parents=True)
    for name in 'validation/v.txt', 'elsewhere/e.txt':
        (tmp_path / name).write_text('text')
    (tmp_path / 'train/all').symlink_to(tmp_path)
    (tmp_path / 'train/a').symlink_to(tmp_path / 'elsewhere/a')
    (tmp_path / 'elsewhere/a/up').symlink_to(tmp_path / 'elsewhere')
    assert not list(files.files_in(tmp_path / 'train'))


def test_a_link_is_followed_and_a_device_is_written_to_as_it_is(tmp_path):
    (tmp_path / 'target').write_text('former')
    (tmp_path / 'link').symlink_to(tmp_path / 'target')
    files.write_text(tmp_path / 'link', 'new')
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'target').read_text() == 'new'
    (tmp_path / 'null').symlink_to('/dev/null')
    files.write_text(tmp_path / 'null', 'gone')
    assert pathlib.Path('/dev/null').is_char_device() and (tmp_path / 'null').is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['link', 'null', 'target']
    reader, writer = os.pipe()
    files.write_text(pathlib.Path(f'/dev/fd/{writer}'), 'new')
    assert os.read(reader, 4) == b'new'
    os.close(reader)
    os.close(writer)


def test_several_processes_may_write_the_same_file(tmp_path):
    path = tmp_path / 'report.csv'
    with files.written_whole(path) as file:
        files.write_text(path, 'first')
        file.write('second')
    assert path.read_text() == 'second' and list(tmp_path.iterdir()) == [path]
