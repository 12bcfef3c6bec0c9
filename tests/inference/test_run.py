"""A run directory, opened."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

import inference
from configs import base, recipe
from inference.edits import Edit
from inference.options import SearchOptions
from inference.run import make_answerer
from input_pipeline.tokenizer import ByteTokenizer
from runtime.cache import cache_folder
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


def test_compiled_programs_are_not_read_from_the_cache_that_a_run_names(tmp_path, monkeypatch):
    """The cache contains machine code, and the run may come from an untrusted source."""
    with tarfile.open(ROOT / 'tests/runs/first.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    path, used = tmp_path / 'run' / 'config.json', []
    path.write_text(json.dumps(json.loads(path.read_text()) | {'cache_dir': str(tmp_path / 'theirs')}))
    monkeypatch.setattr('inference.run.use_compilation_cache', used.append)
    inference.load(tmp_path / 'run')
    assert used == [cache_folder('')]


@pytest.mark.parametrize('packing, whole', [('packed', True), ('contiguous', False)])
def test_a_generator_has_the_packing_and_the_context_of_the_config(packing, whole):
    config = recipe('stdlib_lm')
    config.data.packing = packing
    model = make_answerer(config, nn.Dense(1), {}, {'text': ByteTokenizer()}, {})
    assert (model.whole_documents, model.context) == (whole, config.data.context)


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
