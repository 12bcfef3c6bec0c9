"""--flagfile of the scripts, and options of the config without a recipe: mistakes are told in a line."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize('script', ['train.py', 'sweep.py', 'decode.py', 'tools/show_batch.py'])
@pytest.mark.parametrize('name, wanted', [
    ('none', '--flagfile={}: No such file or directory'), ('', '--flagfile={}: Is a directory'),
    ('picture', 'a file that --flagfile names is no text')])
def test_a_flag_file_that_cannot_be_read_is_told_in_a_line(tmp_path, script, name, wanted):
    (tmp_path / 'picture').write_bytes(b'\x89PNG\xff')
    path = tmp_path / name
    module = script.removesuffix('.py').replace('/', '.')
    done = subprocess.run([sys.executable, '-m', module, f'--flagfile={path}'], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f'error: {wanted.format(path)}')


def test_options_may_stand_in_a_flag_file(tmp_path):
    path = tmp_path / 'flags'
    path.write_text('--config=configs/demo.py\n--config.model.d_model=48\n')
    done = subprocess.run([sys.executable, 'train.py', f'--flagfile={path}', '--print_config'], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    assert '--config.model.d_model=48' in done.stdout.splitlines()


@pytest.mark.parametrize('script', ['train.py', 'sweep.py', 'tools/show_batch.py'])
@pytest.mark.parametrize('flag', ['--config.model.num_layers=2', '--noconfig.model.remat'])
def test_an_option_without_a_recipe_asks_for_one(script, flag):
    module = script.removesuffix('.py').replace('/', '.')
    done = subprocess.run([sys.executable, '-m', module, flag], cwd=ROOT, capture_output=True, text=True)
    name = flag.removeprefix('--').removeprefix('no').partition('=')[0]
    assert done.returncode == 2
    assert done.stderr == f'error: --{name} needs a recipe: give one, for example --config=configs/demo.py\n'


def test_a_recipe_in_a_flag_file_is_one(tmp_path):
    path = tmp_path / 'flags'
    path.write_text('--config=configs/demo.py\n')
    for recipe in f'--flagfile={path}', '--config=configs/demo.py':
        done = subprocess.run([sys.executable, 'train.py', recipe, '--noconfig.seed'], cwd=ROOT, capture_output=True,
                              text=True)
        assert (done.returncode, 'needs a recipe' in done.stderr) == (2, False)
