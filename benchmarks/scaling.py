"""Measures how the cost of a train step grows: python -m benchmarks.scaling [--figure=scaling.png]

Measures the time and the memory of a train step of a small model. One size grows, and the other sizes are constant. The
sizes are the length of the sequences, the batch, the vocabulary, and the width d_model (with d_ff = 2 d_model and
d_k = 32). Prints a JSON line per point, and then a JSON line per size with the exponents p of cost ~ size^p. Each
exponent is the slope of a line that is fitted to log(cost) and log(size). Only the three largest values of a size are
used, because constant costs matter least there. The memory is the value that XLA reports for the step. All sizes
together take a few minutes.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from benchmarks.workloads import Workload
from command_line import run_script
from runtime.errors import UserError
from runtime.files import check_folder, expanded

if TYPE_CHECKING:  # the import of matplotlib is slow, and --help does not need it
    from matplotlib.figure import Figure

RUNS = flags.DEFINE_integer('runs', 5, 'The number of timed runs per point. The fastest run counts.', lower_bound=1)
FIGURE = flags.DEFINE_string('figure', 'scaling.png', 'The file for the figure.')

BASE = Workload(num_layers=2, d_model=128, d_ff=256, num_heads=4, vocab_size=4000, batch=16, length=64)
SIZES = {  # the values of each size, including the value in BASE
    'length': [32, 64, 128, 256, 512], 'batch': [8, 16, 32, 64, 128],
    'vocabulary': [2000, 4000, 8000, 16_000, 32_000], 'width': [64, 128, 256, 512]}


class Point(NamedTuple):
    """The cost of a train step at one value of a size, in milliseconds and gigabytes."""
    value: int
    ms: float
    gb: float


def main() -> None:
    from analysis.pictures import save_figure  # this import takes seconds, and --help does not need it

    path = expanded(FIGURE.value)
    if path.suffix not in ('.png', '.pdf', '.svg'):
        raise UserError(f'--figure={path} must end with .png, .pdf or .svg')
    check_folder(path.parent)
    curves = {}
    for size, values in SIZES.items():
        curves[size] = [measure(size, value) for value in values]
        for point in curves[size]:
            print(json.dumps({'benchmark': 'scaling', 'size': size, 'value': point.value, 'ms': round(point.ms, 3),
                              'memory_gb': round(point.gb, 4)}), flush=True)
    for size, points in curves.items():
        print(json.dumps({'benchmark': 'scaling', 'size': size, **{
            f'exponent_of_{cost}': round(exponent(points, cost), 2) for cost in ('ms', 'gb')}}), flush=True)
    save_figure(plot(curves), path)


def measure(size: str, value: int) -> Point:
    """Measures the train step of the workload BASE with the size `size` set to `value`."""
    from benchmarks.measure import times
    from benchmarks.ours import train_program

    program = train_program(resized(size, value), 'float32')
    times(program.call, 1)  # warm up
    return Point(value, 1e3 * min(times(program.call, RUNS.value)), program.gigabytes)


def resized(size: str, value: int) -> Workload:
    """Returns the workload BASE with the size `size` set to `value`."""
    changes = {'length': {'length': value}, 'batch': {'batch': value}, 'vocabulary': {'vocab_size': value},
               'width': {'d_model': value, 'd_ff': 2 * value, 'num_heads': value // 32}}
    return dataclasses.replace(BASE, **changes[size])


def exponent(points: Sequence[Point], cost: str) -> float:
    """Returns the exponent p of cost ~ value^p.

    This is the slope of a line through log(cost) and log(value), fitted to the points with the largest values:
    three of four or five points.
    """
    larger = sorted(points)[(len(points) - 1) // 2:]
    return statistics.linear_regression([math.log(point.value) for point in larger],
                                        [math.log(getattr(point, cost)) for point in larger]).slope


def plot(curves: dict[str, list[Point]]) -> 'Figure':
    """Plots time and memory over each size on logarithmic axes. A size of 1x is the value in BASE."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout='constrained')
    for axes, (cost, label) in zip(figure.subplots(1, 2), {
            'ms': 'milliseconds per train step', 'gb': 'gigabytes'}.items(), strict=True):
        for marker, (size, points) in zip('osD^', curves.items(), strict=False):
            start = SIZES[size][1]
            axes.plot([point.value / start for point in points], [getattr(point, cost) for point in points],
                      marker=marker, label=f'{size} (1x = {start:,}): exponent {exponent(points, cost):.2f}')
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.xaxis.set_major_formatter(lambda value, _: f'{value:g}x')
        axes.set(xlabel='size (the other sizes are 1x)', ylabel=label)
        axes.grid(alpha=0.3, which='both')
        axes.legend(fontsize=8)
    return figure


if __name__ == '__main__':
    run_script(main, computes=True)
