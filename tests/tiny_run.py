"""A run in this process: a tiny vision Transformer on the built-in digits, trained in seconds."""

import json
import sys

import jax
import pytest

import inference
from configs import digits_vit
from configs.options import flatten
from run_directory.workdir import RunDirectory
from runtime.preemption import StopSignals
from training import loop
from training.profiling import ProfilerWindow

TIMES = {'tokens_per_second', 'compile_seconds', 'resident_gb', 'device_gb', 'device_peak_gb'}


def tiny_config(cache, **changes):
    """Returns a config of 12 steps that logs at 5, 10 and 12, saves at 3, 6 and 9, and evaluates at 4, 8 and 12."""
    config = digits_vit.get_config()
    config.update_from_flattened_dict({
        'cache_dir': str(cache), 'model.num_layers': 1, 'model.d_model': 16, 'model.d_ff': 32, 'model.num_heads': 2,
        'batch.rows': 64, 'optimizer.warmup': 4, 'optimizer.schedule': 'inverse_sqrt', 'train.steps': 12,
        'train.log_every': 5, 'eval.every': 4, 'checkpoint.every': 3, 'checkpoint.keep_last': 3,
        **{key.replace('__', '.'): value for key, value in changes.items()}})
    return config


def start(workdir, config, profile_steps=None):
    """Trains as train.py does after it has read the command line."""
    with StopSignals() as stop, RunDirectory(str(workdir), config) as directory:
        loop.run(config, directory, stop, ProfilerWindow(profile_steps, directory.path))


def script_arguments(workdir, config):
    """Returns the command line of a config that is similar to digits_vit.py."""
    default, wanted = (flatten(each) for each in (digits_vit.get_config(), config))
    return [sys.executable, 'train.py', '--config=configs/digits_vit.py', f'--workdir={workdir}',
            *(f'--config.{key}={value}' for key, value in wanted.items() if value != default[key])]


def outcome(workdir):
    """Returns the last parameters and metrics.jsonl without times, which no interruption may change."""
    lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
    params = jax.device_get(inference.load(workdir, 'latest').model.params)
    return ([leaf.tobytes() for leaf in jax.tree.leaves(params)],
            [{name: value for name, value in line.items() if name not in TIMES} for line in lines])


def steps(workdir):
    """Returns the steps of the checkpoints."""
    return sorted(int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdecimal())


@pytest.fixture
def log(caplog):
    """Returns the log of this project."""
    caplog.set_level('INFO', logger='allyouneed')
    return caplog
