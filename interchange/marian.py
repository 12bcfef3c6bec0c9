"""MarianMT, the encoder-decoder of the opus-mt models (Junczys-Dowmunt et al. 2018, arXiv:1804.00344).

The paper's post-norm Transformer with biases. Its sinusoids are ours with all sines first and then all cosines, so the
width of the stream is reordered, exactly. Decoding begins with the padding token, whose row hence is our start token's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from input_pipeline.tokens import BOS, EOS, PAD, UNK
from interchange.fields import THEIRS, Fields
from interchange.layout import TRANSPOSED, Link, Way, chain, halves, reordered, reshaped, rows

EPSILON = 1e-5  # PyTorch's default, which no field changes


def options(fields: Fields) -> dict[str, Any]:
    """The options of our model.

    Raises:
      UserError: naming a field that none of our options stands for.
    """
    heads, d_ff = fields.size('encoder_attention_heads', 16), fields.size('encoder_ffn_dim', 4096)
    layers, of_decoder = fields.size('encoder_layers', 12), fields.size('decoder_layers', 12)
    for name, value, default in (('attention_heads', heads, 16), ('ffn_dim', d_ff, 4096)):
        if (there := fields.size(f'decoder_{name}', default)) != value:
            raise fields.refusal(f'decoder_{name}', there, (value,))  # both stacks have blocks of one kind here
    fields.only('normalize_before', None, False)
    fields.only('normalize_embedding', None, False)
    fields.only('add_final_layer_norm', None, False)
    fields.only('decoder_start_token_id', fields.get('pad_token_id', 58100, int))
    shared = fields.only('share_encoder_decoder_embeddings', True, False)
    tied = fields.only('tie_word_embeddings', True, False)
    return {
        'task': 'translation', 'model.kind': 'transformer', 'model.num_layers': layers,
        'model.num_decoder_layers': 0 if of_decoder == layers else of_decoder,
        'model.d_model': fields.size('d_model', 1024), 'model.d_ff': d_ff, 'model.num_heads': heads,
        'model.norm': 'post', 'model.norm_epsilon': EPSILON, 'model.attention_bias': 'all',
        'model.activation': fields.activation('activation_function', 'gelu'), 'model.output_bias': True,
        'model.scale_embeddings': fields.only('scale_embedding', False, True),
        'model.share_embeddings': 'none' if not tied else 'all' if shared else 'target',
        'model.dropout': fields.number('dropout', 0.1),
        'model.attention_dropout': fields.number('attention_dropout', 0.0),
        'model.feed_forward_dropout': fields.number('activation_dropout', 0.0),
        'data.tokenizer.joint': shared,
    }


def refusals(model: ConfigDict) -> list[str]:
    """What keeps a model of ours from being one of theirs."""
    wanted = {'kind': 'transformer', 'norm': 'post', 'norm_function': 'layer_norm', 'position': 'sinusoidal',
              'feed_forward': 'plain', 'score': 'scaled_dot', 'window': 0}
    found = [f'model.{name}={model[name]}: Marian has {value}' for name, value in wanted.items()
             if model[name] != value]
    if model.num_key_value_heads not in (0, model.num_heads):
        found.append(f'model.num_key_value_heads={model.num_key_value_heads}: Marian has as many as heads')
    if any(width not in (0, model.d_model // model.num_heads) for width in (model.d_k, model.d_v)):
        found.append('model.d_k and model.d_v: Marian has d_model / num_heads')
    return found


def fields(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']], longest: int) -> dict[str, Any]:
    """Their config.json for a model of ours; `orders` are the original numbers of its tokens, by side."""
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


def generation(orders: Mapping[str, Int[np.ndarray, ' tokens']]) -> dict[str, Any]:
    """What their searches must know besides: the tokens that are never written."""
    never = {int(orders['target'][token]) for token in (PAD, BOS, UNK)} - {-1}
    return {'bad_words_ids': [[token] for token in sorted(never)]}


def links(model: ConfigDict, orders: Mapping[str, Int[np.ndarray, ' tokens']]) -> list[Link]:
    """All arrays of both."""
    stream = halves(model.d_model)
    table = {side: chain(rows(order), reordered(stream, 1)) for side, order in orders.items()}
    bias = chain(reshaped((1, -1), (-1,)), rows(orders['target']))
    if model.share_embeddings == 'all':
        found = [_link('model.shared.weight', 'target_embedding/embedding', table['target'])]
    else:
        found = [_link(f'model.{stack}.embed_tokens.weight', f'{side}_embedding/embedding', table[side])
                 for stack, side in (('encoder', 'source'), ('decoder', 'target'))]
    if model.share_embeddings == 'none':
        found.append(_link('lm_head.weight', 'output/kernel', chain(table['target'], TRANSPOSED)))
    found.append(_link('final_logits_bias', 'logits_bias', bias))
    for stack in 'encoder', 'decoder':
        count = model.num_decoder_layers if stack == 'decoder' else 0
        for number in range(count or model.num_layers):
            theirs, ours = f'model.{stack}.layers.{number}', f'{stack}/layers_{number}'
            parts = {'self_attn': 'self_attention', 'encoder_attn': 'cross_attention'}
            for part, name in list(parts.items())[:1 if stack == 'encoder' else 2]:
                found += _attention(model, f'{theirs}.{part}', f'{ours}/{name}', stream)
                found += _norm(f'{theirs}.{part}_layer_norm', f'{ours}/{name}_residual/norm', stream)
            found += _feed_forward(theirs, f'{ours}/feed_forward', stream)
            found += _norm(f'{theirs}.final_layer_norm', f'{ours}/feed_forward_residual/norm', stream)
    return found


def is_no_parameter(name: str) -> bool:
    """Whether an array follows from the config or from others: sinusoids, and copies of the embeddings."""
    return name.endswith('embed_positions.weight') or name in (
        'lm_head.weight', 'model.encoder.embed_tokens.weight', 'model.decoder.embed_tokens.weight')


def _link(theirs: str, ours: str, way: Way) -> Link:
    return Link(theirs, {ours: way})


def _attention(model: ConfigDict, theirs: str, ours: str, stream: Int[np.ndarray, ' d_model']) -> list[Link]:
    heads, d_model = model.num_heads, model.d_model
    to_heads = chain(TRANSPOSED, reordered(stream, 0), reshaped((d_model, -1), (d_model, heads, -1)))
    from_heads = chain(TRANSPOSED, reordered(stream, 1), reshaped((-1, d_model), (heads, -1, d_model)))
    found = [_link(f'{theirs}.out_proj.weight', f'{ours}/output/kernel', from_heads),
             _link(f'{theirs}.out_proj.bias', f'{ours}/output/bias', reordered(stream, 0))]
    for part, name in ('q_proj', 'query'), ('k_proj', 'key'), ('v_proj', 'value'):
        found += [_link(f'{theirs}.{part}.weight', f'{ours}/{name}/kernel', to_heads),
                  _link(f'{theirs}.{part}.bias', f'{ours}/{name}/bias', reshaped((-1,), (heads, -1)))]
    return found


def _feed_forward(theirs: str, ours: str, stream: Int[np.ndarray, ' d_model']) -> list[Link]:
    return [_link(f'{theirs}.fc1.weight', f'{ours}/inner/kernel', chain(TRANSPOSED, reordered(stream, 0))),
            _link(f'{theirs}.fc1.bias', f'{ours}/inner/bias', reshaped((-1,), (-1,))),
            _link(f'{theirs}.fc2.weight', f'{ours}/outer/kernel', chain(TRANSPOSED, reordered(stream, 1))),
            _link(f'{theirs}.fc2.bias', f'{ours}/outer/bias', reordered(stream, 0))]


def _norm(theirs: str, ours: str, stream: Int[np.ndarray, ' d_model']) -> Sequence[Link]:
    return [_link(f'{theirs}.weight', f'{ours}/scale', reordered(stream, 0)),
            _link(f'{theirs}.bias', f'{ours}/bias', reordered(stream, 0))]
