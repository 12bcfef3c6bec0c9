"""Where a token stands: encodings that are added to the embeddings, and schemes that act inside self-attention.

The first are sinusoids (section 3.5) and learned tables (Table 3, row E). The second are relative: they rotate
queries and keys, or add a bias to the scores.
"""

import dataclasses

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

ADDED = ('sinusoidal', 'learned')
RELATIVE = ('rotary', 'relative', 'alibi')
SCHEMES = (*ADDED, *RELATIVE, 'none')
SCALINGS = ('none', 'linear', 'llama3')
BUCKETS, MAX_DISTANCE = 32, 128  # T5's

# Positions that are known when a program is compiled, as in training, come from NumPy: see `sines_cosines`.
AnyArray = Array | np.ndarray


def sines_cosines(angles: Float[AnyArray, '*n']) -> tuple[Float[AnyArray, '*n'], Float[AnyArray, '*n']]:
    """The sines and the cosines of angles in radians; those of NumPy angles are constants of the compiled program.

    XLA for CPUs moves all others into the loop that uses them, and computes them anew for every head of every example.
    That is 1.3 of the 1.6 ms in which 2,000 vectors of width 256 are turned. Both ways round the angles to float32.
    """
    if isinstance(angles, np.ndarray):
        angles = angles.astype(np.float32)
        return np.sin(angles), np.cos(angles)
    return jnp.sin(angles), jnp.cos(angles)


def sinusoids(positions: Int[AnyArray, '*positions'], d_model: int) -> Float[Array, '*positions d_model']:
    """PE[i, 2j] = sin(i / 10000^(2j/d)), PE[i, 2j+1] = cos(the same): interleaved, in radians, i from 0.

    The numerator is the position (not 1, as one widespread slide has it); tables that show sin 1 = 0.02 are
    in degrees. For a fixed offset k, PE[i+k] is a linear map of PE[i] that does not depend on i.

    Raises:
      ValueError: if d_model is odd, as sines and cosines come in pairs.
    """
    if d_model % 2:
        raise ValueError(f'sinusoidal positions need an even d_model, not {d_model}')
    wavelengths = 10000.0 ** (np.arange(0, d_model, 2) / d_model)
    return jnp.stack(sines_cosines(positions[..., None] / wavelengths), axis=-1).reshape(*positions.shape, d_model)


class PositionalEncoding(nn.Module):
    """The encoding of each position, to be added to the token embeddings; nothing for the relative schemes.

    Attributes:
      scheme: one of SCHEMES; 'learned' is a table [max_length, d_model].
      d_model: width.
      max_length: rows of the learned table; the other schemes have no limit.
    """
    scheme: str
    d_model: int
    max_length: int

    @nn.compact
    def __call__(self, positions: Int[AnyArray, '*positions'], length: int) -> Float[Array, '*positions d_model']:
        """Encodings of `positions`, all of which are below `length`.

        Raises:
          ValueError: if a learned table is shorter than `length`, or the scheme is unknown.
        """
        if self.scheme not in SCHEMES:
            raise ValueError(f'position={self.scheme!r} is not one of {", ".join(SCHEMES)}')
        if self.scheme == 'sinusoidal':
            return sinusoids(positions, self.d_model)
        if self.scheme != 'learned':
            return jnp.zeros((*positions.shape, self.d_model))
        if length > self.max_length:
            raise ValueError(f'learned positions end at max_length={self.max_length}, but {length} are needed: '
                             'shorten the input, or train with a larger max_length or with position=sinusoidal')
        init = nn.with_logical_partitioning(nn.initializers.normal(self.d_model ** -0.5), ('position', 'embed'))
        table = self.param('table', init, (self.max_length, self.d_model), unbox=True)
        return table[jnp.asarray(positions)]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """How fast each pair of numbers is turned.

    Attributes:
      base: the slowest pairs turn by about 1 / base a position.
      scaling: how a model goes on with longer texts than it was trained on: 'linear' divides all positions by `factor`
        (Chen et al. 2023, arXiv:2306.15595); 'llama3' slows down only the pairs that make few turns in
        `original_length` positions (Llama 3.1; see `wavelengths`).
      factor: by which scaled pairs are slower.
      original_length: positions that the model was trained on before its scaling.
    """
    base: float = 10000.0
    scaling: str = 'none'
    factor: float = 1.0
    original_length: int = 8192

    def wavelengths(self, width: int) -> Float[np.ndarray, ' pairs']:
        """Positions in which each pair of `width` numbers turns by one radian: base^(2j/width), or more if scaled.

        A pair that makes n turns in `original_length` positions has its speed multiplied, by 'llama3', by
        s + (1 - s) / factor, where s = (n - 1) / (4 - 1) between 0 and 1. So those of 4 turns and more are as they
        were, and those of less than one have all of the factor. 1 and 4 are the numbers of all published models.
        """
        wavelengths = self.base ** (np.arange(0, width, 2) / width)
        if self.scaling == 'linear':
            return wavelengths * self.factor
        if self.scaling == 'llama3':
            turns = self.original_length / (2 * np.pi * wavelengths)
            kept = np.clip((turns - 1) / (4 - 1), 0, 1)
            return wavelengths / (kept + (1 - kept) / self.factor)
        return wavelengths


def rotate(x: Float[Array, 'batch length heads width'], positions: Int[AnyArray, '#batch length'],
           rotary: Rotary = Rotary()) -> Float[Array, 'batch length heads width']:
    """Rotary positions: the pair (x_2j, x_2j+1) is turned by the angle i / 10000^(2j/width), i the position.

    Turned queries and keys have scores that depend on the offset of their positions only (Su et al. 2021,
    arXiv:2104.09864, equation 15). `rotary` may have other angles.

    Raises:
      ValueError: if the width is odd, as numbers are turned in pairs.
    """
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f'rotary positions need an even d_k, not {width}')
    sin, cos = sines_cosines(positions[..., None, None] / rotary.wavelengths(width))
    even, odd = x[..., ::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, ' heads']:
    """2^(-8 i / h) for head i = 1 ... h (Press et al. 2022, arXiv:2108.12409, section 3).

    Where h is no power of two: the slopes of the next smaller power, then every other one of twice that power.
    """
    power = 2 ** int(np.log2(num_heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * power, 2))
    return np.concatenate([slopes, between[:num_heads - power]]).astype(np.float32)


def alibi_bias(slopes: Float[Array, ' heads'], target: Int[Array, '#batch target'],
               source: Int[Array, '#batch source']) -> Float[Array, '#batch heads target source']:
    """-slope * |i - j|: the farther, the fainter; on both sides where a query sees both."""
    distance = jnp.abs(target[:, None, :, None] - source[:, None, None, :])
    return -slopes[:, None, None] * distance


def relative_buckets(offset: Int[Array, '*n'], bidirectional: bool) -> Int[Array, '*n']:
    """T5's bucket of each offset, the key's position minus the query's (Raffel et al. 2020, arXiv:1910.10683, 2.1).

    Each small distance has a bucket of its own, then buckets widen logarithmically up to MAX_DISTANCE, and all
    distances beyond share the last. With `bidirectional`, half of the buckets are for keys after the query; otherwise
    those share bucket 0.
    """
    buckets = BUCKETS // 2 if bidirectional else BUCKETS
    after = jnp.where(offset > 0, buckets, 0) if bidirectional else 0
    distance = jnp.abs(offset) if bidirectional else jnp.maximum(-offset, 0)
    exact = buckets // 2
    logarithmic = exact + (jnp.log(jnp.maximum(distance, 1) / exact) / np.log(MAX_DISTANCE / exact)
                           * (buckets - exact)).astype(jnp.int32)
    return after + jnp.where(distance < exact, distance, jnp.minimum(logarithmic, buckets - 1))


def bucketed_bias(table: Float[Array, 'buckets heads'], target: Int[Array, '#batch target'],
                  source: Int[Array, '#batch source'],
                  bidirectional: bool) -> Float[Array, '#batch heads target source']:
    """T5's learned bias: an entry of the table for the bucket of each offset."""
    buckets = relative_buckets(source[:, None, :] - target[:, :, None], bidirectional)
    return jnp.moveaxis(table[buckets], -1, 1)


class AlibiBias(flax.struct.PyTreeNode):
    """ALiBi's bias on the scores; see `alibi_bias`."""
    slopes: Float[Array, ' heads']

    def __call__(self, target: Int[Array, '#batch target'], source: Int[Array, '#batch source'],
                 bidirectional: bool) -> Float[Array, '#batch heads target source']:
        """The bias of queries at positions `target` and keys at `source`, which is the same in both directions."""
        return alibi_bias(self.slopes, target, source)


class BucketedBias(flax.struct.PyTreeNode):
    """T5's bias on the scores; see `bucketed_bias`."""
    table: Float[Array, 'buckets heads']

    def __call__(self, target: Int[Array, '#batch target'], source: Int[Array, '#batch source'],
                 bidirectional: bool) -> Float[Array, '#batch heads target source']:
        """The bias of queries at positions `target` and keys at `source`."""
        return bucketed_bias(self.table, target, source, bidirectional)


Bias = AlibiBias | BucketedBias


class RelativeBias(nn.Module):
    """The bias on the scores that the layers of a stack share; None for a scheme that has none.

    Attributes:
      scheme: one of SCHEMES.
      num_heads: of the stack's attention.
    """
    scheme: str
    num_heads: int

    @nn.compact
    def __call__(self) -> Bias | None:
        """The bias, for `Relation.bias`."""
        if self.scheme == 'alibi':
            return AlibiBias(jnp.asarray(alibi_slopes(self.num_heads)))
        if self.scheme == 'relative':
            init = nn.with_logical_partitioning(nn.initializers.normal(0.1), ('position', 'heads'))
            return BucketedBias(self.param('table', init, (BUCKETS, self.num_heads), unbox=True))
        return None
