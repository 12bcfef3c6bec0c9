"""What a process takes of its machine: memory, and the time that JAX compiles."""

import resource
import sys
from pathlib import Path

import jax


def peak_resident() -> int:
    """Bytes of memory that this process has had at most. The system counts them in kilobytes, but macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def memory() -> dict[str, float]:
    """GB: 'resident_gb' of this process, and of the first device, where it tells, 'device_gb' and 'device_peak_gb'."""
    try:
        resident = int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()
    except OSError:  # no Linux: the peak instead
        resident = peak_resident()
    of_device = jax.local_devices()[0].memory_stats() or {}
    found = {'resident_gb': resident, 'device_gb': of_device.get('bytes_in_use'),
             'device_peak_gb': of_device.get('peak_bytes_in_use')}
    return {name: value / 2 ** 30 for name, value in found.items() if value is not None}


class CompileTime:
    """Seconds that JAX has spent on tracing, lowering and compiling since this was made.

    JAX keeps the listener for the life of the process, so there is one, `compile_time`.
    """

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_) -> None:
        if event.startswith('/jax/core/compile/'):
            self.seconds += duration_secs


compile_time = CompileTime()
