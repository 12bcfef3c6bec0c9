"""Trains a recipe many times, over a grid of overrides, and ends with one table and its plots.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/positions.py --workdir=sweeps/positions --jobs=2
    python sweep.py --workdir=sweeps/positions --report    # the table as it is now

--config.X=... overrides an option in every run. A run is what you would type, train.py and then decode.py --split=...,
in DIR/NAME, with what they say in DIR/logs/NAME.log; --dry_run prints the commands. The same command again skips what
is finished and goes on with what was cut off. The report is printed, and lies in DIR: report.md, report.csv,
curves.png, varied.png.
"""
# ruff: noqa: E402 (flags come before the imports that take seconds)

from absl import flags
from ml_collections import ConfigDict, config_flags

from command_line import read_command_line, run_script

CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
GRID = flags.DEFINE_string('sweep', None, 'What to vary, a file of configs/sweeps/ or your own.')
WORKDIR = flags.DEFINE_string('workdir', None, 'The directory of the sweep: created, or gone on with.')
SPLIT = flags.DEFINE_enum('split', 'validation', ['train', 'validation', 'test'], 'Score every run on this split.')
JOBS = flags.DEFINE_integer('jobs', 1, 'Runs at a time.')
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print the runs, their commands and their number, and do nothing.')
REPORT = flags.DEFINE_bool('report', False, 'Report on what is there, and run nothing; needs no more than --workdir.')
METRIC = flags.DEFINE_string('metric', None, 'What the plots show, such as perplexity; by default config.eval.metric.')
RETRY_FAILED = flags.DEFINE_bool('retry_failed', False, 'Run again what has failed.')
EXECUTOR = flags.DEFINE_enum('executor', 'local', ['local', 'slurm'], 'Where: processes here, or jobs of a cluster.')
PARTITION = flags.DEFINE_string('partition', None, "slurm: the partition; the cluster's default if not given.")
HOURS = flags.DEFINE_float('hours', 24, 'slurm: time limit of a run.')
GPUS = flags.DEFINE_integer('gpus', 1, 'slurm: devices of a run.')
CPUS = flags.DEFINE_integer('cpus', 4, 'slurm: processor cores of a run.')
MEMORY = flags.DEFINE_integer('memory_gb', 32, 'slurm: memory of a run, GB.')

if __name__ == '__main__':
    read_command_line()  # before the imports that take seconds

import dataclasses
import fcntl
import importlib.machinery
import importlib.util
import json
import logging
import os
import queue
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

import submitit

from analysis.compare import LOGS, SWEEP, load_runs, recorded_sweep, results_table
from analysis.pictures import save_figure
from analysis.plots import plot_curves, plot_varied
from configs.checks import check_config, config_from, flatten, outside, written
from configs.sweeps import Overrides, run_names
from configs.versions import VERSION
from errors import UserError, did_you_mean, faults_in, option_like
from files import check_folder, expanded, write_text

BOUNDS = ((JOBS, 1, 10_000), (HOURS, 0.02, 10_000), (GPUS, 0, 1000), (CPUS, 1, 10_000), (MEMORY, 1, 100_000))

SCRIPTS = Path(__file__).parent
TOLD = 10  # last lines of a run that failed
CUT_OFF = 75  # exit status of train.py when it was told to stop, and saved: EX_TEMPFAIL
STOPPED = {CUT_OFF, *(sign for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for sign in (-each, 128 + each))}

log = logging.getLogger('allyouneed.sweep')


def main() -> None:
    if not WORKDIR.value:
        raise UserError('--workdir is missing: give the directory that the sweep is to be kept in')
    for flag, *bounds in BOUNDS:
        if wanted := outside(flag.value, *bounds):
            raise UserError(f'--{flag.name}={flag.value} {wanted}')
    directory = expanded(WORKDIR.value)
    if REPORT.value:
        return report(directory)
    config = config_from(CONFIG_FLAG)
    constant = flags.FLAGS['config'].override_values
    runs = planned_runs(config, read_sweep(config))
    jobs = [Job(name, run_commands(directory / name, constant | overrides), directory / LOGS / f'{name}.log')
            for name, overrides in runs.items()]
    if DRY_RUN.value:
        for job in jobs:
            print('\n'.join([f'# {job.name}', *map(as_typed, job.commands)]))
        print(f'# {len(jobs)} runs')
        return

    executor = Local(JOBS.value) if EXECUTOR.value == 'local' else Slurm(directory / LOGS / 'slurm', JOBS.value)
    claim_directory(directory, flatten(config), runs)
    lock = lock_directory(directory)  # held until all of its runs have ended  # noqa: F841
    done = {run.name for run in load_runs(directory) if run.trained and SPLIT.value in run.results}
    failed = {job.name for job in jobs if job.failure.exists()} if not RETRY_FAILED.value else set()
    to_do = [job for job in jobs if job.name not in done | failed]
    log.info('%d runs: %d finished, %d failed before, %d to do, at most %d at a time',
             len(jobs), len(done), len(failed - done), len(to_do), JOBS.value)
    run_jobs(executor, to_do, len(jobs) - len(to_do), len(jobs))
    report(directory)
    if failures := [job.name for job in jobs if job.failure.exists()]:
        log.error('%d runs failed: %s; --retry_failed runs them again', len(failures), ' '.join(failures))
        sys.exit(1)


def read_sweep(config: ConfigDict) -> list[Overrides]:
    """What the --sweep file makes of the resolved recipe.

    Raises:
      UserError: if it is missing or is no sweep.
    """
    if not GRID.value:
        raise UserError('--sweep is missing: give a grid, for example --sweep=configs/sweeps/positions.py')
    path = Path(GRID.value)
    if not path.is_file():
        there = [os.path.relpath(each) for each in (SCRIPTS / 'configs/sweeps').glob('[!_]*.py')]
        raise UserError(f'--sweep={path} does not exist{did_you_mean(str(path), there)}')
    # As source, whatever its ending: by that, importlib would take it for something else, or have no loader for it.
    loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.stem, loader))
    with faults_in(str(path)):
        loader.exec_module(module)
    if not callable(getattr(module, 'get_sweep', None)):
        raise UserError(f'--sweep={path} has no function get_sweep(config); configs/sweeps/__init__.py tells how')
    with faults_in(str(path)):
        sweep = module.get_sweep(config)
    if not (isinstance(sweep, list | tuple) and sweep and all(
            isinstance(overrides, dict) and all(isinstance(option, str) for option in overrides) for overrides in sweep)):
        raise UserError(f'--sweep={path}: get_sweep must return a list of at least one run, each a dict of overrides')
    return sweep


def planned_runs(config: ConfigDict, sweep: Sequence[Overrides]) -> dict[str, Overrides]:
    """The runs by their names, all of them possible; those that come to the same config are one.

    Raises:
      UserError: naming the run and what is wrong with it.
    """
    options, unlike = flatten(config), {}
    for overrides in sweep:
        for option in overrides.keys() - options.keys():
            raise UserError(f'--sweep={GRID.value}: the config has no option {option}{option_like(option, options)}')
        changed = config.copy_and_resolve_references()
        try:
            changed.update_from_flattened_dict(overrides)
            check_config(changed)
        except (TypeError, ValueError, UserError) as error:
            raise UserError(f'--sweep={GRID.value}, run {written(overrides)}: {error}') from None
        unlike.setdefault(repr(flatten(changed)), overrides)
    if len(unlike) < len(sweep):
        log.info('%d runs of the sweep are the same as others, and left out', len(sweep) - len(unlike))
    runs = list(unlike.values())
    return dict(zip(run_names(runs, options), runs, strict=True))


def run_commands(workdir: Path, overrides: Overrides) -> list[list[str]]:
    """What a user would type."""
    train, decode = ([sys.executable, os.path.relpath(SCRIPTS / name)] for name in ('train.py', 'decode.py'))
    return [[*train, f'--config={flags.FLAGS["config"].config_filename}', f'--workdir={workdir}',
             *(f'--config.{option}={value}' for option, value in overrides.items())],
            [*decode, f'--workdir={workdir}', f'--split={SPLIT.value}']]


def as_typed(command: Sequence[str]) -> str:
    return shlex.join(['python', *command[1:]])


def claim_directory(directory: Path, config: dict[str, Any], runs: dict[str, Overrides]) -> None:
    """Makes the directory the sweep's, or sees that it is: it may have grown, but not changed.

    Raises:
      UserError: naming what differs.
    """
    path, here = directory / SWEEP, {'version': VERSION, 'recipe': flags.FLAGS['config'].config_filename,
                                     'sweep': GRID.value, 'config': config, 'runs': runs}
    if path.exists():
        there = recorded_sweep(directory)
        changed = differences(there['config'], config) + [
            line for name, overrides in there['runs'].items()
            for line in ([f'run {name}: not in this sweep'] if name not in runs else
                         [f'run {name}: {line}' for line in differences(overrides, runs[name])])]
        if changed:
            raise UserError(f'{directory} holds another sweep. These differ:\n  ' + '\n  '.join(changed)
                            + '\nGive another --workdir, or the sweep of that directory to go on with it')
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f'--workdir={directory} holds no sweep ({SWEEP}): give a new or an empty directory')
    check_folder(directory / LOGS)
    (directory / LOGS).mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(here, indent=2) + '\n')


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    return [f'{option}: {there.get(option)!r} there, {here.get(option)!r} asked for'
            for option in sorted(there.keys() | here.keys()) if there.get(option) != here.get(option)]


def lock_directory(directory: Path) -> Any:
    """Waits until no other sweep works in the directory, nor runs that outlived theirs: the lock is theirs too."""
    file = open(directory / LOGS / 'lock', 'w')  # noqa: SIM115 (until the process ends)
    os.set_inheritable(file.fileno(), True)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning('%s is in use: by another sweep.py, or by runs that went on when theirs was killed. Waiting for '
                    'them to end', directory)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def run_jobs(executor: 'Executor', jobs: Sequence['Job'], done: int, total: int) -> None:
    """Runs what is to do and tells how each ended. Stopped by Ctrl-C or a signal, it stops the runs too, which save."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    try:
        for ended, (job, status) in enumerate(executor.run(jobs), done + 1):
            if status == 0:
                log.info('%d of %d: %s finished', ended, total, job.name)
            elif status in STOPPED:
                log.info('%d of %d: %s was cut off; start the sweep again to go on with it', ended, total, job.name)
            else:
                log.error('%d of %d: %s failed, %s. The end of %s:\n%s', ended, total, job.name,
                          job.failure.read_text().strip(), job.log, last_lines(job.log))
    except KeyboardInterrupt:
        executor.stop()
        log.info('the same command goes on from here')
        raise


def last_lines(path: Path) -> str:
    lines = path.read_text(errors='replace').splitlines() if path.exists() else []
    return '\n'.join(f'    {line}' for line in [line for line in lines if line.strip()][-TOLD:])


def report(directory: Path) -> None:
    """Prints the table, and writes it and the plots beside the runs."""
    runs = load_runs(directory)
    measured = {name for run in runs for names in (run.curves, *run.results.values()) for name in names}
    if METRIC.value and measured and not {METRIC.value, f'validation_{METRIC.value}'} & measured:
        raise UserError(f'--metric={METRIC.value}: no run has measured it{did_you_mean(METRIC.value, measured)}')
    table = results_table(runs, split=SPLIT.value)
    print(table.markdown(), end='')
    write_text(directory / 'report.csv', table.csv())
    save_figure(plot_curves(runs, METRIC.value), directory / 'curves.png')
    save_figure(plot_varied(runs, METRIC.value, SPLIT.value), directory / 'varied.png')
    write_text(
        directory / 'report.md',
        f'# {directory.resolve().name}\n\nScores of decode.py on all of the {SPLIT.value} split, with the best '
        'checkpoint of each run; the best in bold; ± is the standard deviation over seeds. The learning curves are what '
        'training found on its way, perhaps by another search and on fewer sentences, so they may put the settings '
        'into another order; above each picture stands how it was measured.\n\n'
        f'{table.markdown()}\n![Learning curves](curves.png)\n\n'
        '![The metric against what was varied](varied.png)\n')
    log.info('%s, report.csv, curves.png, varied.png', directory / 'report.md')


@dataclasses.dataclass(eq=False)
class Job:
    """The commands of a run, one after the other; called, it runs them and returns the first exit status that is not 0.

    It travels to other machines, so all that it needs is in it. `failure` is the file that says why it failed.
    """
    name: str
    commands: list[list[str]]
    log: Path
    stopping: bool = False
    process: subprocess.Popen | None = None

    @property
    def failure(self) -> Path:
        return self.log.with_suffix('.failed')

    def __call__(self, environment: dict[str, str] | None = None) -> int:
        self.failure.unlink(missing_ok=True)
        for command in self.commands:
            with open(self.log, 'a', encoding='utf-8', errors='backslashreplace') as output:
                output.write(f'$ {shlex.join(command)}\n')
                output.flush()
                if self.stopping:
                    return CUT_OFF
                # In a session of its own, so that a terminal's Ctrl-C comes to it once, through `stop`.
                # Descriptors stay open for the sake of one, the lock.
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                                env=environment, start_new_session=True, close_fds=False)
                status = self.process.wait()
            if status:
                if status not in STOPPED:
                    self.failure.write_text(f'exit status {status}' if status > 0 else f'killed by signal {-status}')
                return status
        return 0

    def stop(self) -> None:
        """Asks the process to save and end."""
        self.stopping = True
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """Ends the process at once; the run goes on from its last checkpoint."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def checkpoint(self, *arguments) -> submitit.helpers.DelayedSubmission:
        """What submitit calls before a time limit or a preemption: the job is queued again, and resumes."""
        self.stop()
        # Not process.wait(): the signal that this answers has come in the middle of it.
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(dataclasses.replace(self, stopping=False, process=None), *arguments)


class Executor(Protocol):
    """Where jobs run."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, int]]:
        """Runs all of them, and yields each with its exit status as it ends."""

    def stop(self) -> None:
        """Called when the sweep is interrupted: leaves every run so that it can go on."""


class Local:
    """Processes on this machine, so many at a time. Devices that CUDA_VISIBLE_DEVICES lists are dealt out to them."""

    def __init__(self, at_a_time: int):
        self._pool, self._jobs = futures.ThreadPoolExecutor(at_a_time), []
        devices = [name for name in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if name]
        self._shares = queue.SimpleQueue()
        for index in range(at_a_time):
            share = {'CUDA_VISIBLE_DEVICES': ','.join(devices[index::at_a_time])} if len(devices) >= at_a_time else {}
            self._shares.put(share)

    def run(self, jobs):
        self._jobs = jobs
        running = {self._pool.submit(self._run_on_share, job): job for job in jobs}
        while running:  # never asleep for long: a signal that another thread takes does not wake this one
            for future in futures.wait(running, timeout=1, return_when=futures.FIRST_COMPLETED).done:
                yield running.pop(future), future.result()

    def stop(self):
        self._pool.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            job.stop()
        try:
            self._pool.shutdown()
        except KeyboardInterrupt:  # once more: no patience for a last checkpoint
            for job in self._jobs:
                job.kill()
            raise

    def _run_on_share(self, job):
        share = self._shares.get()
        try:
            return job({**os.environ, **share})
        finally:
            self._shares.put(share)


class Slurm:
    """Jobs of a Slurm cluster, through submitit. They outlive the sweep: started again, it finds them by their ids."""

    def __init__(self, folder: Path, at_a_time: int):
        try:
            self._executor = submitit.AutoExecutor(folder, cluster='slurm')
        except RuntimeError as error:
            raise UserError(f'--executor=slurm: {error}') from None
        self._folder, self._name = folder, folder.absolute().parents[1].name
        self._executor.update_parameters(
            name=self._name, timeout_min=round(60 * HOURS.value), gpus_per_node=GPUS.value,
            cpus_per_task=CPUS.value, mem_gb=MEMORY.value, slurm_partition=PARTITION.value,
            slurm_array_parallelism=at_a_time)

    def run(self, jobs):
        waiting = {job: self._queued(job) for job in jobs}
        new = [job for job in jobs if waiting[job] is None]
        # Slurm tells all processes of a time limit, by a signal; only submitit, which calls Job.checkpoint, knows it.
        sent = [dataclasses.replace(job, commands=[['env', '--ignore-signal=USR2', *each] for each in job.commands])
                for job in new]
        with self._executor.batch():
            waiting |= {job: self._executor.submit(each) for job, each in zip(new, sent, strict=True)}
        for job in new:
            self._ticket(job).write_text(waiting[job].job_id)
        while waiting:
            for job in [job for job, submitted in waiting.items() if submitted.done()]:
                self._ticket(job).unlink()
                yield job, self._status(job, waiting.pop(job))
            time.sleep(1)

    def stop(self):
        log.info('the jobs stay in the queue: scancel --name=%s ends them', self._name)

    def _ticket(self, job):
        return self._folder / f'{job.name}.id'

    def _queued(self, job):
        """The job of an earlier sweep.py, if it is not over."""
        ticket = self._ticket(job)
        queued = submitit.SlurmJob(self._folder, ticket.read_text()) if ticket.exists() else None
        return None if queued is None or queued.done() else queued

    def _status(self, job, submitted):
        try:
            return submitted.result()
        except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError):
            if submitted.state.startswith(('CANCELLED', 'PREEMPTED', 'TIMEOUT', 'NODE_FAIL')):
                return CUT_OFF
            job.failure.write_text(f'job {submitted.job_id} ended as {submitted.state}')
            return 1


if __name__ == '__main__':
    run_script(main)
