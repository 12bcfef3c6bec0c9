"""Several models of one vocabulary as one, which predicts the mean of their probabilities."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.cache import Cache


def log_mean_probability(logits: Sequence[Float[Array, '*batch vocab']]) -> Float[Array, '*batch vocab']:
    """log(1/n sum_i softmax(z_i)) = logsumexp_i(log_softmax(z_i)) - log n."""
    return jax.nn.logsumexp(jnp.stack([jax.nn.log_softmax(each) for each in logits]), axis=0) - jnp.log(len(logits))


class Ensemble(nn.Module):
    """p(y) = 1/n sum_i p_i(y), token by token, of models that read the same tokens.

    It is a model like its members: what it returns as logits are the logarithms of the mean probabilities, and its
    cache holds theirs side by side. Its attention is nowhere, as each member has its own.

    Attributes:
      members: any models that generate, of any kinds. Their parameters are 'members_0', 'members_1', ...
    """
    members: Sequence[nn.Module]

    @property
    def length_limit(self) -> int | None:
        """Longest sequence that the positions of all members reach; None where there is no limit."""
        return min((each.length_limit for each in self._models if each.length_limit), default=None)

    def __call__(self, deterministic: bool = True,
                 **inputs: Int[Array, 'batch _'] | None) -> Float[Array, 'batch length vocab']:
        """Teacher forcing: log-probabilities of the token after each one, in float32."""
        return log_mean_probability([each(**inputs, deterministic=deterministic) for each in self._models])

    def encode(self, tokens: Int[Array, 'batch length']) -> tuple[Any, ...]:
        """What each member makes of the tokens before the first generated one."""
        return tuple(each.encode(tokens) for each in self._models)

    def init_cache(self, memory: tuple[Any, ...], beam: int, max_length: int) -> Cache:
        """The empty caches of all members, for `beam` hypotheses of up to `max_length` tokens each."""
        return _side_by_side([each.init_cache(part, beam, max_length)
                              for each, part in zip(self._models, memory, strict=True)])

    def decode_step(self, token: Int[Array, 'batch beam'],
                    cache: Cache) -> tuple[Float[Array, 'batch beam vocab'], Cache]:
        """The newest token of each hypothesis -> log-probabilities of the one after it."""
        parts = zip(cache.memory, cache.state, cache.past, strict=True)
        steps = [each.decode_step(token, Cache(memory, state, cache.position, past))
                 for each, (memory, state, past) in zip(self._models, parts, strict=True)]
        return log_mean_probability([logits for logits, _ in steps]), _side_by_side([cache for _, cache in steps])

    @property
    def _models(self) -> Sequence[Any]:
        return self.members


def _side_by_side(caches: Sequence[Cache]) -> Cache:
    """One cache; its members are at the same position."""
    return Cache(memory=tuple(each.memory for each in caches), state=tuple(each.state for each in caches),
                 position=caches[0].position, past=tuple(each.past for each in caches))
