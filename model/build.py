"""From `config.model` to a module: the table of architectures."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from ml_collections import ConfigDict

from model.blocks import BlockConfig
from model.language_model import LanguageModel
from model.patches import PatchTransformer, grid_sinusoids, patch_grid
from model.recurrent import RNNSearch
from model.transformer import Transformer

BLOCK = frozenset(BlockConfig.__dataclass_fields__)


class Kind(NamedTuple):
    """An architecture: its module, and the section of config.model that holds options of its own ('': none).

    An attribute of the module, or of its `config` (BlockConfig), is the option of the same name, of config.model or of
    that section.
    """
    module: Callable[..., nn.Module]
    section: str = ''


MODELS = {
    'transformer': Kind(Transformer),
    'rnnsearch': Kind(RNNSearch, 'recurrent'),
    'language_model': Kind(LanguageModel),
    'patches': Kind(PatchTransformer, 'patches'),
}


def build_model(model: ConfigDict | Mapping[str, Any], **sizes: Any) -> nn.Module:
    """The module that `config.model` describes, for data of these `sizes` (of vocabularies, of the output).

    Raises:
      ValueError: if sizes do not fit each other.
    """
    kind = MODELS[model['kind']]
    attributes = inspect.signature(kind.module).parameters
    given = {**model, **(model[kind.section] if kind.section else {}), **sizes, 'dtype': jnp.dtype(model['dtype']),
             'absent': tuple(sizes.get('absent', ()))}
    if 'config' in attributes:
        given['config'] = BlockConfig(**{name: given[name] for name in BLOCK})
    return kind.module(**{name: value for name, value in given.items() if name in attributes})


def check_fits(model: ConfigDict | Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Raises ValueError, 'OPTION: why', for an option of `config.model` that does not fit the data of these `sizes`."""
    if MODELS[model['kind']].module is not PatchTransformer:
        return
    option = 'model.patches.patch'
    try:
        counts, _ = patch_grid(tuple(sizes['shape'][:-1]), model['patches']['patch'])
        option = 'model.d_model'
        if model['position'] == 'sinusoidal':
            grid_sinusoids((1,) * len(counts), model['d_model'])
    except ValueError as error:
        raise ValueError(f'{option}: {error}') from None
