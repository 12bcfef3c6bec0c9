"""Systems that are timed in turns, A B C A B C ..., each in a process of its own.

In one process the libraries would share threads, memory and its peak. All processes have the same environment, hence
the same malloc, and the same cores. Only one works at a time. A turn is calls for WARM_UP seconds, at least one, and
one more that is timed: the first calls find cold caches, and OpenMP's threads of the system before (CTranslate2's spin
for 0.2 s after their work). With a pause instead, alone, our train step took a quarter longer and PyTorch's 2 %; but
steps follow each other.
"""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import platform
import re
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runtime.errors import UserError

CORES = len(os.sched_getaffinity(0))
WARM_UP = 0.5


def peak_resident() -> float:
    """GB. A process that Linux starts counts its parent's memory in ru_maxrss; /proc has its own."""
    with contextlib.suppress(OSError):
        return int(re.findall(r'VmHWM:\s+(\d+) kB', Path('/proc/self/status').read_text())[0]) / 2 ** 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == 'darwin' else 20)


class Ready(NamedTuple):
    """A system that is ready to be timed.

    Attributes:
      call: does the work once, and returns when it is done.
      told: what its JSON line says of it besides, such as 'compile_s' and versions.
      answer: the tokens of each sentence that it decodes; None of what does not decode.
      peak_memory_gb: the peak so far.
    """
    call: Callable[[], Any]
    told: Mapping[str, Any]
    answer: Any = None
    peak_memory_gb: Callable[[], float] = peak_resident


class System(NamedTuple):
    """A name, and what makes it ready in a process of its own: a function that returns a Ready, and its arguments.

    The function is 'module:name', so that no process imports the library of another one.
    """
    name: str
    make: str
    arguments: tuple = ()


class Timed(NamedTuple):
    """Seconds of each turn of a system, what it told, its answer, and its peak memory."""
    seconds: list[float]
    told: Mapping[str, Any]
    answer: Any
    peak_memory_gb: float


def in_turns(systems: Sequence[System], turns: int) -> dict[str, Timed]:
    """Times each system `turns` times.

    Raises:
      UserError: that of a system while it is made.
    """
    with contextlib.ExitStack() as stack:
        started = {}
        for system in systems:  # one waits for the other: they compile
            pipe = stack.enter_context(_started(system))
            started[system.name] = pipe, *_heard(pipe, system.name)
        seconds = {name: [] for name in started}
        for _ in range(turns):
            for name, (pipe, *_) in started.items():
                pipe.send('turn')
                seconds[name].append(_heard(pipe, name))
        found = {}
        for name, (pipe, told, answer) in started.items():
            pipe.send('end')
            found[name] = Timed(seconds[name], told, answer, _heard(pipe, name))
        return found


def report_turns(found: Mapping[str, Timed], tokens: int, what: Mapping[str, Any]) -> None:
    """Prints a JSON line for each system, and one with the ratio of the first to each other one.

    Args:
      found: from `in_turns`.
      tokens: of a turn.
      what: begins each line.
    """
    for name, timed in found.items():
        median = statistics.median(timed.seconds)
        print(json.dumps({
            **what, 'system': name, 'tokens_per_second': round(tokens / median), 'median_s': round(median, 4),
            'best_s': round(min(timed.seconds), 4), 'worst_s': round(max(timed.seconds), 4),
            'turns': len(timed.seconds), **timed.told, 'peak_memory_gb': round(timed.peak_memory_gb, 3),
            'cores': CORES, 'python': platform.python_version()}), flush=True)
    first, *others = found
    for other in others:
        same = agreement(found[first].answer, found[other].answer)
        ratios = np.divide(found[other].seconds, found[first].seconds)
        print(json.dumps({
            **what, 'ratio': round(np.median(ratios), 3), 'of': f'{first} to {other}',
            'quartiles': np.quantile(ratios, [0.25, 0.75]).round(3).tolist(), 'turns': len(ratios), **same}),
            flush=True)


def agreement(ours: list[list[int]] | None, theirs: list[list[int]] | None) -> dict[str, float]:
    """The share of tokens that are the same in both answers; {} without answers."""
    if ours is None or theirs is None:
        return {}
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return {'same_tokens': round(statistics.mean(one == other for one, other in pairs), 4)}


def check_peers(peers: Sequence[str], libraries: Mapping[str, str], dtype: str) -> None:
    """Refuses what --peers cannot do. `libraries`: peer -> the library that it is imported from.

    Raises:
      UserError: if a peer is unknown or named twice, its library is not installed, or we do not compute in float32.
    """
    for peer in peers:
        if peer not in libraries:
            raise UserError(f'--peers={peer}: there is {", ".join(libraries)}')
        if peers.count(peer) > 1:
            raise UserError(f'--peers names {peer} twice')
        if importlib.util.find_spec(libraries[peer]) is None:
            raise UserError(f"--peers={peer} needs {libraries[peer]}: python -m pip install -e '.[benchmark]'")
        if dtype != 'float32':
            raise UserError(f'--peers compute in float32: leave out --peers or --dtype={dtype}')


@contextlib.contextmanager
def _started(system: System) -> Iterator[Connection]:
    """A process that makes the system and then waits for its turns; it ends with the context."""
    context = multiprocessing.get_context('spawn')
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, system), daemon=True)
    process.start()
    theirs.close()  # so that the pipe ends with the process
    try:
        yield ours
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()


def _serve(pipe: Connection, system: System) -> None:
    """What the process of a system does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    try:
        ready = pkgutil.resolve_name(system.make)(*system.arguments)
    except UserError as error:
        pipe.send(error)
        return
    pipe.send((ready.told, ready.answer))
    with contextlib.suppress(EOFError):
        while pipe.recv() == 'turn':
            began = time.perf_counter()
            ready.call()
            while time.perf_counter() < began + WARM_UP:
                ready.call()
            began = time.perf_counter()
            ready.call()
            pipe.send(time.perf_counter() - began)
        pipe.send(ready.peak_memory_gb())


def _heard(pipe: Connection, name: str) -> Any:
    """The next message of a system's process."""
    try:
        message = pipe.recv()
    except EOFError:
        raise RuntimeError(f'the process of {name} died') from None
    if isinstance(message, UserError):
        raise message
    return message
