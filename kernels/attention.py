"""Attention in chunks of queries, with O(n) memory for n positions, and the fused kernel of NVIDIA GPUs."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped


def in_chunks(function: Callable[[dict[str, Array], Array], Array],
              rows: Mapping[str, Shaped[Array | np.ndarray, '...']], axes: Mapping[str, int],
              chunk: int) -> Shaped[Array, '...']:
    """Applies `function` to at most `chunk` rows at a time, and returns the outputs of all rows.

    The backward pass recomputes each chunk instead of keeping the intermediate values (Rabe and Staats 2021,
    arXiv:2112.05682).

    Args:
      function: maps a chunk of the rows, and the index of the chunk, to an array [batch, rows, ...].
      rows: the arrays, {name: array}.
      axes: the index of the axis of rows in each array, {name: axis}.
      chunk: maximum number of rows in a chunk.
    """
    name = next(iter(rows))
    length = rows[name].shape[axes[name]]
    count = max(1, -(-length // chunk))  # an input without rows is one empty chunk
    size = -(-length // count)  # all chunks have the same size, so few rows of padding are needed

    def split(array, axis):
        padding = [(0, 0)] * array.ndim
        padding[axis] = 0, count * size - length
        array = jnp.pad(array, padding)
        return jnp.moveaxis(array.reshape(*array.shape[:axis], count, size, *array.shape[axis + 1:]), axis, 0)

    parts = {name: split(array, axes[name]) for name, array in rows.items()}
    outputs = jax.lax.map(jax.checkpoint(lambda part: function(*part)), (parts, jnp.arange(count)))
    outputs = jnp.moveaxis(outputs, 0, 1)
    return outputs.reshape(len(outputs), count * size, *outputs.shape[3:])[:, :length]


def fused_attention(query: Float[Array, 'batch target heads d_k'], key: Float[Array, 'batch source groups d_k'],
                    value: Float[Array, 'batch source groups d_k'],
                    mask: Bool[Array, '#batch #heads #target #source'] | None = None,
                    bias: Float[Array, '#batch heads target source'] | None = None,
                    scale: float | None = None) -> Float[Array, 'batch target heads d_k']:
    """Computes `model.attention.attention` for dot scores times `scale` (default 1 / sqrt(d_k)), and for d_v = d_k.

    NVIDIA GPUs use one kernel, cuDNN's flash attention, for float16 and bfloat16, if d_k is a multiple of 8 and at most
    128, and the numbers of queries and of keys are even. In all other cases, XLA's implementation is used, which needs
    O(n^2) memory. cuDNN's kernel needs O(n) memory without a mask and a bias. JAX converts a mask to a bias
    [#batch, #heads, target, source] in the dtype of the queries, which needs O(n^2) memory.
    """
    # In training, JAX refuses odd numbers also without a bias, because it represents "no bias" by an empty array.
    fits = query.shape[3] % 8 == 0 and query.shape[3] <= 128 and query.shape[1] % 2 == key.shape[1] % 2 == 0
    on_gpu = jax.default_backend() == 'gpu' and query.dtype in (jnp.float16, jnp.bfloat16)
    sees_any = None
    if bias is not None:
        bias = bias.astype(query.dtype)
    if mask is not None:
        # cuDNN's kernel may compute NaN for a query that sees no key, and jnp.where would not keep the NaN out of the
        # gradients. So such a query sees all keys in the kernel, and its output is set to 0 below.
        sees_any = mask.any(axis=-1, keepdims=True)
        # A mask of padding has one row for all queries, but JAX's call of cuDNN needs a row for each query.
        mask = jnp.broadcast_to(mask | ~sees_any, (*mask.shape[:2], query.shape[1], key.shape[1]))
    pooled = jax.nn.dot_product_attention(query, key, value, bias=bias, mask=mask, scale=scale,
                                          implementation='cudnn' if on_gpu and fits else 'xla')
    return pooled if sees_any is None else jnp.where(jnp.moveaxis(sees_any, 1, 2), pooled, 0)
