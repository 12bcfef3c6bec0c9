"""Opens folders of examples: IDX images (the format of MNIST), NPZ archives, tables of series, folders of images."""

import functools
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Num, UInt8

from input_pipeline.examples import Examples
from input_pipeline.image_files import (
    SUFFIXES,
    all_grey,
    check_classes,
    class_folders,
    image_paths,
    read_class_folders,
    read_images,
)
from input_pipeline.input_format import InputFormat
from input_pipeline.series_tables import read_csv, read_histories, read_unlabelled
from input_pipeline.splits import Parts, check_only_form, naming_option, warn_of_unread, without_files
from input_pipeline.text_files import open_binary
from runtime.errors import UserError, first_line
from runtime.files import check_link, is_broken_link, plain_or_gz

IDX_IMAGES, IDX_LABELS = 'images-idx3-ubyte', 'labels-idx1-ubyte'
IMAGES = 'images'


def open_folder(folder: Path, names: Mapping[str, str], validation_share: float, image_size: int = 0,
                missing: bool = False) -> tuple[Callable[[str], Examples], Parts, Callable[[str], bool]]:
    """Opens the data set in `folder`.

    Args:
      folder: config.data.dir.
      names: {split: name of the split on disk}, config.data.splits.
      validation_share: config.data.validation_share.
      image_size: config.data.image_size.
      missing: whether values of series may be missing.

    Returns:
      (read, parts, has_file): `read` is a function that reads the examples of a split. `parts` are the splits without
      files. They are held out from the training data. `has_file` is a function that returns whether a split has files.

    Raises:
      UserError: if the folder has no data set, if folders of images are splits and not classes, if a split has another
        format than the training data, or if a file is a broken symbolic link.
    """
    if not os.path.isdir(folder):
        raise UserError(f'config.data.dir={str(folder)!r} is not a folder. Set it to the folder of the data set')
    forms = {split: _forms(folder, name) for split, name in names.items()}
    kind, name = next(iter(forms['train']), None), names['train']
    if kind is None:
        option = '' if name == 'train' else f'config.data.splits.train={name!r}: '
        raise UserError(f'{option}config.data.dir={str(folder)!r} has no data set. It must have {name}-{IDX_IMAGES} '
                        f'and {name}-{IDX_LABELS}, or {name}.npz, or {name}.csv, or folders of images '
                        f'{name}/CLASS/FILE.png')
    others = [path for paths in forms.values() for form, path in paths.items() if form != kind]
    training = forms['train'][kind]
    check_only_form(training, next(iter(others), None))
    if image_size and kind != IMAGES:
        raise UserError(f'config.data.image_size={image_size} is only for folders of images, but {folder} has '
                        f'{training.name}. Set image_size=0')
    if training == folder:
        check_classes(folder, {names['validation'], names['test']})

    def has_file(split: str) -> bool:
        return bool(forms[split])

    def has_images(split: str) -> bool:
        return has_file(split) or (
            split == 'validation' and kind == IMAGES and bool(image_paths(folder / names[split])))

    # If there are validation images without folders of classes, no examples are held out, and reading the split raises
    # an error.
    # In contrast, data sets of competitions often have test images without classes, so test examples are held out.
    parts = without_files(names, has_images, validation_share)
    if training != folder:  # otherwise, a folder val would be a class
        warn_of_unread(folder, names, parts, [training.name.removeprefix(name)])
    if kind == IDX_IMAGES and parts.names:  # as in all earlier versions
        parts = Parts(('validation',), validation_share, last=True)

    grey = functools.cache(all_grey)  # a separate cache for each data set, because images may change

    def read(split: str) -> Examples:
        options = {IMAGES: {'size': image_size, 'all_grey': grey}, 'csv': {'missing': missing}}.get(kind, {})
        return FORMATS[kind](_needed(folder, split, names, kind), _needed(folder, 'train', names, kind), **options)

    return read, parts, has_file


def _forms(folder: Path, name: str) -> dict[str, Path]:
    """Returns {format: file or folder} for each format in which the split exists.

    Folders of classes without a folder of the split are a format only if the split has no other format, because the
    images may be figures that are not data.
    """
    forms = {}
    for kind in FORMATS:  # IMAGES is the last format
        if not (forms and _path(folder, name, kind) == folder) and (path := _find(folder, name, kind)):
            forms[kind] = path
    return forms


def _find(folder: Path, name: str, kind: str) -> Path | None:
    """Returns the file of a split (plain or .gz) or the folder of its images, or None if it does not exist.

    Raises:
      UserError: if the file or the folder is a broken symbolic link.
    """
    path = _path(folder, name, kind)
    if kind == IMAGES:
        check_link(path)
        return path if class_folders(path) else None
    return plain_or_gz(path)


def _path(folder: Path, name: str, kind: str) -> Path:
    if kind == IMAGES:
        # Without folders of the splits, the folders of the classes are the training data.
        whole = name == 'train' and not (path := folder / name).is_dir() and not is_broken_link(path)
        return folder if whole else folder / name
    if kind in (IDX_IMAGES, IDX_LABELS):
        return folder / f'{"t10k" if name == "test" else name}-{kind}'
    return folder / f'{name}.{kind}'


def _needed(folder: Path, split: str, names: Mapping[str, str], kind: str) -> Path:
    """Returns the file of a split (plain or .gz) or the folder of its images.

    Raises:
      UserError: if the file or folder does not exist, or the folder contains a broken symbolic link. Such a link could
        be a class. If the classes are directly in DIR, the link could also be another file, so this is no error.
    """
    if path := _find(folder, names[split], kind):
        if kind == IMAGES and path != folder:
            for entry in path.glob('[!.]*'):
                check_link(entry)
        return path
    path, option = _path(folder, names[split], kind), naming_option(split)
    if kind == IMAGES:
        raise UserError(f'{path} has no folders of images CLASS/FILE.png. See config.data.dir and {option}')
    compressed = '' if kind == 'npz' else f' (or {path.name}.gz)'  # an NPZ archive is itself compressed
    raise UserError(f'{path}{compressed} does not exist. Check config.data.dir and {option}. A split of images or '
                    'series is one file')


def read_idx(images_path: Path, training: Path) -> Examples:
    """Reads greyscale images and their classes from IDX files.

    Raises:
      UserError: if the file of the classes does not exist or has another number of classes, or a file is damaged.
    """
    name = images_path.name.removesuffix('.gz').removesuffix(f'-{IDX_IMAGES}')
    labels_path = _find(images_path.parent, name, IDX_LABELS)
    if labels_path is None:
        path = _path(images_path.parent, name, IDX_LABELS)
        raise UserError(f'{path} (or {path.name}.gz) does not exist. {images_path.name} needs this file with its '
                        'labels')
    images, labels = read_idx_file(images_path, axes=3), read_idx_file(labels_path, axes=1)
    if len(images) != len(labels):
        raise UserError(f'{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels. Use '
                        'files of the same data set')
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
                        f'{content[:4].hex() or "nothing"} instead of {begins.hex()}. Download the file again')
    header = 4 + 4 * axes
    lengths = [int.from_bytes(content[i:i + 4], 'big') for i in range(4, header, 4)]
    expected = header + math.prod(lengths)
    if len(content) != expected:
        raise UserError(f'{path} is truncated or damaged: according to its header, the shape is '
                        f'{" x ".join(map(str, lengths))}, so the file must have {expected} bytes, but it has '
                        f'{len(content)}. Download the file again')
    return np.frombuffer(content, np.uint8, offset=header).reshape(lengths)


def read_npz(path: Path, training: Path) -> Examples:
    """Reads arrays that numpy.savez has written.

    The arrays are `inputs` [n, *space, channels] and `targets`. The targets are classes [n], names of classes [n], one
    value for each example [n], or several values [n, values]. An optional array `groups` [n] contains the group of each
    example. For example, a group is all examples of one person. All examples of a group are in the same split.

    Raises:
      UserError: if the archive cannot be read, or an example has no group.
    """
    inputs, targets, groups = _arrays(path, ('inputs', 'targets'), ('groups',))
    if groups is not None:
        if groups.shape != inputs.shape[:1]:
            raise UserError(f'{path}: groups have the shape {groups.shape}, but inputs have the shape {inputs.shape}. '
                            'Each input needs one group')
        missing = groups != groups  # NaN and NaT are not equal to themselves
        groups = _decoded(groups).astype(str)
        missing |= np.char.strip(groups) == ''
        if missing.any():
            raise UserError(f'{path}: the group of example {missing.argmax()} is empty or NaN. Each input needs the '
                            'name of its group')
    return Examples(inputs, _decoded(targets), str(path), groups)


def _decoded(names: np.ndarray) -> np.ndarray:
    """Returns names as text if they are UTF-8 bytes. Other arrays are unchanged."""
    return np.char.decode(names, 'utf-8', 'backslashreplace') if names.dtype.kind == 'S' else names


def _arrays(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[Any]:
    """Reads the arrays `names` and `optional` from an NPZ archive. An optional array that is missing is None.

    Raises:
      UserError: if one of the arrays `names` is missing. Also if an array is stored as a pickle, because a pickle could
        run code.
    """
    with open_binary(path):  # raises the error of a file without read permission, for which is_zipfile returns False
        if not zipfile.is_zipfile(path):
            raise UserError(f'{path} is not an NPZ archive, or is truncated. Write the file with numpy.savez')
    try:
        with np.load(path, allow_pickle=False) as archive:  # a pickle could run any code
            if missing := [name for name in names if name not in archive]:
                raise UserError(f'{path} has no array {missing[0]!r}. It contains '
                                f'{", ".join(archive.files) or "nothing"}. '
                                f'Write it with numpy.savez(file, {", ".join(f"{name}=..." for name in names)})')
            arrays = [archive.get(name) for name in (*names, *optional)]
    # The archive is damaged, or NumPy does not support its compression or encryption. Or the header of an array has a
    # size that does not fit into memory or into a C integer. Or the header is not a valid Python literal: NumPy reads
    # the header with Python's tokenizer. Or the header is a literal of another form than NumPy expects.
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, MemoryError,
            OverflowError, SyntaxError, tokenize.TokenError, TypeError, LookupError) as error:
        if isinstance(error, MemoryError):
            advice = ('Use fewer or smaller examples, or a machine with more memory. If the file is damaged, write it '
                      'again with numpy.savez')
        else:
            advice = ('Save arrays of numbers or text, not objects' if 'allow_pickle' in str(error) else
                      'Write the file again with numpy.savez')
        raise UserError(f'{path} cannot be read: {first_line(error)}. {advice}') from None
    for name, array in zip((*names, *optional), arrays, strict=True):
        if not isinstance(array, np.ndarray | None):  # NumPy returns bytes if the member is a pickle or a text
            raise UserError(f'{path}: {name} is not an array. Write the file with numpy.savez')
    return arrays


def read_inputs(path: str, form: InputFormat) -> tuple[list[str], Num[np.ndarray, 'examples *space channels']]:
    """Reads the examples for a prediction.

    Args:
      path: a folder of images, an image, a .csv file of series, or an .npz file with an array `inputs`.
      form: the format of the model's inputs.

    Returns:
      The name of each example (the path of an image in the folder, the name of a series, or the index in an array),
      and the raw inputs as `form.prepare` returns them.

    Raises:
      UserError: if the examples cannot be read, or do not have the format `form`.
    """
    file, images = Path(path), len(form.shape) == 3
    suffix = file.name.lower().removesuffix('.gz').rpartition('.')[2]
    if file.is_dir() or f'.{suffix}' in SUFFIXES:
        if not images:
            raise UserError(f'{path} contains images, but the model reads series. Use a .csv or an .npz file')
        paths = image_paths(file) if file.is_dir() else [file]
        if not paths:
            raise UserError(f'{path} has no images. Use a folder with files such as {", ".join(SUFFIXES)}')
        names = [str(image.relative_to(file)) if file.is_dir() else path for image in paths]
        inputs = read_images(paths, form.shape[-1], form.shape[:2], form.resized)
    elif not os.path.isfile(file):
        raise UserError(f'{path} is not a file. Use a folder of images, an image, a .csv file of series, or an .npz '
                        'file with an array inputs [n, *space, channels]')
    elif suffix == 'csv':
        if images or not form.channels:
            raise UserError(f'{path} is a table of series, but the model was not trained on tables. Use an .npz file'
                            f'{" or images" if images else ""}')
        names, inputs = _series_of_table(file, form)
    else:
        inputs, = _arrays(file, ('inputs',))
        return list(map(str, range(len(inputs) if inputs.ndim else 0))), form.prepare(inputs, f'{path}: inputs')
    kind = 'image' if images else 'series'
    return names, form.prepare(inputs, path, lambda index: f'{kind} {names[index]!r}' if names[index] else 'the series')


def _series_of_table(path: Path, form: InputFormat) -> tuple[list[str], Any]:
    """Returns the names and the values of the series of a table. For forecasts, series may have any length."""
    if not form.latest:
        return read_unlabelled(path, form.channels, form.missing)
    series, channels = read_histories(path)
    if channels != list(form.channels):
        raise UserError(f'{path}:1: the channels are {", ".join(channels)}, but in the training data they are '
                        f'{", ".join(form.channels)}. Use these columns in this order')
    return list(series), list(series.values())


# Formats: the end of a file's name -> the function that reads a split. The arguments of the function are the file of
# the split and the file of the training split.
FORMATS: Mapping[str, Callable[..., Examples]] = {
    IDX_IMAGES: read_idx, 'npz': read_npz, 'csv': read_csv, IMAGES: read_class_folders}
