"""Cross-entropy from states and an output matrix. The logits are computed in tiles and are never all in memory.

The values are equal to `model.losses.cross_entropy` of the logits. The gradients are computed together with the values,
tile by tile, so no tile is computed twice. Let p be the softmax and q the smoothed target distribution. Then the
gradient of the loss with respect to the logits of a position is weight * (p - q).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from kernels.largest import row_maximum
from kernels.product import matrix_gradient, narrowed

TILE = 2 ** 24  # number of logits that a device keeps in memory at a time
WHOLE = 'Use cross_entropy(projection.logits(), ...).'

# States [batch, ..., d], the matrix [classes, d], and the bias [classes] or None.
Factors = tuple[Float[Array, '*batch d'], Float[Array, 'classes d'], Float[Array, ' classes'] | None]
Scalar = Float[Array, '']


def is_argmax(logits: Float[Array, '*batch classes'], targets: Int[Array, '*batch'],
              target_logit: Float[Array, '*batch'], maximum: Float[Array, '*batch']) -> Bool[Array, '*batch']:
    """Returns logits.argmax(axis=-1) == targets, from the logits of the targets and the finite maxima of the logits.

    This is faster than an argmax, because XLA for CPUs vectorises `row_maximum`, but not an argmax.
    """
    return (target_logit >= maximum) & (row_maximum(logits, before=targets) < target_logit)


def possible_classes(classes: int, absent: tuple[int, ...]) -> Bool[np.ndarray, '{classes}'] | None:
    """Returns a mask that is False for the `absent` classes, or None if no class is absent."""
    if not absent:
        return None
    mask = np.ones(classes, bool)
    mask[list(absent)] = False
    return mask


def tiles(rows: int, length: int, classes: int, devices: int) -> tuple[int, int]:
    """Returns the number of tiles of a batch, and the number of positions per row in a tile.

    A tile has about TILE logits on each of the `devices`. A tile contains a part of every row, so that each row stays
    on its device.
    """
    most = max(1, length)  # a batch without positions has one tile without positions
    least = max(1, min(most, -(-rows * length * classes // (TILE * devices))))
    count = min(range(least, min(most, 2 * least) + 1), key=lambda count: (-length % count, count))
    return count, -(-length // count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def tiled_cross_entropy(factors: Factors, targets: Int[Array, '*batch'], weights: Float[Array, '*batch'],
                        label_smoothing: float, absent: tuple[int, ...] = (),
                        devices: int = 1) -> tuple[Scalar, Scalar, Scalar]:
    """Returns the sums (loss, nll, accuracy) of `model.losses.cross_entropy` for the logits states @ matrix.T + bias.

    `devices` is the number of devices that share the batch. Only the gradients of the loss with respect to the factors
    are supported. Training needs no other gradients, and their computation would take time.

    Raises:
      NotImplementedError: for a gradient of 'nll' or a gradient with respect to `weights`.
    """
    return scan_tiles(factors, targets, weights, label_smoothing, absent, devices, gradients=False)[0]


def _forward(factors, targets, weights, label_smoothing, absent, devices):
    if weights.perturbed:
        raise NotImplementedError(f'cross_entropy of a Projection has no gradient with respect to `weights`. {WHOLE}')
    arguments = jax.tree.map(lambda argument: argument.value, (factors, targets, weights))
    options = {'label_smoothing': label_smoothing, 'absent': absent, 'devices': devices}
    # The gradient of the matrix is a sum over the tiles. On a CPU, this sum stays in the cache. A TPU would read and
    # write the sum in memory for each tile, and the sum is larger than a tile.
    return jax.lax.platform_dependent(*arguments, default=functools.partial(one_product, **options),
                                      cpu=functools.partial(scan_tiles, **options))


def _backward(label_smoothing, absent, devices, gradients, cotangents):
    scale, grad_nll, _ = cotangents  # the accuracy is piecewise constant, so its gradient is 0
    if not isinstance(grad_nll, SymbolicZero):
        raise NotImplementedError(f"cross_entropy of a Projection supports the gradient of the loss, but not of 'nll'. "
                                  f'{WHOLE}')
    if isinstance(scale, SymbolicZero):
        scale = jnp.zeros((), jnp.float32)
    return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), gradients), None, None


tiled_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def scan_tiles(factors, targets, weights, label_smoothing, absent=(), devices=1, gradients=True):
    """Returns the sums (loss, nll, accuracy), and the gradients of the loss with respect to the factors.

    The factors are states [batch, ..., d], a matrix [classes, d], and a bias [classes] or None. `targets` and `weights`
    have the shape [batch, ...]. The sums are scalars, and the gradients have the shapes of the factors.

    This form is fast on CPUs. If `gradients` is False, None is returned for the gradients. The gradient with respect to
    the logits is weight * (p - q), with the predicted distribution p and the smoothed target distribution q. Only p is
    computed as a matrix, tile by tile. The products with q need only one row of the output matrix (the row of the
    target) and the mean of all rows.
    """
    states, table, bias = factors
    dtype, (classes, width) = states.dtype, table.shape
    narrow, possible = narrowed(dtype), possible_classes(classes, absent)
    matrix, mean_row = table.astype(narrow), table.mean(axis=0, where=None if possible is None else possible[:, None])

    def step(carry, tile):
        states, targets, weights = tile
        logits = _logits(states.astype(narrow), matrix, bias)
        maximum = row_maximum(logits)
        unnormalised = jnp.exp(logits - maximum[..., None])
        total = unnormalised.sum(axis=-1)
        target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        mean_logit = [states.astype(jnp.float32) @ mean_row, *([] if bias is None else [bias.mean(where=possible)])]
        sums = _sums(logits, targets, weights, maximum + jnp.log(total), maximum, target_logit, mean_logit,
                     label_smoothing)
        if not gradients:
            return jax.tree.map(jnp.add, carry, (sums, None, None)), None
        grad_bias = None if bias is None else jnp.einsum('bt,btv->v', weights / total, unnormalised)
        # The softmax is not normalised. Instead, the arrays that are multiplied by the softmax are divided by the sum,
        # because these arrays are smaller.
        scale, unnormalised = (weights / total)[..., None], unnormalised.astype(narrow)
        grad_states = scale * jnp.einsum('btv,vd->btd', unnormalised, matrix, preferred_element_type=jnp.float32)
        grad_states -= weights[..., None] * ((1 - label_smoothing) * table[targets] + label_smoothing * mean_row)
        # The arrays become matrices, because XLA for CPUs cannot compute a transposed sum over two axes of one tile in
        # bfloat16.
        scaled, unnormalised = (array.reshape(-1, array.shape[-1])
                                for array in ((scale * states).astype(narrow), unnormalised))
        grad_table = matrix_gradient(scaled, unnormalised, jnp.float32)
        return jax.tree.map(jnp.add, carry, (sums, grad_table, grad_bias)), grad_states.astype(dtype)

    zeros = (_zero_sums(), jnp.zeros((width, classes), jnp.float32) if gradients else None,
             jnp.zeros(classes, jnp.float32) if gradients and bias is not None else None)
    scanned: Any = jax.lax.scan(step, zeros, _split(states, targets, weights, classes, devices))
    (sums, grad_table, grad_bias), grad_states = scanned
    if not gradients:
        return sums, None
    weighted = weights[..., None] * states.astype(jnp.float32)
    uniform = _uniform(classes, label_smoothing, absent)
    grad_table = grad_table.T.at[targets].add((label_smoothing - 1) * weighted)
    grad_table -= uniform[:, None] * weighted.reshape(-1, width).sum(axis=0)
    if bias is not None:
        grad_bias = grad_bias.at[targets].add((label_smoothing - 1) * weights) - uniform * weights.sum()
    return sums, (_join(grad_states, states.shape), grad_table, grad_bias)


def one_product(factors, targets, weights, label_smoothing, absent=(), devices=1):
    """Returns the same values as `scan_tiles`, in the form that is fast on accelerators.

    The gradient with respect to the logits of all tiles is kept in memory, in the dtype of the factors of products. So
    the gradient of the output matrix is one product, which is written once and reduced once over the devices.
    """
    states, table, bias = factors
    dtype, narrow, classes = states.dtype, narrowed(states.dtype), len(table)
    matrix, possible = table.astype(narrow), possible_classes(classes, absent)
    uniform = _uniform(classes, label_smoothing, absent)

    def step(carry, tile):
        states, targets, weights = tile
        logits = _logits(states, matrix, bias)  # the states have the dtype `narrow` already: see `parts` below
        maximum = logits.max(axis=-1)
        normaliser = maximum + jnp.log(jnp.exp(logits - maximum[..., None]).sum(axis=-1))
        at_target = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        target_logit = jnp.where(at_target, logits, 0).sum(axis=-1)
        mean_logit = [logits.mean(axis=-1, where=possible)]
        sums = _sums(logits, targets, weights, normaliser, maximum, target_logit, mean_logit, label_smoothing)
        smoothed = jnp.where(at_target, 1 - label_smoothing, 0) + uniform
        grad_logits = weights[..., None] * (jnp.exp(logits - normaliser[..., None]) - smoothed)
        grad_bias = None if bias is None else grad_logits.sum(axis=(0, 1))
        grad_logits = grad_logits.astype(narrow)
        grad_states = jnp.einsum('btv,vd->btd', grad_logits, matrix, preferred_element_type=jnp.float32).astype(dtype)
        return jax.tree.map(jnp.add, carry, (sums, grad_bias)), (grad_states, grad_logits)

    zeros = _zero_sums(), None if bias is None else jnp.zeros(classes, jnp.float32)
    parts = _split(states.astype(narrow), targets, weights, classes, devices)
    scanned: Any = jax.lax.scan(step, zeros, parts)
    (sums, grad_bias), (grad_states, grad_logits) = scanned
    grad_table = jnp.einsum('nbtv,nbtd->vd', grad_logits, parts[0], preferred_element_type=jnp.float32)
    return sums, (_join(grad_states, states.shape), grad_table, grad_bias)


def _sums(logits, targets, weights, normaliser, maximum, target_logit, mean_logit, label_smoothing):
    """Returns the sums (loss, nll, accuracy) over positions. `mean_logit` is a list of the terms of the mean logit."""
    losses = normaliser - (1 - label_smoothing) * target_logit
    if label_smoothing:
        for summand in mean_logit:
            losses -= label_smoothing * summand
    correct = is_argmax(logits, targets, target_logit, maximum)
    return tuple(jnp.sum(values * weights) for values in (losses, normaliser - target_logit, correct))


def _uniform(classes, label_smoothing, absent):
    """Returns the part of the smoothed target distribution that does not depend on the target, float [classes]."""
    possible = np.ones(classes) if (mask := possible_classes(classes, absent)) is None else mask
    return jnp.asarray(label_smoothing / possible.sum() * possible, jnp.float32)


def _zero_sums():
    """Returns three zeros, the initial sums. Without an explicit dtype, they would be float64 with jax_enable_x64."""
    return (jnp.zeros((), jnp.float32),) * 3


def _logits(states, matrix, bias):
    """Returns float32 logits [batch, tile, classes] of states in any dtype."""
    logits = jnp.einsum('btd,vd->btv', states, matrix, preferred_element_type=jnp.float32)
    return logits if bias is None else logits + bias


def _split(states, targets, weights, classes, devices):
    """Returns (states, targets, weights) in tiles: [batch, length, ...] -> [count, batch, tile, ...]."""
    rows, length = len(targets), math.prod(targets.shape[1:])
    positions = [array.reshape(rows, length, *array.shape[targets.ndim:]) for array in (states, targets, weights)]
    count, tile = tiles(rows, length, classes, devices)

    def split(array):
        padding = [(0, 0), (0, count * tile - length), *[(0, 0)] * (array.ndim - 2)]
        return jnp.moveaxis(jnp.pad(array, padding).reshape(len(array), count, tile, *array.shape[2:]), 1, 0)

    return tuple(map(split, positions))


def _join(parts, shape):
    """Joins the tiles of an array into one array of the original shape. This is the inverse of `_split`."""
    count, rows, tile, width = parts.shape
    joined = jnp.moveaxis(parts, 0, 1).reshape(rows, count * tile, width)
    return joined[:, :math.prod(shape[1:-1])].reshape(shape)
