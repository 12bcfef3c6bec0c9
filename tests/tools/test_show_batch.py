"""python -m tools.show_batch: the batch of a step as text."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def show(*arguments):
    return subprocess.run([sys.executable, '-m', 'tools.show_batch', *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)


@pytest.mark.slow
def test_demo_batch(tmp_path):
    done = show('--config=configs/demo.py', '--step=3', f'--config.cache_dir={tmp_path}')
    assert done.returncode == 0, done.stderr
    train, step = done.stderr.splitlines()[-2:]
    assert re.fullmatch(r'train: 20000 pairs, \d+ source and \d+ target tokens; dropped 0 .*, and 0 with .*', train)
    rows, length = map(int, re.match(r'step 3 \(epoch 0, batch 3 of \d+\): (\d+) x (\d+) positions', step).groups())
    lines = done.stdout.splitlines()
    assert 0 < len(lines) <= rows
    for line in lines:
        source, target = line.split('\t')
        assert source.startswith('\u2581') and target.startswith('\u2581')
        assert max(len(source.split()), len(target.split())) < length


def test_shows_the_text_of_the_batch(tmp_path):
    """Characters that would divide a line or a column are escaped."""
    pairs = [(f'the\tnumber {number}', f'le nombre\x0c{number}\u2028été') for number in range(200)]
    for language, sentences in zip(('en', 'fr'), zip(*pairs, strict=True), strict=True):
        (tmp_path / f'train.{language}').write_text('\n'.join(sentences))
    done = show('--config=configs/demo.py', '--config.data.source=files', f'--config.data.dir={tmp_path}',
                '--config.data.tokenizer.vocab_size=300', f'--config.cache_dir={tmp_path}/cache', '--step=40')
    assert done.returncode == 0, done.stderr
    shown = [tuple(''.join(side.split()).replace('\u2581', ' ').strip() for side in line.split('\t'))
             for line in done.stdout.splitlines()]
    assert shown and set(shown) <= {(source.replace('\t', r'\t'), target.replace('\x0c', r'\x0c').replace(
        '\u2028', r'\u2028')) for source, target in pairs}


@pytest.mark.parametrize('arguments, message', [
    (['--config=configs/demo.py', '--config.model.num_lyers=2'],
     '--config.model.num_lyers: the config has no such option: did you mean model.num_layers?'),
    (['--config=configs/demo.py', '--step=-1'], '--step=-1 must not be negative'),
])
def test_mistakes_are_one_line_and_status_2(arguments, message):
    done = show(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, '', f'error: {message}\n')
