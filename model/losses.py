"""Losses as sums over real targets: the sums over the parts of a batch are added, and divided once at the end."""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from kernels.product import matrix_gradient, narrowed
from model.embedding import Projection

TILE = 2 ** 24  # logits of a device that are in memory at a time
WHOLE = 'Use cross_entropy(projection.logits(), ...).'


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
                  weights: Float[Array, '*batch'], label_smoothing: float, absent: tuple[int, ...] = ()) -> Sums:
    """Returns the cross-entropy with the smoothed target distribution q = (1 - eps) * onehot + eps * u (section 5.4).

    u is uniform over the classes that can occur: all classes except `absent`, the tokens that an imported vocabulary
    lacks. The loss is computed without q: -sum_c q_c log p_c = lse - (1 - eps) * logit[target] - eps * mean, where the
    mean is over the logits of the classes that can occur. 'accuracy' counts the positions whose target is the argmax;
    of equal logits, the first one is the argmax.

    `outputs` are logits, or a Projection, whose logits are computed in tiles (`_tiled`). The gradient of a Projection's
    logits is in memory as a whole on accelerators only.

    Raises:
      NotImplementedError: if a gradient of 'nll', or with respect to the weights, is asked for with a Projection.
    """
    if isinstance(outputs, Projection):
        sums: Any = _tiled(outputs, targets, weights, label_smoothing, absent)
    else:
        normaliser = jax.nn.logsumexp(outputs, axis=-1)
        target_logit = jnp.take_along_axis(outputs, targets[..., None], axis=-1)[..., 0]
        mean_logit = outputs.mean(axis=-1, where=_possible(outputs.shape[-1], absent))
        sums = _sums(outputs, targets, weights, normaliser, outputs.max(axis=-1), target_logit, [mean_logit],
                     label_smoothing)
    loss, nll, accuracy = sums
    return Sums(loss=loss, tokens=jnp.sum(weights), others={'nll': nll, 'accuracy': accuracy})


def _sums(logits, targets, weights, normaliser, greatest, target_logit, mean_logit, label_smoothing):
    """Returns the sums (loss, nll, accuracy) over positions. `mean_logit` is a list of summands."""
    losses = normaliser - (1 - label_smoothing) * target_logit
    if label_smoothing:
        for summand in mean_logit:
            losses -= label_smoothing * summand
    # An argmax takes longer: of 8 million logits with their products 208 ms, this 166 ms (2 cores of a CPU).
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    earlier = (classes < targets[..., None]) & (logits >= target_logit[..., None])
    correct = (target_logit >= greatest) & ~earlier.any(axis=-1)
    return tuple(jnp.sum(each * weights) for each in (losses, normaliser - target_logit, correct))


def _possible(classes, absent):
    """Returns a mask [classes] of the classes that can occur; None if all can."""
    if not absent:
        return None
    mask = np.ones(classes, bool)
    mask[list(absent)] = False
    return mask


def _spread(classes, label_smoothing, absent):
    """Returns the part of the smoothed target distribution that does not depend on the target, float [classes]."""
    possible = np.ones(classes) if (mask := _possible(classes, absent)) is None else mask
    return jnp.asarray(label_smoothing / possible.sum() * possible, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _tiled(projection, targets, weights, label_smoothing, absent):
    """Returns the sums of `cross_entropy`: (loss, nll, accuracy). Computes the logits of some positions at a time.

    The loss has gradients with respect to states, table and bias. They are computed together with it, tile by tile, so
    no tile is computed twice. Other gradients raise: they would cost time in every training, which needs none of them.
    """
    return _scan(projection, targets, weights, label_smoothing, absent, gradients=False)[0]


def _forward(projection, targets, weights, label_smoothing, absent):
    if weights.perturbed:
        raise NotImplementedError(f'cross_entropy of a Projection has no gradient with respect to its weights. {WHOLE}')
    projection, targets, weights = jax.tree.map(lambda argument: argument.value, (projection, targets, weights))
    options = {'label_smoothing': label_smoothing, 'absent': absent}
    # A sum that is carried from tile to tile is cheapest where it stays in the cache; a TPU would read and write it,
    # which is larger than a tile, in its memory each time.
    return jax.lax.platform_dependent(projection, targets, weights, default=functools.partial(_one_product, **options),
                                      cpu=functools.partial(_scan, **options, gradients=True))


def _backward(label_smoothing, absent, gradients, cotangents):
    scale, of_nll, _ = cotangents  # the accuracy is piecewise constant, so its gradient is 0
    if not isinstance(of_nll, SymbolicZero):
        raise NotImplementedError(f"cross_entropy of a Projection has a gradient of its loss, not of 'nll'. {WHOLE}")
    if isinstance(scale, SymbolicZero):
        scale = jnp.zeros((), jnp.float32)
    return jax.tree.map(lambda each: each * scale.astype(each.dtype), gradients), None, None


_tiled.defvjp(_forward, _backward, symbolic_zeros=True)


def _scan(projection, targets, weights, label_smoothing, absent=(), *, gradients):
    """Returns the sums, and the gradients with respect to the projection or None. Scans over tiles of positions.

    With p the softmax and q the smoothed target, the gradient of the loss with respect to the logits of a position is
    weight * (p - q). Only p is a matrix: q's part is a row of the table and the mean of the rows.
    """
    states, table, bias = projection.states, projection.table, projection.bias
    dtype, (classes, width) = states.dtype, table.shape
    narrow, possible = narrowed(dtype), _possible(classes, absent)
    matrix, mean_row = table.astype(narrow), table.mean(axis=0, where=None if possible is None else possible[:, None])

    def step(carry, part):
        states, targets, weights = part
        logits = _logits(states.astype(narrow), matrix, bias)
        greatest = logits.max(axis=-1)
        unnormalised = jnp.exp(logits - greatest[..., None])
        total = unnormalised.sum(axis=-1)
        target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        mean_logit = [states.astype(jnp.float32) @ mean_row, *([] if bias is None else [bias.mean(where=possible)])]
        sums = _sums(logits, targets, weights, greatest + jnp.log(total), greatest, target_logit, mean_logit,
                     label_smoothing)
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

    nothing = (_zeros(), jnp.zeros((width, classes), jnp.float32) if gradients else None,
               jnp.zeros(classes, jnp.float32) if gradients and bias is not None else None)
    scanned: Any = jax.lax.scan(step, nothing, _cut(projection, targets, weights))
    (sums, of_table, of_bias), of_states = scanned
    if not gradients:
        return sums, None
    of_states = _joined(of_states, states.shape)
    weighted = weights[..., None] * states.astype(jnp.float32)
    spread = _spread(classes, label_smoothing, absent)
    of_table = of_table.T.at[targets].add((label_smoothing - 1) * weighted)
    of_table -= spread[:, None] * weighted.reshape(-1, width).sum(axis=0)
    if bias is not None:
        of_bias = of_bias.at[targets].add((label_smoothing - 1) * weights) - spread * weights.sum()
    return sums, projection.replace(states=of_states, table=of_table, bias=of_bias)


def _one_product(projection, targets, weights, *, label_smoothing, absent=()):
    """Returns what `_scan` returns with gradients, for accelerators.

    The gradient with respect to the logits, weight * (p - q), is kept for all tiles in the dtype of the states: then
    the gradient of the table is one product, which is written once and reduced once over the devices.
    """
    states, table, bias = projection.states, projection.table, projection.bias
    dtype, classes = states.dtype, len(table)
    matrix, possible = table.astype(dtype), _possible(classes, absent)
    spread = _spread(classes, label_smoothing, absent)

    def step(carry, part):
        states, targets, weights = part
        logits = _logits(states, matrix, bias)
        greatest = logits.max(axis=-1)
        normaliser = greatest + jnp.log(jnp.exp(logits - greatest[..., None]).sum(axis=-1))
        at_target = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        target_logit = jnp.where(at_target, logits, 0).sum(axis=-1)
        mean_logit = [logits.mean(axis=-1, where=possible)]
        sums = _sums(logits, targets, weights, normaliser, greatest, target_logit, mean_logit, label_smoothing)
        expected = jnp.where(at_target, 1 - label_smoothing, 0) + spread
        of_logits = weights[..., None] * (jnp.exp(logits - normaliser[..., None]) - expected)
        of_bias = None if bias is None else of_logits.sum(axis=(0, 1))
        of_logits = of_logits.astype(dtype)
        of_states = jnp.einsum('btv,vd->btd', of_logits, matrix, preferred_element_type=jnp.float32).astype(dtype)
        return jax.tree.map(jnp.add, carry, (sums, of_bias)), (of_states, of_logits)

    nothing = _zeros(), None if bias is None else jnp.zeros(classes, jnp.float32)
    parts = _cut(projection, targets, weights)
    scanned: Any = jax.lax.scan(step, nothing, parts)
    (sums, of_bias), (of_states, of_logits) = scanned
    of_table = jnp.einsum('nbtv,nbtd->vd', of_logits, parts[0], preferred_element_type=jnp.float32)
    return sums, projection.replace(states=_joined(of_states, states.shape), table=of_table, bias=of_bias)


def _zeros():
    """Returns the sums of no positions. Their type is given, because it would be float64 with jax_enable_x64."""
    return (jnp.zeros((), jnp.float32),) * 3


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
