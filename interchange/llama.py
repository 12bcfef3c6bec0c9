"""The Llama family: Llama (arXiv:2302.13971), Mistral (arXiv:2310.06825), Qwen2 (arXiv:2407.10671).

These models use pre-norm with RMSNorm, SwiGLU, rotary positions and grouped-query attention. In each head, they rotate
the elements j and j + d_k / 2 as a pair. This project rotates the elements 2j and 2j + 1 (Su et al.). Therefore an
import reorders the elements of queries and keys, without changing their values. Mistral also has a sliding window.
Qwen2 also has biases on queries, keys and values.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from input_pipeline.tokens import BOS, EOS, PAD
from interchange.equal_models import head_widths
from interchange.foreign_config import ACTIVATIONS, THEIRS, ForeignConfig, Positive, Rate, Token, require, unsupported
from interchange.layout import SAME, TRANSPOSED, Link, Way, chain, halves, reordered, reshaped, rows
from runtime.errors import UserError
from runtime.schema import Size

# The values of all published Llama 3 models. model/positional.py has the same values.
LLAMA_3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}


class Rotation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of the field rope_parameters of config.json, or of rope_scaling, the previous name of this field."""
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: float = LLAMA_3['low_freq_factor']
    high_freq_factor: float = LLAMA_3['high_freq_factor']
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: float | None = None


class Llama(ForeignConfig, kw_only=True):
    """The fields of config.json that Hugging Face's class LlamaConfig defines."""
    vocab_size: Size = 32000
    bos_token_id: Token | None = 1
    eos_token_id: Token | list[Token] | None = 2
    tie_word_embeddings: bool = False
    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Size = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = 'silu'
    max_position_embeddings: Size = 2048
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10000.0
    rope_parameters: Rotation | None = None
    rope_scaling: Rotation | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: Rate = 0.0
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    layer_types: list[str] | None = None


class Mistral(Llama, kw_only=True):
    """The fields of config.json that Hugging Face's class MistralConfig defines."""
    intermediate_size: Size = 14336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    sliding_window: Size | None = 4096


class Qwen2(Llama, kw_only=True):
    """The fields of config.json that Hugging Face's class Qwen2Config defines."""
    vocab_size: Size = 151936
    bos_token_id: Token | None = None
    eos_token_id: Token | list[Token] | None = None
    intermediate_size: Size = 22016
    max_position_embeddings: Size = 32768
    sliding_window: Size | None = 4096
    max_window_layers: int = 28


CONFIGS = {'llama': Llama, 'mistral': Mistral, 'qwen2': Qwen2}
EMBEDDINGS = ('model.embed_tokens.weight',)
MOST_CONTEXT = 1_000_000  # the maximum of data.context and model.window. Rotary positions have no limit
COPIES = ('lm_head.weight',)  # if embeddings are tied, the weights may contain these copies of the embedding


def options(config: Llama) -> dict[str, Any]:
    """Returns the options of this project that describe the model of `config`.

    Raises:
      UserError: if this project does not support the value of a field. The message names the field.
    """
    require(config, partial_rotary_factor=(None, 1.0), hidden_act=[*ACTIVATIONS])
    heads, d_model, is_llama = config.num_attention_heads, config.hidden_size, type(config) is Llama
    groups = config.num_key_value_heads or heads
    width = 0 if not config.head_dim or config.head_dim * heads == d_model else config.head_dim
    bias = 'qkv' if isinstance(config, Qwen2) else 'all' if is_llama and config.attention_bias else 'none'
    return {
        'task': 'language_model', 'model.kind': 'language_model', 'model.d_model': d_model,
        'model.num_layers': config.num_hidden_layers, 'model.num_heads': heads,
        'model.num_key_value_heads': 0 if groups == heads else groups, 'model.d_k': width, 'model.d_v': width,
        'model.d_ff': config.intermediate_size, 'model.norm': 'pre', 'model.norm_function': 'rms_norm',
        'model.norm_epsilon': config.rms_norm_eps, 'model.feed_forward': 'gated',
        'model.activation': ACTIVATIONS[config.hidden_act],
        'model.feed_forward_bias': is_llama and config.mlp_bias, 'model.attention_bias': bias,
        'model.position': 'rotary', **_rotary(config), 'model.window': _window(config),
        'model.scale_embeddings': False, 'model.tie_embeddings': config.tie_word_embeddings,
        'model.dropout': 0.0, 'model.attention_dropout': config.attention_dropout,
        'data.context': min(config.max_position_embeddings, MOST_CONTEXT),
    }


def refusals(model: ConfigDict) -> list[str]:
    """Returns a message for each option in `model` that Llama, Mistral and Qwen2 do not support."""
    required = {'kind': 'language_model', 'norm': 'pre', 'norm_function': 'rms_norm', 'position': 'rotary',
                'feed_forward': 'gated', 'score': 'scaled_dot'}
    refused = [f'model.{name}={model[name]}: Llama supports only {value}' for name, value in required.items()
               if model[name] != value]
    d_k, d_v = head_widths(model)
    if d_k != d_v:
        refused.append(f'model.d_v={d_v}: Llama needs d_v=d_k (d_k={d_k})')
    # The configs of Mistral and Qwen2 accept such a width.
    if model.d_model % model.num_heads and not model.window and model.attention_bias != 'qkv':
        refused.append(f'model.d_model={model.d_model}: Llama needs a multiple of num_heads={model.num_heads}')
    if model.window and (model.attention_bias == 'all' or model.feed_forward_bias):
        refused.append(f'model.window={model.window}: only Mistral and Qwen2 have a window. Mistral has no biases, and '
                       'only models with an imported tokenizer.json are exported as Qwen2')
    if model.attention_bias == 'qkv' and model.feed_forward_bias:
        refused.append('model.attention_bias=qkv: only Qwen2 supports this value, and Qwen2 does not support '
                       'feed_forward_bias')
    return refused


def fields(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']], longest: int) -> dict[str, Any]:
    """Returns Hugging Face's config.json for a model of this project.

    `orders['text']` maps each token id of this project to the id in Hugging Face's tokenizer.
    """
    order = orders['text']
    kind = 'qwen2' if model.attention_bias == 'qkv' else 'mistral' if model.window else 'llama'
    biases = {'attention_bias': model.attention_bias == 'all', 'mlp_bias': model.feed_forward_bias}
    window: dict[str, Any] = {'use_sliding_window': False}
    if model.window:
        window = {'use_sliding_window': True, 'sliding_window': model.window, 'max_window_layers': 0,
                  'layer_types': ['sliding_attention'] * model.num_layers}
    own = {'mistral': {'sliding_window': model.window}, 'qwen2': window, 'llama': biases}[kind]
    scaling: dict[str, Any] = {}
    if model.rotary_scaling != 'none':
        scaling = {'rope_type': model.rotary_scaling, 'factor': model.rotary_factor}
    if model.rotary_scaling == 'llama3':
        scaling |= LLAMA_3 | {'original_max_position_embeddings': model.rotary_original_length}
    rotation = {'rope_theta': model.rotary_base, 'rope_type': 'default'} | scaling
    # transformers 4 and other libraries read rope_theta and rope_scaling. transformers 5 reads rope_parameters.
    rotary = {'rope_parameters': rotation, 'rope_theta': model.rotary_base} | (
        {'rope_scaling': scaling} if scaling else {})
    return {
        'model_type': kind, 'architectures': [f'{kind.capitalize()}ForCausalLM'], 'vocab_size': int(order.max()) + 1,
        'pad_token_id': int(order[PAD]) if order[PAD] >= 0 else None, 'bos_token_id': int(order[BOS]),
        'eos_token_id': int(order[EOS]), 'hidden_size': model.d_model, 'intermediate_size': model.d_ff,
        'num_hidden_layers': model.num_layers, 'num_attention_heads': model.num_heads,
        'num_key_value_heads': model.num_key_value_heads or model.num_heads, 'head_dim': head_widths(model)[0],
        'hidden_act': THEIRS[model.activation],
        'rms_norm_eps': model.norm_epsilon, 'max_position_embeddings': longest,
        'tie_word_embeddings': model.tie_embeddings, 'attention_dropout': model.attention_dropout, 'dtype': 'float32',
        **rotary, **own,
    }


def links(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']]) -> list[Link]:
    """Returns the links between the arrays of a Hugging Face model and the arrays of this project."""
    table = rows(orders['text'])
    links = [Link('model.embed_tokens.weight', {'embedding/embedding': table}),
             Link('model.norm.weight', {'encoder/final_norm/scale': SAME})]
    if not model.tie_embeddings:
        links.append(Link('lm_head.weight', {'output/kernel': chain(table, TRANSPOSED)}))
    for number in range(model.num_layers):
        theirs, ours = f'model.layers.{number}', f'encoder/layers_{number}'
        links += [Link(f'{theirs}.input_layernorm.weight', {f'{ours}/self_attention_residual/norm/scale': SAME}),
                  Link(f'{theirs}.post_attention_layernorm.weight', {f'{ours}/feed_forward_residual/norm/scale': SAME})]
        links += _attention(model, f'{theirs}.self_attn', f'{ours}/self_attention')
        for part, name in ('gate_proj', 'gate'), ('up_proj', 'inner'), ('down_proj', 'outer'):
            links.append(Link(f'{theirs}.mlp.{part}.weight', {f'{ours}/feed_forward/{name}/kernel': TRANSPOSED}))
            if model.feed_forward_bias:
                links.append(Link(f'{theirs}.mlp.{part}.bias', {f'{ours}/feed_forward/{name}/bias': SAME}))
    return links


def is_ignored(name: str) -> bool:
    """Returns whether an array contains the rotary frequencies, which can be derived from the config."""
    return name.endswith('rotary_emb.inv_freq')


def _attention(model: ConfigDict, theirs: str, ours: str) -> list[Link]:
    (d_k, _), d_model = head_widths(model), model.d_model
    groups = model.num_key_value_heads or model.num_heads
    links = [Link(f'{theirs}.o_proj.weight', {f'{ours}/output/kernel': chain(
        TRANSPOSED, reshaped((-1, d_model), (model.num_heads, -1, d_model)))})]
    if model.attention_bias == 'all':
        links.append(Link(f'{theirs}.o_proj.bias', {f'{ours}/output/bias': SAME}))
    rotated = reordered(halves(d_k), -1)
    parts: dict[str, tuple[str, int, Way]] = {
        'q_proj': ('query', model.num_heads, rotated), 'k_proj': ('key', groups, rotated),
        'v_proj': ('value', groups, SAME)}
    for part, (name, heads, way) in parts.items():
        links.append(Link(f'{theirs}.{part}.weight', {f'{ours}/{name}/kernel': chain(
            TRANSPOSED, reshaped((d_model, -1), (d_model, heads, -1)), way)}))
        if model.attention_bias != 'none':
            links.append(Link(f'{theirs}.{part}.bias', {
                f'{ours}/{name}/bias': chain(reshaped((-1,), (heads, -1)), way)}))
    return links


def _rotary(config: Llama) -> dict[str, Any]:
    """Returns the options of this project that describe the rotary positions of a Llama model."""
    # In transformers, a rope_scaling that is not empty replaces rope_parameters, including rope_theta.
    field = 'rope_parameters' if config.rope_scaling in (None, Rotation()) else 'rope_scaling'
    rotation = getattr(config, field) or Rotation()
    require(rotation, f'{field}.', partial_rotary_factor=(None, 1.0))
    kind = rotation.rope_type or rotation.type or 'default'
    options: dict[str, Any] = {'model.rotary_base': rotation.rope_theta or config.rope_theta}
    if kind == 'default':
        return options
    if kind not in ('linear', 'llama3'):
        raise unsupported(f'{field}.rope_type', kind, ('default', 'linear', 'llama3'))
    if rotation.factor is None:
        raise UserError(f'{field}.factor is missing, but rope_type={kind} needs it. Add this field')
    if rotation.factor == 1:  # then the scaling has no effect
        return options
    options |= {'model.rotary_scaling': kind, 'model.rotary_factor': rotation.factor}
    if kind == 'llama3':
        require(rotation, f'{field}.', **{name: (value,) for name, value in LLAMA_3.items()})
        if rotation.original_max_position_embeddings is None:
            raise UserError(f'{field}.original_max_position_embeddings is missing, but rope_type={kind} needs it. '
                            'Add this field')
        options['model.rotary_original_length'] = rotation.original_max_position_embeddings
    return options


def _window(config: Llama) -> int:
    """Returns the size of the attention window of a model, or 0 if it has no window.

    Raises:
      UserError: if only some layers have a window, or layer_types is empty or has an unknown kind.
    """
    window = config.sliding_window
    if type(config) is Llama or window is None:
        return 0
    if isinstance(config, Qwen2):
        if not config.use_sliding_window:
            return 0
        kinds = {*config.layer_types} if config.layer_types is not None else {
            'sliding_attention' if layer >= config.max_window_layers else 'full_attention'
            for layer in (0, config.num_hidden_layers - 1)}  # the first layers have full attention
        if kinds == {'full_attention'}:
            return 0
        if not kinds or kinds - {'full_attention', 'sliding_attention'}:
            raise unsupported('layer_types', config.layer_types, ('full_attention', 'sliding_attention'))
        if kinds != {'sliding_attention'}:
            field = f'max_window_layers={config.max_window_layers}' if config.layer_types is None else 'layer_types'
            raise UserError(f'{field}: some layers have a window, and others have full attention. In this project, '
                            'either all layers or no layer must have a window')
    return min(window, MOST_CONTEXT)
