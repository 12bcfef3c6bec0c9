"""The tables of options and tasks match the code, and docs/options.md matches the tables."""

import inspect
import re

import pytest

from configs import base
from configs.options import BY_NAME, DEFAULTS, OPTIONS, SECTIONS, choices, flatten
from configs.tasks import METRICS, TASKS
from inference.options import SearchOptions, search_options
from inference.run import ANSWERERS
from input_pipeline import arrays, documents, problems, sources
from input_pipeline.data import DATA
from model import attention, blocks, embedding, patches, positional, recurrent
from model.build import BLOCK, MODELS
from runtime.errors import UserError
from tools import options_page
from training import mesh, optimizer
from training.objective import OBJECTIVES


def test_defaults_are_those_of_the_table_and_no_option_is_there_twice():
    assert flatten(base.get_config()) == DEFAULTS
    assert len(BY_NAME) == len(OPTIONS)
    assert {name.rpartition('.')[0] for name in BY_NAME} == set(SECTIONS)
    assert all(option.meaning and not option.meaning.endswith('.') for option in OPTIONS)


def test_the_page_is_up_to_date():
    assert options_page.PAGE.read_text('utf-8') == options_page.page(), 'python -m tools.options_page writes it anew'


def test_the_page_describes_every_option_completely():
    page = options_page.page()
    assert ('| `decode.beam` \N{ANTICLOCKWISE OPEN CIRCLE ARROW} | `4` | number of hypotheses per sentence | '
            '1 to 1,000 | task: translation, ') in page
    assert '| `model.max_length` | `256` | number of positions in a learned table | 1 to 1,000,000 | ' \
           'model.kind: transformer, language_model |' in page
    for name in BY_NAME:
        assert re.search(rf'^\| `{re.escape(name)}`', page, re.MULTILINE)


@pytest.mark.parametrize('name, there', [
    ('model.kind', MODELS), ('model.score', attention.SCORES), ('model.attention_kernel', attention.KERNELS),
    ('model.norm', blocks.NORMS), ('model.norm_function', blocks.NORM_FUNCTIONS),
    ('model.feed_forward', blocks.FEED_FORWARDS), ('model.attention_bias', attention.BIASES),
    ('model.rotary_scaling', positional.SCALINGS), ('model.activation', blocks.ACTIVATIONS),
    ('model.position', positional.SCHEMES), ('model.remat_keep', blocks.REMAT_KEEPS),
    ('model.share_embeddings', embedding.SHARING), ('model.recurrent.readout', recurrent.READOUTS),
    ('model.patches.pooling', patches.POOLINGS), ('model.patches.stem', patches.STEMS),
    ('optimizer.schedule', optimizer.SCHEDULES),
    ('task', TASKS)])
def test_the_choices_of_an_option_are_the_existing_names(name, there):
    assert choices(name) == tuple(there)


def test_a_source_that_may_be_chosen_is_one_of_some_data():
    # Data without it refuses it when it is opened.
    assert set(choices('data.source')) == {*sources.SOURCES, *documents.SOURCES, *arrays.SOURCES}


def test_axes_of_the_mesh_are_options():
    assert [name for name in BY_NAME if name.startswith('parallel.')] == [
        'parallel.mode', *(f'parallel.{axis}' for axis in mesh.AXES)]


def test_every_part_that_a_task_names_is_there_and_is_named():
    for part, there in ('data', DATA), ('objective', OBJECTIVES), ('answerer', ANSWERERS):
        assert {getattr(task, part) for task in TASKS.values()} == set(there)
    assert set(problems.PROBLEMS) == set(DATA)
    assert {model for task in TASKS.values() for model in task.models} == set(MODELS)
    assert {metric for task in TASKS.values() for metric in (*task.metrics, *task.scores)} == set(METRICS)
    assert all(task.longest in ('', *BY_NAME) for task in TASKS.values())


@pytest.mark.parametrize('kind', MODELS)
def test_an_option_is_used_by_a_model_that_has_it_as_an_attribute(kind):
    used = {name.rpartition('.')[2] for name, option in BY_NAME.items() if name.startswith('model.')
            and name != 'model.kind' and kind in option.only.get('model.kind', MODELS)}  # whatever else decides
    attributes = set(inspect.signature(MODELS[kind].module).parameters)
    options = {name.rpartition('.')[2] for name in BY_NAME if name.startswith('model.')}
    assert used == (attributes | (BLOCK if 'config' in attributes else set())) & options


def test_the_default_search_is_that_of_the_options():
    assert SearchOptions() == search_options(base.get_config())


@pytest.mark.parametrize('name, message', [
    ('beams', "there is no search option 'beams': did you mean beam?"),
    ('x', "there is no search option 'x'. Use method, beam, alpha, ")])
def test_an_unknown_option_of_a_search_is_refused(name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        search_options(base.get_config(), **{name: 3})


@pytest.mark.parametrize('method, option, used_by', [
    ('beam', 'temperature', 'sample'), ('beam', 'seed', 'sample'), ('greedy', 'top_k', 'sample'),
    ('sample', 'beam', 'beam'), ('greedy', 'patience', 'beam')])
def test_an_option_that_the_search_does_not_use_is_refused(method, option, used_by):
    value = getattr(SearchOptions, option)
    assert search_options(base.get_config(), method=used_by, **{option: value}).method == used_by
    message = f'^{option}={value} has no effect with method={method}. Use method={used_by}, or remove {option}$'
    with pytest.raises(UserError, match=message):
        search_options(base.get_config(), method=method, **{option: value})
