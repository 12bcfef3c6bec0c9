"""How the cost grows: python -m benchmarks.scaling [--figure=scaling.png]

Time and memory of a train step of a small model as one size grows and the others stay: the length of the sequences, the
batch, the vocabulary, the width (with the feed-forward's, of twice it; heads stay 32 wide). A JSON line for each point,
then one for each size with the exponents p of cost ~ size^p: the slopes of the larger half of the points in the figure,
where what does not grow weighs least. Memory is what the step holds, by XLA's account. The whole takes a few minutes.
"""

from command_line import read_command_line, run_script, use_huge_pages

# ruff: noqa: E402 (flags come before the imports that take seconds)
if __name__ == '__main__':
    use_huge_pages()

from absl import flags

RUNS = flags.DEFINE_integer('runs', 5, 'Timed runs of each point; the fastest counts.', lower_bound=1)
FIGURE = flags.DEFINE_string('figure', 'scaling.png', 'Where the figure goes.')

if __name__ == '__main__':
    read_command_line()

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from analysis.pictures import save_figure
from benchmarks.measure import times
from benchmarks.ours import train_program
from benchmarks.workloads import Workload
from runtime.files import expanded

BASE = Workload(num_layers=2, d_model=128, d_ff=256, num_heads=4, vocab_size=4000, batch=16, length=64)
SIZES = {  # what grows -> its values, that of BASE among them
    'length': [32, 64, 128, 256, 512], 'batch': [8, 16, 32, 64, 128],
    'vocabulary': [2000, 4000, 8000, 16_000, 32_000], 'width': [64, 128, 256, 512]}


class Point(NamedTuple):
    """The cost at one value of a size: milliseconds, and gigabytes."""
    value: int
    ms: float
    gb: float


def main() -> None:
    what = {'benchmark': 'scaling'}
    curves = {}
    for size, values in SIZES.items():
        curves[size] = [measure(size, value) for value in values]
        for point in curves[size]:
            print(json.dumps({**what, 'size': size, 'value': point.value, 'ms': round(point.ms, 3),
                              'memory_gb': round(point.gb, 4)}), flush=True)
    for size, points in curves.items():
        print(json.dumps({**what, 'size': size, **{
            f'exponent_of_{cost}': round(exponent(points, cost), 2) for cost in ('ms', 'gb')}}), flush=True)
    save_figure(plot(curves), expanded(FIGURE.value))


def measure(size: str, value: int) -> Point:
    """The cost of BASE with one size changed."""
    program = train_program(resized(size, value), 'float32')
    times(program.call, 1)  # warm up
    return Point(value, 1e3 * min(times(program.call, RUNS.value)), program.gigabytes)


def resized(size: str, value: int) -> Workload:
    """BASE with one size changed."""
    changes = {'length': {'length': value}, 'batch': {'batch': value}, 'vocabulary': {'vocab_size': value},
               'width': {'d_model': value, 'd_ff': 2 * value, 'num_heads': value // 32}}
    return dataclasses.replace(BASE, **changes[size])


def exponent(points: Sequence[Point], cost: str) -> float:
    """The p of cost ~ value^p that fits the larger half of the points best, the middle one included."""
    larger = sorted(points)[(len(points) - 1) // 2:]
    values, costs = [point.value for point in larger], [getattr(point, cost) for point in larger]
    return float(np.polyfit(np.log(values), np.log(costs), 1)[0])


def plot(curves: dict[str, list[Point]]) -> Figure:
    """Time and memory against each size, as a multiple of BASE's, on logarithmic axes."""
    figure = Figure(figsize=(11, 4.5), layout='constrained')
    for axes, (cost, label) in zip(figure.subplots(1, 2), {
            'ms': 'milliseconds of a train step', 'gb': 'gigabytes'}.items(), strict=True):
        for marker, (size, points) in zip('osD^', curves.items(), strict=False):
            start = SIZES[size][1]
            axes.plot([point.value / start for point in points], [getattr(point, cost) for point in points],
                      marker=marker, label=f'{size} (1x = {start:,}): exponent {exponent(points, cost):.2f}')
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.xaxis.set_major_formatter(lambda value, _: f'{value:g}x')
        axes.set(xlabel='size, the others at 1x', ylabel=label)
        axes.grid(alpha=0.3, which='both')
        axes.legend(fontsize=8)
    return figure


if __name__ == '__main__':
    run_script(main)
