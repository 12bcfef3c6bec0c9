"""A small Transformer with random variables, and sentences for it."""

import jax.numpy as jnp

from model.blocks import BlockConfig
from model.transformer import Transformer
from tests.model.helpers import random_params
from tests.model.reference import PAD

VOCAB = 12
SOURCE = jnp.array([[5, 3, 9, 4, 11], [7, 8, 2, PAD, PAD]])
TARGET = jnp.array([[1, 4, 6, 9, 3, 10], [1, 5, 2, 8, 7, 4]])  # no token occurs twice in a row: see `influence`


def tiny(**options):
    """Returns options in which all widths differ, so that a confusion of two widths is an error."""
    return BlockConfig(**dict(d_model=8, d_ff=12, num_heads=2, d_k=10, d_v=5, dropout=0.0) | options)


def transformer(sizes=(VOCAB, VOCAB), layers=2, share_embeddings='none', position='sinusoidal', max_length=10,
                scale_embeddings=True, output_bias=False, decoder_layers=0, seed=0, **options):
    """Returns a small Transformer and random variables. `options` are options of the blocks."""
    model = Transformer(tiny(position=position, **options), layers, *sizes, share_embeddings=share_embeddings,
                        scale_embeddings=scale_embeddings, output_bias=output_bias, max_length=max_length,
                        num_decoder_layers=decoder_layers)
    return model, {'params': random_params(model, SOURCE, TARGET, seed=seed)}
