"""The config.json of Hugging Face's library: the fields that determine what a model computes, and their types."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from runtime.errors import UserError
from runtime.schema import Size

ACTIVATIONS = {'relu': 'relu', 'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu', 'gelu': 'gelu_exact', 'silu': 'silu',
               'swish': 'silu'}
# {our activation: Hugging Face's name}. If Hugging Face has two names for an activation, this is the first name.
THEIRS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
Token = Annotated[int, msgspec.Meta(ge=-1, lt=2 ** 31)]  # -1 means no token, as in the first Llama models


class ForeignConfig(msgspec.Struct, kw_only=True):
    """The fields of config.json that all model families have. Hugging Face's library has the same defaults."""
    model_type: str
    vocab_size: Size
    pad_token_id: Token | None = None
    bos_token_id: Token | None = None
    eos_token_id: Token | list[Token] | None = None
    tie_word_embeddings: bool = True
    quantization_config: dict[str, Any] | None = None


def require(config: msgspec.Struct, **allowed: Sequence[Any]) -> None:
    """Checks that fields of config.json have supported values. `allowed` is {name of a field: supported values}.

    Raises:
      UserError: if a field has another value. The message names the field.
    """
    for name, values in allowed.items():
        if (value := getattr(config, name)) not in values:
            raise unsupported(name, value, values)


def unsupported(name: str, value: Any, allowed: Sequence[Any]) -> UserError:
    """Returns the error for a field of config.json whose value is not supported. `allowed` are the supported values."""
    return UserError(f'{name}={value!r:.200} is not supported. Supported: {" or ".join(map(repr, allowed))}')
