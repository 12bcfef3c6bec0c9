"""Dropout of activations and of words."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Key
from typing_extensions import override

from kernels.random_masks import keep_mask, rounded


def drop(inputs: Float[Array, '*shape'], rate: float, key: Key[Array, '']) -> Float[Array, '*shape']:
    """Sets each input to zero with probability `rate`, and divides the remaining inputs by 1 - rate.

    The rate is rounded to a multiple of 2^-16 (see `rounded`).
    """
    # In bfloat16, 1 - rate would be rounded, 0.9 to 0.898, and the mean of the outputs would be 1.002 times the inputs.
    wide = jnp.promote_types(inputs.dtype, jnp.float32)
    scaled = (inputs.astype(wide) / (1 - rounded(rate))).astype(inputs.dtype)
    return jnp.where(keep_mask(key, rate, inputs.shape), scaled, 0)


class Dropout(nn.Module):
    """Dropout of each activation independently (Srivastava et al. 2014).

    nn.Dropout does the same with other random numbers, but this module is faster on CPUs (see `keep_mask`).

    Attributes:
      rate: the dropout rate, in [0, 1).
    """
    rate: float

    @override
    @nn.compact
    def __call__(self, inputs: Float[Array, '*shape'], deterministic: bool = True) -> Float[Array, '*shape']:
        """Returns the inputs with dropout, or unchanged if `deterministic`. Uses Flax's random stream 'dropout'."""
        if deterministic or not self.rate:
            return inputs
        return drop(inputs, self.rate, self.make_rng('dropout'))


class WordDropout(nn.Module):
    """Dropout of whole tokens: the embedding of a dropped token is set to zero.

    Each token is dropped independently, as in Sennrich et al. 2016 (arXiv:1606.02891). In Gal and Ghahramani 2016
    (arXiv:1512.05287), all occurrences of a word are dropped together. The remaining embeddings are not divided by
    1 - rate, so a token has the same embedding in training and in evaluation.

    Attributes:
      rate: the dropout rate, in [0, 1).
    """
    rate: float

    @override
    @nn.compact
    def __call__(self, embedded: Float[Array, '*tokens d_model'],
                 deterministic: bool = True) -> Float[Array, '*tokens d_model']:
        """Returns the embeddings, with zeros for some tokens. Returns unchanged embeddings if `deterministic`."""
        if deterministic or not self.rate:
            return embedded
        kept = keep_mask(self.make_rng('dropout'), self.rate, embedded.shape[:-1])
        return jnp.where(kept[..., None], embedded, 0)
