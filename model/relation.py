"""The relation of queries and keys: masks, and biases that depend on the positions of queries and keys.

model/attention.py explains the axes. Masks are boolean and broadcast to [batch, heads, target, source]. True means that
the query sees the key.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.positional import AnyArray, Bias

Mask = Bool[Array, '#batch #heads #target #source']


def look_ahead_mask(target: Int[Array, '#batch target'],
                    source: Int[Array, '#batch source']) -> Bool[Array, '#batch 1 target source']:
    """Returns the causal mask: query t sees key s if s <= t (section 3.2.3). The arguments are positions.

    A position sees itself, because the targets are shifted right by one: the input of position t is the token before
    the predicted token. Some publications mask the diagonal, but this hides the input of each position from itself.
    """
    return (target[:, :, None] >= source[:, None, :])[:, None]


def padding_mask(visible: Bool[Array, 'batch source']) -> Bool[Array, 'batch 1 1 source']:
    """Returns the mask that hides padding: no query sees a key where `visible` is False."""
    return visible[:, None, None, :]


def segment_mask(target: Int[Array, 'batch target'],
                 source: Int[Array, 'batch source']) -> Bool[Array, 'batch 1 target source']:
    """Returns the mask of packed examples: query t sees key s if they are in the same segment."""
    return target[:, None, :, None] == source[:, None, None, :]


def window_mask(target: Int[Array, '#batch target'], source: Int[Array, '#batch source'],
                window: int) -> Bool[Array, '#batch 1 target source']:
    """Returns the window mask: query t sees key s if |t - s| < window (Beltagy et al. 2020, arXiv:2004.05150, 3.1).

    If a look-ahead mask is also used, a query sees itself and the window - 1 positions before it, as in Mistral 7B
    (Jiang et al. 2023, arXiv:2310.06825). Without a look-ahead mask, a query also sees the window - 1 positions after
    it. In Beltagy et al., a window of w positions has w / 2 positions on each side.
    """
    return (jnp.abs(target[:, :, None] - source[:, None, :]) < window)[:, None]


def combine_masks(*masks: Mask | None) -> Mask | None:
    """Returns the logical AND of the masks that are not None. Returns None (all keys visible) if all masks are None."""
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, present) if present else None


class Relation(flax.struct.PyTreeNode):
    """The vectors of length n that determine which queries see which keys: positions, visibility and segments.

    The n x n mask and bias are computed from these vectors when needed. For long inputs, mask and bias are computed for
    a few queries at a time (`rows`), so that they are never completely in memory. Every field may be None. With
    `Relation()`, every query sees every key. A leading axis of size 1 stands for the whole batch.

    Attributes:
      target: positions of the queries.
      source: positions of the keys.
      visible: False where a key is padding.
      target_segments: the index of the packed example of each query. Packed examples do not see each other.
      source_segments: the index of the packed example of each key.
      mask: an additional mask.
      bias: the function that computes the bias of relative positions on the scores.
      causal: if True, a query does not see keys at later positions than its own position.
      bidirectional: if True, T5's bias (BucketedBias) has separate buckets for keys before and after the query.
      window: a query sees only keys at a distance below this number. If 0, the distance is not limited.
    """
    target: Int[AnyArray, '#batch target'] | None = None
    source: Int[AnyArray, '#batch source'] | None = None
    visible: Bool[Array, '#batch source'] | None = None
    target_segments: Int[Array, '#batch target'] | None = None
    source_segments: Int[Array, '#batch source'] | None = None
    mask: Mask | None = None
    bias: Bias | None = None
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    bidirectional: bool = flax.struct.field(pytree_node=False, default=True)
    window: int = flax.struct.field(pytree_node=False, default=0)

    @classmethod
    def within(cls, positions: Int[AnyArray, '#batch length'], visible: Bool[Array, '#batch length'] | None = None,
               segments: Int[Array, '#batch length'] | None = None, causal: bool = False) -> 'Relation':
        """Returns the relation of a sequence to itself, for self-attention."""
        return cls(target=positions, source=positions, visible=visible, target_segments=segments,
                   source_segments=segments, causal=causal, bidirectional=not causal)

    def whole_mask(self) -> Mask | None:
        """Returns the logical AND of all masks, or None if no key is hidden."""
        masks = [self.mask]
        if self.visible is not None:
            masks.append(padding_mask(self.visible))
        if self.target_segments is not None and self.source_segments is not None:
            masks.append(segment_mask(self.target_segments, self.source_segments))
        if self.causal:
            masks.append(look_ahead_mask(*self.positions()))
        if self.window:
            masks.append(window_mask(*self.positions(), self.window))
        return combine_masks(*masks)

    def with_whole_mask(self) -> 'Relation':
        """Returns an equal relation with all masks combined in the field `mask`, for a step of decoding.

        All layers use the same array. Without the barrier, XLA for CPUs would compute the mask again in each layer.
        """
        mask = self.whole_mask()
        return self.replace(mask=None if mask is None else jax.lax.optimization_barrier(mask), visible=None,
                            target_segments=None, source_segments=None, causal=False, window=0)

    def whole_bias(self) -> Float[Array, '#batch heads target source'] | None:
        """Returns the bias that is added to the scores after their scaling, or None."""
        if self.bias is None:
            return None
        return self.bias(*self.positions(), self.bidirectional)

    def positions(self) -> tuple[Int[Array, '#batch target'], Int[Array, '#batch source']]:
        """Returns the positions of the queries and of the keys. Relative masks and biases need both vectors."""
        assert self.target is not None and self.source is not None
        return jnp.asarray(self.target), jnp.asarray(self.source)

    def rows(self) -> tuple[dict[str, AnyArray], dict[str, int]]:
        """Returns the fields that have an axis of queries, and the index of this axis in each field."""
        axes = {'target': 1, 'target_segments': 1, 'mask': 2}
        fields = {name: getattr(self, name) for name in axes}
        present = {name: field for name, field in fields.items() if field is not None and field.shape[axes[name]] > 1}
        return present, {name: axes[name] for name in present}


UNRESTRICTED = Relation()  # every query sees every key
