"""The Python of the pages about notebooks calls functions that exist."""

import pathlib
import re
from unittest import mock

import allyouneed
from inference.run import Run
from inference.text import Output
from inference.translate import Translator

PAGES = 'README.md', 'docs/notebooks.md'
ROOT = pathlib.Path(__file__).parents[2]


def test_the_python_of_the_pages_calls_functions_that_exist(monkeypatch, capsys):
    run = mock.create_autospec(Run, instance=True)
    run.model = mock.create_autospec(Translator, instance=True)
    run.model.token_probabilities.return_value = []
    run.model.attention.return_value = {'cross': 'weights'}
    output = mock.create_autospec(Output, instance=True, text='vendredi 25 août 1922')
    run.translate.return_value, run.workdir = [output], pathlib.Path('RUN')
    returned = {'load': run, 'train': run, 'answer_figure': mock.DEFAULT, 'save_figure': mock.DEFAULT}
    for name, value in returned.items():
        function = mock.create_autospec(getattr(allyouneed, name), return_value=value)
        monkeypatch.setattr(allyouneed, name, function, raising=False)
    for page in PAGES:
        for snippet in re.findall('```python\n(.*?)```', (ROOT / page).read_text(encoding='utf-8'), re.DOTALL):
            exec(compile(snippet, page, 'exec'), {})
    [trained] = allyouneed.train.call_args_list
    assert trained.args[0].model.num_layers == 3
    assert allyouneed.save_figure.called
    assert capsys.readouterr().out == 'vendredi 25 août 1922\n'
