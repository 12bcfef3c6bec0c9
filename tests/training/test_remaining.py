"""The remaining time is estimated from measured steps and evaluations, without compiling."""

import contextlib
import logging
import re
import sys

import pytest

from tests.tiny_run import log, start, tiny_config  # noqa: F401 (fixtures)
from training import remaining
from training.remaining import ProgressBar, RemainingTime


@pytest.fixture
def clock(monkeypatch):
    """A list with the time."""
    now = [100.0]
    monkeypatch.setattr(remaining.time, 'perf_counter', lambda: now[0])
    return now


def test_steps_and_evaluations_are_measured_and_compilations_are_not(clock, cache, log):
    time = RemainingTime(tiny_config(cache, train__steps=100, eval__every=40))
    clock[0] += 50  # compiling, before the first step
    assert time.seconds_after(1) is None
    time.restart()
    for step in range(2, 10):
        clock[0] += 2
        time.step_done()
        assert time.seconds_after(step) == pytest.approx(2 * (100 - step))
    clock[0] += 70  # another compilation, which hides a step
    time.restart()
    for step in range(10, 12):
        assert '2 s per step' not in log.text
        clock[0] += 2
        time.step_done()
        assert time.seconds_after(step) == pytest.approx(2 * (100 - step))
    assert '2 s per step: about 3 min remaining (89 steps, without evaluations)' in log.text
    with time.evaluation():
        clock[0] += 30
    time.restart()
    # After step 40 only the evaluations of steps 80 and 100 remain.
    assert [time.seconds_after(step) for step in (40, 41, 100)] == pytest.approx([2 * 60 + 90, 2 * 59 + 60, 30])
    clock[0] += 10 * 4
    for _ in range(10):
        time.step_done()
    assert time.seconds_after(50) == pytest.approx(50 * 3 + 60), 'slower steps correct the estimate'


@pytest.mark.slow
def test_a_training_reports_an_estimate_once_it_has_measured_steps(tmp_path, cache, log, monkeypatch):
    shown = []
    monkeypatch.setattr(ProgressBar, 'show_step', lambda self, seconds: shown.append(seconds))
    start(tmp_path / 'run', tiny_config(cache, train__steps=20, eval__every=10))
    before, _, after = log.text.partition('compilation 1')
    assert 'training: 20 steps' in before and not re.search(r'perhaps|about', before)
    assert len(re.findall(r'[\d.e-]+ s per step: about \d+ s remaining \(\d+ steps', after)) == 1
    assert shown[0] is None and all(seconds > 0 for seconds in shown[2:]) and len(shown) == 20


def test_the_bar_shows_the_estimate(capsys):
    with remaining.show_bar(0, 10) as bar:
        assert 'remaining ?' in str(bar)
        bar.show_step(200.0)
        assert '1/10' in str(bar) and 'remaining 3 min' in str(bar)


def test_a_stderr_that_cannot_be_written_does_not_end_a_training(monkeypatch):
    with open('/dev/full', 'w', buffering=1) as full:
        monkeypatch.setattr(sys, 'stderr', full)
        with remaining.show_bar(0, 10) as bar:
            assert bar.fp == sys.stderr, 'tqdm removes the bar before a line of the log'
            bar.set_postfix(loss='1.0')
            bar.show_step(200.0)
            bar.refresh()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.parametrize('name', ['', 'allyouneed'], ids=['root', 'allyouneed'])
def test_a_line_of_the_log_appears_once_whichever_logger_prints_it(name, capsys):
    logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        with remaining.show_bar(0, 10):
            logging.getLogger('allyouneed.train').warning('a line')
    finally:
        logger.removeHandler(handler)
    assert capsys.readouterr().err.count('a line') == 1
