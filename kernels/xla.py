"""Sets an XLA flag for jaxlib 0.10.2. Without the flag, this version computes some fused sums wrongly on CPUs."""

import functools
import importlib.metadata
import os
import sys
from pathlib import Path

WRONG = '0.10.2'  # 0.10.0, 0.10.1, 0.11.0 and 0.11.1 were tested and compute these sums correctly
WITHOUT_REDUCTIONS = '--xla_cpu_experimental_ynn_fusion_type=-reduce'


def xla_flags() -> str:
    """Returns the flags of XLA_FLAGS. If its value is the name of a file, the file contains the flags."""
    flags = os.environ.get('XLA_FLAGS', '')
    is_file = not flags.lstrip().startswith('-') and os.path.isfile(flags)
    return Path(flags).read_text(errors='surrogateescape') if is_file else flags


def lacks_flag() -> bool:
    """Returns True if this version of jaxlib needs the flag and the flag is not set, so that sums may be wrong."""
    return importlib.metadata.version('jaxlib') == WRONG and 'ynn_fusion_type' not in xla_flags()


@functools.cache
def avoid_wrong_sums() -> str:
    """Sets the XLA flag if it is needed. Returns a warning if JAX has already read the flags, otherwise ''.

    Reductions of the library YNNPACK compute the wrong sums (github.com/jax-ml/jax, issue 39103). The flag turns off
    these reductions. The flag does not slow down YNNPACK's matrix products. If the user has set the flag, its value is
    kept. XLA reads XLA_FLAGS when JAX starts its backends, at the first computation or the first query of devices. A
    later change has no effect. This function does not import JAX or start a backend, because
    `jax.distributed.initialize` must be called before a backend starts.
    """
    if not lacks_flag():
        return ''
    # The flag is also set for child processes, because they inherit the environment.
    # It is the first flag, because XLA ignores all flags after a word that is not a flag, such as a comment in a file.
    os.environ['XLA_FLAGS'] = f'{WITHOUT_REDUCTIONS} {xla_flags()}'.strip()
    bridge = sys.modules.get('jax._src.xla_bridge')  # a private module, but the version of jaxlib is fixed
    if bridge is None or not bridge.backends_are_initialized() or bridge.get_backend().platform != 'cpu':
        return ''
    return (f'jaxlib {WRONG} computes some sums wrongly on CPUs unless an XLA flag is set. Setting the flag has no '
            f'effect now, because JAX was used before this import. Import allyouneed before you use JAX, start Python '
            f'with XLA_FLAGS={WITHOUT_REDUCTIONS}, or install another version of jaxlib.')
