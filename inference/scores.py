"""Scores of translations, language models, classifications and regressions, and the table of answers.

sacreBLEU computes BLEU, chrF and TER (Post 2018, arXiv:1804.08771). Each of these scores has a signature. Two scores
can be compared if their signatures are equal.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float, Int

from run_directory.records import EDITED, ENSEMBLE
from runtime.errors import UserError
from runtime.files import expanded

SAMPLES = 1000  # bootstrap resamples
MOST_CONFUSED = 10  # maximum number of pairs of classes in the results
# Languages without spaces between words, and the tokenizer of BLEU for them. 'ja-mecab' would need another package.
BLEU_TOKENIZERS = {language: tokenizer for tokenizer, languages in {
    'zh': 'zh zho chi cmn yue', 'char': 'ja jpn th tha lo lao km khm my mya bur bo bod tib dz dzo'}.items()
    for language in languages.split()}
# If a larger share of the references has no 4-gram, BLEU is unreliable. In the built-in data, this share is up to 0.52
# for languages with spaces between words, and BLEU still distinguishes good models from bad models.
MOST_SHORT = 0.75
# Backslashes, and characters that would end a cell or a line of a table.
ESCAPES = {'\\': r'\\', '\t': r'\t', '\n': r'\n', '\r': r'\r'}
ESCAPED = str.maketrans(ESCAPES)


class Evaluation(NamedTuple):
    """The results of an evaluation during training, apart from the loss.

    `answer` is an Output or a Prediction. `weights` are the attention weights for this answer. For a model without
    attention, `weights` is empty. `statistics` are metrics that are not printed (config.track.places).
    """
    metrics: dict[str, float]
    samples: str = ''
    answer: Any = None
    weights: Mapping[str, Float[np.ndarray, 'layer head t s']] | None = None
    statistics: Mapping[str, float] = MappingProxyType({})


def primary_subtag(language: str) -> str:
    """Returns the language of a code with a country or a script, such as 'zh' for 'zh-CN' and 'zh_Hant'."""
    return re.split('[-_@.]', language.lower())[0]


def translation_metrics(language: str, complete: bool = False) -> dict[str, Any]:
    """Returns {name of the score: metric of sacreBLEU}. Without `complete`, returns only the metrics that are fast.

    'bleu' is cased and detokenised. Its tokenizer is 13a, or one of BLEU_TOKENIZERS if `language`, the language of the
    translations, has no spaces between words. 'bleu_lowercased_tokenised' is BLEU over lowercased tokens of the same
    tokenizer. 'bleu_lowercased_moses' is BLEU over lowercased Moses tokens of `language`. Papers on Multi30k report
    this score (see inference/moses.py). It does not exist for languages without spaces, because Moses does not separate
    their words. These three scores cannot be compared with each other. 'ter' is an error rate, so a lower score is
    better.
    """
    from sacrebleu.metrics.bleu import BLEU  # imported here, because the import is slow
    from sacrebleu.metrics.chrf import CHRF

    tokenizer = BLEU_TOKENIZERS.get(primary_subtag(language), '13a')
    metrics: dict[str, Any] = {
        'bleu': BLEU(tokenize=tokenizer), 'bleu_lowercased_tokenised': BLEU(lowercase=True, tokenize=tokenizer),
        'chrf': CHRF()}
    if not complete:
        return metrics
    from sacrebleu.metrics.ter import TER

    from inference.moses import moses_bleu
    moses = {'bleu_lowercased_moses': moses_bleu(primary_subtag(language))} if tokenizer == '13a' else {}
    return metrics | moses | {'chrf++': CHRF(word_order=2), 'ter': TER()}


def short_references_warning(references: Sequence[str], language: str) -> str:
    """Returns a warning if most references have too few tokens for the 4-grams of BLEU. Otherwise, returns ''."""
    bleu = translation_metrics(language)['bleu']
    short = sum(len(bleu.tokenizer(reference).split()) < bleu.max_ngram_order for reference in references)
    if short <= MOST_SHORT * len(references):
        return ''
    return (f'{short} of {len(references)} references have fewer than {bleu.max_ngram_order} tokens (tokenizer '
            f'{bleu.tokenizer_signature} of sacreBLEU), so BLEU is unreliable. Use chrF, and train with '
            '--config.eval.metric=chrf or --config.eval.metric=loss')


def corpus_scores(outputs: Sequence[str], references: Sequence[str], language: str = '',
                  complete: bool = False) -> dict[str, Any]:
    """Returns the scores of `translation_metrics` with their signatures. Without a language, BLEU uses 13a tokens.

    Also returns 'n', the number of outputs, and 'exact_match', the share of outputs that equal their reference.
    """
    scores = {'n': len(outputs), 'exact_match': sum(map(str.__eq__, outputs, references)) / len(outputs)}
    for name, metric in translation_metrics(language, complete).items():
        scores |= {name: metric.corpus_score(outputs, [references]).score,
                   f'{name}_signature': str(metric.get_signature())}
    return scores


def confidence_intervals(outputs: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Returns {'bleu': [low, high], ...}, the 95 % interval of each score by bootstrap resampling of the sentences.

    The ends of an interval are the percentiles 2.5 and 97.5 of the scores of sacreBLEU's resamples (Koehn 2004,
    W04-3250). sacreBLEU itself reports mean ± half of the width, so its intervals may contain impossible scores.
    'signature' has the number of resamples and the seed.
    """
    intervals, signature = {}, None
    for name, metric in translation_metrics(language, complete=True).items():
        intervals[name] = interval(metric, outputs, references)
        signature = metric.get_signature()
    return intervals | {'signature': _resampling(signature)}


def interval(metric: Any, outputs: Sequence[str], references: Sequence[str]) -> list[float]:
    """Returns the 95 % interval of a metric of sacreBLEU by bootstrap resampling. Sets the seed of the metric."""
    from sacrebleu.significance import _bootstrap_resample  # imported here, because the import is slow

    # As in sacreBLEU's `corpus_score(n_bootstrap=SAMPLES)`. That function does not return the scores of the resamples.
    statistics = metric._extract_corpus_statistics(outputs, [references])
    metric.n_bootstrap = SAMPLES
    metric.seed, scores = _bootstrap_resample(statistics, metric, SAMPLES)
    return np.percentile([score.score for score in scores], [2.5, 97.5]).round(4).tolist()


def compare_translations(outputs: Sequence[str], other_outputs: Sequence[str], references: Sequence[str],
                         language: str) -> dict[str, Any]:
    """Returns {'bleu': {'other': score, 'difference': score of `outputs` - other, 'p_value': p}, ...}.

    p is the probability that two equally good systems differ by at least this difference, in either direction.
    sacreBLEU's paired bootstrap test computes p by scoring both systems on the same resampled sentences (Koehn 2004,
    W04-3250).
    """
    from sacrebleu.significance import PairedTest, Result  # imported here, because the import is slow

    compared, described = {}, None
    for name, metric in translation_metrics(language, complete=True).items():
        signatures, scores = PairedTest([('other', other_outputs), ('this', outputs)], {name: metric}, [references],
                                        test_type='bs', n_samples=SAMPLES)()
        [(key, described)] = signatures.items()
        other, this = cast(list[Result], scores[key])
        difference = this.score - other.score  # for equal systems, sacreBLEU's p is 1 / (resamples + 1)
        compared[name] = {'other': other.score, 'difference': difference,
                          'p_value': this.p_value if difference else 1.0}
    return compared | {'signature': _resampling(described)}


def results_name(split: str, workdirs: Sequence[Path], edited: bool) -> str:
    """Returns the name of a split's result files, without extension. Files of an ensemble are in its first run."""
    return split + (ENSEMBLE if len(workdirs) > 1 else '') + (EDITED if edited else '')


def result_tables(workdir: str | Path) -> list[Path]:
    """Returns the files SPLIT.tsv of a run by name, without the files of an edited model or of an ensemble."""
    return sorted(path for path in expanded(workdir).glob('results/*.tsv')
                  if not path.stem.endswith((ENSEMBLE, EDITED)))


def read_translations(workdir: str, split: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Reads the translations of `pairs` that another run has written into its results folder.

    Translations of an edited model or of an ensemble are not read.

    Args:
      workdir: the directory of the other run.
      split: the name of the split in this run. The name in the other run may differ.
      pairs: the sources and the references.

    Raises:
      UserError: if the other run has no such results.
    """
    if not expanded(workdir).is_dir():
        raise UserError(f'--compare={workdir}: there is no such directory. Use a run directory')
    tables = sorted(result_tables(workdir), key=lambda path: path.stem != split)
    for path in tables:
        try:
            rows = read_table(path)
        except (OSError, ValueError) as error:
            raise UserError(f'--compare={workdir}: {path} cannot be read: {error}. Score that run again with '
                            'decode.py --split') from None
        if [tuple(row[:2]) for row in rows] == list(pairs) and {len(row) for row in rows} == {3}:
            return [row[2] for row in rows]
    name = split if split in ('train', 'validation') else 'test'  # in the other run, the set may have another name
    scored = f', only of {" and ".join(path.stem for path in tables)}' if tables else ''
    raise UserError(f'--compare={workdir}: that run has no translations of the sentences of {split}{scored}. Score '
                    f'that run first: python decode.py --workdir={workdir} --split={name}')


def _resampling(signature: Any) -> str:
    """Returns the number of resamples and their seed from a signature of sacreBLEU."""
    return '|'.join(part for part in str(signature).split('|') if part.startswith(('bs:', 'seed:')))


def perplexity(loss: float) -> float | None:
    """Returns exp(loss), or None (null in JSON) if this is larger than the largest float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None


def text_scores(log_prob: float, tokens: int, characters: int, bytes: int) -> dict[str, float | None]:
    """Returns the perplexity per token, the bits per character and the bits per byte of texts.

    If the texts are empty, the bits per character and per byte are None. A perplexity above 1.8e308 is None. Bits per
    byte (of UTF-8) can be compared between tokenizers, because every byte is counted once. The perplexity can be
    compared only between models with the same vocabulary.

    Args:
      log_prob: the log-probability of all tokens, in nats.
      tokens: the number of tokens, including end tokens.
      characters: the number of characters of the texts.
      bytes: the number of bytes of the texts in UTF-8.
    """
    bits = -log_prob / math.log(2)
    return {'perplexity': perplexity(-log_prob / tokens),
            'bits_per_character': bits / characters if characters else None,
            'bits_per_byte': bits / bytes if bytes else None}


def change_warning(changed: int, count: int, unit: str) -> str:
    """Returns a warning if the tokenizer changed some of the texts that were scored, or '' if it changed none.

    Args:
      changed: the number of texts whose decoded tokens differ from the text.
      count: the number of texts.
      unit: the name of a text, such as 'line'.
    """
    if not changed:
        return ''
    units = f'{unit}s' if count > 1 else unit
    return (f'in {changed} of {count} {units}, the decoded tokens differ from the text. Do not compare bits per byte '
            'or per character with other models')


def classification_scores(log_probs: Float[np.ndarray, 'examples classes'], targets: Int[np.ndarray, ' examples'],
                          classes: Sequence[str]) -> dict[str, Any]:
    """Returns accuracies, mean cross-entropy in nats, the most confused pairs of classes, and the confusion matrix.

    'balanced_accuracy' is the mean recall of the classes that have examples. With more than five classes,
    'top_5_accuracy' is the share of examples whose class is one of the five most probable classes. Of classes with the
    same probability, the first one has the better rank, as in argmax.

    The matrix is sparse: {true class: {predicted class: number of examples}}, without zeros. 'most_confused' has
    the pairs of different classes with the most examples, at most MOST_CONFUSED pairs.
    """
    predicted = log_probs.argmax(axis=-1)
    pairs, counts = np.unique(np.stack([targets, predicted], axis=1), axis=0, return_counts=True)
    matrix: dict[str, dict[str, int]] = {}
    for (true, answer), count in zip(pairs, counts, strict=True):
        matrix.setdefault(classes[int(true)], {})[classes[int(answer)]] = int(count)
    wrong = sorted(((count, true, answer) for true, row in matrix.items() for answer, count in row.items()
                    if answer != true), key=lambda pair: -pair[0])
    correct, of_targets = predicted == targets, log_probs[np.arange(len(targets)), targets][:, None]
    accuracies = {'accuracy': float(np.mean(correct)), 'balanced_accuracy': float(np.mean(
        [correct[targets == target].mean() for target in np.unique(targets)]))}
    if len(classes) > 5:
        equal_before = (log_probs == of_targets) & (np.arange(len(classes)) < targets[:, None])
        rank = np.sum((log_probs > of_targets) | equal_before, axis=1)
        accuracies['top_5_accuracy'] = float(np.mean(rank < 5))
    return {'n': len(targets), **accuracies, 'loss': float(-np.mean(of_targets)),
            'most_confused': [f'{true} as {answer}: {count} of {sum(matrix[true].values())}'
                              for count, true, answer in wrong[:MOST_CONFUSED]],
            'classes': list(classes), 'confusion_matrix': matrix}


def regression_scores(values: Float[np.ndarray, 'examples values'], targets: Float[np.ndarray, 'examples values'],
                      names: Sequence[str]) -> dict[str, Any]:
    """Returns the errors of each target in the unit of the target, and the means of the errors over the targets.

    The scores are defined as in scikit-learn. R^2 is 1 - (mean squared error) / (variance of the target). A target with
    a variance of 0 has no R^2. If there are several targets, 'targets' has the scores of each target by name.
    """
    values, targets = values.astype(np.float64), targets.astype(np.float64)  # squares may exceed float32
    error, by_target = values - targets, {}
    squared = np.mean(error ** 2, axis=0)
    # Without the condition, rounding errors would be the variance of a target that is always 0.1.
    variance = np.where(np.ptp(targets, axis=0) > 0, np.var(targets, axis=0), 0)
    for index, name in enumerate(names):
        by_target[name] = {'root_mean_squared_error': float(squared[index] ** 0.5),
                           'mean_absolute_error': float(np.mean(np.abs(error[:, index])))}
        if variance[index]:
            by_target[name]['r_squared'] = float(1 - squared[index] / variance[index])
    scores: dict[str, Any] = {'n': len(targets)}
    for metric in ('root_mean_squared_error', 'mean_absolute_error', 'r_squared'):
        if measured := [errors[metric] for errors in by_target.values() if metric in errors]:
            scores[metric] = float(np.mean(measured))
    return scores | ({'targets': by_target} if len(names) > 1 else {})


def table_line(cells: Sequence[str]) -> str:
    """Returns a line of RUN/results/SPLIT.tsv: cells separated by tabs, with ESCAPES applied, and a line feed.

    Python represents the bytes of a file name that is not UTF-8 as surrogates, which UTF-8 cannot encode. They are
    escaped, too.
    """
    line = '\t'.join(cell.translate(ESCAPED) for cell in cells) + '\n'
    return line.encode(errors='backslashreplace').decode()


def read_table(path: str | Path) -> list[list[str]]:
    """Returns the rows of RUN/results/SPLIT.tsv, with unescaped cells. Only a line feed ends a line, not U+2028."""
    written = {escape: character for character, escape in ESCAPES.items()}

    def unescaped(match):
        return written.get(match[0]) or chr(int(match[0][2:], 16))

    return [[re.sub(r'\\([\\tnr]|ud[89a-f][0-9a-f]{2})', unescaped, cell)
             for cell in line.split('\t')] for line in Path(path).read_text('utf-8').split('\n')[:-1]]
