"""Losses as sums over targets. The sums of all parts of a batch are added. Only the total is divided."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.cross_entropy import is_argmax, possible_classes, tiled_cross_entropy
from model.embedding import Projection


class Sums(flax.struct.PyTreeNode):
    """Weighted sums of a loss and of metrics over targets. Add the sums of all batches, then call `means`.

    The fields are scalars, or vectors under vmap or pmap.
    """
    loss: Any     # the loss that training minimises
    tokens: Any   # number of targets (tokens of a text, or examples)
    others: Any   # {name: sum} of further metrics; 'nll' is cross-entropy without smoothing, in nats
    skipped: Any = None  # updates that train_step skipped (loss or gradient not finite; other sums are 0)

    def means(self, prefix: str = '') -> dict[str, float]:
        """Returns the mean per target of each sum. The perplexity, exp(nll), replaces 'nll'."""
        tokens = float(self.tokens)
        totals = {'loss': self.loss, **self.others}
        means = {name: float(total) / tokens for name, total in totals.items()}
        if 'nll' in means:
            means['perplexity'] = float(jnp.exp(means.pop('nll')))
        return {f'{prefix}{name}': value for name, value in means.items()}


def cross_entropy(outputs: Float[Array, '*batch classes'] | Projection, targets: Int[Array, '*batch'],
                  weights: Float[Array, '*batch'], label_smoothing: float, absent: tuple[int, ...] = ()) -> Sums:
    """Returns the cross-entropy with the smoothed target distribution q = (1 - eps) * onehot + eps * u (section 5.4).

    eps is `label_smoothing`. u is uniform over the classes that can occur. The classes in `absent` cannot occur,
    because an imported vocabulary has no tokens with these ids. The loss is computed without q. With
    p = softmax(logits) and the mean mean_u over the classes that can occur:

        -sum_c q_c log p_c = logsumexp(logits) - (1 - eps) * logit[target] - eps * mean_u(logits)

    'accuracy' counts the positions whose target is the argmax. If several logits are equal, the first is the argmax.

    `outputs` are logits or a Projection. The logits of a Projection are computed in tiles (kernels/cross_entropy.py).
    On CPUs, these logits and their gradient are never in memory as a whole.

    Raises:
      NotImplementedError: with a Projection, for a gradient of 'nll' or a gradient with respect to `weights`.
    """
    if isinstance(outputs, Projection):
        factors = outputs.states, outputs.table, outputs.bias
        sums: Any = tiled_cross_entropy(factors, targets, weights, label_smoothing, absent, outputs.devices)
    else:
        log_normaliser = jax.nn.logsumexp(outputs, axis=-1)
        target_logit = jnp.take_along_axis(outputs, targets[..., None], axis=-1)[..., 0]
        losses = log_normaliser - (1 - label_smoothing) * target_logit
        if label_smoothing:
            losses -= label_smoothing * outputs.mean(axis=-1, where=possible_classes(outputs.shape[-1], absent))
        correct = is_argmax(outputs, targets, target_logit, outputs.max(axis=-1))
        sums = [jnp.sum(values * weights) for values in (losses, log_normaliser - target_logit, correct)]
    loss, nll, accuracy = sums
    return Sums(loss=loss, tokens=jnp.sum(weights), others={'nll': nll, 'accuracy': accuracy})


def squared_error(outputs: Float[Array, 'batch values'], targets: Float[Array, 'batch values'],
                  weights: Float[Array, ' batch']) -> Sums:
    """Returns the sums of the squared-error losses and of the absolute errors over the examples.

    The loss of an example is the mean of (output - target)^2 over its values. The absolute error of an example is the
    mean of |output - target|.
    """
    error = outputs - targets
    return Sums(loss=jnp.sum(jnp.mean(error ** 2, axis=-1) * weights), tokens=jnp.sum(weights),
                others={'absolute_error': jnp.sum(jnp.mean(jnp.abs(error), axis=-1) * weights)})


def divergence(logits: Float[Array, '*batch classes'],
               other_logits: Float[Array, '*batch classes']) -> Float[Array, '*batch']:
    """Returns KL(p || q) = sum_c p_c (log p_c - log q_c), in nats.

    p is softmax(logits), and q is softmax(other_logits).
    """
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def symmetric_divergence(logits: Float[Array, '*batch classes'],
                         other_logits: Float[Array, '*batch classes']) -> Float[Array, '*batch']:
    """Returns (KL(p || q) + KL(q || p)) / 2, in nats, for p = softmax(logits) and q = softmax(other_logits).

    This equals sum_c (p_c - q_c) (log p_c - log q_c) / 2.
    """
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
    return jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q), axis=-1) / 2
