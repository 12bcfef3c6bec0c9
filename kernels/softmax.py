"""The softmax of attention scores."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.product import on_one_cpu


def softmax(scores: Float[Array, '*batch n']) -> Float[Array, '*batch n']:
    """Returns jax.nn.softmax(scores, axis=-1), computed faster on CPUs.

    The maximum of NaN and a number is NaN. So XLA for CPUs compares the scores of a row one after the other. Here, a
    comparison may lose a NaN, so that the comparisons are vectorised. The result is the same, because the sum of the
    row is still NaN.
    """
    return on_one_cpu(_by_comparisons, functools.partial(jax.nn.softmax, axis=-1), scores)


def _by_comparisons(scores):
    constant = jax.lax.stop_gradient(scores)  # subtracting a constant does not change a softmax
    maximum = jax.lax.reduce(constant, jnp.array(-jnp.inf, scores.dtype), lambda a, b: jnp.where(a > b, a, b),
                             (scores.ndim - 1,))
    powers = jnp.exp(scores - maximum[..., None])
    return powers / powers.sum(axis=-1, keepdims=True)
