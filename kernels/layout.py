"""Layouts of arrays in memory."""

from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Shaped


def in_rows(array: Shaped[Array, '*shape']) -> Shaped[Array, '*shape']:
    """Returns the same array, stored in row-major order, so that XLA does not transpose it when it is used later."""
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))
