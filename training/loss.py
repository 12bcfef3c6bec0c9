"""Losses as sums over real targets: the sums over the parts of a batch are added, and divided once at the end."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Sums(flax.struct.PyTreeNode):
    """Sums over the targets of weight 1. Add them up over batches, then take the means.

    A pytree of scalars; under vmap or pmap, of vectors.
    """
    loss: Any     # what is minimised
    tokens: Any   # targets: tokens of a text, or examples
    others: Any   # {name: sum} of further metrics; 'nll' is cross-entropy without smoothing, nats
    skipped: Any = None  # by train_step: updates skipped because loss or gradient was not finite; all else is 0 then

    def means(self, prefix: str = '') -> dict[str, float]:
        """Returns the mean of each sum per target; 'nll' is replaced by the perplexity, its exp."""
        tokens = float(self.tokens)
        totals = {'loss': self.loss, **self.others}
        means = {name: float(total) / tokens for name, total in totals.items()}
        if 'nll' in means:
            means['perplexity'] = float(jnp.exp(means.pop('nll')))
        return {f'{prefix}{name}': value for name, value in means.items()}


def cross_entropy(logits: Float[Array, '*batch classes'], targets: Int[Array, '*batch'],
                  weights: Float[Array, '*batch'], label_smoothing: float) -> Sums:
    """Cross-entropy with the smoothed target distribution (1 - eps) * onehot + eps / classes (section 5.4).

    Computed without that distribution: -sum_c q_c log p_c = lse - (1 - eps) * logit[target] - eps * mean(logits).
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = normaliser - (1 - label_smoothing) * target_logit
    if label_smoothing:
        loss -= label_smoothing * logits.mean(axis=-1)
    # A prediction is correct where no logit exceeds the target's: cheaper than an argmax.
    correct = target_logit >= logits.max(axis=-1)
    return Sums(loss=jnp.sum(loss * weights), tokens=jnp.sum(weights),
                others={'nll': jnp.sum((normaliser - target_logit) * weights), 'accuracy': jnp.sum(correct * weights)})


def squared_error(outputs: Float[Array, 'batch values'], targets: Float[Array, 'batch values'],
                  weights: Float[Array, ' batch']) -> Sums:
    """The mean over an example's values of (output - target)^2, and of |output - target|."""
    error = outputs - targets
    return Sums(loss=jnp.sum(jnp.mean(error ** 2, axis=-1) * weights), tokens=jnp.sum(weights),
                others={'absolute_error': jnp.sum(jnp.mean(jnp.abs(error), axis=-1) * weights)})
