"""Products with matrices and within heads, and sums with biases: their gradients are as CPUs compute them best."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels.layout import in_rows

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]

SHORT = 128  # positions up to which a transposed copy of attention's weights is cheaper than a product that transposes
PRODUCT = 'product'  # names these products for a policy of rematerialisation, which does not see into custom gradients


# The arguments of jax.lax.dot_general, which Flax's layers call it with.
def dot_general(inputs: Float[Array, '*batch_and_d'], matrix: Float[Array, '*d_and_f'], dimension_numbers: Dimensions,
                precision: None = None,
                preferred_element_type: DTypeLike | None = None) -> Float[Array, '*batch_and_f']:
    """`inputs` times `matrix`, for the argument dot_general of nn.Dense and nn.DenseGeneral.

    The last axes of `inputs` are summed over, with the first of `matrix`. The values are jax.lax.dot_general's. The
    gradient of the matrix is inputs^T gradient here. There it is (gradient^T inputs)^T, which XLA for CPUs computes at
    a third of the speed.

    Within `jax.default_matmul_precision('bfloat16')` values and gradients are products of bfloat16, with sums in
    float32. Accelerators do that by themselves; XLA for CPUs ignores that setting.
    """
    (axes, of_matrix), batch = dimension_numbers
    count = len(axes)
    assert tuple(axes) == tuple(range(inputs.ndim - count, inputs.ndim)), dimension_numbers
    assert tuple(of_matrix) == tuple(range(count)) and batch == ((), ()), dimension_numbers
    summed, features = math.prod(matrix.shape[:count]), matrix.shape[count:]
    product = _product(inputs.reshape(*inputs.shape[:-count], summed), matrix.reshape(summed, -1))
    return checkpoint_name(product.reshape(*product.shape[:-1], *features), PRODUCT)


@jax.custom_vjp
def _product(inputs, matrix):
    narrow = narrowed(inputs.dtype)
    return jnp.einsum('...d,df->...f', inputs.astype(narrow), matrix.astype(narrow),
                      preferred_element_type=inputs.dtype)


def _forward(inputs, matrix):
    return _product(inputs, matrix), (inputs, matrix)


def _backward(saved, gradient):
    inputs, matrix = saved
    dtype, narrow = inputs.dtype, narrowed(inputs.dtype)
    inputs, matrix, gradient = (each.astype(narrow) for each in (inputs, matrix, gradient))
    of_inputs = jnp.einsum('...f,df->...d', gradient, matrix, preferred_element_type=dtype)
    inputs, gradient = (each.reshape(-1, each.shape[-1]) for each in (inputs, gradient))
    return of_inputs, matrix_gradient(inputs, gradient, dtype)


_product.defvjp(_forward, _backward)


def matrix_gradient(inputs: Float[Array, 'n d'], gradient: Float[Array, 'n f'],
                    dtype: DTypeLike) -> Float[Array, 'd f']:
    """The gradient of a matrix from that of its products with `inputs`: inputs^T gradient."""
    plain = partial(jnp.einsum, 'nd,nf->df', preferred_element_type=dtype)
    return _on_one_cpu(partial(_row_by_row, dtype=dtype), plain, inputs, gradient)


def _row_by_row(inputs, gradient, dtype):
    """XLA for CPUs has quick products only of matrices that lie row by row, and to such a one."""
    return in_rows(jnp.dot(in_rows(inputs.T), gradient, preferred_element_type=dtype))


def scores_product(query: Float[Array, 'batch target heads d_k'],
                   key: Float[Array, 'batch source heads d_k']) -> Float[Array, 'batch heads target source']:
    """The products q.k within each head, in float32."""
    return _within_heads(_scores, _plain_scores, query, key, longest=max(query.shape[1], key.shape[1]))


def pooling_product(weights: Float[Array, 'batch heads target source'],
                    value: Float[Array, 'batch source heads d_v']) -> Float[Array, 'batch target heads d_v']:
    """sum_s weights[t, s] value[s] within each head, in the dtype of both."""
    return _within_heads(_pooled, _plain_pooled, weights, value, longest=max(weights.shape[2:]))


def _within_heads(quick, plain, left, right, longest):
    if longest > SHORT or not left.dtype == right.dtype == jnp.float32:
        return plain(left, right)
    return _on_one_cpu(quick, plain, left, right)


# What follows has the heads outside the positions in memory. Of short sequences, a product that sums over the positions
# of both its factors takes XLA for CPUs longer than a transposed copy of the one and a product that sums over a last
# axis: all of attention and its gradients take 0.5 to 0.9 of the time up to 64 positions, and 1.0 to 1.4 from 256 on.


def _plain_scores(query, key):
    return jnp.einsum('bthk,bshk->bhts', query, key, preferred_element_type=jnp.float32)


def _scores_forward(query, key):
    query, key = _heads_first(query), _heads_first(key)
    return jnp.einsum('bhtk,bhsk->bhts', query, key), (query, key)


def _scores_backward(saved, gradient):
    query, key = saved
    of_query = jnp.einsum('bhts,bhsk->bhtk', gradient, key)
    return _heads_last(of_query), _heads_last(jnp.einsum('bhst,bhtk->bhsk', _transposed(gradient), query))


_scores = jax.custom_vjp(_plain_scores)
_scores.defvjp(_scores_forward, _scores_backward)


def _plain_pooled(weights, value):
    return jnp.einsum('bhts,bshv->bthv', weights, value)


def _pooled_forward(weights, value):
    value = _heads_first(value)
    return _heads_last(jnp.einsum('bhts,bhsv->bhtv', weights, value)), (weights, value)


def _pooled_backward(saved, gradient):
    weights, value = saved
    gradient = _heads_first(gradient)
    of_value = jnp.einsum('bhst,bhtv->bhsv', _transposed(weights), gradient)
    return jnp.einsum('bhtv,bhsv->bhts', gradient, value), _heads_last(of_value)


_pooled = jax.custom_vjp(_plain_pooled)
_pooled.defvjp(_pooled_forward, _pooled_backward)


def _heads_first(array):
    return in_rows(jnp.swapaxes(array, 1, 2))


def _heads_last(array):
    return jnp.swapaxes(in_rows(array), 1, 2)


def _transposed(array):
    return in_rows(jnp.swapaxes(array, 2, 3))


@jax.custom_vjp
def add_bias(inputs: Float[Array, '*batch d'], bias: Float[Array, ' d']) -> Float[Array, '*batch d']:
    """Adds a bias, whose gradient is a product with ones.

    XLA for CPUs fuses what makes the gradient of `inputs` into a sum over its rows, and computes it again there,
    column by column.
    """
    return inputs + bias


def _add_forward(inputs, bias):
    return inputs + bias, None


def _add_backward(_, gradient):
    rows = gradient.reshape(-1, gradient.shape[-1])
    plain = partial(jnp.sum, axis=0)
    if rows.dtype != jnp.float32:
        return gradient, plain(rows)
    return gradient, _on_one_cpu(lambda rows: jnp.einsum('nd,n->d', rows, jnp.ones_like(rows[:, 0])), plain, rows)


add_bias.defvjp(_add_forward, _add_backward)


def _on_one_cpu(quick: Callable[..., Array], plain: Callable[..., Array], *arrays: Array) -> Array:
    """What both functions compute: by `quick` if the only device is a CPU, else by `plain`."""
    if jax.device_count() > 1:  # XLA would gather the rows of all devices for the constraint of a layout
        return plain(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=quick, default=plain)


def narrowed(dtype: DTypeLike) -> DTypeLike:
    """The dtype of the factors of a product: `dtype`, or bfloat16 where jax.default_matmul_precision asks for it."""
    return jnp.bfloat16 if jax.config.values['jax_default_matmul_precision'] == 'bfloat16' else dtype
