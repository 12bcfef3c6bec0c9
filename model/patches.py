"""Images and time series as sequences of patches: the vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929).

An image is divided into squares, and a series into windows. Each square or window is a patch, which is flattened and
embedded linearly. The encoder reads the patches like words. The outputs of the encoder are pooled and mapped to classes
or values:

    z_0  = [x_class; x_1 E; ...; x_n E] + E_pos     (1)
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}               (2)
    z_l  = MLP(LN(z'_l)) + z'_l                     (3)
    y    = LN(z_L)[0]                               (4)

Equations (2) to (4) are the encoder with norm='pre' and activation='gelu'. With stem='convolutions', convolutions embed
the patches of an image, instead of the matrix E of equation (1): see `ConvolutionalStem`.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kernels.dense import Dense
from model.blocks import BlockConfig, SelfAttentionStack, layer_norm
from model.dropout import Dropout
from model.places import place
from model.positional import AnyArray, sinusoids
from model.relation import Relation

POOLINGS = ('class_token', 'mean')
STEMS = ('linear', 'convolutions')

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


def visible_patches(visible: Bool[AnyArray, 'batch time'], patch: int | tuple[int, ...],
                    tokens: int) -> Bool[Array, 'batch {tokens}']:
    """Returns a mask of the tokens of series that is False for patches without a visible step.

    `visible` is False at steps that are padding or missing. If there are more `tokens` than patches, the first token is
    the class token, which is visible.
    """
    mask = patches(jnp.asarray(visible)[..., None].astype(jnp.float32), patch).max(axis=-1) > 0
    return jnp.pad(mask, ((0, 0), (tokens - mask.shape[1], 0)), constant_values=True)


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


def positions(module: nn.Module, config: BlockConfig, tokens: int,
              counts: tuple[int, ...]) -> Float[Array, '{tokens} d_model']:
    """Returns the position encodings of the class token, if the model has one, and then of all patches.

    Learned encodings are a parameter of `module`. Call this function in the compact method of `module`.
    """
    if config.position == 'learned':
        init = nn.with_logical_partitioning(nn.initializers.normal(config.d_model ** -0.5), ('position', 'embed'))
        return module.param('positions', init, (tokens, config.d_model), jnp.float32, unbox=True)
    if config.position == 'sinusoidal':
        return jnp.pad(grid_sinusoids(counts, config.d_model), ((tokens - math.prod(counts), 0), (0, 0)))
    return jnp.zeros((tokens, config.d_model))


def neighbourhoods(images: Float[Array, 'batch height width channels'],
                   stride: int) -> Float[Array, 'batch rows columns values']:
    """Returns the 3 x 3 pixels around each pixel, or, with stride 2, around every second pixel of every second row.

    The result has the shape [batch, height / stride, width / stride, 9 channels], in the order of rows, columns and
    channels. Pixels outside the image are zeros. A dense layer on these values is a convolution with kernels of 3 x 3
    pixels and padding 1. On CPUs, its gradients are faster than the gradients of XLA's convolution.
    """
    _, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate([padded[:, row:row + height:stride, column:column + width:stride]
                            for row in range(3) for column in range(3)], axis=-1)


def check_stem(space: tuple[int, ...], patch: int | tuple[int, ...], d_model: int) -> int:
    """Returns the number of convolutions of `ConvolutionalStem` with stride 2.

    Raises:
      ValueError: if the inputs are not images, their patches are not squares of 2, 4, 8, ... pixels, or d_model
        cannot be halved for each of these convolutions.
    """
    if len(space) != 2:
        raise ValueError("stem='convolutions' needs images. For series, use stem='linear'")
    size, *others = set(patch_grid(space, patch)[1])
    count = size.bit_length() - 1
    if others or size != 2 ** count or count < 1:
        raise ValueError(f"stem='convolutions' needs square patches of 2, 4, 8, ... pixels, not patch={patch}")
    if d_model % size:
        raise ValueError(f"stem='convolutions' with patch={size} needs a d_model that is a multiple of {size}, "
                         f'not {d_model}')
    return count


class ConvolutionalStem(nn.Module):
    """An embedding of image patches by convolutions, instead of by one product (Xiao et al. 2021, arXiv:2106.14881).

    Each convolution of 3 x 3 pixels is followed by a norm and a ReLU. The first convolution has stride 1. The remaining
    convolutions have stride 2: they halve the image until one vector per patch remains, and double the width up to
    d_model. At the end, a linear layer (a convolution of 1 x 1 pixels) computes the vectors of the patches. Because the
    convolutions overlap, a vector also depends on pixels around its patch. The paper reports that models with such a
    stem learn in fewer epochs.

    This stem differs from the paper in two points. First, the first convolution of the paper has stride 2, but small
    images lose details with this stride (the residual networks for CIFAR-10 also begin with stride 1: He et al. 2016,
    arXiv:1512.03385, section 4.2). Second, the paper uses batch norm. This stem uses the norm of the blocks, so that
    examples do not depend on their batch.

    Attributes:
      config: options of config.model.
      patch: the size of a patch: 2, 4, 8, ... pixels along both axes.
    """
    config: BlockConfig
    patch: int | tuple[int, ...]

    @nn.compact
    def __call__(self, images: Float[Array, 'batch height width channels']) -> Patches:
        """Returns one vector per patch in reading order: [batch, patches, d_model].

        Raises:
          ValueError: as `check_stem` does.
        """
        config, x = self.config, images
        count = check_stem(images.shape[1:3], self.patch, config.d_model)
        for index in range(count + 1):
            width = config.d_model // 2 ** (count - index)
            convolve = Dense(width, ('patch', 'embed'), use_bias=False, dtype=config.dtype, name=f'convolution_{index}')
            x = nn.relu(layer_norm(config, name=f'norm_{index}')(convolve(neighbourhoods(x, min(index + 1, 2)))))
        x = x.reshape(len(x), x.shape[1] * x.shape[2], config.d_model)
        return Dense(config.d_model, ('patch', 'embed'), dtype=config.dtype, name='output')(x)


class PatchTransformer(nn.Module):
    """The vision Transformer: patches, linear embedding, positions, encoder, pooling, and an output layer.

    With position='learned', one table has the encodings of all patches and of the class token, so all inputs must have
    the same size. With position='sinusoidal', nothing is added to the class token. With position='none', no
    window and stem='linear', the order of the patches has no effect. Relative positions are positions in the reading
    order of the patches, also for images.

    Attributes:
      config, num_layers, pooling, stem: options of config.model and config.model.patches (configs/options.py).
      patch: the size of a patch along each axis of the inputs; an int applies to all axes.
      outputs: number of classes, or number of predicted values.
    """
    config: BlockConfig
    num_layers: int
    patch: int | tuple[int, ...]
    outputs: int
    pooling: str = 'class_token'
    stem: str = 'linear'

    @nn.compact
    def __call__(self, inputs: Float[Array, 'batch *space channels'], deterministic: bool = True,
                 visible: Bool[Array, 'batch time'] | None = None) -> Float[Array, 'batch outputs']:
        """Maps series [batch, time, channels] or images [batch, height, width, channels] to float32 logits or values.

        `visible` is False at steps of series that are padding or missing. A patch without a visible step is hidden from
        the other patches, and is not part of the mean.

        Raises:
          ValueError: if the patches do not cover the inputs exactly, the stem does not fit them, or `pooling` or
            `stem` is unknown.
        """
        config = self.config
        for name, value, known in (('pooling', self.pooling, POOLINGS), ('stem', self.stem, STEMS)):
            if value not in known:
                raise ValueError(f'{name}={value!r} must be one of {", ".join(known)}')
        if self.stem == 'convolutions':
            x = ConvolutionalStem(config, self.patch, name='stem')(inputs)
        else:
            x = Dense(config.d_model, ('patch', 'embed'), dtype=config.dtype, name='embedding')(
                patches(inputs, self.patch))
        x = place(self, 'embedding', x)
        if self.pooling == 'class_token':
            class_token = self.param('class_token', nn.initializers.zeros, (1, 1, config.d_model), jnp.float32)
            x = jnp.concatenate([jnp.tile(class_token.astype(x.dtype), (len(x), 1, 1)), x], axis=1)
        x = x + positions(self, config, x.shape[1], patch_grid(inputs.shape[1:-1], self.patch)[0]).astype(x.dtype)
        x = Dropout(config.dropout)(x, deterministic)
        encoder = SelfAttentionStack(config, self.num_layers, name='encoder')
        tokens, relation = None, None
        if visible is not None:
            tokens = visible_patches(visible, self.patch, x.shape[1])
            relation = Relation.within(np.arange(x.shape[1])[None], tokens)
        x = encoder(x, relation, deterministic)
        mean = x.mean(axis=1) if tokens is None else x.mean(axis=1, where=tokens[..., None])
        pooled = place(self, 'pooled', x[:, 0] if self.pooling == 'class_token' else mean)
        # The logits are float32, because logits in bfloat16 are often equal, so that the argmax would be arbitrary.
        head = Dense(self.outputs, ('embed', 'vocab'), kernel_init=nn.initializers.lecun_normal(),
                     bias_axes=('vocab',), name='head')
        return place(self, 'head', head(pooled))
