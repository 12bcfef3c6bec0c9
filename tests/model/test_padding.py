"""The padding token of every module over tokens is an attribute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from model.blocks import BlockConfig
from model.language_model import LanguageModel
from model.recurrent import RNNSearch
from model.transformer import Transformer
from tests.model.helpers import random_params

VOCAB, PAD = 12, 7
SOURCE = jnp.array([[5, 3, 9, 4, 11], [10, 8, 2, 0, 0]])
TARGET = jnp.array([[1, 4, 6, 9], [1, 5, 0, 0]])
RENAMED = jnp.arange(VOCAB).at[jnp.array([0, PAD])].set(jnp.array([PAD, 0]))
CONFIG = BlockConfig(d_model=8, d_ff=12, num_heads=2, dropout=0.0)


@pytest.mark.slow
@pytest.mark.parametrize('make, tokens', [
    (lambda **pad: Transformer(CONFIG, 1, VOCAB, VOCAB, **pad), (SOURCE, TARGET)),
    (lambda **pad: RNNSearch(VOCAB, VOCAB, d_model=6, d_hidden=5, **pad), (SOURCE, TARGET)),
    (lambda **pad: LanguageModel(CONFIG, 1, VOCAB, **pad), (SOURCE,))])
def test_a_vocabulary_may_number_its_padding_otherwise(make, tokens):
    params = random_params(make(), *tokens)
    table = next(path for path in flatten_dict(params) if path[-1] == 'embedding')
    renumbered = flatten_dict(params)
    renumbered[table] = renumbered[table][RENAMED]
    renumbered = unflatten_dict(renumbered)

    logits = jax.jit(make().apply)({'params': params}, *tokens)
    renamed = [RENAMED[each] for each in tokens]
    found = jax.jit(make(pad=PAD).apply)({'params': renumbered}, *renamed)[..., RENAMED]
    np.testing.assert_allclose(found, logits, rtol=1e-6, atol=1e-6)
    assert not np.allclose(jax.jit(make().apply)({'params': renumbered}, *renamed)[..., RENAMED], logits, atol=1e-3)
