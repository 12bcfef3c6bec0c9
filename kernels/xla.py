"""The XLA flag without which jaxlib 0.10.2 computes some fused sums wrongly on CPUs."""

import functools
import importlib.metadata
import os
import sys

WRONG = '0.10.2'  # 0.10.0, 0.10.1, 0.11.0 and 0.11.1 were tested and are right
WITHOUT_REDUCTIONS = '--xla_cpu_experimental_ynn_fusion_type=-reduce'


def lacks_flag() -> bool:
    """Returns whether XLA may compute wrong sums, because the flag is needed and is not set."""
    return importlib.metadata.version('jaxlib') == WRONG and 'ynn_fusion_type' not in os.environ.get('XLA_FLAGS', '')


@functools.cache
def avoid_wrong_sums() -> str:
    """Sets the flag in XLA_FLAGS where it is needed. Returns a message if that is too late, otherwise ''.

    The wrong sums are those of YNNPACK's reductions (github.com/jax-ml/jax, issue 39103). Without reductions, its
    matrix products are as fast. A value that the user gave the flag is kept. XLA reads XLA_FLAGS when JAX starts its
    backends, which is at the first computation or question about devices; a later change has no effect. This function
    imports no JAX and starts no backend, because `jax.distributed.initialize` must come before that.
    """
    if not lacks_flag():
        return ''
    # In the environment, also for processes that this one starts.
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {WITHOUT_REDUCTIONS}'.strip()
    bridge = sys.modules.get('jax._src.xla_bridge')  # the version is known, so its private module is too
    if bridge is None or not bridge.backends_are_initialized() or bridge.get_backend().platform != 'cpu':
        return ''
    return (f'jaxlib {WRONG} computes some sums wrongly on CPUs, and JAX was used before this import, so the XLA flag '
            f'that avoids them has no effect. Import allyouneed before you use JAX, start Python with '
            f'XLA_FLAGS={WITHOUT_REDUCTIONS}, or install another version of jaxlib.')
