"""Sweeps: several runs of a recipe with different options. This module has the functions that build sweeps.

Each other file of this folder is one sweep. A sweep file has a function `get_sweep(config)`. Its argument is the config
of the recipe, which it must not change, and its result is a sweep. A sweep is a list with one dict of overrides for
each run, such as {'model.num_heads': 2, 'seed': 1}. Because sweeps are plain lists of dicts, `+` joins two sweeps, and
a list comprehension selects runs. The sweep [{}] is the recipe without overrides.

    from configs.sweeps import over, product, seeds

    def get_sweep(config):
        return product(over('model.num_heads', [1, 2, 4]), over('model.norm', ['post', 'pre']), seeds(3))
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runtime.errors import UserError

Overrides = dict[str, Any]  # {'model.num_heads': 2, ...}
Sweep = list[Overrides]

MOST_LETTERS = 160  # maximum length of a name. File systems allow 255 bytes, and names get suffixes


def files() -> list[Path]:
    """Returns the sweep files of this folder."""
    return sorted(Path(__file__).parent.glob('[!_]*.py'))


def over(option: str, values: Iterable[Any]) -> Sweep:
    """Returns a sweep with one run for each of the `values` of `option`."""
    return [{option: value} for value in values]


def seeds(count: int) -> Sweep:
    """Returns a sweep of `count` runs with the seeds 0, 1, ... Reports show the mean and the spread over the seeds."""
    return over('seed', range(count))


def product(*sweeps: Sweep) -> Sweep:
    """Returns a sweep with every combination of the runs of several sweeps. The last sweep varies fastest.

    Raises:
      UserError: if two of the sweeps set the same option.
    """
    return [_merged(parts) for parts in itertools.product(*sweeps)]


def zipped(*sweeps: Sweep) -> Sweep:
    """Returns a sweep whose n-th run combines the n-th runs of several sweeps. Use this for options that vary together.

    Raises:
      UserError: if the sweeps differ in length, or two of them set the same option.
    """
    if len({len(sweep) for sweep in sweeps}) > 1:
        raise UserError(f'zipped: the sweeps have {", ".join(str(len(sweep)) for sweep in sweeps)} runs, but they must '
                        'have the same number of runs. Add or remove values')
    return [_merged(parts) for parts in zip(*sweeps, strict=True)]


def run_names(sweep: Sweep, options: Iterable[str], recorded: Mapping[str, Overrides] = {}) -> list[str]:
    """Returns a name for each run of a sweep, such as 'num_heads=4,d_k=32,seed=1'.

    A name lists the options in which the runs differ. A run that sets none of these options is named 'base'. Names have
    only characters that every file system allows, and do not depend on the order of the runs. The seed is at the end of
    a name. If a sweep sets the seed, the seed is always part of the name, so that more seeds can be added later.

    Args:
      sweep: the runs. All runs must differ from each other.
      options: all options of the config. In the names of runs, each option has its shortest unique name.
      recorded: the runs of an earlier version of the sweep, by name. These runs keep their names.
    """
    options = list(options)
    short = short_names(options)
    kept = [next((name for name, earlier in recorded.items() if earlier == overrides), '') for overrides in sweep]
    naming = {*differing(sweep), 'seed'} if len(sweep) > 1 else set(options)
    names = []
    for overrides in sweep:
        in_name = sorted((option for option in overrides if option in naming), key=lambda option: option == 'seed')
        name = ','.join(f'{short[option]}={_written(overrides[option])}' for option in in_name) or 'base'
        names.append(name if len(name) <= MOST_LETTERS else f'{name[:MOST_LETTERS]}~{_digest(overrides)}')
    # A digest distinguishes values that differ only in characters which a name cannot contain. The recorded name of a
    # run may lack options that the new sweep varies, so another run could get the same name.
    return [own or (f'{name}~{_digest(overrides)}' if names.count(name) > 1 or name in kept else name)
            for own, name, overrides in zip(kept, names, sweep, strict=True)]


def differing(sweep: Sweep) -> list[str]:
    """Returns the options in which the runs differ, in order of first appearance."""
    options = dict.fromkeys(option for overrides in sweep for option in overrides)
    return [option for option in options if len({repr(overrides.get(option)) for overrides in sweep}) > 1]


def short_names(options: Iterable[str]) -> dict[str, str]:
    """Maps each option to the shortest unique suffix of its name, such as 'num_heads' or 'data.seed'."""
    options = list(options)
    ends = [_ends(option) for option in options]
    return {option: next((end for end in own if sum(end in other for other in ends) == 1), option)
            for option, own in zip(options, ends, strict=True)}


def _ends(option: str) -> list[str]:
    parts = option.split('.')
    return ['.'.join(parts[-length:]) for length in range(1, len(parts) + 1)]


def _merged(parts: Iterable[Overrides]) -> Overrides:
    merged = {}
    for overrides in parts:
        if twice := merged.keys() & overrides.keys():
            raise UserError(f'the sweep sets {min(twice)} twice in the same run. Set each option only once')
        merged |= overrides
    return merged


def _written(value: Any) -> str:
    return re.sub(r'[^\w.+-]+', '_', f'{value:g}' if isinstance(value, float) else str(value), flags=re.ASCII)


def _digest(overrides: Overrides) -> str:
    return hashlib.sha256(repr(sorted(overrides.items())).encode()).hexdigest()[:8]
