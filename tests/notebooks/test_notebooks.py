"""Every notebook runs from its source, and the committed .ipynb file contains the same cells, with outputs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest

import inference
from configs import demo, rnnsearch_demo
from input_pipeline.builtin import make_corpus
from tests.scripts import script

for module in 'jupytext', 'nbclient', 'ipykernel':
    pytest.importorskip(module, reason="the notebooks need more: pip install -e '.[notebooks]'")
from notebooks import build  # noqa: E402

BY_HAND = 'attention_by_hand'  # it opens no run
TRANSFORMER = {'model.num_layers': 1, 'model.d_model': 16, 'model.d_ff': 16, 'model.num_heads': 2}
RNNSEARCH = {'model.d_model': 16, 'model.recurrent.d_hidden': 16, 'model.recurrent.d_align': 8}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """A folder of two trainings of seconds, a Transformer and an RNNsearch, on the same little corpus."""
    folder = tmp_path_factory.mktemp('notebooks')
    (folder / 'data').mkdir()
    for split, pairs in make_corpus(sizes={'train': 300, 'validation': 8, 'test': 8}).items():
        for language, lines in zip(('en', 'fr'), zip(*pairs, strict=True), strict=True):
            (folder / 'data' / f'{split}.{language}').write_text('\n'.join(lines) + '\n')
    for recipe, model in ('demo', TRANSFORMER), ('rnnsearch_demo', RNNSEARCH):
        values = model | {
            'cache_dir': folder / 'cache', 'data.source': 'files', 'data.dir': folder / 'data',
            'data.tokenizer.vocab_size': 400, 'batch.buckets': 1, 'optimizer.warmup': 2, 'train.steps': 4,
            'train.log_every': 1, 'eval.every': 2, 'eval.bleu_sentences': 2, 'decode.extra_length': 4}
        done = script('train.py', f'--config=configs/{recipe}.py', f'--workdir={folder / "runs" / recipe}',
                      *(f'--config.{option}={value}' for option, value in values.items()))
        assert done.returncode == 0, done.stderr.decode()
        (folder / 'runs' / recipe / 'results').mkdir()
        (folder / 'runs' / recipe / 'results' / 'validation.json').write_text(
            json.dumps({'n': 8, 'bleu': 1.5, 'perplexity': 300.25, 'exact_match': 0.0}))
    values = TRANSFORMER | {
        'cache_dir': folder / 'cache', 'data.file': build.FOLDER / 'few_shot.py', 'optimizer.warmup': 2,
        'train.steps': 4}
    done = script('train.py', '--config=configs/shakespeare_char.py', f'--workdir={folder / "runs" / "language_model"}',
                  *(f'--config.{option}={value}' for option, value in values.items()))
    assert done.returncode == 0, done.stderr.decode()
    return folder / 'runs'


@pytest.fixture(scope='module')
def environment():
    """Nothing of the user's own Jupyter."""
    with tempfile.TemporaryDirectory(prefix='jupyter-') as folder:
        yield {'JUPYTER_RUNTIME_DIR': folder, 'IPYTHONDIR': folder, 'STEPS': '8'}


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == 'code' for output in cell.outputs]


PICTURES = {'attention_by_hand': 8, 'open_a_run': 4, 'inside_a_model': 5, 'few_shot': 0, 'fine_tune': 5,
            'compare_runs': 2, 'additive_vs_dot_product': 3}


@pytest.mark.slow
@pytest.mark.parametrize('name', build.NAMES)
def test_a_notebook_runs_from_its_source(name, environment, request):
    if name != BY_HAND:
        runs = request.getfixturevalue('runs')
        environment = environment | {
            'RUN': str(runs / 'demo'), 'LM_RUN': str(runs / 'language_model'),
            'RNN_RUN': str(runs / 'rnnsearch_demo'), 'SWEEP': str(runs)}
    if name == 'fine_tune':  # it reads megabytes of text, and optimised programs are worth their compilation
        environment = environment | {'XLA_FLAGS': ''}
    notebook = build.execute(name, environment)  # raises if a cell does
    pictures = [output for output in outputs(notebook) if 'image/png' in output.get('data', {})]
    assert len(pictures) >= PICTURES[name]
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == 'code')


@pytest.mark.parametrize('name', build.NAMES)
def test_what_is_committed_is_the_source_with_outputs(name):
    path = build.FOLDER / f'{name}.ipynb'
    committed, source = json.loads(path.read_text()), build.read(name)
    assert [''.join(cell['source']) for cell in committed['cells']] == [cell.source for cell in source.cells], (
        f'{name}.py has changed since the notebook was built: make notebooks')
    assert [cell['id'] for cell in committed['cells']] == [cell.id for cell in source.cells]
    assert committed['metadata'] == source.metadata
    code = [cell for cell in committed['cells'] if cell['cell_type'] == 'code']
    assert [cell['execution_count'] for cell in code] == [*range(1, 1 + len(code))]
    found = [output for cell in code for output in cell['outputs']]
    assert not [output for output in found if output['output_type'] == 'error' or output.get('name') == 'stderr']
    assert sum('image/png' in output.get('data', {}) for output in found) >= PICTURES[name]
    assert path.stat().st_size < 300_000
    assert not re.search(r'/(home|root|tmp|work|Users|mnt)/', path.read_text())  # of whoever built it


def printed(name):
    """The text outputs of a committed notebook."""
    cells = json.loads((build.FOLDER / f'{name}.ipynb').read_text())['cells']
    return ''.join(line for cell in cells for output in cell.get('outputs', [])
                   for line in output.get('text') or output['data'].get('text/plain', []))


def test_the_outputs_are_those_of_the_present_recipes():
    config, text = demo.get_config(), printed('open_a_run')
    [(step, size)] = re.findall(r'parameters of step \[(\d+)\], vocabulary of (\d+)\n', text)
    assert int(step) in range(config.eval.every, config.train.steps + 1, config.eval.every)
    assert int(size) == config.data.tokenizer.vocab_size
    options = dict(option.split(' ') for option in re.search('^kind .*$', text, re.MULTILINE)[0].split(', '))
    assert options == {name: str(config.model[name]) for name in options} and len(options) == 8

    steps = dict(re.findall(r'(\w+) +[\d,]+ parameters, step \[(\d+)\]', printed('additive_vs_dot_product')))
    assert steps == {'RNNsearch': str(rnnsearch_demo.get_config().train.steps), 'Transformer': str(config.train.steps)}

    asked = re.search(r'--config.train.steps=(\d+)', build.read('compare_runs').cells[0].source)[1]
    assert f', {asked}: ' in printed('compare_runs')


@pytest.mark.parametrize('name', build.NAMES)
def test_no_output_is_the_description_of_a_python_object(name):
    assert not re.findall(r'<matplotlib\.\S+|\[?Text\(|<\S+ at 0x\w+>', printed(name))


def test_a_source_is_in_percent_format_and_begins_with_its_title():
    sources = {path.stem for path in build.FOLDER.glob('*.py')} - {'build'}
    assert sources == set(build.NAMES)
    for name in build.NAMES:
        first = build.read(name).cells[0]
        assert first.cell_type == 'markdown' and first.source.startswith('# ')


def test_no_file_is_searched_in_the_current_folder():
    for name in build.NAMES:
        assert not re.search(r"(Path|open)\('", (build.FOLDER / f'{name}.py').read_text()), name


@pytest.mark.slow
def test_a_translation_that_is_given(runs):
    model = inference.load(runs / 'demo').model
    given = model.forced('3 hours ago', 'il y a 3 heures')
    assert given.text == 'il y a 3 heures'
    probabilities = [token.probability for token in model.token_probabilities(given)]
    assert given.hypotheses[0].log_prob == pytest.approx(np.sum(np.log(probabilities)), rel=1e-4)
    length = len(given.hypotheses[0].tokens) + 1
    assert model.attention(given)['cross'].shape == (1, 2, length, len(given.source_tokens) + 1)
    assert model.tokenizers['target'].decode(given.hypotheses[0].tokens) == given.text


def test_the_first_notebook_sets_the_project_up(tmp_path, monkeypatch):
    """Its first cell, where nothing of the project can be imported: it clones, installs and goes there."""
    if not (build.FOLDER.parent / '.git').exists():
        pytest.skip('this copy of the project is none of git, so it cannot be cloned')
    commands, run = [], subprocess.run

    def recorded(command, **options):
        commands.append(command)
        return run(command, **options) if command[0] == 'git' else None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.setattr(subprocess, 'run', recorded)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setenv('REPOSITORY', str(build.FOLDER.parent))
    exec(build.read('attention_by_hand').cells[1].source, {})
    assert os.getcwd() == sys.path[0] == str(tmp_path / 'allyouneed')
    assert (tmp_path / 'allyouneed' / 'analysis' / 'pictures.py').exists()
    assert commands[1][1:] == ['-m', 'pip', 'install', '--quiet', '--editable', './allyouneed']
