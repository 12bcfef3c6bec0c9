"""Array annotations are checked in every test; JAX runs on the CPU and compiles a program once a session."""

import importlib.metadata
import os
import signal
import sys
import tempfile

assert 'jax' not in sys.modules, 'the settings below come too late'

# In the environment, so that the scripts which the tests start see them too.
_cache = tempfile.TemporaryDirectory(prefix='allyouneed-tests-')  # removed at exit
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Programs run once or twice here: compiling is what takes the time, so ask for little optimisation.
FLAGS = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
if importlib.metadata.version('jaxlib').startswith('0.10.'):  # later ones have no such option, and are faster
    FLAGS += ' --xla_cpu_use_fusion_emitters=false'
os.environ.setdefault('XLA_FLAGS', FLAGS)
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', _cache.name)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')

# A shell that starts the tests in its background has them ignore SIGINT, and so do the scripts that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import jaxtyping  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)  # of which all tests but those of meshes use the first

PACKAGES = ['kernels', 'model', 'run_directory', 'training', 'interchange', 'inference', 'input_pipeline']
assert not set(PACKAGES) & set(sys.modules), 'imported before the hook: not checked'
jaxtyping.install_import_hook(PACKAGES, 'beartype.beartype')

from kernels.xla import avoid_wrong_sums  # noqa: E402

avoid_wrong_sums()  # before JAX starts its backends
