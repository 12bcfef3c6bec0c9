"""training.loop.train, the loop of train.py as a function: the same run bit for bit, resumed after an interrupt."""

import logging
import os
import signal
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

import inference
import training.curve
from configs.versions import config_text
from input_pipeline.array_batches import ArrayPlan
from run_directory.records import CONFIG, METRICS_FILE, read_metrics
from runtime import preemption
from runtime.errors import UserError
from tests.tiny_run import log, outcome, steps, tiny_config  # noqa: F401 (fixture)
from training import loop
from training.curve import LiveCurve, log_shown
from training.metrics import MetricsWriter


def interrupting(monkeypatch, number):
    """Ctrl-C while batch `number` of training, from 0, is made."""
    make = ArrayPlan.batch

    def batch(self, step, *part):
        if step == number and self._split == 'train':
            os.kill(os.getpid(), signal.SIGINT)
        return make(self, step, *part)

    monkeypatch.setattr(ArrayPlan, 'batch', batch)


def test_it_trains_what_train_py_trains(whole, tmp_path, cache):
    config = tiny_config(cache)
    before = config.to_json()
    run = loop.train(config, tmp_path / 'run')
    assert outcome(tmp_path / 'run') == outcome(whole)
    assert run.workdir == tmp_path / 'run' and config.to_json() == before
    assert run.checkpoint == inference.load(whole).checkpoint


def test_the_metric_epoch_counts_passes_over_the_training_split(whole):
    epochs = {line['step']: line['epoch'] for line in read_metrics(whole) if 'epoch' in line}
    assert epochs == {step: step / 21 for step in (5, 10, 12)}  # 1,297 images are 21 batches


@pytest.mark.slow
def test_an_interrupt_saves_and_the_same_call_resumes(whole, tmp_path, cache, monkeypatch):
    former = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupting(patch, 6)
        with pytest.raises(KeyboardInterrupt, match='saved'):
            loop.train(tiny_config(cache), str(tmp_path / 'run'))
    assert 0 < steps(tmp_path / 'run')[-1] < 12 and signal.getsignal(signal.SIGINT) is former
    loop.train(tiny_config(cache), str(tmp_path / 'run'))
    assert outcome(tmp_path / 'run') == outcome(whole)


@pytest.mark.parametrize('part', ['RunDirectory', 'open_data'])
def test_an_interrupt_at_any_time_is_a_keyboard_interrupt_that_keeps_no_state(part, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(loop, part, lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match='saved') as error:
        loop.train(tiny_config(cache), tmp_path / 'run')
    assert error.value.__context__ is None


@pytest.mark.slow
def test_a_second_interrupt_leaves_the_kernel_alive(tmp_path, cache, monkeypatch):
    def twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(preemption, 'SAME_REQUEST', 0.0)
    monkeypatch.setattr(loop, 'make_step', twice)
    with pytest.raises(KeyboardInterrupt):
        loop.train(tiny_config(cache), tmp_path / 'run')


@pytest.mark.slow
def test_it_trains_in_another_thread(whole, tmp_path, cache):
    thread = threading.Thread(target=loop.train, args=(tiny_config(cache), tmp_path / 'run'))
    thread.start()
    thread.join()
    assert outcome(tmp_path / 'run') == outcome(whole)


def test_all_problems_are_reported_before_any_file_is_written(tmp_path, cache):
    with pytest.raises(UserError) as error:
        loop.train(tiny_config(cache, model__dropout=2.0, train__steps=0), tmp_path / 'run')
    assert 'model.dropout' in str(error.value) and 'train.steps' in str(error.value)
    assert not (tmp_path / 'run').exists()
    with pytest.raises(UserError, match='workdir'):
        loop.train(tiny_config(cache), '')


def test_a_value_that_only_an_existing_run_may_have_is_refused_in_a_new_run(tmp_path, cache):
    with pytest.raises(UserError, match="^config.train.frozen=',': must contain a pattern"):
        loop.train(tiny_config(cache, train__frozen=','), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / CONFIG).write_text(config_text(tiny_config(cache, train__frozen=',', seed=1)))
    with pytest.raises(UserError, match='seed: 1 in the run, 0 now'):
        loop.train(tiny_config(cache, train__frozen=','), tmp_path / 'run')


def test_a_malformed_config_of_an_existing_run_is_explained(tmp_path, cache):
    (tmp_path / 'checkpoints' / '12').mkdir(parents=True)
    (tmp_path / METRICS_FILE).write_text('{"step": 12, "validation_accuracy": 0.5}\n')
    config = tiny_config(cache)
    with config.ignore_type():
        config.train.steps = '2000'
    with pytest.raises(UserError, match="^config.train.steps='2000': must be a whole number$"):
        loop.train(config, tmp_path)
    config = tiny_config(cache)
    del config.eval
    with pytest.raises(UserError, match='config.eval.metric is missing. Start with base.get_config()'):
        loop.train(config, tmp_path)


@pytest.mark.slow
def test_a_config_of_another_class_is_refused(tmp_path):
    # This runs in a separate process, because the checks of annotations in the tests would reject the config first.
    program = f"""
import inference
from runtime.errors import UserError
from training.loop import train
try:
    train({{'seed': 0}}, {str(tmp_path / 'run')!r})
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert 'ConfigDict' in done.stdout and "'seed'" in done.stdout and not (tmp_path / 'run').exists()


@pytest.fixture
def notebook(monkeypatch, caplog):
    """The state of a notebook after orbax's import: the root logger has a handler, and its level is WARNING."""
    for module in loop, training.curve:
        monkeypatch.setattr(module, 'in_notebook', lambda: True)
    top = logging.getLogger('allyouneed')
    monkeypatch.setattr(top, 'handlers', [])
    monkeypatch.setattr(top, 'propagate', True)
    caplog.set_level(logging.NOTSET, 'allyouneed')
    caplog.set_level(logging.WARNING)
    assert top.hasHandlers() and not top.isEnabledFor(logging.INFO)
    return top


def test_a_notebook_prints_each_line_of_the_log_once(notebook, caplog, capsys):
    for _ in range(2):
        with log_shown():
            notebook.warning('a line')
            notebook.info('another line')
        assert capsys.readouterr().err == 'a line\nanother line\n' and not caplog.records
        assert not notebook.handlers and notebook.propagate and notebook.level == logging.NOTSET


def test_a_notebook_that_shows_the_log_gets_no_other_handler(notebook, caplog, capsys):
    caplog.set_level(logging.INFO)
    with log_shown():
        notebook.info('a line')
    assert caplog.messages == ['a line'] and not capsys.readouterr().err


def test_each_training_in_a_notebook_prints_the_messages_about_the_data(notebook, cache, tmp_path, capsys):
    images = np.arange(64, dtype=np.uint8).reshape(4, 4, 4, 1)
    for split, inputs in ('train', images), ('validation', images[:2]), ('test', images[:, :3]):
        np.savez(tmp_path / f'{split}.npz', inputs=inputs, targets=np.arange(len(inputs)))
    config = tiny_config(cache, data__source='files', data__name='', data__dir=str(tmp_path))
    for _ in range(2):
        with pytest.raises(UserError, match='test.npz: inputs are uint8'):
            loop.train(config, tmp_path / 'run')
        assert [line.partition(': ')[2][:33] for line in capsys.readouterr().err.splitlines()] == [
            '4 classes (0, 1, 2, 3)', '4 of 4 classes have only one exam', '2 of 2 examples are also in the t']


@pytest.mark.slow
def test_in_a_notebook_it_draws_a_curve_and_prints_the_log(tmp_path, cache, monkeypatch, notebook, capsys):
    shown = []
    monkeypatch.setattr('training.curve.INTERVAL', 0.0)
    monkeypatch.setattr('IPython.core.pylabtools.print_figure', lambda figure: (shown.append(figure), b'')[1])
    loop.train(tiny_config(cache), tmp_path / 'run')
    assert 'step 12: validation_loss' in capsys.readouterr().err
    assert not notebook.handlers, 'the notebook has its logging back'
    lines = read_metrics(tmp_path / 'run')
    assert len(shown) == len(lines) + 1, 'each line, and once at the end'
    losses, metric = shown[-1].axes
    drawn = {line.get_label(): [*map(tuple, line.get_xydata())] for axes in (losses, metric) for line in axes.lines}
    assert drawn == {name: [(line['step'], line[name]) for line in lines if name in line]
                     for name in ('train_loss', 'validation_loss', 'validation_accuracy')}


def test_the_curve_is_a_picture_without_matplotlib_inline(whole, monkeypatch):
    shown = []
    display = types.SimpleNamespace(update=shown.append)
    monkeypatch.setattr('IPython.core.display_functions.display',
                        lambda picture, display_id: (shown.append(picture), display)[1])
    curve = LiveCurve(whole, 'accuracy')
    for _ in range(2):
        curve.close()
    assert [picture.data[:4] for picture in shown] == [b'\x89PNG'] * 2


def test_the_curve_of_a_resumed_run_begins_with_what_was_before(whole):
    curve = LiveCurve(whole, 'accuracy')
    [line] = curve.figure().axes[1].lines
    assert [*line.get_xdata()] == [4, 8, 12]
    assert len(LiveCurve(whole, 'loss').figure().axes) == 1, 'it is in the left one'


def test_the_curve_of_a_run_that_was_killed_has_each_step_once(tmp_path, monkeypatch):
    """The killed training logged steps 6 and 8. Its last checkpoint is of step 4."""
    (tmp_path / METRICS_FILE).write_text(''.join(f'{{"step": {step}, "train_loss": 1.0}}\n' for step in (2, 4, 6, 8)))
    curve = LiveCurve(tmp_path, 'accuracy')
    monkeypatch.setattr(curve, '_draw', lambda: None)
    writer = MetricsWriter(tmp_path, 4)
    for step in 6, 8, 10:
        for each in writer, curve:
            each.write(step, {'train_loss': 0.5})
    writer.close()
    [line] = curve.figure().axes[0].lines
    assert line.get_xydata().tolist() == [[2, 1], [4, 1], [6, 0.5], [8, 0.5], [10, 0.5]]
