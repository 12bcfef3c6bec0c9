"""The options of a search."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs.options import BEAM_METHODS, METHODS, SEARCH_NUMBERS
from inference.constraints import checked_phrases
from runtime.errors import UserError, did_you_mean

# {option: the methods that use it}. Every method uses the remaining options.
ONLY_FOR: Mapping[str, Sequence[str]] = {'beam': BEAM_METHODS, 'patience': BEAM_METHODS, 'temperature': ['sample'],
                                         'top_k': ['sample'], 'top_p': ['sample'], 'seed': ['sample']}
HINTS = {'temperature': '; for the most probable token, use method=greedy', 'top_k': '; 0 keeps every token'}


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """The options of a search. configs/options.py explains the options that are also in config.decode.

    Attributes:
      n_best: the number of hypotheses to return; for method='sample', the number of independent samples.
      seed: the seed of the random samples.
      avoid: words or phrases that outputs must not contain (inference/constraints.py).

    Raises:
      UserError: if a value is not allowed.
    """
    method: str = 'beam'
    beam: int = 4
    alpha: float = 0.6
    patience: float = 0.0
    n_best: int = 1
    extra_length: int = 50
    batch_size: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    avoid: Sequence[Any] = ()  # texts

    def __post_init__(self):
        def require(holds, message):
            if not holds:
                raise UserError(message)

        require(self.method in METHODS.choices, f'method={self.method!r} must be one of {", ".join(METHODS.choices)}')
        for name, bounds in SEARCH_NUMBERS.items():
            value, whole = getattr(self, name), isinstance(getattr(SearchOptions, name), int)
            require(isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool),
                    f'{name}={value!r} must be {"a whole number" if whole else "a number"}')
            problem = bounds.problem(getattr(self, name))
            require(not problem, f'{name}={value} {problem}{HINTS.get(name, "")}')
            if whole:  # NumPy's whole numbers have no bit_length
                object.__setattr__(self, name, int(getattr(self, name)))
        require(self.method not in BEAM_METHODS or self.n_best <= self.beam,
                f'n_best={self.n_best} must be at most beam={self.beam}. Increase beam')
        require(self.method != 'greedy' or self.n_best == 1,
                'greedy search has one result. Use n_best=1 or method=beam')
        object.__setattr__(self, 'avoid', checked_phrases(self.avoid))  # a tuple, which can be hashed


BEAM_SEARCH = SearchOptions()
SAMPLING = SearchOptions(method='sample')


def search_options(config: ConfigDict, **changes) -> SearchOptions:
    """Returns `config.decode` as `SearchOptions`. Values of `changes` that are not None override `config.decode`.

    Raises:
      UserError: if there is no such option, a value is not allowed, or the method does not use an option of `changes`.
    """
    names = [field.name for field in dataclasses.fields(SearchOptions)]
    if unknown := [name for name in changes if name not in names]:
        raise UserError(f'there is no search option {unknown[0]!r}'
                        f'{did_you_mean(unknown[0], names) or ". Use " + ", ".join(names)}')
    changed = {name: value for name, value in changes.items() if value is not None}
    options = SearchOptions(**(dict(config.decode) | changed))
    for name, value in changed.items():
        methods = ONLY_FOR.get(name, (options.method,))
        if options.method not in methods:
            raise UserError(f'{name}={value} has no effect with method={options.method}. Use method={methods[0]}, or '
                            f'remove {name}')
    return options
