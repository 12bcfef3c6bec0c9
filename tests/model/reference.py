"""A reference implementation of the encoder-decoder Transformer, from the equations of the paper, in float64 NumPy.

It computes one sentence, one head and one query at a time. It imports nothing from the project, and shares only the
layout of the parameter tree.
"""

import math

import numpy as np

PAD = 0
LAYER_NORM_EPSILON = 1e-6


def attention_weights(query, key, mask=None):
    """Returns softmax(Q K' / sqrt(d_k)) of one head: [target, d_k], [source, d_k] -> [target, source].

    `mask` [target, source] is True where a query sees a key; a query that sees no key has weights 0.
    """
    weights = np.zeros((len(query), len(key)))
    for t, q in enumerate(query):
        seen = np.flatnonzero(mask[t]) if mask is not None else np.arange(len(key))
        if seen.size:
            scores = np.array([q @ key[s] for s in seen]) / np.sqrt(len(q))
            exponentials = np.exp(scores - scores.max())
            weights[t, seen] = exponentials / exponentials.sum()
    return weights


def attention(query, key, value, mask=None):
    return attention_weights(query, key, mask) @ value


def heads(params, inputs, memory):
    """Yields the queries, keys and values of each head; heads of one group have the same keys and values."""
    def project(name, x, head):
        bias = params[name]['bias'][head] if 'bias' in params[name] else 0
        return x @ params[name]['kernel'][:, head] + bias

    count, groups = params['query']['kernel'].shape[1], params['key']['kernel'].shape[1]
    for h in range(count):
        group = h // (count // groups)
        yield project('query', inputs, h), project('key', memory, group), project('value', memory, group)


def multi_head_attention(params, inputs, memory, mask=None):
    concatenated = np.concatenate([attention(*head, mask) for head in heads(params, inputs, memory)], axis=-1)
    kernel = params['output']['kernel']  # [heads, d_v, d_model]
    return concatenated @ kernel.reshape(-1, kernel.shape[-1]) + params['output'].get('bias', 0)


def layer_norm(params, x, epsilon=LAYER_NORM_EPSILON):
    """Computes layer norm; RMSNorm if the parameters have no bias."""
    if 'bias' not in params:
        return params['scale'] * x / np.sqrt((x ** 2).mean(axis=-1, keepdims=True) + epsilon)
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return params['scale'] * (x - mean) / np.sqrt(variance + epsilon) + params['bias']


ACTIVATIONS = {
    'relu': lambda x: np.maximum(0, x),
    'gelu': lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3))),
    'gelu_exact': lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    'silu': lambda x: x / (1 + np.exp(-x)),
}


def feed_forward(params, x, activation='relu'):
    """Computes the feed-forward sublayer; gated if the parameters have a gate."""
    def dense(name, x):
        return x @ params[name]['kernel'] + params[name].get('bias', 0)

    if 'gate' in params:
        return dense('outer', ACTIVATIONS[activation](dense('gate', x)) * dense('inner', x))
    return dense('outer', ACTIVATIONS[activation](dense('inner', x)))


def residual(params, x, sublayer, norm):
    if norm == 'post':
        return layer_norm(params['norm'], x + sublayer(x))
    return x + sublayer(layer_norm(params['norm'], x))


def encoder_block(params, x, mask=None, norm='post', activation='relu'):
    x = residual(params['self_attention_residual'], x,
                 lambda y: multi_head_attention(params['self_attention'], y, y, mask), norm)
    return residual(params['feed_forward_residual'], x,
                    lambda y: feed_forward(params['feed_forward'], y, activation), norm)


def decoder_block(params, x, memory, mask=None, memory_mask=None, norm='post', activation='relu'):
    x = residual(params['self_attention_residual'], x,
                 lambda y: multi_head_attention(params['self_attention'], y, y, mask), norm)
    x = residual(params['cross_attention_residual'], x,
                 lambda y: multi_head_attention(params['cross_attention'], y, memory, memory_mask), norm)
    return residual(params['feed_forward_residual'], x,
                    lambda y: feed_forward(params['feed_forward'], y, activation), norm)


def stack(params, block, x, *args, norm='post', activation='relu'):
    """Computes all blocks of the encoder or the decoder, and the final norm of pre-norm."""
    for i in range(sum(name.startswith('layers_') for name in params)):
        x = block(params[f'layers_{i}'], x, *args, norm=norm, activation=activation)
    return layer_norm(params['final_norm'], x) if norm == 'pre' else x


def sinusoids(length, d_model):
    encoding = np.zeros((length, d_model))
    for i in range(length):
        for j in range(d_model // 2):
            encoding[i, 2 * j] = np.sin(i / 10000 ** (2 * j / d_model))
            encoding[i, 2 * j + 1] = np.cos(i / 10000 ** (2 * j / d_model))
    return encoding


def embed(table, tokens, position, positions_params, scale=True):
    length, d_model = len(tokens), table.shape[1]
    encoding = {'sinusoidal': lambda: sinusoids(length, d_model), 'none': lambda: 0,
                'learned': lambda: positions_params['table'][:length]}[position]()
    return table[tokens] * (np.sqrt(d_model) if scale else 1) + encoding


def transformer(params, source, target, *, norm='post', position='sinusoidal', share_embeddings='all',
                activation='relu', scale_embeddings=True, window=10 ** 6):
    """Returns logits [batch, target, vocab] of token ids `source` [batch, source] and `target` [batch, target]."""
    target_table = params['target_embedding']['embedding']
    source_table = target_table if share_embeddings == 'all' else params['source_embedding']['embedding']
    output = params['output']['kernel'] if share_embeddings == 'none' else target_table.T

    def logits(source, target):
        source_visible = np.array([[abs(i - j) < window and token != PAD for j, token in enumerate(source)]
                                   for i in range(len(source))])
        look_ahead = np.array([[j <= i < j + window and token != PAD for j, token in enumerate(target)]
                               for i in range(len(target))])
        memory_visible = np.tile(source != PAD, (len(target), 1))
        memory = stack(params['encoder'], encoder_block,
                       embed(source_table, source, position, params.get('source_position'), scale_embeddings),
                       source_visible, norm=norm, activation=activation)
        states = stack(params['decoder'], decoder_block,
                       embed(target_table, target, position, params.get('target_position'), scale_embeddings),
                       memory, look_ahead, memory_visible, norm=norm, activation=activation)
        return states @ output + params.get('logits_bias', 0)

    return np.stack([logits(*pair) for pair in zip(source, target, strict=True)])
