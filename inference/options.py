"""How to decode: the options of a search."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from configs.options import METHODS, SEARCH_NUMBERS
from inference.constraints import checked_phrases
from runtime.errors import UserError

HINTS = {'temperature': '; method=greedy takes the best', 'top_k': '; 0 keeps every token'}


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """How to decode.

    Attributes:
      method: 'beam', 'greedy' or 'sample'.
      beam: hypotheses that live at a time.
      alpha: of the length penalty ((5 + |Y|) / 6)^alpha.
      n_best: hypotheses to return; for 'sample', independent draws.
      extra_length: a translation has at most this many tokens more than its source, both without their end tokens; a
        continuation has at most this many tokens.
      batch_size: sentences at a time.
      temperature: what logits are divided by before a draw.
      top_k: a draw is from so many of the most probable tokens; 0: from all.
      top_p: a draw is from the smallest set of tokens whose probability reaches this; 1: from all.
      seed: of the draws.
      avoid: words or phrases that must not come (inference/constraints.py).

    Raises:
      UserError: if a value is impossible.
    """
    method: str = 'beam'
    beam: int = 4
    alpha: float = 0.6
    n_best: int = 1
    extra_length: int = 50
    batch_size: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    avoid: Sequence[Any] = ()  # texts

    def __post_init__(self):
        def require(holds, message):
            if not holds:
                raise UserError(message)

        require(self.method in METHODS.choices, f'method={self.method!r} is not beam, greedy or sample')
        for name, bounds in SEARCH_NUMBERS.items():
            value, whole = getattr(self, name), isinstance(getattr(SearchOptions, name), int)
            require(isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool),
                    f'{name}={value!r} must be {"a whole number" if whole else "a number"}')
            wanted = bounds.problem(getattr(self, name))
            require(not wanted, f'{name}={value} {wanted}{HINTS.get(name, "")}')
        require(self.method != 'beam' or self.n_best <= self.beam,
                f'n_best={self.n_best} is more than beam={self.beam} can hold: raise beam')
        require(self.method != 'greedy' or self.n_best == 1,
                'greedy search has one result: use n_best=1 or method=beam')
        object.__setattr__(self, 'avoid', checked_phrases(self.avoid))  # whatever sequence it was


BEAM_SEARCH = SearchOptions()
SAMPLING = SearchOptions(method='sample')


def search_options(config: ConfigDict, **changes) -> SearchOptions:
    """`config.decode` as options; those of `changes` that are not None take the place of the config's."""
    changed = {name: value for name, value in changes.items() if value is not None}
    return SearchOptions(**(dict(config.decode) | changed))
