"""Reads the cost of each operation of a compiled program from XLA's profile."""

import collections
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks.measure import times
from benchmarks.operations import Op

Name = tuple[str, str]  # the name of a program, and the name of an operation in it
IDLE: Name = '', 'nothing runs'


@dataclasses.dataclass
class Cost:
    """The cost of operations.

    Attributes:
      count: the number of executions.
      seconds: wall-clock seconds. Threads that run operations at the same time share the time equally.
      running_seconds: wall-clock seconds during which an operation runs, also while further operations run.
      thread_seconds: seconds, summed over threads.
      flops: the number of floating-point operations in matrix products.
    """
    count: float = 0
    seconds: float = 0
    running_seconds: float = 0
    thread_seconds: float = 0
    flops: float = 0

    def add(self, other: 'Cost') -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def profile(call: Callable[[], Any], runs: int) -> tuple[float, dict[Name, Cost]]:
    """Calls `call` several times without the profiler, and then several times with the profiler.

    Returns the shortest time without the profiler, in seconds, and {operation: cost} of the fastest profiled call.
    """
    times(call, 2)
    return min(times(call, runs)), min(
        (profiled(call) for _ in range(runs)), key=lambda costs: sum(cost.seconds for cost in costs.values()))


def profiled(call: Callable[[], Any]) -> dict[Name, Cost]:
    """Runs `call` once in JAX's profiler. Returns {operation: cost}."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        [trace] = Path(folder).rglob('*.xplane.pb')
        return costs_of(ProfileData.from_file(str(trace)).planes)


def costs_of(planes: Iterable[Any]) -> dict[Name, Cost]:
    """Returns {operation: cost} from the planes of ProfileData. The cost of IDLE is the time between operations."""
    costs, last = collections.defaultdict(Cost), None
    stacks = collections.defaultdict(list)  # {thread: its running operations, the innermost last}
    launched_by = {}  # {task: the operation that launched the task}
    for at, _, thread, mark, name in sorted(marks(planes), key=lambda item: item[:2]):
        busy = [stack[-1] for stack in stacks.values() if stack and stack[-1]]
        if last is not None:
            elapsed = (at - last) / 1e9
            for operation in busy or [IDLE]:
                costs[operation].seconds += elapsed / len(busy or [IDLE])
                costs[operation].thread_seconds += elapsed * bool(busy)
            for operation in {*busy} or {IDLE}:
                costs[operation].running_seconds += elapsed
        last, stack = at, stacks[thread]
        if mark == 'begin':
            stack.append(name)
            costs[name].count += 1
        elif mark == 'launch':
            launched_by[name] = stack[-1] if stack else None
        elif mark == 'work':
            stack.append(launched_by.get(name))
        elif stack:
            stack.pop()
    return dict(costs)


def marks(planes: Iterable[Any]) -> Iterator[tuple[float, int, str, str, Any]]:
    """Yields (time in nanoseconds, rank, thread, mark, operation or task).

    The rank determines the order of marks with the same time. 'begin' is the start of an operation, 'launch' is the
    launch of a task, 'work' is the start of a task, and 'end' is the end of an operation or a task.

    The profiler's event of an operation covers only the work of the thread that begins the operation. The operation may
    launch tasks for other threads. A task may end after the event, and may launch further tasks. On a GPU or a TPU,
    there are events but no tasks.
    """
    for plane in planes:
        for line in plane.lines:
            thread = f'{plane.name} {line.name}'
            for event in line.events:
                stats = dict(event.stats)
                if 'hlo_op' in stats:
                    yield event.start_ns, 3, thread, 'begin', (stats['hlo_module'], stats['hlo_op'])
                    yield event.start_ns + event.duration_ns, 1, thread, 'end', None
                elif event.name == 'ThreadpoolListener::Record':
                    yield event.start_ns, 4, thread, 'launch', stats['_p']
                elif event.name == 'ThreadpoolListener::StartRegion':
                    yield event.start_ns, 2, thread, 'work', stats['_c']
                elif event.name == 'ThreadpoolListener::StopRegion':
                    yield event.start_ns, 0, thread, 'end', None


def print_table(costs: Mapping[Name, Cost], ops: Mapping[Name, Op], by: Callable[[Op], tuple[str, ...]],
                top: int) -> None:
    """Prints the `top` groups of operations that take the most time, and the total of all groups.

    `by` is a function that returns the group of an operation.
    """
    groups, total = collections.defaultdict(Cost), Cost()
    for name, cost in costs.items():
        op = ops.get(name, Op(name[1], 'not found', '', '', 0))
        cost = dataclasses.replace(cost, flops=cost.count * op.flops)
        groups[by(op)].add(cost)
        total.add(cost)
    # The sum would count a period several times if several operations run in it.
    total.running_seconds = total.seconds
    print(f'{"times":>8} {"ms":>9} {"share":>6} {"threads":>7} {"GFLOP/s":>7}  what')
    ranked = sorted(groups.items(), key=lambda group: -group[1].seconds)
    for names, cost in [*ranked[:top], (('total',), total)]:
        running = max(cost.running_seconds, 1e-12)
        speed = f'{cost.flops / running / 1e9:7.0f}' if cost.flops > 0 else ' ' * 7  # NaN: unknown
        threads = cost.thread_seconds / running
        print(f'{cost.count:8.1f} {1e3 * cost.seconds:9.3f} {cost.seconds / total.seconds:6.1%} {threads:7.2f} {speed}'
              f'  {" | ".join(names)}')
