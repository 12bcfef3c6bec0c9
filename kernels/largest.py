"""What a search needs of a row of logits, read once on CPUs: the greatest, and the logsumexp."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PARTS = 32  # of a row of logits, that are read side by side


def largest(logits: Float[Array, '*batch vocab'], count: int, forbidden: Sequence[int] = (),
            parts: int = PARTS) -> tuple[Float[Array, '*batch count'], Int[Array, '*batch count']]:
    """jax.lax.top_k of what is not forbidden: the `count` greatest, and where they are; of equal ones the first.

    On CPUs it reads a row once. A forbidden one counts as -inf.
    """
    exactly = functools.partial(_top_k, count=count, forbidden=forbidden)
    if logits.shape[-1] <= 2 * count * parts:
        return exactly(logits)
    columns = functools.partial(_largest_of_columns, count=count, forbidden=forbidden, parts=parts)
    return jax.lax.platform_dependent(logits, cpu=columns, default=exactly)


def _top_k(logits, count, forbidden=()):
    """For any number of axes: XLA on CPUs sorts what has more than two."""
    allowed = _allowed(logits, jnp.arange(logits.shape[-1]), forbidden)
    values, places = jax.lax.top_k(allowed.reshape(-1, logits.shape[-1]), count)
    return values.reshape(*logits.shape[:-1], count), places.reshape(*logits.shape[:-1], count)


def _allowed(logits, places, forbidden):
    for token in forbidden:
        logits = jnp.where(places == token, -jnp.inf, logits)
    return logits


def _largest_of_columns(logits, count, forbidden, parts):
    """With the parts of a row one below the other, they are in the `count` columns of the greatest maxima."""
    rows = _cut(logits, parts)
    width = rows[0].shape[-1]
    allowed = [_allowed(row, jnp.arange(width) + begin, [token for token in forbidden if 0 <= token - begin < width])
               for row, begin in zip(rows, range(0, parts * width, width), strict=True)]
    maxima, columns = _top_k(functools.reduce(jnp.maximum, allowed), count + 1)
    columns = jnp.sort(columns[..., :count], axis=-1)
    places = jnp.arange(parts)[:, None] * width + columns[..., None, :]  # in the order of the logits
    places = places.reshape(*logits.shape[:-1], -1)
    candidates = jnp.take_along_axis(logits, places, axis=-1, mode='fill', fill_value=-jnp.inf)
    values, index = _top_k(_allowed(candidates, places, forbidden), count)
    # Another column may have one that equals the last, and comes before it.
    return jax.lax.cond((maxima[..., count] == values[..., -1]).any(),
                        functools.partial(_top_k, count=count, forbidden=forbidden),
                        lambda _: (values, jnp.take_along_axis(places, index, axis=-1)), logits)


def _cut(logits, parts=PARTS):
    """Parts of one length, the last padded. XLA vectorises what is done to all of them, number by number."""
    width = -(-logits.shape[-1] // parts)
    cut = [logits[..., begin:begin + width] for begin in range(0, parts * width, width)]
    padding = [(0, 0)] * (logits.ndim - 1)
    return [jnp.pad(part, [*padding, (0, width - part.shape[-1])], constant_values=-jnp.inf) for part in cut]


def log_normaliser(logits, greatest):
    """The logsumexp of rows whose greatest logits [..., 1] are known."""
    powers = functools.reduce(jnp.add, [jnp.exp(part - greatest) for part in _cut(logits)])
    # In one pass: without the barrier, XLA would write all powers down for one sum of so many.
    return jnp.log(jax.lax.optimization_barrier(powers).sum(axis=-1)) + greatest[..., 0]
