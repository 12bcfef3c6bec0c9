"""Objectives: what training minimises, with the forward passes that it takes.

    objective(apply, params, batch, key) -> Sums

`apply(params, inputs, key) -> (outputs, sown)` is one pass of the module, with dropout drawn from `key` or, where that
is None, without; `forward` makes it. The sums are over targets: they may be added over the parts of a batch, and are
divided once. An objective that holds arrays, such as a teacher's parameters, is a `jax.tree_util.Partial` with them as
arguments: then they are placed and passed as the state is. The train step knows nothing else of an objective. A new one
is a function here and a line in `OBJECTIVES` or, as R-Drop, in the function that makes the objective of a task.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key
from ml_collections import ConfigDict

from configs.tasks import TASKS
from input_pipeline.batches import Batch
from input_pipeline.data import Data
from model import Params
from training.loss import Sums, cross_entropy, squared_error

Measure = Callable[[Array, Array, Array], Sums]  # outputs, targets, weights -> sums
Apply = Callable[[Params, Mapping[str, Array], Key[Array, ''] | None], tuple[Array, Any]]
Objective = Callable[[Apply, Params, Batch, Key[Array, ''] | None], Sums]

SOWN = 'losses'  # the collection that modules sow losses of their own into, such as a balance of experts


def forward(module: nn.Module) -> Apply:
    """One pass of a module: its outputs, and what it has sown into the collection 'losses'."""
    def apply(params, inputs, key):
        outputs, variables = module.apply({'params': params}, **inputs, deterministic=key is None, mutable=[SOWN],
                                          rngs=None if key is None else {'dropout': key})
        return outputs, variables.get(SOWN, {})
    return apply


def make_objective(config: ConfigDict, data: Data) -> Objective:
    """What a config trains for on its data: its task's objective, with the options of config.train."""
    return OBJECTIVES[TASKS[config.task].objective](config, data)


def make_cross_entropy(config: ConfigDict, data: Data) -> Objective:
    """Cross-entropy of one pass, or of two by R-Drop."""
    train = config.train
    measure = functools.partial(cross_entropy, label_smoothing=train.label_smoothing)
    return r_drop(measure, train.r_drop) if train.r_drop else supervised(measure)


def make_squared_error(config: ConfigDict, data: Data) -> Objective:
    """Squared error, which has no options."""
    return supervised(squared_error)


# The name of a task's objective (configs/tasks.py) -> what makes it of a config and its data.
OBJECTIVES: Mapping[str, Callable[[ConfigDict, Data], Objective]] = {
    'cross_entropy': make_cross_entropy, 'squared_error': make_squared_error}


def supervised(measure: Measure) -> Objective:
    """One pass, measured against the targets."""
    def objective(apply, params, batch, key):
        outputs, sown = apply(params, batch['inputs'], key)
        return with_sown(measure(outputs, batch['targets'], batch['weights']), sown)
    return objective


def r_drop(measure: Measure, alpha: float) -> Objective:
    """R-Drop (Wu et al. 2021, arXiv:2106.14448, equation 4): two passes with other dropout are to agree.

        CE_1 + CE_2 + alpha * (KL(p_1 || p_2) + KL(p_2 || p_1)) / 2

    summed over the targets, with the gradient through both passes; the targets count once. Measures such as the
    accuracy are means over the passes. Without dropout, in an evaluation, it is one pass: both would be the same.
    """
    single = supervised(measure)

    def objective(apply, params, batch, key):
        if key is None:
            return single(apply, params, batch, key)
        passes = [apply(params, batch['inputs'], each) for each in jax.random.split(key)]
        first, second = (with_sown(measure(outputs, batch['targets'], batch['weights']), sown)
                         for outputs, sown in passes)
        apart = jnp.sum(symmetric_divergence(passes[0][0], passes[1][0]) * batch['weights'])
        return first.replace(loss=first.loss + second.loss + alpha * apart,
                             others=jax.tree.map(lambda one, other: (one + other) / 2, first.others, second.others)
                             | {'divergence': apart})
    return objective


def symmetric_divergence(logits: Float[Array, '*batch classes'],
                         others: Float[Array, '*batch classes']) -> Float[Array, '*batch']:
    """(KL(p || q) + KL(q || p)) / 2 = sum_c (p_c - q_c) (log p_c - log q_c) / 2 of the softmaxes p and q, in nats."""
    one, other = jax.nn.log_softmax(logits), jax.nn.log_softmax(others)
    return jnp.sum((jnp.exp(one) - jnp.exp(other)) * (one - other), axis=-1) / 2


def with_sown(sums: Sums, sown: Any) -> Sums:
    """The sums with the losses that modules have sown: each a mean over targets, hence weighed by their number."""
    losses = jax.tree.leaves(sown)
    return sums.replace(loss=sums.loss + sums.tokens * sum(map(jnp.sum, losses))) if losses else sums
