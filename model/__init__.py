"""The mathematics of attention: functions, blocks and architectures. This package imports only the package kernels.

The axes of each matrix have names: `nn.with_logical_partitioning(initialiser, ('embed', 'mlp'))`. The table in
`training/mesh.py` maps these names to axes of the device mesh. `module.init` returns the parameters in Flax metadata
boxes, which contain the names. `nn.unbox` removes the boxes. `module.apply` accepts parameters with and without boxes.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from kernels.xla import WITHOUT_REDUCTIONS, WRONG, lacks_flag

Params = Mapping[str, Any]  # the parameters of a module, nested as in Linen: {submodule: {'kernel': array}}

if lacks_flag():
    warnings.warn(f'jaxlib {WRONG} computes some sums wrongly on CPUs unless an XLA flag is set. Import allyouneed '
                  f'first, because it sets the flag, or start Python with XLA_FLAGS={WITHOUT_REDUCTIONS}.',
                  RuntimeWarning, stacklevel=2)


def parameter_count(params: PyTree) -> int:
    """Returns the total number of elements in the arrays of `params`. Shared parameters are counted once."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
