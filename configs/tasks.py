"""The table of tasks. An entry has the names of the parts of a task, its kinds of model, and its metrics.

The parts are defined in other modules: data in `input_pipeline/data.py` (DATA), objectives in `training/objective.py`
(OBJECTIVES), answerers in `inference/run.py` (ANSWERERS), models in `model/build.py` (MODELS). For each option,
`configs/options.py` lists the parts that use the option. A task has the options that its parts use. A new combination
of existing parts needs only one entry in this table.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The metrics of search outputs. All other metrics use given targets. max: larger is better; min: smaller is better.
SEARCHED: Mapping[str, Callable[..., Any]] = {
    'bleu': max, 'bleu_lowercased_tokenised': max, 'bleu_lowercased_moses': max, 'chrf': max, 'chrf++': max, 'ter': min,
    'exact_match': max,
}
# Every metric of an evaluation or a score, in the order of the tables.
METRICS: Mapping[str, Callable[..., Any]] = {
    **SEARCHED, 'accuracy': max, 'balanced_accuracy': max, 'top_5_accuracy': max, 'perplexity': min, 'loss': min,
    'bits_per_character': min, 'bits_per_byte': min, 'r_squared': max, 'mean_absolute_error': min,
    'root_mean_squared_error': min, 'mean_absolute_scaled_error': min, 'absolute_error': min,
}
SUBWORDS = ('bpe', 'unigram')
TOKENIZERS = (*SUBWORDS, 'char', 'byte')  # kinds of tokenizer that a user can choose
IMPORTED = ('sentencepiece', 'tokenizers')  # kinds that come with an imported model


class Task(NamedTuple):
    """A task that a model can be trained for.

    Attributes:
      meaning: a description in a few words.
      data: the kind of training data: 'pairs' of sentences, 'documents', examples with 'classes' or 'values', or
        'series' to forecast.
      objective: the objective that training minimises: 'cross_entropy' or 'squared_error'.
      answerer: the kind of object that computes the answers of a trained model: 'translator', 'generator',
        'predictor' or 'forecaster'.
      models: the kinds of model that can be trained for the task.
      metrics: the metrics of an evaluation; config.eval.metric selects one metric.
      scores: further metrics, which only decode.py measures.
      builtin: the allowed values of config.data.name for data.source=builtin; () if the built-in data has no names.
      longest: the option that limits the length of a sequence; '' if all sequences have the length of the data.
    """
    meaning: str
    data: str
    objective: str
    answerer: str
    models: tuple[str, ...]
    metrics: tuple[str, ...]
    scores: tuple[str, ...] = ()
    builtin: tuple[str, ...] = ()
    longest: str = ''

    @property
    def unit(self) -> str:
        """The targets that the speed of a training counts: 'tokens', 'examples', or 'windows' of series."""
        return {'classes': 'examples', 'values': 'examples', 'series': 'windows'}.get(self.data, 'tokens')


TASKS: Mapping[str, Task] = {
    'translation': Task(
        'translates sentences of one language into another', data='pairs', objective='cross_entropy',
        answerer='translator', models=('transformer', 'rnnsearch'),
        metrics=('bleu', 'bleu_lowercased_tokenised', 'chrf', 'exact_match', 'loss', 'perplexity', 'accuracy'),
        scores=('bleu_lowercased_moses', 'chrf++', 'ter'), longest='data.max_length'),
    'language_model': Task(
        'predicts each token of a text from the previous tokens', data='documents', objective='cross_entropy',
        answerer='generator', models=('language_model',),
        metrics=('loss', 'perplexity', 'accuracy', 'bits_per_character'), scores=('bits_per_byte',),
        longest='data.context'),
    'classification': Task(
        'assigns images or time series to classes', data='classes', objective='cross_entropy', answerer='predictor',
        models=('patches',), metrics=('accuracy', 'loss', 'perplexity'),
        scores=('balanced_accuracy', 'top_5_accuracy'), builtin=('digits', 'dynamics')),
    'regression': Task(
        'predicts values from images or time series', data='values', objective='squared_error', answerer='predictor',
        models=('patches',), metrics=('loss', 'absolute_error'),
        scores=('r_squared', 'mean_absolute_error', 'root_mean_squared_error'), builtin=('pendulum',)),
    'forecasting': Task(
        'predicts the next steps of time series', data='series', objective='squared_error', answerer='forecaster',
        models=('forecaster',), metrics=('mean_absolute_scaled_error', 'loss', 'absolute_error'),
        scores=('mean_absolute_error', 'root_mean_squared_error'), builtin=('co2',)),
}


def goodness(metric: str, value: float) -> float:
    """Converts a value of `metric` to a number that is larger for better values. Returns -inf for NaN."""
    if value != value:
        return float('-inf')
    return value if METRICS[metric] is max else -value
