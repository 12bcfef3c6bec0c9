"""The examples of one split of images or series, and warnings about splits from which a model cannot learn well."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Num

from input_pipeline.input_format import is_name
from input_pipeline.splits import key
from runtime.errors import first_names
from runtime.once import warn_once

MAX_NAMES = 5  # largest number of names in a message


class Examples(NamedTuple):
    """The examples of one split, before preprocessing.

    Attributes:
      inputs: the raw inputs [n, *space, channels].
      targets: classes [n] or their names [n], or values [n] or [n, values].
      where: the name of the split in messages.
      groups: the name of the group of each example [n]. All examples of a group are in the same split.
      channels: the names of the channels; () if they have no names.
      values: the names of the target values; () if they have no names.
      places: the place of each example in the files, such as a file name; () if only the index is known.
      resized: whether images were scaled to one size.
      keys: a hash of each image before it was scaled; () for other examples.
      padded: whether series have different lengths. If so, shorter series end with steps of NaN.
      rows: the index of each example in the file; None if the split has all examples of the file.
    """
    inputs: np.ndarray
    targets: np.ndarray
    where: str
    groups: np.ndarray | None = None
    channels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    resized: bool = False
    keys: Sequence[int] = ()
    padded: bool = False
    rows: np.ndarray | None = None

    @property
    def names(self) -> Sequence[str]:
        """The place of each example, or its index in the file if the places are unknown."""
        return self.places or list(map(str, range(len(self.inputs)) if self.rows is None else self.rows))

    def named(self, index: int | np.integer) -> str:
        """Returns the name of an example in messages."""
        if not self.places:
            return f'example {index}'
        place = self.places[index]
        return f'example {index} ({place if is_name(place) else repr(place)})'

    def part(self, members: slice | np.ndarray, where: str) -> 'Examples':
        """Returns the examples that the slice or boolean array `members` selects. `where` names them in messages."""
        indices = np.arange(len(self.inputs))[members]
        return self._replace(inputs=self.inputs[members], targets=self.targets[members], where=where,
                             groups=None if self.groups is None else self.groups[members],
                             places=tuple(self.places[index] for index in indices) if self.places else (), keys=(),
                             rows=indices)


def warn_of_classes(targets: Int[np.ndarray, ' examples'], classes: list[str], where: str) -> None:
    """Logs a warning if the training examples do not suffice to learn the classes.

    This is the case if all examples have the same class, if a class has no examples, or if most classes have only one
    example.
    """
    counts = np.bincount(targets, minlength=len(classes))
    present = counts > 0
    if present.sum() == 1:
        warn_once(f'{where}: all {len(targets)} examples have the class {classes[int(present.argmax())]!r}. A model '
                  'cannot learn to distinguish classes from these data')
    if not present.all():
        warn_once(f'{where}: {np.sum(~present)} of {len(classes)} classes have no training examples: '
                  f'{first_names([*itertools.compress(classes, ~present)], MAX_NAMES)}. Number the classes 0, 1, 2, '
                  '... without gaps, or use names as targets')
    if np.sum(counts == 1) > len(classes) / 2 and len(classes) > 2:
        warn_once(f'{where}: {np.sum(counts == 1)} of {len(classes)} classes have only one example: '
                  f'{first_names([*itertools.compress(classes, counts == 1)], MAX_NAMES)}. Check that the targets are '
                  'classes')


def warn_of_shared(examples: Examples, training: Examples, inputs: Num[np.ndarray, 'examples *shape'],
                   training_inputs: Num[np.ndarray, 'others *shape']) -> None:
    """Logs a warning if examples or groups of a split are also in the training split.

    `inputs` and `training_inputs` are the inputs of `examples` and `training`, in the same dtype.
    """
    known = {key(np.ascontiguousarray(example).tobytes()) for example in training_inputs}
    shared = [key(np.ascontiguousarray(example).tobytes()) in known for example in inputs]
    if any(shared):
        warn_once(f'{examples.where}: {sum(shared)} of {len(shared)} examples are also in the training data, such as '
                  f'{examples.named(shared.index(True))}. Their scores do not show how well the model predicts new '
                  'examples')
    if examples.groups is not None and training.groups is not None and (
            groups := sorted({*examples.groups} & {*training.groups})):
        warn_once(f'{examples.where}: {len(groups)} of {len({*examples.groups})} groups are also in the training data, '
                  f'such as {str(groups[0])!r}. Scores on these groups do not show how well the model predicts new '
                  'groups')
