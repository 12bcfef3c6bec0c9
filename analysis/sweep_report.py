"""The report of a sweep: the table of results and the plots, with warnings about runs that cannot be compared."""

import collections
import logging
from collections.abc import Sequence
from pathlib import Path

from analysis.compare import SWEEP, RunRecord, results_table
from configs.checks import written
from configs.options import flatten
from configs.sweeps import Overrides
from run_directory.records import CONFIG, EDITED, ENSEMBLE, EVALUATED, MEASURED, lowered_options, read_saved_config
from runtime.errors import UserError, did_you_mean
from runtime.files import write_text

log = logging.getLogger('allyouneed.sweep')


def saved_options(workdir: Path) -> Overrides:
    """Returns the options in config.json of a run. An option that was lowered has the requested value.

    If the run has not begun, or its files are damaged, returns {}. Damaged files are logged.
    """
    if not (workdir / CONFIG).exists():
        return {}
    try:
        (config, unset), lowered = read_saved_config(workdir), lowered_options(workdir)
    except UserError as error:
        log.warning('%s', error)
        return {}
    return {option: lowered.get(option, value) for option, value in flatten(config).items() if option not in unset}


def different_precisions(runs: Sequence[RunRecord], saved: Sequence[Overrides]) -> str:
    """Returns a warning if train.matmul_precision=auto has chosen different precisions in the runs, otherwise ''.

    `saved` are the `saved_options` of each run.
    """
    chosen = collections.Counter(options[MEASURED[0]] for run, options in zip(runs, saved, strict=True)
                                 if MEASURED in run.config.items() and MEASURED[0] in options)
    if len(chosen) < 2:
        return ''
    counts = ', '.join(f'{precision} in {count} of {chosen.total()} runs' for precision, count in chosen.items())
    return (f'train.matmul_precision=auto has chosen different precisions ({counts}), so differences between the runs '
            'may come from the precision. To avoid this, start a new sweep with '
            '--config.train.matmul_precision=default')


def different_options(runs: Sequence[RunRecord], saved: Sequence[Overrides]) -> str:
    """Returns a warning if config.json of a run has other options than sweep.json, otherwise ''.

    train.py reads the recipe when a run begins. So if the recipe is edited during a sweep, later runs have the new
    values. `saved` are the `saved_options` of each run.
    """
    different = []
    for run, options in zip(runs, saved, strict=True):
        changes = [f'{option}={written(value)} instead of {written(run.config[option])}'
                   for option, value in options.items() if value != run.config[option]
                   and option != 'cache_dir' and (option, run.config[option]) != MEASURED]
        if changes:
            different.append(f'{run.name} has {", ".join(changes)}')
    if not different:
        return ''
    return (f'{len(different)} of {len(runs)} runs have other options than {SWEEP}, for example because the recipe was '
            f'edited during the sweep ({"; ".join(different)}). The report shows the values of {SWEEP}. To repeat '
            'these runs, restore the recipe, delete the directories of these runs, and run the same command again with '
            '--retry_failed')


def split_of_report(runs: Sequence[RunRecord], split: str, *, given: bool) -> str:
    """Returns the split of a report on finished runs: `split`, or the only split with results.

    The only split with results is used if --split was not given and `split` has no results.

    Args:
      runs: the runs of the sweep.
      split: the value of --split.
      given: whether --split was given. Otherwise `split` is its default.

    Raises:
      UserError: if `split` is neither 'train', 'validation', 'test' nor a split with results. Also if --split was not
        given, `split` has no results, and several other splits have results.
    """
    splits = {'train', 'validation', 'test'}.union(*(run.results for run in runs))
    if split not in splits:
        raise UserError(f'--split={split}: no run has scores of this split{did_you_mean(split, splits)}')
    # Results of an edited model and of an ensemble are not scores of the runs.
    scored = sorted({name for run in runs for name in run.results if not name.endswith((ENSEMBLE, EDITED))})
    if given or split in scored or not scored:
        return split
    if len(scored) > 1:
        raise UserError(f'--split is missing: the runs have results on {" and ".join(scored)}, and not on '
                        f'{split}. Add for example --split={scored[0]}')
    log.info('the runs have results on %s, and not on %s. The report shows the results on %s', scored[0], split,
             scored[0])
    return scored[0]


def write_report(directory: Path, runs: Sequence[RunRecord], split: str, metric: str = '') -> bool:
    """Prints the table of results, and writes the table and the plots into the directory of the sweep.

    If the learning curves or the results do not have `metric`, their plot shows the default metric. If neither has
    `metric`, logs an error and returns False.

    Args:
      directory: the directory of the sweep.
      runs: the runs of the sweep.
      split: the split whose results the report shows.
      metric: the metric of the plots, with or without the prefix EVALUATED; '': config.eval.metric of the recipe.
    """
    asked, metric = metric, metric.removeprefix(EVALUATED)
    measured = {'curves.png': {name.removeprefix(EVALUATED) for run in runs for name in run.curves},
                'varied.png': {name for run in runs for name, value in run.results.get(split, {}).items()
                               if isinstance(value, int | float)}}
    shown = {picture: '' if names and metric not in names else metric for picture, names in measured.items()}
    has_metric = not (metric and any(measured.values())) or any(metric in names for names in measured.values())
    from analysis.pictures import save_figure  # the import of matplotlib is slow, and --help does not need it
    from analysis.plots import plot_curves, plot_varied

    table = results_table(runs, split=split)
    saved = [saved_options(run.workdir) for run in runs]
    warnings = list(filter(None, [different_precisions(runs, saved), different_options(runs, saved)]))
    print(table.markdown(), end='')
    for warning in warnings:
        log.warning('%s', warning)
    notes = ''.join(f'{warning}.\n\n' for warning in warnings)
    write_text(directory / 'report.csv', table.csv())
    save_figure(plot_curves(runs, shown['curves.png']), directory / 'curves.png')
    save_figure(plot_varied(runs, shown['varied.png'], split), directory / 'varied.png')
    write_text(
        directory / 'report.md',
        f'# {directory.resolve().name}\n\nThe table shows the scores of decode.py on the whole {split} split, '
        'with the best checkpoint of each run. The best values are bold. ± is the standard deviation over seeds. The '
        'learning curves are from evaluations during training. These evaluations may use another search and fewer '
        'examples, so the order of the runs may differ. The title of each picture describes the measurement.\n\n'
        f'{notes}{table.markdown()}\n![Learning curves](curves.png)\n\n'
        '![The metric as a function of the varied options](varied.png)\n')
    log.info('wrote %s, report.csv, curves.png and varied.png', directory / 'report.md')
    if not has_metric:
        log.error('--metric=%s: no run has this metric%s The plots show the default metric. For plots of another '
                  'metric, use --report --metric=NAME', asked,
                  did_you_mean(metric, set().union(*measured.values())) or '.')
    elif metric and '' in shown.values():
        log.info('--metric=%s: there are no values of this metric for %s, which shows the default metric',
                 asked, next(picture for picture, name in shown.items() if not name))
    return has_metric
