"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, biases in all layers.

GPT-2's matrices are [in, out], like the matrices of this project.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from input_pipeline.tokens import BOS, EOS, PAD
from interchange.equal_models import plain_refusals
from interchange.foreign_config import ACTIVATIONS, THEIRS, ForeignConfig, Positive, Rate, Token, require
from interchange.layout import SAME, TRANSPOSED, Link, chain, reshaped, rows
from runtime.schema import Size


class Config(ForeignConfig, kw_only=True):
    """The fields of config.json that Hugging Face's class GPT2Config defines."""
    ALIASES = {'hidden_size': 'n_embd', 'max_position_embeddings': 'n_positions', 'num_attention_heads': 'n_head',
               'num_hidden_layers': 'n_layer'}
    vocab_size: Size = 50257
    bos_token_id: Token | None = 50256
    eos_token_id: Token | list[Token] | None = 50256
    n_positions: Size = 1024
    n_embd: Size = 768
    n_layer: Size = 12
    n_head: Size = 12
    n_inner: Size | None = None
    activation_function: str = 'gelu_new'
    layer_norm_epsilon: Positive = 1e-5
    resid_pdrop: Rate = 0.1
    embd_pdrop: Rate = 0.1
    attn_pdrop: Rate = 0.1
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False


CONFIGS = {'gpt2': Config}
EMBEDDINGS = ('transformer.wte.weight',)
COPIES = ('lm_head.weight',)  # if embeddings are tied, the weights may contain these copies of the embedding


def options(config: Config) -> dict[str, Any]:
    """Returns the options of this project that describe the model of `config`.

    Raises:
      UserError: if this project does not support the value of a field. The message names the field.
    """
    require(config, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,),
            embd_pdrop=(config.resid_pdrop,), activation_function=[*ACTIVATIONS])
    return {
        'task': 'language_model', 'model.kind': 'language_model', 'model.num_layers': config.n_layer,
        'model.d_model': config.n_embd, 'model.d_ff': config.n_inner or 4 * config.n_embd,
        'model.num_heads': config.n_head, 'model.norm': 'pre', 'model.norm_epsilon': config.layer_norm_epsilon,
        'model.position': 'learned', 'model.max_length': config.n_positions, 'model.attention_bias': 'all',
        'model.scale_embeddings': False, 'model.activation': ACTIVATIONS[config.activation_function],
        'model.tie_embeddings': config.tie_word_embeddings, 'model.dropout': config.resid_pdrop,
        'model.attention_dropout': config.attn_pdrop, 'data.context': config.n_positions,
    }


def refusals(model: ConfigDict) -> list[str]:
    """Returns a message for each option in `model` that GPT-2 does not support."""
    return plain_refusals(model, 'GPT-2', kind='language_model', norm='pre', norm_function='layer_norm',
                          position='learned', feed_forward='plain', score='scaled_dot', window=0)


def fields(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']], longest: int) -> dict[str, Any]:
    """Returns Hugging Face's config.json for a model of this project.

    `orders['text']` maps each token id of this project to the id in Hugging Face's tokenizer.
    """
    order = orders['text']
    return {
        'model_type': 'gpt2', 'architectures': ['GPT2LMHeadModel'], 'vocab_size': int(order.max()) + 1,
        'pad_token_id': int(order[PAD]) if order[PAD] >= 0 else None, 'bos_token_id': int(order[BOS]),
        'eos_token_id': int(order[EOS]), 'n_positions': model.max_length, 'n_embd': model.d_model,
        'n_layer': model.num_layers, 'n_head': model.num_heads, 'n_inner': model.d_ff,
        'activation_function': THEIRS[model.activation], 'layer_norm_epsilon': model.norm_epsilon,
        'resid_pdrop': model.dropout, 'embd_pdrop': model.dropout, 'attn_pdrop': model.attention_dropout,
        'tie_word_embeddings': model.tie_embeddings, 'dtype': 'float32',
    }


def links(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']]) -> list[Link]:
    """Returns the links between the arrays of a Hugging Face model and the arrays of this project."""
    table, d_model, heads = rows(orders['text']), model.d_model, model.num_heads
    split = reshaped((d_model, -1), (d_model, heads, -1))
    links = [Link('transformer.wte.weight', {'embedding/embedding': table}),
             Link('transformer.wpe.weight', {'position/table': SAME})]
    if not model.tie_embeddings:
        links.append(Link('lm_head.weight', {'output/kernel': chain(table, TRANSPOSED)}))
    links += _pair('transformer.ln_f', 'encoder/final_norm', 'scale')
    for number in range(model.num_layers):
        theirs, ours = f'transformer.h.{number}', f'encoder/layers_{number}'
        attention, parts = f'{ours}/self_attention', ('query', 'key', 'value')
        links += [
            *_pair(f'{theirs}.ln_1', f'{attention}_residual/norm', 'scale'),
            *_pair(f'{theirs}.ln_2', f'{ours}/feed_forward_residual/norm', 'scale'),
            Link(f'{theirs}.attn.c_attn.weight', {f'{attention}/{part}/kernel': split for part in parts}),
            Link(f'{theirs}.attn.c_attn.bias',
                 {f'{attention}/{part}/bias': reshaped((-1,), (heads, -1)) for part in parts}),
            Link(f'{theirs}.attn.c_proj.weight', {
                f'{attention}/output/kernel': reshaped((-1, d_model), (heads, -1, d_model))}),
            Link(f'{theirs}.attn.c_proj.bias', {f'{attention}/output/bias': SAME}),
            *_pair(f'{theirs}.mlp.c_fc', f'{ours}/feed_forward/inner', 'kernel'),
            *_pair(f'{theirs}.mlp.c_proj', f'{ours}/feed_forward/outer', 'kernel')]
    return links


def is_ignored(name: str) -> bool:
    """Returns whether an array is an attention mask, which can be derived from the config."""
    return name.endswith(('.attn.bias', '.attn.masked_bias'))


def full_name(name: str) -> str:
    """Returns the name of an array with the prefix 'transformer.'.

    Some folders contain the model without the output layer. The names of arrays in these folders lack the prefix.
    """
    return name if name.startswith(('transformer.', 'lm_head.')) else f'transformer.{name}'


def _pair(theirs: str, ours: str, name: str) -> list[Link]:
    return [Link(f'{theirs}.weight', {f'{ours}/{name}': SAME}), Link(f'{theirs}.bias', {f'{ours}/bias': SAME})]
