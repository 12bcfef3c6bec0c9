"""Products of inputs and matrices, and sums with biases. Their gradients are computed fast on CPUs."""

import itertools
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

PRODUCT = 'product'  # rematerialisation recognises products with custom gradients by this name


# The function has the arguments of jax.lax.dot_general, so Flax's layers can also call it.
def dot_general(inputs: Float[Array, '*batch_and_d'], matrix: Float[Array, '*d_and_f'], dimension_numbers: Dimensions,
                precision: None = None,
                preferred_element_type: DTypeLike | None = None) -> Float[Array, '*batch_and_f']:
    """Returns `inputs` times `matrix`. The layer kernels.dense.Dense uses this function.

    The product sums over the last axes of `inputs` and the first axes of `matrix`. The values are equal to the values
    of jax.lax.dot_general. Let g be the gradient of the product. This function computes the gradient of the matrix as
    inputs^T @ g. jax.lax.dot_general computes (g^T @ inputs)^T, which is three times slower on CPUs. Because of this
    gradient, jax.jvp and jax.jacfwd do not work: use jax.jacrev. Hessians (jax.jvp of jax.grad) work.

    Within `jax.default_matmul_precision('bfloat16')`, the factors are rounded to bfloat16, and the sums are in float32.
    This applies to values and gradients. TPUs follow this setting by themselves, but XLA for CPUs and GPUs ignores it.
    """
    (axes, matrix_axes), batch = dimension_numbers
    count = len(axes)
    assert tuple(axes) == tuple(range(inputs.ndim - count, inputs.ndim)), dimension_numbers
    assert tuple(matrix_axes) == tuple(range(count)) and batch == ((), ()), dimension_numbers
    summed, features = math.prod(matrix.shape[:count]), matrix.shape[count:]
    product = _product(inputs.reshape(*inputs.shape[:-count], summed), matrix.reshape(summed, -1))
    return checkpoint_name(product.reshape(*product.shape[:-1], *features), PRODUCT)


def _plain(inputs, matrix):
    narrow = narrowed(inputs.dtype)
    return _einsum('...d,df->...f', inputs.astype(narrow), matrix.astype(narrow), inputs.dtype)


def _einsum(equation, left, right, dtype):
    """Returns the sums of products in `dtype`. The factors have the same dtype.

    For a result in bfloat16, XLA for CPUs does not use the processor's bfloat16 instructions. So on CPUs, the result is
    float32 and then rounded. On accelerators, the conversion would be a separate pass.
    """
    direct = partial(jnp.einsum, equation, preferred_element_type=dtype)
    if dtype != jnp.bfloat16:
        return direct(left, right)

    def rounded(left, right):
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32).astype(dtype)

    return jax.lax.platform_dependent(left, right, cpu=rounded, default=direct)


def _forward(inputs, matrix):
    return _plain(inputs, matrix), (inputs, matrix)


def _backward(saved, grad):
    inputs, matrix = saved
    dtype, narrow = inputs.dtype, narrowed(inputs.dtype)
    inputs, matrix, grad = (array.astype(narrow) for array in (inputs, matrix, grad))
    grad_inputs = _einsum('...f,df->...d', grad, matrix, dtype)
    inputs, grad = (array.reshape(-1, array.shape[-1]) for array in (inputs, grad))
    return grad_inputs, matrix_gradient(inputs, grad, dtype)


_product = jax.custom_vjp(_plain)
_product.defvjp(_forward, _backward)


def matrix_gradient(inputs: Float[Array, 'n d'], grad: Float[Array, 'n f'], dtype: DTypeLike) -> Float[Array, 'd f']:
    """Returns inputs^T @ grad, the gradient of a matrix. `grad` is the gradient of the product inputs @ matrix."""
    plain = partial(jnp.einsum, 'nd,nf->df', preferred_element_type=dtype)
    return on_one_cpu(partial(_row_by_row, dtype=dtype), plain, inputs, grad)


def _row_by_row(inputs, grad, dtype):
    """Returns inputs^T @ grad. inputs^T and the result are in row-major order. This is faster with XLA for CPUs.

    The inputs are stored before they are transposed. Otherwise, XLA would compute them a second time, column by column.
    """
    return in_rows(_einsum('dn,nf->df', in_rows(in_rows(inputs).T), grad, dtype))


def products(inputs: Float[Array, '*batch d'], matrices: Sequence[Float[Array, 'd ...']],
             biases: Sequence[Float[Array, '...']] | None, dtype: DTypeLike) -> list[Float[Array, '...']]:
    """Returns inputs @ matrix + bias for each matrix. One joint product is faster for few inputs.

    A matrix may have several axes of features: [d, features] or [d, heads, width].
    """
    kernel = jnp.concatenate([matrix.reshape(len(matrix), -1) for matrix in matrices], axis=-1)
    joined = _plain(inputs.astype(dtype), kernel)
    if biases:
        joined += jnp.concatenate([bias.reshape(-1) for bias in biases]).astype(dtype)
    shapes = [matrix.shape[1:] for matrix in matrices]
    ends = list(itertools.accumulate(map(math.prod, shapes)))[:-1]
    return [part.reshape(*part.shape[:-1], *shape)
            for part, shape in zip(jnp.split(joined, ends, axis=-1), shapes, strict=True)]


def logits_product(states: Float[Array, '*batch d'], table: Float[Array, 'vocab d']) -> Float[Array, '*batch vocab']:
    """Returns the logits: the dot product of each state with each row of `table`, in float32.

    Before the product, the table is converted to the dtype of the states.

    Within `jax.default_matmul_precision('bfloat16')`, the function `dot_general` computes the product and its
    gradients.
    """
    dtype = states.dtype
    if narrowed(dtype) != dtype:
        return dot_general(states, table.T, (((states.ndim - 1,), (0,)), ((), ())))
    return jnp.einsum('...d,vd->...v', states, table.astype(dtype), preferred_element_type=jnp.float32)


@jax.custom_vjp
def add_bias(inputs: Float[Array, '*batch d'], bias: Float[Array, ' d']) -> Float[Array, '*batch d']:
    """Returns inputs + bias. The gradient of the bias is computed as a matrix product with ones, not as a sum.

    XLA for CPUs would fuse a sum with the operations that produce the gradient of `inputs`. Then this gradient would be
    computed a second time, column by column.
    """
    return inputs + bias


def _add_forward(inputs, bias):
    return inputs + bias, None


def _add_backward(_, grad):
    rows = grad.reshape(-1, grad.shape[-1])
    plain = partial(jnp.sum, axis=0)
    if rows.dtype != jnp.float32:
        return grad, plain(rows)
    return grad, on_one_cpu(lambda rows: jnp.einsum('nd,n->d', rows, jnp.ones_like(rows[:, 0])), plain, rows)


add_bias.defvjp(_add_forward, _add_backward)


def on_one_cpu(fast: Callable[..., Array], plain: Callable[..., Array], *arrays: Array) -> Array:
    """Returns fast(*arrays) if the only device is a CPU, otherwise plain(*arrays), which computes the same values."""
    if jax.device_count() > 1:  # a layout constraint would make XLA gather the rows of all devices
        return plain(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=fast, default=plain)


def use_precision(precision: str) -> None:
    """Sets the precision of the products of all threads: 'default' (no change), 'bfloat16' or 'float32'.

    `jax.default_matmul_precision` sets the precision only for the thread that calls it.
    """
    if precision != 'default':
        jax.config.update('jax_default_matmul_precision', precision)


def used_precision() -> str:
    """Returns the precision of products: the value of `use_precision`, of JAX's own setting, or 'default'."""
    return jax.config.values['jax_default_matmul_precision'] or 'default'


def narrowed(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype of the factors of a product: bfloat16 if JAX's matmul precision is bfloat16, else `dtype`."""
    return jnp.bfloat16 if used_precision() == 'bfloat16' else dtype
