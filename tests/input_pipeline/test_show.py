"""python -m input_pipeline.show: the batch as text, and what every script says to a mistaken command line."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def show(*arguments):
    return subprocess.run([sys.executable, '-m', 'input_pipeline.show', *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)


def test_demo_batch(tmp_path):
    done = show('--config=configs/demo.py', '--step=3', f'--config.cache_dir={tmp_path}')
    assert done.returncode == 0, done.stderr
    train, step = done.stderr.splitlines()[-2:]
    assert re.fullmatch(r'train: 20000 pairs, \d+ source and \d+ target tokens; dropped 0 .*, 0 longer than 64', train)
    rows, length = map(int, re.match(r'step 3 \(epoch 0, batch 3 of \d+\): (\d+) x (\d+) positions', step).groups())
    lines = done.stdout.splitlines()
    assert 0 < len(lines) <= rows
    for line in lines:
        source, target = line.split('\t')
        assert source.startswith('\u2581') and target.startswith('\u2581')
        assert max(len(source.split()), len(target.split())) < length


def test_shows_the_text_of_the_batch(tmp_path):
    pairs = [(f'the number {number}', f'le nombre {number}') for number in range(200)]
    (tmp_path / 'train.tsv').write_text(''.join(f'{source}\t{target}\n' for source, target in pairs))
    options = ['--config=configs/demo.py', '--config.data.source=text', f'--config.data.dir={tmp_path}',
               '--config.data.tokenizer.vocab_size=280', f'--config.cache_dir={tmp_path}/cache']
    done = show(*options, '--step=40')
    assert done.returncode == 0, done.stderr
    shown = [tuple(''.join(side.split()).replace('\u2581', ' ').strip() for side in line.split('\t'))
             for line in done.stdout.splitlines()]
    assert shown and set(shown) <= set(pairs)
    assert show(*options, '--step=40').stdout == done.stdout


@pytest.mark.parametrize('arguments, message', [
    (['--config=configs/demo.py', '--config.model.num_lyers=2'],
     'the config has no key \'num_lyers\': did you mean "num_layers"?'),
    (['--config=configs/demo.py', '--config.modle.x=2'], 'the config has no key \'modle\': did you mean "model"?'),
    (['--config=configs/demo.py', '--config.zzz=2'], "the config has no key 'zzz'; configs/base.py has them all"),
    (['--config=configs/demo.py', '--config.model.num_layers=x'],
     "--config.model.num_layers=x: invalid literal for int() with base 10: 'x'"),
    (['--config=configs/demo.py', '--config.model.dropout=1'],
     'config.model.dropout=1.0: must be at least 0 and below 1'),
    (['--config=configs/demo.py', '--stepp=1'], "Unknown command line flag 'stepp'. Did you mean: step ?"),
    (['--config=configs/demo.py', 'step=1'], "unexpected argument 'step=1': every option is a flag, --name=value"),
    (['--config=configs/demo.py', '--step=-1'], '--step=-1 must not be negative'),
    (['--config=configs/dmeo.py'], '--config=configs/dmeo.py does not exist: give a recipe, for example configs/demo.py'),
    (['--config=configs/dmeo.py', '--config.seed=1'],
     "--config cannot be read: [Errno 2] No such file or directory: 'configs/dmeo.py'"),
    ([], '--config is missing: give a recipe, for example --config=configs/demo.py'),
])
def test_mistakes_are_one_line_and_status_2(arguments, message):
    done = show(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, '', f'error: {message}\n')
