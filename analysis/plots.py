"""Plots of several runs: learning curves, and a metric over each varied option.

The runs are records of analysis/compare.py:

    runs = load_runs('sweeps/heads')
    plot_curves(runs)
    plot_varied(runs)
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from analysis.compare import (
    ADDED_LOSSES,
    RunRecord,
    Spread,
    by_setting,
    check_not_empty,
    label,
    scored_metric,
    spread,
)
from configs.options import is_used
from configs.sweeps import run_names, short_names
from configs.tasks import METRICS, SEARCHED
from run_directory.records import EVALUATED
from runtime.errors import UserError, nearest

NAMES = {'bleu': 'BLEU', 'bleu_lowercased_tokenised': 'lowercased BLEU',
         'bleu_lowercased_moses': 'BLEU of lowercased Moses tokens',
         'chrf': 'chrF', 'r_squared': 'R²'}  # names of metrics that differ from their keys

Point = tuple[RunRecord, Spread]  # the first run of a setting, and the metric over the seeds of the setting


def plot_curves(runs: Sequence[RunRecord], metric: str | None = None) -> Figure:
    """Plots a metric over the training steps. Runs that differ only in the seed are one line, which shows their mean.

    With at most 6 lines, also plots the range over the seeds. `plot_varied` shows results of decode.py. Evaluations
    during training may measure the same metric in another way. Then the order of the runs may differ between the plots.
    So the title of each plot describes the measurement.

    The legend is sorted by the last value of each line. The best value is first. If no value is best, as for
    'learning_rate', the largest value is first. NaN is last.

    Args:
      runs: the result of `load_runs`.
      metric: a validation metric, such as 'bleu' or 'loss'; or the full name of a curve, such as 'train_loss' or
        'tokens_per_second'. The default is config.eval.metric of the first run.

    Raises:
      UserError: if `runs` is empty, or runs were evaluated but none has `metric`.
    """
    check_not_empty(runs)
    name: str = metric or runs[0].config['eval.metric']
    curves = {curve for run in runs for curve in run.curves}
    curve = name if name in curves else f'{EVALUATED}{name}'
    if metric and curve not in curves and any(curve.startswith(EVALUATED) for curve in curves):
        raise UserError(f'metric={metric!r}: no run has this curve. '
                        f'{nearest(metric, sorted(curve.removeprefix(EVALUATED) for curve in curves))}')
    lines = []
    for setting in by_setting(runs):
        at_step = {}
        for run in setting:
            for step, value in run.curves.get(curve, []):
                at_step.setdefault(step, []).append(value)
        if at_step:
            steps = sorted(at_step)
            lines.append((label(setting[0]), steps, [at_step[step] for step in steps]))
    quantity = curve.partition('_')[2]  # without train_ or validation_
    best = min if quantity in ADDED_LOSSES else METRICS.get(quantity)

    def rank(line):
        last = statistics.fmean(line[2][-1])
        return math.isnan(last), last if best is min else -last

    lines.sort(key=rank)
    columns = -(-len(lines) // 24) or 1  # columns of the legend
    drawn = Figure(figsize=(7 + 2.6 * columns, 5), layout='constrained')
    axes = drawn.add_subplot()
    for index, (name, steps, values) in enumerate(lines):
        style = {'color': _color(index, len(lines)), 'linestyle': ('-', '--', ':')[index % 3 if len(lines) > 10 else 0]}
        axes.plot(steps, list(map(statistics.fmean, values)), marker='o', markersize=3, label=name, **style)
        if len(lines) <= 6 and any(len(points) > 1 for points in values):  # with more settings, the ranges overlap
            axes.fill_between(steps, list(map(min, values)), list(map(max, values)), color=style['color'], alpha=0.15,
                              linewidth=0)
    evaluated = curve.removeprefix(EVALUATED)
    axes.set(xlabel='step', ylabel=_named(evaluated))
    axes.grid(alpha=0.3)
    if lines:
        drawn.legend(loc='outside right upper', fontsize=8, ncols=columns, title_fontsize=8,
                     title=f'sorted by the last value, {"best" if best else "largest"} first')
        if evaluated != curve:
            axes.set_title(_in_training([run for run in runs if curve in run.curves], evaluated), fontsize=10)
    else:
        axes.set_title('no evaluation yet')
    return drawn


def plot_varied(runs: Sequence[RunRecord], metric: str | None = None, split: str = 'validation') -> Figure:
    """Plots a metric of the results over each varied option.

    Each option has a panel. Lines connect runs that differ only in this option. Options that always change together
    share a panel with the name of the first option. A run of the recipe without changes is a star in each panel. Bars
    are standard deviations over seeds.

    Args:
      runs: the result of `load_runs`.
      metric: a metric of the results; the default is config.eval.metric of the first run or, if the results do not
        have this metric, their first metric in the order of METRICS.
      split: the split of the results.

    Raises:
      UserError: if `runs` is empty.
    """
    check_not_empty(runs)
    measured = {name for run in runs for name in run.results.get(split, {})}
    usual = runs[0].config['eval.metric']
    shown: str = metric or scored_metric(measured, usual) or usual
    points = []
    for setting in by_setting(runs):
        values = [run.results[split][shown] for run in setting if shown in run.results.get(split, {})]
        if values:
            # The run with the fewest options is the recipe without changes, if the setting contains it.
            points.append((min(setting, key=lambda run: len(run.settings)), spread(values)))
    panels = _panels(points)
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    drawn = Figure(figsize=(4.2 * columns, 3.4 * rows), layout='constrained')
    short = short_names(runs[0].config)
    axes = None
    for index, panel in enumerate(panels):
        axes = drawn.add_subplot(rows, columns, 1 + index, sharey=axes)
        _draw_panel(axes, panel, short)
        axes.set_ylabel(_named(shown) if index % columns == 0 else '')
        axes.grid(alpha=0.3)
    if points:
        scored = [run for run in runs if shown in run.results.get(split, {})]
        drawn.suptitle(_of_decode(scored, shown, split), fontsize=9, wrap=True)
    if not panels:
        drawn.add_subplot().set_title(f'no option varies: {_named(shown)} {points[0][1]}' if points else
                                      f'no results with {shown} on {split} yet')
    return drawn


def _named(metric: str) -> str:
    return NAMES.get(metric, metric.replace('_', ' '))


def _in_training(runs: Sequence[RunRecord], metric: str) -> str:
    """Describes how the evaluations during training measured a metric.

    An example is 'BLEU in training: greedy, 200 sentences of validation'.
    """
    size = min((run.results['validation']['n'] for run in runs if 'n' in run.results.get('validation', {})),
                default=math.inf)

    def how(run):
        smoothing = run.config['train.label_smoothing'] if is_used('train.label_smoothing', run.config) else 0
        return _how(run, metric, run.config['eval.method'], run.config['decode.beam'],
                    f'label smoothing {smoothing:g}' if smoothing else '')

    def part(run):
        if metric in SEARCHED:
            count = run.config['eval.bleu_sentences']
            return f'{count:,} sentences of validation' if 0 < count < size else 'all of validation'
        # Evaluation during training leaves out pairs that are too long for training.
        return 'validation' if is_used('data.max_length', run.config) else 'all of validation'

    return f'{_named(metric)} in training: ' + _measured(map(how, runs), map(part, runs))


def _of_decode(runs: Sequence[RunRecord], metric: str, split: str) -> str:
    """Describes how decode.py measured a metric: 'BLEU of decode.py: beam 4, all of validation'."""
    def how(run):
        search = run.results[split].get('decoding', {})  # flags of decode.py may differ from the config
        method, beam = (search.get(name, run.config[f'decode.{name}']) for name in ('method', 'beam'))
        return _how(run, metric, method, beam, 'no label smoothing')

    return f'{_named(metric)} of decode.py: ' + _measured(map(how, runs), [f'all of {split}'])


def _how(run: RunRecord, metric: str, method: str, beam: int, smoothing: str) -> str:
    """Returns a description of the settings on which a metric depends, or '' if the metric depends on no setting."""
    if metric in SEARCHED:
        return {'beam': f'beam {beam}', 'mbr': f'mbr, beam {beam}', 'sample': 'sampled'}.get(method, method)
    if metric == 'loss':
        return smoothing
    return 'teacher forcing' if is_used('eval.method', run.config) else ''  # in contrast to metrics of search outputs


def _measured(how: Iterable[str], part: Iterable[str]) -> str:
    """Describes how several runs measured a metric. `how` are the methods, and `part` are the parts of the data."""
    hows, parts = dict.fromkeys(how), dict.fromkeys(part)
    return ', '.join(filter(None, ['measured differently per run' if len(hows) > 1 else min(hows),
                                   'different parts of validation' if len(parts) > 1 else min(parts)]))


class _Panel(NamedTuple):
    """A panel of `plot_varied`: the lines for one option.

    `option` is on the x-axis, and the options `others` change together with `option`. `lines` is {name of a line:
    its points}. `base` is the run of the recipe without changes, or None.
    """
    option: str
    others: tuple[str, ...]
    lines: dict[str, list[Point]]
    base: Point | None


def _panels(points: Sequence[Point]) -> list[_Panel]:
    base = next((point for point in points if not point[0].settings), None)
    families = {}  # {varied options: points that set these options}
    for point in points:
        if point[0].settings:
            families.setdefault(tuple(point[0].settings), []).append(point)
    panels = []
    for options, family in families.items():
        family_panels = []
        for option in options:
            lines = {}
            for run, value in family:
                rest = {name: setting for name, setting in run.settings.items() if name != option}
                lines.setdefault(run_names([rest], run.config)[0], []).append((run, value))
            lines = {name: line for name, line in lines.items() if len(line) > 1}
            if lines:
                family_panels.append(_Panel(option, (), lines, base))
        panels += family_panels or [_Panel(options[0], options[1:], {'base': family}, base)]
    return panels


def _draw_panel(axes, panel: _Panel, short: Mapping[str, str]) -> None:
    base = [] if panel.base is None else [panel.base]
    joined = base if list(panel.lines) == ['base'] else []  # if no other option is set, the line includes the recipe
    values = list(dict.fromkeys(run.width(panel.option) for line in [base, *panel.lines.values()] for run, _ in line))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    place = {value: value if numbers else index for index, value in enumerate(values)}
    if numbers and min(values) > 0 and max(values) / min(values) >= 4:
        axes.set_xscale('log')
    for index, (name, line) in enumerate(panel.lines.items()):
        line = sorted([*joined, *line], key=lambda point: place[point[0].width(panel.option)])
        color = _color(index, len(panel.lines))
        axes.errorbar([place[run.width(panel.option)] for run, _ in line], [value.mean for _, value in line],
                      [value.deviation or 0 for _, value in line], color=color, capsize=3, marker='o', markersize=4,
                      linestyle='-' if numbers else 'none' if len(panel.lines) == 1 else ':', label=name)
    for run, value in base:
        axes.plot([place[run.width(panel.option)]], [value.mean], marker='*', markersize=13, color='black',
                  linestyle='none', label='base', zorder=3)
    axes.margins(x=0.08 if numbers else 0.3)
    labels = [_tick(value) for value in values]
    rotation = 30 if len(values) > 4 else 0
    if numbers:
        rotation = 90 if _crowded(axes, values, labels) else 0
    axes.set_xticks(list(place.values()), labels, fontsize=8, rotation=rotation)
    axes.minorticks_off()
    together = f' (with {", ".join(short[option] for option in panel.others)})' if panel.others else ''
    axes.set_xlabel(short[panel.option] + together)
    if 1 < len(panel.lines) <= 8:
        axes.legend(fontsize=7, loc='lower center', bbox_to_anchor=(0.5, 1), ncols=2)


def _crowded(axes, values: Sequence[float], labels: Sequence[str]) -> bool:
    """Returns whether horizontal labels of neighbouring ticks would overlap."""
    to_axes = axes.transScale + axes.transLimits
    axes.autoscale_view()
    ticks = sorted((to_axes.transform((value, 1))[0], len(label)) for value, label in zip(values, labels, strict=True))
    # A panel is about 3.5 inches wide, and a digit of 8 points is about 0.07 inches wide.
    return any(right - left < 0.02 * (1 + (left_length + right_length) / 2)
               for (left, left_length), (right, right_length) in itertools.pairwise(ticks))


def _tick(value: Any) -> str:
    return f'{value:g}' if isinstance(value, float) else str(value)


def _color(index: int, count: int):
    return f'C{index}' if count <= 10 else matplotlib.colormaps['viridis'](index / (count - 1) * 0.95)
