"""The answers of models that write text: outputs, hypotheses and the probabilities of tokens."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from inference import search


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One of the texts that a search returns for an input.

    Attributes:
      text: the decoded tokens.
      tokens: the tokens, without the end token.
      log_prob: the model's log-probability of the tokens and, if `ended` is true, of the end token. Teacher forcing
        gives the same number.
      score: log_prob / ((5 + length) / 6)^alpha. `length` is the number of tokens whose log-probabilities are in
        `log_prob`. Hypotheses are ranked by score, or by expected chrF with method='mbr' (inference/minimum_risk.py).
      ended: whether an end token follows the tokens. A continuation that reached its length limit has no end token.
    """
    text: str
    tokens: list[int]
    log_prob: float
    score: float
    ended: bool = True

    @classmethod
    def forced(cls, text: str, tokens: list[int], log_probs: Sequence[float], alpha: float) -> 'Hypothesis':
        """Returns a given text as a hypothesis. `log_probs` has a value for each token and for the end token."""
        log_prob = math.fsum(log_probs)
        return cls(text, tokens, log_prob, float(log_prob / search.length_penalty(len(log_probs), alpha)))


@dataclasses.dataclass(frozen=True)
class Output:
    """An input text and its hypotheses, best first. An empty input has one empty hypothesis."""
    source: str
    source_tokens: list[int]
    hypotheses: list[Hypothesis]

    @property
    def text(self) -> str:
        """The text of the best hypothesis."""
        return self.hypotheses[0].text

    @property
    def line(self) -> str:
        """The text as one line. Every line end, also U+2028, U+0085 and a form feed, becomes a space."""
        return ' '.join(self.text.splitlines())


class TokenProbability(NamedTuple):
    """A token with its probability, and the most probable alternative tokens at the same position, best first."""
    piece: str
    probability: float
    alternatives: list[tuple[str, float]]
