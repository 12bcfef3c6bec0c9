"""Standardisation of images, series and values to predict, and the numbers that identify examples."""

import dataclasses

import numpy as np
from jaxtyping import Float, Num

from runtime.errors import UserError

# Models square their inputs, and float32 ends at 3.4e38. So a number may be at most FARTHEST standard deviations from
# the mean, and a mean or a deviation at most LARGEST_SCALE; their product is still a float32.
FARTHEST = 1e12
LARGEST_SCALE = 1e26
ROUNDING = 1e-5  # of the range of a channel: float32 rounds ordinary measurements by less
PIECE = 2 ** 16  # numbers of a channel that are compared at a time
SMALLEST_STD = float(np.finfo(np.float32).tiny)  # below it float32 loses digits, and finally is 0

Inputs = Num[np.ndarray, 'examples *space channels']
Targets = Num[np.ndarray, 'examples *values']


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Standardisation of a model's inputs and targets, (raw - mean) / std, and its inverse for the outputs.

    `dataclasses.asdict` returns it as JSON, and `Preprocessing(**json)` restores it. All statistics are those of the
    training split.

    Attributes:
      input_mean: the mean of each channel.
      input_std: the standard deviation of each channel.
      target_mean: the mean of each value; None for classes.
      target_std: the standard deviation of each value; None for classes.
    """
    input_mean: list[float]
    input_std: list[float]
    target_mean: list[float] | None
    target_std: list[float] | None

    def inputs(self, raw: Inputs) -> Float[np.ndarray, 'examples *space channels']:
        """Returns the standardised inputs in float32, which the model reads."""
        return _standardised(raw, self.input_mean, self.input_std)

    def check_inputs(self, raw: Inputs, where: str) -> None:
        """Checks that the standardised inputs are small enough for the model.

        Raises:
          UserError: if they are not; `where` begins the message.
        """
        _check_distance(raw, self.input_mean, self.input_std, where)

    def check_targets(self, raw: Targets, where: str) -> None:
        """Checks the targets as `check_inputs` checks the inputs."""
        if self.target_mean is not None and self.target_std is not None:
            _check_distance(raw, self.target_mean, self.target_std, where)

    def targets(self, raw: Targets) -> Targets:
        """Returns the targets that the model learns: classes unchanged, values standardised, in float32."""
        if self.target_mean is None or self.target_std is None:
            return raw
        return _standardised(raw, self.target_mean, self.target_std)

    def values(self, outputs: Float[np.ndarray, 'examples values']) -> Float[np.ndarray, 'examples values']:
        """Returns a regression model's outputs in the units of the raw targets: the inverse of `targets`."""
        assert self.target_mean is not None and self.target_std is not None, 'classes are not values'
        return outputs * np.array(self.target_std, np.float64) + np.array(self.target_mean, np.float64)


def _standardised(raw: Num[np.ndarray, '*batch channels'], mean: list[float],
                  std: list[float]) -> Float[np.ndarray, '*batch channels']:
    """Returns (raw - mean) / std in float32, computed in float64: float32 loses the differences of large values.

    For images of bytes float32 gives the same bits in two thirds of the time.
    """
    dtype = np.float32 if is_byte_images(raw) else np.float64
    result = np.subtract(raw, np.array(mean, dtype), dtype=dtype)
    result /= np.array(std, dtype)
    return result.astype(np.float32, copy=False)


def is_byte_images(inputs: Inputs) -> bool:
    """Returns whether inputs are images of unsigned bytes. A series of unsigned bytes is like any other series."""
    return inputs.ndim == 4 and inputs.dtype == np.uint8


def recorded(array: Num[np.ndarray, '*batch channels']) -> Num[np.ndarray, '*batch channels']:
    """Returns the numbers whose bytes identify examples in fingerprints and in the choice of held-out examples.

    Unsigned bytes are unchanged, and other numbers are float32, as in all earlier versions, so that earlier runs
    resume. Numbers that float32 would round by more than ROUNDING of their channel's range are float64, because
    different examples could be equal in float32.
    """
    if array.dtype == np.uint8:
        return array
    if not np.can_cast(array.dtype, np.float32):
        numbers = array.reshape(-1, array.shape[-1])
        pieces = (numbers[begin:begin + PIECE] for begin in range(0, len(numbers), PIECE))
        error = np.max([np.abs(np.subtract(piece, piece.astype(np.float32), dtype=np.float64)).max(axis=0)
                        for piece in pieces], axis=0)
        spread = numbers.max(axis=0).astype(np.float64) - numbers.min(axis=0)
        if (error > ROUNDING * spread)[spread > 0].any():
            return array.astype(np.float64)
    return array.astype(np.float32)


def mean_and_std(array: Num[np.ndarray, '*batch channels'], where: str) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation of each channel, over all other axes.

    A deviation that is too small for float32 is replaced by 1.

    Raises:
      UserError: if a mean or a deviation is too large; `where` begins the message.
    """
    flat = array.reshape(-1, array.shape[-1])
    mean, std = flat.mean(axis=0, dtype=np.float64), flat.std(axis=0, dtype=np.float64)
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
    ends = np.stack([flat.min(axis=0), flat.max(axis=0)]).astype(np.float64)
    far = np.abs(ends - mean) / std
    if far.max() > FARTHEST:
        end, channel = np.unravel_index(far.argmax(), far.shape)
        raise UserError(f'{where} cannot be standardised: index {channel} of the last axis has a value of '
                        f'{ends[end, channel]:.3g}, but in the training split its mean is {mean[channel]:.3g} and its '
                        f'standard deviation {std[channel]:.3g}. At most {FARTHEST:.0e} deviations from the mean are '
                        'allowed')
