"""The blocks that Transformers are stacked from (section 3.1)."""

from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from model.attention import Mask, MultiHeadAttention

ACTIVATIONS = {'relu': nn.relu, 'gelu': nn.gelu, 'silu': nn.silu}
NORMS = ('post', 'pre')

Sequence = Float[Array, 'batch length d_model']
SelfMask = Bool[Array, '#batch #heads #length #length']  # of a sequence that looks at itself
KeysValues = tuple[Float[Array, 'batch source heads d_k'], Float[Array, 'batch source heads d_v']]


@flax.struct.dataclass
class BlockConfig:
    """What a block is made of; defaults are the paper's base model.

    Attributes:
      d_model: width of the stream between blocks.
      d_ff: width inside the feed-forward sublayer.
      num_heads: attention heads.
      d_k: width of a head's queries and keys; 0 means d_model / num_heads.
      d_v: width of a head's values; 0 means d_model / num_heads.
      norm: 'post', LN(x + Sublayer(x)), the paper's; or 'pre', x + Sublayer(LN(x)), with one LN after the stack.
      activation: 'relu' (the paper's), 'gelu' or 'silu'.
      dropout: on each sublayer's output and on the embeddings (section 5.4).
      attention_dropout: on the attention weights.
      feed_forward_dropout: inside the feed-forward sublayer, after the activation.
      dtype: of the computation; parameters are float32.
    """
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int = 0
    d_v: int = 0
    norm: str = 'post'
    activation: str = 'relu'
    dropout: float = 0.1
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    def head_widths(self) -> tuple[int, int]:
        """d_k and d_v.

        Raises:
          ValueError: if one is left to d_model / num_heads and that is not a whole number.
        """
        if self.d_model % self.num_heads and not (self.d_k and self.d_v):
            raise ValueError(f'num_heads={self.num_heads} does not divide d_model={self.d_model}: '
                             'change one of them, or give d_k and d_v')
        return self.d_k or self.d_model // self.num_heads, self.d_v or self.d_model // self.num_heads


def multi_head_attention(config: BlockConfig) -> MultiHeadAttention:
    """Attention as a block holds it."""
    return MultiHeadAttention(config.num_heads, config.d_model, *config.head_widths(),
                              dropout=config.attention_dropout, dtype=config.dtype)


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2, the same at each position (section 3.3, equation 2)."""
    config: BlockConfig

    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch d_model'],
                 deterministic: bool = True) -> Float[Array, '*batch d_model']:
        config = self.config
        init = nn.initializers.xavier_uniform()
        hidden = nn.Dense(config.d_ff, dtype=config.dtype, kernel_init=init, name='inner')(inputs)
        hidden = ACTIVATIONS[config.activation](hidden)
        hidden = nn.Dropout(config.feed_forward_dropout)(hidden, deterministic=deterministic)
        return nn.Dense(config.d_model, dtype=config.dtype, kernel_init=init, name='outer')(hidden)


def layer_norm(config: BlockConfig, name: str | None = None) -> nn.LayerNorm:
    """gamma * (x - mean) / sqrt(var + eps) + beta, with the biased variance, over the last axis."""
    return nn.LayerNorm(epsilon=1e-6, dtype=config.dtype, name=name)


class Residual(nn.Module):
    """The residual connection and the layer norm around a sublayer: post LN(x + f(x)), pre x + f(LN(x)).

    Much annotated code quotes the first and computes the second. They train at different learning rates:
    post-norm needs the warm-up.
    """
    config: BlockConfig

    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch d_model'], sublayer: Callable[[Array], Array],
                 deterministic: bool = True) -> Float[Array, '*batch d_model']:
        norm = layer_norm(self.config, name='norm')
        drop = nn.Dropout(self.config.dropout, deterministic=deterministic)
        if self.config.norm == 'pre':
            return inputs + drop(sublayer(norm(inputs)))
        return norm(inputs + drop(sublayer(inputs)))


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward. Without positions, equivariant to a permutation of its inputs."""
    config: BlockConfig

    def setup(self):
        self.self_attention = multi_head_attention(self.config)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(self, x: Sequence, mask: SelfMask | None = None, deterministic: bool = True) -> Sequence:
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, y, mask, deterministic), deterministic)
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, deterministic), deterministic)


class DecoderBlock(nn.Module):
    """Masked self-attention, attention to the encoder's output, then feed-forward."""
    config: BlockConfig

    def setup(self):
        self.self_attention = multi_head_attention(self.config)
        self.cross_attention = multi_head_attention(self.config)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.cross_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(self, x: Sequence, memory: Float[Array, 'batch source d_model'], mask: SelfMask | None = None,
                 memory_mask: Mask | None = None, deterministic: bool = True) -> Sequence:
        """All target positions at once (training). `memory` is the encoder's output."""
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, y, mask, deterministic), deterministic)
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, memory_mask, deterministic), deterministic)
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, deterministic), deterministic)

    def memory_keys_values(self, memory: Float[Array, 'batch source d_model']) -> KeysValues:
        """Cross-attention's keys and values: the same at every step, so computed once a sentence."""
        return self.cross_attention.keys_values(memory)

    def decode_step(self, x: Float[Array, 'batch beam d_model'], memory: KeysValues, memory_mask: Mask,
                    past: dict[str, Array], position: Int[Array, '']) -> tuple[
                        Float[Array, 'batch beam d_model'], dict[str, Array]]:
        """One target position of every hypothesis.

        `past` holds the self-attention's 'key' and 'value' [batch, beam, length, heads, width] of the
        positions before `position`, and is returned with this one filled in. To cross-attention the
        hypotheses of one sentence are queries at the same memory, which hence is not repeated for each.
        """
        batch, beam, _ = x.shape

        def flat(array):
            return array.reshape(batch * beam, *array.shape[2:])

        def attend_to_past(y):
            nonlocal past
            new = dict(zip(('key', 'value'), self.self_attention.keys_values(y), strict=True))
            past = jax.tree.map(lambda old, now: jax.lax.dynamic_update_slice_in_dim(
                old, now[:, :, None].astype(old.dtype), position, axis=2), past, new)
            visible = (jnp.arange(past['key'].shape[2]) <= position)[None, None, None]
            attended = self.self_attention.attend(flat(y)[:, None], flat(past['key']), flat(past['value']), visible)
            return attended.reshape(x.shape)

        x = self.self_attention_residual(x, attend_to_past)
        x = self.cross_attention_residual(x, lambda y: self.cross_attention.attend(y, *memory, memory_mask))
        return self.feed_forward_residual(x, self.feed_forward), past
