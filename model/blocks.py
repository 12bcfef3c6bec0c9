"""The blocks that Transformers are stacked from, and the stack of those that only attend to themselves."""

from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from typing_extensions import override

from model.attention import MultiHeadAttention
from model.cache import Past, as_given, as_read, written
from model.dropout import Dropout, keep_mask
from model.positional import RelativeBias
from model.product import dot_general
from model.relation import UNRESTRICTED, Relation

ACTIVATIONS = {'relu': nn.relu, 'gelu': nn.gelu, 'silu': nn.silu}
NORMS = ('post', 'pre')

Sequence = Float[Array, 'batch length d_model']


class BlockConfig(flax.struct.PyTreeNode):
    """What a block is made of; defaults are the paper's base model.

    Attributes:
      d_model: width of the stream between blocks.
      d_ff: width inside the feed-forward sublayer.
      num_heads: attention heads.
      d_k: width of a head's queries and keys; 0 means d_model / num_heads.
      d_v: width of a head's values; 0 means d_model / num_heads.
      norm: 'post', LN(x + Sublayer(x)), the paper's; or 'pre', x + Sublayer(LN(x)), with one LN after the stack.
      score: attention's score function: 'scaled_dot' (the paper's), 'dot', 'general' or 'additive'.
      position: how a position is told from another, one of the SCHEMES of model/positional.py. Those in ADDED are added
        to the embeddings, those in RELATIVE act inside self-attention, 'none' is nowhere.
      attention_kernel: 'auto', 'plain', 'chunked' or 'fused'; see MultiHeadAttention.
      activation: 'relu' (the paper's), 'gelu' or 'silu'.
      dropout: on each sublayer's output and on the embeddings (section 5.4).
      attention_dropout: on the attention weights.
      feed_forward_dropout: inside the feed-forward sublayer, after the activation.
      layer_dropout: rate at which a whole sublayer is left out of a batch; see Residual.
      dtype: of the computation; parameters are float32.
    """
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int = 0
    d_v: int = 0
    norm: str = 'post'
    score: str = 'scaled_dot'
    position: str = 'sinusoidal'
    attention_kernel: str = 'auto'
    activation: str = 'relu'
    dropout: float = 0.1
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    layer_dropout: float = 0.0
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


def multi_head_attention(config: BlockConfig, to_itself: bool) -> MultiHeadAttention:
    """A block's attention, of a sequence to itself or to another one, whose positions are of another kind."""
    return MultiHeadAttention(config.num_heads, config.d_model, *config.head_widths(), score=config.score,
                              rotary=to_itself and config.position == 'rotary', kernel=config.attention_kernel,
                              dropout=config.attention_dropout, dtype=config.dtype)


def attend_to_past(attention: MultiHeadAttention, x: Float[Array, 'batch beam d_model'], past: Past,
                   first: Int[Array, ''], relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], Past]:
    """Self-attention of one position of every hypothesis to that and the earlier ones.

    `past` is returned with the keys from number `first` on filled in, one for each hypothesis. `relation` is of the
    hypotheses to all keys; its mask tells which of them a hypothesis remembers.
    """
    query, key, value = attention.queries_keys_values(x, relation.target)
    past = written(past, key, value, first)
    return attention.look(query, as_given(past['key']), as_given(past['value']), relation), past


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2, the same at each position (section 3.3, equation 2)."""
    config: BlockConfig

    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch d_model'],
                 deterministic: bool = True) -> Float[Array, '*batch d_model']:
        """Each position by itself."""
        config = self.config
        init = nn.initializers.xavier_uniform()
        to_inner = nn.with_logical_partitioning(init, ('embed', 'mlp'))
        to_outer = nn.with_logical_partitioning(init, ('mlp', 'embed'))
        hidden = nn.Dense(config.d_ff, dtype=config.dtype, kernel_init=to_inner, dot_general=dot_general,
                          name='inner')(inputs)
        hidden = ACTIVATIONS[config.activation](hidden)
        hidden = Dropout(config.feed_forward_dropout)(hidden, deterministic)
        return nn.Dense(config.d_model, dtype=config.dtype, kernel_init=to_outer, dot_general=dot_general,
                        name='outer')(hidden)


def layer_norm(config: BlockConfig, name: str | None = None) -> nn.LayerNorm:
    """The module of gamma * (x - mean) / sqrt(var + eps) + beta, with the biased variance, over the last axis."""
    return nn.LayerNorm(epsilon=1e-6, dtype=config.dtype, name=name)


class Residual(nn.Module):
    """The residual connection and the layer norm around a sublayer: post LN(x + f(x)), pre x + f(LN(x)).

    Much annotated code quotes the first and computes the second. They train at different learning rates:
    post-norm needs the warm-up.

    With layer dropout, training leaves f(...) out of a whole batch with probability `layer_dropout`: post LN(x), pre x
    (Fan et al. 2020, arXiv:1909.11556, whose unit is a layer; Huang et al. 2016, arXiv:1603.09382). What is kept is not
    scaled, and an evaluation keeps all.
    """
    config: BlockConfig

    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch d_model'], sublayer: Callable[[Array], Array],
                 deterministic: bool = True) -> Float[Array, '*batch d_model']:
        """The inputs with what `sublayer` makes of them."""
        norm = layer_norm(self.config, name='norm')
        drop = Dropout(self.config.dropout)

        def compute(x):
            return drop(sublayer(x), deterministic)

        def branch(x):
            if deterministic or not self.config.layer_dropout:
                return compute(x)
            # A branch and not a select, so that what is left out takes no time. Nothing in it may sow.
            keep = keep_mask(self.make_rng('dropout'), self.config.layer_dropout, ())
            return jax.lax.cond(keep, compute, jnp.zeros_like, x)

        if self.config.norm == 'pre':
            return inputs + branch(norm(inputs))
        return norm(inputs + branch(inputs))


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward. Without positions, equivariant to a permutation of its inputs.

    With a causal relation it is the block of a decoder-only language model.
    """
    config: BlockConfig

    @override
    def setup(self):
        self.self_attention = multi_head_attention(self.config, to_itself=True)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(self, x: Sequence, relation: Relation = UNRESTRICTED, deterministic: bool = True) -> Sequence:
        """All positions at once. `relation` is of the sequence to itself."""
        return self.prefill(x, relation, deterministic)[0]

    def prefill(self, x: Sequence, relation: Relation, deterministic: bool = True) -> tuple[Sequence, Past]:
        """The same, with what later positions will look back at."""
        past = {}

        def attend(y):
            key, value = self.self_attention.keys_values(y, relation.source)
            past['key'], past['value'] = as_read(key), as_read(value)
            return self.self_attention.attend(y, key, value, relation, deterministic)

        x = self.self_attention_residual(x, attend, deterministic)
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, deterministic), deterministic), past

    def decode_step(self, x: Float[Array, 'batch beam d_model'], past: Past, first: Int[Array, ''],
                    relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], Past]:
        """One position of every hypothesis; see `attend_to_past`."""
        def attend(y):
            nonlocal past
            attended, past = attend_to_past(self.self_attention, y, past, first, relation)
            return attended

        x = self.self_attention_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward), past


class DecoderBlock(nn.Module):
    """Masked self-attention, attention to the encoder's output, then feed-forward."""
    config: BlockConfig

    @override
    def setup(self):
        self.self_attention = multi_head_attention(self.config, to_itself=True)
        self.cross_attention = multi_head_attention(self.config, to_itself=False)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.cross_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(self, x: Sequence, memory: Float[Array, 'batch source d_model'], relation: Relation = UNRESTRICTED,
                 memory_relation: Relation = UNRESTRICTED, deterministic: bool = True) -> Sequence:
        """All target positions at once (training). `memory` is the encoder's output."""
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, y, relation, deterministic), deterministic)
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, memory_relation, deterministic), deterministic)
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, deterministic), deterministic)

    def memory_keys_values(self, memory: Float[Array, 'batch source d_model']) -> Past:
        """Cross-attention's keys and values: the same at every step, so computed once a sentence."""
        key, value = self.cross_attention.keys_values(memory)
        return {'key': as_read(key), 'value': as_read(value)}

    def decode_step(self, x: Float[Array, 'batch beam d_model'], memory: Past, memory_relation: Relation,
                    past: Past, first: Int[Array, ''],
                    relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], Past]:
        """One target position of every hypothesis; see `attend_to_past`.

        To cross-attention the hypotheses of one sentence are queries at the same memory, which hence is not
        repeated for each.
        """
        def attend(y):
            nonlocal past
            attended, past = attend_to_past(self.self_attention, y, past, first, relation)
            return attended

        def look_up(y):
            return self.cross_attention.attend(y, as_given(memory['key']), as_given(memory['value']), memory_relation)

        x = self.self_attention_residual(x, attend)
        x = self.cross_attention_residual(x, look_up)
        return self.feed_forward_residual(x, self.feed_forward), past


class SelfAttentionStack(nn.Module):
    """N blocks of self-attention over vectors that are already embedded (section 3.1).

    It is the encoder of the Transformer and of patches; with a causal relation, all of a decoder-only language model.
    """
    config: BlockConfig
    num_layers: int
    remat: bool = False

    @override
    def setup(self):
        # Rematerialisation trades a second forward pass for the memory of the activations inside a block.
        block = nn.remat(EncoderBlock, static_argnums=(3,)) if self.remat else EncoderBlock
        self.layers = [block(self.config) for _ in range(self.num_layers)]
        self.relative = RelativeBias(self.config.position, self.config.num_heads)
        if self.config.norm == 'pre':
            self.final_norm = layer_norm(self.config)

    def __call__(self, x: Sequence, relation: Relation | None = None, deterministic: bool = True) -> Sequence:
        """`relation` is of the sequence to itself; without one, everything sees everything."""
        relation = relation or Relation.within(jnp.arange(x.shape[1])[None])
        relation = relation.replace(bias=self.relative())
        for layer in self.layers:
            x = layer(x, relation, deterministic)
        return self._end(x)

    def prefill(self, x: Sequence, relation: Relation) -> tuple[Sequence, list[Past]]:
        """The same, with each layer's keys and values, for `decode_step` to go on from."""
        relation = relation.replace(bias=self.relative())
        pasts = []
        for layer in self.layers:
            x, past = layer.prefill(x, relation)
            pasts.append(past)
        return self._end(x), pasts

    def decode_step(self, x: Float[Array, 'batch beam d_model'], pasts: list[Past], first: Int[Array, ''],
                    relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], list[Past]]:
        """One position of every hypothesis; see `attend_to_past`."""
        relation, new = relation.replace(bias=self.relative()), []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, past = layer.decode_step(x, past, first, relation)
            new.append(past)
        return self._end(x), new

    def _end(self, x):
        return self.final_norm(x) if self.config.norm == 'pre' else x
