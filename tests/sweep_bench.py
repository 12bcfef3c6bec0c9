"""sweep.py with quick scripts in place of train.py and decode.py, for the tests of sweeps."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAIN = '''
import json, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(75)))  # saves for a second
flags = dict(argument.lstrip('-').split('=', 1) for argument in sys.argv[1:])
workdir = Path(flags['workdir'])
workdir.mkdir(parents=True, exist_ok=True)
with open(workdir / 'began', 'a') as file:
    file.write('x')
heads, seed, steps = (int(flags.get(f'config.{name}', 0)) for name in ('model.num_heads', 'seed', 'train.steps'))
if heads == 2 and not Path(ROOT, 'repaired').exists():
    sys.exit('Traceback: two heads are bad luck')
if heads == 4:
    while Path(ROOT, 'slow').exists():
        time.sleep(0.05)
(workdir / 'config.json').write_text('{}')
with open(workdir / 'metrics.jsonl', 'w') as file:
    for step in (steps // 2, steps):
        file.write(json.dumps({'step': step, 'tokens_per_second': 100 * step}) + '\\n')
        file.write(json.dumps({'step': step, 'validation_bleu': step * heads + seed}) + '\\n')
(workdir / 'score').write_text(str(10 * heads + seed))
'''
DECODE = '''
import json, sys
from pathlib import Path
flags = dict(argument.lstrip('-').split('=', 1) for argument in sys.argv[1:])
workdir = Path(flags['workdir'])
results = workdir / 'results' / f"{flags['split']}.json"
results.parent.mkdir(exist_ok=True)
results.write_text(json.dumps({'bleu': float((workdir / 'score').read_text()), 'perplexity': 2.0, 'parameters': 1234}))
'''
SWEEP = '''
from configs.sweeps import over, product, seeds
def get_sweep(config):
    return product(over('model.num_heads', {heads}), seeds({seeds}))
'''


@pytest.fixture(name='bench')
def sweep_bench(tmp_path):
    """A folder with sweep.py, scripts that take no time, and a sweep."""
    (tmp_path / 'sweep.py').write_bytes((ROOT / 'sweep.py').read_bytes())
    (tmp_path / 'train.py').write_text(TRAIN.replace('ROOT', repr(str(tmp_path))))
    (tmp_path / 'decode.py').write_text(DECODE)
    yield tmp_path
    (tmp_path / 'slow').unlink(missing_ok=True)  # ends the runs of a test that has failed


def command(bench, *arguments, heads=(1, 4), seeds=2, config=True):
    (bench / 'grid.py').write_text(SWEEP.format(heads=list(heads), seeds=seeds))
    recipe = [f'--config={ROOT}/configs/demo.py', '--sweep=grid.py', '--config.train.steps=400'] if config else []
    return [sys.executable, 'sweep.py', f'--workdir={bench}/out', *recipe, *arguments]


ENVIRONMENT = {**os.environ, 'PYTHONPATH': str(ROOT)}


def sweep(bench, *arguments, **options):
    done = subprocess.run(command(bench, *arguments, **options), cwd=bench, capture_output=True, text=True,
                          timeout=600, env=ENVIRONMENT)
    assert 'Traceback (most recent call last)' not in done.stderr, done.stderr
    return done


def start(bench, *arguments, **options):
    """A sweep in the background, whose runs with four heads do not end."""
    (bench / 'slow').touch()
    process = subprocess.Popen(command(bench, *arguments, **options), cwd=bench, stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    wait_for(bench / 'out/num_heads=4,seed=0/began')
    while not times_begun(bench)['num_heads=4,seed=0']:  # the file is empty before it is written
        time.sleep(0.02)
    return process


def wait_for(path, seconds=600):
    deadline = time.time() + seconds
    while not path.exists():
        assert time.time() < deadline
        time.sleep(0.02)


def times_begun(bench):
    return {path.parent.name: len(path.read_text()) for path in bench.glob('out/*/began')}


def write_scores(workdir, **splits):
    (workdir / 'results').mkdir(parents=True, exist_ok=True)
    for split, scores in splits.items():
        (workdir / 'results' / f'{split}.json').write_text(json.dumps(scores))
