"""Reads the runs of a sweep from the sweep file, records them in sweep.json, and logs their progress."""

import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import json
import logging
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from analysis.compare import LOGS, SWEEP, RunRecord, read_curves, read_results, recorded_sweep, scored_metric
from configs.checks import config_problems, kind_problems, new_run_problems, no_sweep, written
from configs.options import ELSEWHERE, flatten, plain
from configs.sweeps import Overrides, run_names
from configs.tasks import goodness
from configs.versions import VERSION
from run_directory.records import EVALUATED, METRICS_FILE
from runtime.errors import UserError, faults_in, option_like
from runtime.files import check_folder, expanded, write_text
from runtime.process_setup import slow_imports

log = logging.getLogger('allyouneed.sweep')


def read_sweep(file: str, config: ConfigDict) -> list[Overrides]:
    """Returns the runs that a sweep file defines for a recipe. Each run is a dict of overrides.

    Raises:
      UserError: if the file does not exist, does not define a sweep, or changes the config.
    """
    path = expanded(file)
    if not path.is_file():
        raise UserError(no_sweep(str(path)))
    # The file may have any extension, but importlib would choose the loader by the extension.
    loader = importlib.machinery.SourceFileLoader('sweep_file', str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None, 'the loader is given'
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
    with faults_in(str(path)):
        loader.exec_module(module)
    if not callable(getattr(module, 'get_sweep', None)):
        raise UserError(f'--sweep={path} has no function get_sweep(config). configs/sweeps/__init__.py has an example')
    copy = config.copy_and_resolve_references()
    with faults_in(str(path)):
        sweep = module.get_sweep(copy)
    before = flatten(config)
    if changed := {option: value for option, value in flatten(copy).items() if value != before.get(option)}:
        raise UserError(f'--sweep={path}: get_sweep must not change the config, because the commands of the runs only '
                        f'contain the overrides. Put these options into the overrides of each run: {written(changed)}')
    if not (isinstance(sweep, list | tuple) and sweep and all(map(_is_overrides, sweep))):
        raise UserError(f'--sweep={path}: get_sweep must return a list of at least one run, each a dict of overrides')
    return [{option: plain(value) for option, value in overrides.items()} for overrides in sweep]


def _is_overrides(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(option, str) for option in value)


def planned_runs(file: str, config: ConfigDict, sweep: Sequence[Overrides],
                 constant: Collection[str], recorded: Mapping[str, Overrides] = {}) -> dict[str, Overrides]:
    """Returns {name of the run: overrides}. If several runs have equal configs, only the first run is kept.

    Args:
      file: the sweep file, for messages.
      config: the resolved recipe.
      sweep: the runs of the file.
      constant: the options that the command line sets in every run.
      recorded: the runs in sweep.json, by name. These runs keep their names, and may keep the values in
        `new_run_problems`.

    Raises:
      UserError: if a run's config is not possible. The message names the run.
    """
    options, unique = flatten(config), {}
    for overrides in sweep:
        for option in overrides.keys() - options.keys():
            raise UserError(f'--sweep={file}: the config has no option {option}{option_like(option, options)}')
        changed = config.copy_and_resolve_references()
        # The types are checked first, because the update converts some values: True becomes 1.0.
        if not (problems := kind_problems(overrides)):
            changed.update_from_flattened_dict(overrides)
            problems = config_problems(changed)
            # train.py gets all overrides as flags, and some values are refused only if a flag sets them.
            if not problems and overrides not in recorded.values():
                problems = new_run_problems(changed, {*constant, *overrides})
        if problems:
            raise UserError(f'--sweep={file}, run {written(overrides)}: ' + '\n'.join(problems))
        unique.setdefault(repr(flatten(changed)), overrides)
    if len(unique) < len(sweep):
        log.info('skipping %d duplicate runs of the sweep', len(sweep) - len(unique))
    runs = list(unique.values())
    return dict(zip(run_names(runs, options, recorded), runs, strict=True))


def check_data(file: str, config: ConfigDict, sweep: Iterable[Overrides], constant: Collection[str],
               split: str) -> None:
    """Checks the data of the runs of a sweep, which are to be scored on `split`.

    Configs for which `data_problems` reads the same options are checked only once. The other arguments are explained in
    `planned_runs`.

    Raises:
      UserError: if the data has problems, or has no split `split`. If the runs differ in these options, the message
        names the run.
    """
    configs = {}
    for overrides in sweep:
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(overrides)
        if changed.data.source not in ELSEWHERE:
            read = (changed.task, str(changed.data), bool(changed.train.guided_alignment), changed.eval.metric,
                    changed.model.patches.patch)
            configs.setdefault(read, (changed, overrides))
    if not configs:
        return
    with slow_imports():  # of JAX, which is not needed for the built-in data
        from input_pipeline.problems import data_problems

    for changed, overrides in configs.values():
        if problems := data_problems(changed, asked={*constant, *overrides}, scored=split):
            where = f'--sweep={file}, run {written(overrides)}: ' if len(configs) > 1 else ''
            raise UserError(where + '\n'.join(problems))


def claim_directory(directory: Path, recipe: str, file: str, config: dict[str, Any],
                    runs: dict[str, Overrides]) -> None:
    """Writes sweep.json. If the directory already has a sweep, the new sweep may only add runs.

    Raises:
      UserError: if the directory has another sweep or other files. The message lists the differences.
    """
    path = directory / SWEEP
    if path.exists():
        recorded = recorded_sweep(directory)
        changed = _differences(recorded['config'], config)
        for name, overrides in recorded['runs'].items():
            lines = _differences(overrides, runs[name]) if name in runs else ['not in this sweep']
            changed += [f'run {name}: {line}' for line in lines]
        if changed:
            raise UserError('\n  '.join([f'--workdir={directory} has another sweep. The differences:', *changed])
                            + '\nUse another --workdir, or the same sweep to continue it')
    elif directory.exists() and (not directory.is_dir() or not all(
            other.name.startswith(SWEEP) and other.suffix == '.tmp' for other in directory.iterdir())):
        raise UserError(f'--workdir={directory} is not empty and has no {SWEEP}. Use a new or an empty directory')
    check_folder(directory / LOGS)
    directory.mkdir(parents=True, exist_ok=True)
    content = {'version': VERSION, 'recipe': recipe, 'sweep': file, 'config': config, 'runs': runs}
    # This file is written first, because a directory with other files but without this file cannot be used again. If
    # this process is killed here, only an incomplete file with the suffix .tmp remains.
    write_text(path, json.dumps(content, indent=2) + '\n')
    (directory / LOGS).mkdir(exist_ok=True)


def _differences(recorded: dict[str, Any], requested: dict[str, Any]) -> list[str]:
    """Returns a line for each option whose recorded value differs from the requested value."""
    return [f'{option}: {recorded.get(option)!r} in the directory, {requested.get(option)!r} in this sweep'
            for option in sorted(recorded.keys() | requested.keys()) if recorded.get(option) != requested.get(option)]


class SweepProgress:
    """The progress of a sweep, read from the files of the runs. It includes runs on other machines."""

    def __init__(self, runs: Sequence[RunRecord], ended: set[str], split: str, metric: str | None = None):
        """Starts to observe the runs.

        Args:
          runs: all runs of the sweep.
          ended: the names of the runs that have ended. `end` adds names to this set.
          split: the split on which runs are scored.
          metric: the metric of the best run, with or without the prefix EVALUATED; None: config.eval.metric of the
            recipe. If the results of a run do not have the metric, `scores` uses the metric that `plot_varied` shows.
        """
        self._runs, self._ended, self._split = {run.name: run for run in runs}, ended, split
        self._wanted = (metric or '').removeprefix(EVALUATED), runs[0].config['eval.metric']
        self._began = time.time() - 1  # 1 s earlier, because file systems round times
        self._first: dict[str, tuple[int, float]] = {}  # {run: (a step, time at which the step was logged)}

    def end(self, name: str) -> None:
        """Records that the run `name` has ended."""
        self._ended.add(name)

    def scores(self, name: str) -> str:
        """Returns a run's score and the best score so far: 'bleu 38.8, best so far: 39.1 (num_heads=8)'."""
        results = {run: read_results(self._runs[run].workdir, skip_damaged=True) for run in self._ended}
        scores = {run: splits[self._split] for run, splits in results.items() if self._split in splits}
        metric = scored_metric(scores.get(name, {}), *self._wanted)
        if not metric:
            return ''
        measured = {run: values[metric] for run, values in scores.items() if metric in values}
        best = max(measured, key=lambda run: goodness(metric, measured[run]))
        comparison = 'the best so far' if best == name else f'best so far: {measured[best]:.4g} ({best})'
        return f'{metric} {measured[name]:.4g}, {comparison}'

    def __str__(self) -> str:
        """Describes the active runs: '1 of 4 runs ended; num_heads=8: step 300 of 1,200, 02:05 left'."""
        active = [self._described(run) for run in self._runs.values() if run.name not in self._ended
                  and _modified(run.workdir.parent / LOGS / f'{run.name}.log') >= self._began]
        return '; '.join([f'{len(self._ended)} of {len(self._runs)} runs ended', *(active or ['no run is active'])])

    def _described(self, run: RunRecord) -> str:
        run = dataclasses.replace(run, curves=read_curves(run.workdir))
        if run.trained:
            return f'{run.name}: scoring on {self._split}'
        logged = _modified(run.workdir / METRICS_FILE)
        if not run.step or logged < self._began:
            return f'{run.name}: starting'
        first, began = self._first.setdefault(run.name, (run.step, logged))
        steps = run.config['train.steps']
        text = f'{run.name}: step {run.step:,} of {steps:,}'
        if run.step == first:
            return text
        left = (logged - began) / (run.step - first) * (steps - run.step) - (time.time() - logged)
        return f'{text}, {tqdm.format_interval(max(0, left))} left'


@contextlib.contextmanager
def logged_regularly(progress: SweepProgress, pause: float = 30) -> Iterator[None]:
    """Logs the progress from a thread: every `pause` seconds at first, and less often in a long sweep."""
    stop, began = threading.Event(), time.monotonic()

    def watch() -> None:
        while not stop.wait(min(max(pause, (time.monotonic() - began) / 20), 600)):
            log.info('%s', progress)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _modified(path: Path) -> float:
    """Returns when a file was last written, in seconds since the epoch, or 0 if it does not exist."""
    return path.stat().st_mtime if path.exists() else 0.0
