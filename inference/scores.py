"""Corpus scores by sacreBLEU (Post 2018, arXiv:1804.08771), each with the signature that makes it comparable."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from inference.translate import Translator


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


def perplexity(translator: Translator, pairs: Sequence[tuple[str, str]], batch_size: int) -> float:
    """exp of the mean cross-entropy per target token, end tokens included, without label smoothing.

    Its unit is the vocabulary's token: comparable between models of one vocabulary only.
    """
    source, target = (translator.tokenizers[side] for side in ('source', 'target'))
    encoded = sorted(((source.encode(a), target.encode(b)) for a, b in pairs), key=lambda pair: max(map(len, pair)))
    log_probs = []
    for begin in range(0, len(encoded), batch_size):
        for sentence in translator.token_log_probs(encoded[begin:begin + batch_size]):
            log_probs += sentence
    return float(np.exp(-np.mean(log_probs)))
