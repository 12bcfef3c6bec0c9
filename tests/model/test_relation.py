"""Masks and biases from positions; the kernels against plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import fused_attention
from model.attention import (
    LONG,
    MultiHeadAttention,
    additive_scores,
    attention,
    chunked_attention,
    drop_weights,
    general_scores,
    scaled_dot_scores,
)
from model.positional import RELATIVE, RelativeBias
from model.relation import Relation
from tests.model.helpers import close, normal, random_params

RELATIONS = {
    'everything': Relation(),
    'causal': Relation.within(jnp.arange(7)[None], causal=True),
    'padded': Relation(visible=jnp.array([[1, 1, 1, 0, 0, 1, 1], [0] * 7], bool)),
    'packed': Relation.within(jnp.arange(7)[None], segments=jnp.array([[1, 1, 2, 2, 2, 3, 0], [1] * 7]), causal=True),
    'mask': Relation(mask=jnp.asarray(np.random.default_rng(0).random((2, 3, 7, 7)) < 0.6)),
}
for scheme in RELATIVE:  # schemes with a bias
    bias, _ = RelativeBias(scheme, 3).init_with_output(jax.random.key(5))
    if bias:
        RELATIONS[scheme] = Relation.within(jnp.arange(7)[None], causal=scheme == 'alibi').replace(bias=bias)


def fused(query, key, value, relation):
    return fused_attention(query, key, value, relation.whole_mask(), relation.whole_bias())


def query_key_value(dtype=jnp.float32):
    return [normal(seed, 2, 7, 3, width).astype(dtype) for seed, width in enumerate((4, 4, 6))]


def test_a_relation_within_a_sequence_masks_by_position_padding_and_segment():
    segments, visible = jnp.array([[1, 1, 2]]), jnp.array([[True, False, True]])
    mask = Relation.within(jnp.arange(3)[None], visible, segments, causal=True).whole_mask()
    np.testing.assert_array_equal(mask[0, 0], [[1, 0, 0], [1, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(Relation.within(jnp.arange(3)[None], causal=True).whole_mask()[0, 0], np.tri(3))
    assert Relation().whole_mask() is None and Relation().whole_bias() is None


@pytest.mark.parametrize('relation', RELATIONS.values(), ids=RELATIONS)
def test_a_relation_with_its_whole_mask_is_equal(relation):
    found = relation.with_whole_mask()
    for name in 'whole_mask', 'whole_bias':
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name)(), getattr(relation, name)())
    # Only the field `mask` is left, so that no layer computes a mask.
    assert found.replace(mask=None, bias=None, target=None, source=None, bidirectional=True) == Relation()


def test_a_bias_is_added_to_the_scaled_scores():
    query, key, value = query_key_value()
    relation = RELATIONS['relative']
    scores = np.einsum('bthk,bshk->bhts', query, key) / 2 + np.asarray(relation.whole_bias())
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    found, found_weights = attention(query, key, value, relation)
    close(found_weights, weights)
    close(found, np.einsum('bhts,bshv->bthv', weights, value))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize('relation', RELATIONS.values(), ids=RELATIONS)
@pytest.mark.parametrize('chunk', [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (7, 16))])
def test_the_chunked_kernel_is_the_plain_one(relation, chunk):
    inputs = query_key_value()

    def total(kernel, *inputs):
        return jnp.sum(jnp.sin(kernel(*inputs)))

    plain, chunked = (lambda *args: attention(*args, relation)[0]), (
        lambda *args: chunked_attention(*args, relation, chunk=chunk))
    close(jax.jit(chunked)(*inputs), plain(*inputs))
    of_plain, of_chunked = (jax.jit(jax.grad(functools.partial(total, kernel), argnums=(0, 1, 2)))(*inputs)
                            for kernel in (plain, chunked))
    jax.tree.map(close, of_chunked, of_plain)


@pytest.mark.parametrize('name', [name for name, relation in RELATIONS.items() if relation.bias])
def test_a_learned_bias_learns_the_same_through_the_chunked_kernel(name):
    inputs, relation = query_key_value(), RELATIONS[name]

    def total(bias, kernel):
        return jnp.sum(jnp.sin(kernel(*inputs, relation.replace(bias=bias))))

    of_plain, of_chunked = (jax.jit(jax.grad(functools.partial(total, kernel=kernel)))(relation.bias) for kernel in (
        lambda *args: attention(*args)[0], lambda *args: chunked_attention(*args, chunk=3)))
    for chunked, plain in zip(jax.tree.leaves(of_chunked), jax.tree.leaves(of_plain), strict=True):
        assert np.any(plain)
        close(chunked, plain)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize('relation', RELATIONS.values(), ids=RELATIONS)
def test_the_fused_kernel_is_the_plain_one(relation):
    inputs = query_key_value()[:2] + [normal(9, 2, 7, 3, 4)]  # the kernel needs d_v = d_k

    def total(kernel, *inputs):
        return jnp.sum(jnp.sin(kernel(*inputs)))

    plain, kernel = (lambda *args: attention(*args, relation)[0]), (lambda *args: fused(*args, relation))
    close(jax.jit(kernel)(*inputs), plain(*inputs))
    of_plain, of_fused = (jax.jit(jax.grad(functools.partial(total, kernel), argnums=(0, 1, 2)))(*inputs)
                          for kernel in (plain, kernel))
    jax.tree.map(close, of_fused, of_plain)


@pytest.mark.parametrize('kernel, score', [
    ('chunked', 'dot'), ('chunked', 'general'), ('fused', 'dot'), ('fused', 'scaled_dot')])
def test_a_layer_has_the_same_outputs_with_every_kernel(kernel, score):
    plain, other = (MultiHeadAttention(3, 8, 4, 4, score=score, kernel=each) for each in ('plain', kernel))
    x, relation = normal(0, 2, 7, 8), RELATIONS['alibi']  # causal, with a bias
    variables = {'params': random_params(plain, x, x, relation)}
    close(*(jax.jit(module.apply)(variables, x, x, relation) for module in (other, plain)))


@pytest.mark.parametrize('score, weight', [(general_scores, (3, 4, 4)), (additive_scores, (3, 4))])
def test_scores_with_parameters_can_be_chunked(score, weight):
    inputs, weight = query_key_value(), normal(7, *weight)
    score = functools.partial(score, weight=weight)
    close(chunked_attention(*inputs, RELATIONS['causal'], score, chunk=2),
          attention(*inputs, RELATIONS['causal'], score)[0])


def test_a_long_input_is_chunked_unless_the_weights_are_asked_for():
    module = MultiHeadAttention(num_heads=1, d_model=2, d_k=2, d_v=2)
    short, long = jnp.zeros((1, 8, 2)), jnp.zeros((1, LONG, 2))
    variables = {'params': random_params(module, short, short)}

    def sizes(x, **options):
        program = str(jax.make_jaxpr(lambda x: module.apply(variables, x, x, **options))(x))
        return f'{LONG},{LONG}' in program

    assert not sizes(long)
    assert sizes(long, mutable=['attention'])


@pytest.mark.slow
@pytest.mark.parametrize('kernel', ['plain', 'chunked'])
def test_dropout_of_weights_keeps_the_mean(kernel):
    module = MultiHeadAttention(num_heads=2, d_model=4, d_k=2, d_v=2, dropout=0.5, kernel=kernel)
    x = normal(0, 1, 6, 4)
    variables = {'params': random_params(module, x, x)}
    run = jax.jit(lambda key: module.apply(variables, x, x, deterministic=False, rngs={'dropout': key}))
    draws = jax.vmap(run)(jax.random.split(jax.random.key(0), 4000))
    assert not np.allclose(draws[0], draws[1])
    error = draws.std(axis=0) / len(draws) ** 0.5
    np.testing.assert_array_less(np.abs(draws.mean(axis=0) - module.apply(variables, x, x)), 5 * error)


def test_every_chunk_of_queries_drops_other_weights():
    """Without dropout, the outputs of all queries would be equal."""
    drop = functools.partial(drop_weights, rate=0.5, key=jax.random.key(0))
    pooled = chunked_attention(jnp.zeros((1, 8, 1, 4)), jnp.zeros((1, 64, 1, 4)), normal(0, 1, 64, 1, 4), drop=drop,
                               chunk=2)
    assert len(np.unique(pooled[0, :, 0], axis=0)) == 8


def test_unsupported_options_of_the_fused_kernel_are_errors():
    x = jnp.zeros((1, 2, 4))
    with pytest.raises(ValueError, match='attention_kernel=fused supports only score=scaled_dot or dot'):
        MultiHeadAttention(1, 4, 4, 4, kernel='fused', score='additive').init(jax.random.key(0), x, x)
    with pytest.raises(ValueError, match='attention_kernel=fused needs equal d_k and d_v, but d_k=4 and d_v=8. Use'):
        MultiHeadAttention(1, 4, 4, 8, kernel='fused').init(jax.random.key(0), x, x)


@pytest.mark.parametrize('target, source, width, dtype, more, implementation', [
    (4, 6, 8, 'bfloat16', ['mask'], 'cudnn'), (4, 6, 128, 'bfloat16', ['mask', 'bias'], 'cudnn'),
    (4, 4, 8, 'bfloat16', [], 'cudnn'), (3, 6, 8, 'bfloat16', ['mask'], 'xla'), (4, 5, 8, 'bfloat16', [], 'xla'),
    (4, 6, 12, 'bfloat16', [], 'xla'), (4, 6, 136, 'bfloat16', [], 'xla'), (4, 4, 8, 'float32', [], 'xla')])
def test_the_kernel_of_gpus_gets_only_arrays_that_it_supports(target, source, width, dtype, more, implementation,
                                                              monkeypatch):
    calls = []

    def kernel(query, key, value, *, bias, mask, scale, implementation):
        assert all(array is None or array.shape[2:] == (target, source) for array in (bias, mask))
        calls.append(implementation)
        return query

    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    monkeypatch.setattr(jax.nn, 'dot_product_attention', kernel)
    query, key = (jnp.ones((2, length, 4, width), dtype) for length in (target, source))
    arguments = {'mask': Relation(visible=jnp.ones((2, source), bool)).whole_mask(),
                 'bias': jnp.zeros((1, 4, target, source))}
    fused_attention(query, key, key, **{name: arguments[name] for name in more})
    assert calls == [implementation]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('length, chunk, size', [(7, 4, 4), (0, 4, 0), (1, 512, 1), (7, 512, 7), (7, 7, 7), (6, 5, 3)])
def test_the_chunked_kernel_pads_fewer_queries_than_it_has_chunks(length, chunk, size):
    query, key, value = query_key_value()
    query, sizes = query[:, :length], []

    def score(query, key):
        sizes.append(query.shape[1])
        return scaled_dot_scores(query, key)

    close(chunked_attention(query, key, value, score=score, chunk=chunk), attention(query, key, value)[0])
    assert set(sizes) == {size}


def kernel_without_a_guard(query, key, value, bias=None, mask=None, scale=None, implementation=None):
    """Computes attention with -inf for hidden keys, so a query that sees no key becomes NaN."""
    scores = jnp.einsum('bthk,bshk->bhts', query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum('bhts,bshv->bthv', weights, value)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('kernel', ['plain', 'fused', 'fused without a guard'])
def test_queries_that_see_no_key_have_zeros_and_no_nan_in_gradients(monkeypatch, kernel):
    if kernel == 'fused without a guard':  # cuDNN's kernel may have none
        monkeypatch.setattr(jax.nn, 'dot_product_attention', kernel_without_a_guard)
    query, key, value = query_key_value()
    inputs = query, key, value[..., :4]  # the fused kernel needs values as wide as the keys
    relation = Relation(mask=RELATIONS['mask'].mask.at[:, :, 2].set(False).at[1, 0].set(False))
    function = (lambda *inputs: attention(*inputs, relation)[0]) if kernel == 'plain' else (
        lambda *inputs: fused(*inputs, relation))
    with jax.debug_nans(True):
        pooled, transposed = jax.vjp(function, *inputs)
        gradients = transposed(normal(9, *pooled.shape))
    assert np.all(pooled[:, 2] == 0) and np.all(pooled[1, :, 0] == 0)
    assert np.all(gradients[0][:, 2] == 0) and np.all(gradients[0][1, :, 0] == 0)
    expected, transposed = jax.vjp(lambda *inputs: attention(*inputs, relation)[0], *inputs)
    jax.tree.map(close, (pooled, gradients), (expected, transposed(normal(9, *pooled.shape))))
