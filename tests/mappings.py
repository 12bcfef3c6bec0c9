"""Keeps the memory mappings of a test process below Linux's limit.

A compiled program has about ten mappings, and JAX keeps every compiled program. Linux allows a process 65,530 mappings
(vm.max_map_count). Above, XLA aborts the process when it compiles: "LLVM ERROR: Unable to allocate section memory!".
"""

import jax
import pytest

MAPPINGS = 40_000


@pytest.fixture(autouse=True, scope='module')
def few_mappings():
    """Drops the compiled programs after a test file if the process has many mappings."""
    yield
    drop_programs(MAPPINGS)


def drop_programs(most):
    """Drops the compiled programs if this process has more than `most` mappings. They are compiled again when used."""
    if mappings() > most:
        jax.clear_caches()


def mappings():
    """Returns the number of memory mappings of this process, or 0 on systems other than Linux."""
    try:
        with open('/proc/self/maps', 'rb') as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0
