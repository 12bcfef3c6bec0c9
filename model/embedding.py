"""Token embeddings, and the output projection that may be one of them (section 3.4).

Weight sharing: Press and Wolf 2017, arXiv:1608.05859.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels.product import logits_product

ABSENT = -1e4  # the logit of a token that a vocabulary lacks: its probability is 0 in float32, and nothing overflows
SHARING = ('all', 'target', 'none')


def embedding(size: int, d_model: int, dtype: DTypeLike) -> nn.Embed:
    """A table of variance 1/d_model.

    Multiplied by sqrt(d_model), it gives inputs of variance 1; as the output projection it turns a normalised state
    into logits of variance 1.
    """
    init = nn.with_logical_partitioning(nn.initializers.normal(d_model ** -0.5), ('vocab', 'embed'))
    return nn.Embed(size, d_model, embedding_init=init, dtype=dtype)


class Projection(flax.struct.PyTreeNode):
    """States and the table that makes logits of them: logits[..., v] = states . table[v] + bias[v].

    A loss can be computed from both without the logits of a whole batch, which are often the largest array of a
    training (`model.losses.cross_entropy`).

    Attributes:
      states: float [..., d_model].
      table: float [vocab, d_model], in float32.
      bias: float [vocab], in float32; None where there is none.
      devices: how many devices share the logits, for who makes them in tiles that a device has room for.
    """
    states: Any  # an array; in jax.eval_shape's answers its shape, hence no annotation that is checked
    table: Any
    bias: Any = None
    devices: int = flax.struct.field(pytree_node=False, default=1)

    def logits(self) -> Float[Array, '*batch vocab']:
        """Returns the logits in float32; see `logits_product`."""
        logits = logits_product(self.states, self.table)
        return logits if self.bias is None else logits + self.bias


def with_absent(bias: Float[Array, '{size}'] | None, absent: Sequence[int], size: int) -> Float[Array, '{size}'] | None:
    """Returns the bias of the logits of `size` tokens, ABSENT for `absent` tokens; None if no logit has a bias."""
    if not absent:
        return bias
    return (jnp.zeros(size, jnp.float32) if bias is None else bias).at[jnp.array(absent)].set(ABSENT)


def tied(states: Float[Array, '*batch d_model'], table: nn.Embed) -> Projection:
    """The embedding, transposed, as the output projection."""
    return Projection(states, table.embedding)


class OutputProjection(nn.Module):
    """From states to logits where no embedding does it.

    Attributes:
      size: of the vocabulary.
    """
    size: int

    @nn.compact
    def __call__(self, states: Float[Array, '*batch d_model']) -> Projection:
        """The states and this module's matrix."""
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'vocab'))
        kernel = self.param('kernel', init, (states.shape[-1], self.size))
        return Projection(states, jnp.transpose(kernel))  # pyright: ignore[reportArgumentType] (flax unboxes it)


def logits_bias(module: nn.Module, size: int) -> Float[Array, '{size}']:
    """A parameter of `module`, to be called in its `setup`: what is added to the logits of each piece; at first 0."""
    init = nn.with_logical_partitioning(nn.initializers.zeros, ('vocab',))
    return module.param('logits_bias', init, (size,), unbox=True)


def check_sharing(sharing: str, source_vocab_size: int, target_vocab_size: int) -> None:
    """Raises ValueError if `sharing` is unknown, or one table is asked for two vocabularies."""
    if sharing not in SHARING:
        raise ValueError(f'share_embeddings={sharing!r} is not one of {", ".join(SHARING)}')
    if sharing == 'all' and source_vocab_size != target_vocab_size:
        raise ValueError(f'share_embeddings=all needs one vocabulary, but the source has '
                         f'{source_vocab_size} pieces and the target {target_vocab_size}')
