"""Ablation of attention heads, to see what each one does (Michel et al. 2019, arXiv:1905.10650)."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from inference.predict import Predictor
from inference.scores import corpus_scores
from inference.text import SearchOptions, TextModel
from inference.translate import Translator
from model import Params
from runtime.errors import UserError

Model = TypeVar('Model', bound=TextModel | Predictor)
SUBLAYERS = {'encoder': ('encoder', 'self_attention'), 'decoder': ('decoder', 'self_attention'),
             'cross': ('decoder', 'cross_attention')}


def head_counts(params: Params, kind: str) -> list[int]:
    """The number of heads of each layer, for attention of a kind: 'encoder' or 'decoder' (self-attention), 'cross'.

    Raises:
      UserError: if the model has no heads of this kind.
    """
    stack, sublayer = SUBLAYERS.get(kind, ('', ''))
    layers = params.get(stack, {})
    try:
        return [layers[f'layers_{index}'][sublayer]['output']['kernel'].shape[0]
                for index in range(sum(name.startswith('layers_') for name in layers)) or [0]]
    except KeyError:
        raise UserError(f'this model has no attention heads of kind {kind!r}; kinds are '
                        f'{", ".join(SUBLAYERS)}, and a recurrent model has no heads') from None


def without_head(model: Model, kind: str, layer: int, head: int) -> Model:
    """The model (a Translator, Generator or Predictor) with one head silent; the given one stays as it is.

    Attention's output is sum_i head_i W_o[i], so W_o[i] = 0 silences head i exactly. Nothing is compiled again.

    Args:
      model: what `inference.load(RUN).model` is.
      kind: 'encoder' or 'decoder' (self-attention) or 'cross'.
      layer: from 1, as in decode.py --look.
      head: from 1.

    Raises:
      UserError: if there is no such head.
    """
    counts = head_counts(model.params, kind)
    if not 1 <= layer <= len(counts) or not 1 <= head <= counts[layer - 1]:
        raise UserError(f'there is no head {head} in layer {layer}: {kind} attention has {len(counts)} layers of '
                        f'{counts[0]} heads, counted from 1')
    stack, sublayer = SUBLAYERS[kind]
    path = stack, f'layers_{layer - 1}', sublayer, 'output', 'kernel'
    flat: dict[Any, Any] = dict(flatten_dict(model.params))
    silenced = copy.copy(model)
    silenced.params = unflatten_dict(flat | {path: flat[path].at[head - 1].set(0)})
    return silenced


def scores_without_heads(model: Translator, pairs: Sequence[tuple[str, str]], kind: str, options: SearchOptions,
                         metric: str = 'exact_match') -> tuple[float, Float[np.ndarray, 'layer head']]:
    """The score of translations of `pairs` (source, reference), by the whole model and without each head.

    `metric` is a key of `corpus_scores`: 'exact_match' (a share of 1) or 'bleu'.
    """
    sources, references = zip(*pairs, strict=True)

    def score(model):
        outputs = [output.text for output in model.translate(sources, options)]
        return corpus_scores(outputs, references)[metric]

    counts = head_counts(model.params, kind)
    return score(model), np.array([[score(without_head(model, kind, 1 + layer, 1 + head)) for head in range(count)]
                                   for layer, count in enumerate(counts)], dtype=float)
