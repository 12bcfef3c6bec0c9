"""The folder `data` of a run directory: tokenizers, and the sizes from which a model is built (sizes.json)."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from input_pipeline.input_format import ENCODINGS, FLOAT32_END, is_name
from input_pipeline.preprocessing import LARGEST_SCALE, SMALLEST_STD, Preprocessing
from input_pipeline.tokenizer import SPECIAL, Tokenizer, load_tokenizer
from runtime.errors import UserError
from runtime.files import RESTORE, file_checksum, naming, read_json, write_text
from runtime.schema import Count, read_as

KEPT = 'data'  # a folder in the run directory, with the tokenizers and the sizes for decoding
SIZES = 'sizes.json'
CHECKSUMS = 'checksums.json'  # {name: CRC-32 of the file}; runs of earlier versions have no or fewer checksums


def save_kept_data(folder: Path, tokenizers: Mapping[str, Tokenizer], sizes: Mapping[str, Any]) -> None:
    """Writes tokenizers, sizes.json and the checksums of these files. Makes the folder if it does not exist.

    Args:
      folder: the folder `data` of a run directory.
      tokenizers: the tokenizers by side. A run on images or series has none.
      sizes: the vocabulary sizes, or the shapes and the preprocessing of the data.
    """
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for side, tokenizer in tokenizers.items():
        with naming(folder / f'{side}.model'):  # the error for a full disk contains no file name
            tokenizer.save(folder / f'{side}.model')
    write_text(folder / SIZES, json.dumps(dict(sizes), indent=2) + '\n')
    write_text(folder / CHECKSUMS, json.dumps(
        {name: file_checksum(folder / name) for name in [*(f'{side}.model' for side in tokenizers), SIZES]}) + '\n')


def load_tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """Loads the tokenizers of a run by side: 'source' and 'target', or 'text'.

    Raises:
      UserError: if a tokenizer is missing or damaged, or its size differs from the size in sizes.json.
    """
    sizes = {key.removesuffix('vocab_size').rstrip('_') or 'text': size for key, size in load_sizes(folder).items()
             if key.endswith('vocab_size')}
    _compare_checksums(folder, [f'{side}.model' for side in sizes])
    tokenizers = {side: load_tokenizer(folder / f'{side}.model') for side in sizes}
    for side, tokenizer in tokenizers.items():
        if len(tokenizer) != sizes[side]:
            raise UserError(f'{folder / side}.model has {len(tokenizer)} tokens, but according to {folder / SIZES} it '
                            f'has {sizes[side]}. {RESTORE}')
    return tokenizers


def load_sizes(folder: Path) -> dict[str, Any]:
    """Loads sizes.json of `folder`, and checks each entry by itself.

    Raises:
      UserError: if sizes.json is missing or damaged, or an entry has an impossible value.
    """
    path = folder / SIZES
    sizes = read_json(path, RESTORE)
    for name, value in sizes.items():
        if not _is_size(name, value):
            raise UserError(f'{path} is damaged: {name} has the impossible value {str(value)[:200]}. {RESTORE}')
    _compare_checksums(folder, [SIZES])
    return sizes


def _compare_checksums(folder: Path, names: Iterable[str]) -> None:
    """Raises UserError if an existing file of the given names does not match its checksum in checksums.json."""
    checksums = read_as(folder / CHECKSUMS, dict[str, Count], RESTORE) if (folder / CHECKSUMS).exists() else {}
    for name in names:
        if name in checksums and (folder / name).is_file() and file_checksum(folder / name) != checksums[name]:
            raise UserError(f'{folder / name} is damaged: it does not match its checksum. {RESTORE}')


def _is_size(name: str, value: Any) -> bool:
    """Returns whether `value` is a possible value of the entry `name` of sizes.json."""
    def count(number) -> bool:
        return type(number) is int and 1 <= number < 2 ** 31

    def numbers(values, largest=LARGEST_SCALE) -> bool:
        return isinstance(values, list) and bool(values) and all(
            type(value) in (int, float) and abs(value) <= largest for value in values)

    if name.endswith('vocab_size') or name == 'outputs':
        return count(value)
    if name == 'absent':
        return isinstance(value, list) and all(type(token) is int and 0 <= token < len(SPECIAL) for token in value)
    if name == 'shape':
        return isinstance(value, list) and len(value) in (2, 3) and all(map(count, value))
    if name == 'classes':
        return value is None or isinstance(value, list) and all(map(is_name, value)) and len(set(value)) == len(value)
    if name == 'targets':
        return value is None or isinstance(value, list) and all(map(is_name, value))
    if name == 'inputs':
        flags, entries = {'resized', 'padded', 'missing'}, {'dtype', 'encoding', 'low', 'high', 'channels'}
        return isinstance(value, dict) and value.keys() == entries | flags and (
            value['encoding'] in ENCODINGS and isinstance(value['dtype'], str)
            and all(isinstance(value[flag], bool) for flag in flags)
            and all(numbers(value[end], FLOAT32_END) for end in ('low', 'high'))
            and isinstance(value['channels'], list) and all(map(is_name, value['channels'])))
    if name == 'preprocessing':
        parts = {field.name for field in dataclasses.fields(Preprocessing)}
        return isinstance(value, dict) and value.keys() == parts and all(
            numbers(statistic) and (part.endswith('mean') or min(statistic) >= SMALLEST_STD)
            or statistic is None and part.startswith('target') for part, statistic in value.items())
    return True  # accepts unknown names, because a later version may have written them


def contradiction(sizes: dict[str, Any], labelled: bool, task: str) -> str | None:
    """Returns a message if entries of sizes.json contradict each other or the task. Otherwise returns None."""
    classes, outputs, channels = sizes['classes'], sizes['outputs'], sizes['shape'][-1]
    if (classes is None) == labelled:
        return f'classes={str(classes)[:200]} does not fit task={task} in config.json'
    if classes is not None and len(classes) != outputs:
        return f'{len(classes)} classes, but outputs={outputs}'
    if len(sizes.get('targets') or [None] * outputs) != outputs:
        return f'{len(sizes["targets"])} names of values, but outputs={outputs}'
    for end in ('low', 'high'):
        if len(sizes.get('inputs', {end: [0] * channels})[end]) != channels:
            return f'inputs: {end} must have {channels} numbers'
    for part, numbers in sizes['preprocessing'].items():
        wanted = channels if part.startswith('input') else outputs if classes is None else None
        if (numbers and len(numbers)) != wanted:
            return f'preprocessing: {part}={str(numbers)[:200]} must have {wanted or "no"} numbers'
    return None
