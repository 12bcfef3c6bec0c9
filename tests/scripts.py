"""Runs scripts as users do. Fixtures for all tests: a small corpus, and a short training on this corpus."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
WORDS = ['one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten']
STEPS = 24


def script(name, *arguments, stdin=None):
    """Runs a script and waits for its end."""
    return subprocess.run([sys.executable, name, *map(str, arguments)], cwd=ROOT, input=stdin, capture_output=True,
                          timeout=900)


def explained(page):
    """Returns the items of a page of --explain."""
    data = re.search('<script type="application/json" id="data">(.*?)</script>', page.read_text('utf-8'), re.DOTALL)[1]
    return json.loads(data)['items']


def train_arguments(workdir, data, cache, **changes):
    """Returns the command line that trains a tiny model on text files in seconds."""
    values = {
        'cache_dir': cache, 'data.source': 'files', 'data.dir': data, 'data.source_lang': 'en',
        'data.target_lang': 'xx',
        'data.max_length': 24, 'data.tokenizer.vocab_size': 285, 'model.num_layers': 1, 'model.d_model': 16,
        'model.d_ff': 32, 'model.num_heads': 2, 'batch.tokens': 512, 'batch.buckets': 2, 'optimizer.warmup': 8,
        'train.steps': STEPS, 'train.log_every': 4, 'eval.every': 12, 'checkpoint.every': 6, 'checkpoint.keep_last': 3,
        'decode.extra_length': 4, 'decode.batch_size': 16, 'seed': 1,  # with seed 0, some translations are empty
    } | {key.replace('__', '.'): value for key, value in changes.items()}
    return ['train.py', '--config=configs/demo.py', f'--workdir={workdir}',
            *(f'--config.{key}={value}' for key, value in values.items())]


@pytest.fixture(scope='session')
def once(tmp_path_factory):
    """once(name, make): a folder that all workers read. The first worker that needs it calls make(folder)."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if 'PYTEST_XDIST_WORKER' in os.environ else own

    def once(name, make):
        with open(shared / f'{name}.lock', 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / name).exists():
                begun = shared / f'{name}.part'
                shutil.rmtree(begun, ignore_errors=True)  # of a worker in which `make` failed
                begun.mkdir()
                make(begun)
                begun.rename(shared / name)
        return shared / name

    return once


@pytest.fixture(scope='session')
def cache(once):
    return once('cache', lambda folder: None)


@pytest.fixture(scope='session')
def data(once):
    """Writes parallel text. The words of a target are the words of its source in reverse order.

    One training line is empty, and one training line is far too long. The first test lines contain the characters that
    a table escapes, and the characters that some programs read as line ends.
    """
    def write(folder):
        rng = np.random.default_rng(0)
        for split, count in (('train', 400), ('validation', 20), ('test', 20)):
            lines = [' '.join(rng.choice(WORDS, rng.integers(1, 5))) for _ in range(count)]
            if split == 'train':
                lines += ['', ' '.join(WORDS * 20)]
            if split == 'test':
                lines[:3] = ['one\u202ftwo\u00a0three', 'C:\\two\tthree \\t', ' four  five\u2028six\x85']
            (folder / f'{split}.en').write_text('\n'.join(lines) + '\n')
            (folder / f'{split}.xx').write_text('\n'.join(' '.join(line.split()[::-1]) for line in lines) + '\n')

    return once('data', write)


@pytest.fixture(scope='session')
def run(once, tmp_path_factory, data, cache):
    """Trains a model, and returns the run directory and the log. Tests may only add results to the directory."""
    def train(folder):
        result = script(*train_arguments(folder / 'whole', data, cache))
        (folder / 'log').write_bytes(result.stderr)
        assert result.returncode == 0, result.stderr.decode()

    trained = once('trained', train)
    workdir = tmp_path_factory.mktemp('runs') / 'whole'  # a copy, because the tests of each worker add results to it
    shutil.copytree(trained / 'whole', workdir)
    return workdir, (trained / 'log').read_text()


@pytest.fixture(scope='session')
def whole(once, cache):
    """Trains a tiny run on images without an interruption, and returns its directory. Tests may only read it."""
    from tests.tiny_run import start, tiny_config  # here, because these imports take seconds
    return once('images', lambda folder: start(folder / 'whole', tiny_config(cache))) / 'whole'


@pytest.fixture
def copy(whole, tmp_path):
    """Returns a copy of `whole` in the state of a run that was killed after step 9."""
    shutil.copytree(whole, tmp_path / 'copy')
    shutil.rmtree(tmp_path / 'copy' / 'checkpoints' / '12')
    return tmp_path / 'copy'


def parameters(workdir):
    import jax

    import inference
    return jax.tree.leaves(inference.load(workdir, 'latest').model.params)
