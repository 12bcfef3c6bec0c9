"""Reads and writes arrays in safetensors files. The content of a file is checked before it is used.

The format has no checksums. Files that this project writes have a checksum of each array in their metadata. The
checksum is verified when the array is read.
"""

import contextlib
import importlib
import importlib.util
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from runtime.errors import UserError
from runtime.files import read_bytes
from runtime.schema import Count, decoded

DTYPES = ('F64', 'F32', 'F16', 'BF16')
CHECKSUMS = 'crc32'  # the entry of the metadata with {array name: checksum of the array's bytes}, as JSON
ADVICE = 'Copy the file again from its source'
POINTER = b'version https://git-lfs'  # the beginning of a file that Git LFS has not downloaded


class ArrayFile:
    """An open safetensors file.

    Attributes:
      path: the path of the file.
      metadata: {name: text}.
      shapes: {array name: shape}.
    """

    def __init__(self, path: Path, file: Any):
        """Reads the header.

        Raises:
          UserError: if the metadata is damaged.
        """
        self.path, self._file = path, file
        self.metadata: dict[str, str] = file.metadata() or {}
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        self._checksums = self.entry(CHECKSUMS, dict[str, Count], {})
        if self._checksums and self._checksums.keys() != self.shapes.keys():
            raise UserError(f'{path}: the checksums in the metadata ({CHECKSUMS}) belong to other names than the '
                            f'arrays. {ADVICE}')

    def entry(self, name: str, schema: Any, default: Any) -> Any:
        """Returns an entry of the metadata, decoded from JSON. Returns the default if the entry is missing.

        Raises:
          UserError: if the entry does not match the schema.
        """
        try:
            return decoded(self.metadata[name], schema) if name in self.metadata else default
        except ValueError as error:
            raise UserError(f'{self.path}: metadata {name}: {error}. {ADVICE}') from None

    def array(self, name: str, advice: str, allow_nonfinite: bool = False) -> Float32[np.ndarray, '...']:
        """Reads an array and converts it to float32.

        Args:
          name: the name of the array.
          advice: the end of the message for an array that contains NaN or infinity.
          allow_nonfinite: whether the array may contain NaN and infinity.

        Raises:
          UserError: if the array is damaged, if its dtype is not one of DTYPES, or if the array contains NaN or
            infinity and `allow_nonfinite` is False.
        """
        if (dtype := self._file.get_slice(name).get_dtype()) not in DTYPES:
            raise UserError(f'{self.path}: the array {name} has the unsupported dtype {dtype}. Save the weights with '
                            f'one of the dtypes {", ".join(DTYPES)}')
        array = self._file.get_tensor(name)
        if name in self._checksums and _checksum(array) != self._checksums[name]:
            raise UserError(f'{self.path}: the array {name} is damaged: it does not match its checksum. {ADVICE}')
        with np.errstate(over='ignore'):  # a float64 value may be too large for float32
            array = array.astype(np.float32, copy=False)
        if not allow_nonfinite and not np.isfinite(array).all():
            raise UserError(f'{self.path}: the array {name} contains NaN or infinity: the training of this model has '
                            f'diverged. {advice}')
        return array


@contextlib.contextmanager
def open_arrays(path: Path) -> Iterator[ArrayFile]:
    """Opens a safetensors file.

    Raises:
      UserError: if the file cannot be read. The message names the file.
    """
    library = _library()
    try:
        if path.exists() and not path.is_file():  # opening a pipe might block forever
            raise OSError('it is a folder, a pipe or a device, not a file')
        with library.safe_open(path, 'np') as file:
            yield ArrayFile(path, file)
    except (OSError, library.SafetensorError, TypeError, ValueError) as error:
        advice = ADVICE
        with contextlib.suppress(OSError):
            if path.stat().st_size < 1000 and read_bytes(path).startswith(POINTER):
                advice = 'The file is only a pointer of Git LFS. Run git lfs pull in its repository'
        raise UserError(f'{path} cannot be read: {error}. {advice}') from None


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes arrays to a safetensors file. The metadata of the file also contains checksums of the arrays."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    checksums = {name: _checksum(array) for name, array in arrays.items()}
    path.touch()
    mode = path.stat().st_mode  # follows the umask, but the library makes a file that only its owner can read
    _library().numpy.save_file(arrays, path, metadata={**metadata, CHECKSUMS: json.dumps(checksums)})
    path.chmod(mode)


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _library() -> Any:
    if importlib.util.find_spec('safetensors') is None:
        raise UserError("safetensors is not installed. Run pip install -e '.[interchange]'")
    importlib.import_module('safetensors.numpy')
    return importlib.import_module('safetensors')
