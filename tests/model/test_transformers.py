"""Llama, GPT-2 and Marian of transformers' own code, with random weights, as configs of ours; where it is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from configs.checks import check_config
from model.build import build_model
from tests.model.helpers import close

torch = pytest.importorskip('torch', reason='needs torch')
transformers = pytest.importorskip('transformers', reason='needs transformers')

VOCAB, D, HEADS, FF, LAYERS, LENGTH = 29, 24, 6, 20, 2, 9
D_K = D // HEADS
LANGUAGE = {'task': 'language_model', 'model.kind': 'language_model', 'eval.metric': 'loss'}
BLOCK = {'model.num_layers': LAYERS, 'model.d_model': D, 'model.d_ff': FF, 'model.num_heads': HEADS}


def model_of(options, **sizes):
    config = base.get_config()
    config.update_from_flattened_dict(BLOCK | options)
    check_config(config)
    return build_model(config.model, **sizes)


def randomised(peer):
    """With every parameter and buffer of its state random, as many libraries' biases begin with 0."""
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(value.shape, generator=generator) * 0.4 + name.endswith('norm.weight')
             for name, value in peer.state_dict().items()}
    peer.load_state_dict(state, strict=False)
    return peer.eval(), {name: value.numpy() for name, value in peer.state_dict().items()}


def dense(state, name, *shape):
    """A torch layer [out, in] as ours [in, out], its axes split to `shape`; with a bias if it has one."""
    found = {'kernel': state[f'{name}.weight'].T.reshape(shape or state[f'{name}.weight'].T.shape)}
    if f'{name}.bias' in state:
        found['bias'] = state[f'{name}.bias'].reshape(shape[1:] if len(shape) == 3 and shape[0] == D else -1)
    return found


def norm(state, name):
    bias = {'bias': state[f'{name}.bias']} if f'{name}.bias' in state else {}
    return {'norm': {'scale': state[f'{name}.weight']} | bias}


def tokens(rows=2):
    return np.random.default_rng(1).integers(3, VOCAB, (rows, LENGTH))


@pytest.mark.parametrize('groups, scaling', [
    (2, 'llama3'), pytest.param(1, 'linear', marks=pytest.mark.slow), pytest.param(6, 'none', marks=pytest.mark.slow)])
def test_llama(groups, scaling):
    rope = {'none': {'rope_type': 'default'}, 'linear': {'rope_type': 'linear', 'factor': 3.0}, 'llama3': {
        'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
        'original_max_position_embeddings': 32}}[scaling]
    bias = groups == 1
    peer, state = randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=FF, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=groups, head_dim=8, rms_norm_eps=1e-3, attention_bias=bias, mlp_bias=bias,
        rope_parameters={'rope_theta': 500.0} | rope)))
    scaled = {'model.rotary_scaling': scaling, 'model.rotary_factor': rope.get('factor', 1.0)}
    scaled |= {'model.rotary_original_length': 32} if scaling == 'llama3' else {}
    module = model_of(LANGUAGE | scaled | {
        'model.d_k': 8, 'model.d_v': 8, 'model.num_key_value_heads': groups, 'model.norm': 'pre',
        'model.norm_function': 'rms_norm', 'model.norm_epsilon': 1e-3, 'model.feed_forward': 'gated',
        'model.feed_forward_bias': bias, 'model.attention_bias': 'all' if bias else 'none', 'model.activation': 'silu',
        'model.position': 'rotary', 'model.rotary_base': 500.0, 'model.scale_embeddings': False,
        'model.tie_embeddings': False}, vocab_size=VOCAB)
    pairs = np.arange(8).reshape(2, 4).T.ravel()  # theirs turn (x_j, x_(j + d/2)), ours (x_2j, x_(2j+1))

    def attention(name):
        heads = {'query': ('q', HEADS), 'key': ('k', groups), 'value': ('v', groups)}
        found = {ours: dense(state, f'{name}.{theirs}_proj', D, count, 8) for ours, (theirs, count) in heads.items()}
        for each in ('query', 'key'):
            found[each] = {part: array[..., pairs] for part, array in found[each].items()}
        return found | {'output': dense(state, f'{name}.o_proj', HEADS, 8, D)}

    layers = {f'layers_{i}': {
        'self_attention': attention(f'model.layers.{i}.self_attn'),
        'self_attention_residual': norm(state, f'model.layers.{i}.input_layernorm'),
        'feed_forward_residual': norm(state, f'model.layers.{i}.post_attention_layernorm'),
        'feed_forward': {ours: dense(state, f'model.layers.{i}.mlp.{theirs}_proj')
                         for ours, theirs in {'inner': 'up', 'gate': 'gate', 'outer': 'down'}.items()},
    } for i in range(LAYERS)}
    params = {'embedding': {'embedding': state['model.embed_tokens.weight']},
              'encoder': layers | {'final_norm': norm(state, 'model.norm')['norm']},
              'output': {'kernel': state['lm_head.weight'].T}}
    same_logits(module, params, peer)


def test_gpt2():
    peer, state = randomised(transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=D, n_layer=LAYERS, n_head=HEADS, n_inner=FF,
        layer_norm_epsilon=1e-3)))
    module = model_of(LANGUAGE | {
        'data.context': LENGTH - 1, 'model.max_length': LENGTH, 'model.position': 'learned', 'model.norm': 'pre',
        'model.norm_epsilon': 1e-3, 'model.activation': 'gelu', 'model.attention_bias': 'all',
        'model.scale_embeddings': False}, vocab_size=VOCAB)
    # Its matrices are [in, out], as ours.
    state |= {name: value.T for name, value in state.items() if '.h.' in name and value.ndim == 2}

    def layer(name):
        for part, each in zip(('weight', 'bias'), (state[f'{name}.attn.c_attn.weight'],
                                                   state[f'{name}.attn.c_attn.bias']), strict=True):
            for letter, rows in zip('qkv', np.split(each, 3), strict=True):
                state[f'{name}.{letter}.{part}'] = rows
        return {'self_attention': {ours: dense(state, f'{name}.{ours[0]}', D, HEADS, D_K)
                                   for ours in ('query', 'key', 'value')}
                | {'output': dense(state, f'{name}.attn.c_proj', HEADS, D_K, D)},
                'self_attention_residual': norm(state, f'{name}.ln_1'),
                'feed_forward': {'inner': dense(state, f'{name}.mlp.c_fc'),
                                 'outer': dense(state, f'{name}.mlp.c_proj')},
                'feed_forward_residual': norm(state, f'{name}.ln_2')}

    params = {'embedding': {'embedding': state['transformer.wte.weight']},
              'position': {'table': state['transformer.wpe.weight']},
              'encoder': {f'layers_{i}': layer(f'transformer.h.{i}') for i in range(LAYERS)}
              | {'final_norm': norm(state, 'transformer.ln_f')['norm']}}
    same_logits(module, params, peer)


def same_logits(module, params, peer):
    with torch.no_grad():
        expected = peer(torch.tensor(tokens())).logits
    close(jax.jit(module.apply)({'params': params}, jnp.asarray(tokens())), expected, atol=1e-4)


@pytest.mark.parametrize('scaled', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_marian(scaled):
    sizes = {f'{stack}_{name}': value for stack in ('encoder', 'decoder') for name, value in (
        ('layers', LAYERS), ('attention_heads', HEADS), ('ffn_dim', FF))}
    peer, state = randomised(transformers.MarianMTModel(transformers.MarianConfig(
        vocab_size=VOCAB, d_model=D, max_position_embeddings=32, activation_function='swish', scale_embedding=scaled,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, **sizes)))
    module = model_of({'model.norm_epsilon': 1e-5, 'model.activation': 'silu', 'model.attention_bias': 'all',
                       'model.scale_embeddings': scaled, 'model.output_bias': True},
                      source_vocab_size=VOCAB, target_vocab_size=VOCAB)
    # Its sinusoids have all sines, then all cosines: the stream's width in another order. Norms and products along it
    # do not mind the order.
    order = np.arange(D).reshape(2, D // 2).T.ravel()
    table = peer.model.encoder.embed_positions
    with torch.no_grad():
        table.weight.copy_(table.create_weight())
        peer.model.decoder.embed_positions.weight.copy_(table.create_weight())

    def attention(name):
        found = {ours: dense(state, f'{name}.{ours[0]}_proj', D, HEADS, D_K) for ours in ('query', 'key', 'value')}
        for each in found.values():
            each['kernel'] = each['kernel'][order]
        output = dense(state, f'{name}.out_proj', HEADS, D_K, D)
        return found | {'output': {part: array[..., order] for part, array in output.items()}}

    def residual(name):
        return {'norm': {part: array[order] for part, array in norm(state, name)['norm'].items()}}

    def layer(name, sublayers):
        inner, outer = dense(state, f'{name}.fc1'), dense(state, f'{name}.fc2')
        found = {'feed_forward': {'inner': inner | {'kernel': inner['kernel'][order]},
                                  'outer': {part: array[..., order] for part, array in outer.items()}},
                 'feed_forward_residual': residual(f'{name}.final_layer_norm')}
        for ours, theirs in sublayers.items():
            found |= {ours: attention(f'{name}.{theirs}'), f'{ours}_residual': residual(f'{name}.{theirs}_layer_norm')}
        return found

    sublayers = {'self_attention': 'self_attn', 'cross_attention': 'encoder_attn'}
    params = {stack: {f'layers_{i}': layer(f'model.{stack}.layers.{i}', dict(list(sublayers.items())[:count]))
                      for i in range(LAYERS)} for stack, count in (('encoder', 1), ('decoder', 2))}
    params |= {'target_embedding': {'embedding': state['model.shared.weight'][:, order]},
               'logits_bias': state['final_logits_bias'][0]}
    source, target = tokens(), tokens(4)[2:]
    source[1, 5:] = 0
    with torch.no_grad():
        expected = peer(input_ids=torch.tensor(source), attention_mask=torch.tensor(source != 0).long(),
                        decoder_input_ids=torch.tensor(target)).logits
    close(jax.jit(module.apply)({'params': params}, jnp.asarray(source), jnp.asarray(target)), expected, atol=1e-4)
