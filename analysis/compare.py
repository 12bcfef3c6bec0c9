"""Runs side by side: what was varied against what came of it, as a table.

    runs = load_runs('sweeps/heads')            # a sweep, a folder of runs, or a list of run directories
    results_table(runs)                         # shown as a table in a notebook; .markdown(), .csv()

Runs that differ in the seed alone are one setting: its figures are means with their standard deviation.
Only files are read, and JAX does nothing.
"""

import csv
import dataclasses
import io
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs import base
from configs.checks import check_config
from configs.options import flatten
from configs.sweeps import differing, run_names, short_names
from configs.tasks import METRICS, goodness
from configs.versions import renamed, upgraded
from run_directory.progress import judge_all
from run_directory.records import CONFIG, EVALUATED, read_config, read_metrics
from runtime.errors import UserError
from runtime.files import read_json

SWEEP = 'sweep.json'  # in the directory of a sweep: {'version', 'config': {option: value}, 'runs': {name: overrides}}
LOGS = 'logs'         # beside it: NAME.log and, after a failure, NAME.failed
NOT_VARIED = ('seed', 'cache_dir')  # options in which runs may differ and be the same setting

log = logging.getLogger('allyouneed.compare')


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What is on disk about a run.

    Attributes:
      name: of its directory.
      workdir: its directory, which a run that has not begun does not have.
      settings: the options that were varied and their values here, the seed left out: {'model.num_heads': 2}.
      config: every option, {'model.d_model': 128, ...}; options that the run does not know yet have their defaults.
      curves: what `read_curves` finds.
      results: what `read_results` finds.
      failure: why it failed, or ''.
    """
    name: str
    workdir: Path
    settings: dict[str, Any]
    config: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]
    results: dict[str, dict[str, Any]]
    failure: str = ''

    def width(self, option: str) -> Any:
        """The value of an option; where it is a size left to others, 0, what it comes to."""
        value, a_head = self.config[option], self.config['model.d_model'] // self.config['model.num_heads']
        otherwise = {'model.d_k': a_head, 'model.d_v': a_head,
                     'model.num_key_value_heads': self.config['model.num_heads'],
                     'model.num_decoder_layers': self.config['model.num_layers'],
                     'model.recurrent.d_align': self.config['model.recurrent.d_hidden']}
        return value or otherwise.get(option, value)

    @property
    def step(self) -> int:
        """The last step that it has told of; 0 if none."""
        return max((points[-1][0] for points in self.curves.values()), default=0)

    @property
    def trained(self) -> bool:
        """Whether training has come to its end: the last step, or the end of patience."""
        metric = self.config['eval.metric']
        values = [value for _, value in self.curves.get(EVALUATED + metric, [])]
        patience_ended = judge_all(values, metric=metric, patience=self.config['eval.patience']).stopped
        return self.step >= self.config['train.steps'] or patience_ended

    @property
    def state(self) -> str:
        """'finished', 'failed: ...', 'at step 30 of 60' or 'not started'."""
        if self.failure:
            return f'failed: {self.failure}'
        if self.trained:
            return 'finished'
        began = (self.workdir / CONFIG).exists()
        return f'at step {self.step:,} of {self.config["train.steps"]:,}' if began else 'not started'

    @property
    def speed(self) -> float | None:
        """Median target tokens a second of training; None before the first is logged."""
        # The first time is that of compilation too.
        points = self.curves.get('tokens_per_second', [])
        return statistics.median(value for _, value in points[1:] or points) if points else None


class Spread(NamedTuple):
    """A figure over seeds; the deviation is the sample's (n - 1), None of one value."""
    mean: float
    deviation: float | None

    def __str__(self):
        mean = f'{self.mean:,.0f}' if abs(self.mean) >= 1000 else f'{self.mean:#.4g}'
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
        """A table in Markdown, the best of each metric in bold; columns are padded to be read as they are."""
        cells = [[_cell(row.get(column)) for column in self.columns] for row in self.rows]
        for index, column in enumerate(self.columns):
            if column not in METRICS:
                continue
            ranked = {_goodness(column, row) for row in self.rows if row.get(column) is not None}
            for row, of_row in zip(self.rows, cells, strict=True):
                if row.get(column) is not None and len(ranked) > 1 and _goodness(column, row) == max(ranked):
                    of_row[index] = f'**{of_row[index]}**'
        numeric = [all(isinstance(row.get(column), int | float | Spread | None) for row in self.rows)
                   for column in self.columns]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        rule = ['-' * (width - 1) + ':' if right else '-' * width for width, right in zip(widths, numeric, strict=True)]

        def line(of_row):
            return '| ' + ' | '.join(cell.rjust(width) if right else cell.ljust(width)
                                     for cell, width, right in zip(of_row, widths, numeric, strict=True)) + ' |\n'
        return ''.join(map(line, [self.columns, rule, *cells]))

    def csv(self) -> str:
        """The same as CSV: all digits, and the deviations in columns of their own, NAME_sd."""
        spread = {column for row in self.rows for column, value in row.items() if isinstance(value, Spread)}
        file = io.StringIO()
        writer = csv.DictWriter(file, [name for column in self.columns
                                       for name in ([column, f'{column}_sd'] if column in spread else [column])],
                                extrasaction='ignore')
        writer.writeheader()
        for row in self.rows:
            flat = {column: value.mean if isinstance(value, Spread) else value for column, value in row.items()}
            writer.writerow(flat | {f'{column}_sd': value.deviation for column, value in row.items()
                                    if isinstance(value, Spread)})
        return file.getvalue()

    def _repr_markdown_(self) -> str:
        return self.markdown()


def load_runs(where: str | Path | Iterable[str | Path]) -> list[RunRecord]:
    """The runs of a sweep in its order, of a folder by name, or of a list of run directories.

    Raises:
      UserError: if there are none.
    """
    if isinstance(where, str | Path):
        where = folder = Path(where)
        if (where / SWEEP).exists():
            return _runs_of_sweep(where)
        where = [where] if (where / CONFIG).exists() else sorted(path.parent for path in where.glob(f'*/{CONFIG}'))
        if not where:
            raise UserError(f'{folder}: no runs there: give the directory of a sweep, or one that holds run '
                            'directories')
    folders = [Path(folder) for folder in where]
    configs = [flatten(read_config(folder)) for folder in folders]
    varied = [option for option in differing(configs) if option not in NOT_VARIED]
    return [RunRecord(folder.name, folder, {option: config.get(option) for option in varied}, config,
                      read_curves(folder), read_results(folder))
            for folder, config in zip(folders, configs, strict=True)]


def read_curves(workdir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """{'train_loss': [(100, 5.07), ...], 'validation_bleu': ...}: value over step, as metrics.jsonl has them."""
    curves = {}
    for metrics in read_metrics(Path(workdir)):
        step = metrics.pop('step')
        for name, value in metrics.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def read_results(workdir: str | Path) -> dict[str, dict[str, Any]]:
    """{'test': {'bleu': 38.8, ...}}: what decode.py --split=... has written, by split.

    Raises:
      UserError: if a file is damaged.
    """
    return {path.stem: _read_scores(path) for path in sorted(Path(workdir).glob('results/*.json'))}


def _read_scores(path: Path) -> dict[str, Any]:
    advice = f'Delete it: decode.py --split={path.stem} writes it again'
    scores = read_json(path, advice)
    for name in (*METRICS, 'parameters'):
        if not isinstance(scores.get(name, 0), int | float):
            raise UserError(f'{path} is damaged: {name} is no number. {advice}')
    if not isinstance(scores.get('checkpoint_steps', []), list):
        raise UserError(f'{path} is damaged: checkpoint_steps is no list. {advice}')
    return scores


def recorded_sweep(directory: Path) -> dict[str, Any]:
    """sweep.json of a directory, its options brought to those of today, and each of its runs possible.

    Raises:
      UserError: if it is damaged.
    """
    path, advice = directory / SWEEP, 'Take it from a copy, or give another --workdir'
    sweep = read_json(path, advice)
    config, runs, version = sweep.get('config'), sweep.get('runs'), sweep.get('version', 1)
    if not (isinstance(config, dict) and isinstance(runs, dict) and runs
            and all(isinstance(overrides, dict) for overrides in runs.values())):
        raise UserError(f'{path} is damaged: it has no config or no runs. {advice}')
    try:
        sweep |= {'config': upgraded(config, version),
                  'runs': {name: renamed(overrides, version) for name, overrides in runs.items()}}
        for overrides in runs.values():
            whole = base.get_config()
            whole.update_from_flattened_dict(upgraded(config | overrides, version))
            check_config(whole)
    except (UserError, OverflowError) as error:
        raise UserError(f'{path} is damaged: {error}. {advice}') from None
    return sweep


def results_table(runs: Sequence[RunRecord], varied: Sequence[str] | None = None, split: str = 'validation') -> Table:
    """A row for each setting: what was varied, the scores on `split`, parameters and training speed.

    Where a setting leaves an option as the recipe has it, the cell has the recipe's value; of a width that is left to
    others, what it comes to.

    Args:
      runs: what `load_runs` returns.
      varied: the options to show; all that differ by default.
      split: whose results.

    Returns:
      A table with the columns: the varied options by their short names, metrics, 'seeds' if any setting has more than
      one run, 'parameters', 'tokens/s' and, if any run is not finished, 'state'.
    """
    if not runs:
        raise UserError('there are no runs to make a table of')
    settings = by_setting(runs)
    varied = varied_options(runs) if varied is None else list(varied)
    short = short_names(runs[0].config)
    rows = []
    for of_setting in settings:
        first = of_setting[0]
        row = {short[option]: first.width(option) for option in varied}
        done = [run.results[split] for run in of_setting if run.trained and split in run.results]
        for metric in METRICS:
            if values := [results[metric] for results in done if metric in results]:
                row[metric] = spread(values)
        row['seeds'] = len(done)
        row['parameters'] = next((results['parameters'] for results in done if 'parameters' in results), None)
        if speeds := [run.speed for run in of_setting if run.speed is not None]:
            row['tokens/s'] = round(statistics.fmean(speeds))
        row['state'] = _state(of_setting)
        rows.append(row)
    present = {column for row in rows for column in row}
    columns = [*(short[option] for option in varied), *(metric for metric in METRICS if metric in present)]
    columns += ['seeds'] if any(len(of_setting) > 1 for of_setting in settings) else []
    columns += ['parameters', 'tokens/s']
    columns += ['state'] if any(row['state'] != 'finished' for row in rows) else []
    return Table(columns, rows)


def by_setting(runs: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """The runs that differ in the seed alone, together; in the order of their first."""
    together = {}
    for run in runs:
        together.setdefault(repr(sorted(run.settings.items())), []).append(run)
    return list(together.values())


def varied_options(runs: Iterable[RunRecord]) -> list[str]:
    """The options that any run sets, in the order of their first appearance."""
    return list(dict.fromkeys(option for run in runs for option in run.settings))


def label(run: RunRecord) -> str:
    """The name of a run's setting: that of the run without the seed."""
    return run_names([run.settings], run.config)[0]


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _goodness(metric: str, row: Mapping[str, Any]) -> float:
    return goodness(metric, row[metric].mean)


def _cell(value: Any) -> str:
    if value is None:
        return ''
    return f'{value:,}' if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _state(of_setting: Sequence[RunRecord]) -> str:
    """The common state of the runs of a setting, or how many are in which."""
    states = [run.state for run in of_setting]
    counted = {state: states.count(state) for state in states}
    return states[0] if len(counted) == 1 else ', '.join(f'{count} {state}' for state, count in counted.items())


def _runs_of_sweep(directory: Path) -> list[RunRecord]:
    sweep = recorded_sweep(directory)
    varied = [option for option in differing(list(sweep['runs'].values())) if option not in NOT_VARIED]
    records = []
    for name, overrides in sweep['runs'].items():
        failed = directory / LOGS / f'{name}.failed'
        records.append(RunRecord(
            name, directory / name, {option: value for option, value in overrides.items() if option in varied},
            sweep['config'] | overrides, read_curves(directory / name), _results_in_sweep(directory / name),
            failed.read_text(encoding='utf-8', errors='replace').strip() if failed.exists() else ''))
    return records


def _results_in_sweep(workdir: Path) -> dict[str, dict[str, Any]]:
    """The same as `read_results`, but damaged ones count as not there: the sweep scores again, and writes them anew."""
    results = {}
    for path in sorted(workdir.glob('results/*.json')):
        try:
            results[path.stem] = _read_scores(path)
        except UserError as error:
            log.warning('%s', error)
    return results
