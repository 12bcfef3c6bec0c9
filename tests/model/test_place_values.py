"""The values at all places of every kind of model equal those of an independent forward pass in float64 NumPy."""

import jax
import numpy as np
import pytest

from model.patches import PatchTransformer
from model.places import observing
from tests.model import reference
from tests.model.helpers import float64, random_params
from tests.model.reference import layer_norm
from tests.model.small_transformer import SOURCE, TARGET, tiny
from tests.model.small_transformer import transformer as small
from tests.model.test_places import IMAGES, language
from tests.model.test_recurrent import D_MODEL, dense, reference_gru, reference_states, rnnsearch


def softmax(scores, mask):
    weights = np.where(mask, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    return weights / weights.sum(axis=-1, keepdims=True)


def rotated(x):
    """Turns pairs of numbers, as complex numbers: the pair j at position i by i / 10000^(2j/width)."""
    speeds = 10000.0 ** -(np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * np.arange(len(x))[:, None] * speeds)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def alibi(length):
    """The bias on the scores of two heads, whose slopes are 2^-4 and 2^-8."""
    distance = np.abs(np.subtract.outer(np.arange(length), np.arange(length)))
    return np.stack([-2.0 ** -4 * distance, -2.0 ** -8 * distance])


def block(params, name, x, memory=None, *, mask, norm='post', turn=lambda x: x, bias=0.0):
    """Returns the output of a block and the values at its places, for one sentence."""
    values = {}

    def attend(sublayer, x, memory, mask, turn, bias):
        parts = [np.stack(part) for part in zip(*reference.heads(params[sublayer], x, memory), strict=True)]
        queries, keys = (np.stack([turn(head) for head in part]) for part in parts[:2])
        scores = np.einsum('htd,hsd->hts', queries, keys) / np.sqrt(queries.shape[-1]) + bias
        weights = softmax(scores, mask)
        heads = np.einsum('hts,hsd->thd', weights, parts[2])
        group = len(keys) // params[sublayer]['key']['kernel'].shape[1]  # heads with the same keys and values
        values.update({f'{name}/{sublayer}/{word}': value for word, value in {
            'queries': queries.swapaxes(0, 1), 'keys': keys[::group].swapaxes(0, 1), 'scores': scores,
            'values': parts[2][::group].swapaxes(0, 1), 'weights': weights, 'heads': heads}.items()})
        return np.einsum('thv,hvd->td', heads, params[sublayer]['output']['kernel'])

    def residual(sublayer, x, function):
        scale = params[f'{sublayer}_residual']['norm']
        output = function(layer_norm(scale, x) if norm == 'pre' else x)
        x = x + output if norm == 'pre' else layer_norm(scale, x + output)
        values.update({f'{name}/{sublayer}': output, f'{name}/{sublayer}_residual': x})
        return x

    def feed_forward(x):
        hidden = np.maximum(0, dense(params['feed_forward']['inner'], x))
        values[f'{name}/feed_forward/hidden'] = hidden
        return dense(params['feed_forward']['outer'], hidden)

    x = residual('self_attention', x, lambda x: attend('self_attention', x, x, mask, turn, bias))
    if memory is not None:
        x = residual('cross_attention', x, lambda x: attend('cross_attention', x, memory, True, lambda x: x, 0.0))
    x = residual('feed_forward', x, feed_forward)
    return x, values | {name: x}


def stack(params, name, x, memory=None, **options):
    """Returns the output of a stack of blocks and the values at its places."""
    values = {f'{name}/input': x}
    for layer in range(sum(part.startswith('layers_') for part in params)):
        x, more = block(params[f'layers_{layer}'], f'{name}/layers_{layer}', x, memory, **options)
        values |= more
    x = layer_norm(params['final_norm'], x) if options.get('norm') == 'pre' else x
    return x, values | {name: x}


def t5_bias(table, length, causal):
    """The bias [head, query, key] at distances below 8: bucket n for a key n tokens before, 16 + n for n after."""
    offset = np.subtract.outer(np.arange(length), np.arange(length))
    return np.moveaxis(table[np.maximum(offset, 0) if causal else np.where(offset < 0, 16 - offset, offset)], -1, 0)


def transformer(position='sinusoidal', norm='post', layers=2):
    module, variables = small(position=position, norm=norm, layers=layers)
    params, values, memory = float64(variables['params']), {}, None
    for side, tokens, name in ('source', SOURCE[0], 'encoder'), ('target', TARGET[0], 'decoder'):
        embedded = params[f'{side}_embedding']['embedding'][np.asarray(tokens)]
        length, causal = len(tokens), side == 'target'
        table = params.get(f'{side}_position', {'table': np.zeros((length, 8))})['table'][:length]  # learned positions
        x = embedded * np.sqrt(8) + (reference.sinusoids(length, 8) if position == 'sinusoidal' else table)
        memory, more = stack(params[name], name, x, memory, mask=np.tri(length, dtype=bool) if causal else True,
                             norm=norm, bias=t5_bias(params[name]['relative']['table'], length, causal)
                             if position == 'relative' else 0.0)
        values |= more | {f'{side}_embedding': embedded}
    return module, variables, (SOURCE, TARGET), values


def learned_positions():
    return transformer('learned', layers=1)


def pre_norm_with_t5_positions():
    return transformer('relative', 'pre', layers=1)


def language_model():
    """A model with pre-norm, rotary positions and one head of keys and values for two heads of queries."""
    module, variables, inputs = language()
    params = float64(variables['params'])
    embedded = params['embedding']['embedding'][np.asarray(TARGET[0])]
    mask = np.tri(len(TARGET[0]), dtype=bool)
    _, values = stack(params['encoder'], 'encoder', embedded * np.sqrt(8), mask=mask, norm='pre', turn=rotated)
    return module, variables, inputs, values | {'embedding': embedded}


def images():
    """A model with a class token and ALiBi."""
    module = PatchTransformer(tiny(position='alibi'), 1, 2, 3)
    variables = {'params': random_params(module, IMAGES)}
    params, image = float64(variables['params']), np.asarray(IMAGES[0], np.float64)
    patches = np.stack([image[row:row + 2, column:column + 2].ravel() for row in (0, 2) for column in (0, 2)])
    embedded = dense(params['embedding'], patches)
    x = np.concatenate([params['class_token'][0], embedded])
    states, values = stack(params['encoder'], 'encoder', x, mask=True, bias=alibi(5))
    return module, variables, (IMAGES,), values | {
        'embedding': embedded, 'pooled': states[0], 'head': dense(params['head'], states[0])}


def recurrent():
    module, variables = rnnsearch()
    params = float64(variables['params'])
    source, target = (params[f'{side}_embedding']['embedding'][np.asarray(tokens)]
                      for side, tokens in (('source', SOURCE[0]), ('target', TARGET[0])))
    words = source * np.sqrt(D_MODEL)
    forward = np.array(reference_states(params['encoder']['forward'], words))
    backward = np.array(reference_states(params['encoder']['backward'], words[::-1])[::-1])
    memory, layer = np.concatenate([forward, backward], axis=1), params['decoder']['layers_0']
    align, steps = layer['cross_attention'], []
    initial = state = np.tanh(dense(params['decoder']['initial'], backward[0]))
    for embedded in target * np.sqrt(D_MODEL):
        query = dense(align['query'], state)
        scores = np.tanh(query + dense(align['key'], memory)) @ align['weight'][0]
        weights = softmax(scores, True)
        context = weights @ memory
        state = reference_gru(layer['cell'], state,
                              dense(layer['cell']['input'], embedded) + dense(layer['context'], context))
        readout = dense(params['hidden'], np.concatenate([state, embedded, context])).reshape(2, -1).max(axis=0)
        steps.append((query, scores, weights, context, state, readout))
    query, scores, weights, context, state, readout = map(np.array, zip(*steps, strict=True))
    attention, cell = 'decoder/layers_0/cross_attention', 'decoder/layers_0/cell'
    return module, variables, (SOURCE, TARGET), {
        'source_embedding': source, 'encoder/forward': forward, 'encoder/backward': backward, 'encoder': memory,
        'target_embedding': target, 'decoder/initial': initial, cell: state, 'readout': readout,
        f'{attention}/queries': query[:, None], f'{attention}/scores': scores[None], f'{attention}/weights':
        weights[None], f'{attention}/heads': context[:, None], attention: context}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize('make', [transformer, learned_positions, pre_norm_with_t5_positions, language_model,
                                  images, recurrent])
def test_the_values_of_all_places_are_those_of_an_independent_forward_pass(make):
    module, variables, inputs, expected = make()
    _, captured = jax.jit(observing(module.apply, read=lambda name: True))(variables, *inputs)
    assert set(captured) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(captured[name][0], value, atol=1e-5, rtol=1e-5, err_msg=name)
