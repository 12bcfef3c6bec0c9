"""Standardises images, series and target values, and defines which bytes identify an example."""

import dataclasses

import numpy as np
from jaxtyping import Float, Num

from runtime.errors import UserError

# Models square their inputs, and the maximum of float32 is 3.4e38. So the distance of a number from the mean may be at
# most FARTHEST standard deviations. A mean or a standard deviation may be at most LARGEST_SCALE. The product of
# FARTHEST and LARGEST_SCALE is below the maximum of float32.
FARTHEST = 1e12
LARGEST_SCALE = 1e26
ROUNDING = 1e-5  # relative to the range of a channel; float32 rounds ordinary measurements by less
PIECE = 2 ** 16  # the number of values of a channel that are compared at a time
SMALLEST_STD = float(np.finfo(np.float32).tiny)  # smaller numbers lose digits in float32, or become 0

Inputs = Num[np.ndarray, 'examples *space channels']
Targets = Num[np.ndarray, 'examples *values']


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Standardisation of a model's inputs and targets, (raw - mean) / std, and its inverse for the outputs.

    `dataclasses.asdict` converts the object to JSON, and `Preprocessing(**json)` restores the object. All statistics
    are computed from the training split.

    Attributes:
      input_mean: the mean of each input channel.
      input_std: the standard deviation of each input channel.
      target_mean: the mean of each target value; None if the targets are classes.
      target_std: the standard deviation of each target value; None if the targets are classes.
    """
    input_mean: list[float]
    input_std: list[float]
    target_mean: list[float] | None
    target_std: list[float] | None

    def inputs(self, raw: Inputs) -> Float[np.ndarray, 'examples *space channels']:
        """Returns the standardised inputs in float32. These are the inputs of the model.

        A missing value (NaN) becomes 0, the mean of the channel.
        """
        result = _standardised(raw, self.input_mean, self.input_std)
        return np.nan_to_num(result, copy=False) if has_missing(raw) else result

    def check_inputs(self, raw: Inputs, where: str) -> None:
        """Checks that the standardised inputs are small enough for the model.

        Raises:
          UserError: if an input is too large. The message begins with `where`.
        """
        _check_distance(raw, self.input_mean, self.input_std, where)

    def check_targets(self, raw: Targets, where: str) -> None:
        """Checks that the standardised targets are small enough for the model. Raises the errors of `check_inputs`."""
        if self.target_mean is not None and self.target_std is not None:
            _check_distance(raw, self.target_mean, self.target_std, where)

    def targets(self, raw: Targets) -> Targets:
        """Returns the targets that the model learns: classes unchanged, values standardised, in float32."""
        if self.target_mean is None or self.target_std is None:
            return raw
        return _standardised(raw, self.target_mean, self.target_std)

    def values(self, outputs: Float[np.ndarray, 'examples values']) -> Float[np.ndarray, 'examples values']:
        """Converts the outputs of a regression model to the units of the raw targets."""
        assert self.target_mean is not None and self.target_std is not None, 'classes are not values'
        return outputs * np.array(self.target_std, np.float64) + np.array(self.target_mean, np.float64)


def _standardised(raw: Num[np.ndarray, '*batch channels'], mean: list[float],
                  std: list[float]) -> Float[np.ndarray, '*batch channels']:
    """Returns (raw - mean) / std in float32.

    The computation is in float64, because float32 loses small differences between large values. Images of bytes are an
    exception: computing in float32 gives the same bits in two thirds of the time.
    """
    dtype = np.float32 if is_byte_images(raw) else np.float64
    result = np.subtract(raw, np.array(mean, dtype), dtype=dtype)
    result /= np.array(std, dtype)
    return result.astype(np.float32, copy=False)


def is_byte_images(inputs: Inputs) -> bool:
    """Returns whether inputs are images of unsigned bytes. Series of unsigned bytes are treated like other series."""
    return inputs.ndim == 4 and inputs.dtype == np.uint8


def has_missing(array: Num[np.ndarray, '*axes']) -> bool:
    """Returns whether values are missing (NaN)."""
    return array.dtype.kind == 'f' and bool(np.isnan(np.min(array, initial=0)))


def recorded(array: Num[np.ndarray, '*batch channels']) -> Num[np.ndarray, '*batch channels']:
    """Converts examples to the dtype whose bytes identify an example.

    Fingerprints and the choice of held-out examples depend on these bytes. Unsigned bytes are unchanged. Other numbers
    become float32, as in all earlier versions, so that earlier runs can be resumed. If float32 would round the numbers
    of a channel by more than ROUNDING of the channel's range, all numbers become float64, because different examples
    could be equal in float32. Missing values remain NaN.
    """
    if array.dtype == np.uint8:
        return array
    if not np.can_cast(array.dtype, np.float32):
        numbers = array.reshape(-1, array.shape[-1])
        pieces = (numbers[begin:begin + PIECE] for begin in range(0, len(numbers), PIECE))
        # Missing values are NaN. fmin and fmax ignore NaN.
        error = np.fmax.reduce([np.fmax.reduce(np.abs(np.subtract(piece, piece.astype(np.float32), dtype=np.float64)))
                                for piece in pieces])
        spread = np.fmax.reduce(numbers).astype(np.float64) - np.fmin.reduce(numbers)
        if (error > ROUNDING * spread)[spread > 0].any():
            return array.astype(np.float64)
    return array.astype(np.float32)


def mean_and_std(array: Num[np.ndarray, '*batch channels'], where: str) -> tuple[list[float], list[float]]:
    """Returns the mean and the standard deviation of each channel, over all other axes.

    The mean of a constant channel is exactly its value. A standard deviation that is 0 or too small for float32 is
    replaced by 1.

    Raises:
      UserError: if a mean or a standard deviation is too large. The message begins with `where`.
    """
    flat = array.reshape(-1, array.shape[-1])
    mean, std = flat.mean(axis=0, dtype=np.float64), flat.std(axis=0, dtype=np.float64)
    if has_missing(array):
        mean, std = (np.asarray(function(flat, axis=0, dtype=np.float64)) for function in (np.nanmean, np.nanstd))
    # Computed means have rounding errors, so the deviation of a channel that is always 0.1 would not be 0.
    low, high = (end.reduce(flat).astype(np.float64) for end in (np.fmin, np.fmax))  # ignore NaN
    mean, std = np.where(low == high, low, mean), np.where(low == high, 0, std)
    wrong = np.maximum(np.abs(mean), std) > LARGEST_SCALE
    if wrong.any():
        channel = int(wrong.argmax())
        raise UserError(f'{where} are too large: index {channel} of the last axis has the mean {mean[channel]:.3g} and '
                        f'the standard deviation {std[channel]:.3g}. At most {LARGEST_SCALE:.0e} is allowed. Use a '
                        'larger unit')
    return mean.tolist(), np.where(std >= SMALLEST_STD, std, 1).tolist()


def _check_distance(array: Num[np.ndarray, '*batch channels'], mean: list[float], std: list[float], where: str) -> None:
    """Raises UserError if a number is too far from its channel's mean."""
    if not array.size:
        return
    flat = array.reshape(-1, array.shape[-1])
    ends = np.stack([np.fmin.reduce(flat), np.fmax.reduce(flat)]).astype(np.float64)  # ignore NaN
    far = np.nan_to_num(np.abs(ends - mean) / std, posinf=np.inf)
    if far.max() > FARTHEST:
        end, channel = np.unravel_index(far.argmax(), far.shape)
        raise UserError(f'{where} cannot be standardised: index {channel} of the last axis has a value of '
                        f'{ends[end, channel]:.3g}, but in the training split its mean is {mean[channel]:.3g} and its '
                        f'standard deviation {std[channel]:.3g}. The distance from the mean must be at most '
                        f'{FARTHEST:.0e} standard deviations')
