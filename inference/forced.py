"""Teacher forcing of many texts: the log-probability of every token of what is given and not found."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

TOKENS = 8192  # targets of a batch at most, as each has logits over the whole vocabulary


class Forced(NamedTuple):
    """A text that a model is to predict.

    Attributes:
      inputs: the module's arguments by name, tokens each.
      targets: the tokens that its outputs predict.
    """
    inputs: Mapping[str, Sequence[int]]
    targets: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens of the longest of them."""
        return max(len(self.targets), *map(len, self.inputs.values()))


def forced_log_probs(log_probs: Callable[[Any, Any], Any], padded: Callable[..., np.ndarray],
                     texts: Sequence[Forced], batch_size: int) -> list[list[float]]:
    """The log-probability of each target of each text, in the order of `texts`.

    Texts of about one length share a batch, of few shapes: `batch_size` rows or less for long ones, or a power of two.

    Args:
      log_probs: (inputs by name, targets [rows, length]) -> their log-probabilities [rows, length].
      padded: rows of tokens and a least number of rows -> an array.
      texts: what is to be predicted.
      batch_size: texts at a time.
    """
    order = sorted(range(len(texts)), key=lambda row: -texts[row].length)
    found: list[list[float]] = [[] for _ in texts]
    while order:
        fitting = max(1, TOKENS // max(1, texts[order[0]].length))
        most = min(batch_size, 1 << fitting.bit_length() - 1)
        rows, order = order[:most], order[most:]
        count = min(most, 1 << (len(rows) - 1).bit_length())
        inputs = {name: padded([texts[row].inputs[name] for row in rows], count) for name in texts[rows[0]].inputs}
        several = np.asarray(log_probs(inputs, padded([texts[row].targets for row in rows], count)))
        for row, each in zip(rows, several, strict=False):
            found[row] = each[:len(texts[row].targets)].tolist()
    return found
