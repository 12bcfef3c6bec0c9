"""The table of architectures, and functions that build a module from `config.model`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from ml_collections import ConfigDict

from model.blocks import BlockConfig
from model.forecaster import Forecaster
from model.language_model import LanguageModel
from model.patches import PatchTransformer, check_stem, grid_sinusoids, patch_grid
from model.recurrent import RNNSearch
from model.transformer import Transformer

BLOCK = frozenset(BlockConfig.__dataclass_fields__)


class Kind(NamedTuple):
    """An architecture: its module, and the section of config.model with the options of this architecture ('' if none).

    `build_model` builds the module. Each attribute of the module, and of its `config` (BlockConfig), gets the value of
    the option with the same name in config.model or in this section.
    """
    module: Callable[..., nn.Module]
    section: str = ''


MODELS = {
    'transformer': Kind(Transformer),
    'rnnsearch': Kind(RNNSearch, 'recurrent'),
    'language_model': Kind(LanguageModel),
    'patches': Kind(PatchTransformer, 'patches'),
    'forecaster': Kind(Forecaster, 'patches'),
}


def build_model(model: ConfigDict | Mapping[str, Any], **sizes: Any) -> nn.Module:
    """Returns the Flax module that config.model describes.

    `sizes` are arguments of the module that depend on the data, such as the sizes of the vocabularies and the number
    of outputs. A run keeps these sizes in sizes.json.

    Raises:
      ValueError: if the sizes do not fit the options.
    """
    kind = MODELS[model['kind']]
    attributes = inspect.signature(kind.module).parameters
    options = {**model, **(model[kind.section] if kind.section else {}), **sizes, 'dtype': jnp.dtype(model['dtype']),
               'absent': tuple(sizes.get('absent', ()))}
    if 'config' in attributes:
        options['config'] = BlockConfig(**{name: options[name] for name in BLOCK})
    return kind.module(**{name: value for name, value in options.items() if name in attributes})


def check_fits(model: ConfigDict | Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Raises ValueError('OPTION: reason') if an option of config.model does not fit the sizes of the data."""
    if MODELS[model['kind']].module is not PatchTransformer:
        return
    option = 'model.patches.patch'
    try:
        space, patch = tuple(sizes['shape'][:-1]), model['patches']['patch']
        counts, _ = patch_grid(space, patch)
        option = 'model.patches.stem'
        if model['patches']['stem'] == 'convolutions':
            check_stem(space, patch, model['d_model'])
        option = 'model.d_model'
        if model['position'] == 'sinusoidal':
            grid_sinusoids((1,) * len(counts), model['d_model'])
    except ValueError as error:
        raise ValueError(f'{option}: {error}') from None
