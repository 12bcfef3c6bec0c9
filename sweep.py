"""Trains a recipe many times, over a grid of overrides, and ends with one table and its plots.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/positions.py --workdir=sweeps/positions --jobs=2
    python sweep.py --workdir=sweeps/positions --report    # the table as it is now

--config.X=... overrides an option in every run. A run is the commands that you would type, train.py and then decode.py
--split=..., with the workdir DIR/NAME and the log DIR/logs/NAME.log; --dry_run prints them. The same command again
skips runs that are finished and resumes those that were cut off. The report is printed, and written to DIR: report.md,
report.csv, curves.png, varied.png.
"""
# ruff: noqa: E402 (flags come before the imports that take seconds)

from absl import flags
from ml_collections import ConfigDict, config_flags

from command_line import flag_files_explained, read_command_line, run_script

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
GRID = flags.DEFINE_string('sweep', None, 'What to vary, a file of configs/sweeps/ or your own.')
WORKDIR = flags.DEFINE_string('workdir', None, 'The directory of the sweep: created, or gone on with.')
SPLIT = flags.DEFINE_string('split', 'validation', 'Score every run on this split: train, validation, test.')
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

import importlib.machinery
import importlib.util
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.compare import LOGS, SWEEP, load_runs, recorded_sweep, results_table
from analysis.pictures import save_figure
from analysis.plots import plot_curves, plot_varied
from configs.allowed import Between
from configs.checks import check_config, config_from, written
from configs.options import flatten
from configs.sweeps import Overrides, run_names
from configs.versions import VERSION
from input_pipeline.splits import asked_splits
from runtime.errors import UserError, did_you_mean, faults_in, option_like
from runtime.executors import STOPPED, Executor, Job, Local, Slurm
from runtime.files import check_folder, expanded, write_text
from runtime.locks import lock_directory

BOUNDS = ((JOBS, Between(1, 10_000)), (HOURS, Between(0.02, 10_000)), (GPUS, Between(0, 1000)),
          (CPUS, Between(1, 10_000)), (MEMORY, Between(1, 100_000)))

SCRIPTS = Path(__file__).parent
TOLD = 10  # last lines of a run that failed

log = logging.getLogger('allyouneed.sweep')


def main() -> None:
    """Runs the sweep that the flags describe, and reports on it."""
    if not WORKDIR.value:
        raise UserError('--workdir is missing: give the directory that the sweep is to be kept in')
    for flag, bounds in BOUNDS:
        if wanted := bounds.problem(flag.value):
            raise UserError(f'--{flag.name}={flag.value} {wanted}')
    directory = expanded(WORKDIR.value)
    if REPORT.value:
        return report(directory)
    config = config_from(CONFIG_FLAG)
    if len(sets := asked_splits(SPLIT.value, config.data)) > 1:
        raise UserError(f'--split={SPLIT.value} would be {len(sets)} sets: give one, of {", ".join(sets)}')
    constant = config_flags.get_override_values(flags.FLAGS['config'])
    runs = planned_runs(config, read_sweep(config))
    jobs = [Job(name, run_commands(directory / name, constant | overrides), directory / LOGS / f'{name}.log')
            for name, overrides in runs.items()]
    if DRY_RUN.value:
        for job in jobs:
            print('\n'.join([f'# {job.name}', *map(as_typed, job.commands)]))
        print(f'# {len(jobs)} runs')
        return

    executor = make_executor(directory)
    claim_directory(directory, flatten(config), runs)
    busy = (f'{directory} is in use: by another sweep.py, or by runs that went on when theirs was killed. Waiting for '
            'them to end')
    # Runs inherit the lock, so that a killed sweep keeps the directory until the last of its runs ends.
    with lock_directory(directory, f'{LOGS}/lock', 'sweeps', waiting=busy, inheritable=True):
        run_and_report(directory, jobs, executor)


def run_and_report(directory: Path, jobs: Sequence[Job], executor: Executor) -> None:
    """Runs the jobs that are left to do. The exit status is 1 if any has failed."""
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


def make_executor(directory: Path) -> Executor:
    """The executor that the flags ask for."""
    if EXECUTOR.value == 'local':
        return Local(JOBS.value)
    return Slurm(directory / LOGS / 'slurm', slurm_array_parallelism=JOBS.value, slurm_partition=PARTITION.value,
                 timeout_min=round(60 * HOURS.value), gpus_per_node=GPUS.value, cpus_per_task=CPUS.value,
                 mem_gb=MEMORY.value)


def read_sweep(config: ConfigDict) -> list[Overrides]:
    """The runs that the --sweep file makes of the resolved recipe, each as its overrides.

    Raises:
      UserError: if it is missing or is no sweep.
    """
    if not GRID.value:
        raise UserError('--sweep is missing: give a grid, for example --sweep=configs/sweeps/positions.py')
    path = Path(GRID.value)
    if not path.is_file():
        there = [os.path.relpath(each) for each in (SCRIPTS / 'configs/sweeps').glob('[!_]*.py')]
        raise UserError(f'--sweep={path} does not exist{did_you_mean(str(path), there)}')
    # The loader is named, as importlib would choose one by the file's ending, which may be any.
    loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None, 'a loader was given'
    module = importlib.util.module_from_spec(spec)
    with faults_in(str(path)):
        loader.exec_module(module)
    if not callable(getattr(module, 'get_sweep', None)):
        raise UserError(f'--sweep={path} has no function get_sweep(config); configs/sweeps/__init__.py tells how')
    with faults_in(str(path)):
        sweep = module.get_sweep(config)
    if not (isinstance(sweep, list | tuple) and sweep and all(map(is_overrides, sweep))):
        raise UserError(f'--sweep={path}: get_sweep must return a list of at least one run, each a dict of overrides')
    return list(sweep)


def is_overrides(value: Any) -> bool:
    """Whether something can be the overrides of a run."""
    return isinstance(value, dict) and all(isinstance(option, str) for option in value)


def planned_runs(config: ConfigDict, sweep: Sequence[Overrides]) -> dict[str, Overrides]:
    """The runs by their names, with checked configs; runs of equal configs are one.

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
    """The commands of a run, as a user would type them."""
    train, decode = ([sys.executable, os.path.relpath(SCRIPTS / name)] for name in ('train.py', 'decode.py'))
    return [[*train, f'--config={config_flags.get_config_filename(flags.FLAGS["config"])}', f'--workdir={workdir}',
             *(f'--config.{option}={value}' for option, value in overrides.items())],
            [*decode, f'--workdir={workdir}', f'--split={SPLIT.value}']]


def as_typed(command: Sequence[str]) -> str:
    """A command for a shell."""
    return shlex.join(['python', *command[1:]])


def claim_directory(directory: Path, config: dict[str, Any], runs: dict[str, Overrides]) -> None:
    """Writes the sweep into its directory. A sweep that is there may lack runs of this one, but not differ from it.

    Raises:
      UserError: naming what differs.
    """
    path = directory / SWEEP
    here = {'version': VERSION, 'recipe': config_flags.get_config_filename(flags.FLAGS['config']),
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
    """A line for each option whose values differ."""
    return [f'{option}: {there.get(option)!r} there, {here.get(option)!r} asked for'
            for option in sorted(there.keys() | here.keys()) if there.get(option) != here.get(option)]


def run_jobs(executor: Executor, jobs: Sequence[Job], done: int, total: int) -> None:
    """Runs jobs, and logs how each ended. Ctrl-C or a signal stops the runs, which save, and the sweep."""
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
    """The end of a log, indented."""
    lines = path.read_text(errors='replace').splitlines() if path.exists() else []
    return '\n'.join(f'    {line}' for line in [line for line in lines if line.strip()][-TOLD:])


def report(directory: Path) -> None:
    """Prints the table, and writes it and the plots beside the runs."""
    runs = load_runs(directory)
    known = {'train', 'validation', 'test'}.union(*(run.results for run in runs))
    if SPLIT.value not in known:
        raise UserError(f'--split={SPLIT.value}: no run has been scored on it{did_you_mean(SPLIT.value, known)}')
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
        'checkpoint of each run; the best in bold; ± is the standard deviation over seeds. The learning curves are '
        'what training found on its way, perhaps by another search and on fewer sentences, so they may put the '
        'settings into another order; above each picture stands how it was measured.\n\n'
        f'{table.markdown()}\n![Learning curves](curves.png)\n\n'
        '![The metric against what was varied](varied.png)\n')
    log.info('%s, report.csv, curves.png, varied.png', directory / 'report.md')


if __name__ == '__main__':
    run_script(main)
