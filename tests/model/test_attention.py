"""Masks, scores, softmax, pooling and multi-head attention, against the reference and worked values."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from model.attention import (
    SCORES,
    MultiHeadAttention,
    additive_scores,
    attention,
    attention_pooling,
    basic_self_attention,
    dot_scores,
    general_scores,
    masked_softmax,
    scaled_dot_product_attention,
    scaled_dot_scores,
)
from model.positional import Rotary
from model.relation import Relation, combine_masks, look_ahead_mask, padding_mask, segment_mask
from tests.model import reference
from tests.model.helpers import close, float64, normal, random_params

SHAPES = [  # batch, heads, target, source, d_k, d_v
    (1, 1, 1, 1, 1, 1), (2, 3, 4, 5, 8, 6), (3, 2, 7, 3, 4, 16)]


def random_mask(seed, *shape):
    """Returns a mask in which half of the keys are visible on average, and one query sees no key."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[:, :, -1] = False
    return jnp.asarray(mask)


def query_key_value(batch, heads, target, source, d_k, d_v, seed=0):
    return (normal([seed, 1], batch, target, heads, d_k), normal([seed, 2], batch, source, heads, d_k),
            normal([seed, 3], batch, source, heads, d_v))


attend = jax.jit(scaled_dot_product_attention)


def reference_attention(query, key, value, mask=None):
    query, key, value = float64((query, key, value))
    mask = None if mask is None else np.asarray(mask)
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h in np.ndindex(query.shape[0], query.shape[2]):
        output[b, :, h] = reference.attention(query[b, :, h], key[b, :, h], value[b, :, h],
                                              None if mask is None else mask[b, h])
    return output


# Worked values

@pytest.mark.parametrize('raw, scaled, weights', [((6, 4), (1.5, 1.0), (0.62, 0.38)),
                                                  ((3, 8), (0.75, 2.0), (0.22, 0.78))])
def test_scaled_scores_and_their_softmax(raw, scaled, weights):
    # The width is 16, so scores are divided by 4. Keys have one component, so the products are the raw scores.
    query, key = jnp.ones((1, 1, 1, 16)), jnp.zeros((1, 2, 1, 16)).at[0, :, 0, 0].set(jnp.array(raw))
    scores = scaled_dot_scores(query, key)
    close(scores[0, 0, 0], scaled)
    close(np.round(masked_softmax(scores)[0, 0, 0], 2), weights)


def test_one_hot_weights_look_up_a_value():
    value = normal(0, 1, 3, 1, 4)
    close(attention_pooling(jnp.eye(3)[None, None, 1:2], value)[0, 0, 0], value[0, 1, 0])


# Scaled dot-product attention

@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('seed', [0, 1])
def test_attention_is_the_reference(shape, seed):
    inputs = query_key_value(*shape, seed=seed)
    close(attend(*inputs), reference_attention(*inputs))


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('seed', [0, 1])
def test_masked_attention_is_the_reference(shape, seed):
    inputs, mask = query_key_value(*shape, seed=seed), random_mask(seed, *shape[:4])
    close(attend(*inputs, mask), reference_attention(*inputs, mask))


@pytest.mark.parametrize('mask_shape', [(1, 1, 1, 5), (2, 1, 1, 5), (1, 3, 4, 5), (1, 1, 4, 1)])
def test_masks_broadcast(mask_shape):
    inputs = query_key_value(2, 3, 4, 5, 8, 6)
    mask = jnp.asarray(np.random.default_rng(0).random(mask_shape) < 0.6)
    close(attend(*inputs, mask),
          reference_attention(*inputs, np.broadcast_to(mask, (2, 3, 4, 5))))


def test_query_without_a_key_gets_zeros():
    inputs, mask = query_key_value(2, 3, 4, 5, 8, 6), jnp.ones((2, 3, 4, 5), bool).at[1, :, 2].set(False)
    output = attend(*inputs, mask)
    assert (output[1, 2] == 0).all() and (output[0, 2] != 0).all()


@pytest.mark.parametrize('size', [1.0, 1e18])  # products of 1e36 are almost the largest float32
def test_query_without_a_key_has_finite_gradients(size):
    query, key, value = query_key_value(1, 1, 2, 3, 4, 4)
    mask = jnp.array([[[[False, False, False], [True, False, True]]]])
    gradients = jax.grad(lambda *inputs: attend(*inputs, mask).sum(), argnums=(0, 1, 2))(
        query * size, key * size, value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][0, 0] == 0).all()


def test_weights_sum_to_one_however_large_the_scores():
    weights = masked_softmax(normal(0, 2, 2, 3, 4) * 1e30, jnp.ones((1, 1, 1, 4), bool).at[..., 0].set(False))
    close(weights.sum(-1), np.ones((2, 2, 3)))
    assert (weights[..., 0] == 0).all()


def test_softmax_of_bfloat16_is_in_float32():
    query, key, _ = jax.tree.map(lambda x: x.astype(jnp.bfloat16), query_key_value(1, 2, 3, 4, 8, 8))
    scores = scaled_dot_scores(query, key)
    assert scores.dtype == masked_softmax(scores).dtype == jnp.float32


# Masks

def test_look_ahead_mask_shows_the_diagonal():
    target, source = jnp.array([[0, 1, 2], [5, 1, 1]]), jnp.array([[0, 1, 2, 3]])
    np.testing.assert_array_equal(look_ahead_mask(target, source)[:, 0], [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]])


def test_combined_masks_are_their_conjunction():
    visible = np.array([[True, True, False], [True, False, True]])
    segments = np.array([[1, 1, 2], [1, 2, 2]])
    masks = padding_mask(jnp.asarray(visible)), segment_mask(jnp.asarray(segments), jnp.asarray(segments))
    mask = np.asarray(combine_masks(None, look_ahead_mask(*[jnp.arange(3)[None]] * 2), *masks))
    for b, t, s in np.ndindex(2, 3, 3):
        assert mask[b, 0, t, s] == (s <= t and visible[b, s] and segments[b, t] == segments[b, s])


def test_no_mask_is_none():
    assert combine_masks() is None and combine_masks(None, None) is None


@pytest.mark.parametrize('heads', [1, 3])
def test_packed_examples_do_not_see_each_other(heads):
    inputs = query_key_value(2, heads, 6, 7, 4, 5)
    target, source = jnp.array([[1, 1, 1, 1, 2, 2]] * 2), jnp.array([[1, 1, 2, 2, 2, 2, 2]] * 2)
    packed = attend(*inputs, segment_mask(target, source))
    query, key, value = inputs
    first = attend(query[:, :4], key[:, :2], value[:, :2])
    second = attend(query[:, 4:], key[:, 2:], value[:, 2:])
    close(packed, jnp.concatenate([first, second], axis=1), atol=1e-6)


# Multi-head attention

@pytest.mark.fast_cases(3)
@pytest.mark.parametrize('num_heads, d_model, d_k, d_v, d_target, d_source', [
    (1, 4, 4, 4, 4, 4), (4, 8, 2, 2, 8, 8), (3, 8, 5, 2, 8, 8), (2, 6, 3, 7, 4, 9), (2, 6, 3, 7, 9, 4)])
@pytest.mark.parametrize('masked', [False, True])
def test_multi_head_attention_is_the_reference(num_heads, d_model, d_k, d_v, d_target, d_source, masked):
    batch, target, source = 2, 4, 5
    inputs, memory = normal(1, batch, target, d_target), normal(2, batch, source, d_source)
    mask = None
    if masked:
        visible, segments = jnp.arange(source)[None] < jnp.array([[5], [3]]), jnp.array([[1, 1, 2, 2, 2]] * 2)
        mask = combine_masks(padding_mask(visible), segment_mask(segments[:, :target], segments))
    module = MultiHeadAttention(num_heads, d_model, d_k, d_v)
    params = random_params(module, inputs, memory)
    each_mask = [None] * batch if mask is None else np.broadcast_to(mask[:, 0], (batch, target, source))
    expected = [reference.multi_head_attention(float64(params), *float64(pair), mask_b)
                for *pair, mask_b in zip(np.asarray(inputs), np.asarray(memory), each_mask, strict=True)]
    close(jax.jit(module.apply)({'params': params}, inputs, memory, Relation(mask=mask)), np.stack(expected))


def test_multi_head_attention_without_visible_key_is_zero_and_has_finite_gradients():
    module, x = MultiHeadAttention(2, 8, 4, 4), normal(0, 1, 3, 8)
    params, mask = random_params(module, x, x), jnp.tri(3, dtype=bool)[None, None].at[:, :, 1].set(False)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def row(params, x):
        return module.apply({'params': params}, x, x, Relation(mask=mask))[0, 1].sum()

    output, gradients = row(params, x)
    assert output == 0
    assert all((gradient == 0).all() for gradient in jax.tree.leaves(gradients))


def test_projected_memory_can_be_attended_to_later():
    module, x, memory = MultiHeadAttention(2, 8, 3, 5), normal(0, 2, 4, 8), normal(1, 2, 6, 7)
    variables = {'params': random_params(module, x, memory)}
    key, value = module.apply(variables, memory, method='keys_values')
    assert key.shape == (2, 6, 2, 3) and value.shape == (2, 6, 2, 5)
    close(module.apply(variables, x, key, value, method='attend'), module.apply(variables, x, memory))


@pytest.mark.parametrize('groups, bias', [(3, 'none'), (1, 'qkv')])
@pytest.mark.parametrize('rotary', [None, Rotary()])
def test_one_product_projects_what_three_do(rotary, groups, bias):
    layer = MultiHeadAttention(num_heads=3, d_model=10, d_k=4, d_v=6, rotary=rotary, num_key_value_heads=groups,
                               bias=bias)
    inputs, positions = normal(0, 2, 5, 10), jnp.array([[3, 4, 5, 6, 7], [0, 1, 2, 0, 1]])
    params = random_params(layer, inputs, inputs, Relation.within(positions))
    bound = layer.bind({'params': params})
    query, key, value = bound.queries_keys_values(inputs, positions)
    close(query, bound.queries(inputs, positions))
    for found, expected in zip((key, value), bound.keys_values(inputs, positions), strict=True):
        close(found, expected)


def test_multi_head_attention_has_no_biases():
    params = random_params(MultiHeadAttention(2, 6, 3, 7), normal(0, 1, 2, 4), normal(1, 1, 3, 9))
    assert jax.tree.map(jnp.shape, params) == {
        'query': {'kernel': (4, 2, 3)}, 'key': {'kernel': (9, 2, 3)}, 'value': {'kernel': (9, 2, 7)},
        'output': {'kernel': (2, 7, 6)}}


def test_annotations_are_checked():
    query, key, value = query_key_value(1, 1, 2, 3, 4, 4)
    with pytest.raises(jaxtyping.TypeCheckError):
        scaled_dot_product_attention(query, key[:, :2], value)
    with pytest.raises(jaxtyping.TypeCheckError):
        masked_softmax(scaled_dot_scores(query, key), jnp.ones((1, 1, 2, 4), bool))


# Score functions and retrieval

def test_scores_are_their_definitions():
    query, key = normal(0, 2, 4, 3, 5), normal(1, 2, 6, 3, 5)
    matrix, vector = normal(2, 3, 5, 5), normal(3, 3, 5)
    found = {'dot': dot_scores(query, key), 'scaled_dot': scaled_dot_scores(query, key),
             'general': general_scores(query, key, matrix), 'additive': additive_scores(query, key, vector)}
    for b, h, t, s in np.ndindex(2, 3, 4, 6):
        q, k = np.float64(query[b, t, h]), np.float64(key[b, s, h])
        expected = {'dot': q @ k, 'scaled_dot': q @ k / np.sqrt(5), 'general': q @ np.float64(matrix[h]) @ k,
                    'additive': np.float64(vector[h]) @ np.tanh(q + k)}
        for name, value in expected.items():
            close(found[name][b, h, t, s], value)


@pytest.mark.parametrize('width', [64, 112])  # the rounding of 112 ** -0.5 to bfloat16 is an error of 0.25 %
def test_scaled_scores_of_bfloat16_equal_those_of_float64(width):
    query, key = (normal(seed, 2, 4, 3, width).astype(jnp.bfloat16) for seed in (0, 1))
    scores = np.einsum('bthk,bshk->bhts', *float64((query, key))) / np.sqrt(width)
    close(scaled_dot_scores(query, key), scores, atol=1e-6)


def test_general_scores_of_unlike_widths():
    scores = general_scores(normal(0, 1, 2, 1, 3), normal(1, 1, 4, 1, 5), normal(2, 1, 3, 5))
    assert scores.shape == (1, 1, 2, 4)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('score', SCORES)
def test_every_score_serves_in_multi_head_attention(score):
    module, x, memory = MultiHeadAttention(2, 8, 4, 6, score=score), normal(0, 2, 3, 8), normal(1, 2, 5, 8)
    params = random_params(module, x, memory)
    output, collections = module.apply({'params': params}, x, memory, mutable=['attention'])
    query, (key, value) = (module.apply({'params': params}, x, method=lambda m, x: m.query(x)),
                           module.apply({'params': params}, memory, method='keys_values'))
    weight = [params['score_weight']] if 'score_weight' in params else []
    weights = masked_softmax(SCORES[score](query, key, *weight))
    close(collections['attention']['weights'][0], weights)
    close(output, jnp.einsum('bhts,bshv,hvd->btd', weights, value, params['output']['kernel']))
    gradient = jax.grad(lambda params: module.apply({'params': params}, x, memory).sum())(params)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_general_attention_starts_as_the_scaled_dot_product():
    x = normal(0, 1, 4, 8)
    general = MultiHeadAttention(2, 8, 4, 4, score='general')
    variables = general.init(jax.random.key(0), x, x)
    params = {name: value for name, value in variables['params'].items() if name != 'score_weight'}
    close(general.apply(variables, x, x), MultiHeadAttention(2, 8, 4, 4).apply({'params': params}, x, x))


def test_an_unknown_score_is_named():
    with pytest.raises(ValueError, match="score='cosine' must be one of scaled_dot, dot, general, additive"):
        MultiHeadAttention(1, 4, 4, 4, score='cosine').init(jax.random.key(0), *[jnp.zeros((1, 2, 4))] * 2)


def test_one_hot_attention_is_a_look_up():
    keys = jnp.eye(4)[None, :, None] * 1e4
    values = normal(0, 1, 4, 1, 3)
    found, weights = attention(jnp.eye(4)[None, [2, 0], None], keys, values, score=dot_scores)
    close(weights[0, 0], np.eye(4)[[2, 0]])
    close(found, values[:, [2, 0]])


def test_basic_self_attention_is_its_definition():
    x = np.float64(normal(0, 2, 4, 3))
    w = np.einsum('bid,bjd->bij', x, x)
    w = np.exp(w) / np.exp(w).sum(-1, keepdims=True)
    close(basic_self_attention(jnp.float32(x)), w @ x)
