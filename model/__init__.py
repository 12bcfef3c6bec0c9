"""The mathematics of attention: functions, blocks and whole architectures. Imports only kernels.

Each matrix declares what its axes are, by names: `nn.with_logical_partitioning(initialiser, ('embed', 'mlp'))`.
`training/mesh.py` has the one table that says which of them are spread over devices. `module.init` gives such
parameters in boxes that hold the names; `nn.unbox` takes them out, and `module.apply` takes both.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from kernels.xla import WITHOUT_REDUCTIONS, WRONG, lacks_flag

Params = Mapping[str, Any]  # of a module, as Linen nests them: {submodule: {'kernel': array}}

if lacks_flag():
    warnings.warn(f'jaxlib {WRONG} computes some sums wrongly on CPUs without an XLA flag. Import allyouneed first, '
                  f'which sets it, or start Python with XLA_FLAGS={WITHOUT_REDUCTIONS}.', RuntimeWarning, stacklevel=2)


def parameter_count(params: PyTree) -> int:
    """Returns the number of parameters; shared ones count once."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
