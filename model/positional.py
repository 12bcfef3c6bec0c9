"""Positions: encodings that are added to the embeddings, and relative schemes that act inside self-attention.

Sinusoids (section 3.5) and learned tables (Table 3, row E) are added to the embeddings. The relative schemes rotate
queries and keys, or add a bias to the scores.
"""

import dataclasses

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.product import on_one_cpu

ADDED = ('sinusoidal', 'learned')
RELATIVE = ('rotary', 'relative', 'alibi')
SCHEMES = (*ADDED, *RELATIVE, 'none')
SCALINGS = ('none', 'linear', 'llama3')
BUCKETS, MAX_DISTANCE = 32, 128  # the values of T5

# Positions that are constants of the compiled program, as in training, are NumPy arrays: see `sines_cosines`.
AnyArray = Array | np.ndarray


def sines_cosines(angles: Float[AnyArray, '*n']) -> tuple[Float[AnyArray, '*n'], Float[AnyArray, '*n']]:
    """Returns the sines and cosines of angles in radians. If the angles are a NumPy array, the results are constants.

    Constants are faster. If the angles are a JAX array, XLA for CPUs would compute the sines inside the loop that uses
    the sines, again for every head of every example. For 2,000 vectors of width 256, the sines would then take 1.3 ms
    of the 1.6 ms of a rotation. XLA does not move a matrix product into a loop, so the sines are multiplied by the
    identity matrix. An optimization barrier would have no effect, because XLA removes the barrier earlier. Angles are
    rounded to float32 in all cases.
    """
    if isinstance(angles, np.ndarray):
        angles = angles.astype(np.float32)
        return np.sin(angles), np.cos(angles)
    identity = np.eye(angles.shape[-1], dtype=np.float32)

    def apart(values):
        return on_one_cpu(lambda values: jnp.dot(values, identity, precision='highest'), lambda values: values, values)

    return apart(jnp.sin(angles)), apart(jnp.cos(angles))


def sinusoids(positions: Int[AnyArray, '*positions'], d_model: int) -> Float[Array, '*positions d_model']:
    """Returns PE[i, 2j] = sin(i / 10000^(2j/d)) and PE[i, 2j+1] = cos(i / 10000^(2j/d)) of positions i = 0, 1, ...

    d is d_model. The numerator is the position i; a well-known slide wrongly has 1 instead. Angles are in radians;
    published tables with sin 1 = 0.02 wrongly use degrees. For a fixed offset k, the same linear map takes PE[i] to
    PE[i+k] for every i.

    Raises:
      ValueError: if d_model is odd, because sines and cosines form pairs.
    """
    if d_model % 2:
        raise ValueError(f'sinusoidal positions need an even d_model, not d_model={d_model}')
    steps = 10000.0 ** (np.arange(0, d_model, 2) / d_model)
    return jnp.stack(sines_cosines(positions[..., None] / steps), axis=-1).reshape(*positions.shape, d_model)


class PositionalEncoding(nn.Module):
    """Encodings of positions, which are added to the token embeddings. The relative schemes add zeros.

    Attributes:
      scheme: the name of the scheme, one of SCHEMES; 'learned' has a table [max_length, d_model].
      d_model: width of the encodings.
      max_length: number of rows of the learned table; the other schemes have no limit.
    """
    scheme: str
    d_model: int
    max_length: int

    @nn.compact
    def __call__(self, positions: Int[AnyArray, '*positions'], length: int) -> Float[Array, '*positions d_model']:
        """Returns the encodings of `positions`. A learned table must have at least `length` rows.

        `length` is a number above all positions. In a step of decoding, the position is not known when the program is
        compiled. So `length` is 0, and the table is not checked. The caller limits the number of steps by
        `length_limit` of the model.

        Raises:
          ValueError: if a learned table is shorter than `length`, or the scheme is unknown.
        """
        if self.scheme not in SCHEMES:
            raise ValueError(f'position={self.scheme!r} must be one of {", ".join(SCHEMES)}')
        if self.scheme == 'sinusoidal':
            return sinusoids(positions, self.d_model)
        if self.scheme != 'learned':
            return jnp.zeros((*positions.shape, self.d_model))
        if length > self.max_length:
            raise ValueError(f'position=learned: there are only max_length={self.max_length} positions, but {length} '
                             'are needed. Shorten the input, or train with a larger max_length or position=sinusoidal.')
        init = nn.with_logical_partitioning(nn.initializers.normal(self.d_model ** -0.5), ('position', 'embed'))
        table = self.param('table', init, (self.max_length, self.d_model), jnp.float32, unbox=True)
        return table[jnp.asarray(positions)]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotation angles of rotary positions. The attributes are the options model.rotary_* (configs/options.py).

    The scaling adapts a model to texts that are longer than its training texts. 'linear' divides all positions by
    `factor` (Chen et al. 2023, arXiv:2306.15595). 'llama3' slows down only the pairs of channels that make few turns in
    `original_length` positions (Llama 3.1; see `positions_per_radian`).

    Raises:
      ValueError: if `scaling` is unknown.
    """
    base: float = 10000.0
    scaling: str = 'none'
    factor: float = 1.0
    original_length: int = 8192

    def __post_init__(self):
        if self.scaling not in SCALINGS:
            raise ValueError(f'scaling={self.scaling!r} must be one of {", ".join(SCALINGS)}')

    def positions_per_radian(self, width: int) -> Float[np.ndarray, ' pairs']:
        """Returns the number of positions in which each pair of channels turns by one radian: wavelength / (2 pi).

        Without scaling, the number is base^(2j/width) for pair j. With 'llama3', let n be the number of turns of a pair
        in `original_length` positions, and s = (n - 1) / (4 - 1), clipped to [0, 1]. The speed of the pair is
        multiplied by s + (1 - s) / factor. So pairs with at least 4 turns keep their speed, and pairs with at most one
        turn become slower by `factor`. Llama 3 models use the limits 1 and 4. Other limits are not supported.
        """
        steps = self.base ** (np.arange(0, width, 2) / width)
        if self.scaling == 'linear':
            return steps * self.factor
        if self.scaling == 'llama3':
            turns = self.original_length / (2 * np.pi * steps)
            kept = np.clip((turns - 1) / (4 - 1), 0, 1)
            return steps / (kept + (1 - kept) / self.factor)
        return steps


def rotate(x: Float[Array, 'batch length heads width'], positions: Int[AnyArray, '#batch length'],
           rotary: Rotary = Rotary()) -> Float[Array, 'batch length heads width']:
    """Returns x after a rotation: the pair (x_2j, x_2j+1) at position i is rotated by i / w_j radians.

    w is the array `rotary.positions_per_radian(width)`. By default, w_j is 10000^(2j/width). The dot product of a
    rotated query and a rotated key depends only on the difference of their positions (Su et al. 2021, arXiv:2104.09864,
    section 3.2.2). General and additive scores depend on both positions.

    Raises:
      ValueError: if the width is odd, because channels are rotated in pairs.
    """
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f'rotary positions need an even d_k, not d_k={width}')
    sin, cos = sines_cosines(positions[..., None, None] / rotary.positions_per_radian(width))
    even, odd = x[..., ::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, ' heads']:
    """Returns ALiBi's slopes: 2^(-8 i / h) for head i = 1 ... h (Press et al. 2022, arXiv:2108.12409, section 3).

    If h is not a power of two, let p be the next smaller power of two. The first p heads have the slopes for p heads.
    The remaining heads have every second slope for 2p heads.
    """
    power = 2 ** int(np.log2(num_heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * power, 2))
    return np.concatenate([slopes, between[:num_heads - power]]).astype(np.float32)


def relative_buckets(offset: Int[Array, '*n'], bidirectional: bool) -> Int[Array, '*n']:
    """Returns T5's bucket of each offset (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    An offset is the position of the key minus the position of the query. Each small distance has its own bucket. The
    buckets of larger distances widen logarithmically up to MAX_DISTANCE. All distances beyond MAX_DISTANCE share the
    last bucket. If `bidirectional`, half of the buckets are for keys after the query. Otherwise all keys after the
    query share bucket 0.
    """
    buckets = BUCKETS // 2 if bidirectional else BUCKETS
    after = jnp.where(offset > 0, buckets, 0) if bidirectional else 0
    distance = jnp.abs(offset) if bidirectional else jnp.maximum(-offset, 0)
    exact = buckets // 2
    logarithmic = exact + (jnp.log(jnp.maximum(distance, 1) / exact) / np.log(MAX_DISTANCE / exact)
                           * (buckets - exact)).astype(jnp.int32)
    return after + jnp.where(distance < exact, distance, jnp.minimum(logarithmic, buckets - 1))


class AlibiBias(flax.struct.PyTreeNode):
    """ALiBi's bias on the scores, -slope * |i - j|. It makes the weights of distant keys smaller."""
    slopes: Float[Array, ' heads']

    def __call__(self, target: Int[Array, '#batch target'], source: Int[Array, '#batch source'],
                 bidirectional: bool) -> Float[Array, '#batch heads target source']:
        """Returns the bias for queries at positions `target` and keys at positions `source`."""
        distance = jnp.abs(target[:, None, :, None] - source[:, None, None, :])
        return -self.slopes[:, None, None] * distance


class BucketedBias(flax.struct.PyTreeNode):
    """T5's learned bias on the scores. The table has one value for each bucket of offsets and each head."""
    table: Float[Array, 'buckets heads']

    def __call__(self, target: Int[Array, '#batch target'], source: Int[Array, '#batch source'],
                 bidirectional: bool) -> Float[Array, '#batch heads target source']:
        """Returns the bias for queries at positions `target` and keys at positions `source`. See `relative_buckets`."""
        buckets = relative_buckets(source[:, None, :] - target[:, :, None], bidirectional)
        return jnp.moveaxis(self.table[buckets], -1, 1)


Bias = AlibiBias | BucketedBias


class RelativeBias(nn.Module):
    """The bias of relative positions on the attention scores. All layers of a stack share this bias."""
    scheme: str
    num_heads: int

    @nn.compact
    def __call__(self) -> Bias | None:
        """Returns the bias for `Relation.bias`, or None if the scheme has no bias.

        Raises:
          ValueError: if the scheme is unknown.
        """
        if self.scheme not in SCHEMES:
            raise ValueError(f'position={self.scheme!r} must be one of {", ".join(SCHEMES)}')
        if self.scheme == 'alibi':
            return AlibiBias(jnp.asarray(alibi_slopes(self.num_heads)))
        if self.scheme == 'relative':
            init = nn.with_logical_partitioning(nn.initializers.normal(0.1), ('position', 'heads'))
            return BucketedBias(self.param('table', init, (BUCKETS, self.num_heads), jnp.float32, unbox=True))
        return None
