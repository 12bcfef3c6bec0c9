"""The config.json of Hugging Face's library: read field by field, so that nothing in it is overlooked in silence."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import UserError

ACTIVATIONS = {'relu': 'relu', 'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu', 'gelu': 'gelu_exact', 'silu': 'silu',
               'swish': 'silu'}
THEIRS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}  # the first name of each


class Fields:
    """The fields of a config.json, each with the default of the library.

    Attributes:
      path: of the file, for messages.
      all: as they are there.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]):
        self.path, self.all = path, content
        self.only('quantization_config', None)

    def get(self, name: str, default: Any, kind: type | tuple[type, ...] = object) -> Any:
        """A field of a type; null is the default.

        Raises:
          UserError: if it is of another type.
        """
        value = self.all.get(name)
        value = default if value is None else value
        if not isinstance(value, kind) or isinstance(value, bool) and kind is int:
            raise UserError(f'{self.path}: {name}={value!r:.80} is of the wrong type')
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A field that counts something; without a default it must be there."""
        value = self.get(name, default, int)
        if value < 1:
            raise UserError(f'{self.path}: {name}={value} must be at least 1')
        return value

    def number(self, name: str, default: float) -> float:
        """A field that is a number."""
        return float(self.get(name, default, (int, float)))

    def only(self, name: str, *possible: Any) -> Any:
        """A field that we know some values of, the default first.

        Raises:
          UserError: naming the field, if it has another.
        """
        value = self.all.get(name, possible[0])
        if value not in possible:
            raise self.refusal(name, value, possible)
        return value

    def activation(self, name: str, default: str) -> str:
        """Our name of an activation."""
        return ACTIVATIONS[self.only(name, default, *ACTIVATIONS)]

    def refusal(self, name: str, value: Any, possible: Sequence[Any] = ()) -> UserError:
        """What to say of a field whose value no option of ours stands for."""
        known = f', only {" or ".join(map(repr, dict.fromkeys(possible)))}' if possible else ''
        return UserError(f'{self.path}: {name}={value!r:.200} is not supported{known}')
