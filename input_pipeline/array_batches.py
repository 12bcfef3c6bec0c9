"""Batches of images and series, with augmentation."""

import functools

import numpy as np
from jaxtyping import Float, Int

from input_pipeline.arrays import ArrayData
from input_pipeline.batches import ALL, Batch, Part
from input_pipeline.input_format import visible_steps
from input_pipeline.preprocessing import Inputs, Preprocessing, Targets
from runtime.errors import UserError


class ArrayPlan:
    """Batches of examples with augmentation, one batch for every step from 0 on.

    Every epoch contains every example exactly once. `len(plan)` is the number of batches in an epoch. The last batch of
    an epoch is padded with rows of weight 0.
    """

    def __init__(self, data: ArrayData, split: str, *, rows: int, seed: int | None, crop: int = 0, flip: bool = False,
                 mixup: float = 0.0, preprocessing: Preprocessing | None = None, following: bool = False):
        """Plans every epoch.

        Args:
          data: the data set.
          split: 'train', 'validation' or 'test'.
          rows: config.batch.rows.
          seed: the seed of the order and of the augmentation. None keeps the order of the examples, for evaluation.
          crop: config.data.crop, in pixels. Images are padded with `crop` zeros on each side, then cropped at random to
            the original size. So an image moves by at most `crop` pixels.
          flip: config.data.flip.
          mixup: config.data.mixup.
          preprocessing: the preprocessing of a resumed run. None uses the preprocessing of `data`.
          following: whether the model also gets the targets as an input, for teacher forcing. The name of this input is
            'following', and its shape is [n, horizon, channels].

        Raises:
          UserError: if `crop` or `flip` is not possible for the inputs.
        """
        self._inputs, self._targets = data.inputs(split), data.targets(split)
        if (crop or flip) and self._inputs.ndim != 4:
            raise UserError(f'config.data.crop={crop} and flip={flip} are for images, but the inputs are series of '
                            f'shape {self._inputs.shape}. If they are greyscale images, add the axis of channels: '
                            'inputs[..., None]. Otherwise set crop=0 and flip=False')
        if crop >= min(self._inputs.shape[1:3]):  # the largest shift would remove the whole image
            raise UserError(f'config.data.crop={crop}: must be below the height and the width of the images, '
                            f'{" x ".join(map(str, self._inputs.shape[1:3]))} pixels')
        self.rows = [rows]
        self._preprocessing, self._split = preprocessing or data.preprocessing, split
        self._masked = data.form.masked
        self._seed, self._crop, self._flip, self._mixup, self._following = seed, crop, flip, mixup, following
        self._epoch = functools.lru_cache(maxsize=2)(self._order)

    def __len__(self) -> int:
        return -(-len(self._targets) // self.rows[0])

    def __call__(self, step: int) -> Int[np.ndarray, ' members']:
        """Returns the indices of the examples in the batch of step `step`."""
        epoch, index = divmod(step, len(self))
        return self._epoch(epoch)[index * self.rows[0]:(index + 1) * self.rows[0]]

    def batch(self, step: int, part: Part = ALL) -> Batch:
        """Returns the batch of step `step`. All batches have the same shape. Padding rows are 0 and have weight 0."""
        rows = part.rows(self.rows[0])
        places = np.arange(len(self(step)))[rows]
        inputs, targets = self._examples(step, places)
        weights = np.ones(len(places), np.float32)
        if self._mixup:
            inputs, targets, weights = self._mixed(step, places, inputs, targets)
        if self._following:
            channels = self._inputs.shape[-1]
            inputs['following'] = targets.reshape(len(places), targets.shape[1] // channels, channels)

        def filled(array, value=0):
            return np.pad(array, [(0, rows.stop - rows.start - len(places))] + [(0, 0)] * (array.ndim - 1),
                          constant_values=value)

        # In rows without an example, all steps are visible, because a mean over no steps would be NaN.
        return {'inputs': {name: filled(array, name == 'visible') for name, array in inputs.items()},
                'targets': filled(targets), 'weights': filled(weights)}

    def _examples(self, step: int, places: Int[np.ndarray, ' places']) -> tuple[dict[str, np.ndarray], Targets]:
        """Returns the augmented inputs and the targets for the rows `places` of batch `step`."""
        members = self(step)[places]
        raw = self._augmented(self._inputs[members], step, places)
        mask = {'visible': visible_steps(raw)} if self._masked else {}
        return ({'inputs': self._preprocessing.inputs(raw), **mask},
                self._preprocessing.targets(self._targets[members]))

    def _mixed(self, step: int, places: Int[np.ndarray, ' places'], inputs: dict[str, np.ndarray], targets: Targets
               ) -> tuple[dict[str, np.ndarray], Int[np.ndarray, 'places 2'], Float[np.ndarray, 'places 2']]:
        """Mixes each example with a random example of the batch: mixup (Zhang et al. 2018, arXiv:1710.09412).

            x = share x_i + (1 - share) x_j,    share ~ Beta(mixup, mixup)

        Here x_i is an example, and a random permutation of the batch gives x_j. An example can be mixed with itself,
        and is then unchanged. As in `_augmented`, random numbers are drawn for the whole batch.

        Returns:
          The mixed inputs, the classes of x_i and x_j, and the weights of these classes: share and 1 - share.
        """
        count = len(self(step))
        rng = np.random.default_rng([self._seed or 0, step, 2])  # the 2 separates this stream from `_augmented`
        partners, shares = rng.permutation(count)[places], rng.beta(self._mixup, self._mixup, count)[places]
        others, other_targets = self._examples(step, partners)
        share = shares.reshape(-1, *[1] * (inputs['inputs'].ndim - 1))
        values = share * inputs['inputs'] + (1 - share) * others['inputs']
        mixed: dict[str, np.ndarray] = {'inputs': values.astype(np.float32)}
        if self._masked:
            mixed['visible'] = inputs['visible'] | others['visible']
        weights = np.stack([shares, 1 - shares], axis=1).astype(np.float32)
        return mixed, np.stack([targets, other_targets], axis=1), weights

    def describe(self) -> str:
        """Returns a description of the batches for the log, in one line."""
        shape = ' x '.join(map(str, self._inputs.shape[1:]))
        padding = 1 - len(self._targets) / (len(self) * self.rows[0])
        return (f'{self._split}: {len(self._targets):,} examples of {shape}; {len(self)} batches of {self.rows[0]} '
                f'per epoch; {100 * padding:.1f} % of the rows are padding')

    def _order(self, epoch: int) -> Int[np.ndarray, ' examples']:
        if self._seed is None:
            return np.arange(len(self._targets))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._targets))

    def _augmented(self, images: Inputs, step: int, places: Int[np.ndarray, ' places']) -> Inputs:
        """Augments `images`, which are the rows `places` of batch `step`.

        Random numbers are drawn for the whole batch, so the result for an image does not depend on `places`.
        """
        if not self._crop and not self._flip:
            return images
        rng = np.random.default_rng([self._seed or 0, step, 1])  # the 1 separates this stream from the epoch's order
        (here, height, width, _), count = images.shape, len(self(step))
        if self._crop:
            border = (self._crop, self._crop)
            padded = np.pad(images, ((0, 0), border, border, (0, 0)))
            top, left = rng.integers(0, 2 * self._crop + 1, (2, count, 1, 1))[:, places]
            images = padded[np.arange(here)[:, None, None], top + np.arange(height)[:, None], left + np.arange(width)]
        if self._flip:
            mirrored = rng.random(count)[places] < 0.5
            images = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
        return images
