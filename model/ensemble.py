"""Ensembles: several models with the same vocabulary. An ensemble averages the probabilities of its models."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.cache import Cache


def log_mean_probability(logits: Sequence[Float[Array, '*batch vocab']]) -> Float[Array, '*batch vocab']:
    """Returns log(1/n sum_i softmax(z_i)) = logsumexp_i(log_softmax(z_i)) - log n. z_i are the logits of model i."""
    return jax.nn.logsumexp(jnp.stack([jax.nn.log_softmax(z) for z in logits]), axis=0) - jnp.log(len(logits))


class Ensemble(nn.Module):
    """An ensemble of n models that read the same tokens: p(y) = 1/n sum_i p_i(y) for each token y.

    p_i is the distribution of model i. The ensemble has the interface of its members. Its logits are the logarithms of
    the mean probabilities. Its cache contains the caches of the members. Only the members have attention weights.

    Attributes:
      members: generative models, possibly of different kinds. Their parameters are named 'members_0', 'members_1', ...
    """
    members: Sequence[Any]  # modules

    @property
    def length_limit(self) -> int | None:
        """The length of the longest sequence that all members support, or None if there is no limit."""
        return min((member.length_limit for member in self.members if member.length_limit), default=None)

    def __call__(self, deterministic: bool = True,
                 **inputs: Int[Array, 'batch _'] | None) -> Float[Array, 'batch length vocab']:
        """Returns the log-probabilities of the token after each position (teacher forcing), in float32."""
        return log_mean_probability([member(**inputs, deterministic=deterministic) for member in self.members])

    def encode(self, tokens: Int[Array, 'batch length']) -> tuple[Any, ...]:
        """Returns the encoder outputs of all members, one Memory for each member."""
        return tuple(member.encode(tokens) for member in self.members)

    def init_cache(self, memory: tuple[Any, ...], beam: int, max_length: int) -> Cache:
        """Returns an empty cache for all members, for `beam` hypotheses of up to `max_length` tokens each."""
        return _joined([member.init_cache(part, beam, max_length)
                        for member, part in zip(self.members, memory, strict=True)])

    def decode_step(self, token: Int[Array, 'batch beam'],
                    cache: Cache) -> tuple[Float[Array, 'batch beam vocab'], Cache]:
        """Maps the newest token of each hypothesis to the log-probabilities of the next token."""
        parts = zip(cache.memory, cache.state, cache.past, strict=True)
        steps = [member.decode_step(token, Cache(memory, state, cache.position, past))
                 for member, (memory, state, past) in zip(self.members, parts, strict=True)]
        return log_mean_probability([logits for logits, _ in steps]), _joined([cache for _, cache in steps])


def _joined(caches: Sequence[Cache]) -> Cache:
    """Joins the caches of the members into one cache. All members are at the same position."""
    return Cache(memory=tuple(cache.memory for cache in caches), state=tuple(cache.state for cache in caches),
                 position=caches[0].position, past=tuple(cache.past for cache in caches))
