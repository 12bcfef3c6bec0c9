"""Scripts with mistyped flags and damaged files: no traceback, exit status 2, and a message that names the mistake.

The tables beside this file have one case per line. Cases in QUICK end before any heavy work.
"""

import importlib

import pytest

from tests.bad_inputs import examples
from tests.bad_inputs.cases import Bench, Case

SCRIPTS = {'train': 'train', 'decode': 'decode', 'sweep': 'sweep', 'show_batch': 'tools.show_batch',
           'show_run': 'tools.show_run', 'inside': 'tools.inside', 'plan': 'tools.plan', 'export': 'tools.export',
           'import_weights': 'tools.import_weights'}
TABLES = {name: importlib.import_module(f'tests.bad_inputs.{name}') for name in SCRIPTS}


@pytest.fixture(scope='module')
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp('bad'))
    yield bench
    bench.close()


@pytest.fixture(scope='module')
def runs(bench):
    """The bench, with additional runs of a classifier and of a language model of characters."""
    bench.train('digits', '--config={root}/configs/digits_vit.py --workdir={new} --config.cache_dir={cache} '
                '--config.model.num_layers=1 --config.model.d_model=8 --config.model.d_ff=8 --config.model.num_heads=2 '
                '--config.train.steps=2 --config.optimizer.warmup=1')
    bench.train('letters', '--config={root}/configs/shakespeare_char.py --workdir={new} --config.cache_dir={cache} '
                '--config.data.file={root}/LICENSE --config.data.context=16 --config.model.max_length=16 '
                '--config.model.num_layers=1 --config.model.d_model=8 --config.model.d_ff=8 --config.model.num_heads=2 '
                '--config.train.steps=2 --config.optimizer.warmup=1')
    return bench


def of(kind):
    more = {'train': examples.TRAIN, 'decode': examples.DECODE} if kind == 'SLOW' else {}
    return [pytest.param(name, case, id=f'{name}-{number}-{case.arguments[:60]}')
            for name, table in TABLES.items()
            for number, case in enumerate([*getattr(table, kind), *more.get(name, [])])]


@pytest.mark.parametrize('name, case', of('QUICK'))
def test_a_cheap_mistake_is_explained(bench, name, case):
    bench.check(SCRIPTS[name], case)


@pytest.mark.slow
@pytest.mark.parametrize('name, case', of('SLOW'))
def test_a_mistake_is_explained(runs, name, case):
    runs.check(SCRIPTS[name], case)


@pytest.mark.slow
@pytest.mark.parametrize('name', TABLES)
def test_a_new_process_prints_the_same_messages(bench, name):
    """A fork has the same output as a new process."""
    for case in TABLES[name].QUICK[::len(TABLES[name].QUICK) // 2]:
        bench.check(SCRIPTS[name], case._replace(alone=True))


def test_the_bench_finds_a_wrong_status_and_a_missing_word(bench):
    """Also a traceback, which an error in a file of the tests makes, fails."""
    missing = Case('--config={here}/none.py --workdir={new}', 'none.py')
    bench.check('train', missing)
    for wrong in missing._replace(status=0), missing._replace(expected='another.py'):
        with pytest.raises(AssertionError):
            bench.check('train', wrong)


def test_there_are_at_least_350_cases():
    assert len(of('QUICK')) + len(of('SLOW')) >= 350
