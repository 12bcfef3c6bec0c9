"""Trains a recipe many times, over a grid of options, and prints a table of the results.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/positions.py --workdir=sweeps/positions --jobs=2
    python sweep.py --workdir=sweeps/positions --report    # prints the results so far

--config.X=... sets an option in every run, unless the sweep sets the option. A run consists of two commands, train.py
and decode.py --split=... . --dry_run prints the commands. With --workdir=DIR, the run NAME has the run directory
DIR/NAME and the log DIR/logs/NAME.log. The same command, started again, skips finished runs and resumes interrupted
runs. The report is printed and written to DIR as report.md, report.csv, curves.png and varied.png.

With CUDA_VISIBLE_DEVICES=0,1,2,3 and --jobs=4, each run uses one GPU. Without this variable, every run uses all GPUs.
"""

import functools
import logging
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from analysis.compare import LOGS, METRIC_NAMES, SWEEP, is_metric, load_runs, recorded_sweep
from analysis.sweep_report import split_of_report, write_report
from analysis.sweeping import SweepProgress, check_data, claim_directory, logged_regularly, planned_runs, read_sweep
from command_line import flag_files_explained, run_script
from configs.allowed import Between
from configs.checks import config_from
from configs.options import flatten
from configs.sweeps import Overrides
from configs.tasks import METRICS, TASKS
from run_directory.records import EVALUATED
from runtime.errors import UserError, did_you_mean
from runtime.files import expanded
from runtime.locks import lock_directory
from runtime.stopping import SAME_REQUEST, STOPPED

if TYPE_CHECKING:  # the import of submitit is slow, and --help does not need it
    from runtime.executors import Executor, Job

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
GRID = flags.DEFINE_string('sweep', None, 'The grid: a file of configs/sweeps/ or another file in this format.')
WORKDIR = flags.DEFINE_string('workdir', None, 'The directory of the sweep: a new one, or one to resume.')
SPLIT = flags.DEFINE_string('split', 'validation', 'Score every run on this split: train, validation, test.')
JOBS = flags.DEFINE_integer('jobs', 1, 'The number of runs at a time.')
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Only print the commands of all runs and the number of runs.')
REPORT = flags.DEFINE_bool('report', False, 'Only report the results so far. Needs only --workdir.')
METRIC = flags.DEFINE_string('metric', None, 'The metric of the plots, such as perplexity; by default '
                             'config.eval.metric.')
RETRY_FAILED = flags.DEFINE_bool('retry_failed', False, 'Run failed runs again.')
EXECUTOR = flags.DEFINE_enum('executor', 'local', ['local', 'slurm'], 'Where runs are executed: in processes of this '
                             'machine, or as jobs of a Slurm cluster.')
PARTITION = flags.DEFINE_string('partition', None, "slurm: the partition; by default the cluster's default.")
HOURS = flags.DEFINE_float('hours', 24, 'slurm: time limit of a job; a run that needs longer is queued again.')
GPUS = flags.DEFINE_integer('gpus', 1, 'slurm: devices per run.')
CPUS = flags.DEFINE_integer('cpus', 4, 'slurm: processor cores per run.')
MEMORY = flags.DEFINE_integer('memory_gb', 32, 'slurm: memory per run, in GB.')

BOUNDS = ((JOBS, Between(1, 10_000)), (HOURS, Between(0.02, 10_000)), (GPUS, Between(0, 1000)),
          (CPUS, Between(1, 10_000)), (MEMORY, Between(1, 100_000)))
FOR_SLURM = PARTITION, HOURS, GPUS, CPUS, MEMORY
SCRIPTS = Path(__file__).parent
LOGGED_LINES = 10  # the number of lines at the end of a failed run's log that are logged

log = logging.getLogger('allyouneed.sweep')


def main() -> None:
    """Runs the sweep that the flags describe, and reports the results."""
    if not WORKDIR.value:
        raise UserError('--workdir is missing. Set it to a new directory, or to the directory of a sweep to resume')
    for flag, bounds in BOUNDS:
        if problem := bounds.problem(flag.value):
            raise UserError(f'--{flag.name}={flag.value} {problem}')
    for flag in FOR_SLURM:
        if flag.present and EXECUTOR.value != 'slurm':
            raise UserError(f'--{flag.name} applies only to --executor=slurm. Add --executor=slurm')
    directory = expanded(WORKDIR.value)
    if REPORT.value:
        runs = load_runs(directory)
        split = split_of_report(runs, SPLIT.value, given=bool(SPLIT.present))
        if not write_report(directory, runs, split, METRIC.value or ''):
            sys.exit(1)
        return
    from input_pipeline.splits import asked_splits
    from runtime.executors import Job

    resumes = (directory / SWEEP).exists()
    config = config_from(CONFIG_FLAG, resumes=resumes)
    recipe = config_flags.get_config_filename(flags.FLAGS['config'])
    if len(splits := asked_splits(SPLIT.value, config.data)) > 1:
        raise UserError(f'--split={SPLIT.value} consists of {len(splits)} test sets. Use one of {", ".join(splits)}')
    check_metric(config.task)
    if not GRID.value:
        raise UserError('--sweep is missing. Use for example --sweep=configs/sweeps/positions.py')
    constant = config_flags.get_override_values(flags.FLAGS['config'])
    recorded = recorded_sweep(directory)['runs'] if resumes else {}
    runs = planned_runs(GRID.value, config, read_sweep(GRID.value, config), constant, recorded)
    for option, value in constant.items():
        if all(option in overrides for overrides in runs.values()):
            log.warning('the sweep sets config.%s in every run, so --config.%s=%s has an effect only if %s reads this '
                        'option of the recipe', option, option, value, GRID.value)
    jobs = [Job(name, run_commands(recipe, directory / name, constant | overrides), directory / LOGS / f'{name}.log')
            for name, overrides in runs.items()]
    if DRY_RUN.value:
        for job in jobs:
            print('\n'.join([f'# {job.name}', *(shlex.join(['python', *command[1:]]) for command in job.commands)]))
        print(f'# {len(jobs)} runs')
        return

    executor = make_executor(directory)
    if EXECUTOR.value == 'local':  # the nodes of a cluster may have other files than this machine
        new = [overrides for name, overrides in runs.items() if name not in recorded]
        check_data(GRID.value, config, new, constant, SPLIT.value)
    claim = functools.partial(claim_directory, directory, recipe, GRID.value, flatten(config), runs)
    claim()
    waiting = (f'another sweep.py uses {directory}, or runs of a sweep.py that was killed still use it. Waiting until '
               'these processes end')
    # Runs inherit the lock. Therefore, if sweep.py is killed, the directory is locked until its last run ends.
    with lock_directory(directory, f'{LOGS}/lock', 'sweeps', waiting=waiting, inheritable=True):
        claim()  # another sweep.py that started at the same time may have claimed the directory for other runs
        run_and_report(directory, jobs, executor)


def check_metric(task_name: str) -> None:
    """Raises UserError if --metric is misspelled, or runs of the task do not have this metric."""
    metric, task = METRIC.value or '', TASKS[task_name]
    if metric and not is_metric(metric):
        near = did_you_mean(metric, METRIC_NAMES)
        raise UserError(f'--metric={metric}: there is no such metric'
                        f'{near or ". Use for example " + ", ".join(task.metrics)}')
    name = metric.removeprefix('train_').removeprefix(EVALUATED)
    if name in METRICS and name not in (*task.metrics, *task.scores):
        raise UserError(f'--metric={metric}: runs of task={task_name} do not have this metric. Use for example '
                        f'{", ".join(task.metrics)}')


def run_and_report(directory: Path, jobs: 'Sequence[Job]', executor: 'Executor') -> None:
    """Runs the jobs that are not finished, and reports the results.

    A job that failed and was then finished by hand counts as finished. Exits with status 1 if a job has failed or has
    found the disk full, otherwise with status 75 if a job was interrupted, otherwise with status 1 if no run has
    --metric.
    """
    from runtime.executors import FULL, STOPPED_BY_SIGNAL

    runs = load_runs(directory)
    finished = {run.name for run in runs if run.finished_on(SPLIT.value)}
    failed = {job.name for job in jobs if job.failure.exists()} - finished if not RETRY_FAILED.value else set()
    remaining = [job for job in jobs if job.name not in finished | failed]
    log.info('%d runs: %d finished, %d failed before, %d remaining, at most %d at a time',
             len(jobs), len(finished), len(failed), len(remaining), JOBS.value)
    progress = SweepProgress(runs, finished | failed, SPLIT.value, METRIC.value)
    statuses = run_jobs(executor, remaining, progress, len(jobs))
    full = [name for name, status in statuses.items() if status == FULL]
    interrupted = [name for name, status in statuses.items() if status in STOPPED_BY_SIGNAL]
    if failures := [job.name for job in jobs if job.failure.exists() and job.name not in finished]:
        log.error('%d runs failed: %s. To run them again, add --retry_failed', len(failures), ' '.join(failures))
    if full:
        log.error('%d runs stopped because the disk is full: %s. Free some space, then run the same command again to '
                  'resume them', len(full), ' '.join(full))
    if interrupted:
        log.error('%d runs were interrupted: %s. Run the same command again to resume them',
                  len(interrupted), ' '.join(interrupted))
    has_metric = write_report(directory, load_runs(directory), SPLIT.value, METRIC.value or '')
    if failures or full or not (has_metric or interrupted):
        sys.exit(1)
    if interrupted:
        sys.exit(STOPPED)


def make_executor(directory: Path) -> 'Executor':
    """Returns the executor that --executor selects, with the options of its flags."""
    from runtime.executors import Local, Slurm

    if EXECUTOR.value == 'local':
        return Local(JOBS.value)
    # Since Slurm 22.05, srun does not use the --cpus-per-task of sbatch.
    return Slurm(directory / LOGS / 'slurm', slurm_array_parallelism=JOBS.value, slurm_partition=PARTITION.value,
                 timeout_min=round(60 * HOURS.value), gpus_per_node=GPUS.value, cpus_per_task=CPUS.value,
                 slurm_srun_args=[f'--cpus-per-task={CPUS.value}'], mem_gb=MEMORY.value)


def run_commands(recipe: str, workdir: Path, overrides: Overrides) -> list[list[str]]:
    """Returns the commands of a run, train.py and decode.py, with their arguments."""
    train, decode = ([sys.executable, os.path.relpath(SCRIPTS / name)] for name in ('train.py', 'decode.py'))
    return [[*train, f'--config={recipe}', f'--workdir={workdir}',
             *(f'--config.{option}={value}' for option, value in overrides.items())],
            [*decode, f'--workdir={workdir}', f'--split={SPLIT.value}']]


def run_jobs(executor: 'Executor', jobs: 'Sequence[Job]', progress: SweepProgress, total: int) -> dict[str, int]:
    """Runs jobs, and logs the progress and the result of each job.

    On Ctrl-C, a signal or an error, all runs save and stop. A further signal while they save kills them. Signals that
    arrive less than SAME_REQUEST seconds after the last signal with an effect are ignored, as in train.py.

    Returns {name of the job: status}.
    """
    from runtime.executors import FULL, STOPPED_BY_SIGNAL

    statuses = {}

    # Under nohup, SIGHUP is ignored, so the sweep continues when its terminal closes.
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    last = -math.inf  # the time of the last signal that was not ignored

    def interrupt(*_):
        nonlocal last
        if (now := time.monotonic()) - last >= SAME_REQUEST:
            last = now
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        signal.signal(number, interrupt)
    with logged_regularly(progress):
        try:
            for ended, (job, status) in enumerate(executor.run(jobs), total - len(jobs) + 1):
                progress.end(job.name)
                statuses[job.name] = status
                if status == 0:
                    log.info('%d of %d: %s', ended, total,
                             ', '.join(filter(None, [f'{job.name} finished', progress.scores(job.name)])))
                elif status in STOPPED_BY_SIGNAL:
                    log.info('%d of %d: run %s was interrupted. The same command resumes the run',
                             ended, total, job.name)
                elif status == FULL:
                    log.error('%d of %d: run %s stopped because the disk is full. The end of %s:\n%s', ended, total,
                              job.name, job.log, last_lines(job.log))
                else:
                    log.error('%d of %d: %s failed, %s. The end of %s:\n%s', ended, total, job.name,
                              job.failure.read_text().strip(), job.log, last_lines(job.log))
        except BaseException as error:
            executor.stop()
            if isinstance(error, KeyboardInterrupt):
                log.info('the sweep was interrupted. Run the same command again to resume it')
            raise
    return statuses


def last_lines(path: Path) -> str:
    """Returns the last lines of a log file, indented."""
    lines = path.read_text(errors='replace').splitlines() if path.exists() else []
    return '\n'.join(f'    {line}' for line in [line for line in lines if line.strip()][-LOGGED_LINES:])


if __name__ == '__main__':
    run_script(main)
