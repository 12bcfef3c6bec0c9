"""Random masks for dropout. Their bits are drawn once per step and place, and not again in the backward pass."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, UInt32

LEVELS = 2 ** 16  # a number is kept or dropped by 16 bits: rates are rounded to multiples of 1 / LEVELS


def keep_mask(key: Key[Array, ''], rate: float, shape: tuple[int, ...]) -> Bool[Array, '*shape']:
    """Independent draws, each False with probability `rate`, rounded to a multiple of 2^-16.

    A draw depends on the key, the row (the index along the first axis) and the place in the row alone, so it is the
    same however the rows are sharded. One hash gives the bits of two draws.
    """
    rows, places = shape[0] if shape else 1, math.prod(shape[1:])
    words = (places + 1) // 2

    def draw(key):
        row, word = (jax.lax.broadcasted_iota(jnp.uint32, (rows, words), axis) for axis in range(2))
        # Keys of other generators than Threefry repeat or extend the two words of one.
        bits = jax.lax.bitcast_convert_type(threefry(jax.random.key_data(key)[:2], row, word), jnp.uint16)
        return bits.reshape(rows, 2 * words)[:, :places].reshape(shape) >= dropped_levels(rate)

    def draw_apart(key):
        # XLA for CPUs fuses the hash into everything that reads the mask, and so computes it again for each reader,
        # transposing copies of the backward pass among them: a tenth of a step. It fuses nothing into or out of a
        # conditional. This one always draws, which XLA does not see.
        always = (jax.random.key_data(key)[0] | 1) != 0
        return jax.lax.cond(always, draw, lambda key: jnp.zeros(shape, bool), key)

    return jax.lax.platform_dependent(key, cpu=draw_apart, default=draw)


def threefry(key: UInt32[Array, '2'], first: UInt32[Array, '*shape'],
             second: UInt32[Array, '*shape']) -> UInt32[Array, '*shape']:
    """The first word of Threefry-2x32 with 20 rounds of the counters (first, second).

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3; the generator of jax.random, which
    on CPUs runs it as a loop over arrays in memory.
    """
    def rotate(words, bits):
        return words << bits | words >> 32 - bits

    keys = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    first, second = first + keys[0], second + keys[1]
    for group in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            first = first + second
            second = first ^ rotate(second, bits)
        first, second = first + keys[(group + 1) % 3], second + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return first


def dropped_levels(rate: float) -> int:
    """Returns how many of the LEVELS of a draw are dropped, which are never all of them."""
    return min(round(rate * LEVELS), LEVELS - 1)
