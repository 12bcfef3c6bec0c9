"""Converts outputs to lines of --format=jsonl or to a pandas table."""

import importlib
from collections.abc import Sequence
from typing import Any

from inference.outputs import Output
from inference.text import TextModel
from runtime.errors import UserError


def as_json(model: TextModel, answer: Output) -> dict[str, Any]:
    """Returns an answer as the JSON object that --format=jsonl writes."""
    source, target = model.tokenizers['source'], model.tokenizers['target']

    def described(hypothesis):
        return {'text': hypothesis.text, 'tokens': target.pieces(hypothesis.tokens), 'score': hypothesis.score,
                'log_prob': hypothesis.log_prob, 'ended': hypothesis.ended}

    return {'source': answer.source, 'source_tokens': source.pieces(answer.source_tokens),
            **described(answer.hypotheses[0]), 'n_best': [described(hypothesis) for hypothesis in answer.hypotheses]}


def to_pandas(outputs: Sequence[Output]) -> Any:
    """Returns a DataFrame with a row for each hypothesis, in order.

    The columns are line and rank (counted from 1), source, text, tokens (the number of tokens without the end token),
    log_prob, score and ended.

    Raises:
      UserError: if pandas is not installed.
    """
    try:
        pandas = importlib.import_module('pandas')
    except ImportError:
        raise UserError('tables need pandas, which is not installed. Run pip install pandas') from None
    rows = [(line, rank, output.source, hypothesis.text, len(hypothesis.tokens), hypothesis.log_prob, hypothesis.score,
             hypothesis.ended) for line, output in enumerate(outputs, 1)
            for rank, hypothesis in enumerate(output.hypotheses, 1)]
    return pandas.DataFrame(rows, columns=['line', 'rank', 'source', 'text', 'tokens', 'log_prob', 'score', 'ended'])
