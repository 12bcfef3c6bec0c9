"""The format of the inputs of a model of images or series. A run stores the format, to check new inputs."""

import dataclasses
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Num, Shaped

from input_pipeline.preprocessing import Preprocessing
from runtime.errors import UserError
from runtime.once import warn_once

FLOAT32_END = 2.0 ** 128 - 2.0 ** 103  # the smallest number that float32 rounds to infinity

# The ends of messages about missing values of series.
USE_MEAN = '. To train with missing values, set config.data.missing=mean'
FILL_GAPS = '. Forecasting needs every value: fill the gaps'

EXAMPLE = 'example {}'.format  # returns the name of the example with a given index, for messages

# Encodings of images: bytes 0..255 (in any dtype), bytes divided by 255, and other numbers. Series are NUMBERS.
BYTES, UNIT, NUMBERS = 'bytes', 'unit', 'numbers'
ENCODINGS = (BYTES, UNIT, NUMBERS)
MEANINGS = {BYTES: 'bytes (0 to 255)', UNIT: 'bytes divided by 255 (0 to 1)'}
EXACT = 0.01  # maximum distance of a byte from a whole number; float32 rounding of bytes / 255 causes less


@dataclasses.dataclass(frozen=True)
class InputFormat:
    """The format of the inputs of a model of images or series, and the names of its outputs.

    Attributes:
      shape: the shape of one input, [*space, channels].
      preprocessing: the standardisation of inputs and targets.
      classes: the names of the classes; None if the targets are values.
      targets: the names of the values; () if the targets are classes.
      channels: the names of the columns of a table of series; () for other data.
      dtype: the dtype of the training inputs; '' in runs of earlier versions.
      encoding: the encoding of the training inputs, one of ENCODINGS.
      low: the smallest training input of each channel; () in runs of earlier versions.
      high: the largest training input of each channel.
      resized: whether images from files are scaled to `shape`.
      padded: whether series may be shorter than `shape`. Shorter series end with steps of NaN.
      missing: whether values of series may be missing (NaN).
      latest: whether the model reads only the last steps of longer series, as in forecasting.
    """
    shape: tuple[int, ...]
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None
    targets: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    dtype: str = ''
    encoding: str = NUMBERS
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    resized: bool = False
    padded: bool = False
    missing: bool = False
    latest: bool = False

    @property
    def masked(self) -> bool:
        """Whether the model gets a mask of the steps that have values."""
        return self.padded or self.missing

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names of the values; () if they have no names. Then `targets` are the numbers '0', '1', ..."""
        return () if self.targets == tuple(map(str, range(len(self.targets)))) else self.targets

    def arguments(self, raw: Num[np.ndarray, 'examples *space channels']) -> dict[str, np.ndarray]:
        """Returns the arguments of the model by name. `raw` is a result of `prepare`.

        The arguments are 'inputs' and, if the model gets a mask, 'visible'.
        """
        return {'inputs': self.preprocessing.inputs(raw)} | ({'visible': visible_steps(raw)} if self.masked else {})

    @classmethod
    def of(cls, sizes: Mapping[str, Any]) -> 'InputFormat':
        """Returns the input format in `sizes`, the content of a run's sizes.json.

        Runs of earlier versions have no entry 'inputs' in this file.
        """
        preprocessing, classes = Preprocessing(**sizes['preprocessing']), sizes['classes']
        shape, inputs = tuple(sizes['shape']), sizes.get('inputs')
        if inputs is None:
            scale = [127.5] * shape[-1]  # earlier versions scaled only images of unsigned bytes like this
            is_bytes = len(shape) == 3 and preprocessing.input_mean == preprocessing.input_std == scale
            inputs = {'dtype': 'uint8', 'encoding': BYTES} if is_bytes else {}
        names = () if classes is not None else sizes.get('targets') or map(str, range(sizes['outputs']))
        entries: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                                   for name, value in inputs.items()}
        return cls(shape, preprocessing, None if classes is None else tuple(classes), tuple(names), **entries)

    def prepare(self, inputs: Shaped[np.ndarray, '...'] | Sequence, where: str = 'inputs',
                named: Callable[[int], str] = EXAMPLE) -> Num[np.ndarray, 'examples *space channels']:
        """Returns raw inputs in the encoding of the training inputs.

        If the training images were bytes, images of bytes divided by 255 are converted to bytes, and vice versa. This
        conversion is exact.

        Args:
          inputs: the inputs [n, *shape], as an array or as nested lists. If the model was trained on series of
            different lengths or with missing values, the series may be shorter, and values may be NaN.
          where: the name of the inputs in messages.
          named: a function that returns the name of an example in messages from its index.

        Raises:
          UserError: if the inputs have another shape or are not finite numbers. Also if images have another encoding,
            or are far outside the range of the training images.
        """
        if self.latest:
            inputs = latest_steps(inputs, self.shape[0], where, named)
        if self.masked:
            array = pad_series(inputs, self.shape, where, named)
            check_series(array, where, self.missing, named)
        else:
            array = as_inputs(inputs, self.shape, where, FILL_GAPS if self.latest else USE_MEAN, named)
        if array.size and self.encoding != NUMBERS:
            array = self._as_bytes(array, where, named)
        self.preprocessing.check_inputs(array, where)
        if array.size and self.encoding == NUMBERS and self.low:
            self._check_range(array, where, named)
        return array

    def _as_bytes(self, array: Num[np.ndarray, '*axes'], where: str,
                  named: Callable[[int], str]) -> Num[np.ndarray, '*axes']:
        """Converts images of bytes, or of bytes divided by 255, to the encoding and the dtype of the training images.

        Raises:
          UserError: if a value is not a byte in one of the two encodings, or the encoding is ambiguous.
        """
        if self.encoding == BYTES and array.dtype == np.uint8 == np.dtype(self.dtype):
            return array
        floats = array.dtype.kind == 'f'
        if floats and array.max() == 1 and self.encoding == BYTES and np.isin(array, (0, 1)).all():
            raise UserError(f'{where} have the type {array.dtype} and only the values 0 and 1. The model was trained '
                            f'on images of {MEANINGS[BYTES]}, so the value 1 is ambiguous: it may stand for 1 or 255. '
                            'Convert the images to uint8')
        scale = 255 if floats and array.max() <= 1 else 1
        numbers = np.round(array.astype(np.float64) * scale)
        wrong = (np.abs(array.astype(np.float64) * scale - numbers) > EXACT) | (numbers < 0) | (numbers > 255)
        if wrong.any():
            index = int(wrong.reshape(len(wrong), -1).any(axis=1).argmax())
            value = array[index][wrong[index]][0]
            raise UserError(f'{where}: value {value:g} of {named(index)} is neither a byte (0 to 255) nor a byte '
                            f'divided by 255, but the model was trained on images of {MEANINGS[self.encoding]}. '
                            'Convert the images to uint8')
        if self.encoding == UNIT:
            return array if scale == 255 else (numbers / 255).astype(self.dtype)
        return numbers.astype(self.dtype)

    def _check_range(self, array: Num[np.ndarray, '*axes'], where: str, named: Callable[[int], str]) -> None:
        """Checks that inputs are near the range of the training inputs.

        An input may be outside of the range by at most the width of the range.

        Raises:
          UserError: if an image is farther outside. For series, a warning is logged, because measurements may be large.
        """
        low, high = np.array(self.low), np.array(self.high)
        margin = high - low
        outside = ((array < low - margin) | (array > high + margin)) & (margin > 0)
        if not outside.any():
            return
        example, *place = np.argwhere(outside)[0]
        channel, value = place[-1], array[(example, *place)]
        examples = int(outside.reshape(len(array), -1).any(axis=1).sum())
        name = repr(self.channels[channel]) if self.channels else channel
        message = (f'{where}: {examples} of {len(array)} examples are far outside the range of the training data, such '
                   f'as value {value:g} in channel {name} of {named(int(example))}. In training, this channel was '
                   f'{low[channel]:g} to {high[channel]:g}')
        if len(self.shape) == 3:
            raise UserError(f'{message}. Use the scale of the training images, which have the type {self.dtype}')
        warn_once(f'{message}. The predictions may be wrong')


def described_inputs(inputs: Num[np.ndarray, 'examples *space channels'],
                     channels: Sequence[str] = (), **more: bool) -> dict[str, Any]:
    """Returns the entry 'inputs' of sizes.json: the dtype, the encoding and the range of the training inputs.

    `more` are further items of the entry, such as padded=True.
    """
    flat = inputs.reshape(-1, inputs.shape[-1])
    low, high = np.fmin.reduce(flat), np.fmax.reduce(flat)  # ignore NaN
    encoding = NUMBERS
    if inputs.ndim == 4 and low.min() >= 0 and high.max() <= 255:
        scale = 255 if high.max() <= 1 and inputs.dtype != np.uint8 else 1
        # Numbers that are only 0 or 1 could have either encoding.
        if inputs.dtype == np.uint8 or all(_are_bytes(image, scale) for image in inputs) and (
                scale == 1 or not np.isin(inputs, (0, 1)).all()):
            encoding = UNIT if scale == 255 else BYTES
    return {'dtype': str(inputs.dtype), 'encoding': encoding, 'low': low.astype(float).tolist(),
            'high': high.astype(float).tolist(), 'channels': list(channels), **more}


def _are_bytes(image: Num[np.ndarray, '*axes'], scale: int) -> bool:
    numbers = image.astype(np.float64) * scale
    return bool((np.abs(numbers - np.round(numbers)) <= EXACT).all())


def visible_steps(series: Num[np.ndarray, 'examples time channels']) -> Bool[np.ndarray, 'examples time']:
    """Returns True for each step in which at least one channel has a value. In all other steps, all values are NaN."""
    return np.logical_not(np.isnan(series).all(axis=-1))


def steps_before_padding(series: Num[np.ndarray, 'examples time channels']) -> Bool[np.ndarray, 'examples time']:
    """Returns True for each step up to the last step with a value. All later steps are padding."""
    return np.maximum.accumulate(visible_steps(series)[:, ::-1], axis=1)[:, ::-1]


def pad_series(inputs: Shaped[np.ndarray, '...'] | Sequence, shape: tuple[int, ...], where: str,
               named: Callable[[int], str] = EXAMPLE) -> Num[np.ndarray, 'examples time channels']:
    """Returns series of different lengths as one array. Shorter series end with steps of NaN.

    `where` is the name of the inputs in messages, and `named` returns the name of an example from its index.

    Raises:
      UserError: if a series is longer than `shape`, has another number of channels, or does not contain numbers. Steps
        of NaN at the end do not count as steps.
    """
    series = _as_arrays(inputs, where)
    if not np.iterable(inputs) or series and all(array.ndim != 2 for array in series):
        return as_inputs(inputs, shape, where)  # reports the shape
    padded = np.full((len(series), *shape), np.nan)
    for index, array in enumerate(series):
        _check_type(array, where)
        if array.ndim == 2:
            array = array[:max(shape[0], steps_before_padding(array[None]).sum())]
        wrong_form = array.ndim != 2 or array.shape[1] != shape[1]
        if wrong_form or len(array) > shape[0]:
            advice = 'Use series of this form' if wrong_form else 'Shorten the series, or add a longer training series'
            raise UserError(f'{where}: {named(index)} has the shape {array.shape}, but the model reads series of at '
                            f'most {shape[0]} steps with {shape[1]} channels. {advice}')
        padded[index, :len(array)] = array
    return padded


def latest_steps(inputs: Shaped[np.ndarray, '...'] | Sequence, steps: int, where: str,
                 named: Callable[[int], str] = EXAMPLE) -> Shaped[np.ndarray, '...'] | Sequence:
    """Returns the last `steps` steps of each series [time, channels].

    Inputs with another number of axes are unchanged, so that `as_inputs` reports their shape.

    Raises:
      UserError: if a series has fewer steps.
    """
    series = _as_arrays(inputs, where)
    if not series or any(values.ndim != 2 for values in series):
        return inputs
    for index, values in enumerate(series):
        if len(values) < steps:
            raise UserError(f'{where}: {named(index)} has {len(values)} steps, but a forecast is based on the last '
                            f'{steps} steps (config.data.context of the run). Add steps, or remove the series')
    return [values[-steps:] for values in series]


def _as_arrays(examples: Shaped[np.ndarray, '...'] | Sequence, where: str) -> list[Shaped[np.ndarray, '...']]:
    """Returns each example as an array, because series may have different lengths. A number has no examples.

    Raises:
      UserError: if an example is not an array.
    """
    arrays = []
    for index, example in enumerate(examples if np.iterable(examples) else ()):
        try:
            arrays.append(np.asarray(example))
        except (TypeError, ValueError) as error:  # lists of different lengths
            raise UserError(f'{where}: example {index} is not an array: {error}') from None
    return arrays


def check_series(series: Num[np.ndarray, 'examples time channels'], where: str, missing: bool,
                 named: Callable[[int], str] = EXAMPLE) -> None:
    """Checks the values of series. NaN is allowed at the end, as padding, and elsewhere only if `missing` is True.

    `where` is the name of the inputs in messages, and `named` returns the name of an example from its index.

    Raises:
      UserError: if NaN is not allowed at its position, a value is infinite or too large, or a series has no values.
    """
    absent, within = np.isnan(series), steps_before_padding(series)
    check_numbers(np.where(absent & (missing | ~within[..., None]), 0, series), where, named=named)
    empty = ~within.any(axis=1)
    if empty.any():
        raise UserError(f'{where}: {named(int(empty.argmax()))} has no values. Remove the example')


def is_name(value: Any) -> bool:
    """Returns whether `value` is text without control characters, line ends or lone surrogates."""
    return isinstance(value, str) and all(
        unicodedata.category(character) not in ('Cc', 'Cs', 'Zl', 'Zp') for character in value)


def as_inputs(inputs: Shaped[np.ndarray, '...'] | Sequence, shape: tuple[int, ...], where: str, hint: str = USE_MEAN,
              named: Callable[[int], str] = EXAMPLE) -> Num[np.ndarray, 'examples *space channels']:
    """Returns `inputs` as an array of examples.

    Args:
      inputs: the examples, as an array or as nested lists.
      shape: the shape of one example, [*space, channels], that the model reads.
      where: the name of the inputs in error messages.
      hint: the end of a message about missing values of series.
      named: a function that returns the name of an example in messages from its index.

    Raises:
      UserError: if the examples have another shape, or contain values that are not finite numbers.
    """
    try:
        array = np.asarray(inputs)
    except (TypeError, ValueError) as error:  # lists of different lengths
        raise UserError(f'{where} are not an array: {error}') from None
    if array.shape[1:] != shape or not array.ndim:
        hint = ''
        if array.ndim == len(shape) and array.shape[-1] == shape[-1]:  # a series may have another number of steps
            hint = '. A single example needs an axis of examples: inputs[None]'
        elif (*array.shape[1:], 1) == shape:
            what = 'Greyscale images' if len(shape) == 3 else 'Series of one channel'
            hint = f'. {what} need an axis of channels: inputs[..., None]'
        raise UserError(f'{where} have the shape {array.shape}, but the model reads [n, {", ".join(map(str, shape))}]'
                        f'{hint}')
    check_numbers(array, where, hint, named)
    return array


def check_numbers(array: Shaped[np.ndarray, '*axes'], where: str, hint: str = USE_MEAN,
                  named: Callable[[int], str] = EXAMPLE) -> None:
    """Checks that all values are numbers and are finite in float32, the type that models use.

    `hint` is the end of a message about missing values of series. `named` returns the name of an example in messages
    from its index.

    Raises:
      UserError: if a value is not a finite number. The message begins with `where` and contains the name of the
        example.
    """
    _check_type(array, where)
    # Computing minimum and maximum needs no copy of the array. Both are NaN if a value is NaN, and NaN < FLOAT32_END
    # is False.
    if array.size and not max(-float(array.min()), float(array.max())) < FLOAT32_END:
        example, value = _first(array, ~(np.abs(array) < FLOAT32_END))
        missing = array.ndim == 3 and value != value
        if missing and (steps := _steps_before_padding(array[example])):
            raise UserError(f'{where}: {named(example)} has values in only {steps} of {array.shape[1]} steps. Use '
                            f'series of {array.shape[1]} steps{hint}')
        raise UserError(f'{where} must be finite numbers below 3.4e38, the maximum of float32, but {named(example)} '
                        f'contains {value}. Their type is {array.dtype}{hint if missing else ""}')


def _check_type(array: Shaped[np.ndarray, '*axes'], where: str) -> None:
    """Raises UserError if the type of an array is not an integer or float type."""
    if array.dtype.kind not in 'uif':
        first = f', such as {np.ravel(array)[0]!r:.100}' if array.size else ''
        raise UserError(f'{where} must be finite numbers, but their type is {array.dtype}{first}. Convert them to '
                        'float32')


def _steps_before_padding(series: Shaped[np.ndarray, 'time channels']) -> int:
    """Returns the length of a shorter series, which ends with steps of NaN. Returns 0 if values before them are NaN."""
    absent = np.isnan(series)
    steps = len(series) - int(absent.all(axis=-1).sum())
    return 0 if absent[:steps].any() else steps


def _first(array: Shaped[np.ndarray, '*axes'], wrong: Bool[np.ndarray, '*axes']) -> tuple[int, Any]:
    """Returns the index of the first example with a wrong value, and this value."""
    index = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return (int(index[0]) if index else 0), array[index]
