"""The Llama family: Llama (arXiv:2302.13971), Mistral (arXiv:2310.06825), Qwen2 (arXiv:2407.10671).

Pre-norm with RMSNorm, SwiGLU, rotary positions, grouped queries. Theirs turn the numbers j and j + d_k / 2 of a head as
a pair, ours 2j and 2j + 1 (Su et al.'s), so the width of queries and keys is reordered, exactly. Mistral adds
a window, Qwen2 biases on queries, keys and values.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from input_pipeline.tokens import BOS, EOS, PAD
from interchange.fields import THEIRS, Fields
from interchange.layout import SAME, TRANSPOSED, Link, Way, chain, halves, reordered, reshaped, rows

LLAMA_3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}  # of all published models, as model/positional.py has them


def options(fields: Fields) -> dict[str, Any]:
    """The options of our model.

    Raises:
      UserError: naming a field that none of our options stands for.
    """
    kind = fields.all['model_type']
    heads, d_model = fields.size('num_attention_heads', 32), fields.size('hidden_size', 4096)
    groups = fields.size('num_key_value_heads', 8 if kind == 'mistral' else heads)
    head_dim = fields.get('head_dim', 0, int)
    length = fields.size('max_position_embeddings', {'llama': 2048, 'mistral': 131072, 'qwen2': 32768}[kind])
    fields.only('layer_norm_eps', None)
    biases = kind == 'llama' and fields.only('attention_bias', False, True)
    return {
        'task': 'language_model', 'model.kind': 'language_model', 'model.d_model': d_model,
        'model.num_layers': fields.size('num_hidden_layers', 32), 'model.num_heads': heads,
        'model.num_key_value_heads': 0 if groups == heads else groups,
        'model.d_k': 0 if head_dim * heads == d_model else head_dim,
        'model.d_v': 0 if head_dim * heads == d_model else head_dim,
        'model.d_ff': fields.size('intermediate_size', {'llama': 11008, 'mistral': 14336, 'qwen2': 22016}[kind]),
        'model.norm': 'pre', 'model.norm_function': 'rms_norm',
        'model.norm_epsilon': fields.number('rms_norm_eps', 1e-6),
        'model.feed_forward': 'gated', 'model.activation': fields.activation('hidden_act', 'silu'),
        'model.feed_forward_bias': kind == 'llama' and fields.only('mlp_bias', False, True),
        'model.attention_bias': 'qkv' if kind == 'qwen2' else 'all' if biases else 'none',
        'model.position': 'rotary', **_rotary(fields), 'model.window': _window(fields, kind, length),
        'model.scale_embeddings': False, 'model.tie_embeddings': fields.only('tie_word_embeddings', False, True),
        'model.dropout': 0.0, 'model.attention_dropout': fields.number('attention_dropout', 0.0),
        'data.context': length,
    }


def refusals(model: ConfigDict) -> list[str]:
    """What keeps a model of ours from being one of theirs."""
    wanted = {'kind': 'language_model', 'norm': 'pre', 'norm_function': 'rms_norm', 'position': 'rotary',
              'feed_forward': 'gated', 'score': 'scaled_dot'}
    found = [f'model.{name}={model[name]}: Llama has {value}' for name, value in wanted.items()
             if model[name] != value]
    if model.d_k != model.d_v:
        found.append(f'model.d_v={model.d_v}: Llama has one width of heads, and d_k is {model.d_k}')
    if model.window and (model.attention_bias != 'none' or model.feed_forward_bias):
        found.append(f'model.window={model.window}: only Mistral has a window, and it has no biases')
    if model.attention_bias == 'qkv' and (model.feed_forward_bias or model.d_k):
        found.append('model.attention_bias=qkv: only Qwen2 has it, without feed_forward_bias and d_k')
    return found


def fields(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']], longest: int) -> dict[str, Any]:
    """Their config.json for a model of ours; `orders` are the original numbers of its tokens."""
    order = orders['text']
    kind = 'mistral' if model.window else 'qwen2' if model.attention_bias == 'qkv' else 'llama'
    head_dim = {'head_dim': model.d_k or model.d_model // model.num_heads}
    biases = {'attention_bias': model.attention_bias == 'all', 'mlp_bias': model.feed_forward_bias}
    own = {'mistral': head_dim | {'sliding_window': model.window}, 'qwen2': {'use_sliding_window': False},
           'llama': head_dim | biases}[kind]
    turning = {'rope_theta': model.rotary_base, 'rope_type': {'none': 'default'}.get(
        model.rotary_scaling, model.rotary_scaling)}
    if model.rotary_scaling != 'none':
        turning['factor'] = model.rotary_factor
    if model.rotary_scaling == 'llama3':
        turning |= LLAMA_3 | {'original_max_position_embeddings': model.rotary_original_length}
    return {
        'model_type': kind, 'architectures': [f'{kind.capitalize()}ForCausalLM'], 'vocab_size': int(order.max()) + 1,
        'pad_token_id': int(order[PAD]) if order[PAD] >= 0 else None, 'bos_token_id': int(order[BOS]),
        'eos_token_id': int(order[EOS]), 'hidden_size': model.d_model, 'intermediate_size': model.d_ff,
        'num_hidden_layers': model.num_layers, 'num_attention_heads': model.num_heads,
        'num_key_value_heads': model.num_key_value_heads or model.num_heads,
        'hidden_act': THEIRS[model.activation],
        'rms_norm_eps': model.norm_epsilon, 'rope_parameters': turning, 'max_position_embeddings': longest,
        'tie_word_embeddings': model.tie_embeddings, 'attention_dropout': model.attention_dropout, 'dtype': 'float32',
        **own,
    }


def links(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']]) -> list[Link]:
    """All arrays of both."""
    table = rows(orders['text'])
    found = [Link('model.embed_tokens.weight', {'embedding/embedding': table}),
             Link('model.norm.weight', {'encoder/final_norm/scale': SAME})]
    if not model.tie_embeddings:
        found.append(Link('lm_head.weight', {'output/kernel': chain(table, TRANSPOSED)}))
    for number in range(model.num_layers):
        theirs, ours = f'model.layers.{number}', f'encoder/layers_{number}'
        found += [Link(f'{theirs}.input_layernorm.weight', {f'{ours}/self_attention_residual/norm/scale': SAME}),
                  Link(f'{theirs}.post_attention_layernorm.weight', {f'{ours}/feed_forward_residual/norm/scale': SAME})]
        found += _attention(model, f'{theirs}.self_attn', f'{ours}/self_attention')
        for part, name in ('gate_proj', 'gate'), ('up_proj', 'inner'), ('down_proj', 'outer'):
            found.append(Link(f'{theirs}.mlp.{part}.weight', {f'{ours}/feed_forward/{name}/kernel': TRANSPOSED}))
            if model.feed_forward_bias:
                found.append(Link(f'{theirs}.mlp.{part}.bias', {f'{ours}/feed_forward/{name}/bias': SAME}))
    return found


def is_no_parameter(name: str) -> bool:
    """Whether an array follows from the config or from others: angles, and a copy of the embedding."""
    return name.endswith('rotary_emb.inv_freq') or name == 'lm_head.weight'


def _attention(model: ConfigDict, theirs: str, ours: str) -> list[Link]:
    d_k, d_model = model.d_k or model.d_model // model.num_heads, model.d_model
    groups = model.num_key_value_heads or model.num_heads
    found = [Link(f'{theirs}.o_proj.weight', {f'{ours}/output/kernel': chain(
        TRANSPOSED, reshaped((-1, d_model), (model.num_heads, -1, d_model)))})]
    if model.attention_bias == 'all':
        found.append(Link(f'{theirs}.o_proj.bias', {f'{ours}/output/bias': SAME}))
    turned = reordered(halves(d_k), -1)
    parts: dict[str, tuple[str, int, Way]] = {
        'q_proj': ('query', model.num_heads, turned), 'k_proj': ('key', groups, turned),
        'v_proj': ('value', groups, SAME)}
    for part, (name, heads, way) in parts.items():
        found.append(Link(f'{theirs}.{part}.weight', {f'{ours}/{name}/kernel': chain(
            TRANSPOSED, reshaped((d_model, -1), (d_model, heads, -1)), way)}))
        if model.attention_bias != 'none':
            found.append(Link(f'{theirs}.{part}.bias', {
                f'{ours}/{name}/bias': chain(reshaped((-1,), (heads, -1)), way)}))
    return found


def _rotary(fields: Fields) -> dict[str, Any]:
    """The options of rotary positions; the field has been called rope_scaling, with the base beside it."""
    turning = dict(fields.get('rope_parameters', fields.get('rope_scaling', {}, dict), dict))
    fields.only('partial_rotary_factor', None, 1.0)
    base = turning.pop('rope_theta', None) or fields.number('rope_theta', 10000.0)
    kind = turning.pop('rope_type', turning.pop('type', 'default'))
    found = {'model.rotary_base': float(base)}
    if kind == 'default':
        return found
    if kind not in ('linear', 'llama3'):
        raise fields.refusal('rope_type', kind, ('default', 'linear', 'llama3'))
    found |= {'model.rotary_scaling': kind, 'model.rotary_factor': float(turning['factor'])}
    if kind == 'llama3':
        for name, value in LLAMA_3.items():
            if turning.get(name, value) != value:
                raise fields.refusal(name, turning[name], (value,))
        found['model.rotary_original_length'] = int(turning['original_max_position_embeddings'])
    return found


def _window(fields: Fields, kind: str, length: int) -> int:
    """The option of the window, which all layers have or none; one that is as long as the positions is none."""
    window = fields.all.get('sliding_window', 4096 if kind == 'mistral' else None)
    if kind == 'llama' or kind == 'qwen2' and not fields.get('use_sliding_window', False, bool):
        window = None
    kinds = set(fields.get('layer_types', [], list))
    if window is not None and kind == 'qwen2' and kinds != {'sliding_attention'}:
        raise fields.refusal('layer_types', sorted(kinds), (['sliding_attention'],))
    return 0 if window is None or window >= length else int(window)
