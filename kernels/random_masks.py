"""Random masks for dropout. A mask is drawn once per step: the backward pass uses the mask of the forward pass."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, UInt32

LEVELS = 2 ** 16  # 16 random bits decide whether a value is dropped, so rates are multiples of 1 / LEVELS


def keep_mask(key: Key[Array, ''], rate: float, shape: tuple[int, ...]) -> Bool[Array, '*shape']:
    """Returns independent random booleans. Each value is False with probability `rounded(rate)`.

    A value depends only on the key, the row (the index along the first axis) and the index in the row. So the mask is
    the same for every sharding of the rows. One hash supplies the bits of two values.
    """
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    words = (columns + 1) // 2

    def draw(key):
        row, word = (jax.lax.broadcasted_iota(jnp.uint32, (rows, words), axis) for axis in range(2))
        # The keys of other generators than Threefry repeat or extend the two words of a Threefry key.
        bits = jax.lax.bitcast_convert_type(threefry(jax.random.key_data(key)[:2], row, word), jnp.uint16)
        return bits.reshape(rows, 2 * words)[:, :columns].reshape(shape) >= _dropped_levels(rate)

    def draw_once(key):
        # Without the conditional, XLA for CPUs fuses the hash into every operation that reads the mask, also into the
        # transposed copies of the backward pass. Then the hash is computed several times and takes a tenth of a step.
        # XLA fuses nothing into or out of a conditional. The condition is always true, but XLA cannot infer that.
        always = (jax.random.key_data(key)[0] | 1) != 0
        return jax.lax.cond(always, draw, lambda key: jnp.zeros(shape, bool), key)

    return jax.lax.platform_dependent(key, cpu=draw_once, default=draw)


def threefry(key: UInt32[Array, '2'], first: UInt32[Array, '*shape'],
             second: UInt32[Array, '*shape']) -> UInt32[Array, '*shape']:
    """Returns the first output word of Threefry-2x32, with 20 rounds, for the counters (first, second).

    The source is Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3. jax.random has the
    same generator, but is slower on CPUs, because it computes the rounds in a loop over arrays in memory.
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


def rounded(rate: float) -> float:
    """Returns the rate that `keep_mask` uses: the multiple of 1 / LEVELS below 1 that is nearest to `rate`."""
    return _dropped_levels(rate) / LEVELS


def _dropped_levels(rate):
    return min(round(rate * LEVELS), LEVELS - 1)
