"""Residual connections and blocks against the reference; the positions of dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.blocks import (
    NORMS,
    BlockConfig,
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    Residual,
    layer_norm,
)
from model.relation import Relation
from tests.model import reference
from tests.model.helpers import close, float64, normal, random_params

VISIBLE = jnp.array([[True, True, True, True, False], [True, True, False, False, False]])


def tiny(**options):
    """Returns options in which all widths differ, so that a confusion of two widths is an error."""
    return BlockConfig(**dict(d_model=8, d_ff=12, num_heads=2, d_k=3, d_v=5, dropout=0.0) | options)


def rows(reference_block, params, *batches, **options):
    """Applies the reference to each sentence."""
    return np.stack([reference_block(float64(params), *row, **options)
                     for row in zip(*(np.asarray(batch, np.float64) for batch in batches), strict=True)])


def apply(module, params, *args, dropout_key=None, **kwargs):
    rngs = {} if dropout_key is None else {'dropout': jax.random.key(dropout_key)}
    return module.apply({'params': params}, *args, deterministic=dropout_key is None, rngs=rngs, **kwargs)


# Against the reference

def test_feed_forward_is_the_same_at_each_position():
    module, x = FeedForward(tiny()), normal(0, 2, 5, 8)
    params = random_params(module, x)
    close(apply(module, params, x)[1, 3], apply(module, params, x[1, 3]))


@pytest.mark.parametrize('norm', NORMS)
def test_residual_is_the_reference(norm):
    module, x = Residual(tiny(norm=norm)), normal(0, 2, 5, 8) * 3 + 1
    params = random_params(module, x, jnp.sin)
    close(apply(module, params, x, jnp.sin), reference.residual(float64(params), float64(x), np.sin, norm))


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('seed', [0, 1])
def test_encoder_block_is_the_reference(norm, seed):
    module, x = EncoderBlock(tiny(norm=norm)), normal(seed, 2, 5, 8)
    params = random_params(module, x, seed=seed)
    masks = np.broadcast_to(VISIBLE[:, None], (2, 5, 5))
    close(apply(module, params, x, Relation(visible=VISIBLE)),
          rows(reference.encoder_block, params, x, masks, norm=norm))


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('seed', [0, 1])
def test_decoder_block_is_the_reference(norm, seed):
    module, x, memory = DecoderBlock(tiny(norm=norm)), normal(seed, 2, 4, 8), normal(seed + 9, 2, 5, 8)
    params = random_params(module, x, memory, seed=seed)
    masks, memory_masks = np.stack([np.tri(4)] * 2), np.broadcast_to(VISIBLE[:, None], (2, 4, 5))
    relations = Relation.within(jnp.arange(4)[None], causal=True), Relation(visible=VISIBLE)
    close(apply(module, params, x, memory, *relations),
          rows(reference.decoder_block, params, x, memory, masks, memory_masks, norm=norm))


def test_heads_share_the_width_by_default():
    assert BlockConfig().head_widths() == (64, 64)
    assert BlockConfig(d_model=8, num_heads=2, d_k=3).head_widths() == (3, 4)
    assert BlockConfig(d_model=8, num_heads=3, d_k=3, d_v=5).head_widths() == (3, 5)


@pytest.mark.parametrize('widths', [{}, {'d_k': 3}, {'d_v': 3}])
def test_heads_that_do_not_divide_the_width_are_an_error(widths):
    with pytest.raises(ValueError, match='num_heads=3 does not divide d_model=8'):
        BlockConfig(d_model=8, num_heads=3, **widths).head_widths()


# Dropout

RATES = ['dropout', 'attention_dropout', 'feed_forward_dropout']


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('rate', RATES)
def test_dropout_acts_in_training_and_only_then(rate):
    x, memory = normal(0, 2, 4, 8), normal(1, 2, 5, 8)
    module, without = DecoderBlock(tiny(**{rate: 0.5})), DecoderBlock(tiny())
    params = random_params(module, x, memory)
    evaluated = apply(module, params, x, memory)
    trained = [apply(module, params, x, memory, dropout_key=key) for key in (0, 0, 1)]
    assert (evaluated == apply(without, params, x, memory)).all()
    assert (trained[0] == trained[1]).all()
    for one, other in (trained[0], trained[2]), (trained[0], evaluated):
        assert not np.allclose(one, other)


def test_dropout_of_everything_leaves_the_residual_stream():
    x = normal(0, 2, 4, 8)
    module = EncoderBlock(tiny(norm='pre', dropout=1.0))
    close(apply(module, random_params(module, x), x, dropout_key=0), x)
    module = EncoderBlock(tiny(norm='post', dropout=1.0))
    params = random_params(module, x)
    norms = [params[f'{name}_residual']['norm'] for name in ('self_attention', 'feed_forward')]
    expected = reference.layer_norm(float64(norms[1]), reference.layer_norm(float64(norms[0]), float64(x)))
    close(apply(module, params, x, dropout_key=0), expected)


def test_attention_dropout_is_on_the_weights():
    x = normal(0, 2, 4, 8)
    module = EncoderBlock(tiny(norm='pre', attention_dropout=1.0))
    params = random_params(module, x)
    without = params | {'self_attention': jax.tree.map(jnp.zeros_like, params['self_attention'])}
    close(apply(module, params, x, dropout_key=0), apply(module, without, x))


def test_feed_forward_dropout_is_before_the_second_layer():
    module, x = FeedForward(tiny(feed_forward_dropout=1.0)), normal(0, 2, 4, 8)
    params = random_params(module, x)
    close(apply(module, params, x, dropout_key=0), jnp.broadcast_to(params['outer']['bias'], x.shape))


@pytest.mark.parametrize('block, memory', [(EncoderBlock, []), (DecoderBlock, [normal(1, 2, 5, 8)])])
def test_dropout_inside_sublayers_is_in_every_sublayer(block, memory):
    x, module = normal(0, 2, 4, 8), block(tiny(norm='pre', attention_dropout=1.0, feed_forward_dropout=1.0))
    params = random_params(module, x, *memory)
    without = {name: jax.tree.map(jnp.zeros_like, part) if name.endswith('attention') else part
               for name, part in params.items()}
    outer = params['feed_forward']['outer']
    without['feed_forward'] = params['feed_forward'] | {'outer': outer | {'kernel': jnp.zeros_like(outer['kernel'])}}
    close(apply(module, params, x, *memory, dropout_key=0), apply(module, without, x, *memory))


@pytest.mark.parametrize('mean', [0, 100, 1000])
def test_layer_norm_is_right_where_the_mean_is_large(mean):
    x = normal(0, 4, 64) + mean  # the standard deviation is 1
    found = layer_norm(tiny()).apply({'params': {'scale': jnp.ones(64), 'bias': jnp.zeros(64)}}, x)
    exact = np.asarray(x, np.float64)
    expected = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    close(found, expected, atol=1e-6 * max(mean, 1))  # float32 rounds the inputs and their mean
