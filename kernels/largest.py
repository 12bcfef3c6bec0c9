"""The largest logits of a row, for losses and searches, and the logsumexp of a row. On CPUs, each row is read once."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.product import on_one_cpu

PARTS = 32  # number of parts of a row of logits that are processed together
COMPARED = 16  # number of parts in `row_maximum`; with 8 or 32 parts, a train step is not faster
SUMMED = 4  # number of parts in `log_normaliser`; with more parts, the program is not faster and compiles longer


def largest(logits: Float[Array, '*batch vocab'], count: int, forbidden: Sequence[int] = (),
            parts: int = PARTS) -> tuple[Float[Array, '*batch count'], Int[Array, '*batch count']]:
    """Returns the `count` largest logits and their tokens, as jax.lax.top_k does.

    The logits of `forbidden` tokens are replaced by -inf. If several logits are equal, the lowest token comes
    first. On CPUs, each row is read once.
    """
    exactly = functools.partial(_top_k, count=count, forbidden=forbidden)
    if logits.shape[-1] <= 2 * count * parts:
        return exactly(logits)
    columns = functools.partial(_largest_of_columns, count=count, forbidden=forbidden, parts=parts)
    return jax.lax.platform_dependent(logits, cpu=columns, default=exactly)


def _top_k(logits, count, forbidden=()):
    """Returns jax.lax.top_k of each row, after `forbidden` tokens are set to -inf.

    The array is reshaped to a matrix, because XLA for CPUs completely sorts an array with more axes. This is slow.
    """
    allowed = _allowed(logits, jnp.arange(logits.shape[-1]), forbidden)
    values, tokens = jax.lax.top_k(allowed.reshape(-1, logits.shape[-1]), count)
    return values.reshape(*logits.shape[:-1], count), tokens.reshape(*logits.shape[:-1], count)


def _allowed(logits, tokens, forbidden):
    for token in forbidden:
        logits = jnp.where(tokens == token, -jnp.inf, logits)
    return logits


def _largest_of_columns(logits, count, forbidden, parts):
    """Returns the `count` largest logits of each row and their tokens, found by columns.

    The parts of a row form a matrix with one part in each line. The `count` largest logits are in the `count` columns
    with the largest maxima.
    """
    rows = _cut(logits, parts)
    width = rows[0].shape[-1]
    allowed = [_allowed(row, jnp.arange(width) + begin, [token for token in forbidden if 0 <= token - begin < width])
               for row, begin in zip(rows, range(0, parts * width, width), strict=True)]
    maxima, columns = _top_k(functools.reduce(jnp.maximum, allowed), count + 1)
    columns = jnp.sort(columns[..., :count], axis=-1)
    tokens = jnp.arange(parts, dtype=jnp.int32)[:, None] * width + columns[..., None, :]  # in the order of the logits
    tokens = tokens.reshape(*logits.shape[:-1], -1)
    candidates = jnp.take_along_axis(logits, tokens, axis=-1, mode='fill', fill_value=-jnp.inf)
    values, index = _top_k(_allowed(candidates, tokens, forbidden), count)
    # Another column may have a logit equal to the last value. Then the rule for equal logits needs a complete search.
    return jax.lax.cond((maxima[..., count] == values[..., -1]).any(),
                        functools.partial(_top_k, count=count, forbidden=forbidden),
                        lambda _: (values, jnp.take_along_axis(tokens, index, axis=-1)), logits)


def _cut(logits, parts):
    """Splits each row into parts of equal length, so that XLA vectorises the computation. The last part is padded."""
    width = -(-logits.shape[-1] // parts)
    cut = [logits[..., begin:begin + width] for begin in range(0, parts * width, width)]
    padding = [(0, 0)] * (logits.ndim - 1)
    return [jnp.pad(part, [*padding, (0, width - part.shape[-1])], constant_values=-jnp.inf) for part in cut]


def row_maximum(values: Float[Array, '*batch n'],
                before: Int[Array, '*batch'] | None = None) -> Float[Array, '*batch']:
    """Returns values.max(axis=-1), or with `before` the maximum of the values at indices below `before` (else -inf).

    XLA for CPUs compares the values of a row one after the other. On CPUs, this function first compares the parts of a
    row with each other, which is vectorised.
    """
    def visible(values, first=0):
        if before is None:
            return values
        index = first + jax.lax.broadcasted_iota(before.dtype, values.shape, values.ndim - 1)
        return jnp.where(index < before[..., None], values, -jnp.inf)

    def by_parts(values):
        parts = _cut(values, COMPARED)
        width = parts[0].shape[-1]
        return functools.reduce(jnp.maximum, [visible(part, i * width) for i, part in enumerate(parts)]).max(axis=-1)

    return on_one_cpu(by_parts, lambda values: visible(values).max(axis=-1), values)


def log_normaliser(logits: Float[Array, '*batch vocab'], maximum: Float[Array, '*batch 1']) -> Float[Array, '*batch']:
    """Returns the logsumexp of each row of logits. `maximum` contains the maximum of each row."""
    powers = functools.reduce(jnp.add, [jnp.exp(part - maximum) for part in _cut(logits, SUMMED)])
    # Without the barrier, XLA would store all powers for one long sum instead of reading the logits in one pass.
    return jnp.log(jax.lax.optimization_barrier(powers).sum(axis=-1)) + maximum[..., 0]
