"""--flagfile. The tables of tests/bad_inputs contain the cases with wrong files of flags."""

import subprocess
import sys

from tests.scripts import ROOT


def train(*arguments):
    return subprocess.run([sys.executable, 'train.py', *arguments], cwd=ROOT, capture_output=True, text=True)


def test_options_may_stand_in_a_flag_file(tmp_path):
    path = tmp_path / 'flags'
    path.write_text('--config=configs/demo.py\n--config.model.d_model=48\n')
    assert '--config.model.d_model=48' in train(f'--flagfile={path}', '--print_config').stdout.splitlines()


def test_quotes_in_a_flag_file_are_explained(tmp_path):
    path = tmp_path / 'flags'
    path.write_text("'--config.train.lora_parts=*attention/query'\n")
    done = train('--config=configs/demo.py', f'--flagfile={path}', '--print_config')
    assert (done.returncode, 'Remove the quotes' in done.stderr) == (2, True)


def test_a_recipe_in_a_flag_file_is_one(tmp_path):
    path = tmp_path / 'flags'
    path.write_text('--config=configs/demo.py\n')
    for recipe in f'--flagfile={path}', '--config=configs/demo.py':
        done = train(recipe, '--noconfig.seed')
        assert (done.returncode, 'needs a recipe' in done.stderr) == (2, False)
