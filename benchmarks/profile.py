"""Where the time goes: python -m benchmarks.profile --what=train_step|decode [--workload=tiny|base] [--top=40]

Profiles a few runs and prints two tables: operations, those of the same kind at the same place of the model (in any
layer) together; and kinds. `ms` is of one train step, or of one token's step of a search (encoding is in it). The
figures add up to the time of the step: an instant in which several operations run is shared among them. `threads` is
how many threads worked for an operation on average while it ran, `GFLOP/s` counts matrix products only.

--each prints every operation by the name that it has in the compiled program; --hlo=DIR keeps the programs.
"""

from command_line import read_command_line, run_script, use_huge_pages

# ruff: noqa: E402 (flags come before the imports that take seconds)
if __name__ == '__main__':
    use_huge_pages()

from absl import flags

from benchmarks.workloads import WORKLOADS, Search

WHAT = flags.DEFINE_enum('what', 'train_step', ['train_step', 'decode'], 'What is profiled.')
WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'Which sizes.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.')
BEAM = flags.DEFINE_integer('beam', 4, 'Of the search; 1 is greedy.', lower_bound=1)
RUNS = flags.DEFINE_integer('runs', 4, 'Steps or searches that are profiled; the fastest counts.', lower_bound=1)
TOP = flags.DEFINE_integer('top', 40, 'Lines of the first table.', lower_bound=1)
EACH = flags.DEFINE_bool('each', False, 'Every operation by itself.')
HLO = flags.DEFINE_string('hlo', None, 'Folder for the compiled programs, as text.')

if __name__ == '__main__':
    read_command_line()

import collections
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.operations import Op, ops_of
from benchmarks.ours import Translations, train_program
from benchmarks.trace import IDLE, Cost, Name, profile
from runtime.files import expanded


def main() -> None:
    with tempfile.TemporaryDirectory() as dump:
        # XLA, which reads this at its first use, writes there what it compiles.
        os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_dump_to={dump} --xla_dump_hlo_as_text'
        report(Path(dump))


def report(dump: Path) -> None:
    """Profiles, and prints the two tables."""
    workload = WORKLOADS[WORKLOAD.value]
    if WHAT.value == 'train_step':
        call, steps = train_program(workload, DTYPE.value).call, 1
    else:
        search = Search(beam=BEAM.value)
        call, steps = Translations(workload, DTYPE.value, search), search.target
    seconds, costs = profile(call, RUNS.value)
    for cost in costs.values():
        for field in dataclasses.fields(cost):
            setattr(cost, field.name, getattr(cost, field.name) / steps)
    ops = {IDLE: Op(IDLE[1], IDLE[1], '', '', 0)}
    for program in {program for program, _ in costs if program}:
        text = max(dump.glob(f'*.{program}.*after_optimizations.txt'))  # the last one of this name
        if HLO.value:
            expanded(HLO.value).mkdir(parents=True, exist_ok=True)
            shutil.copy(text, expanded(HLO.value))
        ops |= {(program, name): op for name, op in ops_of(text.read_text(), workload.vocab_size).items()}
    print(f'{WHAT.value}, {WORKLOAD.value}, {DTYPE.value}: {1e3 * seconds / steps:.2f} ms a step without the profiler')
    print_table(costs, ops, by=(lambda op: (op.kind, op.place, op.shape, op.name)) if EACH.value else
                (lambda op: (op.kind, op.place, op.shape)), top=TOP.value)
    print()
    print_table(costs, ops, by=lambda op: (op.kind,), top=100)


def print_table(costs: Mapping[Name, Cost], ops: Mapping[Name, Op], by: Callable[[Op], tuple[str, ...]],
                top: int) -> None:
    """The `top` groups of operations that take the most time, and their sum."""
    groups, total = collections.defaultdict(Cost), Cost()
    for name, cost in costs.items():
        op = ops.get(name, Op(name[1], 'not found', '', '', 0))
        cost = dataclasses.replace(cost, flops=cost.count * op.flops)
        groups[by(op)].add(cost)
        total.add(cost)
    print(f'{"times":>8} {"ms":>9} {"share":>6} {"threads":>7} {"GFLOP/s":>7}  what')
    ranked = sorted(groups.items(), key=lambda group: -group[1].seconds)
    for names, cost in [*ranked[:top], (('total',), total)]:
        speed = f'{cost.flops / cost.seconds / 1e9:7.0f}' if cost.flops else ' ' * 7
        threads = cost.thread_seconds / max(cost.seconds, 1e-12)
        print(f'{cost.count:8.1f} {1e3 * cost.seconds:9.3f} {cost.seconds / total.seconds:6.1%} {threads:7.2f} {speed}'
              f'  {" | ".join(names)}')


if __name__ == '__main__':
    run_script(main)
