"""Tests training with several processes and faults.

    python -m benchmarks.processes [--cells=REGEX] [--folder=FOLDER] [--again]

Trains a tiny vision Transformer with train.py on CPU devices, and prints a Markdown table with 12 rows, 8 columns and
96 cells. A row is a mode of the mesh, a number of processes and a number of devices per process. A column is a fault. A
cell is `ok`, `refused` or `FAILED`. `refused` means that train.py exited with status 2 before it logged a step. The
message of train.py, or the reason for a failure, is below the table.

The columns:

    train    a run without a fault
    save     a run without a fault, with a checkpoint every 10 steps; one process then opens every checkpoint
    resume   trains half of the steps, and then the other half with the mode and the processes of another row
    kill     one process gets SIGKILL while it saves; then the same command runs again
    stop     each process gets SIGTERM, in different steps; then the same command runs again
    damage   trains half of the steps; then the newest checkpoint is damaged for one process, and training continues.
             In the modes fsdp and tensor, the files that this process wrote are deleted. In the modes data and pmap,
             this process does not see the newest checkpoint, as on a network file system with delay.
    late     one process starts 60 s after the others
    cache    a second run, with a warm compilation cache. Without the program in the cache, one process would compile
             for 40 s. But the other processes wait for only 30 s in a collective operation.

In rows with two devices per process, the process with the fault is process 0. In other rows, it is the last process.

A cell is ok if

    each exit status is the status that a launcher needs: 0 at the end, 75 after a stop or if another process is lost;
    while processes run, a log or the metrics file grows at least every 60 s (plus the delays that the fault adds);
    at each save, all processes that hold the same part of the state hold the same bits;
    all checkpoints and losses agree with a run of one process and one device without a fault: parameters to 1e-5,
      losses to 1e-4.

FOLDER/cells.json contains the results. A second call runs only the missing cells. With --again, it runs all cells that
--cells selects. The runs and logs of cells that are not ok are kept in FOLDER. A cell took 20 to 75 s on two cores that
other programs used as well, and a cell of `late` took 90 s (24 November 2026).
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from command_line import run_script
from run_directory.checkpoints import open_checkpoints
from run_directory.records import saved_steps
from runtime.errors import UserError
from runtime.files import expanded, read_json, write_text
from runtime.stopping import STOPPED

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 40, 10  # the steps of a run, and the steps between checkpoints
SILENCE, LATE, SLOW = 60, 60, 40  # seconds
MODES = {'jit data': 'data=-1', 'jit fsdp': 'data=1 fsdp=-1', 'jit tensor': 'data=1 tensor=-1',
         'pmap': 'data=-1 mode=pmap'}
OPTIONS = ('model.num_layers=1 model.d_model=24 model.d_ff=48 model.num_heads=6 model.dropout=0 optimizer.warmup=20 '
           'optimizer.schedule=inverse_sqrt batch.rows=48 train.log_every=5 eval.every=20 checkpoint.keep_last=99')
# Each program runs only a few times, so an optimised compilation would take more time than it saves.
XLA = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'


class Failed(Exception):
    """Raised if a cell of the table is FAILED. The message is the reason."""


class Refused(Exception):
    """Raised if a cell of the table is refused. The message is the message of train.py."""


class Row(NamedTuple):
    """A row of the table: a mode, a number of processes, and a number of devices per process."""
    mode: str
    processes: int
    devices: int

    def __str__(self) -> str:
        return f'{self.mode} {self.processes}x{self.devices}'

    @property
    def victim(self) -> int:
        return 0 if self.devices > 1 else self.processes - 1


ROWS = [Row(mode, *shape) for mode in MODES for shape in ((2, 1), (2, 2), (3, 1))]
ALONE = Row('jit data', 1, 1)


class Cell:
    """A cell of the table. Its methods start trainings with a fault, and compare the results with the reference run."""

    def __init__(self, row: Row, folder: Path, cache: Path):
        self.row, self.folder, self._cache, self._starts = row, folder, cache, 0
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def start(self, row: Row | None = None, *, run: str = 'run', steps: int = STEPS, every: int = EVERY,
              late: int = 0, cache: Path | None = None, expected: Sequence[int] = (), victim: int | None = None,
              **fault: int) -> None:
        """Starts train.py in several processes, and waits until all processes have ended.

        Args:
          row: the mode, the processes and the devices; by default the row of the cell.
          run: the name of the run directory.
          steps: the number of training steps.
          every: the number of steps between checkpoints.
          late: the number of seconds by which process row.victim starts later than the other processes. With 0, all
            processes start together.
          cache: the folder of the compilation cache.
          expected: the expected exit status of each process; () means the status 0 for every process.
          victim: the process with the fault; None means every process.
          **fault: a fault of benchmarks/faulty_train.py.

        Raises:
          Refused: if this is the first start of the cell and train.py exits with status 2 before it logs a step.
          Failed: if an exit status differs from `expected`, if no log or metrics file grows for too long, or if two
            processes save different bits of the same part of the state.
        """
        row, port, self._starts = row or self.row, free_port(), self._starts + 1
        allowed = SILENCE + late + fault.get('slow_compile', 0)
        name = f'{run}.{self._starts}'
        logs = [self.folder / f'{name}.{number}.log' for number in range(row.processes)]
        environment = os.environ | {
            'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(row.devices), 'GLIBC_TUNABLES': '', 'XLA_FLAGS': XLA,
            'JAX_COMPILATION_CACHE_DIR': str(cache or self._cache)}
        options = f'{OPTIONS} train.steps={steps} checkpoint.every={every} ' + ' '.join(
            f'parallel.{size}' for size in MODES[row.mode].split())
        processes: dict[int, subprocess.Popen] = {}

        def begin(number: int) -> None:
            own_fault = fault if victim in (None, number) else {}
            if 'signal_at' in own_fault:
                own_fault = {'signal_at': own_fault['signal_at'] + number}
            job = [f'--coordinator_address=localhost:{port}', f'--num_processes={row.processes}',
                   f'--process_id={number}'] if row.processes > 1 else []
            with logs[number].open('w') as log:
                processes[number] = subprocess.Popen(
                    [sys.executable, ROOT / 'benchmarks' / 'faulty_train.py', json.dumps(own_fault),
                     self.folder / f'{name}.{number}.shards', '--config=configs/digits_vit.py',
                     f'--workdir={self.folder / run}', f'--config.cache_dir={self._cache}',
                     *(f'--config.{option}' for option in options.split()), *job],
                    cwd=ROOT, stdout=log, stderr=log, env=environment, start_new_session=True)

        with killed_at_the_end(processes):
            for number in range(row.processes):
                if not late or number != row.victim:
                    begin(number)
            began = time.monotonic()
            if late:
                time.sleep(late)
                begin(row.victim)
            last_log, size = time.monotonic(), 0
            while any(process.poll() is None for process in processes.values()):
                time.sleep(0.05)
                written = sum(path.stat().st_size for path in (*logs, self.folder / run / 'metrics.jsonl')
                              if path.exists())
                if written != size:
                    last_log, size = time.monotonic(), written
                if time.monotonic() - last_log > allowed:
                    raise Failed(f'start {self._starts}: no log grew for {allowed} s; the exit statuses are '
                                 f'{[processes[number].poll() for number in sorted(processes)]}')
        self._judge([processes[number].returncode for number in range(row.processes)],
                    list(expected) or [0] * row.processes, logs, time.monotonic() - began)
        self._same_bits(name)

    def _judge(self, statuses: list[int], expected: list[int], logs: Sequence[Path], seconds: float) -> None:
        """Raises Refused or Failed if the exit status of a process differs from `expected`."""
        if statuses == expected:
            return
        wrong = next(number for number, status in enumerate(statuses) if status != expected[number])
        last = ([line for line in logs[wrong].read_text(errors='replace').splitlines() if line.strip()] or [''])[-1]
        logged = any(path.stat().st_size for path in self.folder.glob('*/metrics.jsonl'))
        if self._starts == 1 and not logged and statuses[0] == 2 and set(statuses) <= {2, STOPPED}:
            raise Refused(last)
        raise Failed(f'start {self._starts}, after {seconds:.0f} s: the exit statuses are {statuses}, not {expected}. '
                     f'Process {wrong}: {last[:300]}')

    def _same_bits(self, name: str) -> None:
        """Raises Failed if two processes have saved different bits of the same part of the state."""
        parts: dict[tuple[int, str], str] = {}
        for path in sorted(self.folder.glob(f'{name}.*.shards')):
            for line in map(json.loads, path.read_text().splitlines()):
                for part, digest in line['shards'].items():
                    if parts.setdefault((line['step'], part), digest) != digest:
                        raise Failed(f'start {self._starts}: the processes have saved different bits of {part} at step '
                                     f'{line["step"]}')

    def compare(self, reference: Path, run: str = 'run', steps: Sequence[int] = range(EVERY, STEPS + 1, EVERY)) -> None:
        """Raises Failed if a checkpoint of `steps` or a loss differs from the reference run of a single process."""
        saved = saved_steps(self.folder / run)
        if missing := set(steps) - set(saved):
            raise Failed(f'the checkpoints of steps {sorted(missing)} are missing. Steps with a checkpoint: {saved}')
        for step in steps:
            pairs = zip(parameters(self.folder / run, step), parameters(reference, step), strict=True)
            largest = np.max([np.abs(saved - expected).max() for saved, expected in pairs])
            if not largest <= 1e-5:  # NaN also fails
                raise Failed(f'parameters of step {step} differ from the reference run by {largest:.1e}')
        measured, expected = losses(self.folder / run), losses(reference)
        if [key for key, _ in measured] != [key for key, _ in expected]:
            raise Failed(f'the lines of metrics.jsonl differ from the reference run: {[key for key, _ in measured]}')
        largest = np.max([abs(loss - right) for (_, loss), (_, right) in zip(measured, expected, strict=True)])
        if not largest <= 1e-4:
            raise Failed(f'losses differ from the reference run by {largest:.1e}')


@contextlib.contextmanager
def killed_at_the_end(processes: Mapping[int, subprocess.Popen]) -> Iterator[None]:
    """Runs the body. Afterwards, kills the processes that are still running."""
    try:
        yield
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Returns a port that Linux gives to no outgoing connection, so that the port is still free when it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(('', port))
            return port


def parameters(run: Path, step: int) -> list[np.ndarray]:
    with open_checkpoints(run) as checkpoints:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(checkpoints.parameters(str(step))[0])]


def losses(run: Path) -> list[tuple[tuple[int, str], float]]:
    lines = map(json.loads, (run / 'metrics.jsonl').read_text().splitlines())
    return [((line['step'], name), line[name]) for line in lines for name in ('train_loss', 'validation_loss')
            if name in line]


def train(cell: Cell, reference: Path) -> None:
    cell.start(every=STEPS)
    cell.compare(reference, steps=[STEPS])


def save(cell: Cell, reference: Path) -> None:
    cell.start()
    cell.compare(reference)


def resume(cell: Cell, reference: Path) -> None:
    cell.start(steps=STEPS // 2)
    # The row that is 5 rows later in ROWS has another mode, and another number of processes or devices.
    cell.start(ROWS[(ROWS.index(cell.row) + 5) % len(ROWS)])
    cell.compare(reference)


def kill(cell: Cell, reference: Path) -> None:
    victim, expected = cell.row.victim, [STOPPED] * cell.row.processes
    expected[victim] = -signal.SIGKILL
    cell.start(expected=expected, victim=victim, kill_in_save=2 * EVERY)
    cell.start()
    cell.compare(reference)


def stop(cell: Cell, reference: Path) -> None:
    cell.start(expected=[STOPPED] * cell.row.processes, signal_at=EVERY + 3)
    if not EVERY < (last := saved_steps(cell.folder / 'run')[-1]) < STEPS:
        raise Failed(f'SIGTERM in step {EVERY + 3}: the newest checkpoint is of step {last}')
    cell.start()
    cell.compare(reference)


def damage(cell: Cell, reference: Path) -> None:
    half, victim = STEPS // 2, cell.row.victim
    cell.start(steps=half)
    own = cell.folder / 'run' / 'checkpoints' / str(half) / 'state' / f'ocdbt.process_{victim}' / 'd'
    if cell.row.mode in ('jit fsdp', 'jit tensor'):
        for path in own.iterdir():
            path.unlink()
        cell.start()
    else:
        cell.start(victim=victim, hide=half)
    cell.compare(reference, steps=[half - EVERY, *range(half + EVERY, STEPS + 1, EVERY)])


def late(cell: Cell, reference: Path) -> None:
    cell.start(late=LATE)
    cell.compare(reference)


def cache(cell: Cell, reference: Path) -> None:
    cell.start(run='cold', cache=cell.folder / 'xla')
    cell.start(cache=cell.folder / 'xla', victim=cell.row.processes - 1, slow_compile=SLOW)
    cell.compare(reference)


COLUMNS: dict[str, Callable[[Cell, Path], None]] = {
    function.__name__: function for function in (train, save, resume, kill, stop, damage, late, cache)}


def run_cell(row: Row, column: str, folder: Path, reference: Path) -> dict[str, Any]:
    """Runs a cell of the table. Returns {'outcome': ..., 'reason': ..., 'seconds': ...}."""
    began = time.monotonic()
    cell = Cell(row, folder / f'{row} {column}'.replace(' ', '-'), folder / 'cache')
    try:
        COLUMNS[column](cell, reference)
        outcome, reason = 'ok', ''
        shutil.rmtree(cell.folder)
    except Refused as refusal:
        outcome, reason = 'refused', str(refusal)
    except (Failed, UserError, OSError) as error:
        outcome, reason = 'FAILED', str(error)
    return {'outcome': outcome, 'reason': reason, 'seconds': round(time.monotonic() - began, 1)}


def table(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table in Markdown, and the reasons as a list below it."""
    lines = ['| ' + ' | '.join(('mode, processes x devices', *COLUMNS)) + ' |', '| --- ' * (len(COLUMNS) + 1) + '|']
    for row in ROWS:
        outcomes = (cells.get(f'{row} {column}', {}).get('outcome', '') for column in COLUMNS)
        lines.append('| ' + ' | '.join((str(row), *outcomes)) + ' |')
    reasons = [f'- {name}, {cell["outcome"]}: {cell["reason"]}' for name, cell in cells.items() if cell['reason']]
    return '\n'.join([*lines, *([''] if reasons else []), *reasons])


def main() -> None:
    jax.config.update('jax_platforms', 'cpu')
    folder = expanded(FOLDER.value).absolute()
    results, reference = folder / 'cells.json', folder / 'reference'
    cells = read_json(results, 'Delete the file, or use another --folder') if results.exists() else {}
    try:
        selected = [(row, column) for row in ROWS for column in COLUMNS if re.search(CELLS.value, f'{row} {column}')]
    except re.error as error:
        raise UserError(f'--cells={CELLS.value} is not a regular expression: {error}. Use for example '
                        f'--cells="{ROWS[0]}"') from None
    if not selected:
        raise UserError(f'--cells={CELLS.value} selects no cell. Cells have names such as "{ROWS[0]} train"')
    if not reference.exists():
        alone = Cell(ALONE, folder / 'alone', folder / 'cache')
        alone.start()
        (alone.folder / 'run').rename(reference)
    for row, column in selected:
        name = f'{row} {column}'
        if AGAIN.value or name not in cells:
            cells[name] = run_cell(row, column, folder, reference)
            write_text(results, json.dumps(cells, indent=2) + '\n')
            print(f'{name}: {cells[name]["outcome"]} ({cells[name]["seconds"]} s) {cells[name]["reason"]}',
                  file=sys.stderr, flush=True)
    print(table(cells))


if __name__ == '__main__':
    CELLS = flags.DEFINE_string('cells', '', 'Run only cells whose name contains a match of this regular expression.')
    FOLDER = flags.DEFINE_string('folder', 'build/processes', 'The folder of results, reference run and failed runs.')
    AGAIN = flags.DEFINE_bool('again', False, 'Also run the selected cells that already have a result.')
    run_script(main)
