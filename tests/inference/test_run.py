"""A run directory, opened."""

import subprocess
import sys
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import base
from inference.edits import Edit
from inference.options import SearchOptions
from runtime.errors import UserError
from tests.inference.test_report import Validation
from tests.random_run import random_run

ROOT = Path(__file__).parents[2]


def test_a_run_is_opened_without_a_word(tmp_path):
    """As in a notebook, where nothing has set up what libraries may log."""
    with tarfile.open(ROOT / 'tests/runs/first.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    opened = subprocess.run(
        [sys.executable, '-c', 'import sys, inference\nfor choice in ("best", "latest", "average:1"):\n'
         '    print(inference.load(sys.argv[1], choice).checkpoint)', tmp_path / 'run'],
        cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (opened.returncode, opened.stdout, opened.stderr) == (0, '[6]\n' * 3, '')


@pytest.mark.parametrize('kind, ask, problem', [
    ('transformer', lambda run: run.forced([('a', 'b')]), 'the texts have no scores'),
    ('transformer', lambda run: run.translate(['a']), 'the search finds no output'),
    ('language_model', lambda run: run.forced(['ab']), 'the texts have no scores'),
    ('language_model', lambda run: run.model.score(Validation([[[1, 5, 6, 6]]]), 'test', base.get_config(),
                                                   SearchOptions(method='greedy')), 'the split has no scores'),
    ('patches', lambda run: run.predict(np.zeros((1, 8, 8, 1))), 'the inputs have no predictions')])
def test_outputs_that_are_not_finite_are_an_error(kind, ask, problem):
    """The message says whether the parameters or the edits are the cause."""
    run = random_run(kind, num_layers=1)
    edited = run.edited([Edit('scale', '*/layers_0', 3e38)])
    with pytest.raises(UserError, match=f'random: {problem}, because the outputs of the model are .* Remove the edits'):
        ask(edited)
    run.model.params = jax.tree.map(lambda leaf: leaf * np.nan, run.model.params)
    with pytest.raises(UserError, match=f'random: {problem}, because the parameters and outputs .* --checkpoint'):
        ask(run)
