"""Resources of a process: its memory, and the time that JAX spends on compiling."""

import time

import jax

from runtime.memory import resident


def memory() -> dict[str, float]:
    """Returns the memory in use in GiB: 'resident_gb' of this process, 'device_gb' and 'device_peak_gb' of a device.

    The device is the first device of this process. If this device does not report its memory, the result lacks both
    values of the device.
    """
    device = jax.local_devices()[0].memory_stats() or {}
    sizes = {'resident_gb': resident(), 'device_gb': device.get('bytes_in_use'),
             'device_peak_gb': device.get('peak_bytes_in_use')}
    return {name: size / 2 ** 30 for name, size in sizes.items() if size is not None}


class CompileTime:
    """The seconds that JAX has spent on tracing, lowering and compiling since the object was created.

    The object registers a listener, which JAX cannot remove. So there is only one object, `compile_time`.
    """

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_) -> None:
        if event.startswith('/jax/core/compile/'):
            self.seconds += duration_secs


compile_time = CompileTime()


class Stopwatch:
    """The seconds since the object was created, and how many of them JAX has spent on compiling."""

    def __init__(self):
        self.began, self._compiled_before = time.perf_counter(), compile_time.seconds

    def read(self) -> tuple[float, float]:
        """Returns (seconds since the object was created, seconds of compilation among them)."""
        return time.perf_counter() - self.began, compile_time.seconds - self._compiled_before

    def speed(self, tokens: float) -> dict[str, float]:
        """Returns the measured times, and the speed at which `tokens` were computed in the time without compilation."""
        seconds, compiling = self.read()
        return {'seconds': seconds, 'compile_seconds': compiling,
                'tokens_per_second': tokens / max(seconds - compiling, 1e-9)}
