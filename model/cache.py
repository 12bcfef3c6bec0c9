"""What a decoder reads and what it remembers between two steps: explicit values, passed in and returned.

The hypotheses of a sentence write into one past, which no search ever reorders or copies. What tells one hypothesis
from another is a table of its ancestors, a few bytes a step: that is what a beam reorders. So the hypotheses of
a sentence are queries at the same keys, under a mask, which is one product of matrices.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.layout import in_rows

# Of a layer: 'key' and 'value', [batch, groups, width, keys], as attention's products read them. Groups are the heads
# of keys and values, which are fewer than those of queries if these are grouped.
Past = dict[str, Array]
Ancestors = Int[Array, 'batch beam slots']


class Memory(flax.struct.PyTreeNode):
    """What an encoder hands to a decoder.

    Attributes:
      states: float [batch, source, width].
      visible: bool [batch, source], False where there is padding.
    """
    states: Any  # an array; in jax.eval_shape's answers its shape, hence no annotation that is checked
    visible: Any


class Cache(flax.struct.PyTreeNode):
    """The contract between every model that generates and every search. Leaves are arrays, as those of Memory.

    Attributes:
      memory: what stays the same for a sentence (cross-attention keys and values, the source mask);
        leaves [batch, ...]. Never reordered, never copied for each hypothesis.
      state: what belongs to one hypothesis (the table of its ancestors, the state of a recurrent network);
        leaves [batch, beam, ...]. A beam reorders it with one tree.map.
      position: int [], number of tokens decoded so far.
      past: what the hypotheses of a sentence have written; leaves [batch, ..., keys]. Each step of `beam` hypotheses
        fills the next `beam` keys, and whoever needs room for more steps pads the last axis. Never reordered.
    """
    memory: Any
    state: Any
    position: Any
    past: Any = ()

    def resized(self, keys: int) -> 'Cache':
        """The cache with so many keys more in its past, or, of a negative number, so many less at its end."""
        def resize(leaf):
            if keys < 0:
                return leaf[..., :keys]
            return jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, keys)])

        return self.replace(past=jax.tree.map(resize, self.past))


def no_ancestors(batch: int, beam: int, slots: int) -> Ancestors:
    """The table of hypotheses that have written nothing in any of `slots` steps yet.

    An entry is the hypothesis, 0 to beam - 1, that wrote what this one remembers of a step; -1 if there is nothing.
    """
    return jnp.full((batch, beam, slots), -1, jnp.int32)


def with_own(ancestors: Ancestors, position: Int[Array, '']) -> Ancestors:
    """The table once every hypothesis has written itself at step `position`."""
    batch, beam, _ = ancestors.shape
    own = jnp.broadcast_to(jnp.arange(beam)[:, None], (batch, beam, 1))
    return jax.lax.dynamic_update_slice_in_dim(ancestors, own, position, axis=2)


def ancestor_mask(ancestors: Ancestors, keys: int) -> Bool[Array, 'batch 1 beam keys']:
    """Which of the first `keys` keys of the past each hypothesis remembers: those that its ancestors wrote."""
    batch, beam, _ = ancestors.shape
    visible = ancestors[:, :, :keys // beam, None] == jnp.arange(beam)
    return visible.reshape(batch, 1, beam, keys)


def write(past: Past, key: Float[Array, 'batch beam groups d_k'], value: Float[Array, 'batch beam groups d_v'],
          first: Int[Array, '']) -> Past:
    """Returns the past with the keys and values of one step of every hypothesis, from key number `first` on."""
    return {name: jax.lax.dynamic_update_slice_in_dim(
        past[name], jnp.moveaxis(new, 1, 3).astype(past[name].dtype), first, axis=3)
        for name, new in {'key': key, 'value': value}.items()}


def to_past(array: Float[Array, 'batch source groups width']) -> Float[Array, 'batch groups width source']:
    """Returns keys or values with the axes of a past, also in memory: otherwise XLA transposes them at every step."""
    return in_rows(jnp.moveaxis(array, 1, 3))


def from_past(array: Float[Array, 'batch groups width source']) -> Float[Array, 'batch source groups width']:
    """Returns keys or values of a past with the axes that attention expects; the product needs no copy for it."""
    return jnp.moveaxis(array, 3, 1)
