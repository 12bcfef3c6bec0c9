"""The Python of the pages about notebooks calls functions that exist."""

import pathlib
import re
from unittest import mock

import numpy as np

import allyouneed
from inference.outputs import Output
from inference.predictions import Predictions
from inference.run import Run
from inference.translate import Translator
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing

PAGES = 'README.md', 'docs/notebooks.md'
ROOT = pathlib.Path(__file__).parents[2]


def test_the_python_of_the_pages_calls_functions_that_exist(monkeypatch, capsys):
    run = mock.create_autospec(Run, instance=True)
    run.model = mock.create_autospec(Translator, instance=True)
    run.model.token_probabilities.return_value = []
    run.model.attention.return_value = {'cross': 'weights'}
    form = InputFormat((1,), Preprocessing([0.0], [1.0], None, None), ('a', 'b'))
    run.predict.return_value = Predictions(np.zeros((3, 1)), np.log([[0.5, 0.5]] * 3), form)
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
    assert capsys.readouterr().out == 'vendredi 25 août 1922\n' + 3 * "a 0.5 [('a', 0.5), ('b', 0.5)]\n"
