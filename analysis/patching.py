"""Activation patching: finds the places and tokens that cause the difference between two sentences.

The model reads one sentence, and the value at one place and one position is replaced by the value for another sentence
(Meng et al. 2022, arXiv:2202.05262, section 2). The other sentence is `clean`, which is the clean run of the paper.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from inference.edits import Edit, matching
from inference.run import Run
from model.places import EDITS
from runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class PatchingMap:
    """The effect of each patch.

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


def patching_map(run: Run, clean: str, corrupt: str, target: str,
                 places: str | Sequence[str] = 'encoder/layers_*[0-9]') -> PatchingMap:
    """Returns the log-probabilities of `target` given `corrupt` when one value at a time is taken from `clean`.

    Args:
      run: a translator.
      clean: a sentence.
      corrupt: a sentence with the same number of tokens as `clean`.
      target: a translation, such as the translation of `clean`.
      places: names or patterns of places with the axis 'position'.

    Raises:
      UserError: if there is no such place, or the sentences differ in their numbers of tokens.
    """
    listed = run.places()
    names = [name for pattern in ([places] if isinstance(places, str) else places)
             for name in matching(pattern, listed) if 'position' in listed[name]]
    values, others = run.inspect([(clean, target), (corrupt, target)], names)
    rows, pieces = [], []
    for name in names:
        new, old = values[name].values, others[name].values
        if new.shape != old.shape:
            raise UserError(f'{name}: the sentences have {len(new)} and {len(old)} tokens. Use sentences with the same '
                            'number of tokens')
        pieces = others[name].labels['position']
        edited, row = run.edited([Edit('replace', name, old)]), []
        for position in range(len(old)):
            patched = old.copy()
            patched[position] = new[position]
            # New numbers need no new compilation.
            edited.model.params = {**edited.model.params, EDITS: [{name: patched}]}
            row.append(edited.forced([(corrupt, target)])[0].hypotheses[0].log_prob)
        rows.append(row)
    if len({len(row) for row in rows}) > 1:
        raise UserError('places of the encoder and of the decoder have different tokens. Make one map for each')
    whole = [output.hypotheses[0].log_prob for output in run.forced([(clean, target), (corrupt, target)])]
    return PatchingMap(names, pieces, np.array(rows), *whole)
