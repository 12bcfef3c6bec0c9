"""Scores of translations by the length of a sentence or the frequency of its rarest word, for one or several runs.

    for bucket in buckets(['runs/a', 'runs/b'], by='length')['runs/a']: ...

Buckets have about the same number of sentences. Every score has the 95 % interval of 1,000 bootstrap resamples.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Num

from analysis.request import BY
from inference.scores import SAMPLES, interval, read_table, result_tables, translation_metrics
from input_pipeline.data import open_data
from run_directory.records import read_config
from runtime.errors import UserError, nearest
from runtime.files import expanded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNT = 5  # default number of buckets
# {key in BY: its unit, as the label of an axis}
UNITS = {'length': 'words of the source', 'target_length': 'words of the reference',
         'frequency': 'occurrences of the rarest source word in the training data'}

Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The scores of the sentences whose key is within a range.

    Attributes:
      low: the least key.
      high: the greatest key.
      n: the number of sentences.
      scores: {name: [score, low, high]}, where low and high are the ends of the 95 % interval of the score. The names
        are 'bleu', 'chrf', 'exact_match' (from 0 to 1) and sometimes 'log_prob', the mean log-probability of a
        reference.
    """
    low: int
    high: int
    n: int
    scores: dict[str, list[float]]


def keys_of(pairs: Sequence[Pair], by: str, train: Callable[[], Sequence[Pair]]) -> list[int]:
    """Returns the key of each pair (source, reference): the length or frequency that determines the bucket of the pair.

    Words are separated by white space. With by='length', the key is the number of words of the source. With
    by='target_length', it is the number of words of the reference. With by='frequency', it is the frequency of the
    rarest source word in the sources of the training pairs. The function `train` returns the training pairs.

    Raises:
      UserError: if `by` is not one of BY.
    """
    _check_key(by)
    if by != 'frequency':
        return [len(pair[BY.index(by)].split()) for pair in pairs]
    counts = collections.Counter(word for source, _ in train() for word in source.split())
    return [min((counts[word] for word in source.split()), default=0) for source, _ in pairs]


def bucket_scores(keys: Sequence[int], outputs: Sequence[str], references: Sequence[str],
                  language: str, log_probs: Sequence[float] | None = None, count: int = COUNT) -> list[Bucket]:
    """Divides sentences into at most `count` buckets by ascending keys, and returns the scores in each bucket.

    Sentences with equal keys are in the same bucket. `language` is the language of the references.
    """
    order = sorted(keys)
    ends = sorted({order[-(-len(order) * bucket // count) - 1] for bucket in range(1, count + 1)})
    rows_of = [[row for row, key in enumerate(keys) if low < key <= high]
               for low, high in zip([min(keys) - 1, *ends], ends, strict=False)]
    return [Bucket(min(keys[row] for row in rows), max(keys[row] for row in rows), len(rows),
                   _scores([outputs[row] for row in rows], [references[row] for row in rows], language,
                           None if log_probs is None else [log_probs[row] for row in rows])) for rows in rows_of]


def buckets(workdirs: Sequence[str | Path], split: str = 'test', by: str = 'length',
            count: int = COUNT) -> dict[str, list[Bucket]]:
    """Returns the scores of several runs for groups of sentences, such as groups by length.

    Reads the translations that `decode.py --split` has written. All runs must have the same sentences. The config of
    the first run has the language of the translations, and its training data has the word frequencies.

    Raises:
      UserError: if the list is empty, a run has no translations of this split, or its sentences differ from the
        sentences of the first run. Also if `count` is below 1.
    """
    if isinstance(workdirs, str | Path):
        workdirs = [workdirs]
    if not workdirs:
        raise UserError('the list of run directories is empty. Use at least one run directory')
    if count < 1:
        raise UserError(f'count={count} must be at least 1')
    tables = {str(workdir): _translations(workdir, split) for workdir in workdirs}
    first = next(iter(tables.values()))
    pairs: list[Any] = [tuple(row[:2]) for row in first]
    for workdir, table in tables.items():
        if [tuple(row[:2]) for row in table] != pairs:
            raise UserError(f'{workdir}: results/{split}.tsv has sentences that differ from the sentences of '
                            f'{workdirs[0]}. Score both runs on the same split')

    config = read_config(expanded(workdirs[0]))

    def train():
        data: Any = open_data(config, expanded(workdirs[0]))
        return data.pairs('train')

    keys = keys_of(pairs, by, train)
    return {workdir: bucket_scores(keys, [row[2] for row in table], [row[1] for row in table],
                                   config.data.target_lang, count=count)
            for workdir, table in tables.items()}


def as_table(scored: Mapping[str, Sequence[Bucket]], metric: str = 'bleu') -> str:
    """Returns a text table with a line for each bucket and a column for each run."""
    width = max(22, *map(len, scored))
    lines = [' ' * 12 + '     n' + ''.join(f'  {name:>{width}}' for name in scored)]
    for row in zip(*scored.values(), strict=True):
        cells = ['{:.2f} [{:.2f}, {:.2f}]'.format(*_score(bucket, metric)) for bucket in row]
        label = f'{row[0].low}-{row[0].high}'
        lines.append(f'{label:12}{row[0].n:6}' + ''.join(f'  {cell:>{width}}' for cell in cells))
    return '\n'.join(lines)


def buckets_figure(scored: Mapping[str, Sequence[Bucket]], metric: str = 'bleu', *, by: str) -> 'Figure':
    """Returns a plot of a metric over the buckets, with a line for each run. Bars are the 95 % intervals.

    `by` is the key of the buckets, as in `buckets`.
    """
    from matplotlib.figure import Figure
    _check_key(by)
    figure = Figure(figsize=(6, 4), layout='constrained')
    axes = figure.add_subplot()
    for index, (name, row) in enumerate(scored.items()):
        values = np.array([_score(bucket, metric) for bucket in row])
        places = np.arange(len(row)) + 0.08 * (index - (len(scored) - 1) / 2)
        # The score of all sentences may be outside the interval of the resamples.
        axes.errorbar(places, values[:, 0], np.maximum(0, [values[:, 0] - values[:, 1], values[:, 2] - values[:, 0]]),
                      marker='o', capsize=3, label=name)
    first = next(iter(scored.values()))
    axes.set_xticks(range(len(first)), [f'{bucket.low}-{bucket.high}\nn={bucket.n}' for bucket in first])
    axes.set(xlabel=UNITS[by], ylabel=metric)
    axes.legend()
    return figure


def _check_key(by: str) -> None:
    if by not in BY:
        raise UserError(f'by={by!r} must be one of {", ".join(BY)}')


def _score(bucket: Bucket, metric: str) -> list[float]:
    if metric not in bucket.scores:
        raise UserError(f'there is no score {metric!r}. {nearest(metric, list(bucket.scores))}')
    return bucket.scores[metric]


def _scores(outputs, references, language, log_probs):
    metrics = translation_metrics(language)
    # All resamples of a bucket with one sentence are equal, so its interval has the length 0.
    scores = {name: [metrics[name].corpus_score(outputs, [references]).score,
                     *interval(metrics[name], outputs, references)] for name in ('bleu', 'chrf')}
    scores['exact_match'] = _mean(np.array(list(map(str.__eq__, outputs, references))))
    return scores if log_probs is None else scores | {'log_prob': _mean(np.array(log_probs))}


def _mean(values: Num[np.ndarray, ' n'] | np.ndarray) -> list[float]:
    """Returns the mean of `values`, and the ends of its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).integers(len(values), size=(SAMPLES, len(values)))
    return [float(values.mean()), *np.percentile(values[draws].mean(axis=1), [2.5, 97.5]).tolist()]


def _translations(workdir: str | Path, split: str) -> list[list[str]]:
    path = expanded(workdir) / 'results' / f'{split}.tsv'
    try:
        rows = read_table(path)
    except OSError as error:
        scored = [f'split={table.stem!r}' for table in result_tables(workdir)]
        advice = (f'Use {" or ".join(scored)}, or score another split first' if scored else
                  f'Score the run first: python decode.py --workdir={workdir} --split={split}')
        raise UserError(f'{path}: {error.strerror}. {advice}') from None
    if {len(row) for row in rows} != {3}:
        raise UserError(f'{path}: the file has no translations. Use runs of task=translation')
    return rows
