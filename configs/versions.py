"""Configs that earlier versions wrote: what a run directory says is brought to the options of today.

`config.json` carries the version of the options that it was written with; without one it is 1. Options come and go, and
a run must open, decode and resume ever after. So whoever

- adds an option whose default is not what happened before it was there, raises VERSION and says in BEFORE what did;
- renames one, raises VERSION and says so in RENAMED.

An option that is new, and whose default changes nothing, needs neither: it gets its default.
"""

from collections.abc import Mapping
from typing import Any

from configs.checks import unused, written
from configs.options import DEFAULTS, kind_problem
from errors import UserError, option_like

VERSION = 3  # since 3, names of splits mean nothing to the built-in data
RENAMED: dict[int, dict[str, str]] = {}  # version -> {the option's name before it: its name since}
BEFORE: dict[int, dict[str, Any]] = {    # version -> {an option, by its name of today: what it was before it}
    2: {'data.plain_spaces': 0.0},
}


def upgraded(options: Mapping[str, Any], version: int) -> dict[str, Any]:
    """All options of today for what a config of `version` said, {'model.d_model': 512, ...}, in the order of the table.

    Of an earlier version, options that mean nothing to its model, task or source have their defaults: they had no
    effect.

    Raises:
      UserError: if the version is none of ours, or an option is unknown or of another type.
    """
    options = renamed(options, version)
    for name, value in options.items():
        if name not in DEFAULTS:
            like = option_like(name, DEFAULTS) or '; configs/options.py has them all'
            raise UserError(f'there is no option {name}{like}')
        if problem := kind_problem(name, value):
            raise UserError(f'{name}={written(value)}: {problem}, such as {DEFAULTS[name]!r}')
    before = {name: value for later, values in BEFORE.items() if later > version for name, value in values.items()}
    # A whole number does for another number, in JSON and on the command line.
    options = {**DEFAULTS, **before, **{name: type(DEFAULTS[name])(value) for name, value in options.items()}}
    return {**options, **{name: DEFAULTS[name] for name in unused(options)}} if version < VERSION else options


def renamed(options: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The options that a config, or the overrides of one, said in `version`, by their names of today.

    Raises:
      UserError: if the version is none of ours.
    """
    if type(version) is not int or not 1 <= version <= VERSION:
        raise UserError(f'its version is {version!r}, but this program knows those from 1 to {VERSION}: use the '
                        'program that wrote it, or a newer one')
    for later in range(version + 1, VERSION + 1):
        options = {RENAMED.get(later, {}).get(name, name): value for name, value in options.items()}
    return dict(options)
