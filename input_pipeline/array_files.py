"""Reads examples from files: IDX images (the format of MNIST), NPZ archives, and CSV tables of time series."""

import collections
import csv
import functools
import itertools
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Num, UInt8

from input_pipeline.input_format import FLOAT32_END, as_inputs
from input_pipeline.sources import open_binary, read_lines
from input_pipeline.splits import SPLITS, Parts, without_files
from runtime.errors import UserError

IDX_IMAGES, IDX_LABELS = 'images-idx3-ubyte', 'labels-idx1-ubyte'
NOT_CHANNELS = ('series', 'time', 'target')  # columns of a CSV table; every other column is a channel


class Examples(NamedTuple):
    """The examples of one split, before preprocessing. `where` is the name of the split in error messages."""
    inputs: np.ndarray   # [n, *space, channels]
    targets: np.ndarray  # classes [n], or values [n] or [n, values]
    where: str


def open_folder(folder: Path, validation_share: float) -> tuple[Callable[[str], Examples], Parts]:
    """Opens the data set in `folder`.

    Returns:
      (read, parts): `read` is a function that reads the examples of a split. `parts` are the splits without files,
      which are held out from the training data.

    Raises:
      UserError: if the folder has no data set.
    """
    if not os.path.isdir(folder):
        raise UserError(f'config.data.dir={str(folder)!r} is not a folder. Give the folder of the data set')
    kind = next((kind for kind in FORMATS if _find(folder, 'train', kind)), None)
    if kind is None:
        raise UserError(f'config.data.dir={str(folder)!r} has no data set. It must have train-{IDX_IMAGES} and '
                        f'train-{IDX_LABELS}, or train.npz, or train.csv')
    if kind == IDX_IMAGES:
        parts = Parts(('validation',), validation_share, last=True)
    else:
        names: dict[str, str] = {split: split for split in SPLITS}
        parts = without_files(names, lambda split: bool(_find(folder, split, kind)), validation_share)
    return functools.partial(FORMATS[kind], folder), parts


def has_files(folder: Path, split: str) -> bool:
    """Returns whether a folder has files for a split, in any format."""
    return any(_find(folder, split, kind) for kind in FORMATS)


def _find(folder: Path, split: str, kind: str) -> Path | None:
    """Returns the file of a split in a folder, plain or .gz, or None if no such file exists."""
    path = _path(folder, split, kind)
    return next((file for file in (path, Path(f'{path}.gz')) if os.path.isfile(file)), None)


def _path(folder: Path, split: str, kind: str) -> Path:
    if kind in (IDX_IMAGES, IDX_LABELS):
        return folder / f'{"t10k" if split == "test" else split}-{kind}'
    return folder / f'{split}.{kind}'


def _needed(folder: Path, split: str, kind: str) -> Path:
    """Returns the file of a split in a folder, plain or .gz.

    Raises:
      UserError: if the file does not exist.
    """
    if path := _find(folder, split, kind):
        return path
    path = _path(folder, split, kind)
    compressed = '' if kind == 'npz' else f' (or {path.name}.gz)'  # an NPZ archive is itself compressed
    raise UserError(f'{path}{compressed} does not exist. See config.data.dir')


def read_idx(folder: Path, split: str) -> Examples:
    """Reads grayscale images and their classes from IDX files."""
    images_path, labels_path = (_needed(folder, split, kind) for kind in (IDX_IMAGES, IDX_LABELS))
    images, labels = read_idx_file(images_path, axes=3), read_idx_file(labels_path, axes=1)
    if len(images) != len(labels):
        raise UserError(f'{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels')
    return Examples(images[..., None], labels.astype(np.int32), str(images_path))


def read_idx_file(path: Path, axes: int) -> UInt8[np.ndarray, '...']:
    """Reads the array of unsigned bytes in an IDX file, plain or .gz.

    An IDX file consists of two zero bytes, the type (8), the number of axes, the length of each axis (32 bits,
    big-endian), and the values in C order (the index of the last axis changes fastest).

    Raises:
      UserError: if the file has another format or is damaged.
    """
    with open_binary(path) as file:
        content = file.read()
    begins = bytes([0, 0, 8, axes])
    if content[:4] != begins:
        raise UserError(f'{path} is not an IDX file of unsigned bytes with {axes} axes: it begins with '
                        f'{content[:4].hex() or "nothing"} instead of {begins.hex()}')
    header = 4 + 4 * axes
    lengths = [int.from_bytes(content[i:i + 4], 'big') for i in range(4, header, 4)]
    expected = header + math.prod(lengths)
    if len(content) != expected:
        raise UserError(f'{path} is truncated or damaged: its header announces {" x ".join(map(str, lengths))}, so '
                        f'the file must have {expected} bytes, but it has {len(content)}. Download the file again')
    return np.frombuffer(content, np.uint8, offset=header).reshape(lengths)


def read_npz(folder: Path, split: str) -> Examples:
    """Reads the arrays `inputs` [n, *space, channels] and `targets` from DIR/SPLIT.npz, written by numpy.savez."""
    path = _needed(folder, split, 'npz')
    inputs, targets = _arrays(path, ('inputs', 'targets'))
    return Examples(inputs, targets, str(path))


def _arrays(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise UserError(f'{path} is not an NPZ archive, or is truncated. Write it with numpy.savez')
    try:
        with np.load(path, allow_pickle=False) as archive:  # a pickle could run any code
            if missing := [name for name in names if name not in archive]:
                raise UserError(f'{path} has no array {missing[0]!r}. It contains '
                                f'{", ".join(archive.files) or "nothing"}. '
                                f'Write it with numpy.savez(file, {", ".join(f"{name}=..." for name in names)})')
            arrays = [archive[name] for name in names]
    # The archive is damaged, or NumPy does not support its compression or encryption. Or the header of an array has a
    # size that does not fit into memory or into a C integer. Or the header is not a valid Python literal: NumPy reads
    # the header with Python's tokenizer.
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, MemoryError,
            OverflowError, SyntaxError, tokenize.TokenError) as error:
        raise UserError(f'{path} cannot be read: {error}') from None
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, np.ndarray):  # NumPy returns bytes if the member is a pickle or a text
            raise UserError(f'{path}: {name} is not an array. Write it with numpy.savez')
    return arrays


def read_inputs(path: str, shape: tuple[int, ...]) -> Num[np.ndarray, 'examples *space channels']:
    """Reads the examples for a prediction from the array `inputs` of an NPZ file.

    Args:
      path: the NPZ file.
      shape: the shape of one example, [*space, channels].

    Raises:
      UserError: if the array is missing, has another shape, or contains values that are not finite numbers.
    """
    if not os.path.isfile(path):
        raise UserError(f'{path} is not a file. Give an .npz file with an array inputs [n, *space, channels]')
    inputs, = _arrays(Path(path), ('inputs',))
    return as_inputs(inputs, shape, f'{path}: inputs')


def read_csv(folder: Path, split: str) -> Examples:
    """Reads series from DIR/SPLIT.csv, which has a row for each time step:

        series,time,height,speed,target
        a,0.0,1.5,-0.25,2
        a,0.1,1.4,-0.5,2
        b,0.0,...

    The rows of a series are consecutive and in the order of time. All series have the same length, and each series has
    one target. The column `time` is optional and is not used. Every column except series, time and target is a channel.

    Raises:
      UserError: if the table has another form. The message has file:line.
    """
    path, training = _needed(folder, split, 'csv'), _needed(folder, 'train', 'csv')
    channels = [name for name in _read_table(training)[0] if name not in NOT_CHANNELS]
    if not channels:
        raise UserError(f'{training}:1: no column is a channel. Add a column other than {", ".join(NOT_CHANNELS)}')
    header, table = _read_table(path)
    if missing := [name for name in ('series', *channels, 'target') if name not in header]:
        raise UserError(f'{path}:1: column {missing[0]!r} is missing. The columns are {", ".join(header)}')
    if extra := [name for name in header if name not in (*NOT_CHANNELS, *channels)]:
        raise UserError(f'{path}:1: column {extra[0]!r} is not in the training data')

    inputs, targets, begins = [], [], {}  # begins: {series: its first line}
    for name, group in itertools.groupby(table, lambda row: row[1]['series']):
        series = list(group)
        line, first = series[0]
        if name in begins:
            raise UserError(f'{path}:{line}: series {name!r} continues here, but it began at line {begins[name]} and '
                            'another series is between these lines. The rows of a series must be consecutive')
        begins[name] = line
        for number, cells in series:
            if cells['target'] != first['target']:
                raise UserError(f'{path}:{number}: target {cells["target"]!r}, but {first["target"]!r} at line {line}. '
                                'All rows of a series must have the same target')
        inputs.append([[_number(cells[channel], f'{path}:{number}: {channel}') for channel in channels]
                       for number, cells in series])
        targets.append(_number(first['target'], f'{path}:{line}: target'))
        if len(series) != len(inputs[0]):
            raise UserError(f'{path}:{line}: series {name!r} has {len(series)} rows, but the first series, '
                            f'{next(iter(begins))!r}, has {len(inputs[0])}. All series must have the same length')
    if not inputs:
        raise UserError(f'{path} has a header but no rows')
    return Examples(np.array(inputs, np.float64), np.array(targets, np.float64), str(path))


def _read_table(path: Path) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """Returns the names of the columns, and an iterator of (line number, {column: cell}) over the rows.

    Raises:
      UserError: if the header is missing or has duplicate names, or a row has more or fewer cells than the header.
    """
    rows = _rows(path)
    line, header = next(rows, (0, []))
    if not header:
        raise UserError(f'{path} is empty. It must begin with a header such as series,x,y,target')
    for name, count in collections.Counter(header).items():
        if count > 1:
            raise UserError(f'{path}:{line}: column {name!r} appears {count} times. Column names must be unique')

    def cells() -> Iterator[tuple[int, dict[str, str]]]:
        for line, row in rows:
            if len(row) != len(header):
                raise UserError(f'{path}:{line}: {len(row)} columns instead of {len(header)}')
            yield line, dict(zip(header, row, strict=True))

    return header, cells()


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and cells of each row that is not empty."""
    table = csv.reader(read_lines(path))
    try:
        yield from ((table.line_num, [cell.strip() for cell in row]) for row in table if row)
    except csv.Error as error:
        raise UserError(f'{path}:{table.line_num}: {error}') from None


def _number(text: str, where: str) -> float:
    try:
        value = math.nan if '_' in text else float(text)  # float() accepts 1_000
    except ValueError:
        value = math.nan
    if not abs(value) < FLOAT32_END:
        reason = 'which exceeds 3.4e38, the maximum of float32' if math.isfinite(value) else 'not a number'
        raise UserError(f'{where} is {text!r}, {reason}')
    return value


# Formats: the end of a file's name -> the function that reads a split. If a folder has training files in several
# formats, the first of these formats is used.
FORMATS: Mapping[str, Callable[[Path, str], Examples]] = {IDX_IMAGES: read_idx, 'npz': read_npz, 'csv': read_csv}
