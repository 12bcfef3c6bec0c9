"""Activation patching: finds the places and tokens that cause the difference between two sentences.

The model reads the sentence `corrupt`. The value at one place and one position is replaced by the value for the
sentence `clean`. These are the corrupted run and the clean run of Meng et al. 2022 (arXiv:2202.05262, section 2).
analysis/paths.py replaces a value only for some of the places that read the value.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from analysis.passes import Text, as_output, check_same_lengths, text_of
from inference.edits import Edit, matching
from inference.run import Run
from inference.text import Output
from model.places import EDITS, PAIRS, At, observing
from runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class PatchingMap:
    """The effect of each patch, as a map of places and token positions.

    Attributes:
      places: the place of each row.
      pieces: the piece of text of each column, in the sentence that is patched.
      log_probs: the log-probability of the target after each patch.
      clean: the log-probability of the target for the clean sentence.
      corrupt: the log-probability of the target for the sentence that is patched, without any patch.
    """
    places: list[str]
    pieces: list[str]
    log_probs: Float[np.ndarray, 'place position']
    clean: float
    corrupt: float

    @property
    def effects(self) -> Float[np.ndarray, 'place position']:
        """The effect of each patch: 0 is no effect, 1 restores the log-probability for the clean sentence."""
        return (self.log_probs - self.corrupt) / (self.clean - self.corrupt)


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
                 places: str | Sequence[str] = 'encoder/layers_*[0-9]') -> PatchingMap:
    """Returns the log-probabilities of `target` given `corrupt` when one value at a time is taken from `clean`.

    Args:
      run: a translator or a language model.
      clean: a sentence; for a language model, a prompt.
      corrupt: a sentence with the same number of tokens as `clean`.
      target: a translation, such as the translation of `clean`; for a language model, a continuation.
      places: names or patterns of places with the axis 'position'.

    Raises:
      UserError: if there is no such place, or the sentences differ in their numbers of tokens.
    """
    found = _Comparison(run, clean, corrupt, target, places)
    rows = []
    for name, (new, old) in found.values.items():
        edited, row = run.edited([Edit('replace', name, old)]), []
        text = dataclasses.replace(found.texts[1], model=edited.model)
        for position in range(len(old)):
            patched = old.copy()
            patched[position] = new[position]
            # New numbers need no new compilation.
            edited.model.params = {**edited.model.params, EDITS: [
                {**numbers, name: patched} if name in numbers else numbers for numbers in edited.model.params[EDITS]]}
            row.append(text.log_prob())
        rows.append(row)
    return found.map(rows)


def attribution_map(run: Run, clean: str, corrupt: str, target: str,
                    places: str | Sequence[str] = 'encoder/layers_*[0-9]') -> PatchingMap:
    """Estimates `patching_map` in two passes: a pass over `clean`, and a pass over `corrupt` with its gradient.

    The estimate of a patch is the linear effect of the change, the sum of gradient * (clean value - corrupt value)
    (Nanda 2023, "Attribution patching"; Syed et al. 2023, arXiv:2310.10348). It is exact if the log-probability is
    linear in the value. `estimate_error` returns its error. `patching_map` explains the arguments.
    """
    found = _Comparison(run, clean, corrupt, target, places)
    gradients = place_gradients(found.texts[1], list(found.values))
    return found.map([found.log_probs[1] + (gradients[name][:len(old)] * (new - old)).reshape(len(old), -1).sum(axis=-1)
                      for name, (new, old) in found.values.items()])


def estimate_error(estimated: PatchingMap, measured: PatchingMap) -> EstimateError:
    """Returns the error of `estimated`, a result of `attribution_map`. `measured` is the result of `patching_map`."""
    if estimated.log_probs.shape != measured.log_probs.shape:
        raise UserError(f'the maps have {estimated.log_probs.shape} and {measured.log_probs.shape} patches. Use the '
                        'same sentences and places for both maps')
    difference = np.abs(estimated.effects - measured.effects)
    correlation = np.corrcoef(estimated.effects.ravel(), measured.effects.ravel())[0, 1]
    return EstimateError(float(difference.mean()), float(difference.max()), float(correlation))


def place_gradients(text: Text, names: Sequence[str]) -> dict[str, Float[np.ndarray, '...']]:
    """Returns the gradient of the log-probability of the target with respect to the value at each place."""
    inputs, targets, weights = text.arrays()
    params, read = text.model.params, {*names}.__contains__

    def log_prob(shifts, params):
        def edit(name):
            return shifted(shifts[name]) if name in shifts else None
        log_probs, values = observing(text.model._teacher_forced, edit, read)(params, inputs, targets)
        return (log_probs * weights).sum(), values

    shapes = jax.eval_shape(lambda params: log_prob({}, params)[1], params)
    zeros = {name: jnp.zeros(shape.shape[1:]) for name, shape in shapes.items()}
    gradients, _ = jax.jit(jax.grad(log_prob, has_aux=True))(zeros, params)
    return {name: np.asarray(gradient) for name, gradient in gradients.items()}


def shifted(shift: Float[Array, '...']):
    """Returns an edit that adds `shift`, which has the shape of the value of one text."""
    def edited(value: Array, at: At) -> Array:
        if at.axes == PAIRS:
            return value + shift[:, at.positions[0]]
        return value + (shift[at.positions[0]] if 'position' in at.axes else shift)
    return edited


class _Comparison:
    """The values of two sentences at places.

    Attributes:
      texts: the clean and the corrupt sentence, each with the target.
      values: {place: (value of the clean sentence, value of the corrupt sentence)}.
      pieces: the pieces of text along the axis 'position' of the corrupt sentence.
      log_probs: the log-probabilities of the target for the two sentences.
    """

    def __init__(self, run: Run, clean: str, corrupt: str, target: str, places: str | Sequence[str]):
        listed = run.places()
        names = [name for pattern in ([places] if isinstance(places, str) else places)
                 for name in matching(pattern, listed) if 'position' in listed[name]]
        if not names:
            raise UserError(f'places={places}: a patching map needs places with the axis "position", such as '
                            'encoder/layers_0')
        self.texts = text_of(run, (clean, target)), text_of(run, (corrupt, target))
        check_same_lengths(*self.texts, (clean, corrupt))
        outputs: list[Output] = [as_output(run, (sentence, target)) for sentence in (clean, corrupt)]
        both = run.inspect(outputs, names)
        self.values = {name: tuple(np.asarray(values[name].values) for values in both) for name in names}
        labels = [both[1][name].labels['position'] for name in names]
        if any(row != labels[0] for row in labels):
            raise UserError(f'places={places}: the places of the encoder and of the decoder have different tokens. '
                            'Make one map for the encoder and one map for the decoder')
        self.pieces = labels[0]
        self.log_probs = [text.log_prob() for text in self.texts]

    def map(self, rows: Sequence[Sequence[float] | Float[np.ndarray, ' position']]) -> PatchingMap:
        """Returns a PatchingMap with the log-probabilities in `rows`, one row for each place."""
        return PatchingMap(list(self.values), self.pieces, np.array(rows), *self.log_probs)
