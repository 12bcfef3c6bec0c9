"""Images and time series as sequences of patches: the vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929).

An image is divided into squares, and a series into windows. Each square or window is a patch, which is flattened and
embedded linearly. The encoder reads the patches like words. The outputs of the encoder are pooled and mapped to classes
or values:

    z_0  = [x_class; x_1 E; ...; x_n E] + E_pos     (1)
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}               (2)
    z_l  = MLP(LN(z'_l)) + z'_l                     (3)
    y    = LN(z_L)[0]                               (4)

Equations (2) to (4) are the encoder with norm='pre' and activation='gelu'.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kernels.product import dot_general
from model.blocks import BlockConfig, SelfAttentionStack
from model.dropout import Dropout
from model.places import place
from model.positional import sinusoids
from model.relation import Relation

POOLINGS = ('class_token', 'mean')

Patches = Float[Array, 'batch patches features']


def patch_grid(space: tuple[int, ...], patch: int | tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the number of patches along each axis of `space`, and the length of a patch along each axis.

    Raises:
      ValueError: if the patches do not cover `space` exactly.
    """
    sizes = (patch,) * len(space) if isinstance(patch, int) else patch
    if len(sizes) != len(space):
        raise ValueError(f'patch={sizes} has {len(sizes)} sizes, but the inputs have {len(space)} axes besides the '
                         f'batch and the channels: {space}. Use {len(space)} sizes, or one number for all axes')
    if not all(size >= 1 and length % size == 0 for length, size in zip(space, sizes, strict=True)):
        raise ValueError(f'patch={sizes} does not divide inputs of {" x ".join(map(str, space))}. '
                         'Choose sizes that divide the inputs, or pad or crop the inputs')
    return tuple(length // size for length, size in zip(space, sizes, strict=True)), sizes


def patches(inputs: Float[Array, 'batch *space channels'], patch: int | tuple[int, ...]) -> Patches:
    """Returns flattened, non-overlapping patches in reading order: [batch, n, prod(patch) * channels].

    For an image of H x W pixels with C channels, and patches of P x P pixels, n = HW / P^2 and

        x_{i W/P + j} [(u P + v) C + c] = image[i P + u, j P + v, c]

    For a series of T steps with C channels, and windows of P steps, n = T / P and x_i [u C + c] = series[i P + u, c].

    Raises:
      ValueError: if the patches do not cover the inputs exactly.
    """
    batch, *space, channels = inputs.shape
    counts, sizes = patch_grid(tuple(space), patch)
    # [batch, counts[0], sizes[0], counts[1], sizes[1], ..., channels] -> counts before sizes
    split = inputs.reshape(batch, *(side for pair in zip(counts, sizes, strict=True) for side in pair), channels)
    axes = len(space)
    ordered = split.transpose(0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1)
    return ordered.reshape(batch, math.prod(counts), math.prod(sizes) * channels)


def grid_sinusoids(counts: tuple[int, ...], d_model: int) -> Float[Array, 'patches d_model']:
    """Returns the sinusoidal encodings of a grid of patches. The channels are divided equally between the axes.

    For an image, the first half of the channels encodes the row of a patch, and the second half encodes the column.

    Raises:
      ValueError: if d_model cannot be divided into sines and cosines for each axis.
    """
    if d_model % (2 * len(counts)):
        raise ValueError(f'sinusoidal positions along {len(counts)} axes need a d_model that is a multiple of '
                         f'{2 * len(counts)}, not {d_model}')
    indices = jnp.meshgrid(*map(jnp.arange, counts), indexing='ij')
    return jnp.concatenate([sinusoids(index.reshape(-1), d_model // len(counts)) for index in indices], axis=-1)


class PatchTransformer(nn.Module):
    """The vision Transformer: patches, linear embedding, positions, encoder, pooling, and an output layer.

    With position='learned', one table has the encodings of all patches and of the class token, so all inputs must have
    the same size. With position='sinusoidal', nothing is added to the class token. With position='none' and mean
    pooling, the order of the patches has no effect. Relative positions are positions in the reading order of the
    patches, also for images.

    Attributes:
      config, num_layers, pooling: options of config.model and config.model.patches (configs/options.py).
      patch: the size of a patch along each axis of the inputs; an int applies to all axes.
      outputs: number of classes, or number of predicted values.
    """
    config: BlockConfig
    num_layers: int
    patch: int | tuple[int, ...]
    outputs: int
    pooling: str = 'class_token'

    @nn.compact
    def __call__(self, inputs: Float[Array, 'batch *space channels'], deterministic: bool = True,
                 visible: Bool[Array, 'batch time'] | None = None) -> Float[Array, 'batch outputs']:
        """Maps series [batch, time, channels] or images [batch, height, width, channels] to float32 logits or values.

        `visible` is False at steps of series that are padding or missing. A patch without a visible step is hidden from
        the other patches, and is not part of the mean.

        Raises:
          ValueError: if the patches do not cover the inputs exactly, or `pooling` is unknown.
        """
        config = self.config
        if self.pooling not in POOLINGS:
            raise ValueError(f'pooling={self.pooling!r} must be one of {", ".join(POOLINGS)}')
        x = patches(inputs, self.patch)
        init = nn.with_logical_partitioning(nn.initializers.xavier_uniform(), ('patch', 'embed'))
        x = nn.Dense(config.d_model, dtype=config.dtype, kernel_init=init, dot_general=dot_general, name='embedding')(x)
        x = place(self, 'embedding', x)
        if self.pooling == 'class_token':
            class_token = self.param('class_token', nn.initializers.zeros, (1, 1, config.d_model))
            x = jnp.concatenate([jnp.tile(class_token.astype(x.dtype), (len(x), 1, 1)), x], axis=1)
        x = x + self._positions(x.shape[1], patch_grid(inputs.shape[1:-1], self.patch)[0]).astype(x.dtype)
        x = Dropout(config.dropout)(x, deterministic)
        encoder = SelfAttentionStack(config, self.num_layers, name='encoder')
        tokens, relation = None, None
        if visible is not None:
            tokens = patches(visible[..., None].astype(jnp.float32), self.patch).max(axis=-1) > 0
            tokens = jnp.pad(tokens, ((0, 0), (x.shape[1] - tokens.shape[1], 0)), constant_values=True)
            relation = Relation.within(np.arange(x.shape[1])[None], tokens)
        x = encoder(x, relation, deterministic)
        mean = x.mean(axis=1) if tokens is None else x.mean(axis=1, where=tokens[..., None])
        pooled = place(self, 'pooled', x[:, 0] if self.pooling == 'class_token' else mean)
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'vocab'))
        bias_init = nn.with_logical_partitioning(nn.initializers.zeros, ('vocab',))
        # The logits are float32, because logits in bfloat16 are often equal, so that the argmax would be arbitrary.
        head = nn.Dense(self.outputs, dtype=jnp.float32, kernel_init=init, bias_init=bias_init,
                        dot_general=dot_general, name='head')
        return place(self, 'head', head(pooled))

    def _positions(self, tokens: int, counts: tuple[int, ...]) -> Float[Array, '{tokens} d_model']:
        """Returns the position encodings of the class token, if the model has one, and then of all patches."""
        d_model = self.config.d_model
        position = self.config.position
        if position == 'learned':
            init = nn.with_logical_partitioning(nn.initializers.normal(d_model ** -0.5), ('position', 'embed'))
            return self.param('positions', init, (tokens, d_model), unbox=True)
        if position == 'sinusoidal':
            return jnp.pad(grid_sinusoids(counts, d_model), ((tokens - math.prod(counts), 0), (0, 0)))
        return jnp.zeros((tokens, d_model))
