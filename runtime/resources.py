"""Resources of a process: its memory, and the time that JAX spends on compiling."""

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
