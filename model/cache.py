"""What a decoder reads and what it remembers between two steps: explicit values, passed in and returned."""

from typing import Any

import flax.struct


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
      state: what belongs to one hypothesis; leaves [batch, beam, ...]. A beam reorders it with one tree.map.
      position: int [], number of tokens decoded so far.
    """
    memory: Any
    state: Any
    position: Any
