"""The output of an encoder, and the cache of a decoder, which each step takes as an argument and returns.

All hypotheses of a sentence write their keys and values into the same arrays, the past. A search never reorders or
copies the past. Instead, each hypothesis has a table of its ancestors: for each step, the number of the hypothesis that
wrote the key. Beam search reorders only these tables, which have a few bytes per step. So the scores of all hypotheses
of a sentence are one matrix product of their queries with the same keys. A mask hides the keys of other hypotheses.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.layout import in_rows

# The 'key' and 'value' of a layer, [batch, groups, width, keys]. The matrix products of attention read this order of
# axes without a copy. Groups are the heads of keys and values.
Past = dict[str, Array]
Ancestors = Int[Array, 'batch beam slots']


class Memory(flax.struct.PyTreeNode):
    """The output of an encoder.

    Attributes:
      states: float [batch, source, width].
      visible: bool [batch, source], False at padding.
    """
    states: Any  # not annotated as an array, because jax.eval_shape replaces it by its shape
    visible: Any


class Cache(flax.struct.PyTreeNode):
    """The state of decoding, as an interface between generative models and searches. All leaves are arrays.

    Attributes:
      memory: values that are constant for a sentence (keys and values of cross-attention, the source mask);
        leaves [batch, ...]. These values are never reordered. The hypotheses of a sentence share one copy.
      state: values of each hypothesis (the table of its ancestors, the state of a recurrent network);
        leaves [batch, beam, ...]. Beam search reorders these values with one tree.map.
      position: int [], number of tokens decoded so far.
      past: keys and values that the hypotheses of a sentence have written; leaves [batch, ..., keys]. Each step of
        `beam` hypotheses writes the next `beam` keys. `resized` adds room for more steps. The past is never reordered.
    """
    memory: Any
    state: Any
    position: Any
    past: Any = ()

    def resized(self, keys: int) -> 'Cache':
        """Returns the cache with room for `keys` more keys. If `keys` is negative, removes the last -keys keys."""
        def resize(leaf):
            if keys < 0:
                return leaf[..., :keys]
            return jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, keys)])

        return self.replace(past=jax.tree.map(resize, self.past))


def no_ancestors(batch: int, beam: int, slots: int) -> Ancestors:
    """Returns an empty table of ancestors for `slots` steps. All entries are -1.

    Later, an entry is the number, 0 to beam - 1, of the hypothesis that wrote the key of this step.
    """
    return jnp.full((batch, beam, slots), -1, jnp.int32)


def with_own(ancestors: Ancestors, position: Int[Array, '']) -> Ancestors:
    """Returns the table of ancestors after step `position`, in which every hypothesis has written its own key."""
    batch, beam, _ = ancestors.shape
    own = jnp.broadcast_to(jnp.arange(beam)[:, None], (batch, beam, 1))
    return jax.lax.dynamic_update_slice_in_dim(ancestors, own, position, axis=2)


def ancestor_mask(ancestors: Ancestors, keys: int) -> Bool[Array, 'batch 1 beam keys']:
    """Returns the mask of the first `keys` keys of the past. Each hypothesis sees only the keys of its ancestors."""
    batch, beam, _ = ancestors.shape
    visible = ancestors[:, :, :keys // beam, None] == jnp.arange(beam)
    return visible.reshape(batch, 1, beam, keys)


def write(past: Past, key: Float[Array, 'batch beam groups d_k'], value: Float[Array, 'batch beam groups d_v'],
          first: Int[Array, '']) -> Past:
    """Returns the past after all hypotheses have written the keys and values of one step, from index `first` on."""
    return {name: jax.lax.dynamic_update_slice_in_dim(
        past[name], jnp.moveaxis(new, 1, 3).astype(past[name].dtype), first, axis=3)
        for name, new in {'key': key, 'value': value}.items()}


def to_past(array: Float[Array, 'batch source groups width']) -> Float[Array, 'batch groups width source']:
    """Returns keys or values with the axes of a past. Memory has the same order, so that no step copies the array."""
    return in_rows(jnp.moveaxis(array, 1, 3))


def from_past(array: Float[Array, 'batch groups width source']) -> Float[Array, 'batch source groups width']:
    """Returns keys or values of a past with the axes that attention expects, without a copy in memory."""
    return jnp.moveaxis(array, 3, 1)
