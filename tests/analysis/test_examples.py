"""Runs of notebooks: an existing run is opened, and a missing run is trained by the scripts."""

import pytest

from analysis import examples
from runtime.errors import UserError


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project whose scripts only write down how they are called."""
    monkeypatch.setattr(examples, 'ROOT', tmp_path)
    for variable in 'RUN', 'SWEEP':
        monkeypatch.delenv(variable, raising=False)
    for name in 'train.py', 'sweep.py':
        (tmp_path / name).write_text(
            'import pathlib, sys\npathlib.Path("called").write_text(" ".join(sys.argv))\n'
            'print("logged", file=sys.stderr)')
    return tmp_path


def test_a_run_that_is_there_is_taken(root):
    for folder, file in ('runs/demo', 'config.json'), ('sweeps/scores', 'sweep.json'):
        (root / folder).mkdir(parents=True)
        (root / folder / file).write_text('{}')
    assert examples.example_run('demo') == root / 'runs' / 'demo'
    assert examples.example_sweep('scores') == root / 'sweeps' / 'scores'
    assert not (root / 'called').exists()


def test_a_run_that_is_named_goes_first(root, monkeypatch):
    monkeypatch.setenv('RNN_RUN', 'runs/mine')
    monkeypatch.setenv('SWEEP', str(root / 'elsewhere'))
    for make in (lambda: examples.example_run('rnnsearch_demo', 'RNN_RUN'), lambda: examples.example_sweep('scores')):
        with pytest.raises(UserError, match='^(RNN_RUN|SWEEP)=.*: there is no directory .* or unset it$'):
            make()
    for folder in 'runs/mine', 'elsewhere':
        (root / folder).mkdir(parents=True)
    assert examples.example_run('rnnsearch_demo', 'RNN_RUN') == root / 'runs' / 'mine'
    assert examples.example_sweep('scores') == root / 'elsewhere'
    assert not (root / 'called').exists()


def test_otherwise_a_short_one_is_made(root, capfd):
    assert examples.example_run('demo', steps=40) == root / 'runs' / 'demo-40'
    assert (root / 'called').read_text() == (
        'train.py --config=configs/demo.py --workdir=runs/demo-40 --config.train.steps=40')
    assert capfd.readouterr().err.endswith('logged\n')
    assert examples.example_sweep('scores', steps=40) == root / 'sweeps' / 'scores-40'
    called = (root / 'called').read_text().split()
    assert called[:4] == ['sweep.py', '--config=configs/demo.py', '--sweep=configs/sweeps/scores.py',
                          '--workdir=sweeps/scores-40']
    assert {'--config.train.steps=40', '--config.model.d_model=64'} <= set(called)


def test_a_failure_is_reported(root, capfd):
    (root / 'train.py').write_text('raise SystemExit("no such recipe")')
    with pytest.raises(UserError, match='the command python train.py --config=configs/demo.py'):
        examples.example_run('demo')
    assert 'no such recipe' in capfd.readouterr().err


def test_an_interrupt_waits_for_the_end_of_the_process(root, monkeypatch):
    (root / 'train.py').write_text("""
import signal, sys, time
def save(*_):
    print('saving', file=sys.stderr)
    time.sleep(0.1)
    open('saved', 'w').close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print('logged', file=sys.stderr, flush=True)
time.sleep(60)
""")

    def interrupted(text, **_):
        if text == 'logged\n':
            raise KeyboardInterrupt

    monkeypatch.setattr(examples, 'print', interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        examples.example_run('demo')
    assert (root / 'saved').exists()
