"""What a decoder remembers between two steps: an explicit value, passed in and returned."""

from typing import Any

import flax.struct


@flax.struct.dataclass
class Cache:
    """The contract between every model that generates and every search.

    Attributes:
      memory: what stays the same for a sentence (cross-attention keys and values, the source mask);
        leaves [batch, ...]. Never reordered, never copied for each hypothesis.
      state: what belongs to one hypothesis; leaves [batch, beam, ...]. A beam reorders it with one tree.map.
      position: int [], number of tokens decoded so far.
    """
    memory: Any
    state: Any
    position: Any
