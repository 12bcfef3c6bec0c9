"""The logit lens: the predictions that a model would make after each of its layers.

The residual stream after a layer replaces the output of the last layer. So the model applies its final norm and its
output projection to this stream (nostalgebraist 2020, "interpreting GPT: the logit lens").
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from analysis.passes import at_targets, compiled, from_logits, teacher_forced, text_of
from inference.edits import matching
from inference.run import Run
from runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class LogitLens:
    """The predictions of a model after each of its layers, for one text.

    Attributes:
      places: the place of each row: the input of the first layer, and the output of each layer.
      target: the pieces that the model predicts.
      log_probs: the log-probability of each piece of the target after each layer.
      best: the most probable piece after each layer, for each token of the target.
    """
    places: list[str]
    target: list[str]
    log_probs: Float[np.ndarray, 'place target']
    best: list[list[str]]

    def __str__(self) -> str:
        """Returns a text table with a line for each piece of the target, and a column for each layer.

        A cell has the most probable piece after this layer, and the probability of the target piece.
        """
        titles = [place.rpartition('/')[2] for place in self.places]
        cells = [[f'{row[index]} {np.exp(self.log_probs[layer, index]):.2f}' for layer, row in enumerate(self.best)]
                 for index in range(len(self.target))]
        widths = [2 + max(map(len, column)) for column in zip(titles, *cells, strict=True)]
        first = max(map(len, self.target))
        return '\n'.join(''.join([f'{name:{first}}', *map(str.rjust, row, widths)])
                         for name, row in zip(['', *self.target], [titles, *cells], strict=True))


def logit_lens(run: Run, example: Any) -> LogitLens:
    """Returns the predictions of the decoder, or of a language model, after each layer.

    Args:
      run: a translator or a language model with a residual stream.
      example: a source (the run translates it), a tuple (source, target) or an output. For a language model: a text, a
        tuple (prompt, continuation) or an output.

    Raises:
      UserError: if the model has no residual stream, or does not write text.
    """
    text, listed = text_of(run, example), run.places()
    stack = 'decoder' if text.source else 'encoder'
    if f'{stack}/input' not in listed:
        raise UserError(f'{run.workdir}: the logit lens needs a residual stream, but this model has none. Use one run '
                        'with model.kind=transformer or language_model')
    places = [f'{stack}/input', *matching(f'{stack}/layers_*[0-9]', listed)]
    inputs, targets, _ = text.arrays(len(places))
    log_probs, best = (np.asarray(array)[:, text.first:len(text.written)] for array in compiled(
        _predictions, text.model.module, tuple(places))(text.model.params, inputs, targets))
    pieces = text.model.tokenizers['target'].pieces
    return LogitLens(places, text.target, log_probs, [pieces(row) for row in best])


def _predictions(module, places, params, inputs, targets):
    """Returns the log-probability of each target token, and the most probable token, after each layer."""
    streams = {}

    def edit_of(name):
        def edited(value, at):
            streams[name] = value
            # The rows of the batch are equal before the last layer. After it, row i has the stream at place i.
            return value if name != places[-1] else jnp.stack([streams[layer][row] for row, layer in enumerate(places)])
        return edited if name in places else None

    outputs, _ = teacher_forced(module, params, inputs, edit_of)
    return from_logits(lambda logits, targets: (at_targets(logits, targets), logits.argmax(axis=-1)), outputs, targets)
