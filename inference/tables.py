"""Converts outputs to lines of --format=jsonl or to a pandas table."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.outputs import Output
from inference.predictions import Prediction, Predictions
from inference.text import TextModel
from input_pipeline.input_format import InputFormat
from runtime.errors import UserError


def as_json(model: TextModel, answer: Output) -> dict[str, Any]:
    """Returns an answer as the JSON object that --format=jsonl writes."""
    source, target = model.tokenizers['source'], model.tokenizers['target']

    def described(hypothesis):
        return {'text': hypothesis.text, 'tokens': target.pieces(hypothesis.tokens), 'score': hypothesis.score,
                'log_prob': hypothesis.log_prob, 'ended': hypothesis.ended}

    return {'source': answer.source, 'source_tokens': source.pieces(answer.source_tokens),
            **described(answer.hypotheses[0]), 'n_best': [described(hypothesis) for hypothesis in answer.hypotheses]}


def to_pandas(outputs: Sequence[Output] | Sequence[Prediction]) -> Any:
    """Returns a DataFrame with a row for each hypothesis or for each prediction, in order.

    The columns for hypotheses are line and rank (counted from 1), source, text, tokens (the number of tokens without
    the end token), log_prob, score and ended. The columns for predictions are name, which is '' for inputs without
    names, and either label and probability_CLASS for each class, or value_NAME for each value. The values of a forecast
    have names such as x+1, the first predicted step of channel x.

    Raises:
      UserError: if pandas is not installed.
    """
    try:
        pandas = importlib.import_module('pandas')
    except ImportError:
        raise UserError('tables need pandas, which is not installed. Run pip install pandas') from None
    first: Any = outputs[0] if outputs else outputs  # without inputs, `Predictions` still has the names of the columns
    rows, columns = (_predicted(outputs, first.form) if isinstance(first, Prediction | Predictions) else
                     _texts(outputs))
    return pandas.DataFrame(rows, columns=columns)


def _texts(outputs: Sequence[Any]) -> tuple[list[tuple], list[str]]:
    rows = [(line, rank, output.source, hypothesis.text, len(hypothesis.tokens), hypothesis.log_prob, hypothesis.score,
             hypothesis.ended) for line, output in enumerate(outputs, 1)
            for rank, hypothesis in enumerate(output.hypotheses, 1)]
    return rows, ['line', 'rank', 'source', 'text', 'tokens', 'log_prob', 'score', 'ended']


def _predicted(predictions: Sequence[Any], form: InputFormat) -> tuple[list[tuple], list[str]]:
    if form.classes is None:
        return ([(prediction.name, *prediction.output.tolist()) for prediction in predictions],
                ['name', *(f'value_{name}' for name in form.targets)])
    return ([(prediction.name, prediction.label, *np.exp(prediction.output).tolist()) for prediction in predictions],
            ['name', 'label', *(f'probability_{name}' for name in form.classes)])
