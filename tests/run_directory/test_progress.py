"""The actions that are due after a step, the effect of eval.patience, and the progress in a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs import base
from configs.tasks import goodness
from run_directory.progress import Due, Progress, due_at, judge_all


def config_of(**changes):
    """12 steps; a line of the log every 5, a checkpoint every 3, an evaluation every 4."""
    config = base.get_config()
    config.update_from_flattened_dict({
        'train.steps': 12, 'train.log_every': 5, 'checkpoint.every': 3, 'eval.every': 4,
        **{key.replace('__', '.'): value for key, value in changes.items()}})
    return config


NOTHING = Due(log=False, save=False, stop=False, evaluate=False)


def test_what_is_due_after_each_step():
    due = {step: due_at(step, config_of()) for step in range(1, 13)}
    assert [step for step in due if due[step].log] == [5, 10, 12]  # also the last step, for any log_every
    assert [step for step in due if due[step].evaluate] == [4, 8, 12]
    assert [step for step in due if due[step].save] == [3, 4, 6, 8, 9, 12]  # every step that is evaluated is saved
    assert not any(each.stop for each in due.values())
    assert due[1] == NOTHING
    early = [step for step in due if due_at(step, config_of(eval__patience=1)).log]
    assert early == [4, 5, 8, 10, 12]  # also the steps whose evaluation may end the training


@pytest.mark.parametrize('step', [1, 4, 5, 12])
def test_a_stop_is_due_after_any_step_and_schedules_no_checkpoint(step):
    usual = due_at(step, config_of())
    assert due_at(step, config_of(), stop_requested=True) == usual._replace(stop=True)


@pytest.mark.parametrize('every, minutes, save', [(0.0, 1e9, False), (2.0, 1.9, False), (2.0, 2.0, True)])
def test_a_checkpoint_is_due_after_so_many_minutes(every, minutes, save):
    assert due_at(1, config_of(checkpoint__every_minutes=every), minutes=minutes) == NOTHING._replace(save=save)


def test_the_last_step_is_always_saved_and_evaluated():
    seldom = config_of(train__log_every=1000, checkpoint__every=1000, eval__every=1000)
    assert [due_at(step, seldom) for step in (11, 12)] == [NOTHING, Due(log=True, save=True, stop=False, evaluate=True)]


@pytest.mark.parametrize('metric, values, best, without_better', [
    ('loss', [3.0, 2.0, 2.0, 2.5], 2.0, 2),  # as good is not better
    ('bleu', [3.0, 2.0, 2.0, 3.5], 3.5, 0),
    ('bleu', [float('nan'), 1.0, float('nan')], 1.0, 1),
    ('loss', [float('nan'), 1.0, float('nan')], 1.0, 1),
    ('loss', [], None, 0),
])
def test_the_best_value_and_the_evaluations_since(metric, values, best, without_better):
    progress = judge_all(values, metric=metric, patience=0)
    assert (progress.best, progress.without_better, progress.stopped) == (best, without_better, False)


def test_patience_ends_after_so_many_evaluations_without_a_better_one():
    values = [5.0, 4.0, 4.5, 4.4, 3.0]
    assert [judge_all(values[:count], metric='loss', patience=2).stopped for count in range(6)] == [
        False, False, False, False, True, False]


def test_nan_is_the_worst_value():
    assert goodness('loss', float('nan')) < goodness('loss', 1e30) < goodness('loss', 1.0)
    assert goodness('bleu', float('nan')) < goodness('bleu', -1e30) < goodness('bleu', 1.0)


def test_a_checkpoint_of_before_is_read_and_a_new_one_looks_the_same():
    written = {'best': 2.5, 'without_better': 1, 'stopped': False, 'skipped': 3,
               'sums': {'loss': 12.5, 'tokens': 40.0, 'others': {'nll': 11.0, 'accuracy': 9.0}, 'skipped': None},
               'seconds': 1.25}
    progress = Progress(**json.loads(json.dumps(written)))
    assert json.loads(json.dumps(progress.to_dict())) == written
    assert Progress().to_dict() == {'best': None, 'without_better': 0, 'stopped': False, 'skipped': 0, 'sums': None,
                                    'seconds': 0.0}
    assert progress.clear_sums().to_dict() == written | {'sums': None, 'seconds': 0.0}


def test_it_needs_no_jax():
    code = 'import sys, run_directory.progress; assert "jax" not in sys.modules'
    assert subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parents[2]).returncode == 0
