"""Dropout of numbers and of words."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Key
from typing_extensions import override

from kernels.random_masks import LEVELS, dropped_levels, keep_mask


class Dropout(nn.Module):
    """Zeroes each number with probability `rate`, and divides the others by 1 - rate (Srivastava et al. 2014).

    nn.Dropout is the same with other random numbers. This one is the faster: see `keep_mask`.

    Attributes:
      rate: in [0, 1).
    """
    rate: float

    @override
    @nn.compact
    def __call__(self, inputs: Float[Array, '*shape'], deterministic: bool = True) -> Float[Array, '*shape']:
        """The inputs with some of them dropped, unless `deterministic`; draws from the stream 'dropout'."""
        if deterministic or not self.rate:
            return inputs
        return drop(inputs, self.rate, self.make_rng('dropout'))


class WordDropout(nn.Module):
    """Zeroes the embedding of each token with probability `rate`, and leaves the others as they are.

    Each token is dropped for itself, as full words are in Sennrich et al. 2016, arXiv:1606.02891, and not all those of
    a type together (Gal and Ghahramani 2016, arXiv:1512.05287). What is kept is not divided by 1 - rate: a token that
    is there has the embedding that it has in an evaluation.

    Attributes:
      rate: in [0, 1).
    """
    rate: float

    @override
    @nn.compact
    def __call__(self, embedded: Float[Array, '*tokens d_model'],
                 deterministic: bool = True) -> Float[Array, '*tokens d_model']:
        """The embeddings with some of them zero, unless `deterministic`; draws from the stream 'dropout'."""
        if deterministic or not self.rate:
            return embedded
        kept = keep_mask(self.make_rng('dropout'), self.rate, embedded.shape[:-1])
        return jnp.where(kept[..., None], embedded, 0)


def drop(inputs: Float[Array, '*shape'], rate: float, key: Key[Array, '']) -> Float[Array, '*shape']:
    """The inputs, each zero with probability `rate`, else divided by 1 - rate."""
    return jnp.where(keep_mask(key, rate, inputs.shape), inputs / (1 - dropped_levels(rate) / LEVELS), 0)
