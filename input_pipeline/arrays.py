"""Data sets of images and time series with classes or values as targets. All sources have the same interface."""

import dataclasses
import functools
import gzip
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Num
from ml_collections import ConfigDict

from input_pipeline import dynamics
from input_pipeline.array_files import open_folder
from input_pipeline.examples import MAX_NAMES, Examples, warn_of_classes, warn_of_shared
from input_pipeline.input_format import (
    InputFormat,
    check_numbers,
    check_series,
    described_inputs,
    is_name,
    pad_series,
    steps_before_padding,
)
from input_pipeline.preprocessing import Inputs, Preprocessing, Targets, is_byte_images, mean_and_std, recorded
from input_pipeline.sources import source_of
from input_pipeline.splits import HeldOut, Parts, key
from input_pipeline.tfds import Dataset
from runtime.errors import UserError, did_you_mean, first_names
from runtime.files import expanded
from runtime.once import log_once, warn_once

MOST_CLASSES = 100_000


class ArrayData:
    """The splits of a data set of examples, in memory. The splits are 'train', 'validation' and 'test'.

    A split is read when it is used for the first time.

    Attributes:
      parts: the splits that are held out from the training split.
    """

    def __init__(self, load: Callable[[str], Examples], labelled: bool, classes: list[str] | None = None,
                 parts: Parts = Parts(),  # noqa: B008 (Parts is immutable)
                 has_file: Callable[[str], bool] = lambda split: True, missing: bool = False, multiple: int = 1):
        """Stores the arguments. No split is read yet.

        Args:
          load: a function that reads a split.
          labelled: True if the targets are classes (whole numbers), False if the targets are values.
          classes: the names of the classes. If None, the names are '0', '1', ...
          parts: the splits that are held out from the training split; see input_pipeline/splits.py.
          has_file: a function that returns whether a split has a file. The test split may have none.
          missing: whether values of series may be missing (NaN).
          multiple: series of different lengths are padded to a multiple of this number of steps.
        """
        self._labelled, self._names, self.parts, self._has_file = labelled, classes, parts, has_file
        self._missing, self._multiple = missing, multiple
        self._raw = functools.cache(load)
        self._split, self._whole = functools.cache(self._read), functools.cache(self._checked)

    def has_split(self, split: str) -> bool:
        """Returns whether the split has a file or is held out from the training file."""
        return self.parts.is_part(split) or self._has_file(split)

    def inputs(self, split: str) -> Inputs:
        """Returns the raw inputs with the dtype of the file, because float32 could lose small differences of values."""
        return self._split(split).inputs

    def prepared(self, split: str, form: InputFormat) -> Inputs:
        """Returns the inputs of a split in the format `form` of a run. See `InputFormat.prepare`.

        The formats differ if the files were saved again in another encoding after the training of the run.
        """
        examples = self._split(split)
        return form.prepare(examples.inputs, f'{examples.where}: inputs', examples.named)

    def targets(self, split: str) -> Targets:
        """Returns the raw targets: classes int32 [n], or values float64 [n, values]."""
        return self._split(split).targets

    def names(self, split: str) -> Sequence[str]:
        """Returns the name of each example [n]: its place in the files, or its index."""
        return self._split(split).names

    def groups(self, split: str) -> np.ndarray | None:
        """Returns the name of the group of each example [n]; None if the data has no groups."""
        return self._split(split).groups

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Returns the name of the split's file and a digest of its arrays, as JSON.

        Splits with equal fingerprints have equal examples. If there are no test data, the list 'files' of the test
        split is empty.
        """
        if split == 'test' and not self.has_split(split):
            return {'source': 'arrays', 'files': []}
        examples = self._split(split)
        inputs, targets = recorded(examples.inputs), examples.targets if self._labelled else recorded(examples.targets)
        digest = hashlib.sha256(f'{inputs.dtype}{inputs.shape}{targets.dtype}{targets.shape}'.encode())
        for array in (inputs, targets):
            digest.update(np.ascontiguousarray(array).data)
        if self._numbers:
            digest.update(json.dumps(self.classes).encode())
        return {'source': 'arrays', 'files': [[Path(examples.where).name, digest.hexdigest()]]}

    @functools.cached_property
    def classes(self) -> list[str] | None:
        """The names of the classes; None if the targets are values."""
        if not self._labelled:
            return None
        return list(self._numbers) or self._names or [
            str(number) for number in range(int(self._whole('train').targets.max()) + 1)]

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        """The index of each class, as {name: index}, if the training targets are names. Otherwise {}."""
        targets = self._raw('train').targets
        names = np.unique(targets) if self._labelled and targets.dtype.kind == 'U' else ()
        return {str(name): number for number, name in enumerate(names)}

    @functools.cached_property
    def sizes(self) -> dict[str, int | list[int]]:
        """The sizes that the model needs, as JSON.

        'outputs' is the number of classes or values. 'shape' is the shape of one example, [*space, channels].
        """
        outputs = len(self.classes) if self.classes else self.targets('train').shape[1]
        return {'outputs': outputs, 'shape': list(self.inputs('train').shape[1:])}

    @functools.cached_property
    def described(self) -> dict[str, Any]:
        """The description of the inputs and the outputs, as JSON. A run saves it in sizes.json (`InputFormat`)."""
        train = self._split('train')
        targets = None if self.classes else list(train.values) or list(map(str, range(train.targets.shape[1])))
        return {'classes': self.classes, 'targets': targets,
                'preprocessing': dataclasses.asdict(self.preprocessing),
                'inputs': described_inputs(train.inputs, train.channels, resized=train.resized, padded=train.padded,
                                           missing=self._missing)}

    @functools.cached_property
    def form(self) -> InputFormat:
        """Shape, encoding and range of the training inputs. The inputs of other splits must have the same format."""
        return InputFormat.of(self.sizes | self.described)

    @functools.cached_property
    def preprocessing(self) -> Preprocessing:
        """The standardisation of inputs and targets, with statistics of the training split."""
        inputs, targets, where, *_ = self._split('train')
        scale = ([[127.5] * inputs.shape[-1]] * 2 if is_byte_images(inputs) else  # maps 0..255 to -1..1
                 mean_and_std(inputs, f'{where}: inputs'))
        return Preprocessing(*scale, *([None, None] if self.classes else mean_and_std(targets, f'{where}: targets')))

    def _read(self, split: str) -> Examples:
        examples = self._part(split) if self.parts.is_part(split) else self._checked(split)
        if split == 'train':
            if self._missing:
                self._require_values(examples)
            if is_byte_images(examples.inputs) and examples.inputs.max() == 1:
                warn_once(f'{examples.where}: the images are unsigned bytes, but all values are 0 or 1. Bytes are '
                          'scaled as numbers from 0 to 255, so the model hardly sees a difference. Multiply the images '
                          'by 255')
            if self.classes:
                log_once(f'{examples.where}: {len(self.classes)} classes '
                         f'({first_names(self.classes, MAX_NAMES)})')
                warn_of_classes(examples.targets, self.classes, examples.where)
            return examples
        self._require_like_training(examples)
        inputs = self.form.prepare(examples.inputs, f'{examples.where}: inputs', examples.named)
        examples = examples._replace(inputs=inputs)
        # Without groups, a hash puts equal examples into the same split. But images may be equal only after scaling.
        if not self.parts.is_part(split) or self.parts.last or examples.groups is not None or examples.resized:
            self._warn_of_shared(examples)
        return examples

    def _warn_of_shared(self, examples: Examples) -> None:
        """Logs a warning if examples of a split are also in the training split."""
        train = self._split('train')
        inputs, known = recorded(examples.inputs), recorded(train.inputs)
        if inputs.dtype != known.dtype:  # equal numbers have the same bytes only in the same dtype
            inputs, known = examples.inputs.astype(np.float64), train.inputs.astype(np.float64)
        warn_of_shared(examples, train, inputs, known)

    def _part(self, split: str) -> Examples:
        """Returns the examples of the training files that belong to `split`.

        If the split of an example depends on its hash, at least one example of each class remains in 'train'.
        """
        whole = self._whole('train')
        if self.parts.last:
            members = self.parts.rows(len(whole.inputs), split, whole.where)
        else:
            keys = self._keys()
            kept = dict(sorted(zip(whole.targets.tolist(), keys, strict=True))).values() if self._labelled else ()
            what = 'inputs' if whole.groups is None else 'groups'
            held_out = HeldOut(self.parts, keys, f'{what} of {whole.where}', kept)
            members = np.array([held_out.split(example_key) == split for example_key in keys])
        return whole.part(members, f'{whole.where} ({split}, validation_share={self.parts.share})')

    def _keys(self) -> Sequence[int]:
        """Returns the hash of each example, or of its group, which decides the split of the example.

        The hash depends neither on the size to which images are scaled, nor on the padding of series. So these options
        do not change the splits.
        """
        raw = self._raw('train')
        if raw.groups is not None:
            return [key(group.encode(errors='surrogatepass')) for group in raw.groups]
        if raw.keys:
            return raw.keys
        inputs = recorded(raw.inputs)
        parts = inputs if inputs.ndim == 4 else map(np.ndarray.__getitem__, inputs, steps_before_padding(inputs))
        return [key(np.ascontiguousarray(part).tobytes()) for part in parts]

    def _checked(self, split: str) -> Examples:
        """Reads and checks a split. Converts classes to int32 [n] and values to float64 [n, values]."""
        examples = self._raw(split)
        inputs, targets, where = examples.inputs, examples.targets, examples.where
        if inputs.ndim not in (3, 4):
            raise UserError(f'{where}: inputs have the shape {inputs.shape}. They must be series [n, time, channels] '
                            'or images [n, height, width, channels]')
        if inputs.ndim == 4 and self._missing:
            raise UserError(f'config.data.missing=mean is only for series, but {where} has images. Set missing=error')
        if not len(inputs) or not inputs.size:
            raise UserError(f'{where} has no examples. Add examples, or use other files')
        if targets.ndim not in (1, 2) or len(inputs) != len(targets) or not targets.size:
            raise UserError(f'{where} has {len(inputs)} inputs, but targets of the shape {targets.shape}. The targets '
                            f'must have the shape [{len(inputs)}] or [{len(inputs)}, values]')
        if inputs.ndim == 3 and (self._raw('train').padded or self._missing):
            inputs = self._padded(examples, split)
            examples = examples._replace(inputs=inputs)
        else:
            check_numbers(inputs, f'{where}: inputs', named=examples.named)
        if not examples.channels:  # the channels of an image have no names
            self._warn_of_many_channels(inputs, where)
        if self._labelled:
            if targets.ndim == 2 and targets.shape[1] != 1:
                raise UserError(f'{where}: the targets have the shape {targets.shape}, but an example has one class. '
                                'They must have the shape [n]. Use task=regression for values')
            targets = targets.reshape(-1)
            examples = examples._replace(targets=targets)
            if targets.dtype.kind == 'U':
                return examples._replace(targets=self._numbered(examples))
        elif targets.dtype.kind == 'U':
            raise UserError(f'{where}: target {str(targets.flat[0])!r:.100} of {examples.named(0)} is not a number. '
                            'Use task=classification for names of classes')
        check_numbers(targets, f'{where}: targets', named=examples.named)
        if not self._labelled:
            return examples._replace(targets=targets.astype(np.float64).reshape(len(targets), -1))
        wrong = (targets < 0) | (targets % 1 != 0) | (targets >= MOST_CLASSES)
        if wrong.any():
            raise UserError(f'{where}: class {targets[wrong][0]} of {examples.named(wrong.argmax())}: classes must be '
                            f'whole numbers from 0 to {MOST_CLASSES - 1:,}, or names. Use task=regression for other '
                            'values')
        if self._numbers:
            raise UserError(f'{where}: the classes are numbers, such as {targets[0]:g}, but in the training split they '
                            f'are names, such as {next(iter(self._numbers))!r}. Use the names')
        return examples._replace(targets=targets.astype(np.int32))

    def _padded(self, examples: Examples, split: str) -> Num[np.ndarray, 'examples longest channels']:
        """Pads series with NaN at the end, to the length of the longest training series.

        This length is rounded up to a multiple of `self._multiple` steps.

        Raises:
          UserError: if a series has no values, or is longer than the training series.
        """
        inputs, where = examples.inputs, f'{examples.where}: inputs'
        if split == 'train':
            steps = -(-inputs.shape[1] // self._multiple) * self._multiple
        else:
            steps = self._whole('train').inputs.shape[1]
        inputs = pad_series(inputs, (steps, inputs.shape[2]), where, examples.named)
        check_series(inputs, where, self._missing, examples.named)
        absent = np.isnan(inputs[steps_before_padding(inputs)])
        if absent.any():
            log_once(f'{where}: {absent.sum():,} of {absent.size:,} values are missing. They are replaced by the mean '
                     'of the channel')
        return inputs

    def _numbered(self, examples: Examples) -> Targets:
        """Converts targets that are names of classes to the indices of the classes.

        Raises:
          UserError: if a name is not in the training split, or is not allowed.
        """
        where, numbers = examples.where, self._numbers
        if not numbers:
            raise UserError(f'{where}: the classes are names, such as {str(examples.targets[0])!r:.100}, but in the '
                            'training split they are numbers. Use numbers')
        if len(numbers) > MOST_CLASSES:
            raise UserError(f'{where} has {len(numbers):,} classes, but at most {MOST_CLASSES:,} are supported. '
                            'Check that the targets are classes')
        names, members = np.unique(examples.targets, return_inverse=True)
        for name, index in zip(map(str, names), np.unique(members, return_index=True)[1], strict=True):
            if not is_name(name) or not name.strip():
                raise UserError(f'{where}: the class of {examples.named(index)} is {name!r:.100}. The name of a class '
                                'must be one line of text')
            if name not in numbers:
                raise UserError(f'{where}: class {name!r:.100} of {examples.named(index)} is not in the training split'
                                f'{did_you_mean(name, list(numbers))}')
        return np.array([numbers[str(name)] for name in names], np.int32)[members]

    @staticmethod
    def _warn_of_many_channels(inputs: Inputs, where: str) -> None:
        """Logs a warning if series look like greyscale images without an axis of channels."""
        _, steps, channels = inputs.shape if inputs.ndim == 3 else (0, 0, 0)
        if channels >= 8 and (inputs.dtype == np.uint8 or steps == channels):
            warn_once(f'{where}: inputs of shape {inputs.shape} are read as series of {steps} steps with {channels} '
                      'channels. If they are greyscale images, add the axis of channels: inputs[..., None]')

    def _require_values(self, train: Examples) -> None:
        """Raises UserError if a channel of the training series has no values, because it would have no mean."""
        absent = np.isnan(train.inputs).all(axis=(0, 1))
        if absent.any():
            channel = int(absent.argmax())
            files = ', provide files for validation' if self.parts.is_part('train') else ''
            raise UserError(f'{train.where}: channel {train.channels[channel] if train.channels else channel!r} has no '
                            f'values. Add data{files}, or remove the channel')

    def _require_like_training(self, examples: Examples) -> None:
        """Raises UserError if examples of a split differ in shape, dtype or classes from the training examples."""
        train, inputs, targets, where = self._split('train'), examples.inputs, examples.targets, examples.where
        if inputs.shape[1:] != train.inputs.shape[1:]:
            raise UserError(f'{where}: inputs are {inputs.dtype} {inputs.shape[1:]}, but in the training split they '
                            f'are {train.inputs.dtype} {train.inputs.shape[1:]}. Use the same type and shape')
        if targets.shape[1:] != train.targets.shape[1:]:
            raise UserError(f'{where}: the targets have the shape {targets.shape}, but in the training split they have '
                            f'the shape {train.targets.shape}. Each example must have the same number of values')
        if self.classes and targets.max() >= len(self.classes):
            raise UserError(f'{where}: {examples.named(targets.argmax())} has class {targets.max()}, but the classes '
                            f'of the training split are 0 to {len(self.classes) - 1}. Correct the targets')
        self.preprocessing.check_targets(targets, f'{where}: targets')


def open_arrays(data: ConfigDict, labelled: bool, multiple: int) -> ArrayData:
    """Opens the data set that `config.data` describes. `multiple` is explained in `ArrayData`.

    The targets are classes if `labelled` is True, and values otherwise. `labelled` follows from the task, not from the
    type of the targets.

    Raises:
      UserError: if there is no such source, folder or dataset.
    """
    return source_of(data, SOURCES)(data, labelled, multiple)


def open_files(data: ConfigDict, labelled: bool, multiple: int) -> ArrayData:
    """Opens a folder of files; input_pipeline/array_files.py describes the formats."""
    load, parts, has_file = open_folder(expanded(data['dir']), dict(data['splits']), data['validation_share'],
                                        data['image_size'], missing := data['missing'] == 'mean')
    return ArrayData(load, labelled, parts=parts, has_file=has_file, missing=missing, multiple=multiple)


def open_builtin(data: ConfigDict, labelled: bool, multiple: int) -> ArrayData:
    """Opens scikit-learn's digits, or series made by input_pipeline/dynamics.py."""
    name = data['name']
    splits = BUILTIN[name](data['seed'])
    return ArrayData(lambda split: Examples(*splits[split], f'{name} ({split})'), labelled,
                     list(dynamics.SYSTEMS) if name == 'dynamics' else None)


def digits(seed: int) -> dict[str, tuple[Inputs, Targets]]:
    """Returns 1,797 handwritten digits of 8 x 8 pixels in stratified splits (1,297 train, 200 validation, 300 test)."""
    # This is the file of sklearn.datasets.load_digits. It is read directly, because importing sklearn takes 1 s of
    # processor time at each start.
    package = importlib.util.find_spec('sklearn')
    assert package and package.origin, 'scikit-learn is a dependency'
    folder = Path(package.origin).parent
    with gzip.open(folder / 'datasets/data/digits.csv.gz', 'rt') as lines:
        pixels, labels = np.split(np.loadtxt(lines, delimiter=',', dtype=np.int32), [64], axis=1)
    images = np.round(pixels.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)  # the original values are 0..16
    labels = labels[:, 0]
    # The examples are shuffled. Then each class is spread evenly over all places, so that every slice is stratified.
    order = np.random.default_rng(seed).permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    order = order[np.argsort(place[order], kind='stable')]
    test, validation, train = np.split(order, [300, 500])
    return {split: (images[members], labels[members])
            for split, members in (('train', train), ('validation', validation), ('test', test))}


def open_tfds_images(data: ConfigDict, labelled: bool, multiple: int) -> ArrayData:
    """Opens a TensorFlow Datasets dataset, such as mnist, with images of the same size and one label per image."""
    name, names = data['name'], dict(data['splits'])
    dataset = Dataset(name, data['dir'], names, ('image', 'label'), 'config.task')
    image, label = (dataset.info.features[feature] for feature in ('image', 'label'))
    if None in image.shape or not getattr(label, 'names', None):
        raise UserError(f'config.data.name={name}: the dataset has images of shape {image.shape} and the label '
                        f'{label}. All images must have the same size, and the label must be a ClassLabel')

    def load(split: str) -> Examples:
        records = list(dataset.records(split))
        images = np.stack([record['image'] for record in records]) if records else np.empty((0, *image.shape))
        return Examples(images, np.array([record['label'] for record in records], np.int32), f'{name} {names[split]}')

    return ArrayData(load, labelled, list(label.names))


# Built-in data sets: the value of config.data.name -> the function that makes the splits from a seed.
BUILTIN = {'digits': digits, 'dynamics': dynamics.make_dynamics, 'pendulum': dynamics.make_pendulum}

# Sources of examples: the value of config.data.source -> the function that opens the source.
SOURCES: Mapping[str, Callable[[ConfigDict, bool, int], ArrayData]] = {
    'builtin': open_builtin, 'files': open_files, 'tfds': open_tfds_images}
