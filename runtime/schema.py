"""Reads JSON that other programs have written, and validates it against a type, the schema.

A schema is a `msgspec.Struct`, or a type such as `dict[str, Size]`. Unknown fields of a Struct are ignored.
"""

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from runtime.errors import UserError
from runtime.files import read_bytes

Count = Annotated[int, msgspec.Meta(ge=0, lt=2 ** 53)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=2 ** 31)]

Content = TypeVar('Content')


def read_as(path: Path, schema: type[Content], advice: str) -> Content:
    """Reads a JSON file into a value of the type `schema`.

    Raises:
      UserError: if the file cannot be read or does not match the schema. The message names the file and the field, and
        ends with `advice`.
    """
    try:
        return decoded(read_bytes(path), schema)
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: {getattr(error, "strerror", None) or error}. {advice}') from None


def decoded(content: bytes | str, schema: type[Content]) -> Content:
    """Decodes JSON into a value of the type `schema`.

    Raises:
      ValueError: if the text is not JSON or does not match the schema. The message names the field.
    """
    try:
        # The bytes are decoded first, because msgspec does not check the encoding of texts in fields that it ignores.
        return msgspec.json.decode(content.decode() if isinstance(content, bytes) else content, type=schema)
    except RecursionError:
        raise ValueError('the JSON has too many nested levels') from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # 'Expected `int`, got `str` - at `$.n_head`'
        reason, _, field = str(error).replace('`', '').partition(' - at ')
        reason = reason.replace('Expected', 'expected', 1)
        raise ValueError(f'{field.removeprefix("$.")}: {reason}' if field else reason) from None
