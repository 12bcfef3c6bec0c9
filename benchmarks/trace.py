"""What each operation of a compiled program costs, by XLA's own profile."""

import collections
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks.measure import times

Name = tuple[str, str]  # of a program, and of an operation in it
IDLE: Name = '', 'nothing runs'


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


def profile(call: Callable[[], Any], runs: int) -> tuple[float, dict[Name, Cost]]:
    """Seconds of a call without the profiler, and the costs of one with it, by operation: of `runs` the fastest."""
    times(call, 2)
    return min(times(call, runs)), min(
        (profiled(call) for _ in range(runs)), key=lambda costs: sum(cost.seconds for cost in costs.values()))


def profiled(call: Callable[[], Any]) -> dict[Name, Cost]:
    """The costs of one call, by operation."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        [trace] = Path(folder).rglob('*.xplane.pb')
        return costs_of(ProfileData.from_file(str(trace)).planes)


def costs_of(planes: Iterable[Any]) -> dict[Name, Cost]:
    """The cost of each operation of ProfileData's planes, and of IDLE, from the first operation to the last."""
    costs, last = collections.defaultdict(Cost), None
    stacks, launched_by = collections.defaultdict(list), {}  # thread -> operations, the innermost last; task -> one
    for at, _, thread, what, name in sorted(marks(planes), key=lambda mark: mark[:2]):
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


def marks(planes: Iterable[Any]) -> Iterator[tuple[float, int, str, str, Any]]:
    """(nanosecond, rank among those of the same instant, thread, what happens, of which operation or task).

    An operation's own event covers what the thread does that begins it. It may launch tasks, which other threads
    work on, even after the event's end; tasks may launch tasks. On a GPU or a TPU there are events only.
    """
    for plane in planes:
        for line in plane.lines:
            thread = f'{plane.name} {line.name}'
            for event in line.events:
                told = dict(event.stats)
                if 'hlo_op' in told:
                    yield event.start_ns, 3, thread, 'begin', (told['hlo_module'], told['hlo_op'])
                    yield event.start_ns + event.duration_ns, 1, thread, 'end', None
                elif event.name == 'ThreadpoolListener::Record':
                    yield event.start_ns, 4, thread, 'launch', told['_p']
                elif event.name == 'ThreadpoolListener::StartRegion':
                    yield event.start_ns, 2, thread, 'work', told['_c']
                elif event.name == 'ThreadpoolListener::StopRegion':
                    yield event.start_ns, 0, thread, 'end', None
