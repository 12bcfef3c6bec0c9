"""Where the time goes: python -m benchmarks.profile --what=train_step|decode [--workload=tiny|base] [--top=40]

Profiles a few runs and prints two tables: operations, those of the same kind at the same place of the model (in any
layer) together; and kinds. `ms` is of one train step, or of one token's step of a search (encoding is in it). The
figures add up to the time of the step: an instant in which several operations run is shared among them. `threads` is
how many threads worked for an operation on average while it ran, `GFLOP/s` counts matrix products only.

--each prints every operation by the name that it has in the compiled program, which --hlo=FILE writes.
"""

from command_line import run_script, use_huge_pages

if __name__ == '__main__':
    use_huge_pages()

import collections
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags
from jax.profiler import ProfileData

from benchmarks.hlo import Op, ops_of
from benchmarks.measure import times
from benchmarks.ours import Program, decode_program, train_program
from benchmarks.workloads import WORKLOADS, Search

WHAT = flags.DEFINE_enum('what', 'train_step', ['train_step', 'decode'], 'What is profiled.')
WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'Which sizes.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.')
BEAM = flags.DEFINE_integer('beam', 4, 'Of the search; 1 is greedy.', lower_bound=1)
RUNS = flags.DEFINE_integer('runs', 4, 'Steps or searches that are profiled; the fastest counts.', lower_bound=1)
TOP = flags.DEFINE_integer('top', 40, 'Lines of the first table.', lower_bound=1)
EACH = flags.DEFINE_bool('each', False, 'Every operation by itself.')
HLO = flags.DEFINE_string('hlo', None, 'Write the compiled program here.')
IDLE = 'nothing runs'


@dataclasses.dataclass
class Cost:
    """Of one or more operations: how often they ran, seconds of the clock, seconds of all threads, flops."""
    count: float = 0
    seconds: float = 0
    thread_seconds: float = 0
    flops: float = 0

    def add(self, other: 'Cost') -> None:
        self.count += other.count
        self.seconds += other.seconds
        self.thread_seconds += other.thread_seconds
        self.flops += other.flops


def main() -> None:
    workload = WORKLOADS[WORKLOAD.value]
    if WHAT.value == 'train_step':
        program, steps = train_program(workload, DTYPE.value), 1
    else:
        search = Search(beam=BEAM.value, sentences=64)
        program, steps = decode_program(workload, DTYPE.value, search), search.target
    text = program.compiled.as_text()
    if HLO.value:
        Path(HLO.value).write_text(text)
    seconds, costs = profile(program, RUNS.value)
    for cost in costs.values():
        for field in dataclasses.fields(cost):
            setattr(cost, field.name, getattr(cost, field.name) / steps)
    ops = ops_of(text, workload.vocab_size)
    ops[IDLE] = Op(IDLE, IDLE, '', '', 0)
    print(f'{WHAT.value}, {WORKLOAD.value}, {DTYPE.value}: {1e3 * seconds / steps:.2f} ms a step without the profiler')
    print_table(costs, ops, by=(lambda op: (op.kind, op.place, op.shape, op.name)) if EACH.value else
                (lambda op: (op.kind, op.place, op.shape)), top=TOP.value)
    print()
    print_table(costs, ops, by=lambda op: (op.kind,), top=100)


def profile(program: Program, runs: int) -> tuple[float, dict[str, Cost]]:
    """Seconds of a run without the profiler, and the costs of one with it, by operation: of `runs` the fastest."""
    times(program.call, 2)
    return min(times(program.call, runs)), min(
        (profiled(program) for _ in range(runs)), key=lambda costs: sum(cost.seconds for cost in costs.values()))


def profiled(program: Program) -> dict[str, Cost]:
    """The costs of one run, by operation."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program.call())
        [trace] = Path(folder).rglob('*.xplane.pb')
        return costs_of(ProfileData.from_file(str(trace)))


def costs_of(trace: ProfileData) -> dict[str, Cost]:
    """The cost of each operation, and of IDLE: what lies between the first operation and the last."""
    costs, last = collections.defaultdict(Cost), None
    stacks, launched_by = collections.defaultdict(list), {}  # thread -> operations, the innermost last; task -> one
    for at, _, thread, what, name in sorted(marks(trace), key=lambda mark: mark[:2]):
        busy = [stack[-1] for stack in stacks.values() if stack and stack[-1]]
        if last is not None:
            for each in busy or [IDLE]:
                costs[each].seconds += (at - last) / 1e9 / len(busy or [IDLE])
                costs[each].thread_seconds += (at - last) / 1e9 * bool(busy)
        last, stack = at, stacks[thread]
        if what == 'begin':
            stack.append(name)
            costs[name].count += 1
        elif what == 'launch':
            launched_by[name] = stack[-1] if stack else None
        elif what == 'work':
            stack.append(launched_by.get(name))
        elif stack:
            stack.pop()
    return dict(costs)


def marks(trace: ProfileData) -> Iterator[tuple[float, int, str, str, str]]:
    """(nanosecond, rank among those of the same instant, thread, what happens, of which operation or task).

    An operation's own event covers what the thread does that begins it. It may launch tasks, which other threads
    work on, even after the event's end; tasks may launch tasks. On a GPU or a TPU there are events only.
    """
    for plane in trace.planes:
        for line in plane.lines:
            thread = f'{plane.name} {line.name}'
            for event in line.events:
                told = dict(event.stats)
                if 'hlo_op' in told:
                    yield event.start_ns, 3, thread, 'begin', str(told['hlo_op'])
                    yield event.start_ns + event.duration_ns, 1, thread, 'end', str(told['hlo_op'])
                elif event.name == 'ThreadpoolListener::Record':
                    yield event.start_ns, 4, thread, 'launch', str(told['_p'])
                elif event.name == 'ThreadpoolListener::StartRegion':
                    yield event.start_ns, 2, thread, 'work', str(told['_c'])
                elif event.name == 'ThreadpoolListener::StopRegion':
                    yield event.start_ns, 0, thread, 'end', ''


def print_table(costs: dict[str, Cost], ops: dict[str, Op], by, top: int) -> None:
    """The `top` groups of operations that take the most time, and their sum."""
    groups, total = collections.defaultdict(Cost), Cost()
    for name, cost in costs.items():
        op = ops.get(name, Op(name, 'not of this program', '', '', 0))
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
