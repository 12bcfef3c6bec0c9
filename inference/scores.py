"""Scores of translations, language models, classifications and regressions, and the table of single answers.

BLEU and chrF are sacreBLEU's (Post 2018, arXiv:1804.08771), each with the signature that makes it comparable.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

ESCAPES = {'\\': r'\\', '\t': r'\t', '\n': r'\n', '\r': r'\r'}  # in a table: what would end a cell or a line


class Evaluation(NamedTuple):
    """What an evaluation during training finds beyond the loss: numbers, and something to look at.

    `answer` is an Output or a Prediction, and `weights` its attention; a model without attention has none of it.
    """
    metrics: dict[str, float]
    samples: str = ''
    answer: Any = None
    weights: Mapping[str, Float[np.ndarray, 'layer head t s']] | None = None


def corpus_scores(outputs: Sequence[str], references: Sequence[str], *, chrf: bool = True) -> dict[str, Any]:
    """BLEU (cased, detokenised, 13a), chrF, and the share of outputs that are right to the byte.

    'bleu_lowercased_tokenised' is BLEU over lowercased 13a tokens: what papers on Multi30k report comes close
    to it, but uses Moses' tokens. Never compare it with 'bleu'.
    """
    from sacrebleu.metrics.bleu import BLEU  # slow to import, so only where it is used
    from sacrebleu.metrics.chrf import CHRF

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


def bits_per_character(nll: float, characters: int) -> float:
    """The cross-entropy of a whole text, in nats, as bits for each of its characters.

    End tokens count in `nll`; texts tokenised by different vocabularies can be compared.
    """
    return nll / np.log(2) / characters


def classification_scores(log_probs: Float[np.ndarray, 'examples classes'], targets: Int[np.ndarray, ' examples'],
                          classes: Sequence[str]) -> dict[str, Any]:
    """Accuracy, mean cross-entropy in nats, and the confusion matrix.

    The matrix has a row for each true class and a column for each predicted one.
    """
    predicted = log_probs.argmax(axis=-1)
    confusion = np.zeros((len(classes), len(classes)), int)
    np.add.at(confusion, (targets, predicted), 1)
    return {'n': len(targets), 'accuracy': float(np.mean(predicted == targets)),
            'loss': float(-np.mean(log_probs[np.arange(len(targets)), targets])),
            'classes': list(classes), 'confusion_matrix': confusion.tolist()}


def regression_scores(values: Float[np.ndarray, 'examples values'],
                      targets: Float[np.ndarray, 'examples values']) -> dict[str, Any]:
    """Errors in the targets' own units, means over examples and values, and R^2.

    R^2 is 1 - (mean squared error) / (variance of the targets); where they do not vary it is left out.
    """
    values, targets = values.astype(np.float64), targets.astype(np.float64)  # squares beyond float32 are numbers
    error = values - targets
    squared, variance = float(np.mean(error ** 2)), float(np.mean(np.var(targets, axis=0)))
    scores = {'n': len(targets), 'root_mean_squared_error': squared ** 0.5,
              'mean_absolute_error': float(np.mean(np.abs(error)))}
    return scores | ({'r_squared': 1 - squared / variance} if variance else {})


def table_line(cells: Sequence[str]) -> str:
    """A line of RUN/results/SPLIT.tsv: cells with tabs between them, and a line feed; ESCAPES are replaced."""
    return '\t'.join(cell.translate(str.maketrans(ESCAPES)) for cell in cells) + '\n'


def read_table(path: str | Path) -> list[list[str]]:
    """The rows of such a file, every cell as it was. Only a line feed ends a line: U+2028 is part of a cell."""
    written = {escape: character for character, escape in ESCAPES.items()}
    return [[re.sub(r'\\[\\tnr]', lambda found: written[found[0]], cell) for cell in line.split('\t')]
            for line in Path(path).read_text('utf-8').split('\n')[:-1]]
