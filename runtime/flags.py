"""Command-line flags that are declared as fields of a dataclass, with type, default and help."""

import dataclasses
import functools
import sys
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from absl import flags

Values = TypeVar('Values')
HELP, CHOICES = 'help', 'choices'
DEFINE = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}


def flag(default: Any, help_text: str, choices: Sequence[str] | None = None) -> Any:
    """Returns a dataclass field that is also a command-line flag. `choices` are the allowed values; None allows all."""
    return dataclasses.field(default=default, metadata={HELP: help_text, CHOICES: choices})


def define_flags(declared: type) -> None:
    """Defines the command-line flags of a dataclass: one flag for each field that is made with the function `flag`.

    The type of such a field must be bool, int, float or str.
    """
    kinds = typing.get_type_hints(declared)
    for field in _flags_of(declared):
        define: Any = DEFINE.get(kinds[field.name], flags.DEFINE_string)
        if choices := field.metadata[CHOICES]:
            define = functools.partial(flags.DEFINE_enum, enum_values=choices)
        # With module_name=sys.argv[0], the output of --help lists the flag under this script.
        define(field.name, field.default, help=field.metadata[HELP], module_name=sys.argv[0])


def flags_as(declared: type[Values], **values: Any) -> Values:
    """Returns an instance of the dataclass `declared`.

    A field that has a flag gets the value of the flag. Pass all other fields as keyword arguments (`values`).
    """
    return declared(**{field.name: flags.FLAGS[field.name].value for field in _flags_of(declared)}, **values)


def _flags_of(declared: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(declared) if HELP in field.metadata]
