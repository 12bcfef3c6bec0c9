"""Every task once: the names of its parts, the models that it trains, the measures that it is judged by.

A name is looked up where the part lives: data in `input_pipeline/data.py` (DATA), objectives in `training/objective.py`
(OBJECTIVES), answerers in `inference/run.py` (ANSWERERS), models in `model/build.py` (MODELS). An option says which of
these parts uses it (`configs/options.py`), so a task has the options of its parts. A task that recombines parts is one
entry here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Every measure of an evaluation or a score, in the order of tables, and which of two values is better.
METRICS: Mapping[str, Callable[..., Any]] = {
    'bleu': max, 'chrf': max, 'exact_match': max, 'accuracy': max, 'perplexity': min, 'loss': min,
    'bits_per_character': min, 'r_squared': max, 'mean_absolute_error': min, 'root_mean_squared_error': min,
    'absolute_error': min,
}
SUBWORDS = ('bpe', 'unigram')
TOKENIZERS = (*SUBWORDS, 'char', 'byte')
BUILTIN_ARRAYS = ('digits', 'dynamics', 'pendulum')


class Task(NamedTuple):
    """What a model can be trained to do.

    Attributes:
      meaning: in a few words.
      data: what it is trained on: 'pairs' of sentences, 'documents', or examples with 'classes' or 'values'.
      objective: what training minimises: 'cross_entropy' or 'squared_error'.
      answerer: what turns a trained model's numbers into answers: 'translator', 'generator' or 'predictor'.
      models: the kinds of model that can be trained for it.
      metrics: of an evaluation; config.eval.metric is one of them.
      tokenizers: the kinds of tokenizer that it can use.
      builtin: what config.data.name may be for data.source=builtin; () if that has no names.
      longest: the option that says how long a sequence is at most; '' if the data does.
    """
    meaning: str
    data: str
    objective: str
    answerer: str
    models: tuple[str, ...]
    metrics: tuple[str, ...]
    tokenizers: tuple[str, ...] = TOKENIZERS
    builtin: tuple[str, ...] = ()
    longest: str = ''


TASKS: Mapping[str, Task] = {
    'translation': Task(
        'sentences of one language into another', data='pairs', objective='cross_entropy', answerer='translator',
        models=('transformer', 'rnnsearch'), metrics=('bleu', 'exact_match', 'loss', 'perplexity', 'accuracy'),
        tokenizers=SUBWORDS, longest='data.max_length'),
    'language_model': Task(
        'text, each token from those before it', data='documents', objective='cross_entropy', answerer='generator',
        models=('language_model',), metrics=('loss', 'perplexity', 'accuracy', 'bits_per_character'),
        longest='data.context'),
    'classification': Task(
        'images or time series into classes', data='classes', objective='cross_entropy', answerer='predictor',
        models=('patches',), metrics=('accuracy', 'loss', 'perplexity'), builtin=BUILTIN_ARRAYS),
    'regression': Task(
        'values from images or time series', data='values', objective='squared_error', answerer='predictor',
        models=('patches',), metrics=('loss', 'absolute_error'), builtin=BUILTIN_ARRAYS),
}


def goodness(metric: str, value: float) -> float:
    """A number that is larger for the better of two values of a metric; that of no number (NaN) is smallest."""
    if value != value:
        return float('-inf')
    return value if METRICS[metric] is max else -value
