"""Low-rank adapters (LoRA): trainable low-rank matrices that are added to the frozen matrices of a model.

In Hu et al. 2021 (arXiv:2106.09685, section 4.1), a matrix W of a trained model is frozen. Training learns A and B in

    W + (alpha / r) A B,    A [in, r], B [r, out].

At the start, A is random and B is zero. The rank r is far below the rank of W. Adapters are parameters, not modules, so
any matrix of any model can have an adapter. training/tuning.py creates the adapters.
"""

from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from model import Params

ADAPTERS = 'adapters'  # the name of the adapters among the parameters


def merged(params: Params) -> Params:
    """Returns the model's parameters with merged adapters: a matrix W with an adapter becomes W + (alpha / r) A B."""
    if ADAPTERS not in params:
        return params
    adapters, leaves = params[ADAPTERS], flatten_dict(without_adapters(params))
    pairs: dict[tuple, Any] = flatten_dict(adapters['of'], is_leaf=lambda _, part: {*part} == {'a', 'b'})
    for name, factors in pairs.items():
        leaves[name] = leaves[name] + adapters['scale'] * jnp.tensordot(factors['a'], factors['b'], axes=1)
    return unflatten_dict(leaves)


def without_adapters(params: Params) -> Params:
    """Returns the model's parameters without the adapters. The matrices are unchanged."""
    return {name: part for name, part in params.items() if name != ADAPTERS}
