"""Attention: scores, softmax, pooling, and many heads of it.

Axes, in einsums as in the annotations: b batch, h heads, t target (query) position, s source (key)
position, k a head's query/key width, v a head's value width, d the model's width; g heads of keys and values, where
each serves as many heads of queries, r (grouped queries).
Masks are boolean and broadcast to [batch, heads, target, source]; True means "may be looked at".
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key
from typing_extensions import override

from kernels.product import dot_general, pooling_product, scores_product
from model.dropout import drop
from model.places import place, wanted
from model.positional import AnyArray, Rotary, rotate
from model.relation import UNRESTRICTED, Mask, Relation

SCORES = ('scaled_dot', 'dot', 'general', 'additive')
KERNELS = ('auto', 'plain', 'chunked', 'fused')
BIASES = ('none', 'qkv', 'all')
CHUNK = 512  # queries that the chunked kernel scores at a time
LONG = 2048  # keys from which on 'auto' is chunked

Scores = Float[Array, 'batch heads target source']
Query = Float[Array, 'batch target heads d_query']
Keys = Float[Array, 'batch source groups d_k']
Values = Float[Array, 'batch source groups d_v']
Pooled = Float[Array, 'batch target heads d_v']
Drop = Callable[[Scores], Scores]  # dropout on the weights
Place = Callable[[str, Scores], Scores]  # model.places.place, of a module


def for_each_head(keys: Float[Array, 'batch source groups width'],
                  heads: int) -> Float[Array, 'batch source heads width']:
    """Keys or values once for each head of queries: head i has those of group i // (heads / groups)."""
    return keys if keys.shape[2] == heads else jnp.repeat(keys, heads // keys.shape[2], axis=2)


def dot_scores(query: Float[Array, 'batch target heads d_k'],
               key: Float[Array, 'batch source groups d_k']) -> Scores:
    """The products q.k, in float32 (Luong et al. 2015, arXiv:1508.04025, section 3.1).

    Keys may have fewer heads than queries. They are not repeated: a product reads each once, which is what grouped
    queries are for.
    """
    (batch, target, heads, width), groups = query.shape, key.shape[2]
    if groups == heads:
        return scores_product(query, key)
    grouped = query.reshape(batch, target, groups, heads // groups, width)
    scores = jnp.einsum('btgrk,bsgk->bgrts', grouped, key, preferred_element_type=jnp.float32)
    return scores.reshape(batch, heads, target, -1)


def scaled_dot_scores(query: Float[Array, 'batch target heads d_k'],
                      key: Float[Array, 'batch source groups d_k']) -> Scores:
    """The products q.k / sqrt(d_k), in float32 (section 3.2.1, equation 1).

    The query is scaled rather than the scores: the same value, and fewer numbers to multiply.
    """
    return dot_scores(query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype), key)


def general_scores(query: Float[Array, 'batch target heads d_query'], key: Float[Array, 'batch source groups d_k'],
                   weight: Float[Array, 'heads d_query d_k']) -> Scores:
    """The forms q' W k, with a W for each head, in float32 (Luong et al. 2015, section 3.1).

    The widths of queries and keys need not be equal.
    """
    return dot_scores(jnp.einsum('bthq,hqk->bthk', query, weight.astype(query.dtype)), key)


def additive_scores(query: Float[Array, 'batch target heads d_k'], key: Float[Array, 'batch source groups d_k'],
                    weight: Float[Array, 'heads d_k']) -> Scores:
    """The forms v' tanh(W_s s + W_h h), in float32, for queries W_s s and keys W_h h that are already projected.

    The alignment network of Bahdanau et al. 2015 (arXiv:1409.0473, appendix A.1.2); `weight` is v. Every pair of
    a query and a key has a hidden layer of its own, so memory is d_k times that of the other scores.
    """
    hidden = jnp.tanh(query[:, :, None] + for_each_head(key, query.shape[2])[:, None])
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
                      value: Float[Array, 'batch source groups d_v']) -> Float[Array, 'batch target heads d_v']:
    """sum_s weights[t, s] value[s], in the dtype of `value`: the expectation of the value under the weights."""
    (batch, heads, target, source), groups = weights.shape, value.shape[2]
    weights = weights.astype(value.dtype)
    if groups == heads:
        return pooling_product(weights, value)
    grouped = weights.reshape(batch, groups, heads // groups, target, source)
    return jnp.einsum('bgrts,bsgv->btgrv', grouped, value).reshape(batch, target, heads, -1)


def attention(query: Query, key: Keys, value: Values, relation: Relation = UNRESTRICTED,
              score: Callable[[Array, Array], Scores] = scaled_dot_scores,
              drop: Drop | None = None,
              at: Place = lambda name, value: value) -> tuple[Pooled, Scores]:
    """Attention pooling with any score function (row 1 of the table in docs/mathematics.md), and the weights.

    A(q, D) = sum_s alpha(q, k_s) v_s over the database D of (key, value) pairs, alpha the softmax over the keys
    of score(q, k_s). With one-hot weights it is a look-up; in general, the expectation of v under alpha. `at` is called
    with the values at the places 'scores' and 'weights'.
    """
    scores, bias = score(query, key), relation.whole_bias()
    scores = at('scores', scores if bias is None else scores + bias)
    weights = at('weights', masked_softmax(scores, relation.whole_mask()))
    return attention_pooling(weights if drop is None else drop(weights), value), weights


def scaled_dot_product_attention(query: Float[Array, 'batch target heads d_k'], key: Keys, value: Values,
                                 mask: Mask | None = None) -> Pooled:
    """softmax(Q K' / sqrt(d_k) + mask) V for every head (equation 1)."""
    return attention(query, key, value, Relation(mask=mask))[0]


def basic_self_attention(inputs: Float[Array, 'batch length d']) -> Float[Array, 'batch length d']:
    """Self-attention without parameters: w_ij = x_i . x_j, y_i = sum_j softmax_j(w_ij) x_j."""
    heads = inputs[:, :, None]
    return attention(heads, heads, heads, score=dot_scores)[0][:, :, 0]


def chunked_attention(query: Query, key: Keys, value: Values, relation: Relation = UNRESTRICTED,
                      score: Callable[[Array, Array], Scores] = scaled_dot_scores,
                      drop: Callable[[Scores, Array], Scores] | None = None, chunk: int = CHUNK) -> Pooled:
    """Computes `attention` in O(n) memory: at most `chunk` queries at a time, whose weights are not kept.

    The backward pass computes each chunk's weights again (Rabe and Staats 2021, arXiv:2112.05682, section 3; here
    all keys of a chunk of queries are scored together, so that the softmax stays the plain one). `drop` is also
    given the chunk's number.
    """
    batch, length = query.shape[:2]
    count = -(-length // chunk)
    chunk = -(-length // count)  # chunks of equal size: a few queries are not padded to a whole chunk
    fields, axes = relation.rows()

    def split(array, axis):
        padding = [(0, 0)] * array.ndim
        padding[axis] = 0, count * chunk - length
        array = jnp.pad(array, padding)
        return jnp.moveaxis(array.reshape(*array.shape[:axis], count, chunk, *array.shape[axis + 1:]), axis, 0)

    @jax.checkpoint
    def attend(part):
        index, query, fields = part
        drop_here = None if drop is None else (lambda weights, drop=drop: drop(weights, index))
        return attention(query, key, value, relation.replace(**fields), score, drop_here)[0]

    rows = {name: split(field, axes[name]) for name, field in fields.items()}
    pooled = jax.lax.map(attend, (jnp.arange(count), split(query, 1), rows))
    return jnp.moveaxis(pooled, 0, 1).reshape(batch, count * chunk, *pooled.shape[3:])[:, :length]


def fused_attention(query: Float[Array, 'batch target heads d_k'], key: Keys, value: Values,
                    relation: Relation = UNRESTRICTED, scale: float | None = None) -> Pooled:
    """The same as `attention` with dot scores times `scale` (default 1 / sqrt(d_k)), by the accelerator's kernel.

    On NVIDIA GPUs cuDNN's flash attention, for float16 and bfloat16; elsewhere XLA's, which is not O(n).
    """
    half = query.dtype in (jnp.float16, jnp.bfloat16)
    on_gpu = jax.default_backend() == 'gpu' and half
    mask, bias = relation.whole_mask(), relation.whole_bias()
    sees_any = None
    if bias is not None:
        bias = bias.astype(query.dtype)
    if mask is not None:
        # A query that sees no key is given all keys, and its output is set to 0 below. cuDNN's kernel may compute NaN
        # for a query without keys, and jnp.where would not keep that NaN out of the gradients.
        sees_any = mask.any(axis=-1, keepdims=True)
        mask = mask | ~sees_any
    pooled = jax.nn.dot_product_attention(query, key, value, bias=bias, mask=mask, scale=scale,
                                          implementation='cudnn' if on_gpu else 'xla')
    return pooled if sees_any is None else jnp.where(jnp.moveaxis(sees_any, 1, 2), pooled, 0)


def drop_weights(weights: Scores, chunk: Array | int = 0, *, rate: float, key: Key[Array, '']) -> Scores:
    """Dropout on attention weights; each `chunk` of queries draws its own."""
    return drop(weights, rate, jax.random.fold_in(key, chunk))


class MultiHeadAttention(nn.Module):
    """Concat(head_1 ... head_h) W_o with head_i = Attention(Q W_q, K W_k, V W_v) (section 3.2.2).

    d_k and d_v are free, and free of each other; queries may be wider or narrower than what keys and values are
    made from. With fewer heads of keys and values than of queries, each of them serves a group of these (Ainslie et al.
    2023, arXiv:2305.13245; a single one: Shazeer 2019, arXiv:1911.02150). The weights [batch, heads, target, source]
    are sown as 'weights' into the collection 'attention': apply with `mutable=['attention']` to get them;
    otherwise nothing is kept.

    Attributes:
      num_heads: h.
      d_model: width of the output.
      d_k: width of a head's queries and keys.
      d_v: width of a head's values.
      score: 'scaled_dot' (the paper's), 'dot', 'general' (a matrix between query and key) or 'additive' (an
        alignment network); see the functions of these names.
      rotary: how queries and keys are turned by their positions (see `rotate`); None: not at all.
      kernel: 'plain' keeps the n x n weights of the backward pass; 'chunked' has O(n) memory; 'fused' is the
        accelerator's, for the dot scores; 'auto' is chunked from LONG keys on. The weights are only to be had
        from the plain one, which is hence used where they are asked for.
      dropout: rate at which weights are dropped (an option; the paper has none here).
      num_key_value_heads: heads of the keys and of the values, a divisor of num_heads; 0 means num_heads.
      bias: 'none', as in the paper's equations; 'qkv', on queries, keys and values; or 'all', on the output too.
      dtype: of the computation; parameters are float32, and so is the softmax.
    """
    num_heads: int
    d_model: int
    d_k: int
    d_v: int
    score: str = 'scaled_dot'
    rotary: Rotary | None = None
    kernel: str = 'auto'
    dropout: float = 0.0
    num_key_value_heads: int = 0
    bias: str = 'none'
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        if self.score not in SCORES:
            raise ValueError(f'score={self.score!r} is not one of {", ".join(SCORES)}')
        if self.bias not in BIASES:
            raise ValueError(f'bias={self.bias!r} is not one of {", ".join(BIASES)}')
        groups = self.num_key_value_heads or self.num_heads
        if self.num_heads % groups:
            raise ValueError(f'num_key_value_heads={groups} does not divide num_heads={self.num_heads}')
        if self.kernel == 'fused' and (self.dropout or self.score not in ('scaled_dot', 'dot')):
            raise ValueError('the fused kernel knows neither attention_dropout nor scores other than scaled_dot and '
                             'dot: use attention_kernel=auto')

        def to_heads(heads, width):
            init = nn.with_logical_partitioning(nn.initializers.xavier_uniform(), ('embed', 'heads', 'kv'))
            bias_init = nn.with_logical_partitioning(nn.initializers.zeros, ('heads', 'kv'))
            return nn.DenseGeneral((heads, width), use_bias=self.bias != 'none', dtype=self.dtype, kernel_init=init,
                                   bias_init=bias_init, dot_general=dot_general)

        self.query, self.key, self.value = (to_heads(self.num_heads, self.d_k), to_heads(groups, self.d_k),
                                            to_heads(groups, self.d_v))
        init = nn.with_logical_partitioning(nn.initializers.xavier_uniform(), ('heads', 'kv', 'embed'))
        self.output = nn.DenseGeneral(self.d_model, axis=(-2, -1), use_bias=self.bias == 'all', dtype=self.dtype,
                                      kernel_init=init, dot_general=dot_general)
        if self.score == 'general':
            init = nn.with_logical_partitioning(_near_scaled_dot, ('heads', 'kv', None))
            self.score_weight = self.param('score_weight', init, (self.num_heads, self.d_k, self.d_k),
                                           unbox=True)
        if self.score == 'additive':
            init = nn.with_logical_partitioning(nn.initializers.normal(self.d_k ** -0.5), ('heads', 'kv'))
            self.score_weight = self.param('score_weight', init, (self.num_heads, self.d_k), unbox=True)

    def keys_values(self, inputs: Float[Array, 'batch source d_source'],
                    positions: Int[AnyArray, '#batch source'] | None = None) -> tuple[Keys, Values]:
        """The keys X' W_k and the values X' W_v of inputs at `positions`, which only rotary keys need.

        Decoding computes them once and keeps them.
        """
        return (place(self, 'keys', self._turned(self.key(inputs), positions)),
                place(self, 'values', self.value(inputs)))

    def queries_keys_values(self, inputs: Float[Array, 'batch target d_target'],
                            positions: Int[AnyArray, '#batch target'] | None = None) -> tuple[Query, Keys, Values]:
        """`queries` and `keys_values` of the same inputs, in one product: it pays where the inputs are few."""
        params = [nn.unbox(each.variables['params']) for each in (self.query, self.key, self.value)]
        shapes = [each['kernel'].shape[1:] for each in params]
        kernel = jnp.concatenate([each['kernel'].reshape(inputs.shape[-1], -1) for each in params], axis=-1)
        projected = inputs.astype(self.dtype) @ kernel.astype(self.dtype)
        if self.bias != 'none':
            projected += jnp.concatenate([each['bias'].reshape(-1) for each in params]).astype(self.dtype)
        ends = np.cumsum([heads * width for heads, width in shapes])[:-1]
        query, key, value = (part.reshape(*part.shape[:-1], *shape) for part, shape in
                             zip(jnp.split(projected, ends, axis=-1), shapes, strict=True))
        return (place(self, 'queries', self._turned(query, positions)),
                place(self, 'keys', self._turned(key, positions)), place(self, 'values', value))

    def queries(self, inputs: Float[Array, 'batch target d_target'],
                positions: Int[AnyArray, '#batch target'] | None = None) -> Query:
        """The queries X W_q of inputs at `positions`, which only rotary queries need."""
        return place(self, 'queries', self._turned(self.query(inputs), positions))

    def attend(self, inputs: Float[Array, 'batch target d_target'], key: Keys, value: Values,
               relation: Relation = UNRESTRICTED, deterministic: bool = True) -> Float[Array, 'batch target d_model']:
        """Looks from `inputs` at keys and values that are already projected."""
        query = self.queries(inputs, relation.target)
        return self.look(query, key, value, relation, deterministic)

    def look(self, query: Query, key: Keys, value: Values, relation: Relation = UNRESTRICTED,
             deterministic: bool = True) -> Float[Array, 'batch target d_model']:
        """Looks from queries, which are already projected too."""
        # `init` would return the weights among the variables.
        asked_for = self.is_mutable_collection('attention') and not self.is_initializing()
        kernel = 'plain' if asked_for or wanted(self, 'scores', 'weights') else self.kernel
        if kernel == 'auto':
            kernel = 'chunked' if key.shape[1] >= LONG and query.shape[1] > CHUNK else 'plain'
        drop = None
        if self.dropout and not deterministic:
            drop = functools.partial(drop_weights, rate=self.dropout, key=self.make_rng('dropout'))
        if kernel == 'chunked':
            pooled = chunked_attention(query, key, value, relation, self._score(), drop)
        elif kernel == 'fused':
            pooled = fused_attention(query, key, value, relation, scale=None if self.score == 'scaled_dot' else 1.0)
        else:
            pooled, weights = attention(query, key, value, relation, self._score(), drop,
                                        functools.partial(place, self, relation=relation))
            if asked_for:
                self.sow('attention', 'weights', weights)
        return place(self, '', self.output(place(self, 'heads', pooled)))

    def __call__(self, inputs: Float[Array, 'batch target d_target'], memory: Float[Array, 'batch source d_source'],
                 relation: Relation = UNRESTRICTED, deterministic: bool = True) -> Float[Array, 'batch target d_model']:
        """From `inputs` at `memory`. Self-attention is `memory` = `inputs`; cross-attention is not."""
        return self.attend(inputs, *self.keys_values(memory, relation.source), relation, deterministic)

    def _turned(self, projected, positions):
        if not self.rotary:
            return projected
        assert positions is not None, 'rotary queries and keys have positions'
        return rotate(projected, positions, self.rotary)

    def _score(self) -> Callable[[Array, Array], Scores]:
        if self.score in ('general', 'additive'):
            function = {'general': general_scores, 'additive': additive_scores}[self.score]
            return functools.partial(function, weight=self.score_weight)
        return {'scaled_dot': scaled_dot_scores, 'dot': dot_scores}[self.score]


def _near_scaled_dot(key: Array, shape: tuple[int, int, int], dtype: DTypeLike = jnp.float32) -> Array:
    """W = I / sqrt(d_k) for every head: general scores start as the scaled dot product, and learn from there."""
    return jnp.broadcast_to(jnp.eye(shape[1], dtype=dtype) * shape[1] ** -0.5, shape)
