"""The output of an encoder, and the cache of a decoder. Each step takes a cache and returns the new cache.

All hypotheses of a sentence write their keys and values into the same arrays (`Past`). A search never reorders or
copies these arrays. Instead, each hypothesis has a table of its ancestors: for each step, the index of the hypothesis
that wrote the key. Beam search reorders only these tables, which have a few bytes per step. Because the keys are
shared, the scores of all hypotheses of a sentence are one matrix product. A mask hides the keys of other hypotheses.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kernels.layout import in_rows

Ancestors = Int[Array, 'batch beam slots']
KEYS_AXIS = {'key': 3, 'value': 2}  # the axis of the keys in each field of `Past`


class Past(flax.struct.PyTreeNode):
    """The cached keys and values of an attention layer.

    The order of the axes lets the matrix products of a decoding step read the arrays without a copy. The scores are
    queries [beam, d_k] times keys [d_k, keys], and the output is weights [beam, keys] times values [keys, d_v]
    (kernels/heads.py). Compared with values [d_v, keys], the second product takes a third of the time.

    Attributes:
      key: [batch, groups, d_k, keys]. Groups are the heads of keys and values.
      value: [batch, groups, keys, d_v].
    """
    key: Any
    value: Any

    @classmethod
    def of(cls, key: Float[Array, 'batch keys groups d_k'], value: Float[Array, 'batch keys groups d_v']) -> 'Past':
        """Returns a `Past` that contains the given keys and values."""
        return cls(jnp.moveaxis(key, 1, KEYS_AXIS['key']), jnp.moveaxis(value, 1, KEYS_AXIS['value']))

    @classmethod
    def empty(cls, batch: int, groups: int, widths: tuple[int, int], keys: int, dtype: DTypeLike) -> 'Past':
        """Returns a `Past` of zeros. `widths` is (d_k, d_v)."""
        d_k, d_v = widths
        return cls(jnp.zeros((batch, groups, d_k, keys), dtype), jnp.zeros((batch, groups, keys, d_v), dtype))

    def keys_values(self) -> tuple[Float[Array, 'batch keys groups d_k'], Float[Array, 'batch keys groups d_v']]:
        """Returns the keys and the values with the axes that attention expects, without a copy in memory."""
        return jnp.moveaxis(self.key, KEYS_AXIS['key'], 1), jnp.moveaxis(self.value, KEYS_AXIS['value'], 1)

    def length(self) -> int:
        """Returns the number of keys."""
        return self.key.shape[KEYS_AXIS['key']]

    def in_rows(self) -> 'Past':
        """Returns the same keys and values. If there is only one device, they are stored in row-major order.

        So no decoding step copies the arrays. With several devices, XLA would gather the rows of all devices.
        """
        return jax.tree.map(in_rows, self) if jax.device_count() == 1 else self

    def resized(self, keys: int) -> 'Past':
        """Returns a `Past` with room for `keys` more keys. A negative number removes the last keys."""
        if keys < 0:
            return self._each(lambda array, axis: jax.lax.slice_in_dim(array, 0, self.length() + keys, axis=axis))
        return self._each(lambda array, axis: jnp.pad(
            array, [(0, keys if other == axis else 0) for other in range(array.ndim)]))

    def write(self, key: Float[Array, 'batch beam groups d_k'], value: Float[Array, 'batch beam groups d_v'],
              first: Int[Array, '']) -> 'Past':
        """Writes the keys and values of one step of all hypotheses from index `first` on. Returns the new `Past`."""
        new = Past.of(key, value)
        return self.replace(**{name: jax.lax.dynamic_update_slice_in_dim(
            getattr(self, name), getattr(new, name).astype(getattr(self, name).dtype), first, axis=axis)
            for name, axis in KEYS_AXIS.items()})

    def _each(self, function: Callable[[Array, int], Array]) -> 'Past':
        return self.replace(**{name: function(getattr(self, name), axis) for name, axis in KEYS_AXIS.items()})


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
      past: a tree of `Past`, the keys and values that the hypotheses of a sentence have written. Each step of `beam`
        hypotheses writes the next `beam` keys. `resized` adds room for more steps. These arrays are never reordered.
    """
    memory: Any
    state: Any
    position: Any
    past: Any = ()

    def resized(self, keys: int) -> 'Cache':
        """Returns the cache with room for `keys` more keys. A negative number removes the last keys."""
        return self.replace(past=jax.tree.map(lambda past: past.resized(keys), self.past,
                                              is_leaf=lambda node: isinstance(node, Past)))


def no_ancestors(batch: int, beam: int, slots: int) -> Ancestors:
    """Returns an empty table of ancestors for `slots` steps. All entries are -1.

    After a step, the entry of each hypothesis for this step is the index of the ancestor that wrote the key.
    """
    return jnp.full((batch, beam, slots), -1, jnp.int32)


def with_own(ancestors: Ancestors, position: Int[Array, '']) -> Ancestors:
    """Returns the table after step `position`. At this step, every hypothesis is its own ancestor."""
    batch, beam, _ = ancestors.shape
    own = jnp.broadcast_to(jnp.arange(beam, dtype=jnp.int32)[:, None], (batch, beam, 1))
    return jax.lax.dynamic_update_slice_in_dim(ancestors, own, position, axis=2)


def ancestor_mask(ancestors: Ancestors, keys: int) -> Bool[Array, 'batch 1 beam keys']:
    """Returns the mask of the first `keys` keys of the cache. Each hypothesis sees only the keys of its ancestors."""
    batch, beam, _ = ancestors.shape
    visible = ancestors[:, :, :keys // beam, None] == jnp.arange(beam)
    return visible.reshape(batch, 1, beam, keys)
