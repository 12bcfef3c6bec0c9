"""From `config.model` to a module."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from ml_collections import ConfigDict

from model.blocks import BlockConfig
from model.transformer import Transformer


def build_model(model: ConfigDict | Mapping[str, Any], source_vocab_size: int, target_vocab_size: int) -> nn.Module:
    """The module that `config.model` describes, for vocabularies of these sizes.

    Raises:
      ValueError: if sizes do not fit each other.
    """
    model = dict(model)
    fields = set(BlockConfig.__dataclass_fields__)
    block = BlockConfig(**{name: model.pop(name) for name in fields & set(model) - {'dtype'}},
                        dtype=jnp.dtype(model.pop('dtype')))
    return Transformer(block, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size, **model)
