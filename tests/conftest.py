"""Settings of all tests: array annotations are checked, JAX runs on the CPU, and compiled programs are shared."""

import collections
import gc
import importlib.metadata
import os
import signal
import sys
import tempfile

assert 'jax' not in sys.modules, 'the settings below come too late'

# Python writes bytecode caches, because compiling the checks of annotations into the modules takes seconds.
sys.dont_write_bytecode = False
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
# JAX creates and keeps many objects. With Python's defaults, garbage collection takes 9 % of the processor time.
gc.set_threshold(50_000, 20, 50)
# Set in the environment, because the scripts that the tests start need it, too.
_cache = tempfile.TemporaryDirectory(prefix='allyouneed-tests-')  # removed at exit
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Each program runs only once or twice, and compiling takes most of the time, so programs are hardly optimised.
FLAGS = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
if importlib.metadata.version('jaxlib').startswith('0.10.'):  # XLA ends the process if it does not know an option
    FLAGS += ' --xla_cpu_use_fusion_emitters=false'  # later versions have no such option, and are faster
    # In one part: otherwise XLA compiles a program in up to 32 parts in parallel, which takes 30 % more processor time.
    FLAGS += ' --xla_cpu_parallel_codegen_split_count=1'
os.environ.setdefault('XLA_FLAGS', FLAGS)
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', _cache.name)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
# JAX does not write an entry of this cache at once. A process that reads half of it warns, and compiles the program.
HALF_WRITTEN = 'ignore:Error reading persistent compilation cache entry'
os.environ.setdefault('PYTHONWARNINGS', HALF_WRITTEN)

# In the background of a shell, the tests and the scripts that they start would ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)  # only the tests of meshes use more than the first

PACKAGES = ['kernels', 'model', 'run_directory', 'training', 'interchange', 'inference', 'input_pipeline']
assert not set(PACKAGES) & set(sys.modules), 'imported before the hook: not checked'
jaxtyping.install_import_hook(PACKAGES, 'beartype.beartype')

from kernels.xla import avoid_wrong_sums  # noqa: E402
from tests.mappings import few_mappings  # noqa: E402, F401 (a fixture)
from tests.scripts import cache, copy, data, once, run, whole  # noqa: E402, F401 (fixtures)

avoid_wrong_sums()  # before JAX starts its backends


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(items):
    """Marks the cases of a parametrised test as slow, except the first ones: @pytest.mark.fast_cases(2).

    Cases with the parameter of a fixture that is marked as slow do not count.
    """
    seen = collections.Counter()
    for item in items:
        if (mark := item.get_closest_marker('fast_cases')) and not item.get_closest_marker('slow'):
            seen[test := item.nodeid.partition('[')[0]] += 1
            if seen[test] > mark.args[0]:
                item.add_marker('slow')


def pytest_collection_finish():
    """Excludes the objects of the imports from garbage collection, because they are never freed."""
    gc.freeze()
