"""The cache of the encoder-decoder: decoding gives the logits of teacher forcing, and hypotheses are independent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.positional import SCHEMES
from tests.model.helpers import close
from tests.model.small_transformer import SOURCE, TARGET, transformer

HYPOTHESES = jnp.stack([TARGET, TARGET.at[:, 2:].set(TARGET[:, :1:-1]), TARGET.at[:, 3:].set(2)], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def decode(model, variables, source, target, orders):
    """Returns logits [batch, beam, target, vocab] of tokens `target` [batch, beam, target], computed step by step.

    Before step t, the cache's hypotheses are reordered to orders[t].
    """
    length = target.shape[2] + 2
    memory = model.apply(variables, source, method='encode')
    cache = model.apply(variables, memory, target.shape[1], length, method='init_cache')
    assert all(leaf.shape[:3] == (*target.shape[:2], length) for leaf in jax.tree.leaves(cache.state))

    def step(cache, inputs):
        token, order = inputs
        cache = cache.replace(state=jax.tree.map(lambda leaf: leaf[:, order], cache.state))
        logits, cache = model.apply(variables, token, cache, method='decode_step')
        return cache, logits

    _, logits = jax.lax.scan(step, cache, (jnp.moveaxis(target, 2, 0), orders))
    return jnp.moveaxis(logits, 0, 2)


def in_order(beam):
    return jnp.tile(jnp.arange(beam), (TARGET.shape[1], 1))


CASES = [
    ('post', 'sinusoidal', 'scaled_dot', 3), ('post', 'rotary', 'scaled_dot', 3), ('pre', 'relative', 'additive', 3)]
MORE = [
    ('pre', 'learned', 'dot', 3), ('post', 'learned', 'general', 1), ('pre', 'sinusoidal', 'additive', 1),
    ('post', 'alibi', 'scaled_dot', 3), ('pre', 'none', 'general', 1)]
MORE += [('pre', scheme, 'scaled_dot', 2) for scheme in SCHEMES if scheme not in {case[1] for case in CASES + MORE}]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('norm, position, score, beam', CASES + MORE)
def test_decoding_step_by_step_is_teacher_forcing(norm, position, score, beam):
    model, variables = transformer(norm=norm, position=position, score=score)
    logits = decode(model, variables, SOURCE, HYPOTHESES[:, :beam], in_order(beam))
    for hypothesis in range(beam):
        close(logits[:, hypothesis], model.apply(variables, SOURCE, HYPOTHESES[:, hypothesis]))


def test_t5_positions_of_a_long_target_are_those_of_teacher_forcing():
    model, variables = transformer(layers=1, position='relative')
    target = jnp.asarray(np.random.default_rng(0).integers(1, 12, (2, 1, 14)))
    logits = decode(model, variables, SOURCE, target, jnp.zeros((14, 1), jnp.int32))
    close(logits[:, 0], jax.jit(model.apply)(variables, SOURCE, target[:, 0]))


def test_hypotheses_of_a_sentence_are_independent():
    model, variables = transformer()
    logits = decode(model, variables, SOURCE, HYPOTHESES, in_order(3))
    changed = decode(model, variables, SOURCE, HYPOTHESES.at[:, 1, 3:].set(11), in_order(3))
    others = jnp.array([0, 2])
    np.testing.assert_array_equal(changed[:, others], logits[:, others])
    assert not np.allclose(changed[:, 1], logits[:, 1])


def test_a_reordered_cache_continues_the_hypotheses_that_it_was_reordered_to():
    model, variables = transformer()
    orders = jnp.array([[0, 1, 2], [2, 2, 0], [1, 0, 0], [0, 2, 1], [2, 1, 0], [1, 1, 2]])
    logits = decode(model, variables, SOURCE, HYPOTHESES, orders)
    tokens_so_far, logits_so_far = np.array(HYPOTHESES), np.array(logits)
    for t, order in enumerate(orders):  # the past of each hypothesis is the past of its parent
        tokens_so_far[:, :, :t], logits_so_far[:, :, :t] = (
            tokens_so_far[:, order, :t], logits_so_far[:, order, :t])
    for hypothesis in range(3):
        close(logits_so_far[:, hypothesis],
              model.apply(variables, SOURCE, jnp.asarray(tokens_so_far[:, hypothesis])))


def test_a_cache_ends_where_learned_positions_end():
    model, variables = transformer(position='learned', max_length=6)
    memory = model.apply(variables, SOURCE, method='encode')
    cache = model.apply(variables, memory, 1, 50, method='init_cache')
    assert cache.past[0].length() == cache.state['ancestors'].shape[2] == 6


@pytest.mark.slow
def test_bfloat16_decodes_step_by_step():
    model, variables = transformer(layers=1, dtype=jnp.bfloat16)
    logits = decode(model, variables, SOURCE, HYPOTHESES[:, :1], in_order(1))
    assert logits.dtype == jnp.float32
    close(logits[:, 0], jax.jit(model.apply)(variables, SOURCE, TARGET), atol=0.05)
