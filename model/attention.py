"""Attention: masks, scores, softmax, pooling, and many heads of it.

Axes, in einsums as in the annotations: b batch, h heads, t target (query) position, s source (key)
position, k a head's query/key width, v a head's value width, d the model's width.
Masks are boolean and broadcast to [batch, heads, target, source]; True means "may be looked at".
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

Mask = Bool[Array, '#batch #heads #target #source']
Scores = Float[Array, 'batch heads target source']


def look_ahead_mask(length: int) -> Bool[Array, '1 1 target source']:
    """Position i sees j <= i (section 3.2.3).

    The diagonal is visible: with targets shifted right by one, position i holds the token before the one
    that it predicts. Some texts mask it, and so hide from each position its own input.
    """
    return jnp.tril(jnp.ones((1, 1, length, length), dtype=bool))


def padding_mask(visible: Bool[Array, 'batch source']) -> Bool[Array, 'batch 1 1 source']:
    """Hides the keys where `visible` is False, from every query."""
    return visible[:, None, None, :]


def segment_mask(target: Int[Array, 'batch target'],
                 source: Int[Array, 'batch source']) -> Bool[Array, 'batch 1 target source']:
    """Packed examples do not see each other: query t sees key s where their segment numbers are equal."""
    return target[:, None, :, None] == source[:, None, None, :]


def combine_masks(*masks: Mask | None) -> Mask | None:
    """The conjunction of the masks that are not None; None (everything is visible) if there is none."""
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, present) if present else None


def dot_scores(query: Float[Array, 'batch target heads d_k'],
               key: Float[Array, 'batch source heads d_k']) -> Scores:
    """q.k, in float32 (Luong et al. 2015, arXiv:1508.04025, section 3.1)."""
    return jnp.einsum('bthk,bshk->bhts', query, key, preferred_element_type=jnp.float32)


def scaled_dot_scores(query: Float[Array, 'batch target heads d_k'],
                      key: Float[Array, 'batch source heads d_k']) -> Scores:
    """q.k / sqrt(d_k), in float32 (section 3.2.1, equation 1).

    The query is scaled rather than the scores: the same value, and fewer numbers to multiply.
    """
    return dot_scores(query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype), key)


def general_scores(query: Float[Array, 'batch target heads d_query'], key: Float[Array, 'batch source heads d_k'],
                   weight: Float[Array, 'heads d_query d_k']) -> Scores:
    """q' W k, with a W for each head, in float32 (Luong et al. 2015, section 3.1). The widths need not be equal."""
    return dot_scores(jnp.einsum('bthq,hqk->bthk', query, weight.astype(query.dtype)), key)


def additive_scores(query: Float[Array, 'batch target heads d_k'], key: Float[Array, 'batch source heads d_k'],
                    weight: Float[Array, 'heads d_k']) -> Scores:
    """v' tanh(W_s s + W_h h), in float32, for queries W_s s and keys W_h h that are already projected.

    The alignment network of Bahdanau et al. 2015 (arXiv:1409.0473, appendix A.1.2); `weight` is v. Every pair of
    a query and a key has a hidden layer of its own, so memory is d_k times that of the other scores.
    """
    hidden = jnp.tanh(query[:, :, None] + key[:, None])
    return jnp.einsum('btshk,hk->bhts', hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)


def masked_softmax(scores: Float[Array, 'batch heads target source'],
                   mask: Mask | None = None) -> Float[Array, 'batch heads target source']:
    """Softmax over the keys, in float32. A query that may look at no key gets zeros, never NaN.

    Equation 1 with the mask as a bias of -inf, added after the scaling. (Before it would do too, but only
    because 0 and -inf do not mind being divided by sqrt(d_k); a finite bias does.)
    """
    scores = scores.astype(jnp.float32)
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    # The most negative number instead of -inf: a row of -inf alone would be NaN before the line below, which
    # jax_debug_nans rightly reports.
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.where(mask, weights, 0.0)


def attention_pooling(weights: Float[Array, 'batch heads target source'],
                      value: Float[Array, 'batch source heads d_v']) -> Float[Array, 'batch target heads d_v']:
    """sum_s weights[t, s] value[s], in the dtype of `value`: the expectation of the value under the weights."""
    return jnp.einsum('bhts,bshv->bthv', weights.astype(value.dtype), value)


def scaled_dot_product_attention(query: Float[Array, 'batch target heads d_k'],
                                 key: Float[Array, 'batch source heads d_k'],
                                 value: Float[Array, 'batch source heads d_v'],
                                 mask: Mask | None = None) -> Float[Array, 'batch target heads d_v']:
    """softmax(Q K' / sqrt(d_k) + mask) V for every head (equation 1)."""
    return attention_pooling(masked_softmax(scaled_dot_scores(query, key), mask), value)


class MultiHeadAttention(nn.Module):
    """Concat(head_1 ... head_h) W_o with head_i = Attention(Q W_q, K W_k, V W_v) (section 3.2.2).

    Without biases, as in the paper's equations. d_k and d_v are free, and free of each other; queries may
    be wider or narrower than what keys and values are made from. The weights [batch, heads, target, source]
    are sown as 'weights' into the collection 'attention': apply with `mutable=['attention']` to get them;
    otherwise nothing is kept.

    Attributes:
      num_heads: h.
      d_model: width of the output.
      d_k: width of a head's queries and keys.
      d_v: width of a head's values.
      dropout: rate at which weights are dropped (an option; the paper has none here).
      dtype: of the computation; parameters are float32, and so is the softmax.
    """
    num_heads: int
    d_model: int
    d_k: int
    d_v: int
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    def setup(self):
        projection = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype,
                                       kernel_init=nn.initializers.xavier_uniform())
        self.query = projection((self.num_heads, self.d_k))
        self.key = projection((self.num_heads, self.d_k))
        self.value = projection((self.num_heads, self.d_v))
        self.output = projection(self.d_model, axis=(-2, -1))
        self.drop = nn.Dropout(self.dropout)

    def keys_values(self, inputs: Float[Array, 'batch source d_source']) -> tuple[
            Float[Array, 'batch source heads d_k'], Float[Array, 'batch source heads d_v']]:
        """What can be looked at: X' W_k and X' W_v. Decoding computes them once and keeps them."""
        return self.key(inputs), self.value(inputs)

    def attend(self, inputs: Float[Array, 'batch target d_target'],
               key: Float[Array, 'batch source heads d_k'], value: Float[Array, 'batch source heads d_v'],
               mask: Mask | None = None, deterministic: bool = True) -> Float[Array, 'batch target d_model']:
        """Looks from `inputs` at keys and values that are already projected."""
        weights = masked_softmax(scaled_dot_scores(self.query(inputs), key), mask)
        if not self.is_initializing():  # or `init` would return them among the variables
            self.sow('attention', 'weights', weights)
        weights = self.drop(weights, deterministic=deterministic)
        return self.output(attention_pooling(weights, value))

    def __call__(self, inputs: Float[Array, 'batch target d_target'], memory: Float[Array, 'batch source d_source'],
                 mask: Mask | None = None, deterministic: bool = True) -> Float[Array, 'batch target d_model']:
        """From `inputs` at `memory`. Self-attention is `memory` = `inputs`; cross-attention is not."""
        return self.attend(inputs, *self.keys_values(memory), mask, deterministic)
