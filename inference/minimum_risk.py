"""Minimum Bayes risk decoding: the text with the smallest expected error, instead of the text with the best score."""

import functools
from collections.abc import Sequence

import numpy as np

from inference.outputs import Hypothesis


def by_expected_chrf(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Returns the hypotheses of a beam search, sorted by their expected chrF, best first.

    The expected chrF of a text x is sum_y p(y) chrF(x, y), where y are the texts of all hypotheses. p(y) is the
    probability of y under the model, normalised over the hypotheses. For the loss 100 - chrF, the first hypothesis has
    the minimum Bayes risk (Kumar and Byrne 2004, aclanthology.org/N04-1022, who use a loss based on BLEU). chrF
    (Popović 2015, aclanthology.org/W15-3049) is computed by sacreBLEU with its default options, as in the scores of
    decode.py. Hypotheses with the same expected chrF keep their order.
    """
    from sacrebleu.metrics.chrf import CHRF  # imported here, because the import is slow

    chrf = CHRF()
    log_probs = np.array([hypothesis.log_prob for hypothesis in hypotheses])
    weights = np.exp(log_probs - log_probs.max())
    weights /= weights.sum()

    @functools.cache
    def similarity(text, reference):
        return 100.0 if text == reference else chrf.sentence_score(text, [reference]).score

    def expected(hypothesis):
        return sum(weight * similarity(hypothesis.text, reference.text)
                   for weight, reference in zip(weights, hypotheses, strict=True))

    return sorted(hypotheses, key=expected, reverse=True)
