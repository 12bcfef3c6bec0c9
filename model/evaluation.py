"""Forward passes of a module, and the sums of a loss over batches.

`forward(module)` returns `apply(params, inputs, key) -> (outputs, sown)`, one forward pass. An objective is a function
`objective(apply, params, batch, key) -> Sums`. The objectives of training are in training/objective.py. Evaluation uses
the objective `supervised`.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from model import Params
from model.embedding import Projection
from model.losses import Sums

Batch = Any  # {'inputs': {name: array}, 'targets': array, 'weights': array}, as input_pipeline.batches.Batch
Outputs = Array | Projection
Measure = Callable[[Any, Array, Array], Sums]  # outputs, targets, weights -> sums
Apply = Callable[..., tuple[Outputs, Any]]  # params, inputs, key or None, attributes of the module for this pass
Objective = Callable[[Apply, Params, Batch, Key[Array, ''] | None], Sums]

SOWN = 'losses'  # the Flax collection of additional losses that modules sow, such as the load balance of experts


def forward(module: nn.Module, devices: int = 1) -> Apply:
    """Returns a function that computes the outputs of a module and the additional losses that the module sows.

    `devices` is the number of devices that share a batch. Losses that compute logits in tiles need this number.
    """
    method = 'projection' if hasattr(module, 'projection') else None

    def apply(params, inputs, key, **attributes):
        outputs, variables = module.clone(**attributes).apply(
            {'params': params}, **inputs, deterministic=key is None, mutable=[SOWN], method=method,
            rngs=None if key is None else {'dropout': key})
        if isinstance(outputs, Projection):
            outputs = outputs.replace(devices=devices)
        return outputs, variables.get(SOWN, {})
    return apply


def whole(outputs: Outputs) -> Array:
    """Returns the outputs as one array. If they are a Projection (factors of the logits), computes the logits."""
    return outputs.logits() if isinstance(outputs, Projection) else outputs


def supervised(measure: Measure) -> Objective:
    """Returns the objective that applies the loss `measure` to the outputs of one forward pass and the targets."""
    def objective(apply, params, batch, key):
        outputs, sown = apply(params, batch['inputs'], key)
        return with_sown(measure(outputs, batch['targets'], batch['weights']), sown)
    return objective


def with_sown(sums: Sums, sown: Any) -> Sums:
    """Returns `sums` with the additional losses that modules have sown.

    A sown loss is a mean. So it is multiplied by the number of targets before it is added.
    """
    losses = jax.tree.leaves(sown)
    return sums.replace(loss=sums.loss + sums.tokens * sum(map(jnp.sum, losses))) if losses else sums


def eval_step(params: Params, batch: Batch, *, objective: Objective, apply: Apply,
              axis_name: str | None = None) -> Sums:
    """Returns the sums of an objective over a batch, without dropout."""
    sums = objective(apply, params, batch, None)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)


def evaluate(step: Callable[[Params, Batch], Sums], params: Params, batches: Iterable[Batch]) -> Sums:
    """Returns the sums over all `batches`, in float64. `step` is a compiled eval_step.

    In float32, a count of more than 2^24 targets would be rounded after each batch, often in the same direction.
    """
    sums = (jax.tree.map(np.float64, jax.device_get(step(params, batch))) for batch in batches)
    return functools.reduce(lambda total, new: jax.tree.map(np.add, total, new), sums)
