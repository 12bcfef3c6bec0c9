"""The mathematics of attention: functions, blocks and whole architectures. Imports nothing of this project but itself.

Each matrix declares what its axes are, by names: `nn.with_logical_partitioning(initialiser, ('embed', 'mlp'))`.
`training/mesh.py` has the one table that says which of them are spread over devices. `module.init` gives such
parameters in boxes that hold the names; `nn.unbox` takes them out, and `module.apply` takes both.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from model.xla import avoid_wrong_sums

Params = Mapping[str, Any]  # of a module, as Linen nests them: {submodule: {'kernel': array}}

if too_late := avoid_wrong_sums():
    warnings.warn(too_late, RuntimeWarning, stacklevel=2)
