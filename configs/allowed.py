"""The allowed values of options. The method `problem` of each class checks a value."""

import dataclasses
from typing import Any

from runtime.errors import did_you_mean


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A fixed set of allowed names.

    Attributes:
      choices: the names that a user can choose.
      imported: further names, which only the configs of imported models have.
    """
    choices: tuple[str, ...]
    imported: tuple[str, ...] = ()

    def problem(self, value: Any) -> str:
        """Returns an error message if the value is not allowed, otherwise ''."""
        if value in (*self.choices, *self.imported):
            return ''
        return f'must be one of {", ".join(self.choices)}{did_you_mean(value, self.choices)}'

    def __str__(self) -> str:
        return ', '.join(f'`{choice}`' for choice in self.choices)


@dataclasses.dataclass(frozen=True)
class Between:
    """The numbers from `least` to `most`, both included. The bounds are wide: they only exclude mistakes."""
    least: float
    most: float

    def problem(self, value: float) -> str:
        """Returns an error message if the value is not allowed, otherwise ''."""
        if self.least <= value <= self.most:
            return ''
        if value != value:
            return 'must be a number'
        if value < self.least:
            return 'must not be negative' if self.least == 0 else f'must be at least {self.least:,}'
        return f'must be at most {self.most:,}'

    def __str__(self) -> str:
        return f'{self.least:,} to {self.most:,}'


@dataclasses.dataclass(frozen=True)
class Fraction:
    """The numbers from 0 to below 1. They must also be below 1 after rounding to float32, the precision of training."""

    def problem(self, value: float) -> str:
        """Returns an error message if the value is not allowed, otherwise ''."""
        return '' if 0 <= value < 1 - 2 ** -25 else 'must be at least 0 and below 1, also after rounding to float32'

    def __str__(self) -> str:
        return '0 to below 1'


@dataclasses.dataclass(frozen=True)
class Text:
    """Any text in UTF-8 without the character NUL.

    Attributes:
      file: whether the text is a file name. A file name need not be UTF-8, because Linux allows any bytes except NUL.
      names: whether the text is a list of names separated by commas. No name in the list may be empty.
    """
    file: bool = False
    names: bool = False

    def problem(self, value: str) -> str:
        """Returns an error message if the value is not allowed, otherwise ''."""
        if '\0' in value:
            return 'must not contain the character NUL'
        if self.names and not all(map(str.strip, value.split(','))):
            return 'must not contain an empty name. Put a name before and after each comma'
        try:
            value.encode(errors='surrogateescape' if self.file else 'strict')
        except UnicodeEncodeError:
            return 'must be text that can be written in UTF-8'
        return ''

    def __str__(self) -> str:
        return 'a file or folder' if self.file else 'text'


@dataclasses.dataclass(frozen=True)
class Switch:
    """The values True and False."""

    def problem(self, value: bool) -> str:
        """Returns '' (no error message), because True and False are both allowed."""
        return ''

    def __str__(self) -> str:
        return '`True` or `False`'


Allowed = OneOf | Between | Fraction | Text | Switch
