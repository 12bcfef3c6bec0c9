"""The encoder's output and the state of a decoder between two steps: explicit values, passed in and returned.

The hypotheses of a sentence write into one past, which no search reorders or copies. Each hypothesis has a table of its
ancestors, a few bytes per step, and a beam reorders these tables. So the hypotheses of a sentence are queries to the
same keys, with a mask, which is one product of matrices.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.layout import in_rows

# The 'key' and 'value' of a layer, [batch, groups, width, keys], with the axes that attention's products read. Groups
# are the heads of keys and values.
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
    """The state of decoding: the contract between models that generate and searches. All leaves are arrays.

    Attributes:
      memory: values that are constant for a sentence (keys and values of cross-attention, the source mask);
        leaves [batch, ...]. They are never reordered, and not copied for each hypothesis.
      state: values of one hypothesis (the table of its ancestors, the state of a recurrent network);
        leaves [batch, beam, ...]. A beam reorders them with one tree.map.
      position: int [], number of tokens decoded so far.
      past: keys and values that the hypotheses of a sentence have written; leaves [batch, ..., keys]. Each step of
        `beam` hypotheses fills the next `beam` keys; `resized` makes room for more steps. Never reordered.
    """
    memory: Any
    state: Any
    position: Any
    past: Any = ()

    def resized(self, keys: int) -> 'Cache':
        """Returns the cache with `keys` more keys in its past, or fewer at its end if `keys` is negative."""
        def resize(leaf):
            if keys < 0:
                return leaf[..., :keys]
            return jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, keys)])

        return self.replace(past=jax.tree.map(resize, self.past))


def no_ancestors(batch: int, beam: int, slots: int) -> Ancestors:
    """Returns the table of ancestors before the first of `slots` steps.

    An entry is the number, 0 to beam - 1, of the hypothesis that wrote the key of this step; -1 if there is no key.
    """
    return jnp.full((batch, beam, slots), -1, jnp.int32)


def with_own(ancestors: Ancestors, position: Int[Array, '']) -> Ancestors:
    """Returns the table after every hypothesis has written its own key at step `position`."""
    batch, beam, _ = ancestors.shape
    own = jnp.broadcast_to(jnp.arange(beam)[:, None], (batch, beam, 1))
    return jax.lax.dynamic_update_slice_in_dim(ancestors, own, position, axis=2)


def ancestor_mask(ancestors: Ancestors, keys: int) -> Bool[Array, 'batch 1 beam keys']:
    """Returns the mask of the first `keys` keys of the past: each hypothesis sees the keys of its ancestors."""
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
