"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, biases everywhere. Its matrices are [in, out], as ours."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from input_pipeline.tokens import BOS, EOS
from interchange.fields import THEIRS, Fields
from interchange.layout import SAME, TRANSPOSED, Link, chain, reshaped, rows


def options(fields: Fields) -> dict[str, Any]:
    """The options of our model.

    Raises:
      UserError: naming a field that none of our options stands for.
    """
    fields.only('scale_attn_weights', True)
    fields.only('scale_attn_by_inverse_layer_idx', False)
    fields.only('add_cross_attention', False)
    d_model, length = fields.size('n_embd', 768), fields.size('n_positions', 1024)
    dropout = fields.number('resid_pdrop', 0.1)
    fields.only('embd_pdrop', dropout)  # one rate here
    return {
        'task': 'language_model', 'model.kind': 'language_model', 'model.num_layers': fields.size('n_layer', 12),
        'model.d_model': d_model, 'model.d_ff': fields.size('n_inner', 4 * d_model),
        'model.num_heads': fields.size('n_head', 12), 'model.norm': 'pre',
        'model.norm_epsilon': fields.number('layer_norm_epsilon', 1e-5), 'model.position': 'learned',
        'model.max_length': length, 'model.attention_bias': 'all', 'model.scale_embeddings': False,
        'model.activation': fields.activation('activation_function', 'gelu_new'),
        'model.tie_embeddings': fields.only('tie_word_embeddings', True, False), 'model.dropout': dropout,
        'model.attention_dropout': fields.number('attn_pdrop', 0.1),
    }


def refusals(model: ConfigDict) -> list[str]:
    """What keeps a model of ours from being one of theirs."""
    wanted = {'kind': 'language_model', 'norm': 'pre', 'norm_function': 'layer_norm', 'position': 'learned',
              'feed_forward': 'plain', 'score': 'scaled_dot', 'window': 0}
    found = [f'model.{name}={model[name]}: GPT-2 has {value}' for name, value in wanted.items()
             if model[name] != value]
    if model.num_key_value_heads not in (0, model.num_heads):
        found.append(f'model.num_key_value_heads={model.num_key_value_heads}: GPT-2 has as many as heads')
    if any(width not in (0, model.d_model // model.num_heads) for width in (model.d_k, model.d_v)):
        found.append('model.d_k and model.d_v: GPT-2 has d_model / num_heads')
    return found


def fields(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']], longest: int) -> dict[str, Any]:
    """Their config.json for a model of ours; `orders` are the original numbers of its tokens."""
    order = orders['text']
    return {
        'model_type': 'gpt2', 'architectures': ['GPT2LMHeadModel'], 'vocab_size': int(order.max()) + 1,
        'bos_token_id': int(order[BOS]), 'eos_token_id': int(order[EOS]), 'n_positions': model.max_length,
        'n_embd': model.d_model, 'n_layer': model.num_layers, 'n_head': model.num_heads, 'n_inner': model.d_ff,
        'activation_function': THEIRS[model.activation], 'layer_norm_epsilon': model.norm_epsilon,
        'resid_pdrop': model.dropout, 'embd_pdrop': model.dropout, 'attn_pdrop': model.attention_dropout,
        'tie_word_embeddings': model.tie_embeddings, 'dtype': 'float32',
    }


def links(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']]) -> list[Link]:
    """All arrays of both."""
    table, d_model, heads = rows(orders['text']), model.d_model, model.num_heads
    split = reshaped((d_model, -1), (d_model, heads, -1))
    found = [Link('transformer.wte.weight', {'embedding/embedding': table}),
             Link('transformer.wpe.weight', {'position/table': SAME})]
    if not model.tie_embeddings:
        found.append(Link('lm_head.weight', {'output/kernel': chain(table, TRANSPOSED)}))
    found += _pair('transformer.ln_f', 'encoder/final_norm', 'scale')
    for number in range(model.num_layers):
        theirs, ours = f'transformer.h.{number}', f'encoder/layers_{number}'
        attention = f'{ours}/self_attention'
        found += [
            *_pair(f'{theirs}.ln_1', f'{attention}_residual/norm', 'scale'),
            *_pair(f'{theirs}.ln_2', f'{ours}/feed_forward_residual/norm', 'scale'),
            Link(f'{theirs}.attn.c_attn.weight', {f'{attention}/{each}/kernel': split for each in
                                                  ('query', 'key', 'value')}),
            Link(f'{theirs}.attn.c_attn.bias', {f'{attention}/{each}/bias': reshaped((-1,), (heads, -1)) for each in
                                                ('query', 'key', 'value')}),
            Link(f'{theirs}.attn.c_proj.weight', {
                f'{attention}/output/kernel': reshaped((-1, d_model), (heads, -1, d_model))}),
            Link(f'{theirs}.attn.c_proj.bias', {f'{attention}/output/bias': SAME}),
            *_pair(f'{theirs}.mlp.c_fc', f'{ours}/feed_forward/inner', 'kernel'),
            *_pair(f'{theirs}.mlp.c_proj', f'{ours}/feed_forward/outer', 'kernel')]
    return found


def is_no_parameter(name: str) -> bool:
    """Whether an array follows from the config or from others: masks, and a copy of the embedding."""
    return name.endswith(('.attn.bias', '.attn.masked_bias')) or name == 'lm_head.weight'


def named_in_full(name: str) -> str:
    """The name of an array of a whole language model; some folders hold its inner part alone."""
    return name if name.startswith(('transformer.', 'lm_head.')) else f'transformer.{name}'


def _pair(theirs: str, ours: str, name: str) -> list[Link]:
    return [Link(f'{theirs}.weight', {f'{ours}/{name}': SAME}), Link(f'{theirs}.bias', {f'{ours}/bias': SAME})]
