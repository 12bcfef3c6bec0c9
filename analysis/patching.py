"""Activation patching: finds the places and tokens that cause the difference between two sentences.

The model reads the sentence `corrupt`. The value at one place and one position is replaced by the value for the
sentence `clean`. Meng et al. 2022 (arXiv:2202.05262, section 2) call the two forward passes the corrupted run and the
clean run. analysis/paths.py replaces a value only for some of the places that read the value.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from analysis.passes import (
    Effects,
    Node,
    Text,
    as_output,
    at_targets,
    check_comparable,
    compiled,
    from_logits,
    most_rows,
    teacher_forced,
    text_of,
)
from inference.edits import matching
from inference.outputs import Output
from inference.run import Run
from model.places import PAIRS, At
from runtime.errors import UserError


class EstimateError(NamedTuple):
    """The difference between estimated and measured effects of patches.

    Attributes:
      mean: the mean absolute difference of the effects.
      most: the largest absolute difference.
      correlation: Pearson's correlation of the effects.
    """
    mean: float
    most: float
    correlation: float


def patching_map(run: Run, clean: str, corrupt: str, target: str,
                 places: str | Sequence[str] = 'encoder/layers_*[0-9]') -> Effects:
    """Returns the effects of patches on the log-probability of `target`, when the model reads `corrupt`.

    Each patch replaces the value at one place and one token by the value for the sentence `clean`. A forward pass
    computes a row of the map. For long sentences, it computes only a part of the row: row i of the batch has the clean
    value at position i of this part.

    Args:
      run: a translator or a language model.
      clean: a sentence; for a language model, a prompt.
      corrupt: a sentence with the same number of tokens as `clean`.
      target: a translation, such as the translation of `clean`; for a language model, a continuation.
      places: names or patterns of places with the axis 'position'.

    Raises:
      UserError: if there is no such place, the sentences differ in the number of tokens, or the tokens of the
        target differ.
    """
    comparison = _Comparison(run, clean, corrupt, target, places)
    text, names, count = comparison.texts[1], list(comparison.values), len(comparison.pieces)
    length = max(map(len, text.inputs.values()))  # the same length for places of the encoder and of the decoder
    rows = min(length, most_rows(text.width))
    inputs, targets, weights = text.arrays(rows)
    new = {name: np.pad(value, [(0, length - len(value)), *[(0, 0)] * (value.ndim - 1)])
           for name, (value, _) in comparison.values.items()}
    patched = compiled(_patched, text.model.module, tuple(names))
    return comparison.effects([np.concatenate([
        np.asarray(patched(text.model.params, inputs, targets, weights, new, number, first))
        for first in range(0, count, rows)])[:count] for number in range(len(names))])


def _patched(module, names, params, inputs, targets, weights, new, number, first):
    """Returns the log-probability of the target when row i has the value `new` at position first + i.

    The value is replaced at the place `names[number]`.
    """
    def edit_of(name):
        def edited(value, at):
            patched = first + jnp.arange(len(value))
            here = (at.positions == patched[:, None]) & (number == names.index(name))
            clean = new[name][jnp.minimum(at.positions[0], len(new[name]) - 1)]
            return jnp.where(here.reshape(*here.shape, *[1] * (value.ndim - 2)), clean, value)
        return edited if name in names else None
    outputs, _ = teacher_forced(module, params, inputs, edit_of)
    return (from_logits(at_targets, outputs, targets) * weights).sum(axis=1)


def attribution_map(run: Run, clean: str, corrupt: str, target: str,
                    places: str | Sequence[str] = 'encoder/layers_*[0-9]') -> Effects:
    """Estimates `patching_map` in two passes: a pass over `clean`, and a pass over `corrupt` with its gradient.

    The estimate of a patch is the linear effect of the change, the sum of gradient * (clean value - corrupt value)
    (Nanda 2023, "Attribution patching"; Syed et al. 2023, arXiv:2310.10348). The estimate is exact if the
    log-probability is linear in the value. `estimate_error` computes the error of the estimates. `patching_map`
    explains the arguments.
    """
    comparison = _Comparison(run, clean, corrupt, target, places)
    gradients = place_gradients(comparison.texts[1], list(comparison.values))
    return comparison.effects([
        comparison.log_probs[1] + (gradients[name][:len(old)] * (new - old)).reshape(len(old), -1).sum(axis=-1)
        for name, (new, old) in comparison.values.items()])


def estimate_error(estimated: Effects, measured: Effects) -> EstimateError:
    """Returns the error of `estimated`, a result of `attribution_map`. `measured` is the result of `patching_map`.

    Raises:
      UserError: if the two results have different shapes.
    """
    if estimated.log_probs.shape != measured.log_probs.shape:
        raise UserError(f'the two maps have {estimated.log_probs.shape} and {measured.log_probs.shape} patches. Use '
                        'the same sentences and places for both maps')
    difference = np.abs(estimated.effects - measured.effects)
    correlation = np.corrcoef(estimated.effects.ravel(), measured.effects.ravel())[0, 1]
    return EstimateError(float(difference.mean()), float(difference.max()), float(correlation))


def place_gradients(text: Text, names: Sequence[str]) -> dict[str, Float[np.ndarray, '...']]:
    """Returns the gradient of the log-probability of the target with respect to the value at each place."""
    gradients = compiled(_gradients, text.model.module, tuple(names))(text.model.params, *text.arrays())
    return {name: np.asarray(gradient) for name, gradient in gradients.items()}


def _gradients(module, names, params, inputs, targets, weights):
    def log_prob(shifts):
        def edit_of(name):
            return shifted(shifts[name]) if name in shifts else None
        outputs, values = teacher_forced(module, params, inputs, edit_of, names.__contains__)
        return (from_logits(at_targets, outputs, targets) * weights).sum(), values

    shapes = jax.eval_shape(lambda: log_prob({})[1])
    return jax.grad(log_prob, has_aux=True)({name: jnp.zeros(shape.shape[1:]) for name, shape in shapes.items()})[0]


def shifted(shift: Float[Array, '...']):
    """Returns an edit that adds `shift` to a value. `shift` has the shape of the value for one text."""
    def edited(value: Array, at: At) -> Array:
        if at.axes == PAIRS:
            return value + shift[:, at.positions[0]]
        return value + (shift[at.positions[0]] if 'position' in at.axes else shift)
    return edited


class _Comparison:
    """The values at some places of a model, for a clean and a corrupt sentence.

    Attributes:
      texts: the clean and the corrupt sentence, each with the target.
      values: {place: (value of the clean sentence, value of the corrupt sentence)}.
      pieces: the pieces of text along the axis 'position' of the corrupt sentence.
      log_probs: the log-probabilities of the target for the two sentences.
    """

    def __init__(self, run: Run, clean: str, corrupt: str, target: str, places: str | Sequence[str]):
        listed = run.places()
        names: list[str] = []
        for pattern in [places] if isinstance(places, str) else places:
            positioned = [name for name in matching(pattern, listed) if 'position' in listed[name]]
            if not positioned:
                raise UserError(f'place {pattern!r}: a patching map needs places with the axis "position". Use places '
                                'such as encoder/layers_0')
            names += positioned
        if not names:
            raise UserError(f'places={places}: the list is empty. Name at least one place')
        outputs: list[Output] = [as_output(run, (sentence, target)) for sentence in (clean, corrupt)]
        self.texts = text_of(run, outputs[0]), text_of(run, outputs[1])
        check_comparable(*self.texts, (clean, corrupt))
        both = run.inspect(outputs, names)
        self.values = {name: tuple(np.asarray(values[name].values) for values in both) for name in names}
        labels = [both[1][name].labels['position'] for name in names]
        if any(row != labels[0] for row in labels):
            raise UserError(f'places={places}: the places of the encoder and the places of the decoder belong to '
                            'different texts. Make one map for the encoder and one map for the decoder')
        self.pieces = labels[0]
        self.log_probs = [text.log_prob() for text in self.texts]

    def effects(self, rows: Sequence[Sequence[float] | Float[np.ndarray, ' position']]) -> Effects:
        """Returns the effects of patches. `rows` has a row of log-probabilities after the patches for each place."""
        return Effects([Node(name) for name in self.values], self.pieces, np.array(rows), *self.log_probs)
