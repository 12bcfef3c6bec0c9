"""python -m tools.show_run: the evaluations, the layout of the summary, and files that a training deletes."""

import math
import pathlib

import numpy as np
import pytest

from analysis.compare import RunRecord
from configs import base
from configs.options import flatten
from tools import show_run
from tools.show_run import describe, progress_lines, read_checkpoints, size


def test_an_evaluation_that_found_no_number_is_not_the_best():
    config = flatten(base.get_config()) | {'eval.metric': 'loss'}
    curves = {'validation_loss': [(2, math.nan), (4, 3.5), (6, 3.0), (8, 3.0)]}
    lines = list(progress_lines(RunRecord('run', pathlib.Path('run'), {}, config, curves, {})))
    assert lines[-2:] == ['validation at step 8: loss 3', 'best loss: 3 at step 6']


def test_values_begin_in_one_column_after_the_longest_heading(tmp_path, monkeypatch, capsys):
    sections = [('run', ['a', 'b']), ('validation scores', ['bleu 41.02'])]
    monkeypatch.setattr(show_run, 'load_runs', lambda folders: folders)
    monkeypatch.setattr(show_run, 'describe', lambda run: iter(sections))
    (tmp_path / 'config.json').touch()
    show_run.main(str(tmp_path))
    assert capsys.readouterr().out.splitlines() == [
        'run                a', '                   b', 'validation scores  bleu 41.02']


@pytest.mark.parametrize('entries, expected', [
    ({}, 'bleu 41'), ({'checkpoint': 'best'}, 'bleu 41 (checkpoint best)'),
    ({'checkpoint': 'average:2', 'checkpoint_steps': [4, 8]}, 'bleu 41 (checkpoint average:2, step 4, 8)')])
def test_scores_without_the_entries_of_their_checkpoint(entries, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(show_run, 'read_checkpoints', lambda workdir: ([], []))
    run = RunRecord('run', tmp_path, {}, flatten(base.get_config()), {}, {'test': {'bleu': 41.0, **entries}})
    assert dict(describe(run))['test scores'] == [expected]


def test_files_that_a_training_deletes_while_they_are_listed_do_not_count(tmp_path, monkeypatch):
    (tmp_path / 'kept').write_bytes(bytes(200_000))
    monkeypatch.setattr(show_run, 'files_in', lambda folder: [folder / 'deleted', folder / 'kept'])
    assert size(tmp_path) == '0.2 MB'


def test_if_a_training_replaces_the_newest_checkpoint_the_checkpoints_are_listed_again(tmp_path, monkeypatch):
    (tmp_path / 'checkpoints/1').mkdir(parents=True)

    def described(folder):
        if folder.parent.name == '1':
            folder.parent.rename(tmp_path / 'checkpoints/2')
            raise FileNotFoundError
        return {'params': {'head': {'kernel': np.empty((2, 3))}}}

    monkeypatch.setattr('run_directory.checkpoints.described', described)
    assert read_checkpoints(tmp_path) == ([2], ['6 parameters: head 6'])
