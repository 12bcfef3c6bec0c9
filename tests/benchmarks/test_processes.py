"""The table of faults of many processes: what makes a cell ok, refused or FAILED."""

import json
import signal

import numpy as np
import pytest

from benchmarks import processes
from benchmarks.processes import ALONE, COLUMNS, ROWS, Cell, Failed, Refused, Row, run_cell, table
from tests.benchmarks.test_benchmarks import command

ROW = Row('jit data', 2, 1)


@pytest.fixture
def cell(tmp_path):
    found = Cell(ROW, tmp_path / 'cell', tmp_path / 'cache')
    found._starts = 1
    return found


def logs(cell, *last):
    paths = [cell.folder / f'{number}.log' for number in range(len(last))]
    for path, line in zip(paths, last, strict=True):
        path.write_text(f'model: patches\n{line}\n\n')
    return paths


def test_the_table_has_96_cells_and_the_reasons_below_it():
    assert len(ROWS) * len(COLUMNS) == 96
    text = table({'jit data 2x1 train': {'outcome': 'ok', 'reason': ''},
                  'pmap 3x1 kill': {'outcome': 'FAILED', 'reason': 'no log grew for 60 s'}})
    lines = text.splitlines()
    assert lines[2].startswith('| jit data 2x1 | ok |  |') and len(lines[2].split('|')) == len(COLUMNS) + 3
    assert lines[13].startswith('| pmap 3x1 |  |  |  | FAILED |')
    assert lines[14:] == ['', '- pmap 3x1 kill, FAILED: no log grew for 60 s']


def test_a_resumed_run_has_another_mode_and_other_processes():
    for number, row in enumerate(ROWS):
        other = ROWS[(number + 5) % len(ROWS)]
        assert other.mode != row.mode and (other.processes, other.devices) != (row.processes, row.devices)


def test_statuses_that_a_launcher_would_misread_fail(cell):
    both = logs(cell, 'error: --workdir is missing', 'process 1 on host: another process of this job is lost')
    cell._judge([0, 0], [0, 0], both, 1)
    cell._judge([75, -signal.SIGKILL], [75, -signal.SIGKILL], both, 1)
    with pytest.raises(Refused, match='^error: --workdir is missing$'):
        cell._judge([2, 75], [0, 0], both, 1)
    with pytest.raises(Failed, match=r'statuses are \[0, 75\], not \[0, 0\]. Process 1: .* is lost$'):
        cell._judge([0, 75], [0, 0], both, 1)
    with pytest.raises(Failed, match=r'\[2, -9\], not \[75, -9\]'):
        cell._judge([2, -9], [75, -9], both, 1)
    metrics = cell.folder / 'run' / 'metrics.jsonl'
    metrics.parent.mkdir()
    metrics.touch()  # train.py writes this file before the first step
    with pytest.raises(Refused):
        cell._judge([2, 2], [0, 0], both, 1)
    metrics.write_text('{"step": 5}\n')
    with pytest.raises(Failed):
        cell._judge([2, 2], [0, 0], both, 1)
    metrics.unlink()
    cell._starts = 2  # of a run that exists, status 2 is no refusal
    with pytest.raises(Failed):
        cell._judge([2, 2], [0, 0], both, 1)


def test_processes_that_hold_different_bits_fail(cell):
    def saved(number, digest):
        line = {'step': 10, 'shards': {"['kernel'] (0:4)": digest, f"['bias'] ({number})": str(number)}}
        (cell.folder / f'run.1.{number}.shards').write_text(json.dumps(line) + '\n')

    saved(0, 'a')
    saved(1, 'a')
    cell._same_bits('run.1')
    saved(1, 'b')
    with pytest.raises(Failed, match=r"the processes have saved different bits of \['kernel'\] \(0:4\) at step 10"):
        cell._same_bits('run.1')


def test_other_parameters_losses_and_steps_than_those_of_one_process_fail(cell, tmp_path, monkeypatch):
    values, lines = {'run': [np.ones(3)], 'reference': [np.ones(3)]}, [{'step': 10, 'train_loss': 1.0}]
    monkeypatch.setattr(processes, 'parameters', lambda run, step: values[run.name])
    reference = tmp_path / 'reference'
    for run in (cell.folder / 'run', reference):
        (run / 'checkpoints' / '10').mkdir(parents=True)
        (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    cell.compare(reference, steps=[10])
    with pytest.raises(Failed, match=r'steps \[20\] are missing. Steps with a checkpoint: \[10\]'):
        cell.compare(reference, steps=[10, 20])
    (cell.folder / 'run' / 'metrics.jsonl').write_text(2 * (json.dumps(lines[0]) + '\n'))
    with pytest.raises(Failed, match='the lines of metrics.jsonl differ'):
        cell.compare(reference, steps=[10])
    (cell.folder / 'run' / 'metrics.jsonl').write_text(json.dumps(lines[0] | {'train_loss': 1.01}) + '\n')
    with pytest.raises(Failed, match='losses differ from the reference run by 1.0e-02'):
        cell.compare(reference, steps=[10])
    values['run'] = [np.array([1, 1, 1.001])]
    with pytest.raises(Failed, match='parameters of step 10 differ from the reference run by 1.0e-03'):
        cell.compare(reference, steps=[10])
    values['run'] = [np.array([1, 1, np.nan])]
    with pytest.raises(Failed, match='parameters of step 10 differ from the reference run by nan'):
        cell.compare(reference, steps=[10])


def test_a_pattern_that_selects_no_cell_is_refused(tmp_path):
    done = command('processes', '--cells=jit date', f'--folder={tmp_path}')
    assert done.returncode == 2 and done.stderr == (
        'error: --cells=jit date selects no cell. Cells have names such as "jit data 2x1 train"\n')


def test_a_damaged_file_of_results_is_refused(tmp_path):
    (tmp_path / 'cells.json').write_text('')
    done = command('processes', f'--folder={tmp_path}')
    assert (done.returncode, 'cells.json cannot be read' in done.stderr) == (2, True)


@pytest.mark.slow
def test_cells_that_are_run_once(tmp_path):
    """Two processes with a part of the state each agree with one process, also after SIGTERM."""
    arguments = ('--cells=jit fsdp 2x1 (save|stop)', f'--folder={tmp_path}')
    first, second = command('processes', *arguments), command('processes', *arguments)
    assert first.returncode == second.returncode == 0, first.stderr
    assert '| jit fsdp 2x1 |  | ok |  |  | ok |' in first.stdout, first.stdout
    assert second.stdout == first.stdout and second.stderr == ''
    cells = json.loads((tmp_path / 'cells.json').read_text())
    assert {name: cell['outcome'] for name, cell in cells.items()} == {
        'jit fsdp 2x1 save': 'ok', 'jit fsdp 2x1 stop': 'ok'}


@pytest.mark.slow
def test_a_run_that_differs_from_the_reference_fails(tmp_path, monkeypatch):
    """The control: the same cell, with another seed."""
    alone = Cell(ALONE, tmp_path / 'alone', tmp_path / 'cache')
    alone.start()
    monkeypatch.setattr(processes, 'OPTIONS', f'{processes.OPTIONS} seed=1')
    found = run_cell(ROW, 'train', tmp_path, alone.folder / 'run')
    assert found['outcome'] == 'FAILED' and 'differ from the reference run' in found['reason']
