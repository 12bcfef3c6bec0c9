"""A dense layer with gradients that are faster on CPUs (kernels/product.py), and accurate also in bfloat16."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from typing_extensions import override

from kernels.product import add_bias, dot_general


class Dense(nn.Module):
    """A dense layer x W + b. It has the parameters and values of nn.DenseGeneral, and faster gradients on CPUs.

    In bfloat16, the gradient of a bias of nn.Dense can be 30 % too small, because XLA for CPUs adds the gradients of
    all positions in bfloat16. This layer adds them in float32. jax.jvp does not work: use jax.vjp.

    Attributes:
      features: width of the output; several widths give an output with several axes, such as (heads, width).
      axes: names of the axes of W.
      use_bias: whether the layer has a bias b.
      dtype: dtype of the computation; parameters are float32.
      summed: number of the last axes of the inputs that the product sums over.
      kernel_init: the initial values of W, as a matrix [inputs, features].
      bias_axes: names of the axes of b, or None.
      dot_general: the function that computes the product, with the arguments of jax.lax.dot_general.
    """
    features: int | tuple[int, ...]
    axes: tuple[str, ...]
    use_bias: bool = True
    dtype: DTypeLike = jnp.float32
    summed: int = 1
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    bias_axes: tuple[str, ...] | None = None
    dot_general: Callable[..., Array] = dot_general

    @override
    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch_and_d']) -> Float[Array, '*batch_and_features']:
        """Applies the layer to the last `summed` axes."""
        features = (self.features,) if isinstance(self.features, int) else tuple(self.features)
        batch, width = inputs.shape[:-self.summed], inputs.shape[-self.summed:]

        def init(key, shape, dtype):
            return self.kernel_init(key, (math.prod(width), math.prod(features)), dtype).reshape(shape)

        kernel = self.param('kernel', nn.with_logical_partitioning(init, self.axes), (*width, *features), jnp.float32,
                            unbox=True)
        last_with_first = (tuple(range(len(batch), inputs.ndim)), tuple(range(self.summed))), ((), ())
        product = self.dot_general(inputs.astype(self.dtype), kernel.astype(self.dtype), last_with_first)
        if not self.use_bias:
            return product
        zeros = nn.initializers.zeros
        named = zeros if self.bias_axes is None else nn.with_logical_partitioning(zeros, self.bias_axes)
        bias = self.param('bias', named, features, jnp.float32, unbox=True)
        rows = product.reshape(*batch, math.prod(features))
        return add_bias(rows, bias.reshape(-1).astype(self.dtype)).reshape(product.shape)
