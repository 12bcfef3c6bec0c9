"""Heads taken out are silent, and nothing else changes; what is missed is counted."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis.ablation import head_counts, scores_without_heads, without_head
from inference.text import Hypothesis, Output, SearchOptions
from inference.translate import Translator
from model.blocks import BlockConfig
from model.transformer import Transformer
from runtime.errors import UserError
from tests.model.helpers import close, random_params

CONFIG = BlockConfig(d_model=8, d_ff=8, num_heads=3, d_k=4, d_v=2, dropout=0.0)
MODULE = Transformer(CONFIG, num_layers=2, source_vocab_size=11, target_vocab_size=11)
SOURCE, TARGET = jnp.array([[4, 5, 6, 0]]), jnp.array([[1, 7, 8]])
PARAMS = random_params(MODULE, SOURCE, TARGET)


def logits(params):
    return MODULE.apply({'params': params}, SOURCE, TARGET)


@pytest.mark.parametrize('kind, path', [('encoder', ('encoder', 'layers_1', 'self_attention', 'output')),
                                        ('decoder', ('decoder', 'layers_1', 'self_attention', 'output')),
                                        ('cross', ('decoder', 'layers_1', 'cross_attention', 'output'))])
def test_a_head_taken_out_says_nothing(kind, path):
    def silence(next_function, args, kwargs, context):
        """What the head found is set to 0 on its way into the output projection, the parameters left alone."""
        if context.module.path == path and context.method_name == '__call__':
            args = args[0].at[..., 2, :].set(0), *args[1:]
        return next_function(*args, **kwargs)

    with nn.intercept_methods(silence):
        expected = logits(PARAMS)
    model = Translator(MODULE, PARAMS, {}, 8)
    silenced = without_head(model, kind, layer=2, head=3)
    close(logits(silenced.params), expected)
    assert np.abs(logits(silenced.params) - logits(PARAMS)).max() > 1e-3
    assert model.params is PARAMS
    changed = jax.tree.map(lambda one, other: bool((one != other).any()), silenced.params, dict(PARAMS))
    assert sum(jax.tree.leaves(changed)) == 1


def test_heads_that_are_not_there_are_named():
    model = Translator(MODULE, PARAMS, {}, 8)
    assert head_counts(PARAMS, 'cross') == [3, 3]
    with pytest.raises(UserError, match='no head 4 in layer 1: cross attention has 2 layers of 3 heads'):
        without_head(model, 'cross', 1, 4)
    with pytest.raises(UserError, match='no head 1 in layer 0'):
        without_head(model, 'encoder', 0, 1)
    with pytest.raises(UserError, match="no attention heads of kind 'sideways'"):
        without_head(model, 'sideways', 1, 1)
    with pytest.raises(UserError, match='a recurrent model has no heads'):
        head_counts({'decoder': {'layers_0': {'cross_attention': {'weight': 0}}}}, 'cross')


class OneHeadMatters(Translator):
    """Translates rightly as long as the second head of the first layer speaks; otherwise half of the time."""

    def translate(self, sentences, options=None, *, first=0):
        speaks = (self.params['decoder']['layers_0']['cross_attention']['output']['kernel'][1] != 0).any()
        return [Output(text, [], [Hypothesis(text.upper() if speaks or row % 2 else '?', [], 0.0, 0.0)])
                for row, text in enumerate(sentences)]


def test_what_each_head_is_worth():
    pairs = [(text, text.upper()) for text in 'abcdef']
    whole, without = scores_without_heads(OneHeadMatters(MODULE, PARAMS, {}, 8), pairs, 'cross', SearchOptions())
    assert whole == 1
    np.testing.assert_array_equal(without, [[1, 0.5, 1], [1, 1, 1]])
