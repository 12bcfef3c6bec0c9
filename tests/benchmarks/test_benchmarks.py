"""Every benchmark runs, small, and reports figures that can be."""

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.train_step import torch_times
from benchmarks.workloads import WORKLOADS
from errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
TINY = ['--config.model.num_layers=1', '--config.model.d_model=16', '--config.model.d_ff=32',
        '--config.model.num_heads=2',
        '--config.batch.buckets=1', '--config.batch.tokens=512']


def lines(name, *arguments):
    done = subprocess.run([sys.executable, '-m', f'benchmarks.{name}', *arguments], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize('name, arguments', [
    ('train_step', ['--runs=1']), ('decode', ['--runs=1']), ('attention', ['--lengths=64', '--runs=1'])])
def test_speeds(name, arguments):
    found = lines(name, *arguments)
    assert all(line['tokens_per_second'] > 0 and line['median_s'] > 0 and line['peak_memory_gb'] > 0 for line in found)


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    with pytest.raises(UserError, match=r"--peer=torch needs PyTorch: python -m pip install -e '\.\[benchmark\]'"):
        torch_times(WORKLOADS['tiny'], 1)


@pytest.mark.slow
def test_the_cost_of_checkpoints(tmp_path):
    [found] = lines('checkpoints', '--config=configs/demo.py', '--every=3', '--pairs=2', *TINY,
                    f'--config.cache_dir={tmp_path}')
    assert found['ratio'] > 0 and found['held_s'] > 0 and found['every'] == 3 and len(found['ratios']) == 2


@pytest.mark.slow
def test_the_memory_of_a_corpus():
    *phases, summary = lines('corpus', '--pairs=20000', '--batches=2')
    assert [each['phase'] for each in phases] == [
        'start', 'write text', 'tokenizer', 'token store', 'plan', 'first batch', 'batches', 'next epoch']
    assert all(each['own_mb'] <= each['peak_mb'] for each in phases)
    assert summary['batches_taken'] == 2 and summary['batches_of_an_epoch'] > 2
