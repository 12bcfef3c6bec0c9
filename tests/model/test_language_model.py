"""The decoder-only language model: visibility, packing, and the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from model.blocks import BlockConfig
from model.language_model import LanguageModel
from model.losses import cross_entropy
from model.positional import SCHEMES
from tests.model import reference
from tests.model.helpers import close, float64, normal, random_params
from tests.model.reference import PAD
from tests.model.small_transformer import tiny

# make test-all tests the other position schemes.
SOME_SCHEMES = [pytest.param(name, marks=[] if name == 'rotary' else [pytest.mark.slow]) for name in SCHEMES]
TOKENS = jnp.array([[4, 6, 9, 3, 10, 5, 7], [5, 2, 8, 7, 4, 9, 3]])


def language_model(position='learned', norm='pre', **options):
    config = BlockConfig(d_model=8, d_ff=12, num_heads=2, d_k=6, d_v=5, dropout=0.0, position=position, norm=norm)
    model = LanguageModel(config, 2, 11, max_length=12, **options)
    return model, {'params': random_params(model, TOKENS)}


@pytest.mark.parametrize('options', [{}, {'tie_embeddings': False, 'scale_embeddings': False, 'output_bias': True}],
                         ids=str)
def test_the_forward_pass_is_the_reference(options):
    model, variables = language_model('sinusoidal', **options)
    params = float64(variables['params'])
    assert ('output' in params) == ('logits_bias' in params) == bool(options)
    table = params['embedding']['embedding']
    output = params['output']['kernel'] if options else table.T
    for row, logits in zip(np.asarray(TOKENS), jax.jit(model.apply)(variables, TOKENS), strict=True):
        x = reference.embed(table, row, 'sinusoidal', None, options.get('scale_embeddings', True))
        states = reference.stack(params['encoder'], reference.encoder_block, x, np.tri(7, dtype=bool), norm='pre')
        close(logits, states @ output + params.get('logits_bias', 0))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('position', SCHEMES)
def test_no_position_sees_a_later_one(position):
    model, variables = language_model(position)
    changed = TOKENS.at[:, 4].set(1)
    before, after = model.apply(variables, TOKENS), model.apply(variables, changed)
    close(before[:, :4], after[:, :4])
    assert np.all(np.abs(before - after)[:, 4:].max(axis=-1) > 1e-6)


@pytest.mark.parametrize('position', SOME_SCHEMES)
@pytest.mark.parametrize('norm', ['pre', pytest.param('post', marks=pytest.mark.slow)])
def test_prompts_of_any_length_then_steps_equal_the_whole(position, norm):
    # Row 0 has a prompt of 4 tokens and row 1 of 2; both continue token by token, with two continuations each.
    model, variables = language_model(position, norm)
    whole = model.apply(variables, TOKENS)
    begins = [4, 2]
    prompt = jnp.stack([jnp.where(jnp.arange(5) < begin, row[:5], PAD)
                        for begin, row in zip(begins, TOKENS, strict=True)])
    memory = model.apply(variables, prompt, method='encode')
    cache = model.apply(variables, memory, 2, 3, method='init_cache')
    for step in range(3):
        token = jnp.stack([row[begin + step] for begin, row in zip(begins, TOKENS, strict=True)])
        logits, cache = model.apply(variables, jnp.stack([token, token], axis=1), cache, method='decode_step')
        for row, begin in enumerate(begins):
            close(logits[row, 0], whole[row, begin + step])
            close(logits[row, 1], whole[row, begin + step])


def test_t5_positions_of_a_long_text_are_the_same_in_a_step():
    # From a distance of 9 on, causal and bidirectional relations have different buckets.
    model, variables = language_model('relative')
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 11, (1, 14)))

    @jax.jit
    def step_and_whole(variables):
        memory = model.apply(variables, tokens[:, :13], method='encode')
        cache = model.apply(variables, memory, 1, 1, method='init_cache')
        logits, _ = model.apply(variables, tokens[:, 13:], cache, method='decode_step')
        return logits[0, 0], model.apply(variables, tokens)[0, 13]

    close(*step_and_whole(variables))


@pytest.mark.parametrize('position', SOME_SCHEMES)
def test_packed_documents_do_not_see_each_other(position):
    model, variables = language_model(position)
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2]])
    positions = jnp.array([[0, 1, 2, 0, 1, 2, 3]])
    packed = model.apply(variables, TOKENS[:1], segments, positions)
    close(packed[:, :3], model.apply(variables, TOKENS[:1, :3]))
    close(packed[:, 3:], model.apply(variables, TOKENS[:1, 3:]))


@pytest.mark.parametrize('score', ['dot', 'general', 'additive'])
def test_rotary_positions_of_packed_documents_begin_at_0_with_every_score(score):
    """General and additive scores of rotated vectors depend on the positions, not only on their differences."""
    model = LanguageModel(tiny(position='rotary', score=score), 2, 11)
    variables = {'params': random_params(model, TOKENS)}
    segments, positions = jnp.array([[1, 1, 1, 2, 2, 2, 2]]), jnp.array([[0, 1, 2, 0, 1, 2, 3]])
    packed = model.apply(variables, TOKENS[:1], segments, positions)
    close(packed[:, :3], model.apply(variables, TOKENS[:1, :3]))
    close(packed[:, 3:], model.apply(variables, TOKENS[:1, 3:]))


@pytest.mark.slow
@pytest.mark.parametrize('position', SCHEMES)
def test_a_longer_sequence_runs_or_is_refused(position):
    model, variables = language_model(position)
    long = jnp.ones((1, 20), jnp.int32)
    if position == 'learned':
        assert model.length_limit == 12
        with pytest.raises(ValueError, match='only max_length=12 positions, but 20 are needed'):
            model.apply(variables, long)
    else:
        assert model.length_limit is None
        assert np.isfinite(model.apply(variables, long)).all()


def test_hessian_vector_products_are_differences_of_gradients():
    model = LanguageModel(tiny(position='learned', norm='pre', activation='gelu'), 1, 11, max_length=8)
    params, unravel = ravel_pytree(random_params(model, TOKENS))

    def loss(params):
        projection = model.apply({'params': unravel(params)}, TOKENS[:, :-1], method='projection')
        return cross_entropy(projection, TOKENS[:, 1:], jnp.ones((2, 6)), 0.1).loss

    gradient, direction = jax.jit(jax.grad(loss)), normal(0, params.size)
    direction /= jnp.linalg.norm(direction)
    found = jax.jvp(gradient, (params,), (direction,))[1]
    expected = (gradient(params + 0.02 * direction) - gradient(params - 0.02 * direction)) / 0.04
    assert jnp.linalg.norm(found - expected) < 0.02 * jnp.linalg.norm(expected)


def test_tied_embeddings_are_one_table():
    tied, untied = (sum(leaf.size for leaf in jax.tree.leaves(language_model(tie_embeddings=tie)[1]))
                    for tie in (True, False))
    assert untied - tied == 8 * 11


def test_weights_of_every_layer_on_request():
    model, variables = language_model()
    _, collections = model.apply(variables, TOKENS, mutable=['attention'])
    weights = collections['attention']['encoder']['layers_1']['self_attention']['weights'][0]
    assert weights.shape == (2, 2, 7, 7)
    close(jnp.triu(weights, 1), jnp.zeros(weights.shape))
