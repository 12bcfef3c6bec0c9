"""The two matrix products of attention, computed per head: queries with keys, and attention weights with values."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from kernels.layout import in_rows
from kernels.product import on_one_cpu

POOLED = 'bhts,bshv->bthv'
SHORT = 128  # maximum number of positions for which the functions with transposed copies are used (see below)
FEW = 16  # maximum number of queries (hypotheses) in a step of decoding (see `_few_pooled`)


def einsum_per_head(equation: str, left: Shaped[Array, '...'], right: Shaped[Array, 'batch source groups width'],
                    dtype: DTypeLike) -> Shaped[Array, '...']:
    """Returns jnp.einsum(equation, left, right) in `dtype`, for an equation with the letter h for the heads.

    `right` may have fewer heads than `left`, as in grouped-query attention. Then each head of `right` is used for
    heads / groups consecutive heads of `left`. The result is jnp.einsum(equation, left, jnp.repeat(right, heads //
    groups, axis=2)), but each head of `right` is read only once.

    If there is one device, the arrays are float32 and `right` has as many heads as `left`, functions with custom
    gradients are used for at most SHORT positions, and for the pooling of at most FEW queries. With these functions,
    jax.jvp and jax.jacfwd do not work: use jax.vjp and jax.jacrev. Hessians (jax.jvp of jax.grad) work.
    """
    heads, groups = left.shape[equation.index('h')], right.shape[2]
    if heads != groups:
        return _grouped(equation, left, right, groups, dtype)
    terms = equation.split('->')[0].split(',')
    sizes = dict(zip(''.join(terms), (*left.shape, *right.shape), strict=True))

    def plain(left, right):
        return jnp.einsum(equation, left, right, preferred_element_type=dtype)

    if equation not in FAST or not left.dtype == right.dtype == jnp.float32:
        return plain(left, right)
    if max(sizes['t'], sizes['s']) <= SHORT:
        return on_one_cpu(FAST[equation], plain, left, right)
    if equation == POOLED and sizes['t'] <= FEW:
        return on_one_cpu(_few_pooled, plain, left, right)
    return plain(left, right)


def _grouped(equation, left, right, groups, dtype):
    """Computes the einsum with the axis h of `left` split into two axes: the groups g, and the heads r of a group."""
    first, second, output = equation.replace('->', ',').split(',')
    axis, heads = first.index('h'), left.shape[first.index('h')]
    left = left.reshape(*left.shape[:axis], groups, heads // groups, *left.shape[axis + 1:])
    first, second, grouped = first.replace('h', 'gr'), second.replace('h', 'g'), output.replace('h', 'gr')
    product = jnp.einsum(f'{first},{second}->{grouped}', left, right, preferred_element_type=dtype)
    axis = output.index('h')
    return product.reshape(*product.shape[:axis], heads, *product.shape[axis + 2:])


# The gradients below have the heads before the positions in memory. XLA for CPUs is slow at products that sum over the
# positions of both factors. For short sequences, it is faster to make a transposed copy of one factor, and to sum over
# the last axis of the copy. Compared with jnp.einsum, attention with its gradients takes 0.5 to 0.9 of the time for up
# to 64 positions, and 1.0 to 1.4 of the time for 256 positions and more.


@jax.custom_vjp
def _scores(query, key):
    return jnp.einsum('bthk,bshk->bhts', query, key)


def _scores_forward(query, key):
    query, key = _heads_first(query), _heads_first(key)
    return jnp.einsum('bhtk,bhsk->bhts', query, key), (query, key)


def _scores_backward(saved, grad):
    query, key = saved
    grad_query = jnp.einsum('bhts,bhsk->bhtk', grad, key)
    return _heads_last(grad_query), _heads_last(jnp.einsum('bhst,bhtk->bhsk', _transposed(grad), query))


_scores.defvjp(_scores_forward, _scores_backward)


@jax.custom_vjp
def _pooled(weights, value):
    return _few_pooled(weights, value) if weights.shape[2] <= FEW else jnp.einsum(POOLED, weights, value)


def _pooled_forward(weights, value):
    value = _heads_first(value)
    return _heads_last(jnp.einsum('bhts,bhsv->bhtv', weights, value)), (weights, value)


def _pooled_backward(saved, grad):
    weights, value = saved
    grad = _heads_first(grad)
    grad_value = jnp.einsum('bhst,bhtv->bhsv', _transposed(weights), grad)
    return jnp.einsum('bhtv,bhsv->bhts', grad, value), _heads_last(grad_value)


_pooled.defvjp(_pooled_forward, _pooled_backward)

FAST = {'bthk,bshk->bhts': _scores, POOLED: _pooled}


# A step of decoding reads cached values [keys, width] (`model.cache.Past`). XLA for CPUs is fast at this product only
# if the result has the heads before the queries in memory. The product then takes 175 microseconds, instead of 622 for
# values [width, keys] and 1,614 for the plain form (32 sentences, 4 heads, 5 hypotheses, 160 keys, width 64, one thread
# of an EPYC).


@jax.custom_vjp
def _few_pooled(weights, value):
    return _heads_last(jnp.einsum('bhts,bshv->bhtv', weights, value))


def _few_pooled_forward(weights, value):
    return jax.vjp(lambda *factors: jnp.einsum(POOLED, *factors), weights, value)


_few_pooled.defvjp(_few_pooled_forward, lambda vjp, grad: vjp(grad))


def _heads_first(array):
    return in_rows(jnp.swapaxes(array, 1, 2))


def _heads_last(array):
    return jnp.swapaxes(in_rows(array), 1, 2)


def _transposed(array):
    return in_rows(jnp.swapaxes(array, 2, 3))
