"""The blocks of Transformers, and the stack of blocks with self-attention only."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from typing_extensions import override

from kernels.dense import Dense
from kernels.product import PRODUCT
from kernels.random_masks import keep_mask
from model.attention import MultiHeadAttention
from model.cache import Past
from model.dropout import Dropout
from model.places import place, reading
from model.positional import RelativeBias, Rotary
from model.relation import UNRESTRICTED, Relation

ACTIVATIONS = {'relu': nn.relu, 'gelu': nn.gelu, 'gelu_exact': functools.partial(nn.gelu, approximate=False),
               'silu': nn.silu}
NORMS = ('post', 'pre')
NORM_FUNCTIONS = {'layer_norm': nn.LayerNorm, 'rms_norm': nn.RMSNorm}
FEED_FORWARDS = ('plain', 'gated')
REMAT_KEEPS = ('nothing', 'products')

Sequence = Float[Array, 'batch length d_model']


class BlockConfig(flax.struct.PyTreeNode):
    """The options of an encoder or decoder block. The defaults are the paper's base model.

    configs/options.py explains the attributes, which are options of config.model. `dtype` is the dtype of the
    computation; parameters are float32.
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
        """Returns d_k and d_v.

        Raises:
          ValueError: if d_k or d_v is 0 and num_heads does not divide d_model.
        """
        if self.d_model % self.num_heads and not (self.d_k and self.d_v):
            raise ValueError(f'num_heads={self.num_heads} does not divide d_model={self.d_model}. '
                             'Change num_heads or d_model, or set d_k and d_v')
        return self.d_k or self.d_model // self.num_heads, self.d_v or self.d_model // self.num_heads

    def rotary(self) -> Rotary | None:
        """Returns the rotation angles of self-attention's queries and keys, or None if positions are not rotary."""
        if self.position != 'rotary':
            return None
        return Rotary(self.rotary_base, self.rotary_scaling, self.rotary_factor, self.rotary_original_length)


def multi_head_attention(config: BlockConfig, to_itself: bool) -> MultiHeadAttention:
    """Returns the self-attention module of a block if `to_itself` is True, otherwise the cross-attention module.

    Only self-attention uses rotary positions.
    """
    return MultiHeadAttention(config.num_heads, config.d_model, *config.head_widths(), score=config.score,
                              rotary=config.rotary() if to_itself else None, kernel=config.attention_kernel,
                              dropout=config.attention_dropout, num_key_value_heads=config.num_key_value_heads,
                              bias=config.attention_bias, dtype=config.dtype)


def attend_to_past(attention: MultiHeadAttention, x: Float[Array, 'batch beam d_model'], past: Past,
                   first: Int[Array, ''], relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], Past]:
    """Computes self-attention at the newest position of every hypothesis, for one step of decoding.

    Returns the outputs and the new cache of keys and values (`Past`). In the new cache, the keys of this position begin
    at index `first`, with one key for each hypothesis. The mask of `relation` hides the keys of other hypotheses.
    """
    query, key, value = attention.queries_keys_values(x, relation.target)
    past = past.write(key, value, first)
    return attention.attend_projected(query, *past.keys_values(), relation), past


class FeedForward(nn.Module):
    """The feed-forward sublayer max(0, x W_1 + b_1) W_2 + b_2, the same at each position (section 3.3, equation 2).

    config.activation replaces max(0, .). config.feed_forward_bias=False omits the biases. In training, dropout is
    applied before W_2.

    With feed_forward='gated', the sublayer is (phi(x W_gate + b_gate) * (x W_1 + b_1)) W_2 + b_2, a gated linear unit
    with the activation phi. This unit is called SwiGLU if phi = silu, and GEGLU if phi = gelu (Shazeer 2020,
    arXiv:2002.05202, equations 5 and 6). A gated sublayer has three matrices, so with 2/3 of d_ff it has as many
    weights (without biases) as a plain sublayer.
    """
    config: BlockConfig

    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch d_model'],
                 deterministic: bool = True) -> Float[Array, '*batch d_model']:
        """Applies the sublayer to each position.

        Raises:
          ValueError: if config.feed_forward or config.activation is unknown.
        """
        config = self.config
        for name, allowed in ('feed_forward', FEED_FORWARDS), ('activation', ACTIVATIONS):
            if (value := getattr(config, name)) not in allowed:
                raise ValueError(f'{name}={value!r} must be one of {", ".join(allowed)}')

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
    """Returns a layer norm over the last axis: gamma * (x - mean) / sqrt(var + eps) + beta, with the biased variance.

    The source is Ba et al. 2016 (arXiv:1607.06450). The variance is computed as mean((x - mean)^2). Flax's default,
    mean(x^2) - mean^2, loses precision in float32: if the mean is 1,000 times the standard deviation, the outputs have
    errors of 0.3. With norm_function='rms_norm', the function returns RMSNorm instead: gamma * x / sqrt(mean(x^2) +
    eps) (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4).

    Raises:
      ValueError: if config.norm_function is unknown.
    """
    if config.norm_function not in NORM_FUNCTIONS:
        raise ValueError(f'norm_function={config.norm_function!r} must be one of {", ".join(NORM_FUNCTIONS)}')
    return NORM_FUNCTIONS[config.norm_function](epsilon=config.norm_epsilon, use_fast_variance=False,
                                                dtype=config.dtype, name=name)


class Residual(nn.Module):
    """The residual connection and the layer norm around a sublayer f.

    norm='post' is LN(x + dropout(f(x))), and norm='pre' is x + dropout(f(LN(x))) (sections 3.1 and 5.4). The paper's
    equation is 'post', but many annotated implementations compute 'pre'. The two forms need different learning rates,
    and 'post' needs a warm-up.

    With layer dropout, training skips f for all examples of a forward pass with probability `layer_dropout` (Huang et
    al. 2016, arXiv:1603.09382; Fan et al. 2020, arXiv:1909.11556, skip whole layers). The result is then LN(x) for
    'post', and x for 'pre'. The remaining sublayers are not scaled. Evaluation uses all sublayers.
    """
    config: BlockConfig

    @nn.compact
    def __call__(self, inputs: Float[Array, '*batch d_model'], sublayer: Callable[[Array], Array],
                 deterministic: bool = True) -> Float[Array, '*batch d_model']:
        """Returns the output of `sublayer` for `inputs`, with the residual connection and the layer norm.

        Raises:
          ValueError: if config.norm is unknown.
        """
        if self.config.norm not in NORMS:
            raise ValueError(f'norm={self.config.norm!r} must be one of {", ".join(NORMS)}')
        norm = layer_norm(self.config, name='norm')
        drop = Dropout(self.config.dropout)

        def compute(x):
            return drop(sublayer(x), deterministic)

        def branch(x):
            if deterministic or not self.config.layer_dropout:
                return compute(x)
            # With a conditional, a skipped sublayer takes no time. Modules inside the conditional must not sow values.
            keep = keep_mask(self.make_rng('dropout'), self.config.layer_dropout, ())
            return jax.lax.cond(keep, compute, jnp.zeros_like, x)

        if self.config.norm == 'pre':
            return place(self, '', inputs + branch(norm(inputs)))
        return place(self, '', norm(inputs + branch(inputs)))


class EncoderBlock(nn.Module):
    """An encoder block: self-attention, then the feed-forward sublayer.

    Without positions, the block is equivariant to permutations of its inputs. With a causal relation, the block is used
    in decoder-only language models.
    """
    config: BlockConfig

    @override
    def setup(self):
        self.self_attention = multi_head_attention(self.config, to_itself=True)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(self, x: Sequence, relation: Relation = UNRESTRICTED, deterministic: bool = True) -> Sequence:
        """Returns the outputs at all positions of `x`. `relation` relates the sequence to itself."""
        return self.prefill(x, relation, deterministic)[0]

    def prefill(self, x: Sequence, relation: Relation, deterministic: bool = True) -> tuple[Sequence, Past]:
        """Returns the outputs at all positions of `x`, and the keys and values that later positions attend to."""
        past: Any = None

        def attend(y):
            nonlocal past
            key, value = self.self_attention.keys_values(y, relation.source)
            past = Past.of(key, value).in_rows()
            return self.self_attention.attend(y, key, value, relation, deterministic)

        x = self.self_attention_residual(x, attend, deterministic)
        x = self.feed_forward_residual(x, lambda y: self.feed_forward(y, deterministic), deterministic)
        return place(self, '', x), past

    def decode_step(self, x: Float[Array, 'batch beam d_model'], past: Past, first: Int[Array, ''],
                    relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], Past]:
        """Returns the output at the newest position of each hypothesis, and the new cache. See `attend_to_past`."""
        def attend(y):
            nonlocal past
            attended, past = attend_to_past(self.self_attention, y, past, first, relation)
            return attended

        x = self.self_attention_residual(x, attend)
        return place(self, '', self.feed_forward_residual(x, self.feed_forward)), past


class DecoderBlock(nn.Module):
    """A decoder block: masked self-attention, attention to the encoder's output, then the feed-forward sublayer."""
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
        """Returns the outputs at all target positions, for training. `memory` is the encoder's output."""
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, y, relation, deterministic), deterministic)
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, memory_relation, deterministic), deterministic)
        x = self.feed_forward_residual(x, lambda y: self.feed_forward(y, deterministic), deterministic)
        return place(self, '', x)

    def memory_keys_values(self, memory: Float[Array, 'batch source d_model']) -> Past:
        """Returns the keys and values of cross-attention, which are the same at every step of decoding."""
        return Past.of(*self.cross_attention.keys_values(memory)).in_rows()

    def decode_step(self, x: Float[Array, 'batch beam d_model'], memory: Past, memory_relation: Relation,
                    past: Past, first: Int[Array, ''],
                    relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], Past]:
        """Returns the output at the newest target position of each hypothesis, and the new cache.

        The cache has the keys and values of self-attention (see `attend_to_past`).
        In cross-attention, the hypotheses of a sentence are queries to the same memory, so the memory is not repeated.
        """
        def attend(y):
            nonlocal past
            attended, past = attend_to_past(self.self_attention, y, past, first, relation)
            return attended

        def look_up(y):
            return self.cross_attention.attend(y, *memory.keys_values(), memory_relation)

        x = self.self_attention_residual(x, attend)
        x = self.cross_attention_residual(x, look_up)
        return place(self, '', self.feed_forward_residual(x, self.feed_forward)), past


def rematerialised(block: type[nn.Module], stack: Any, name: str, deterministic: int) -> type[nn.Module]:
    """Returns the class `block` for the layer `name` of `stack`, with rematerialisation if stack.config.remat is True.

    Rematerialisation saves memory: the backward pass recomputes the intermediate values of a block from its input. With
    config.remat_keep='products', the products of activations with weights are kept and not recomputed (Chen et al.
    2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198, section 5).

    A layer whose values are read (`model.places.reading`) is not rematerialised. `deterministic` is the index of the
    argument `deterministic` of the block's `__call__`, where `self` has index 0.

    Raises:
      ValueError: if config.remat_keep is unknown.
    """
    config: BlockConfig = stack.config
    if config.remat_keep not in REMAT_KEEPS:
        raise ValueError(f'remat_keep={config.remat_keep!r} must be one of {", ".join(REMAT_KEEPS)}')
    if not config.remat or reading(stack, name):
        return block
    products = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(PRODUCT))
    return nn.remat(block, policy=products if config.remat_keep == 'products' else None,
                    static_argnums=(deterministic,))


class SelfAttentionStack(nn.Module):
    """N blocks of self-attention over embedded vectors (section 3.1).

    The stack is the encoder of the Transformer and of the vision Transformer. With a causal relation, it is the
    decoder-only language model, except for the embeddings.
    """
    config: BlockConfig
    num_layers: int

    @override
    def setup(self):
        self.layers = [rematerialised(EncoderBlock, self, f'layers_{layer}', deterministic=3)(self.config)
                       for layer in range(self.num_layers)]
        self.relative = RelativeBias(self.config.position, self.config.num_heads)
        if self.config.norm == 'pre':
            self.final_norm = layer_norm(self.config)

    def __call__(self, x: Sequence, relation: Relation | None = None, deterministic: bool = True) -> Sequence:
        """Returns the outputs at all positions of `x`. `relation` relates the sequence to itself.

        By default, every position sees all positions.
        """
        relation = relation or Relation.within(np.arange(x.shape[1])[None])
        relation = relation.replace(bias=self.relative(), window=self.config.window)
        x = place(self, 'input', x)
        for layer in self.layers:
            x = layer(x, relation, deterministic)
        return self._end(x)

    def prefill(self, x: Sequence, relation: Relation) -> tuple[Sequence, list[Past]]:
        """Returns the outputs at all positions of `x`, and the keys and values of each layer for `decode_step`."""
        relation = relation.replace(bias=self.relative(), window=self.config.window)
        x, pasts = place(self, 'input', x), []
        for layer in self.layers:
            x, past = layer.prefill(x, relation)
            pasts.append(past)
        return self._end(x), pasts

    def decode_step(self, x: Float[Array, 'batch beam d_model'], pasts: list[Past], first: Int[Array, ''],
                    relation: Relation) -> tuple[Float[Array, 'batch beam d_model'], list[Past]]:
        """Returns the output at the newest position of each hypothesis, and the new cache of each layer.

        See `attend_to_past`.
        """
        relation = relation.replace(bias=self.relative(), window=self.config.window).with_whole_mask()
        x, new = place(self, 'input', x), []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, past = layer.decode_step(x, past, first, relation)
            new.append(past)
        return self._end(x), new

    def _end(self, x):
        return place(self, '', self.final_norm(x) if self.config.norm == 'pre' else x)
