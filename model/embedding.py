"""Token embeddings, and the output projection that may be one of them (section 3.4).

Weight sharing: Press and Wolf 2017, arXiv:1608.05859.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

SHARING = ('all', 'target', 'none')


def embedding(size: int, d_model: int, dtype: DTypeLike) -> nn.Embed:
    """A table of variance 1/d_model.

    Multiplied by sqrt(d_model), it gives inputs of variance 1; as the output projection it turns a normalised state
    into logits of variance 1.
    """
    init = nn.with_logical_partitioning(nn.initializers.normal(d_model ** -0.5), ('vocab', 'embed'))
    return nn.Embed(size, d_model, embedding_init=init, dtype=dtype)


def output_projection(size: int, dtype: DTypeLike) -> nn.Dense:
    """From a state to logits, where no embedding does it."""
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'vocab'))
    return nn.Dense(size, use_bias=False, dtype=dtype, kernel_init=init)


def check_sharing(sharing: str, source_vocab_size: int, target_vocab_size: int) -> None:
    """Raises ValueError if `sharing` is unknown, or one table is asked for two vocabularies."""
    if sharing not in SHARING:
        raise ValueError(f'share_embeddings={sharing!r} is not one of {", ".join(SHARING)}')
    if sharing == 'all' and source_vocab_size != target_vocab_size:
        raise ValueError(f'share_embeddings=all needs one vocabulary, but the source has '
                         f'{source_vocab_size} pieces and the target {target_vocab_size}')


def tied_logits(states: Float[Array, 'batch length d_model'], table: nn.Embed) -> Float[Array, 'batch length vocab']:
    """Logits in float32, from the embedding, transposed, as the output projection."""
    weight = table.embedding.astype(states.dtype)
    return jnp.einsum('btd,vd->btv', states, weight, preferred_element_type=jnp.float32)
