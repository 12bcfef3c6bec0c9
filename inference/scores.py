"""Corpus scores by sacreBLEU (Post 2018, arXiv:1804.08771), each with the signature that makes it comparable."""

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics import BLEU, CHRF


def corpus_scores(outputs: Sequence[str], references: Sequence[str], *, chrf: bool = True) -> dict[str, Any]:
    """BLEU (cased, detokenised, 13a), chrF, and the share of outputs that are right to the byte.

    'bleu_lowercased_tokenised' is BLEU over lowercased 13a tokens: what papers on Multi30k report comes close
    to it, but uses Moses' tokens. Never compare it with 'bleu'.
    """
    bleu, lowercased = BLEU(), BLEU(lowercase=True)
    scores = {
        'n': len(outputs),
        'bleu': bleu.corpus_score(outputs, [references]).score, 'bleu_signature': str(bleu.get_signature()),
        'bleu_lowercased_tokenised': lowercased.corpus_score(outputs, [references]).score,
        'bleu_lowercased_tokenised_signature': str(lowercased.get_signature()),
        'exact_match': sum(map(str.__eq__, outputs, references)) / len(outputs),
    }
    if chrf:
        metric = CHRF()
        scores |= {'chrf': metric.corpus_score(outputs, [references]).score,
                   'chrf_signature': str(metric.get_signature())}
    return scores
