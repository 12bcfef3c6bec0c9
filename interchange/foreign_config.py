"""The config.json of Hugging Face's library: the fields that determine what a model computes, and their types."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from runtime.errors import UserError
from runtime.schema import Size, decoded, read_as

ACTIVATIONS = {'relu': 'relu', 'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu', 'gelu': 'gelu_exact', 'silu': 'silu',
               'swish': 'silu'}
# {our activation: Hugging Face's name}. If Hugging Face has two names for an activation, this is the first name.
THEIRS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
Token = Annotated[int, msgspec.Meta(ge=-1, lt=2 ** 31)]  # -1 means no token, as in the first Llama models


class ForeignConfig(msgspec.Struct, kw_only=True):
    """The fields of config.json that all model families have. Hugging Face's library has the same defaults.

    Attributes:
      ALIASES: {another name of a field: its name}, the attribute_map of Hugging Face's class.
    """
    ALIASES: ClassVar[Mapping[str, str]] = {}
    model_type: str
    vocab_size: Size
    pad_token_id: Token | None = None
    bos_token_id: Token | None = None
    eos_token_id: Token | list[Token] | None = None
    tie_word_embeddings: bool = True
    quantization_config: dict[str, Any] | None = None
    per_layer_config: dict[str, Any] | None = None


Config = TypeVar('Config', bound=ForeignConfig)


def read_config(path: Path, schema: type[Config], advice: str) -> Config:
    """Reads config.json. A field may have its name or its alias in `schema.ALIASES`.

    Raises:
      UserError: if the file cannot be read or does not match the schema, or if a field and its alias have different
        values. The message names the file and the field.
    """
    content, renamed = read_as(path, dict[str, msgspec.Raw], advice), {}
    for alias, name in schema.ALIASES.items():
        if alias in content:
            value = content.pop(alias)
            if name not in content:
                renamed[name] = alias
            if (canonical := content.setdefault(name, value)) != value:
                raise UserError(f'{path}: {alias}={bytes(value).decode():.80} and '
                                f'{name}={bytes(canonical).decode():.80} '
                                'are two names of one field, but their values differ. Remove the wrong one')
    try:
        return decoded(msgspec.json.encode(content), schema)
    except ValueError as error:
        name, colon, reason = str(error).partition(':')
        field = f'{renamed[name]} ({name})' if name in renamed else name  # the file contains only the alias
        raise UserError(f'{path}: {field}{colon}{reason}. {advice}') from None


def require(config: msgspec.Struct, prefix: str = '', **allowed: Sequence[Any]) -> None:
    """Checks that fields of config.json have supported values.

    Args:
      config: the fields.
      prefix: the beginning of the names in messages, such as 'rope_parameters.'.
      **allowed: {name of a field: supported values}.

    Raises:
      UserError: if a field has another value. The message names the field.
    """
    for name, values in allowed.items():
        if (value := getattr(config, name)) not in values:
            raise unsupported(prefix + name, value, values)


def unsupported(name: str, value: Any, allowed: Sequence[Any]) -> UserError:
    """Returns the error for a field of config.json whose value is not supported. `allowed` are the supported values."""
    return UserError(f'{name}={value!r:.200} is not supported. Supported: {" or ".join(map(repr, allowed))}')
