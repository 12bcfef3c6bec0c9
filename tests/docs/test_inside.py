"""The Python of docs/inside.md runs, in order, with a run that was never trained."""

import re
import types
from pathlib import Path

import pytest

import allyouneed
from input_pipeline.builtin import make_corpus
from input_pipeline.links import links_of
from interchange import export
from tests.random_run import random_run

PAGE = Path(__file__).parents[2] / 'docs' / 'inside.md'


@pytest.mark.slow  # it compiles about 30 programs
def test_the_python_of_the_page_runs(monkeypatch, tmp_path):
    run, writers = random_run('transformer', num_layers=1), {}
    corpus = make_corpus('en', 'fr', writers=writers)
    run.options, run.workdir = allyouneed.search_options(run.config, method='greedy', extra_length=1), tmp_path
    run.data = lambda: types.SimpleNamespace(
        pairs=corpus.__getitem__, has_links=bool, links=lambda split: links_of(corpus[split][:4], writers, 'en', 'fr'))
    monkeypatch.setattr(export, 'read_models', lambda folders, checkpoint: run._trained)
    monkeypatch.setattr(allyouneed, 'load', lambda workdir: run, raising=False)
    monkeypatch.chdir(tmp_path)
    names = {}
    for snippet in re.findall('```python\n(.*?)```', PAGE.read_text('utf-8'), re.DOTALL):
        exec(compile(snippet, str(PAGE), 'exec'), names)
    assert names['weights'].axes == ('layer', 'head', 'query', 'key')
    assert [count for count, _ in names['by_importance']] == [0, 3, 6]
    assert (tmp_path / 'runs' / 'demo_2_heads' / 'model.safetensors').exists()
