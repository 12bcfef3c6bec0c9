"""Cross-entropy with label smoothing, as sums over real tokens: who splits a batch divides once, at the end."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class Sums:
    """Sums over the positions of weight 1. Add them up over batches, then take the means.

    A pytree of four scalars; under vmap or pmap, of four vectors.
    """
    loss: Any     # label-smoothed cross-entropy, nats
    nll: Any      # cross-entropy without smoothing, nats
    correct: Any  # positions whose most probable class is the target
    tokens: Any   # positions

    def means(self, prefix: str = '') -> dict[str, float]:
        """Loss and accuracy per token, and perplexity, exp of the unsmoothed cross-entropy per token."""
        tokens = float(self.tokens)
        return {f'{prefix}loss': float(self.loss) / tokens, f'{prefix}accuracy': float(self.correct) / tokens,
                f'{prefix}perplexity': float(jnp.exp(self.nll / self.tokens))}


def cross_entropy(logits: Float[Array, '*batch classes'], targets: Int[Array, '*batch'],
                  weights: Float[Array, '*batch'], label_smoothing: float) -> Sums:
    """Against the smoothed target distribution (1 - eps) * onehot + eps / classes (section 5.4).

    Written without that distribution: -sum_c q_c log p_c = lse - (1 - eps) * logit[target] - eps * mean(logits).
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = normaliser - (1 - label_smoothing) * target_logit
    if label_smoothing:
        loss -= label_smoothing * logits.mean(axis=-1)
    # The best class is the target where no logit is greater: cheaper than an argmax.
    correct = target_logit >= logits.max(axis=-1)
    return Sums(loss=jnp.sum(loss * weights), nll=jnp.sum((normaliser - target_logit) * weights),
                correct=jnp.sum(correct * weights), tokens=jnp.sum(weights))
