"""The product of activations and a matrix, with its gradients written as CPUs compute them best."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]

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
    if jax.device_count() > 1:  # XLA would gather the rows of all devices for the constraint of a layout
        return plain(inputs, gradient)
    return jax.lax.platform_dependent(inputs, gradient, cpu=partial(_row_by_row, dtype=dtype), default=plain)


def _row_by_row(inputs, gradient, dtype):
    """XLA for CPUs has quick products only of matrices that lie row by row, and to such a one."""
    rows = Layout(major_to_minor=(0, 1))
    transposed = with_layout_constraint(inputs.T, rows)
    return with_layout_constraint(jnp.dot(transposed, gradient, preferred_element_type=dtype), rows)


def narrowed(dtype: DTypeLike) -> DTypeLike:
    """The dtype of the factors of a product: `dtype`, or bfloat16 where jax.default_matmul_precision asks for it."""
    return jnp.bfloat16 if jax.config.values['jax_default_matmul_precision'] == 'bfloat16' else dtype
