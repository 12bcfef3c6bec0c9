"""The blocks that Transformers are stacked from, and the stack of those that only attend to themselves."""

import functools
from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from typing_extensions import override

from kernels.product import PRODUCT, add_bias, dot_general
from kernels.random_masks import keep_mask
from model.attention import MultiHeadAttention
from model.cache import Past, as_given, as_read, written
from model.dropout import Dropout
from model.places import place, reading
from model.positional import RelativeBias, Rotary
from model.relation import UNRESTRICTED, Relation

ACTIVATIONS = {'relu': nn.relu, 'gelu': nn.gelu, 'gelu_exact': functools.partial(nn.gelu, approximate=False),
               'silu': nn.silu}
NORMS = ('post', 'pre')
NORM_FUNCTIONS = {'layer_norm': nn.LayerNorm, 'rms_norm': nn.RMSNorm}
FEED_FORWARDS = ('plain', 'gated')

Sequence = Float[Array, 'batch length d_model']


class BlockConfig(flax.struct.PyTreeNode):
    """What a block is made of; defaults are the paper's base model.

    Attributes:
      d_model: width of the stream between blocks.
      d_ff: width inside the feed-forward sublayer.
      num_heads: attention heads.
      d_k: width of a head's queries and keys; 0 means d_model / num_heads.
      d_v: width of a head's values; 0 means d_model / num_heads.
      num_key_value_heads: heads of keys and values, each of which serves a group of heads; 0 means num_heads.
      attention_bias: biases of attention's projections: 'none' (the paper's), 'qkv' or 'all'.
      norm: 'post', LN(x + Sublayer(x)), the paper's; or 'pre', x + Sublayer(LN(x)), with one LN after the stack.
      norm_function: 'layer_norm' (the paper's) or 'rms_norm'; see `layer_norm`.
      norm_epsilon: added to the variance, or to the mean square.
      score: attention's score function: 'scaled_dot' (the paper's), 'dot', 'general' or 'additive'.
      position: how a position is told from another, one of the SCHEMES of model/positional.py. Those in ADDED are added
        to the embeddings, those in RELATIVE act inside self-attention, 'none' is nowhere.
      rotary_base, rotary_scaling, rotary_factor, rotary_original_length: of rotary positions; see `Rotary`.
      window: self-attention sees only positions at a distance below it, itself included; 0 means all.
      attention_kernel: 'auto', 'plain', 'chunked' or 'fused'; see MultiHeadAttention.
      feed_forward: 'plain' (the paper's) or 'gated'; see FeedForward.
      feed_forward_bias: whether it has biases.
      activation: 'relu' (the paper's), 'gelu' (its tanh form), 'gelu_exact' or 'silu'.
      dropout: on each sublayer's output and on the embeddings (section 5.4).
      attention_dropout: on the attention weights.
      feed_forward_dropout: inside the feed-forward sublayer, after the activation.
      layer_dropout: rate at which a whole sublayer is left out of a batch; see Residual.
      remat: recompute the blocks in the backward pass instead of keeping their activations.
      remat_keep: what such blocks keep: 'nothing', or their 'products' of activations with weights.
      dtype: of the computation; parameters are float32.
    """
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int = 0
    d_v: int = 0
    num_key_value_heads: int = 0
    attention_bias: str = 'none'
    norm: str = 'post'
    norm_function: str = 'layer_norm'
    norm_epsilon: float = 1e-6
    score: str = 'scaled_dot'
    position: str = 'sinusoidal'
    rotary_base: float = 10000.0
    rotary_scaling: str = 'none'
    rotary_factor: float = 1.0
    rotary_original_length: int = 8192
    window: int = 0
    attention_kernel: str = 'auto'
    feed_forward: str = 'plain'
    feed_forward_bias: bool = True
    activation: str = 'relu'
    dropout: float = 0.1
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    layer_dropout: float = 0.0
    remat: bool = False
    remat_keep: str = 'nothing'
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

    def rotary(self) -> Rotary | None:
        """How self-attention turns its queries and keys; None where the positions are not rotary."""
        if self.position != 'rotary':
            return None
        return Rotary(self.rotary_base, self.rotary_scaling, self.rotary_factor, self.rotary_original_length)


def multi_head_attention(config: BlockConfig, to_itself: bool) -> MultiHeadAttention:
    """A block's attention, of a sequence to itself or to another one, whose positions are of another kind."""
    return MultiHeadAttention(config.num_heads, config.d_model, *config.head_widths(), score=config.score,
                              rotary=config.rotary() if to_itself else None, kernel=config.attention_kernel,
                              dropout=config.attention_dropout, num_key_value_heads=config.num_key_value_heads,
                              bias=config.attention_bias, dtype=config.dtype)


def attend_to_past(attention: MultiHeadAttention, x: Float[Array, 'batch beam d_model'], past: Past,
                   first: Int[Array, ''], relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], Past]:
    """Self-attention of one position of every hypothesis to that and the earlier ones.

    `past` is returned with the keys from number `first` on filled in, one for each hypothesis. `relation` is of the
    hypotheses to all keys; its mask tells which of them a hypothesis remembers.
    """
    query, key, value = attention.queries_keys_values(x, relation.target)
    past = written(past, key, value, first)
    return attention.look(query, as_given(past['key']), as_given(past['value']), relation), past


class Dense(nn.Module):
    """x W + b, with the product and the sum of kernels/product.py. The parameters are those of nn.Dense.

    Attributes:
      features: width of the output.
      axes: names of the axes of W.
      use_bias: whether there is b.
      dtype: of the computation; parameters are float32.
    """
    features: int
    axes: tuple[str, str]
    use_bias: bool = True
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch d']) -> Float[Array, '*batch features']:
        """Each position by itself."""
        init = nn.with_logical_partitioning(nn.initializers.xavier_uniform(), self.axes)
        kernel = self.param('kernel', init, (inputs.shape[-1], self.features), unbox=True)
        last_with_first = ((inputs.ndim - 1,), (0,)), ((), ())
        product = dot_general(inputs.astype(self.dtype), kernel.astype(self.dtype), last_with_first)
        if not self.use_bias:
            return product
        return add_bias(product, self.param('bias', nn.initializers.zeros, (self.features,)).astype(self.dtype))


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2, the same at each position (section 3.3, equation 2).

    Gated: (phi(x W_gate) * (x W_1)) W_2, a gated linear unit, for any activation phi; with silu it is SwiGLU, with gelu
    GEGLU (Shazeer 2020, arXiv:2002.05202, equations 5 and 6). It has three matrices: 2/3 of the width d_ff has as many
    parameters as the plain one.
    """
    config: BlockConfig

    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch d_model'],
                 deterministic: bool = True) -> Float[Array, '*batch d_model']:
        """Each position by itself."""
        config = self.config

        def dense(width, axes, name):
            return Dense(width, axes, config.feed_forward_bias, config.dtype, name=name)

        activation = ACTIVATIONS[config.activation]
        hidden = dense(config.d_ff, ('embed', 'mlp'), 'inner')(inputs)
        if config.feed_forward == 'gated':
            hidden = activation(dense(config.d_ff, ('embed', 'mlp'), 'gate')(inputs)) * hidden
        else:
            hidden = activation(hidden)
        hidden = Dropout(config.feed_forward_dropout)(place(self, 'hidden', hidden), deterministic)
        return place(self, '', dense(config.d_model, ('mlp', 'embed'), 'outer')(hidden))


def layer_norm(config: BlockConfig, name: str | None = None) -> nn.LayerNorm | nn.RMSNorm:
    """Returns the module of gamma * (x - mean) / sqrt(var + eps) + beta, with the biased variance, over the last axis.

    The variance is mean((x - mean)^2). Flax's default, mean(x^2) - mean^2, cancels in float32: where the mean is 1,000
    times the standard deviation, the outputs are wrong by 0.3. 'rms_norm' is gamma * x / sqrt(mean(x^2) + eps) (Zhang
    and Sennrich 2019, arXiv:1910.07467, equation 4).
    """
    return NORM_FUNCTIONS[config.norm_function](epsilon=config.norm_epsilon, use_fast_variance=False,
                                                dtype=config.dtype, name=name)


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
            return place(self, '', inputs + branch(norm(inputs)))
        return place(self, '', norm(inputs + branch(inputs)))


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
        x = self.feed_forward_residual(x, lambda y: self.feed_forward(y, deterministic), deterministic)
        return place(self, '', x), past

    def decode_step(self, x: Float[Array, 'batch beam d_model'], past: Past, first: Int[Array, ''],
                    relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], Past]:
        """One position of every hypothesis; see `attend_to_past`."""
        def attend(y):
            nonlocal past
            attended, past = attend_to_past(self.self_attention, y, past, first, relation)
            return attended

        x = self.self_attention_residual(x, attend)
        return place(self, '', self.feed_forward_residual(x, self.feed_forward)), past


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
        x = self.feed_forward_residual(x, lambda y: self.feed_forward(y, deterministic), deterministic)
        return place(self, '', x)

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
        return place(self, '', self.feed_forward_residual(x, self.feed_forward)), past


def rematerialised(block: type[nn.Module], config: BlockConfig, deterministic: int) -> type[nn.Module]:
    """`block` as it is, or such that its backward pass computes again what it needs: time for memory.

    What is kept is the block's input and what `config.remat_keep` names (Chen et al. 2016, arXiv:1604.06174;
    Korthikanti et al. 2022, arXiv:2205.05198, section 5). `deterministic` is the place of that argument of the block.
    """
    if not config.remat or reading():
        return block
    products = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(PRODUCT))
    policy = {'nothing': None, 'products': products}[config.remat_keep]
    return nn.remat(block, policy=policy, static_argnums=(deterministic,))


class SelfAttentionStack(nn.Module):
    """N blocks of self-attention over vectors that are already embedded (section 3.1).

    It is the encoder of the Transformer and of patches; with a causal relation, all of a decoder-only language model.
    """
    config: BlockConfig
    num_layers: int

    @override
    def setup(self):
        block = rematerialised(EncoderBlock, self.config, deterministic=3)
        self.layers = [block(self.config) for _ in range(self.num_layers)]
        self.relative = RelativeBias(self.config.position, self.config.num_heads)
        if self.config.norm == 'pre':
            self.final_norm = layer_norm(self.config)

    def __call__(self, x: Sequence, relation: Relation | None = None, deterministic: bool = True) -> Sequence:
        """`relation` is of the sequence to itself; without one, everything sees everything."""
        relation = relation or Relation.within(np.arange(x.shape[1])[None])
        relation = relation.replace(bias=self.relative(), window=self.config.window)
        x = place(self, 'input', x)
        for layer in self.layers:
            x = layer(x, relation, deterministic)
        return self._end(x)

    def prefill(self, x: Sequence, relation: Relation) -> tuple[Sequence, list[Past]]:
        """The same, with each layer's keys and values, for `decode_step` to go on from."""
        relation = relation.replace(bias=self.relative(), window=self.config.window)
        x, pasts = place(self, 'input', x), []
        for layer in self.layers:
            x, past = layer.prefill(x, relation)
            pasts.append(past)
        return self._end(x), pasts

    def decode_step(self, x: Float[Array, 'batch beam d_model'], pasts: list[Past], first: Int[Array, ''],
                    relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], list[Past]]:
        """One position of every hypothesis; see `attend_to_past`."""
        relation = relation.replace(bias=self.relative(), window=self.config.window)
        x, new = place(self, 'input', x), []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, past = layer.decode_step(x, past, first, relation)
            new.append(past)
        return self._end(x), new

    def _end(self, x):
        return place(self, '', self.final_norm(x) if self.config.norm == 'pre' else x)
