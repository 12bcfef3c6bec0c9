"""Options of later models: norms, gates, grouped queries, windows, biases, angles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import fused_attention
from model.attention import SCORES, MultiHeadAttention, attention, chunked_attention
from model.blocks import (
    ACTIVATIONS,
    BlockConfig,
    FeedForward,
    SelfAttentionStack,
    layer_norm,
    multi_head_attention,
)
from model.language_model import LanguageModel
from model.positional import SCHEMES, Rotary, rotate
from model.relation import Relation
from tests.model import reference
from tests.model.helpers import close, float64, normal, random_params
from tests.model.small_transformer import SOURCE, TARGET, tiny, transformer
from tests.model.test_transformer_decoding import HYPOTHESES, decode, in_order

# Options of the Llama family and of similar models. All of them differ from the paper.
MODERN = {'norm': 'pre', 'norm_function': 'rms_norm', 'feed_forward': 'gated', 'activation': 'silu', 'num_heads': 4,
          'num_key_value_heads': 2, 'window': 3, 'attention_bias': 'all', 'scale_embeddings': False,
          'output_bias': True}


@pytest.mark.parametrize('norm_function', ['layer_norm', 'rms_norm'])
@pytest.mark.parametrize('epsilon', [1e-6, 0.3])
def test_norms_are_the_reference(norm_function, epsilon):
    module, x = layer_norm(tiny(norm_function=norm_function, norm_epsilon=epsilon)), normal(0, 2, 5, 8) * 2 + 1
    params = random_params(module, x)
    assert set(params) == ({'scale', 'bias'} if norm_function == 'layer_norm' else {'scale'})
    close(module.apply({'params': params}, x), reference.layer_norm(float64(params), float64(x), epsilon))


@pytest.mark.parametrize('activation', ACTIVATIONS)
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('kind', ['plain', 'gated'])
def test_feed_forward_is_the_reference(kind, bias, activation):
    module = FeedForward(tiny(feed_forward=kind, feed_forward_bias=bias, activation=activation))
    x = normal(0, 2, 5, 8)
    params = random_params(module, x)
    assert set(params) == {'inner', 'outer'} | ({'gate'} if kind == 'gated' else set())
    assert all(('bias' in each) == bias for each in params.values())
    close(module.apply({'params': params}, x), reference.feed_forward(float64(params), float64(x), activation))


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize('groups', [1, 2, 6])
@pytest.mark.parametrize('bias', ['none', 'qkv', 'all'])
def test_grouped_queries_are_the_reference(groups, bias):
    layer = MultiHeadAttention(6, 8, 4, 5, num_key_value_heads=groups, bias=bias)
    inputs, memory = normal(1, 2, 4, 7), normal(2, 2, 5, 9)
    params = random_params(layer, inputs, memory)
    assert params['key']['kernel'].shape == (9, groups, 4) and params['value']['kernel'].shape == (9, groups, 5)
    assert {name for name, each in params.items() if 'bias' in each} == {
        'none': set(), 'qkv': {'query', 'key', 'value'}, 'all': {'query', 'key', 'value', 'output'}}[bias]
    visible = np.array([[True] * 5, [True, False, True, True, False]])
    found = layer.apply({'params': params}, inputs, memory, Relation(visible=jnp.asarray(visible)))
    expected = [reference.multi_head_attention(float64(params), *float64(row[:2]), np.tile(row[2], (4, 1)))
                for row in zip(inputs, memory, visible, strict=True)]
    close(found, np.stack(expected))


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize('kernel', ['plain', 'chunked', 'fused'])
@pytest.mark.parametrize('score', SCORES)
def test_grouped_queries_are_heads_with_the_same_keys_and_values(score, kernel):
    if kernel == 'fused' and score not in ('scaled_dot', 'dot'):
        pytest.skip('not among the fused scores')
    grouped, whole = (MultiHeadAttention(4, 8, 6, 6, score=score, rotary=Rotary(), kernel=kernel, bias='qkv',
                                         num_key_value_heads=groups) for groups in (2, 0))
    x = normal(0, 2, 7, 8)
    relation = Relation.within(jnp.arange(7)[None], causal=True).replace(window=3)
    params = random_params(grouped, x, x, relation)
    repeated = params | {name: jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, axis=-2), params[name])
                         for name in ('key', 'value')}
    close(grouped.apply({'params': params}, x, x, relation), whole.apply({'params': repeated}, x, x, relation))


def test_heads_of_keys_that_do_not_divide_those_of_queries_are_an_error():
    with pytest.raises(ValueError, match='num_key_value_heads=4 must divide num_heads=6'):
        MultiHeadAttention(6, 8, 4, 4, num_key_value_heads=4).init(jax.random.key(0), *[jnp.ones((1, 2, 8))] * 2)


@pytest.mark.parametrize('to_itself', [True, False])
def test_the_options_of_a_block_reach_its_attention(to_itself):
    config = tiny(position='rotary', rotary_base=50.0, rotary_scaling='llama3', rotary_factor=4.0,
                  rotary_original_length=16, score='general', num_key_value_heads=1, attention_bias='all',
                  attention_kernel='chunked', attention_dropout=0.3, dtype=jnp.bfloat16)
    expected = {'num_heads': 2, 'd_model': 8, 'd_k': 10, 'd_v': 5, 'score': 'general', 'kernel': 'chunked',
                'dropout': 0.3, 'num_key_value_heads': 1, 'bias': 'all', 'dtype': jnp.bfloat16,
                'rotary': Rotary(50.0, 'llama3', 4.0, 16) if to_itself else None}
    module = multi_head_attention(config, to_itself)
    assert {name: getattr(module, name) for name in expected} == expected


def stack(**options):
    return SelfAttentionStack(tiny(**options), 1).init(jax.random.key(0), jnp.ones((1, 2, 8)))


@pytest.mark.parametrize('make, message', [
    (lambda: stack(attention_kernel='flash'), "kernel='flash' must be one of auto, plain, chunked, fused"),
    (lambda: stack(norm='Pre'), "norm='Pre' must be one of post, pre"),
    (lambda: stack(feed_forward='gate'), "feed_forward='gate' must be one of plain, gated"),
    (lambda: stack(activation='swish'), "activation='swish' must be one of relu, gelu, gelu_exact, silu"),
    (lambda: stack(norm_function='rmsnorm'), "norm_function='rmsnorm' must be one of layer_norm, rms_norm"),
    (lambda: stack(remat_keep='dots'), "remat_keep='dots' must be one of nothing, products"),
    (lambda: stack(position='alibbi'), f"position='alibbi' must be one of {', '.join(SCHEMES)}"),
    (lambda: Rotary(scaling='llama'), "scaling='llama' must be one of none, linear, llama3")])
def test_a_misspelled_name_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


RELATIONS = {
    'causal window': Relation.within(jnp.arange(7)[None], causal=True).replace(window=3),
    'window': Relation.within(jnp.arange(7)[None]).replace(window=2),
    'packed': Relation.within(jnp.arange(7)[None], segments=jnp.array([[1, 1, 2, 2, 2, 2, 0]] * 2),
                              causal=True).replace(window=2),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize('relation', RELATIONS.values(), ids=RELATIONS)
@pytest.mark.parametrize('groups', [1, 4])
def test_every_kernel_has_windows_and_groups(relation, groups):
    inputs = [normal(0, 2, 7, 4, 6), normal(1, 2, 7, groups, 6), normal(2, 2, 7, groups, 6)]

    def total(kernel, *inputs):
        return jnp.sum(jnp.sin(kernel(*inputs)))

    def of(kernel):
        return jax.jit(jax.value_and_grad(functools.partial(total, kernel), argnums=(0, 1, 2)))(*inputs)

    expected = of(lambda *inputs: attention(*inputs, relation)[0])
    for kernel in (lambda *inputs: chunked_attention(*inputs, relation, chunk=3),
                   lambda *inputs: fused_attention(*inputs, relation.whole_mask())):
        jax.tree.map(close, of(kernel), expected)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('window', [1, 3, 9])
def test_a_window_is_its_definition(window, causal):
    positions = np.array([[0, 1, 2, 5, 6, 8], [3, 4, 5, 6, 7, 8]])
    mask = Relation.within(jnp.asarray(positions), causal=causal).replace(window=window).whole_mask()
    for b, t, s in np.ndindex(2, 6, 6):
        offset = positions[b, t] - positions[b, s]
        assert mask[b, 0, t, s] == (abs(offset) < window and (offset >= 0 or not causal))


def test_a_window_is_as_wide_as_the_layers_make_it():
    model = LanguageModel(tiny(position='none', window=2, norm='pre'), 2, 12)
    variables, apply = {'params': random_params(model, TARGET)}, jax.jit(model.apply)
    before, after = (apply(variables, tokens) for tokens in (TARGET, TARGET.at[:, 1].set(11)))
    assert np.abs(before - after)[:, 1:4].max(axis=-1).min() > 1e-6  # 2 layers see one position back each
    close(before[:, 4:], after[:, 4:])


# Rotary angles

@pytest.mark.parametrize('scaling', ['none', 'linear', 'llama3'])
def test_angles_are_their_definition(scaling):
    x, position, rotary = float64(normal(0, 1, 1, 1, 16)), 37, Rotary(5000.0, scaling, 8.0, 64)
    expected = np.empty(16)
    for j in range(8):
        speed = 5000.0 ** (-2 * j / 16)  # radians per position
        turns = 64 * speed / (2 * np.pi)
        if scaling == 'linear' or scaling == 'llama3' and turns < 1:
            speed /= 8
        elif scaling == 'llama3' and turns < 4:
            share = (turns - 1) / 3
            speed = (1 - share) * speed / 8 + share * speed
        a, b = x[0, 0, 0, 2 * j:2 * j + 2]
        angle = position * speed
        expected[2 * j:2 * j + 2] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    close(rotate(jnp.float32(x), jnp.array([[position]]), rotary)[0, 0, 0], expected)


# Whole models

def test_a_whole_transformer_is_the_reference():
    model, variables = transformer(layers=1, decoder_layers=2, position='learned', **MODERN)
    params = variables['params']
    assert params['logits_bias'].shape == (12,)  # the reference computes biases only if they exist
    for name in 'self_attention', 'cross_attention':
        assert all('bias' in part for part in params['decoder']['layers_1'][name].values())
    target = TARGET.at[1, 4:].set(0)
    expected = reference.transformer(float64(params), np.asarray(SOURCE), np.asarray(target), norm='pre',
                                     position='learned', share_embeddings='none', activation='silu',
                                     scale_embeddings=False, window=3)
    close(jax.jit(model.apply)(variables, SOURCE, target), expected)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('options', [
    {'position': 'rotary', 'rotary_base': 50.0},
    {'position': 'relative', 'num_key_value_heads': 1, 'layers': 2}])
def test_decoding_step_by_step_is_teacher_forcing(options):
    model, variables = transformer(**{'layers': 1} | MODERN | options)
    logits = decode(model, variables, SOURCE, HYPOTHESES, in_order(3))
    whole = jax.jit(model.apply)
    for hypothesis in range(3):
        close(logits[:, hypothesis], whole(variables, SOURCE, HYPOTHESES[:, hypothesis]))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('score', ['scaled_dot', 'general', 'additive'])
def test_prompts_then_steps_equal_the_whole(score):
    options = {name: value for name, value in MODERN.items() if name in BlockConfig.__dataclass_fields__}
    config = tiny(position='rotary', rotary_scaling='llama3', rotary_factor=4.0, rotary_original_length=16, score=score,
                  **options)
    model = LanguageModel(config, 1, 11, tie_embeddings=False, scale_embeddings=False, output_bias=True)
    tokens = jnp.array([[4, 6, 9, 3, 10, 5, 7, 8], [5, 2, 8, 7, 4, 9, 3, 10]])
    variables = {'params': random_params(model, tokens)}
    whole, begins = jax.jit(model.apply)(variables, tokens), [5, 2]
    prompt = jnp.stack([jnp.where(jnp.arange(5) < begin, row[:5], 0)
                        for begin, row in zip(begins, tokens, strict=True)])
    memory = jax.jit(functools.partial(model.apply, method='encode'))(variables, prompt)
    cache = model.apply(variables, memory, 2, 3, method='init_cache')
    assert cache.past[0].key.shape == (2, 2, 10, 11)  # batch, groups, d_k, 5 + 2 * 3 keys
    step = jax.jit(functools.partial(model.apply, method='decode_step'))
    for number in range(3):
        token = jnp.stack([row[begin + number] for begin, row in zip(begins, tokens, strict=True)])
        logits, cache = step(variables, jnp.stack([token, token], axis=1), cache)
        for row, begin in enumerate(begins):
            for beam in range(2):
                close(logits[row, beam], whole[row, begin + number])


def test_the_cache_of_an_encoder_decoder_holds_each_group_once():
    model, variables = transformer(**MODERN)

    def empty(source):
        return model.apply(variables, model.apply(variables, source, method='encode'), 3, 6, method='init_cache')

    cache = jax.eval_shape(empty, SOURCE)
    assert cache.past[0].key.shape == (2, 2, 10, 18) and cache.past[0].value.shape == (2, 2, 18, 5)
    assert cache.memory['layers'][0].key.shape == (2, 2, 10, 5)
