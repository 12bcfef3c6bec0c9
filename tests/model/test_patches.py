"""Patches, their positions, and the Transformer of patches: against NumPy, visibility, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.blocks import NORMS, BlockConfig
from model.patches import POOLINGS, PatchTransformer, check_stem, grid_sinusoids, patches
from model.positional import ADDED, SCHEMES, sinusoids
from tests.model import reference
from tests.model.helpers import close, float64, normal, random_params

IMAGES = normal(1, 2, 4, 6, 3)
SERIES = normal(2, 2, 12, 2)
INPUTS = {'images': (IMAGES, (2, 3), 'linear'), 'series': (SERIES, (4,), 'linear'),
          'convolutions': (normal(3, 2, 8, 4, 3), (4, 4), 'convolutions')}


def tiny(**options):
    return BlockConfig(**dict(d_model=8, d_ff=12, num_heads=2, d_k=6, d_v=5, dropout=0.0, norm='pre',
                              position='learned') | options)


def build(inputs, patch, config=None, **options):
    """Returns a small model with 5 outputs and random variables."""
    model = PatchTransformer(config or tiny(), num_layers=2, patch=patch, outputs=5, **options)
    return model, {'params': random_params(model, inputs)}


# Patches

def test_patches_of_an_image_are_its_squares_in_reading_order():
    cut = patches(IMAGES, (2, 3))
    assert cut.shape == (2, 4, 18)
    for index, (top, left) in enumerate([(0, 0), (0, 3), (2, 0), (2, 3)]):
        close(cut[:, index], IMAGES[:, top:top + 2, left:left + 3].reshape(2, 18), atol=0)


def test_patches_of_a_series_are_its_windows():
    close(patches(SERIES, 4), SERIES.reshape(2, 3, 8), atol=0)


def test_one_number_stands_for_all_axes():
    close(patches(IMAGES, 2), patches(IMAGES, (2, 2)), atol=0)


@pytest.mark.parametrize('inputs, patch, message', [
    (IMAGES, 4, r'patch=\(4, 4\) does not divide inputs of 4 x 6. Choose sizes that divide the inputs'),
    (IMAGES, (3, 3), r'patch=\(3, 3\) does not divide inputs of 4 x 6'),
    (IMAGES, 0, r'patch=\(0, 0\) does not divide'),
    (IMAGES, (2,), r'patch=\(2,\) has 1 sizes, but the inputs have 2 axes besides the batch and the channels'),
    (SERIES, 5, r'patch=\(5,\) does not divide inputs of 12'),
    (SERIES, (4, 4), r'patch=\(4, 4\) has 2 sizes, but the inputs have 1 axes'),
])
def test_patches_that_do_not_fit(inputs, patch, message):
    with pytest.raises(ValueError, match=message):
        patches(inputs, patch)


# Positions

def test_sinusoids_of_a_series_are_those_of_text():
    close(grid_sinusoids((7,), 8), sinusoids(jnp.arange(7), 8), atol=0)


def test_sinusoids_of_a_grid_are_half_row_half_column():
    grid = grid_sinusoids((2, 3), 8).reshape(2, 3, 8)
    for row in range(2):
        for column in range(3):
            close(grid[row, column, :4], sinusoids(jnp.array(row), 4), atol=0)
            close(grid[row, column, 4:], sinusoids(jnp.array(column), 4), atol=0)


def test_sinusoids_need_pairs_on_each_axis():
    with pytest.raises(ValueError, match='along 2 axes need a d_model that is a multiple of 4, not 6'):
        grid_sinusoids((2, 3), 6)


# The stem

@pytest.mark.parametrize('space, patch, d_model, message', [
    ((12,), 4, 8, "stem='convolutions' needs images. For series, use stem='linear'"),
    ((6, 6), 3, 8, r'needs square patches of 2, 4, 8, \.\.\. pixels, not patch=3'),
    ((6, 6), 1, 8, 'needs square patches .* not patch=1'),
    ((4, 4), (2, 4), 8, r'needs square patches .* not patch=\(2, 4\)'),
    ((8, 8), 8, 12, 'with patch=8 needs a d_model that is a multiple of 8, not 12'),
])
def test_a_stem_that_does_not_fit_is_refused(space, patch, d_model, message):
    with pytest.raises(ValueError, match=message):
        check_stem(space, patch, d_model)


def test_each_convolution_with_stride_2_halves_the_image():
    assert [check_stem((8, 16), patch, 8) for patch in (2, 4, 8)] == [1, 2, 3]
    assert check_stem((8, 16), (4, 4), 12) == 2


# The model

def plain_stem(params, image):
    """Computes the convolutions of 3 x 3 pixels, one with stride 1 and then with stride 2, for one pixel at a time."""
    x, stride = image, 1
    for index in range(len(params) // 2):
        kernel = params[f'convolution_{index}']['kernel'].reshape(3, 3, x.shape[-1], -1)
        y = np.zeros((x.shape[0] // stride, x.shape[1] // stride, kernel.shape[-1]))
        for row, column, i, j in np.ndindex(*y.shape[:2], 3, 3):
            above, left = stride * row + i - 1, stride * column + j - 1
            if 0 <= above < x.shape[0] and 0 <= left < x.shape[1]:  # pixels outside the image are zeros
                y[row, column] += x[above, left] @ kernel[i, j]
        x, stride = np.maximum(0, reference.layer_norm(params[f'norm_{index}'], y)), 2
    return x @ params['output']['kernel'] + params['output']['bias']


def plain_forward(params, inputs, patch, norm, position, pooling):
    """Computes the model in float64 NumPy, for one example and one patch at a time."""
    outputs = []
    for example in np.asarray(inputs, np.float64):
        counts = [length // size for length, size in zip(example.shape, patch, strict=False)]
        tokens = []
        for place in np.ndindex(*counts):
            if 'stem' in params:
                tokens.append(plain_stem(params['stem'], example)[place])
            else:
                window = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, patch, strict=True))
                tokens.append(example[window].reshape(-1) @ params['embedding']['kernel'] + params['embedding']['bias'])
            if position == 'sinusoidal':
                width = len(tokens[-1]) // len(place)
                tokens[-1] += np.concatenate([reference.sinusoids(i + 1, width)[i] for i in place])
        if pooling == 'class_token':
            tokens.insert(0, params['class_token'][0, 0])
        x = np.stack(tokens)
        x = x + params['positions'] if position == 'learned' else x
        x = reference.stack(params['encoder'], reference.encoder_block, x, norm=norm)
        pooled = x[0] if pooling == 'class_token' else x.mean(axis=0)
        outputs.append(pooled @ params['head']['kernel'] + params['head']['bias'])
    return np.stack(outputs)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize('kind', INPUTS)
@pytest.mark.parametrize('norm', [NORMS[0], *(pytest.param(norm, marks=pytest.mark.slow) for norm in NORMS[1:])])
@pytest.mark.parametrize('position', [*ADDED, pytest.param('none', marks=pytest.mark.slow)])
@pytest.mark.parametrize('pooling', POOLINGS)
def test_forward_pass_is_the_equations(kind, norm, position, pooling):
    inputs, patch, stem = INPUTS[kind]
    model, variables = build(inputs, patch, tiny(norm=norm, position=position), pooling=pooling, stem=stem)
    outputs = model.apply(variables, inputs)
    assert outputs.dtype == jnp.float32 and outputs.shape == (2, 5)
    close(outputs, plain_forward(float64(variables['params']), inputs, patch, norm, position, pooling))


@pytest.mark.parametrize('kind', INPUTS)
def test_a_batch_may_be_empty(kind):
    inputs, patch, stem = INPUTS[kind]
    model, variables = build(inputs, patch, stem=stem)
    assert jax.eval_shape(model.apply, variables, inputs[:0]).shape == (0, 5)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('position', SCHEMES)
def test_without_positions_the_order_of_windows_is_invisible(position):
    model, variables = build(SERIES, 4, tiny(position=position), pooling='mean')
    outputs = model.apply(variables, SERIES)
    turned = model.apply(variables, jnp.roll(SERIES, 4, axis=1))  # whole windows are permuted
    shifted = model.apply(variables, jnp.roll(SERIES, 1, axis=1))  # other windows
    assert np.allclose(outputs, turned, atol=1e-5) == (position == 'none')
    assert not np.allclose(outputs, shifted, atol=1e-2)


@pytest.mark.slow
def test_sizes_other_than_those_of_the_training_need_no_learned_table():
    model, variables = build(SERIES, 4, tiny(position='sinusoidal'))
    assert model.apply(variables, normal(3, 2, 20, 2)).shape == (2, 5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('pooling', POOLINGS)
@pytest.mark.parametrize('position', ['sinusoidal', 'rotary', pytest.param('alibi', marks=pytest.mark.slow)])
def test_padding_does_not_change_the_outputs_of_a_series(pooling, position):
    """Also if a window in the middle is missing, its values have no effect."""
    model, variables = build(SERIES, 4, tiny(position=position), pooling=pooling)
    padded = jnp.pad(SERIES, ((0, 0), (0, 8), (0, 0)), constant_values=7.0)
    visible = jnp.arange(20)[None] < jnp.array([[12], [12]])
    close(model.apply(variables, padded, visible=visible), model.apply(variables, SERIES), atol=1e-5)
    missing = visible & ~((jnp.arange(20) >= 4) & (jnp.arange(20) < 8))
    close(model.apply(variables, padded.at[:, 4:8].set(-3.0), visible=missing),
          model.apply(variables, padded, visible=missing), atol=1e-6)
    assert jnp.abs(model.apply(variables, padded, visible=missing) - model.apply(variables, SERIES)).max() > 1e-3


def test_attention_can_be_watched():
    model, variables = build(IMAGES, (2, 3))
    _, watched = model.apply(variables, IMAGES, mutable='attention')
    weights, = watched['attention']['encoder']['layers_0']['self_attention']['weights']
    assert weights.shape == (2, 2, 5, 5)  # batch, heads, and the class token with the four patches twice


@pytest.mark.slow
def test_dropout_is_drawn_in_training_only():
    model, variables = build(IMAGES, 2, tiny(dropout=0.5))
    one, other = (model.apply(variables, IMAGES, deterministic=False, rngs={'dropout': jax.random.key(seed)})
                  for seed in (0, 1))
    assert not np.allclose(one, other)
    close(model.apply(variables, IMAGES), model.apply(variables, IMAGES), atol=0)


@pytest.mark.parametrize('option, message', [
    ({'pooling': 'max'}, "pooling='max' must be one of class_token, mean"),
    ({'stem': 'conv'}, "stem='conv' must be one of linear, convolutions"),
])
def test_an_unknown_pooling_or_stem_is_named(option, message):
    with pytest.raises(ValueError, match=message):
        build(IMAGES, 2, **option)


# Precision

@pytest.mark.slow
def test_logits_of_a_bfloat16_model_are_float32():
    model, variables = build(IMAGES, (2, 3), tiny(dtype=jnp.bfloat16))
    outputs = model.apply(variables, IMAGES)
    assert outputs.dtype == jnp.float32
    assert np.all(outputs != outputs.astype(jnp.bfloat16).astype(jnp.float32))  # so equal logits are rare
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype('float32')}


@pytest.mark.slow
@pytest.mark.parametrize('layer', ['embedding', 'head'])
@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
def test_matmul_precision_reaches_the_embedding_and_the_head(layer, precision):
    model, variables = build(IMAGES, (2, 3))
    kernel = variables['params'][layer]['kernel']
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    others = {'params': {**variables['params'], layer: {**variables['params'][layer], 'kernel': rounded}}}
    with jax.default_matmul_precision(precision):  # a product of bfloat16 rounds the kernel itself
        assert np.array_equal(model.apply(variables, IMAGES), model.apply(others, IMAGES)) == (precision == 'bfloat16')
