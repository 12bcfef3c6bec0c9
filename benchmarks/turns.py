"""Measures the time of several systems in turns, A B C A B C ..., in separate processes.

In a single process, the libraries would share threads and memory. All processes have the same environment, the same
malloc and the same cores (but see `System.own_arenas`). Only one process works at a time. A turn consists of warm-up
calls for at least WARM_UP seconds and one timed call. The warm-up is necessary for two reasons. The first calls have
cold caches, and the OpenMP threads of the previous system still run (CTranslate2's threads spin for 0.2 s after their
work). A pause cannot replace the warm-up calls, because there is no pause between the steps of a real training. After a
pause, the train step of this project took 25 % longer, and PyTorch's train step took 2 % longer.
"""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from runtime.errors import UserError
from runtime.memory import peak_resident

CORES = len(os.sched_getaffinity(0))
WARM_UP = 0.5
TUNABLES = 'GLIBC_TUNABLES'


class Ready(NamedTuple):
    """A system that is ready to be timed.

    Attributes:
      call: does the work once, and returns when the work is done.
      facts: further entries of the system's JSON line, such as 'compile_s' and versions.
      answer: the tokens or the text of each decoded sentence; None if the system does not decode.
      peak_memory: returns the peak memory so far, in bytes.
    """
    call: Callable[[], Any]
    facts: Mapping[str, Any]
    answer: Any = None
    peak_memory: Callable[[], int] = peak_resident


class System(NamedTuple):
    """A system to be timed.

    Attributes:
      name: the name of the system.
      make: a function that prepares the system in a separate process and returns a Ready. The function is given as
        'module:name', so that no process imports the library of another system.
      arguments: the arguments of this function.
      own_arenas: whether each thread has its own arena of malloc. By default, all threads share one arena
        (`runtime.process_setup`). With one arena, a step of PyTorch's autocast takes twice as long, but a step in
        float32 is faster.
    """
    name: str
    make: str
    arguments: tuple = ()
    own_arenas: bool = False


class Timed(NamedTuple):
    """The results of a system. `seconds` has the time of each turn. `Ready` explains the other fields."""
    seconds: list[float]
    facts: Mapping[str, Any]
    answer: Any
    peak_memory_gb: float


def in_turns(systems: Sequence[System], turns: int) -> dict[str, Timed]:
    """Measures the time of each system in `turns` turns. Returns {name: results}.

    Raises:
      UserError: if the preparation of a system raises a UserError.
    """
    with contextlib.ExitStack() as stack:
        started = {}
        for system in systems:  # one after the other, because systems compile their programs at the start
            pipe = stack.enter_context(_started(system))
            started[system.name] = pipe, *_receive(pipe, system.name)
        seconds = {name: [] for name in started}
        for _ in range(turns):
            for name, (pipe, *_) in started.items():
                pipe.send('turn')
                seconds[name].append(_receive(pipe, name))
        timed = {}
        for name, (pipe, facts, answer) in started.items():
            pipe.send('end')
            timed[name] = Timed(seconds[name], facts, answer, _receive(pipe, name))
        return timed


def report_turns(results: Mapping[str, Timed], tokens: int, entries: Mapping[str, Any]) -> None:
    """Prints a JSON line per system, and a line with the ratio of the first system to each other system.

    Args:
      results: the result of `in_turns`.
      tokens: the number of tokens of a timed call.
      entries: the first entries of each line.
    """
    for name, timed in results.items():
        median = statistics.median(timed.seconds)
        print(json.dumps({
            **entries, 'system': name, 'tokens_per_second': round(tokens / median), 'median_s': round(median, 4),
            'best_s': round(min(timed.seconds), 4), 'worst_s': round(max(timed.seconds), 4),
            'turns': len(timed.seconds), **timed.facts, 'peak_memory_gb': round(timed.peak_memory_gb, 3),
            'cores': CORES, 'python': platform.python_version()}), flush=True)
    first, *others = results
    for other in others:
        agreeing = agreement(results[first].answer, results[other].answer)
        turns = zip(results[first].seconds, results[other].seconds, strict=True)
        ratios = [other_seconds / first_seconds for first_seconds, other_seconds in turns]
        lower, _, upper = statistics.quantiles(ratios if len(ratios) > 1 else 2 * ratios, method='inclusive')
        print(json.dumps({
            **entries, 'ratio': round(statistics.median(ratios), 3), 'of': f'{first} to {other}',
            'quartiles': [round(lower, 3), round(upper, 3)], 'turns': len(ratios), **agreeing}), flush=True)


def agreement(first: list[Any] | None, second: list[Any] | None) -> dict[str, float]:
    """Returns {'same_tokens': share of equal tokens} for the outputs of two systems.

    For texts, returns {'same_translations': share of equal texts}. Returns {} if one of the systems has no outputs.
    """
    if first is None or second is None:
        return {}
    if isinstance(first[0], str):
        return {'same_translations': round(statistics.mean(map(str.__eq__, first, second)), 4)}
    pairs = [pair for outputs in zip(first, second, strict=True) for pair in zip(*outputs, strict=True)]
    return {'same_tokens': round(statistics.mean(left == right for left, right in pairs), 4)}


def fastest(calls: Mapping[Any, Callable[[], Any]]) -> Any:
    """Returns the name of the call that takes the shortest time. Each call is made three times, first for warm-up.

    If there is only one call, it is not made.
    """
    if len(calls) == 1:
        return next(iter(calls))

    def seconds(call):
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    times = {name: [seconds(call) for _ in range(3)] for name, call in calls.items()}
    return min(times, key=lambda name: min(times[name][1:]))


def check_peers(peers: Sequence[str], libraries: Mapping[str, str], dtype: str) -> None:
    """Checks the flag --peers. `libraries` is {peer: the names of the libraries that it needs}.

    Raises:
      UserError: if a peer is unknown or a duplicate, its library is not installed, or the dtype is not float32.
    """
    for peer in peers:
        if peer not in libraries:
            raise UserError(f'--peers={peer}: unknown peer. Use {", ".join(libraries)}')
        if peers.count(peer) > 1:
            raise UserError(f'--peers contains {peer} twice. Remove the duplicate')
        for library in libraries[peer].split():
            if importlib.util.find_spec(library) is None:
                more = ' transformers' if 'transformers' in libraries[peer] else ''
                raise UserError(f"--peers={peer} needs {library}. Run python -m pip install -e '.[benchmark]'{more}")
        if dtype != 'float32':
            raise UserError(f'--dtype={dtype}: peers compute in float32. Remove --dtype or --peers')


def check_precision(precision: str, dtype: str) -> None:
    """Raises UserError if --matmul_precision has no effect, because the dtype is not float32."""
    if precision != 'default' and dtype != 'float32':
        raise UserError(f'--matmul_precision={precision} has no effect with the dtype {dtype}. Remove '
                        '--matmul_precision')


@contextlib.contextmanager
def _started(system: System) -> Iterator[Connection]:
    """Starts a process that prepares a system. Yields the connection to the process, and ends the process later."""
    context = multiprocessing.get_context('spawn')
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, system), daemon=True)
    with _own_arenas() if system.own_arenas else contextlib.nullcontext():
        process.start()
    child_end.close()  # so that reading raises EOFError after the process has ended
    try:
        yield parent_end
    finally:
        parent_end.close()
        process.join(5)
        if process.is_alive():
            process.kill()


@contextlib.contextmanager
def _own_arenas() -> Iterator[None]:
    """Removes the limit of the number of arenas from the environment of processes that are started in this context."""
    before = os.environ.get(TUNABLES)
    if before is not None:
        os.environ[TUNABLES] = ':'.join(part for part in before.split(':') if 'arena_max' not in part)
    try:
        yield
    finally:
        if before is not None:
            os.environ[TUNABLES] = before


def _serve(pipe: Connection, system: System) -> None:
    """Runs in the process of a system: prepares the system, and measures its time after each message 'turn'."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this process
    try:
        ready = pkgutil.resolve_name(system.make)(*system.arguments)
    except UserError as error:
        pipe.send(error)
        return
    pipe.send((ready.facts, ready.answer))
    with contextlib.suppress(EOFError):
        while pipe.recv() == 'turn':
            began = time.perf_counter()
            ready.call()
            while time.perf_counter() < began + WARM_UP:
                ready.call()
            began = time.perf_counter()
            ready.call()
            pipe.send(time.perf_counter() - began)
        pipe.send(ready.peak_memory() / 2 ** 30)


def _receive(pipe: Connection, name: str) -> Any:
    """Returns the next message from the process of the system `name`."""
    try:
        message = pipe.recv()
    except EOFError:
        raise RuntimeError(f'the process of {name} has ended unexpectedly') from None
    if isinstance(message, UserError):
        raise message
    return message
