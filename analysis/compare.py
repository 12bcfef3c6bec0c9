"""Compares runs: a table of the varied options and the results.

    runs = load_runs('sweeps/heads')            # a sweep, a folder of runs, or a list of run directories
    results_table(runs)                         # shown as a table in a notebook; .markdown(), .csv()

Runs that differ only in the seed are one setting. The table shows means and standard deviations over these runs.
This module only reads files and does not import JAX.
"""

import collections
import csv
import dataclasses
import io
import logging
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs import base
from configs.checks import check_config
from configs.options import flatten
from configs.sweeps import differing, run_names, short_names
from configs.tasks import METRICS, TASKS, goodness
from configs.versions import is_run, renamed, upgraded
from run_directory.progress import judge_all
from run_directory.records import (
    CONFIG,
    EVALUATED,
    EXPORTED,
    METRICS_FILE,
    is_number,
    read_config,
    read_metrics,
    saved_steps,
)
from runtime.errors import UserError, option_like
from runtime.files import expanded, read_json

SWEEP = 'sweep.json'  # in the directory of a sweep: {'version', 'config': {option: value}, 'runs': {name: overrides}}
LOGS = 'logs'         # folder next to sweep.json: NAME.log of each run and, after a failure, NAME.failed
NOT_VARIED = ('seed', 'cache_dir')  # options in which runs of one setting may differ
ADDED_LOSSES = ('alignment_loss', 'divergence', 'teacher_divergence')  # curves of terms that some objectives add
# Names of curves and of numbers in results, without the statistics of places.
METRIC_NAMES = ('learning_rate', 'tokens_per_second', 'epoch', 'skipped_steps', 'seconds', 'compile_seconds',
                'resident_gb', 'device_gb', 'device_peak_gb', 'parameters',
                *(prefix + name for prefix in ('', 'train_', EVALUATED)
                  for name in (*METRICS, *ADDED_LOSSES)))

log = logging.getLogger('allyouneed.compare')


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run as its files describe it, without its parameters.

    Attributes:
      name: the name of the run directory.
      workdir: the run directory, which does not exist before the run begins.
      settings: the varied options and their values, without the seed: {'model.num_heads': 2}.
      config: every option, {'model.d_model': 128, ...}. An option that did not exist at the time of the run has its
        default.
      curves: the result of `read_curves`.
      results: the result of `read_results`.
      failure: why the run failed, or ''.
    """
    name: str
    workdir: Path
    settings: dict[str, Any]
    config: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]
    results: dict[str, dict[str, Any]]
    failure: str = ''

    def width(self, option: str) -> Any:
        """Returns the value of an option. For the value 0, returns the value that is derived from other options."""
        per_head = self.config['model.d_model'] // self.config['model.num_heads']
        derived = {'model.d_k': per_head, 'model.d_v': per_head,
                   'model.num_key_value_heads': self.config['model.num_heads'],
                   'model.num_decoder_layers': self.config['model.num_layers'],
                   'model.recurrent.d_align': self.config['model.recurrent.d_hidden']}
        return self.config[option] or derived.get(option, self.config[option])

    @property
    def step(self) -> int:
        """The number of the last training step in the metrics, or 0 if no metrics were logged."""
        return max((points[-1][0] for points in self.curves.values()), default=0)

    @property
    def trained(self) -> bool:
        """Whether training is finished: the last step was reached, or eval.patience has stopped the training."""
        metric = self.config['eval.metric']
        values = [value for _, value in self.curves.get(EVALUATED + metric, [])]
        patience_ended = judge_all(values, metric=metric, patience=self.config['eval.patience']).stopped
        return self.step >= self.config['train.steps'] or patience_ended

    def finished_on(self, split: str) -> bool:
        """Returns whether training is finished, and the results on `split` are of the best or of the last checkpoint.

        Results of another checkpoint do not count, because decode.py may have written them in the middle of the
        training. Results without the entry checkpoint_steps count.
        """
        if not self.trained or split not in self.results:
            return False
        metric, steps = self.config['eval.metric'], self.results[split].get('checkpoint_steps', [])
        best = min(((-goodness(metric, value), step) for step, value in self.curves.get(EVALUATED + metric, [])),
                   default=(0, self.step))[1]
        return not steps or best in steps or self.step in steps

    @property
    def state(self) -> str:
        """The result of `state_on` for the validation split."""
        return self.state_on('validation')

    def state_on(self, split: str) -> str:
        """Returns the state of the run as text: 'finished', 'failed: ...', 'at step 30 of 60' or 'not started'.

        A failed run that was finished by hand (`finished_on`) is 'finished'. If the score of a trained run belongs to a
        checkpoint that is neither the best nor the last, the state is 'trained but scored at step 30'. A trained run
        without a score is 'trained but not scored on test' if it belongs to a sweep, and otherwise 'finished'. A folder
        with a model but without metrics is 'not trained here': an imported or an exported model.
        """
        if self.finished_on(split):
            return 'finished'
        if self.failure:
            return f'failed: {self.failure}'
        if self.trained and split in self.results:
            return f'trained but scored at step {", ".join(map(str, self.results[split]["checkpoint_steps"]))}'
        if self.trained:
            return f'trained but not scored on {split}' if (self.workdir.parent / SWEEP).exists() else 'finished'
        if not self.curves and ((self.workdir / EXPORTED).exists() or saved_steps(self.workdir) == [0]):
            return 'not trained here'
        began = (self.workdir / CONFIG).exists()
        return f'at step {self.step:,} of {self.config["train.steps"]:,}' if began else 'not started'

    @property
    def speed(self) -> float | None:
        """The median of the finite numbers of targets per second in training. None if there is no such value."""
        points = self.curves.get('tokens_per_second', [])
        # The first value includes compilation.
        speeds = [value for _, value in points[1:] or points if math.isfinite(value)]
        return statistics.median(speeds) if speeds else None


class Spread(NamedTuple):
    """The mean of a value over seeds, and the sample standard deviation (n - 1).

    The deviation is None for one seed, and NaN if a value is not finite.
    """
    mean: float
    deviation: float | None

    def __str__(self):
        # Four digits of 999.95 are 1000.
        mean = f'{self.mean:,.0f}' if abs(self.mean) >= 999.95 else f'{self.mean:#.4g}'
        if self.deviation is None:
            return mean
        return f'{mean} ± {self.deviation:,.{len(mean.partition(".")[2])}f}' if 'e' not in mean else (
            f'{mean} ± {self.deviation:.1e}')


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of {column: value}; a value is text, a number, a Spread or None."""
    columns: list[str]
    rows: list[dict[str, Any]]

    def markdown(self) -> str:
        """Returns the table in Markdown. The best value of each metric is bold. All cells of a column are aligned."""
        columns = []
        for name in self.columns:
            values = [row.get(name) for row in self.rows]
            align = str.rjust if all(isinstance(value, int | float | Spread | None) for value in values) else str.ljust
            best = [False, *_best(name, values)]
            cells = [_cell(value, bold) for value, bold in zip([name, *values], best, strict=True)]
            width = max(map(len, cells))
            rule = '-' * (width - 1) + ':' if align is str.rjust else '-' * width
            cells = [align(cell, width) for cell in cells]
            columns.append([cells[0], rule, *cells[1:]])
        return ''.join('| ' + ' | '.join(line) + ' |\n' for line in zip(*columns, strict=True))

    def csv(self) -> str:
        """Returns the table as CSV with all digits. Standard deviations are in separate columns, NAME_sd."""
        rows = [{name: number for column, value in row.items() for name, number in (
            {column: value.mean, f'{column}_sd': value.deviation} if isinstance(value, Spread) else {column: value}
        ).items()} for row in self.rows]
        present = {name for row in rows for name in row}
        file = io.StringIO()
        writer = csv.DictWriter(file, [name for column in self.columns for name in (column, f'{column}_sd')
                                       if name == column or name in present], extrasaction='ignore')
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def _repr_markdown_(self) -> str:
        return self.markdown()


def load_runs(where: str | Path | Iterable[str | Path]) -> list[RunRecord]:
    """Returns the runs of a sweep, of a folder, or of a list of run directories.

    Runs of a sweep or a list keep their order. Runs of a folder are sorted by name. Models of other libraries in the
    folder are ignored.

    Raises:
      UserError: if there are no runs.
    """
    if isinstance(where, str | Path):
        where = folder = expanded(where)
        if (where / SWEEP).exists():
            return _runs_of_sweep(where)
        where = [where] if (where / CONFIG).exists() else sorted(
            path.parent for path in where.glob(f'*/{CONFIG}')
            if is_run(path.parent) or (path.parent / METRICS_FILE).exists() or (path.parent / 'results').is_dir())
        if not where:
            raise UserError(f'{folder} has no runs. Use the directory of a sweep, or a folder of run directories')
    folders = [expanded(folder) for folder in where]
    if not folders:
        raise UserError('the list of run directories is empty. Use at least one run directory')
    configs = [flatten(read_config(folder)) for folder in folders]
    varied = [option for option in differing(configs) if option not in NOT_VARIED]
    return [RunRecord(folder.name, folder, {option: config.get(option) for option in varied}, config,
                      read_curves(folder), read_results(folder))
            for folder, config in zip(folders, configs, strict=True)]


def is_metric(name: str) -> bool:
    """Returns whether runs may have a curve or a score of this name, or an evaluation may have measured it.

    Statistics of places have a slash in their names (config.track.places). These names are accepted without a further
    check.
    """
    return name in METRIC_NAMES or '/' in name


def scored_metric(measured: Collection[str], *wanted: str) -> str:
    """Returns the first metric of `wanted`, and then of METRICS, that is in `measured`, or '' if there is none."""
    return next((name for name in (*wanted, *METRICS) if name in METRICS and name in measured), '')


def read_curves(workdir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Reads metrics.jsonl. Returns {metric: [(step, value), ...]}, such as {'train_loss': [(100, 5.07), ...]}."""
    curves = {}
    for metrics in read_metrics(Path(workdir)):
        step = metrics.pop('step')
        for name, value in metrics.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def read_results(workdir: str | Path, *, skip_damaged: bool = False) -> dict[str, dict[str, Any]]:
    """Reads the scores that decode.py --split=... has written. Returns {split: scores}: {'test': {'bleu': 38.8, ...}}.

    Args:
      workdir: the run directory.
      skip_damaged: whether to skip damaged files with a warning. A sweep skips damaged files, because it then scores
        the runs again and replaces the files.

    Raises:
      UserError: if a file is damaged.
    """
    results = {}
    for path in sorted(Path(workdir).glob('results/*.json')):
        try:
            results[path.stem] = _read_scores(path)
        except UserError as error:
            if not skip_damaged:
                raise
            log.warning('%s', error)
    return results


def _read_scores(path: Path) -> dict[str, Any]:
    advice = f'Delete the file: decode.py --split={path.stem} writes the file again'
    scores = read_json(path, advice)
    if scores.get('perplexity', 0) is None:
        scores['perplexity'] = math.inf  # JSON has no infinity
    for name in (*METRICS, 'parameters'):
        if not is_number(scores.get(name, 0)):
            raise UserError(f'{path} is damaged: {name} is not a number. {advice}')
    if not isinstance(scores.get('checkpoint_steps', []), list):
        raise UserError(f'{path} is damaged: checkpoint_steps is not a list. {advice}')
    return scores


def recorded_sweep(directory: Path) -> dict[str, Any]:
    """Reads sweep.json of a directory, and converts its options to the current version.

    The result also has 'configs': {name of the run: all options}. A run's config is converted as a whole, because the
    conversion of an option may depend on other options.

    Raises:
      UserError: if the file is damaged.
    """
    path, advice = directory / SWEEP, 'Restore the file from a copy, or use another --workdir'
    sweep = read_json(path, advice)
    config, runs, version = sweep.get('config'), sweep.get('runs'), sweep.get('version', 1)
    if not (isinstance(config, dict) and isinstance(runs, dict) and runs
            and all(isinstance(overrides, dict) for overrides in runs.values())):
        raise UserError(f'{path} is damaged: it has no config or no runs. {advice}')
    try:
        sweep |= {'config': upgraded(config, version),
                  'runs': {name: renamed(overrides, version) for name, overrides in runs.items()},
                  'configs': {name: upgraded(config | overrides, version) for name, overrides in runs.items()}}
        for options in sweep['configs'].values():
            whole = base.get_config()
            whole.update_from_flattened_dict(options)
            check_config(whole)
    except (UserError, OverflowError) as error:
        raise UserError(f'{path} is damaged: {error}. {advice}') from None
    return sweep


def results_table(runs: Sequence[RunRecord], varied: Sequence[str] | None = None, split: str = 'validation') -> Table:
    """Returns a table with one row per setting: the varied options, the scores, the parameters and the speed.

    Runs that differ only in the seed are one setting. If a setting does not change an option, the cell has the value in
    the recipe. If the value is 0 and stands for a value that is derived from other options, the cell has the derived
    value. The scores of unfinished runs are included. The column 'state' marks these runs.

    Args:
      runs: the result of `load_runs`.
      varied: the options to show; by default all options that differ between runs.
      split: the split of the scores and of the states.

    Returns:
      A table with the columns: the varied options by their short names, metrics, 'seeds' if any setting has more than
      one run, 'parameters', 'tokens/s' and, if any run is not finished, 'state'. The speed of images and series is
      'examples/s', and the speed of forecasts is 'windows/s'.

    Raises:
      UserError: if `runs` is empty, or `varied` has an unknown option.
    """
    check_not_empty(runs)
    settings = by_setting(runs)
    varied = varied_options(runs) if varied is None else list(varied)
    short, speed = short_names(runs[0].config), f'{TASKS[runs[0].config["task"]].unit}/s'
    if unknown := [option for option in varied if option not in short]:
        raise UserError(f'varied={varied}: there is no option {unknown[0]!r}{option_like(unknown[0], short)}')
    rows = []
    for setting in settings:
        row = {short[option]: setting[0].width(option) for option in varied}
        scored = [run.results[split] for run in setting if split in run.results]
        for metric in METRICS:
            if values := [results[metric] for results in scored if metric in results]:
                row[metric] = spread(values)
        row['seeds'] = len(scored)
        row['parameters'] = next((results['parameters'] for results in scored if 'parameters' in results), None)
        if speeds := [run.speed for run in setting if run.speed is not None]:
            row[speed] = round(statistics.fmean(speeds))
        states = collections.Counter(run.state_on(split) for run in setting)
        row['state'] = ', '.join(f'{count} {state}' if len(states) > 1 else state for state, count in states.items())
        rows.append(row)
    columns = [*(short[option] for option in varied), *(name for name in METRICS if any(name in row for row in rows)),
               *(['seeds'] if any(len(setting) > 1 for setting in settings) else []), 'parameters', speed,
               *(['state'] if any(row['state'] != 'finished' for row in rows) else [])]
    return Table(columns, rows)


def check_not_empty(runs: Sequence[RunRecord]) -> None:
    """Raises UserError if `runs` is empty."""
    if not runs:
        raise UserError('runs=[]: at least one run is required. Use the result of load_runs')


def by_setting(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Groups runs that differ only in the seed, in the order of each group's first run.

    A run that sets an option to the value in the recipe is in the same group as a run that does not set the option.
    """
    settings, varied = {}, varied_options(runs)
    for run in runs:
        settings.setdefault(tuple(run.config[option] for option in varied), []).append(run)
    return list(settings.values())


def varied_options(runs: Iterable[RunRecord]) -> list[str]:
    """Returns the options that at least one run sets, in the order of their first appearance."""
    return list(dict.fromkeys(option for run in runs for option in run.settings))


def label(run: RunRecord) -> str:
    """Returns the name of a run's setting: the name of the run without the seed."""
    return run_names([run.settings], run.config)[0]


def spread(values: Sequence[float]) -> Spread:
    """Returns the mean and the sample standard deviation of `values`."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Spread(mean, None)
    return Spread(mean, statistics.stdev(values) if math.isfinite(mean) else math.nan)


def _best(column: str, values: Sequence[Any]) -> list[bool]:
    """Returns a mask of the best values of a metric. No value is best if all are equal or `column` is not a metric."""
    if column not in METRICS:
        return [False] * len(values)
    ranks = [None if value is None else goodness(column, value.mean) for value in values]
    distinct = {rank for rank in ranks if rank is not None}
    return [len(distinct) > 1 and rank == max(distinct) for rank in ranks]


def _cell(value: Any, bold: bool) -> str:
    """Returns a value as the text of a cell in Markdown, which has one line and no unescaped `|`."""
    if value is None:
        return ''
    text = f'{value:,}' if isinstance(value, int) and not isinstance(value, bool) else str(value)
    text = ' '.join(text.splitlines()).replace('|', r'\|')
    return f'**{text}**' if bold else text


def _runs_of_sweep(directory: Path) -> list[RunRecord]:
    sweep = recorded_sweep(directory)
    varied = [option for option in differing(list(sweep['runs'].values())) if option not in NOT_VARIED]
    records = []
    for name, overrides in sweep['runs'].items():
        failed = directory / LOGS / f'{name}.failed'
        records.append(RunRecord(
            name, directory / name, {option: value for option, value in overrides.items() if option in varied},
            sweep['configs'][name], read_curves(directory / name),
            read_results(directory / name, skip_damaged=True),
            failed.read_text(encoding='utf-8', errors='replace').strip() if failed.exists() else ''))
    return records
