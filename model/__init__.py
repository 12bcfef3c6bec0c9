"""The mathematics of attention: functions, blocks and whole architectures. Imports nothing of this project but itself.

Each matrix declares what its axes are, by names: `nn.with_logical_partitioning(initialiser, ('embed', 'mlp'))`.
`training/mesh.py` has the one table that says which of them are spread over devices. `module.init` gives such
parameters in boxes that hold the names; `nn.unbox` takes them out, and `module.apply` takes both.
"""

import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

Params = Mapping[str, Any]  # of a module, as Linen nests them: {submodule: {'kernel': array}}

# jaxlib 0.10.2 computes some fused sums wrongly on the CPU (github.com/jax-ml/jax, issue 39103): YNNPACK's reductions.
# Without those, its matrix products stay as quick. 0.10.0, 0.10.1, 0.11.0 and 0.11.1 have been tried and are right.
# XLA reads this when it first computes something, so it holds for whoever imports this package before.
if importlib.metadata.version('jaxlib') == '0.10.2' and 'ynn_fusion_type' not in os.environ.get('XLA_FLAGS', ''):
    WITHOUT_REDUCTIONS = '--xla_cpu_experimental_ynn_fusion_type=-reduce'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {WITHOUT_REDUCTIONS}'.strip()


def parameter_count(params: PyTree) -> int:
    """Returns the number of parameters; shared ones count once."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
