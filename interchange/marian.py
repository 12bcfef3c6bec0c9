"""MarianMT, the encoder-decoder of the opus-mt models (Junczys-Dowmunt et al. 2018, arXiv:1804.00344).

MarianMT is the post-norm Transformer of Vaswani et al. 2017 with biases. In a position vector of MarianMT, all sines
come before all cosines. This project alternates sines and cosines. Therefore an import reorders the d_model elements of
the embeddings and of all layers, without changing their values. The published models start decoding with the padding
token. Therefore the start token of this project gets the embedding of Marian's padding token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from input_pipeline.tokens import BOS, EOS, PAD, UNK
from interchange.equal_models import plain_refusals
from interchange.foreign_config import ACTIVATIONS, THEIRS, ForeignConfig, Rate, Token, require
from interchange.layout import TRANSPOSED, Link, Way, chain, halves, reordered, reshaped, rows
from runtime.schema import Size

EPSILON = 1e-5  # PyTorch's default for layer normalization; MarianConfig has no field for this value


class Config(ForeignConfig, kw_only=True):
    """The fields of config.json that Hugging Face's class MarianConfig defines."""
    ALIASES = {'hidden_size': 'd_model', 'num_attention_heads': 'encoder_attention_heads',
               'num_hidden_layers': 'encoder_layers'}
    vocab_size: Size = 58101
    decoder_vocab_size: Size | None = None
    pad_token_id: Token = 58100
    eos_token_id: Token = 0
    decoder_start_token_id: Token | None = 58100
    d_model: Size = 1024
    encoder_layers: Size = 12
    decoder_layers: Size = 12
    encoder_ffn_dim: Size = 4096
    decoder_ffn_dim: Size = 4096
    encoder_attention_heads: Size = 16
    decoder_attention_heads: Size = 16
    activation_function: str = 'gelu'
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = True
    max_position_embeddings: Size = 1024
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.0
    activation_dropout: Rate = 0.0
    normalize_before: bool | None = None
    normalize_embedding: bool | None = None
    add_final_layer_norm: bool | None = None


CONFIGS = {'marian': Config}
# The embedding of the target. If embeddings are tied, the weights may contain copies of this array.
EMBEDDINGS = ('model.shared.weight', 'model.decoder.embed_tokens.weight')
COPIES = ('lm_head.weight', 'model.encoder.embed_tokens.weight', 'model.decoder.embed_tokens.weight')


def options(config: Config) -> dict[str, Any]:
    """Returns the options of this project that describe the model of `config`.

    Raises:
      UserError: if this project does not support the value of a field. The message names the field.
    """
    # In this project, the layers of the encoder and of the decoder have the same sizes.
    require(config, decoder_attention_heads=(config.encoder_attention_heads,),
            decoder_ffn_dim=(config.encoder_ffn_dim,), normalize_before=(None, False),
            normalize_embedding=(None, False), add_final_layer_norm=(None, False), activation_function=[*ACTIVATIONS])
    layers, shared = config.encoder_layers, config.share_encoder_decoder_embeddings
    return {
        'task': 'translation', 'model.kind': 'transformer', 'model.num_layers': layers,
        'model.num_decoder_layers': 0 if config.decoder_layers == layers else config.decoder_layers,
        'model.d_model': config.d_model, 'model.d_ff': config.encoder_ffn_dim,
        'model.num_heads': config.encoder_attention_heads, 'model.norm': 'post', 'model.norm_epsilon': EPSILON,
        'model.attention_bias': 'all', 'model.activation': ACTIVATIONS[config.activation_function],
        'model.output_bias': True, 'model.scale_embeddings': config.scale_embedding,
        'model.share_embeddings': 'none' if not config.tie_word_embeddings else 'all' if shared else 'target',
        'model.dropout': config.dropout, 'model.attention_dropout': config.attention_dropout,
        'model.feed_forward_dropout': config.activation_dropout, 'data.tokenizer.joint': shared,
        'data.max_length': config.max_position_embeddings,
    }


def refusals(model: ConfigDict) -> list[str]:
    """Returns a message for each option in `model` that Marian does not support."""
    return plain_refusals(model, 'Marian', kind='transformer', norm='post', norm_function='layer_norm',
                          position='sinusoidal', feed_forward='plain', score='scaled_dot', window=0)


def fields(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']], longest: int) -> dict[str, Any]:
    """Returns Hugging Face's config.json for a model of this project.

    `orders['source']` and `orders['target']` map each token id of this project to the id in Hugging Face's tokenizer.
    """
    target = orders['target']
    special = {'pad_token_id': int(target[BOS] if target[PAD] < 0 else target[PAD]), 'bos_token_id': None,
               'eos_token_id': int(target[EOS]), 'forced_eos_token_id': int(target[EOS]),
               'decoder_start_token_id': int(target[BOS])}
    return {
        'model_type': 'marian', 'architectures': ['MarianMTModel'], 'is_encoder_decoder': True, **special,
        'vocab_size': int(orders['source'].max()) + 1, 'decoder_vocab_size': int(target.max()) + 1,
        'd_model': model.d_model, **{
            f'{side}_{name}': value for side in ('encoder', 'decoder') for name, value in
            (('attention_heads', model.num_heads), ('ffn_dim', model.d_ff))},
        'encoder_layers': model.num_layers, 'decoder_layers': model.num_decoder_layers or model.num_layers,
        'activation_function': THEIRS[model.activation], 'scale_embedding': model.scale_embeddings,
        'share_encoder_decoder_embeddings': model.share_embeddings == 'all',
        'tie_word_embeddings': model.share_embeddings != 'none', 'dropout': model.dropout,
        'attention_dropout': model.attention_dropout, 'activation_dropout': model.feed_forward_dropout,
        'max_position_embeddings': longest, 'dtype': 'float32',
    }


def generation(orders: Mapping[str, Int[np.ndarray, ' tokens']], longest: int) -> dict[str, Any]:
    """Returns fields of generation_config.json.

    Outputs contain no padding, start or unknown tokens, and have at most `longest` tokens. Without this limit,
    transformers ends every output after 20 tokens.
    """
    excluded = {int(orders['target'][token]) for token in (PAD, BOS, UNK)} - {-1}
    return {'bad_words_ids': [[token] for token in sorted(excluded)], 'max_length': longest}


def links(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']]) -> list[Link]:
    """Returns the links between the arrays of a Hugging Face model and the arrays of this project."""
    stream = halves(model.d_model)
    table = {side: chain(rows(order), reordered(stream, 1)) for side, order in orders.items()}
    bias = chain(reshaped((1, -1), (-1,)), rows(orders['target']))
    if model.share_embeddings == 'all':
        links = [_link('model.shared.weight', 'target_embedding/embedding', table['target'])]
    else:
        links = [_link(f'model.{stack}.embed_tokens.weight', f'{side}_embedding/embedding', table[side])
                 for stack, side in (('encoder', 'source'), ('decoder', 'target'))]
    if model.share_embeddings == 'none':
        links.append(_link('lm_head.weight', 'output/kernel', chain(table['target'], TRANSPOSED)))
    links.append(_link('final_logits_bias', 'logits_bias', bias))
    for stack in 'encoder', 'decoder':
        count = model.num_decoder_layers if stack == 'decoder' else 0
        for number in range(count or model.num_layers):
            theirs, ours = f'model.{stack}.layers.{number}', f'{stack}/layers_{number}'
            parts = {'self_attn': 'self_attention', 'encoder_attn': 'cross_attention'}
            for part, name in list(parts.items())[:1 if stack == 'encoder' else 2]:
                links += _attention(model, f'{theirs}.{part}', f'{ours}/{name}', stream)
                links += _norm(f'{theirs}.{part}_layer_norm', f'{ours}/{name}_residual/norm', stream)
            links += _feed_forward(theirs, f'{ours}/feed_forward', stream)
            links += _norm(f'{theirs}.final_layer_norm', f'{ours}/feed_forward_residual/norm', stream)
    return links


def is_ignored(name: str) -> bool:
    """Returns whether an array does not affect the model.

    Such an array is a table of sinusoids, which can be derived from the config, or an embedding that the model does not
    use. If tie_word_embeddings is false, transformers writes model.shared.weight, but the encoder and the decoder have
    their own embeddings.
    """
    return name.endswith('embed_positions.weight') or name == 'model.shared.weight'


def _link(theirs: str, ours: str, way: Way) -> Link:
    return Link(theirs, {ours: way})


def _attention(model: ConfigDict, theirs: str, ours: str, stream: Int[np.ndarray, ' d_model']) -> list[Link]:
    heads, d_model = model.num_heads, model.d_model
    to_heads = chain(TRANSPOSED, reordered(stream, 0), reshaped((d_model, -1), (d_model, heads, -1)))
    from_heads = chain(TRANSPOSED, reordered(stream, 1), reshaped((-1, d_model), (heads, -1, d_model)))
    links = [_link(f'{theirs}.out_proj.weight', f'{ours}/output/kernel', from_heads),
             _link(f'{theirs}.out_proj.bias', f'{ours}/output/bias', reordered(stream, 0))]
    for part, name in ('q_proj', 'query'), ('k_proj', 'key'), ('v_proj', 'value'):
        links += [_link(f'{theirs}.{part}.weight', f'{ours}/{name}/kernel', to_heads),
                  _link(f'{theirs}.{part}.bias', f'{ours}/{name}/bias', reshaped((-1,), (heads, -1)))]
    return links


def _feed_forward(theirs: str, ours: str, stream: Int[np.ndarray, ' d_model']) -> list[Link]:
    return [_link(f'{theirs}.fc1.weight', f'{ours}/inner/kernel', chain(TRANSPOSED, reordered(stream, 0))),
            _link(f'{theirs}.fc1.bias', f'{ours}/inner/bias', reshaped((-1,), (-1,))),
            _link(f'{theirs}.fc2.weight', f'{ours}/outer/kernel', chain(TRANSPOSED, reordered(stream, 1))),
            _link(f'{theirs}.fc2.bias', f'{ours}/outer/bias', reordered(stream, 0))]


def _norm(theirs: str, ours: str, stream: Int[np.ndarray, ' d_model']) -> Sequence[Link]:
    return [_link(f'{theirs}.weight', f'{ours}/scale', reordered(stream, 0)),
            _link(f'{theirs}.bias', f'{ours}/bias', reordered(stream, 0))]
