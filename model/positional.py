"""Where a token stands: sinusoids (section 3.5) and learned tables (Table 3, row E)."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SCHEMES = ('sinusoidal', 'learned', 'none')


def sinusoids(positions: Int[Array, '*positions'], d_model: int) -> Float[Array, '*positions d_model']:
    """PE[i, 2j] = sin(i / 10000^(2j/d)), PE[i, 2j+1] = cos(the same): interleaved, in radians, i from 0.

    The numerator is the position (not 1, as one widespread slide has it); tables that show sin 1 = 0.02 are
    in degrees. For a fixed offset k, PE[i+k] is a linear map of PE[i] that does not depend on i.

    Raises:
      ValueError: if d_model is odd, as sines and cosines come in pairs.
    """
    if d_model % 2:
        raise ValueError(f'sinusoidal positions need an even d_model, not {d_model}')
    wavelengths = 10000.0 ** (jnp.arange(0, d_model, 2) / d_model)
    angles = positions[..., None] / wavelengths
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, d_model)


class PositionalEncoding(nn.Module):
    """The encoding of each position, to be added to the token embeddings.

    Attributes:
      scheme: 'sinusoidal', 'learned' (a table [max_length, d_model]) or 'none' (zeros).
      d_model: width.
      max_length: rows of the learned table; the other schemes have no limit.
    """
    scheme: str
    d_model: int
    max_length: int

    @nn.compact
    def __call__(self, positions: Int[Array, '*positions'], length: int) -> Float[Array, '*positions d_model']:
        """Encodings of `positions`, all of which are below `length`.

        Raises:
          ValueError: if a learned table is shorter than `length`, or the scheme is unknown.
        """
        if self.scheme == 'sinusoidal':
            return sinusoids(positions, self.d_model)
        if self.scheme == 'none':
            return jnp.zeros((*positions.shape, self.d_model))
        if self.scheme != 'learned':
            raise ValueError(f'position={self.scheme!r} is not one of {", ".join(SCHEMES)}')
        if length > self.max_length:
            raise ValueError(f'learned positions end at max_length={self.max_length}, but {length} are needed: '
                             'shorten the input, or train with a larger max_length or with position=sinusoidal')
        table = self.param('table', nn.initializers.normal(self.d_model ** -0.5), (self.max_length, self.d_model))
        return table[positions]
