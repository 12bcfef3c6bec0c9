"""Reads arrays from files: IDX images, the format of MNIST; NPZ archives; and CSV tables of time series."""

import collections
import csv
import functools
import gzip
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Num, Shaped, UInt8

from input_pipeline.sources import read_lines
from input_pipeline.splits import SPLITS, Parts, without_files
from runtime.errors import UserError

IDX_NAMES = {'train': 'train', 'validation': 'train', 'test': 't10k'}
NAMES = {split: split for split in SPLITS}  # names of the other formats' files
NOT_CHANNELS = ('series', 'time', 'target')  # columns of a CSV table; any other is a channel
FLOAT32_END = 2.0 ** 128 - 2.0 ** 103  # the smallest number that float32 rounds to infinity


class Examples(NamedTuple):
    """The examples of one split as they were read; `where` names the split in messages."""
    inputs: np.ndarray   # [n, *space, channels]
    targets: np.ndarray  # [n]: classes or values; [n, values]
    where: str


def open_folder(folder: Path, validation_share: float) -> tuple[Callable[[str], Examples], Parts]:
    """Returns a function that reads a split of the data set in `folder`, and the splits without files.

    The names of the files tell the format. The splits without files are cut off the training data.

    Raises:
      UserError: if the folder has no data set.
    """
    if not os.path.isdir(folder):
        raise UserError(f'config.data.dir={str(folder)!r} is not a folder: give the one that holds the data set')
    if plain_or_gz(folder / 'train-images-idx3-ubyte'):
        return functools.partial(load_idx, folder, validation_share), Parts()  # it cuts off the validation data itself
    for suffix, load in (('npz', load_npz), ('csv', load_csv)):
        there = [split for split in NAMES if plain_or_gz(folder / f'{split}.{suffix}')]
        if 'train' in there:
            return functools.partial(load, folder), without_files(NAMES, there.__contains__, validation_share)
    raise UserError(f'config.data.dir={str(folder)!r} holds no data set. It must hold train-images-idx3-ubyte and its '
                    'like, or train.npz, or train.csv, with validation and test data beside it or without')


def load_idx(folder: Path, validation_share: float, split: str) -> Examples:
    """Reads grey images and their classes. The last `validation_share` of the training files is for validation."""
    images_path, labels_path = (needed(folder / f'{IDX_NAMES[split]}-{kind}-ubyte')
                                for kind in ('images-idx3', 'labels-idx1'))
    images, labels = read_idx(images_path, axes=3), read_idx(labels_path, axes=1)
    if len(images) != len(labels):
        raise UserError(f'{images_path} holds {len(images)} images, but {labels_path} {len(labels)} labels')
    images, labels = images[..., None], labels.astype(np.int32)
    if split == 'test':
        return Examples(images, labels, str(images_path))
    first = len(images) - round(len(images) * validation_share)
    part = slice(first) if split == 'train' else slice(first, None)
    return Examples(images[part], labels[part], f'{images_path} ({split}, validation_share={validation_share})')


def read_idx(path: Path, axes: int) -> UInt8[np.ndarray, '...']:
    """Reads the array of unsigned bytes in an IDX file, plain or .gz.

    The format: two zero bytes, the type (8), the number of axes, the length of each axis (32 bits, big-endian),
    then the bytes with the last axis fastest.

    Raises:
      UserError: naming the file, if it has another format or is damaged.
    """
    try:
        with (gzip.open if path.suffix == '.gz' else open)(path, 'rb') as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:  # the last two: a .gz that was cut off or damaged
        raise UserError(f'{path} cannot be read: {error}') from None
    begins = bytes([0, 0, 8, axes])
    if content[:4] != begins:
        raise UserError(f'{path} is no IDX file of unsigned bytes with {axes} axes: it begins with '
                        f'{content[:4].hex() or "nothing"} instead of {begins.hex()}')
    header = 4 + 4 * axes
    lengths = [int.from_bytes(content[i:i + 4], 'big') for i in range(4, header, 4)]
    expected = header + math.prod(lengths)
    if len(content) != expected:
        raise UserError(f'{path} is cut off or damaged: its header announces {" x ".join(map(str, lengths))}, which '
                        f'is {expected} bytes in all, but it holds {len(content)}. Fetch it again')
    return np.frombuffer(content, np.uint8, offset=header).reshape(lengths)


def load_npz(folder: Path, split: str) -> Examples:
    """Reads the arrays `inputs` [n, *space, channels] and `targets` from DIR/SPLIT.npz, written by numpy.savez."""
    path = needed(folder / f'{split}.npz')
    inputs, targets = _arrays(path, ('inputs', 'targets'))
    return Examples(inputs, targets, str(path))


def _arrays(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise UserError(f'{path} is no NPZ archive, or was cut off: write it with numpy.savez')
    try:
        with np.load(path, allow_pickle=False) as archive:  # a pickle could run anything
            if missing := [name for name in names if name not in archive]:
                raise UserError(f'{path} has no array {missing[0]!r}, only {", ".join(archive.files) or "nothing"}: '
                                f'write it with numpy.savez(file, {", ".join(f"{each}=..." for each in names)})')
            arrays = [archive[name] for name in names]
    # The archive is damaged, or compressed or encrypted in a way that NumPy does not support; or a header asks for more
    # than fits into memory or a C integer, or is not the Python literal that NumPy reads with Python's tokenizer.
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, MemoryError,
            OverflowError, SyntaxError, tokenize.TokenError) as error:
        raise UserError(f'{path} cannot be read: {error}') from None
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, np.ndarray):  # for other members, a pickle or a text, NumPy returns bytes
            raise UserError(f'{path}: {name} is no array: write it with numpy.savez')
    return arrays


def read_inputs(path: str, shape: tuple[int, ...]) -> Num[np.ndarray, 'examples *space channels']:
    """Reads the array `inputs` of an NPZ file, to predict from; `shape` is that of one example, [*space, channels].

    Raises:
      UserError: if there is no such array, it has another shape, or its values are not all finite numbers.
    """
    if not os.path.isfile(path):
        raise UserError(f'{path} is no file: give an .npz file with an array inputs, [n, *space, channels]')
    inputs, = _arrays(Path(path), ('inputs',))
    return as_inputs(inputs, shape, f'{path}: inputs')


def as_inputs(inputs: Shaped[np.ndarray, '...'] | Sequence, shape: tuple[int, ...],
              where: str) -> Num[np.ndarray, 'examples *space channels']:
    """Returns `inputs` as an array of examples with the shape [*space, channels] of the model; `where` begins messages.

    Raises:
      UserError: if the shape is another one, or the values are not all finite numbers.
    """
    try:
        array = np.asarray(inputs)
    except (TypeError, ValueError) as error:  # lists of unlike lengths
        raise UserError(f'{where} are no array: {error}') from None
    if array.shape[1:] != shape or not array.ndim:
        raise UserError(f'{where} have the shape {array.shape}, but the model reads [n, {", ".join(map(str, shape))}]')
    check_numbers(array, where)
    return array


def check_numbers(array: Shaped[np.ndarray, '*axes'], where: str) -> None:
    """Checks that all values are numbers and finite as float32, in which models compute; `where` begins the message.

    Raises:
      UserError: if they are not.
    """
    # Minimum and maximum need no copy of the array. Both are NaN if a value is, and NaN is not below the bound.
    if array.dtype.kind not in 'uif' or array.size and not (
            max(-float(array.min()), float(array.max())) < FLOAT32_END):
        raise UserError(f'{where} must be finite numbers (their type is {array.dtype}) of less than 3.4e38, where '
                        'float32 ends')


def load_csv(folder: Path, split: str) -> Examples:
    """Reads series from DIR/SPLIT.csv, which has a row for each time step:

        series,time,height,speed,target
        a,0.0,1.5,-0.25,2
        a,0.1,1.4,-0.5,2
        b,0.0,...

    The rows of a series follow one another in time, all series are equally long, and a series has one target.
    `time` may be absent and is not used. Every column except series, time and target is a channel.

    Raises:
      UserError: with file:line, if the table has another form.
    """
    path, training = needed(folder / f'{split}.csv'), needed(folder / 'train.csv')
    channels = [name for name in _header(rows(training), training) if name not in NOT_CHANNELS]
    if not channels:
        raise UserError(f'{training}:1: no column is a channel: all are {", ".join(NOT_CHANNELS)}')
    table = rows(path)
    header = _header(table, path)
    if missing := [name for name in ('series', *channels, 'target') if name not in header]:
        raise UserError(f'{path}:1: no column {missing[0]!r}, only {", ".join(header)}')
    if extra := [name for name in header if name not in (*NOT_CHANNELS, *channels)]:
        raise UserError(f'{path}:1: column {extra[0]!r} is not in the training data')

    steps, targets, name, began = [], [], None, {}  # began: the first line of each series
    for line, row in table:
        if len(row) != len(header):
            raise UserError(f'{path}:{line}: {len(row)} columns instead of {len(header)}')
        cells = dict(zip(header, row, strict=True))
        if cells['series'] != name:
            name = cells['series']
            if name in began:
                raise UserError(f'{path}:{line}: series {name!r} goes on here, but it began at line {began[name]} and '
                                'others came between: the rows of a series must follow one another')
            _check_length(path, steps, began)
            began[name] = line
            steps.append([])
            targets.append(cells['target'])
        if cells['target'] != targets[-1]:
            raise UserError(f'{path}:{line}: target {cells["target"]!r}, but {targets[-1]!r} at line {began[name]}: '
                            'a series has one target')
        steps[-1].append([_number(cells[column], f'{path}:{line}: {column}') for column in channels])
        _number(cells['target'], f'{path}:{line}: target')
    if not steps:
        raise UserError(f'{path} has a header but no rows')
    _check_length(path, steps, began)
    return Examples(np.array(steps, np.float64).reshape(len(steps), -1, len(channels)),
                    np.array(targets, np.float64), str(path))


def _header(table: Iterator[tuple[int, list[str]]], path: Path) -> list[str]:
    """Returns the names of the columns. Raises UserError if a name occurs twice."""
    line, names = next(table)
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise UserError(f'{path}:{line}: column {twice[0]!r} is there {names.count(twice[0])} times: give each a '
                        'name of its own')
    return names


def rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and cells of each row that is not empty, the header first."""
    table = csv.reader(read_lines(path))
    try:
        found = False
        for row in table:
            if row:
                yield table.line_num, [cell.strip() for cell in row]
                found = True
    except csv.Error as error:
        raise UserError(f'{path}:{table.line_num}: {error}') from None
    if not found:
        raise UserError(f'{path} is empty: it must begin with a header such as series,x,y,target')


def _check_length(path: Path, steps: list[list], began: dict[str, int]):
    """Raises UserError if the last series is not as long as the first."""
    if steps and len(steps[-1]) != len(steps[0]):
        names = list(began)
        raise UserError(f'{path}:{began[names[-1]]}: series {names[-1]!r} has {len(steps[-1])} rows, but {names[0]!r}, '
                        f'the first, has {len(steps[0])}: all must be equally long')


def _number(text: str, where: str) -> float:
    try:
        value = math.nan if '_' in text else float(text)  # float() accepts 1_000
    except ValueError:
        value = math.nan
    if not abs(value) < FLOAT32_END:
        reason = 'beyond 3.4e38, where float32 ends' if math.isfinite(value) else 'not a number'
        raise UserError(f'{where} is {text!r}, {reason}')
    return value


def plain_or_gz(path: Path) -> Path | None:
    """Returns the file, or the same with .gz, whichever exists; None if neither does."""
    return next((file for file in (path, Path(f'{path}.gz')) if os.path.isfile(file)), None)


def needed(path: Path) -> Path:
    """Returns the file, or the same with .gz, whichever exists.

    Raises:
      UserError: if neither exists. For an NPZ archive, which is itself compressed, the message leaves out .gz.
    """
    if found := plain_or_gz(path):
        return found
    compressed = '' if path.suffix == '.npz' else f' (or {path.name}.gz)'
    raise UserError(f'{path}{compressed} does not exist: see config.data.dir')
