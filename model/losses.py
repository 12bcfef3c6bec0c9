"""Losses as sums over real targets: the sums over the parts of a batch are added, and divided once at the end."""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.product import matrix_gradient, narrowed
from model.embedding import Projection

TILE = 2 ** 24  # logits of a device that are in memory at a time


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


def cross_entropy(outputs: Float[Array, '*batch classes'] | Projection, targets: Int[Array, '*batch'],
                  weights: Float[Array, '*batch'], label_smoothing: float) -> Sums:
    """Cross-entropy with the smoothed target distribution (1 - eps) * onehot + eps / classes (section 5.4).

    Computed without that distribution: -sum_c q_c log p_c = lse - (1 - eps) * logit[target] - eps * mean(logits).
    `outputs` are logits, or what they are made from: then they are never in memory as a whole.
    """
    if isinstance(outputs, Projection):
        found: tuple[Array, dict[str, Array]] = _tiled(outputs, targets, weights, label_smoothing)
        loss, others = found
    else:
        normaliser = jax.nn.logsumexp(outputs, axis=-1)
        target_logit = jnp.take_along_axis(outputs, targets[..., None], axis=-1)[..., 0]
        losses = normaliser - (1 - label_smoothing) * target_logit
        if label_smoothing:
            losses -= label_smoothing * outputs.mean(axis=-1)
        # A prediction is correct where no logit exceeds the target's: cheaper than an argmax.
        correct = target_logit >= outputs.max(axis=-1)
        loss, others = jnp.sum(losses * weights), {'nll': jnp.sum((normaliser - target_logit) * weights),
                                                   'accuracy': jnp.sum(correct * weights)}
    return Sums(loss=loss, tokens=jnp.sum(weights), others=others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tiled(projection, targets, weights, label_smoothing):
    """The loss and the other sums of `cross_entropy`, from the logits of some positions at a time.

    The loss has gradients with respect to states, table and bias. They are computed together with it, tile by tile, so
    no tile is computed twice. The other sums have none.
    """
    return _scan(projection, targets, weights, label_smoothing, gradients=False)[0]


def _forward(projection, targets, weights, label_smoothing):
    # A sum that is carried from tile to tile is cheapest where it stays in the cache; a TPU would read and write it,
    # which is larger than a tile, in its memory each time.
    return jax.lax.platform_dependent(
        projection, targets, weights, cpu=functools.partial(_scan, label_smoothing=label_smoothing, gradients=True),
        default=functools.partial(_one_product, label_smoothing=label_smoothing))


def _backward(label_smoothing, gradients, cotangents):
    scale = cotangents[0]  # of the loss
    return jax.tree.map(lambda each: each * scale.astype(each.dtype), gradients), None, None


_tiled.defvjp(_forward, _backward)


def _scan(projection, targets, weights, label_smoothing, *, gradients):
    """((loss, others), gradients with respect to the projection or None), positions [batch, length] in tiles.

    With p the softmax and q the smoothed target, the gradient of the loss with respect to the logits of a position is
    weight * (p - q). Only p is a matrix: q's part is a row of the table and the mean of the rows.
    """
    states, table, bias = projection.states, projection.table, projection.bias
    dtype, (classes, width) = states.dtype, table.shape
    narrow = narrowed(dtype)
    matrix, mean_row = table.astype(narrow), table.mean(axis=0)

    def step(carry, part):
        states, targets, weights = part
        logits = _logits(states.astype(narrow), matrix, bias)
        greatest = logits.max(axis=-1)
        unnormalised = jnp.exp(logits - greatest[..., None])
        total = unnormalised.sum(axis=-1)
        normaliser = greatest + jnp.log(total)
        target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = normaliser - (1 - label_smoothing) * target_logit
        if label_smoothing:
            losses -= label_smoothing * (states.astype(jnp.float32) @ mean_row)
            if bias is not None:
                losses -= label_smoothing * bias.mean()
        correct = target_logit >= greatest
        sums = [jnp.sum(each * weights) for each in (losses, normaliser - target_logit, correct)]
        if not gradients:
            return jax.tree.map(jnp.add, carry, (sums, None, None)), None
        of_bias = None if bias is None else jnp.einsum('bt,btv->v', weights / total, unnormalised)
        # The softmax is normalised where it is smaller, in the factors of its products.
        scale, unnormalised = (weights / total)[..., None], unnormalised.astype(narrow)
        of_states = scale * jnp.einsum('btv,vd->btd', unnormalised, matrix, preferred_element_type=jnp.float32)
        of_states -= weights[..., None] * ((1 - label_smoothing) * table[targets] + label_smoothing * mean_row)
        # As matrices: of one tile in bfloat16, XLA for CPUs cannot compute a transposed sum over two axes.
        scaled, unnormalised = (each.reshape(-1, each.shape[-1])
                                for each in ((scale * states).astype(narrow), unnormalised))
        of_table = matrix_gradient(scaled, unnormalised, jnp.float32)
        return jax.tree.map(jnp.add, carry, (sums, of_table, of_bias)), of_states.astype(dtype)

    nothing = ([jnp.zeros(())] * 3, jnp.zeros((width, classes)) if gradients else None,
               jnp.zeros(classes) if gradients and bias is not None else None)
    scanned: Any = jax.lax.scan(step, nothing, _cut(projection, targets, weights))
    ((loss, nll, accuracy), of_table, of_bias), of_states = scanned
    found = loss, {'nll': nll, 'accuracy': accuracy}
    if not gradients:
        return found, None
    of_states = _joined(of_states, states.shape)
    weighted = weights[..., None] * states.astype(jnp.float32)
    of_table = of_table.T.at[targets].add((label_smoothing - 1) * weighted)
    of_table -= label_smoothing / classes * weighted.reshape(-1, width).sum(axis=0)
    if bias is not None:
        of_bias = of_bias.at[targets].add((label_smoothing - 1) * weights) - label_smoothing / classes * weights.sum()
    return found, projection.replace(states=of_states, table=of_table, bias=of_bias)


def _one_product(projection, targets, weights, *, label_smoothing):
    """What `_scan` gives with gradients, for accelerators.

    The gradient with respect to the logits, weight * (p - q), is kept for all tiles in the dtype of the states: then
    the gradient of the table is one product, which is written once and reduced once over the devices.
    """
    states, table, bias = projection.states, projection.table, projection.bias
    dtype, classes = states.dtype, len(table)
    matrix = table.astype(dtype)

    def step(carry, part):
        states, targets, weights = part
        logits = _logits(states, matrix, bias)
        greatest = logits.max(axis=-1)
        normaliser = greatest + jnp.log(jnp.exp(logits - greatest[..., None]).sum(axis=-1))
        at_target = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        target_logit = jnp.where(at_target, logits, 0).sum(axis=-1)
        losses = normaliser - (1 - label_smoothing) * target_logit - label_smoothing * logits.mean(axis=-1)
        sums = [jnp.sum(each * weights) for each in (losses, normaliser - target_logit, target_logit >= greatest)]
        expected = jnp.where(at_target, 1 - label_smoothing, 0) + label_smoothing / classes
        of_logits = weights[..., None] * (jnp.exp(logits - normaliser[..., None]) - expected)
        of_bias = None if bias is None else of_logits.sum(axis=(0, 1))
        of_logits = of_logits.astype(dtype)
        of_states = jnp.einsum('btv,vd->btd', of_logits, matrix, preferred_element_type=jnp.float32).astype(dtype)
        return jax.tree.map(jnp.add, carry, (sums, of_bias)), (of_states, of_logits)

    nothing = [jnp.zeros(())] * 3, None if bias is None else jnp.zeros(classes)
    parts = _cut(projection, targets, weights)
    scanned: Any = jax.lax.scan(step, nothing, parts)
    ((loss, nll, accuracy), of_bias), (of_states, of_logits) = scanned
    of_table = jnp.einsum('nbtv,nbtd->vd', of_logits, parts[0], preferred_element_type=jnp.float32)
    gradients = projection.replace(states=_joined(of_states, states.shape), table=of_table, bias=of_bias)
    return (loss, {'nll': nll, 'accuracy': accuracy}), gradients


def _logits(states, matrix, bias):
    """Float32 logits [batch, tile, classes] of states in any dtype."""
    logits = jnp.einsum('btd,vd->btv', states, matrix, preferred_element_type=jnp.float32)
    return logits if bias is None else logits + bias


def _cut(projection, targets, weights):
    """(states, targets, weights) in tiles: [batch, length, ...] -> [count, batch, tile, ...]."""
    positions = [each.reshape(len(targets), -1, *each.shape[targets.ndim:])
                 for each in (projection.states, targets, weights)]
    length = positions[0].shape[1]
    count, tile = tiles(len(targets), length, len(projection.table), projection.devices)

    def split(array):
        padding = [(0, 0), (0, count * tile - length), *[(0, 0)] * (array.ndim - 2)]
        return jnp.moveaxis(jnp.pad(array, padding).reshape(len(array), count, tile, *array.shape[2:]), 1, 0)

    return tuple(map(split, positions))


def _joined(tiled, shape):
    """What `_cut` made, put together again."""
    rows = jnp.moveaxis(tiled, 0, 1).reshape(shape[0], -1, shape[-1])
    return rows[:, :math.prod(shape[1:-1])].reshape(shape)


def tiles(rows: int, length: int, classes: int, devices: int) -> tuple[int, int]:
    """Into how many tiles the positions of a batch are cut, and how many positions a tile has of each row.

    A tile has about TILE logits on each of the `devices`. It is a part of each row, so that rows stay on their devices.
    """
    least = min(length, -(-rows * length * classes // (TILE * devices)))
    count = min(range(least, min(length, 2 * least) + 1), key=lambda count: (-length % count, count))
    return count, -(-length // count)


def squared_error(outputs: Float[Array, 'batch values'], targets: Float[Array, 'batch values'],
                  weights: Float[Array, ' batch']) -> Sums:
    """The mean over an example's values of (output - target)^2, and of |output - target|."""
    error = outputs - targets
    return Sums(loss=jnp.sum(jnp.mean(error ** 2, axis=-1) * weights), tokens=jnp.sum(weights),
                others={'absolute_error': jnp.sum(jnp.mean(jnp.abs(error), axis=-1) * weights)})


def divergence(logits: Float[Array, '*batch classes'],
               others: Float[Array, '*batch classes']) -> Float[Array, '*batch']:
    """KL(p || q) = sum_c p_c (log p_c - log q_c) of the softmaxes p of `logits` and q of `others`, in nats."""
    one, other = jax.nn.log_softmax(logits), jax.nn.log_softmax(others)
    return jnp.sum(jnp.exp(one) * (one - other), axis=-1)


def symmetric_divergence(logits: Float[Array, '*batch classes'],
                         others: Float[Array, '*batch classes']) -> Float[Array, '*batch']:
    """(KL(p || q) + KL(q || p)) / 2 = sum_c (p_c - q_c) (log p_c - log q_c) / 2 of the softmaxes p and q, in nats."""
    one, other = jax.nn.log_softmax(logits), jax.nn.log_softmax(others)
    return jnp.sum((jnp.exp(one) - jnp.exp(other)) * (one - other), axis=-1) / 2
