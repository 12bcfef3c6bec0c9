"""From `config.model` to a module: the table of architectures."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from ml_collections import ConfigDict

from model.blocks import BlockConfig
from model.language_model import LanguageModel
from model.patches import PatchTransformer
from model.recurrent import RNNSearch
from model.transformer import Transformer

BLOCK = frozenset(BlockConfig.__dataclass_fields__)


class Kind(NamedTuple):
    """An architecture: its module, what it can be trained for, and the options of config.model that it takes."""
    module: Callable[..., nn.Module]
    tasks: tuple[str, ...]
    own: frozenset[str]        # options that are attributes of the module
    group: str = ''            # name of the sub-dict of config.model with more attributes
    blocks: bool = True        # is stacked from blocks, and so takes the options of BlockConfig

    def options(self) -> frozenset[str]:
        """Names of config.model that mean something to this architecture."""
        return self.own | (BLOCK if self.blocks else {'dtype'}) | {'kind'} | ({self.group} if self.group else set())


KINDS = {
    'transformer': Kind(Transformer, ('translation',),
                        frozenset({'num_layers', 'share_embeddings', 'max_length', 'remat'})),
    'rnnsearch': Kind(RNNSearch, ('translation',), frozenset({'d_model', 'share_embeddings', 'dropout'}),
                      group='recurrent', blocks=False),
    'language_model': Kind(LanguageModel, ('language_model',),
                           frozenset({'num_layers', 'tie_embeddings', 'max_length', 'remat'})),
    'patches': Kind(PatchTransformer, ('classification', 'regression'), frozenset({'num_layers', 'remat'}),
                    group='patches'),
}


def build_model(model: ConfigDict | Mapping[str, Any], **sizes: Any) -> nn.Module:
    """The module that `config.model` describes, for data of these `sizes` (of vocabularies, of the output).

    Raises:
      ValueError: if sizes do not fit each other.
    """
    kind = KINDS[model['kind']]
    options = {name: model[name] for name in kind.own}
    if kind.group:
        options |= dict(model[kind.group])
    dtype = jnp.dtype(model['dtype'])
    if kind.blocks:
        options['config'] = BlockConfig(**{name: model[name] for name in BLOCK - {'dtype'}}, dtype=dtype)
    else:
        options['dtype'] = dtype
    known = inspect.signature(kind.module).parameters
    return kind.module(**options, **{name: size for name, size in sizes.items() if name in known})
