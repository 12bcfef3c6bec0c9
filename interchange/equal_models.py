"""Replaces options of a model by options that a foreign format supports. The outputs of the model are unchanged.

A replacement takes the options of a model and its arrays, {name: array}. It returns new options and new arrays.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from model.positional import sinusoids

Arrays = dict[str, np.ndarray]
HEAD_AXES = {'query/kernel': 1, 'key/kernel': 1, 'value/kernel': 1, 'query/bias': 0, 'key/bias': 0, 'value/bias': 0,
             'output/kernel': 0, 'score_weight': 0}  # {array of an attention layer: axis of the heads}


def head_widths(model: ConfigDict) -> tuple[int, int]:
    """Returns the numbers of elements of a head's keys and values, with the default for d_k=0 and d_v=0."""
    return model.d_k or model.d_model // model.num_heads, model.d_v or model.d_model // model.num_heads


def plain_refusals(model: ConfigDict, family: str, **required: Any) -> list[str]:
    """Returns a message for each option in `model` that a family of models with ordinary heads does not support.

    `family` is the name of the family in the messages. `required` are the options that have only one supported value.
    """
    refused = [f'model.{name}={model[name]}: {family} supports only {value}' for name, value in required.items()
               if model[name] != value]
    if model.num_key_value_heads not in (0, model.num_heads):
        refused.append(f'model.num_key_value_heads={model.num_key_value_heads}: {family} supports only num_heads')
    if model.d_model % model.num_heads:
        refused.append(f'model.d_model={model.d_model}: {family} needs a multiple of num_heads={model.num_heads}')
    elif {*head_widths(model)} != {model.d_model // model.num_heads}:
        refused.append(f'model.d_k and model.d_v: {family} supports only d_model / num_heads')
    return refused


def with_biases(model: ConfigDict, arrays: Arrays, output: int = 0) -> tuple[ConfigDict, Arrays]:
    """Returns the model with biases of 0 in attention and in the feed-forward sublayers.

    `output` is the number of logits. If it is not 0, the logits also get a bias of 0.
    """
    arrays = dict(arrays)
    for name, kernel in list(arrays.items()):
        if '/layers_' not in name or not name.endswith('/kernel'):
            continue
        part = name.split('/')[-2]
        shape = {'query': kernel.shape[1:], 'key': kernel.shape[1:], 'value': kernel.shape[1:],
                 **dict.fromkeys(('output', 'gate', 'inner', 'outer'), kernel.shape[-1:])}.get(part)
        if shape is not None:
            arrays.setdefault(name.removesuffix('kernel') + 'bias', np.zeros(shape, np.float32))
    if output:
        arrays.setdefault('logits_bias', np.zeros(output, np.float32))
    return _changed(model, attention_bias='all', feed_forward_bias=True, output_bias=bool(output)), arrays


def with_plain_embeddings(model: ConfigDict, arrays: Arrays) -> tuple[ConfigDict, Arrays]:
    """Returns a language model that does not scale its embeddings. Instead, the scale is multiplied into the table.

    Tied embeddings become two arrays, because the output projection is not scaled.
    """
    if not model.scale_embeddings:
        return model, arrays
    table, arrays = arrays['embedding/embedding'], dict(arrays)
    if model.tie_embeddings:
        arrays['output/kernel'] = table.T
    arrays['embedding/embedding'] = table * np.float32(model.d_model ** 0.5)
    return _changed(model, scale_embeddings=False, tie_embeddings=False), arrays


def with_table(model: ConfigDict, arrays: Arrays, length: int) -> tuple[ConfigDict, Arrays]:
    """Returns the model with a table of `length` positions instead of sinusoids.

    For a model without position encodings, the table is 0.
    """
    if model.position not in ('sinusoidal', 'none'):
        return model, arrays
    table = np.zeros((length, model.d_model), np.float32) if model.position == 'none' else np.asarray(
        sinusoids(jnp.arange(length), model.d_model), np.float32)
    return _changed(model, position='learned', max_length=length), arrays | {'position/table': table}


def without_heads(model: ConfigDict, arrays: Arrays,
                  removed: Mapping[str, Collection[int]]) -> tuple[ConfigDict, Arrays]:
    """Returns the model without some attention heads. The outputs equal the model's outputs with these heads set to 0.

    All attention layers of a model have the same number of heads. The layer with the most remaining heads determines
    this number. In layers with fewer remaining heads, some of the removed heads stay in the arrays. The rows of these
    heads in the output projection are set to 0.

    Args:
      model: the options of a model without relative positions, in which each head has its own keys and values.
      arrays: the parameters by name.
      removed: {path of an attention layer, such as 'decoder/layers_0/cross_attention': indices of heads}.
    """
    layers = [name.removesuffix('/output/kernel') for name in arrays if name.endswith('_attention/output/kernel')]
    count = max(1, *(model.num_heads - len({*removed.get(layer, ())}) for layer in layers))
    arrays = dict(arrays)
    for layer in layers:
        out = {*removed.get(layer, ())}
        kept = sorted(sorted(range(model.num_heads), key=lambda head: (head in out, head))[:count])
        zero = [index for index, head in enumerate(kept) if head in out]
        for name, axis in HEAD_AXES.items():
            if f'{layer}/{name}' in arrays:
                arrays[f'{layer}/{name}'] = np.take(arrays[f'{layer}/{name}'], kept, axis=axis)
        arrays[f'{layer}/output/kernel'][zero] = 0
    d_k, d_v = head_widths(model)
    return _changed(model, num_heads=count, d_k=d_k, d_v=d_v,
                    num_key_value_heads=min(count, model.num_key_value_heads)), arrays


def _changed(model: ConfigDict, **options) -> ConfigDict:
    return ConfigDict({**model.to_dict(), **options})
