"""A finished run is recognised from its records. To report it, nothing is read, compiled or imported."""

import dataclasses
import json
import shutil
import sys

import pytest

from run_directory.damage import read_progress
from run_directory.records import finished_at, read_config, read_metrics
from tests.scripts import script
from tests.tiny_run import log, script_arguments, start, steps, tiny_config  # noqa: F401 (fixture)
from training import loop


def test_a_run_is_finished_if_its_newest_checkpoint_is_evaluated_and_nothing_remains(whole, copy, cache):
    assert finished_at(whole, tiny_config(cache)) == 12
    assert finished_at(whole, tiny_config(cache, train__steps=10)) == 12
    assert finished_at(whole, tiny_config(cache, train__steps=13)) is None
    assert finished_at(copy, tiny_config(cache)) is None, 'the checkpoint of step 12 is lost'
    (copy / 'checkpoints' / '12').mkdir()
    (copy / 'metrics.jsonl').write_text('{"step": 12, "train_loss": 2.0}\n')
    assert finished_at(copy, tiny_config(cache)) is None, 'step 12 is not evaluated'
    assert finished_at(copy / 'none', tiny_config(cache)) is None


def test_a_run_without_patience_left_is_finished_until_it_may_wait_longer(copy, cache, log):
    lines = ''.join(f'{{"step": {step}, "validation_accuracy": {value}}}\n' for step, value in ((3, 0.5), (6, 0.4),
                                                                                              (9, 0.3)))
    (copy / 'metrics.jsonl').write_text(lines + '{"step": 12, "validation_accuracy": 0.9}\n')  # after the checkpoint
    assert [finished_at(copy, tiny_config(cache, eval__patience=patience)) for patience in (0, 2, 3)] == [None, 9, None]
    start(copy, tiny_config(cache, eval__patience=2, train__steps=20))
    assert ('this run is finished, at step 9, because validation_accuracy has not improved for 2 evaluations. To '
            'continue, raise config.eval.patience') in log.text


def test_a_finished_run_opens_no_data_and_records_a_changed_option(whole, tmp_path, cache, monkeypatch, log):
    shutil.copytree(whole, tmp_path / 'run')
    (tmp_path / 'run' / 'checkpoints' / '12' / 'progress' / 'metadata').write_text('damaged')
    monkeypatch.setattr(loop, 'build', None)
    start(tmp_path / 'run', tiny_config(cache, checkpoint__keep_last=5))
    assert 'this run is finished, at step 12' in log.text
    assert 'changed since the run began: checkpoint.keep_last 3 -> 5' in log.text
    assert read_config(tmp_path / 'run').checkpoint.keep_last == 5


def test_a_finished_run_records_no_path_that_it_does_not_check(whole, tmp_path, cache, log):
    shutil.copytree(whole, tmp_path / 'run')
    config = tiny_config(cache, data__source='files', data__name='', data__dir='data')
    (tmp_path / 'run' / 'config.json').write_text(config.to_json())
    config.data.dir, config.checkpoint.keep_last = 'typo', 5
    start(tmp_path / 'run', config)
    assert "config.data.dir='typo' is not recorded" in log.text and 'the data is the same' not in log.text
    kept = read_config(tmp_path / 'run')
    assert (kept.data.dir, kept.checkpoint.keep_last) == ('data', 5)
    assert 'typo' not in (tmp_path / 'run' / 'changes.jsonl').read_text()


def test_fewer_steps_than_a_finished_run_has_made_are_not_recorded(whole, tmp_path, cache, log):
    shutil.copytree(whole, tmp_path / 'run')
    start(tmp_path / 'run', tiny_config(cache, train__steps=10))
    assert 'config.train.steps=10 is not recorded, because this run has made 12 steps. The run keeps 12' in log.text
    assert read_config(tmp_path / 'run').train.steps == 12 and 'learning rate' not in log.text


def test_fewer_steps_that_finish_a_run_are_recorded(copy, cache, log):
    start(copy, tiny_config(cache, train__steps=9))  # evaluates step 9, the last checkpoint
    lines = [line for line in read_metrics(copy) if 'train_loss' in line]
    assert [line['step'] for line in lines] == [5, 9]
    assert 'learning_rate' not in lines[-1], 'step 9 was made with the schedule of more steps'
    config = json.loads((copy / 'config.json').read_text())
    config['train']['steps'] = 12
    (copy / 'config.json').write_text(json.dumps(config))
    log.clear()
    start(copy, tiny_config(cache, train__steps=6))
    assert 'this run is finished, at step 9' in log.text and 'because' not in log.text
    assert read_config(copy).train.steps == 6


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('interrupted', [False, True], ids=['at once', 'after an interrupted evaluation'])
def test_the_last_step_of_a_training_that_stops_early_is_logged(copy, cache, monkeypatch, interrupted):
    config = tiny_config(cache, train__steps=20, train__log_every=50, eval__every=11, checkpoint__every=50,
                         eval__patience=1)
    if interrupted:
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(loop, 'evaluate_saved', lambda *_: sys.exit(75))
            start(copy, config)
    monkeypatch.setattr(loop, 'judge', lambda progress, *_: dataclasses.replace(progress, stopped=True))
    start(copy, config)
    trained, evaluated = read_metrics(copy)[-2:]
    assert trained['step'] == evaluated['step'] == 11 == steps(copy)[-1] and 'learning_rate' in trained
    assert 'train_loss' in trained and 'validation_loss' in evaluated, 'the evaluation ends the training, so it is last'
    assert read_progress(copy / 'checkpoints' / '11')['progress']['sums'] is None, 'they are logged once'


@pytest.mark.slow
def test_more_steps_continue_a_finished_run(whole, tmp_path, cache, log):
    shutil.copytree(whole, tmp_path / 'run')
    start(tmp_path / 'run', tiny_config(cache, train__steps=13))
    assert 'resuming from step 12' in log.text and steps(tmp_path / 'run')[-1] == 13


def test_a_run_that_gets_fewer_steps_than_it_has_made_is_evaluated_and_finished(copy, cache, log):
    config = tiny_config(cache, train__steps=6)
    start(copy, config)
    assert 'this run is finished, at step 9' in log.text and finished_at(copy, config) == 9


@pytest.mark.slow
@pytest.mark.parametrize('change, status, message', [
    ({}, 0, 'this run is finished, at step 12'), ({'model__d_ff': 64}, 2, 'model.d_ff: 32 in the run, 64 now')])
def test_train_py_imports_little_to_report_a_finished_run(whole, cache, change, status, message, monkeypatch):
    monkeypatch.setenv('PYTHONPROFILEIMPORTTIME', '1')
    arguments = script_arguments(whole, tiny_config(cache, **change))[1:]
    done = script(*arguments)
    assert done.returncode == status and message in done.stderr.decode(), done.stderr.decode()[-2000:]
    imported = {line.rpartition('|')[2].strip() for line in done.stderr.decode().splitlines() if '|' in line}
    assert 'run_directory.workdir' in imported
    assert not imported & {'training.loop', 'input_pipeline.problems', 'matplotlib', 'grain', 'tensorboardX'}
