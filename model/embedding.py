"""Token embeddings and the output projection. They may share one table (section 3.4).

Press and Wolf 2017 (arXiv:1608.05859) introduced this sharing of weights.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from typing_extensions import override

from kernels.product import logits_product

ABSENT = -1e4  # the logit of a token that is not in the vocabulary. Its probability is 0 in float32, without overflow
SHARING = ('all', 'target', 'none')


class Embedding(nn.Module):
    """An embedding layer. The initial values of its table have variance 1/d_model.

    So embeddings that are multiplied by sqrt(d_model) have variance 1. If the table is also the output projection, the
    logits of layer-normalised states have variance 1.

    Attributes:
      size: number of tokens in the vocabulary.
      d_model: width of the embeddings.
      dtype: dtype of the embeddings; the table is float32.
    """
    size: int
    d_model: int
    dtype: DTypeLike

    @override
    def setup(self):
        init = nn.with_logical_partitioning(nn.initializers.normal(self.d_model ** -0.5), ('vocab', 'embed'))
        self.embedding = self.param('embedding', init, (self.size, self.d_model), jnp.float32, unbox=True)

    def __call__(self, tokens: Int[Array, '*batch']) -> Float[Array, '*batch d_model']:
        """Returns the rows of the table for the tokens."""
        # nn.Embed converts the whole table to `dtype` first, so that the gradient of a row is a sum in `dtype` over all
        # occurrences of the token. In bfloat16, a sum of ones does not grow beyond 256.
        return jnp.take(self.embedding, tokens, axis=0).astype(self.dtype)


class Projection(flax.struct.PyTreeNode):
    """The factors of the logits: logits[..., v] = states . table[v] + bias[v].

    The logits of a whole batch are often the largest array in training. A loss can be computed from the factors without
    all logits in memory (`model.losses.cross_entropy`).

    Attributes:
      states: float [..., d_model].
      table: float32 [vocab, d_model].
      bias: float32 [vocab], or None.
      devices: number of devices that share the batch. A loss chooses the size of its tiles by this number.
    """
    states: Any  # not annotated as an array, because jax.eval_shape replaces it by its shape
    table: Any
    bias: Any = None
    devices: int = flax.struct.field(pytree_node=False, default=1)

    def logits(self) -> Float[Array, '*batch vocab']:
        """Returns the logits in float32, computed by `logits_product`."""
        logits = logits_product(self.states, self.table)
        return logits if self.bias is None else logits + self.bias


def with_absent(bias: Float[Array, '{size}'] | None, absent: Sequence[int], size: int) -> Float[Array, '{size}'] | None:
    """Returns the bias of `size` logits, in which `absent` tokens have the value ABSENT.

    If `bias` is None, the bias of the remaining tokens is 0. If `absent` is empty, returns `bias` unchanged.
    """
    if not absent:
        return bias
    return (jnp.zeros(size, jnp.float32) if bias is None else bias).at[jnp.array(absent)].set(ABSENT)


class OutputProjection(nn.Module):
    """An output matrix that is not shared with an embedding.

    Attributes:
      size: number of tokens in the vocabulary.
    """
    size: int

    @nn.compact
    def __call__(self, states: Float[Array, '*batch d_model']) -> Projection:
        """Returns a Projection with the states and the output matrix."""
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'vocab'))
        kernel = self.param('kernel', init, (states.shape[-1], self.size), jnp.float32)
        return Projection(states, jnp.transpose(kernel))  # pyright: ignore[reportArgumentType] (flax unboxes it)


def logits_bias(module: nn.Module, size: int) -> Float[Array, '{size}']:
    """Returns a bias of the logits, a new parameter of `module`, initially 0. Call this function in `module.setup`."""
    init = nn.with_logical_partitioning(nn.initializers.zeros, ('vocab',))
    return module.param('logits_bias', init, (size,), jnp.float32, unbox=True)


def check_sharing(sharing: str, source_vocab_size: int, target_vocab_size: int) -> None:
    """Raises ValueError if `sharing` is unknown, or if it is 'all' and the vocabularies have different sizes."""
    if sharing not in SHARING:
        raise ValueError(f'share_embeddings={sharing!r} must be one of {", ".join(SHARING)}')
    if sharing == 'all' and source_vocab_size != target_vocab_size:
        raise ValueError(f'share_embeddings=all needs one vocabulary, but the source has '
                         f'{source_vocab_size} pieces and the target has {target_vocab_size}. Use '
                         'share_embeddings=target')
