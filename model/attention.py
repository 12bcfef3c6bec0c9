"""Attention: scores, softmax, pooling, and multi-head attention.

Axes in einsums and annotations: b batch, h heads, t target (query) position, s source (key) position, k the
width of a query or key in a head, v the width of a value in a head, d the width of the model. With grouped queries,
keys and values have g groups instead of h heads, and each group serves h / g consecutive heads. Masks are boolean and
broadcast to [batch, heads, target, source]; True means that the query sees the key.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key
from typing_extensions import override

from kernels.attention import fused_attention, in_chunks
from kernels.dense import Dense
from kernels.heads import einsum_per_head
from kernels.product import products
from kernels.softmax import softmax
from model.dropout import drop
from model.places import place, wanted
from model.positional import AnyArray, Rotary, rotate
from model.relation import UNRESTRICTED, Mask, Relation

KERNELS = ('auto', 'plain', 'chunked', 'fused')
DOT_PRODUCTS = 'scaled_dot', 'dot'  # with rotary positions, these scores depend only on the difference of two positions
BIASES = ('none', 'qkv', 'all')
CHUNK = 512  # number of queries that the chunked kernel scores at a time
LONG = 2048  # minimum number of keys for which 'auto' selects the chunked kernel

Scores = Float[Array, 'batch heads target source']
Query = Float[Array, 'batch target heads d_query']
Keys = Float[Array, 'batch source groups d_k']
Values = Float[Array, 'batch source groups d_v']
Pooled = Float[Array, 'batch target heads d_v']
Drop = Callable[[Scores], Scores]  # dropout of the attention weights
Place = Callable[[str, Scores], Scores]  # model.places.place with a fixed module


def for_each_head(keys: Float[Array, 'batch source groups width'],
                  heads: int) -> Float[Array, 'batch source heads width']:
    """Copies the keys or values of each group to its query heads. Query head i gets group i // (heads / groups)."""
    return keys if keys.shape[2] == heads else jnp.repeat(keys, heads // keys.shape[2], axis=2)


def dot_scores(query: Float[Array, 'batch target heads d_k'],
               key: Float[Array, 'batch source groups d_k']) -> Scores:
    """Returns the dot products q.k, in float32 (Luong et al. 2015, arXiv:1508.04025, section 3.1).

    For short sequences, jax.jvp and jax.jacfwd do not work (see `einsum_per_head`): use jax.vjp and jax.jacrev.
    """
    return einsum_per_head('bthk,bshk->bhts', query, key, jnp.float32)


def scaled_dot_scores(query: Float[Array, 'batch target heads d_k'],
                      key: Float[Array, 'batch source groups d_k']) -> Scores:
    """Returns the scaled dot products q.k / sqrt(d_k), in float32 (section 3.2.1, equation 1).

    The query is scaled instead of the scores, because a query usually has fewer elements. In bfloat16, this is done
    only if the factor is a power of two, such as 1 / 8 for d_k = 64. Other factors would be rounded: for d_k = 112, all
    scores would be 0.25 % too large.
    """
    scale = query.shape[-1] ** -0.5
    if query.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:
        return dot_scores(query * scale, key)
    return dot_scores(query, key) * scale


def general_scores(query: Float[Array, 'batch target heads d_query'], key: Float[Array, 'batch source groups d_k'],
                   weight: Float[Array, 'heads d_query d_k']) -> Scores:
    """Returns q' W k, with one matrix W per head, in float32 (Luong et al. 2015, section 3.1).

    Queries and keys may have different widths.
    """
    return dot_scores(jnp.einsum('bthq,hqk->bthk', query, weight.astype(query.dtype)), key)


def additive_scores(query: Float[Array, 'batch target heads d_k'], key: Float[Array, 'batch source groups d_k'],
                    weight: Float[Array, 'heads d_k']) -> Scores:
    """Returns v' tanh(W_s s + W_h h), in float32, for projected queries W_s s and projected keys W_h h.

    This is the alignment network of Bahdanau et al. 2015 (arXiv:1409.0473, appendix A.1.2); `weight` is v. Each pair of
    a query and a key has its own hidden layer, so this score takes d_k times as much memory as the other scores.
    """
    hidden = jnp.tanh(query[:, :, None] + for_each_head(key, query.shape[2])[:, None])
    return jnp.einsum('btshk,hk->bhts', hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)


SCORES = {'scaled_dot': scaled_dot_scores, 'dot': dot_scores, 'general': general_scores, 'additive': additive_scores}


def masked_softmax(scores: Float[Array, 'batch heads target source'],
                   mask: Mask | None = None) -> Float[Array, 'batch heads target source']:
    """Returns the softmax of the scores over the keys, in float32. A query that sees no key gets weights of 0, not NaN.

    The scores of hidden keys become -inf (section 3.2.3), as if a bias of 0 or -inf were added to the scores. As in
    figure 2, the scores are scaled by 1 / sqrt(d_k) before the mask is applied. For a mask, this order has no effect,
    because scaling does not change 0 and -inf. For a finite bias, the order matters.
    """
    scores = scores.astype(jnp.float32)
    if mask is None:
        return softmax(scores)
    # Hidden keys get the most negative float32 instead of -inf. With -inf, a row without visible keys would be NaN. The
    # last line would replace the NaN, but the setting jax_debug_nans would first report the NaN as an error.
    weights = softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
    return jnp.where(mask, weights, 0.0)


def attention_pooling(weights: Float[Array, 'batch heads target source'],
                      value: Float[Array, 'batch source groups d_v']) -> Float[Array, 'batch target heads d_v']:
    """Returns sum_s weights[t, s] value[s], the weighted mean of the values, in the dtype of `value`.

    For short sequences, jax.jvp and jax.jacfwd do not work (see `einsum_per_head`): use jax.vjp and jax.jacrev.
    """
    return einsum_per_head('bhts,bshv->bthv', weights.astype(value.dtype), value, value.dtype)


def attention(query: Query, key: Keys, value: Values, relation: Relation = UNRESTRICTED,
              score: Callable[[Array, Array], Scores] = scaled_dot_scores,
              drop: Drop | None = None,
              at: Place = lambda name, value: value) -> tuple[Pooled, Scores]:
    """Returns the output and the weights of attention pooling with any score function (docs/mathematics.md).

    The output for a query q is A(q, D) = sum_s alpha(q, k_s) v_s. D is a database of pairs (key, value), and the
    weights alpha are the softmax of score(q, k_s) over the keys. `relation` hides keys, and may add a bias to the
    scores. With one-hot weights, attention is a table look-up. In general, A is the expectation of v under alpha.
    `drop` is applied to the weights before the values are pooled, but not to the returned weights. The function `at`
    may read or replace the values at the places 'scores' and 'weights' (model/places.py).
    """
    scores, bias = score(query, key), relation.whole_bias()
    scores = at('scores', scores if bias is None else scores + bias)
    weights = at('weights', masked_softmax(scores, relation.whole_mask()))
    return attention_pooling(weights if drop is None else drop(weights), value), weights


def scaled_dot_product_attention(query: Float[Array, 'batch target heads d_k'], key: Keys, value: Values,
                                 mask: Mask | None = None) -> Pooled:
    """Returns softmax(Q K' / sqrt(d_k)) V for every head (equation 1). `mask` is True for visible keys."""
    return attention(query, key, value, Relation(mask=mask))[0]


def basic_self_attention(inputs: Float[Array, 'batch length d']) -> Float[Array, 'batch length d']:
    """Returns the outputs y of self-attention without parameters: w_ij = x_i . x_j, y_i = sum_j softmax_j(w_ij) x_j."""
    heads = inputs[:, :, None]
    return attention(heads, heads, heads, score=dot_scores)[0][:, :, 0]


def chunked_attention(query: Query, key: Keys, value: Values, relation: Relation = UNRESTRICTED,
                      score: Callable[[Array, Array], Scores] = scaled_dot_scores,
                      drop: Callable[[Scores, Array], Scores] | None = None, chunk: int = CHUNK) -> Pooled:
    """Returns the output of `attention`, computed in O(n) memory. The attention weights are not kept.

    At most `chunk` queries are scored at a time. A chunk of queries is scored with all keys together, so the ordinary
    softmax can be used. The second argument of `drop` is the index of the chunk.
    """
    fields, axes = relation.rows()

    def attend(rows, index):
        query, fields = rows['query'], {name: rows[name] for name in axes}
        drop_chunk = None if drop is None else (lambda weights, drop=drop: drop(weights, index))
        return attention(query, key, value, relation.replace(**fields), score, drop_chunk)[0]

    return in_chunks(attend, {'query': query, **fields}, {'query': 1, **axes}, chunk)


def drop_weights(weights: Scores, chunk: Array | int = 0, *, rate: float, key: Key[Array, '']) -> Scores:
    """Applies dropout to attention weights. The random key is derived from `key` and the index `chunk`."""
    return drop(weights, rate, jax.random.fold_in(key, chunk))


class MultiHeadAttention(nn.Module):
    """Concat(head_1 ... head_h) W_o with head_i = Attention(Q W_q, K W_k, V W_v) (section 3.2.2).

    d_k and d_v do not depend on d_model and may differ. The inputs of the queries may have another width than the
    inputs of the keys and values. If there are fewer heads of keys and values than heads of queries, each head of keys
    and values is shared by a group of query heads (Ainslie et al. 2023, arXiv:2305.13245). All query heads can share a
    single head of keys and values (Shazeer 2019, arXiv:1911.02150). If `apply` is called with `mutable=['attention']`,
    the attention weights [batch, heads, target, source] are sown as 'weights' into the Flax collection 'attention'.
    Otherwise the weights are not kept.

    Attributes:
      num_heads, d_k, d_v, num_key_value_heads, score: the options of config.model with these names
        (configs/options.py). Here, d_k and d_v must not be 0.
      d_model: width of the output.
      rotary: the angles by which queries and keys are rotated (see `rotate`); None for no rotation.
      kernel: how attention is computed. 'plain' keeps the n x n weights for the backward pass. 'chunked' takes O(n)
        memory. 'fused' is cuDNN's kernel on NVIDIA GPUs with dtype=bfloat16, and elsewhere XLA's attention with O(n^2)
        memory (`fused_attention`). It supports only dot scores and d_v = d_k. 'auto' is 'chunked' for at least LONG
        keys and more than CHUNK queries, otherwise 'plain'. If the weights are requested, the plain kernel is always
        used, because only this kernel returns the weights.
      dropout: dropout rate on the attention weights (0 in the paper).
      bias: the projections that have a bias. 'none': no projection, as in the paper's equations; 'qkv': queries, keys
        and values; 'all': queries, keys, values and the output.
      dtype: dtype of the computation; parameters and the softmax are float32.

    Raises:
      ValueError: if `score`, `bias` or `kernel` is unknown, if num_key_value_heads does not divide num_heads, or if
        kernel='fused' is combined with dropout, with another score than dot products, or with d_v != d_k.
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
        for name, known in ('score', SCORES), ('bias', BIASES), ('kernel', KERNELS):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f'{name}={value!r} must be one of {", ".join(known)}')
        groups = self.num_key_value_heads or self.num_heads
        if self.num_heads % groups:
            raise ValueError(f'num_key_value_heads={groups} must divide num_heads={self.num_heads}')
        if self.kernel == 'fused' and (self.dropout or self.score not in DOT_PRODUCTS):
            raise ValueError('attention_kernel=fused supports only score=scaled_dot or dot, without attention_dropout. '
                             'Use attention_kernel=auto.')
        if self.kernel == 'fused' and self.d_k != self.d_v:
            raise ValueError(f'attention_kernel=fused needs equal d_k and d_v, but d_k={self.d_k} and d_v={self.d_v}. '
                             'Use attention_kernel=auto.')

        def to_heads(heads, width):
            return Dense((heads, width), ('embed', 'heads', 'kv'), self.bias != 'none', self.dtype,
                         bias_axes=('heads', 'kv'))

        self.query, self.key, self.value = (to_heads(self.num_heads, self.d_k), to_heads(groups, self.d_k),
                                            to_heads(groups, self.d_v))
        self.output = Dense(self.d_model, ('heads', 'kv', 'embed'), self.bias == 'all', self.dtype, summed=2)
        self.score_weight = None
        if self.score == 'general':
            init = nn.with_logical_partitioning(_near_scaled_dot, ('heads', 'kv', None))
            self.score_weight = self.param('score_weight', init, (self.num_heads, self.d_k, self.d_k), jnp.float32,
                                           unbox=True)
        if self.score == 'additive':
            init = nn.with_logical_partitioning(nn.initializers.normal(self.d_k ** -0.5), ('heads', 'kv'))
            self.score_weight = self.param('score_weight', init, (self.num_heads, self.d_k), jnp.float32, unbox=True)

    def queries(self, inputs: Float[Array, 'batch target d_target'],
                positions: Int[AnyArray, '#batch target'] | None = None) -> Query:
        """Returns the queries X W_q of inputs X. `positions` is needed only for rotary positions."""
        return place(self, 'queries', self._rotate(self.query(inputs), positions))

    def keys_values(self, inputs: Float[Array, 'batch source d_source'],
                    positions: Int[AnyArray, '#batch source'] | None = None) -> tuple[Keys, Values]:
        """Returns the keys X W_k and the values X W_v of inputs X. `positions` is needed only for rotary positions.

        Decoding computes keys and values once and keeps them in its cache.
        """
        return place(self, 'keys', self._rotate(self.key(inputs), positions)), place(self, 'values', self.value(inputs))

    def queries_keys_values(self, inputs: Float[Array, 'batch target d_target'],
                            positions: Int[AnyArray, '#batch target'] | None = None) -> tuple[Query, Keys, Values]:
        """Returns queries, keys and values of the same inputs. One joint matrix product is faster for few inputs."""
        params = [nn.unbox(layer.variables['params']) for layer in (self.query, self.key, self.value)]
        biases = None if self.bias == 'none' else [param['bias'] for param in params]
        query, key, value = products(inputs, [param['kernel'] for param in params], biases, self.dtype)
        return (place(self, 'queries', self._rotate(query, positions)),
                place(self, 'keys', self._rotate(key, positions)), place(self, 'values', value))

    def attend(self, inputs: Float[Array, 'batch target d_target'], key: Keys, value: Values,
               relation: Relation = UNRESTRICTED, deterministic: bool = True) -> Float[Array, 'batch target d_model']:
        """Returns the output of attention from `inputs` to `key` and `value`, which are results of `keys_values`."""
        query = self.queries(inputs, relation.target)
        return self.attend_projected(query, key, value, relation, deterministic)

    def attend_projected(self, query: Query, key: Keys, value: Values, relation: Relation = UNRESTRICTED,
                         deterministic: bool = True) -> Float[Array, 'batch target d_model']:
        """Returns the output of attention for projected queries, keys and values. Sows the weights if requested."""
        # Nothing is sown during `init`, because `init` would return the weights together with the parameters.
        keep_weights = self.is_mutable_collection('attention') and not self.is_initializing()
        kernel = 'plain' if keep_weights or wanted(self, 'scores', 'weights') else self.kernel
        if kernel == 'auto':
            kernel = 'chunked' if key.shape[1] >= LONG and query.shape[1] > CHUNK else 'plain'
        score = SCORES[self.score]
        if self.score_weight is not None:
            score = functools.partial(score, weight=self.score_weight)
        drop = None
        if self.dropout and not deterministic:
            drop = functools.partial(drop_weights, rate=self.dropout, key=self.make_rng('dropout'))
        if kernel == 'chunked':
            pooled = chunked_attention(query, key, value, relation, score, drop)
        elif kernel == 'fused':
            pooled = fused_attention(query, key, value, relation.whole_mask(), relation.whole_bias(),
                                     scale=None if self.score == 'scaled_dot' else 1.0)
        else:
            pooled, weights = attention(query, key, value, relation, score, drop,
                                        functools.partial(place, self, relation=relation))
            if keep_weights:
                self.sow('attention', 'weights', weights)
        return place(self, '', self.output(place(self, 'heads', pooled)))

    def __call__(self, inputs: Float[Array, 'batch target d_target'], memory: Float[Array, 'batch source d_source'],
                 relation: Relation = UNRESTRICTED, deterministic: bool = True) -> Float[Array, 'batch target d_model']:
        """Returns the output of attention from `inputs` to `memory`. In self-attention, `memory` is `inputs`."""
        return self.attend(inputs, *self.keys_values(memory, relation.source), relation, deterministic)

    def _rotate(self, projected, positions):
        if not self.rotary:
            return projected
        assert positions is not None, 'rotary queries and keys need positions'
        return rotate(projected, positions, self.rotary)


def _near_scaled_dot(key: Array, shape: tuple[int, int, int], dtype: DTypeLike = jnp.float32) -> Array:
    """Returns W = I / sqrt(d_k) for every head, so that general scores are initially the scaled dot product."""
    return jnp.broadcast_to(jnp.eye(shape[1], dtype=dtype) * shape[1] ** -0.5, shape)
