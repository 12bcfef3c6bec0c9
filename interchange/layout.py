"""The correspondence of the arrays of two libraries, as bijections: one description serves both directions."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from input_pipeline.foreign_tokenizers import NONE
from runtime.errors import UserError

Shape = tuple[int, ...]


class Way(NamedTuple):
    """A bijection of arrays.

    Attributes:
      ours: from their array to ours.
      theirs: from our array to theirs.
    """
    ours: Callable[[np.ndarray], np.ndarray]
    theirs: Callable[[np.ndarray], np.ndarray]


class Link(NamedTuple):
    """One of their arrays, and our arrays that it consists of, side by side along its last axis.

    Attributes:
      theirs: the name of their array.
      ours: our name -> bijection of each part. All parts have the same width.
    """
    theirs: str
    ours: Mapping[str, Way]


SAME = Way(lambda array: array, lambda array: array)
TRANSPOSED = Way(np.transpose, np.transpose)


def chain(*ways: Way) -> Way:
    """Returns the composition of bijections, in the order in which they are applied to their array."""
    def ours(array):
        for way in ways:
            array = way.ours(array)
        return array

    def theirs(array):
        for way in reversed(ways):
            array = way.theirs(array)
        return array

    return Way(ours, theirs)


def reshaped(theirs: Sequence[int], ours: Sequence[int]) -> Way:
    """Returns the bijection between two shapes of the same numbers; -1 as in `numpy.reshape`."""
    return Way(lambda array: array.reshape(ours), lambda array: array.reshape(theirs))


def reordered(order: Int[np.ndarray, ' n'], axis: int) -> Way:
    """Returns the permutation of an axis whose index i of ours is their index order[i]."""
    back = np.argsort(order)
    return Way(lambda array: np.take(array, order, axis), lambda array: np.take(array, back, axis))


def rows(order: Int[np.ndarray, ' tokens']) -> Way:
    """Returns the bijection of a table with a row for each token; `order` is that of the tokenizer.

    Rows that they do not have are 0. If two of our tokens are the same token of theirs, they get the later row.
    """
    exists = order != NONE

    def ours(array):
        table = np.zeros((len(order), *array.shape[1:]), array.dtype)
        table[exists] = array[order[exists]]
        return table

    def theirs(array):
        table = np.zeros((int(order.max()) + 1, *array.shape[1:]), array.dtype)
        table[order[exists]] = array[exists]
        return table

    return Way(ours, theirs)


def halves(width: int) -> Int[np.ndarray, ' width']:
    """Returns the order that turns their layout, all first elements and then all second ones, into pairs."""
    return np.arange(width).reshape(2, -1).T.reshape(-1)


def check_arrays(links: Sequence[Link], shapes: Mapping[str, Shape], theirs: Mapping[str, Shape],
                 is_derived: Callable[[str], bool]) -> None:
    """Checks that a model of another library has the arrays that `links` need, in the right shapes.

    Args:
      links: of all arrays of our model.
      shapes: of the arrays of our model.
      theirs: the shapes of their arrays.
      is_derived: whether one of their arrays follows from the config or from other arrays. Such an array is ignored.

    Raises:
      UserError: naming an array that is missing, is unknown or has another shape.
    """
    needed = {link.theirs for link in links}
    if missing := sorted(needed - theirs.keys()):
        raise UserError(f'the weights lack {len(missing)} of {len(needed)} arrays, such as {missing[0]}. Use '
                        'config.json and weights of the same model')
    if unknown := sorted(name for name in theirs.keys() - needed if not is_derived(name)):
        raise UserError(f'the weights have {len(unknown)} arrays that this model does not have, such as {unknown[0]}. '
                        'Use config.json and weights of the same model')
    for link in links:
        if (expected := _their_shape(link, shapes)) != theirs[link.theirs]:
            raise UserError(f'the array {link.theirs} has shape {list(theirs[link.theirs])}, but config.json needs '
                            f'{list(expected)}. Use config.json and weights of the same model')


def _their_shape(link: Link, shapes: Mapping[str, Shape]) -> Shape:
    """Returns the shape of their array for our shapes."""
    parts = [way.theirs(np.broadcast_to(np.False_, shapes[name])).shape for name, way in link.ours.items()]
    return (*parts[0][:-1], sum(part[-1] for part in parts))


def to_ours(link: Link, theirs: Float[np.ndarray, '...']) -> dict[str, Float[np.ndarray, '...']]:
    """Returns our arrays of a link. The shape of their array has passed `check_arrays`."""
    parts = np.split(theirs, len(link.ours), axis=-1)
    return {name: np.ascontiguousarray(way.ours(part))
            for (name, way), part in zip(link.ours.items(), parts, strict=True)}


def to_theirs(links: Sequence[Link], ours: Mapping[str, np.ndarray]) -> dict[str, Float[np.ndarray, '...']]:
    """Returns their arrays, in float32."""
    return {link.theirs: np.ascontiguousarray(np.concatenate(
        [way.theirs(np.asarray(ours[name], np.float32)) for name, way in link.ours.items()], axis=-1))
        for link in links}
