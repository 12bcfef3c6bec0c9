"""Measures the time of functions, and prints the time with the memory, the device and the versions of libraries."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax

from benchmarks.turns import CORES
from runtime.memory import peak_resident


def times(call: Callable[[], Any], runs: int) -> list[float]:
    """Calls `call` `runs` times. Returns the seconds of each call, including the wait for its result."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return seconds


def report(seconds: list[float], tokens: int, entries: Mapping[str, Any]) -> None:
    """Prints one JSON line: `entries`, the median and the shortest time, the memory and the versions of libraries.

    `seconds` are the times of the calls. If the list is empty, the line contains no times. `tokens` is the number of
    tokens of a call.
    """
    timed = {}
    if seconds:
        median = statistics.median(seconds)
        timed = {'median_s': round(median, 4), 'best_s': round(min(seconds), 4),
                 'tokens_per_second': round(tokens / median)}
    print(json.dumps({
        **entries, **timed, 'runs': len(seconds),
        'peak_memory_gb': round(peak_memory() / 2 ** 30, 3), 'device': jax.devices()[0].device_kind, 'cores': CORES,
        'jax': jax.__version__, 'flax': flax.__version__, 'python': platform.python_version()}), flush=True)


def peak_memory() -> int:
    """Returns the peak memory of the device in bytes.

    If JAX does not report the memory of the device, returns the peak memory of this process.
    """
    device = jax.devices()[0].memory_stats() or {}
    return device['peak_bytes_in_use'] if 'peak_bytes_in_use' in device else peak_resident()
