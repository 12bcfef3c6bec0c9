"""How the benchmarks time, and what they say about where they ran."""

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax


def times(call: Callable[[], Any], runs: int) -> list[float]:
    """Seconds of `runs` calls, each waited for."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return seconds


def report(seconds: list[float], tokens: int, what: Mapping[str, Any]) -> None:
    """Prints one JSON line: `what`, the times if any, target tokens per second at the median, memory and versions."""
    timed = {}
    if seconds:
        median = statistics.median(seconds)
        timed = {'median_s': round(median, 4), 'best_s': round(min(seconds), 4),
                 'tokens_per_second': round(tokens / median)}
    print(json.dumps({
        **what, **timed, 'runs': len(seconds),
        'peak_memory_gb': round(peak_memory(), 3), 'device': jax.devices()[0].device_kind, 'cores': os.cpu_count(),
        'jax': jax.__version__, 'flax': flax.__version__, 'python': platform.python_version()}), flush=True)


def peak_memory() -> float:
    """GB: the device's where it tells, else this process's."""
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    in_bytes = statistics_of_device.get('peak_bytes_in_use', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return in_bytes / 2 ** 30
