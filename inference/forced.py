"""Teacher forcing: computes the log-probability of every token of given texts, in batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

TOKENS = 8192  # maximum number of target tokens in a batch, because each target has logits over the whole vocabulary


class Forced(NamedTuple):
    """A text whose tokens are scored by teacher forcing.

    Attributes:
      inputs: the arguments of the module by name, each a list of tokens.
      targets: the tokens that the outputs of the module predict.
    """
    inputs: Mapping[str, Sequence[int]]
    targets: Sequence[int]

    @property
    def length(self) -> int:
        """The number of tokens in the longest list of `inputs` and `targets`."""
        return max(len(self.targets), *map(len, self.inputs.values()))


def forced_log_probs(log_probs: Callable[[Any, Any], Any], padded: Callable[..., np.ndarray],
                     texts: Sequence[Forced], batch_size: int) -> list[list[float]]:
    """Returns the log-probability of each target of each text, in the order of `texts`.

    Texts of similar length are in the same batch. The number of rows of a batch is `batch_size` or a power of two, so
    that few shapes are compiled. Batches of long texts have fewer rows.

    Args:
      log_probs: a function (inputs by name, targets [rows, length]) -> log-probabilities of the targets [rows, length].
      padded: a function (rows of tokens, minimum number of rows) -> padded array.
      texts: the texts.
      batch_size: the maximum number of texts in a batch.
    """
    order = sorted(range(len(texts)), key=lambda row: -texts[row].length)
    result: list[list[float]] = [[] for _ in texts]
    while order:
        fitting = max(1, TOKENS // max(1, texts[order[0]].length))
        most = min(batch_size, 1 << fitting.bit_length() - 1)
        rows, order = order[:most], order[most:]
        count = min(most, 1 << (len(rows) - 1).bit_length())
        inputs = {name: padded([texts[row].inputs[name] for row in rows], count) for name in texts[rows[0]].inputs}
        values = np.asarray(log_probs(inputs, padded([texts[row].targets for row in rows], count)))
        for row, row_values in zip(rows, values, strict=False):
            result[row] = row_values[:len(texts[row].targets)].tolist()
    return result
