"""RNNsearch: the equations of the paper, padding, visibility, and decoding with a cache."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.cache import Memory
from model.embedding import SHARING
from model.recurrent import READOUTS, GRUCell, RNNSearch
from tests.model.helpers import close, float64, normal, random_params
from tests.model.reference import PAD

VOCAB = 12
SOURCE = jnp.array([[5, 3, 9, 4, 11], [7, 8, 2, PAD, PAD]])
TARGET = jnp.array([[1, 4, 6, 9], [1, 5, 8, 7]])
D_MODEL, D_HIDDEN, D_ALIGN = 7, 5, 4  # all widths differ, and odd widths are possible


def rnnsearch(sizes=(VOCAB, VOCAB), seed=0, **options):
    """Returns a small model and random variables."""
    options = dict(d_model=D_MODEL, d_hidden=D_HIDDEN, d_align=D_ALIGN, share_embeddings='none') | options
    model = RNNSearch(*sizes, **options)
    return model, {'params': random_params(model, SOURCE, TARGET, seed=seed)}


def shapes_of(model):
    return jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET)['params']


def number_of_parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(shapes_of(model)))


# A reference implementation of the equations in float64 NumPy, for one sentence and one word at a time. It shares only
# the layout of the parameters with the model.

def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference_gru(cell, state, x):
    """Returns the next state. `x` is W_z x, W_r x, W x, with the biases."""
    (x_z, x_r, x_s), (u_z, u_r) = np.split(x, 3), np.split(cell['gates']['kernel'], 2, axis=1)
    z, r = sigmoid(x_z + state @ u_z), sigmoid(x_r + state @ u_r)
    return (1 - z) * state + z * np.tanh(x_s + (r * state) @ cell['candidate']['kernel'])


def dense(params, x):
    return x @ params['kernel'] + params.get('bias', 0)


def reference_states(cell, words):
    state, states = np.zeros(D_HIDDEN), []
    for x in words:
        state = reference_gru(cell, state, dense(cell['input'], x))
        states.append(state)
    return states


def reference(params, source, target, readout, attention, share_embeddings):
    """Returns logits [target, vocab] and alignments [target, words] of one sentence."""
    target_table = params['target_embedding']['embedding']
    source_table = target_table if share_embeddings == 'all' else params['source_embedding']['embedding']
    output = params['output']['kernel'] if share_embeddings == 'none' else target_table.T
    words = source_table[source[source != PAD]] * np.sqrt(D_MODEL)
    forward = reference_states(params['encoder']['forward'], words)
    backward = reference_states(params['encoder']['backward'], words[::-1])[::-1]
    h = np.array([np.concatenate(pair) for pair in zip(forward, backward, strict=True)])
    layer = params['decoder']['layers_0']
    state, logits, alignments = np.tanh(dense(params['decoder']['initial'], backward[0])), [], []
    for token in target:
        y = target_table[token] * np.sqrt(D_MODEL)
        if attention:
            align = layer['cross_attention']
            energies = np.array([align['weight'][0] @ np.tanh(dense(align['query'], state) + dense(align['key'], h_j))
                                 for h_j in h])
            alpha = np.exp(energies) / np.exp(energies).sum()
            context = sum(a * h_j for a, h_j in zip(alpha, h, strict=True))
            alignments.append(alpha)
        else:
            context = np.concatenate([forward[-1], backward[0]])
        state = reference_gru(layer['cell'], state, dense(layer['cell']['input'], y) + dense(layer['context'], context))
        t = dense(params['hidden'], np.concatenate([state, y, context]))
        if readout == 'maxout':
            t = np.array([max(t[j], t[j + D_MODEL]) for j in range(D_MODEL)])
        logits.append(t @ output)
    return np.array(logits), np.array(alignments)


# The forward pass

@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('readout, attention, share_embeddings, seed', [
    ('maxout', True, 'none', 0), ('linear', True, 'all', 1), ('maxout', False, 'target', 2)])
def test_forward_pass_and_alignments_are_the_reference(readout, attention, share_embeddings, seed):
    sizes = (VOCAB, VOCAB) if share_embeddings == 'all' else (VOCAB, VOCAB + 3)
    options = {'readout': readout, 'attention': attention, 'share_embeddings': share_embeddings}
    model, variables = rnnsearch(sizes, seed, **options)
    logits, collections = jax.jit(functools.partial(model.apply, mutable=['attention']))(variables, SOURCE, TARGET)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 4, sizes[1])
    params = float64(variables['params'])
    for b in range(2):
        expected, alignments = reference(params, np.asarray(SOURCE[b]), np.asarray(TARGET[b]), **options)
        close(logits[b], expected)
        if attention:
            weights, = collections['attention']['decoder']['layers_0']['cross_attention']['weights']
            close(weights[b, 0, :, :alignments.shape[1]], alignments)
    assert attention or not collections


@pytest.mark.slow
def test_alignments_are_distributions_over_the_words():
    model, variables = rnnsearch()
    logits, collections = model.apply(variables, SOURCE, TARGET, mutable=['attention'])
    assert jax.tree.map(jnp.shape, collections) == {
        'attention': {'decoder': {'layers_0': {'cross_attention': {'weights': ((2, 1, 4, 5),)}}}}}
    weights, = jax.tree.leaves(collections)
    close(weights.sum(axis=-1), np.ones((2, 1, 4)))
    assert (weights[1, :, :, 3:] == 0).all() and (weights[1, :, :, :3] > 0).all()
    close(model.apply(variables, SOURCE, TARGET), logits)


@pytest.mark.slow
def test_initial_variables():
    model, _ = rnnsearch()
    variables = jax.jit(model.init)(jax.random.key(0), SOURCE, TARGET)
    assert set(variables) == {'params'}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))
    _, collections = model.apply(variables, SOURCE, TARGET, mutable=['attention'])
    weights, = jax.tree.leaves(collections)
    close(weights[0], np.full((1, 4, 5), 1 / 5))  # initially, all words have the same weight


def test_recurrent_matrices_begin_orthogonal():
    params = nn.unbox(GRUCell(7).init(jax.random.key(0), normal(0, 2, 7), normal(0, 2, 21)))['params']
    for block in *np.split(params['gates']['kernel'], 2, axis=1), params['candidate']['kernel']:
        close(block @ block.T, np.eye(7))


@pytest.mark.slow
@pytest.mark.parametrize('readout', READOUTS)
def test_tied_embeddings_save_their_parameters(readout):
    none, target, everything = (number_of_parameters(rnnsearch(share_embeddings=share, readout=readout)[0])
                                for share in reversed(SHARING))
    assert none - target == target - everything == VOCAB * D_MODEL


def test_parameters_are_counted_by_hand():
    h, a, d = D_HIDDEN, D_ALIGN, D_MODEL
    gru = 3 * (d * h + h + h * h)
    decoder = (h * h + h) + gru + 2 * h * 3 * h + (h * a + 2 * h * a + a + a)
    readout = (h + d + 2 * h) * 2 * d + 2 * d
    assert number_of_parameters(rnnsearch()[0]) == 3 * VOCAB * d + 2 * gru + decoder + readout


def test_width_of_the_alignment_is_d_hidden_unless_given():
    weight = nn.unbox(shapes_of(rnnsearch(d_align=0)[0]))['decoder']['layers_0']['cross_attention']['weight']
    assert weight.shape == (1, D_HIDDEN)


# Visibility

@pytest.mark.slow
@pytest.mark.parametrize('attention', [True, False])
def test_padding_changes_nothing(attention):
    model, variables = rnnsearch(attention=attention)
    padded = jnp.pad(SOURCE, ((0, 0), (0, 2)))
    states = model.apply(variables, padded, method='encode').states
    logits = model.apply(variables, padded, jnp.pad(TARGET, ((0, 0), (0, 1))))[:, :4]
    for sentence, length in enumerate([5, 3]):
        alone = SOURCE[sentence:sentence + 1, :length]
        close(states[sentence, :length], model.apply(variables, alone, method='encode').states[0])
        close(logits[sentence], model.apply(variables, alone, TARGET[sentence:sentence + 1])[0])


def test_logits_depend_on_their_own_and_earlier_tokens_and_on_all_words():
    """Uses gradients with respect to the tables. No token occurs twice, so a row of the table is a position."""
    model, variables = rnnsearch()
    source, target, mix = SOURCE[1:], TARGET[1:], normal(7, VOCAB)

    @jax.jit
    def influence(tables):
        params = variables['params'] | {name: {'embedding': table} for name, table in tables.items()}
        return model.apply({'params': params}, source, target)[0] @ mix

    names = ['source_embedding', 'target_embedding']
    jacobians = jax.jacrev(influence)({name: variables['params'][name]['embedding'] for name in names})
    of_source, of_target = (jnp.linalg.norm(jacobians[name], axis=-1) for name in names)
    of_target = of_target[:, target[0]]
    assert (of_target[~np.tri(4, dtype=bool)] == 0).all() and (of_target[np.tri(4, dtype=bool)] > 1e-6).all()
    assert (of_source[:, PAD] == 0).all() and (of_source[:, source[0, :3]] > 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize('row, last', [(0, 4), (1, 2)])
@pytest.mark.parametrize('attention', [True, False])
def test_without_attention_only_the_ends_of_the_sentence_reach_the_decoder(attention, row, last):
    """The ends of the words, and not of the padding, so that an edit of the last word's state has an effect."""
    model, variables = rnnsearch(attention=attention)
    memory = model.apply(variables, SOURCE[row:][:1], method='encode')

    def logits(states):
        cache = model.apply(variables, Memory(states, memory.visible), 1, 1, method='init_cache')
        return model.apply(variables, TARGET[:1, :1], cache, method='decode_step')[0]

    before, noise = logits(memory.states), normal(3, *memory.states.shape)
    ends = jnp.zeros(noise.shape, bool).at[:, last, :D_HIDDEN].set(True).at[:, 0, D_HIDDEN:].set(True)
    between = logits(jnp.where(ends, memory.states, noise))
    assert (not np.allclose(between, before)) if attention else (between == before).all()
    for end in (0, last, slice(0, D_HIDDEN)), (0, 0, slice(D_HIDDEN, None)):
        assert not np.allclose(logits(memory.states.at[end].add(0.5)), before)


@pytest.mark.slow
def test_empty_sentences_have_finite_logits_and_every_parameter_a_gradient():
    model, variables = rnnsearch()

    @jax.jit
    @jax.grad
    def gradient(variables):
        logits = model.apply(variables, SOURCE.at[1].set(PAD), TARGET)
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probs, jnp.roll(TARGET, -1, axis=1)[..., None], axis=-1).mean()

    for leaf in jax.tree.leaves(gradient(variables)):
        assert np.isfinite(leaf).all() and (leaf != 0).any()


# Decoding with a cache

@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('attention', [True, False])
def test_decoding_step_by_step_is_teacher_forcing_also_when_reordered(attention):
    model, variables = rnnsearch(attention=attention)
    step = jax.jit(functools.partial(model.apply, method='decode_step'))
    tokens = np.stack([TARGET, TARGET[:, ::-1], np.full((2, 4), 3)], axis=1)  # [batch, beam, target]
    memory = model.apply(variables, SOURCE, method='encode')
    cache = model.apply(variables, memory, 3, 4, method='init_cache')
    assert cache.state.shape == (2, 3, D_HIDDEN) and cache.position == 0
    assert all(leaf.shape[0] == 2 and 3 not in leaf.shape[1:] for leaf in jax.tree.leaves(cache.memory))
    logits = []
    for t, order in enumerate(np.array([[0, 1, 2], [2, 2, 0], [1, 0, 0], [0, 2, 1]])):
        tokens[:, :, :t] = tokens[:, order, :t]  # a hypothesis has the past of its parent
        logits = [past[:, order] for past in logits]
        cache = cache.replace(state=jax.tree.map(lambda leaf, order=order: leaf[:, order], cache.state))
        new, cache = step(variables, jnp.asarray(tokens[:, :, t]), cache)
        assert new.shape == (2, 3, VOCAB) and new.dtype == jnp.float32
        logits.append(new)
    assert cache.position == 4
    for hypothesis in range(3):
        close(jnp.stack(logits, axis=2)[:, hypothesis],
              model.apply(variables, SOURCE, jnp.asarray(tokens[:, hypothesis])), atol=1e-5)


# Precision, dropout, errors

@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
    model, variables = rnnsearch()
    half, half_variables = rnnsearch(dtype=jnp.bfloat16)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(half_variables))
    logits, expected = (jax.jit(module.apply)(variables, SOURCE, TARGET) for module in (half, model))
    assert logits.dtype == jnp.float32
    close(logits, expected, atol=0.1)
    assert not np.allclose(logits, expected, atol=1e-5)


@pytest.mark.slow
def test_dropout():
    model, variables = rnnsearch(dropout=0.5)
    dropped = model.apply(variables, SOURCE, TARGET, deterministic=False, rngs={'dropout': jax.random.key(0)})
    expected = model.apply(variables, SOURCE, TARGET)
    assert not np.allclose(dropped, expected)
    np.testing.assert_array_equal(expected, rnnsearch()[0].apply(variables, SOURCE, TARGET))


def test_a_length_has_no_limit():
    assert rnnsearch()[0].length_limit is None


@pytest.mark.parametrize('options, message', [
    ({'readout': 'mean'}, "readout='mean' must be one of maxout, linear"),
    ({'share_embeddings': 'some'}, "share_embeddings='some' must be one of all, target, none"),
    ({'share_embeddings': 'all', 'sizes': (VOCAB, VOCAB + 1)}, 'needs one vocabulary.* 12 pieces .* 13')])
def test_options_that_do_not_fit_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        rnnsearch(**options)
