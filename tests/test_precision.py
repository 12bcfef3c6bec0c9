"""decode.py --matmul_precision: the precision of products is used, recorded, and refused where it has no effect."""

import json
import shutil
from pathlib import Path

import pytest

from analysis.request import Request
from runtime.errors import UserError
from tests.random_run import random_run
from tests.scripts import script


@pytest.mark.slow
def test_products_in_bfloat16_change_the_scores_of_translations_a_little(run, tmp_path):
    shutil.copytree(run[0], tmp_path / 'run')
    perplexity = {}
    for precision in ('default', 'bfloat16'):
        result = script('decode.py', f'--workdir={tmp_path / "run"}', '--split=test', f'--matmul_precision={precision}')
        assert result.returncode == 0, result.stderr
        scores = json.loads((tmp_path / 'run' / 'results' / 'test.json').read_text())
        assert scores['matmul_precision'] == precision
        perplexity[precision] = scores['perplexity']
    assert perplexity['bfloat16'] != perplexity['default']
    assert perplexity['bfloat16'] == pytest.approx(perplexity['default'], rel=1e-2)


def run_with(dtype, runs=1):
    run = random_run('transformer')
    run.config.model.dtype, run.workdirs = dtype, [Path('run')] * runs
    return run


@pytest.mark.parametrize('dtype, runs, flags', [
    ('float32', 1, {}),
    ('bfloat16', 1, {'matmul_precision': 'default'}),
    ('bfloat16', 2, {}),  # the second run may be in float32
])
def test_a_precision_with_an_effect_is_accepted(dtype, runs, flags):
    Request(**{'workdir': 'run', 'input': '-', 'matmul_precision': 'bfloat16'} | flags).check_run(run_with(dtype, runs))


@pytest.mark.parametrize('runs, flags', [(1, {}), (2, {'dtype': 'bfloat16'})])
def test_a_precision_without_effect_is_refused(runs, flags):
    request = Request(workdir='run', input='-', matmul_precision='bfloat16', **flags)
    with pytest.raises(UserError, match='--matmul_precision=bfloat16 has no effect with model.dtype=bfloat16'):
        request.check_run(run_with('bfloat16', runs))
