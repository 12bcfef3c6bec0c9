"""The correspondence between the arrays of another library and the arrays of this project.

Bijections describe the correspondence, so that one description serves import and export. In the code, `theirs` stands
for arrays of the other library, and `ours` stands for arrays of this project.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from input_pipeline.foreign_tokenizers import NONE
from runtime.errors import UserError

Shape = tuple[int, ...]


class Way(NamedTuple):
    """A bijection between an array of the other library and an array of this project.

    Attributes:
      ours: the function from the other library's array to this project's array.
      theirs: the inverse function.
    """
    ours: Callable[[np.ndarray], np.ndarray]
    theirs: Callable[[np.ndarray], np.ndarray]


class Link(NamedTuple):
    """A link between an array of the other library and one or several arrays of this project.

    Several arrays of this project correspond to parts of the other library's array. These parts lie side by side along
    the last axis of this array.

    Attributes:
      theirs: the name of the other library's array.
      ours: {name of this project's array: bijection of the part}. All parts have the same width.
    """
    theirs: str
    ours: Mapping[str, Way]


SAME = Way(lambda array: array, lambda array: array)
TRANSPOSED = Way(np.transpose, np.transpose)


def chain(*ways: Way) -> Way:
    """Returns the composition of several bijections. An import applies the first bijection first."""
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
    """Returns the bijection that reshapes an array. A size of -1 is inferred, as in `numpy.reshape`."""
    return Way(lambda array: array.reshape(ours), lambda array: array.reshape(theirs))


def reordered(order: Int[np.ndarray, ' n'], axis: int) -> Way:
    """Returns a bijection that permutes an axis: index i in this project is index order[i] in the other library."""
    back = np.argsort(order)
    return Way(lambda array: np.take(array, order, axis), lambda array: np.take(array, back, axis))


def rows(order: Int[np.ndarray, ' tokens']) -> Way:
    """Returns the bijection for a table with a row for each token, such as an embedding table.

    `order` contains the id of each token in the other library. A token without such an id has a row of 0. If two tokens
    of this project have the same id in the other library, an export writes the row of the later token.
    """
    exists = order != NONE

    def ours(array):
        table = array[order]  # NONE selects an arbitrary row
        table[~exists] = 0
        return table

    def theirs(array):
        table = np.zeros((int(order.max()) + 1, *array.shape[1:]), array.dtype)
        table[order[exists]] = array[exists]
        return table

    return Way(ours, theirs)


def halves(width: int) -> Int[np.ndarray, ' width']:
    """Returns the order 0, n, 1, n + 1, ..., where n is half of the width.

    The other library stores the first elements of all pairs before the second elements of all pairs. This project
    stores one pair after the other.
    """
    return np.arange(width).reshape(2, -1).T.reshape(-1)


def check_arrays(links: Sequence[Link], shapes: Mapping[str, Shape], theirs: Mapping[str, Shape],
                 is_ignored: Callable[[str], bool]) -> None:
    """Checks that a model of another library has all arrays that `links` lists, with the expected shapes.

    Args:
      links: the correspondence of all arrays.
      shapes: {name: shape} of this project's arrays.
      theirs: {name: shape} of the other library's arrays.
      is_ignored: a function that takes the name of an array of the other library, and returns whether this array is
        ignored: it can be derived, or the model does not use it.

    Raises:
      UserError: if an array is missing, is unknown or has another shape. The message names the array.
    """
    needed = {link.theirs for link in links}
    if missing := sorted(needed - theirs.keys()):
        raise UserError(f'the weights lack {len(missing)} of {len(needed)} arrays, such as {missing[0]}. Use '
                        'config.json and weights of the same model')
    if unknown := sorted(name for name in theirs.keys() - needed if not is_ignored(name)):
        raise UserError(f'the weights have {len(unknown)} arrays that this model does not have, such as {unknown[0]}. '
                        'Use config.json and weights of the same model')
    for link in links:
        if (expected := _their_shape(link, shapes)) != theirs[link.theirs]:
            raise UserError(f'the array {link.theirs} has shape {list(theirs[link.theirs])}, but config.json needs '
                            f'{list(expected)}. Use config.json and weights of the same model')


def _their_shape(link: Link, shapes: Mapping[str, Shape]) -> Shape:
    """Computes the shape of the array `link.theirs` from `shapes`, the shapes of this project's arrays."""
    parts = [way.theirs(np.broadcast_to(np.False_, shapes[name])).shape for name, way in link.ours.items()]
    return (*parts[0][:-1], sum(part[-1] for part in parts))


def to_ours(link: Link, theirs: Float[np.ndarray, '...']) -> dict[str, Float[np.ndarray, '...']]:
    """Converts `theirs`, the other library's array, to this project's arrays in `link`. Call `check_arrays` first."""
    parts = np.split(theirs, len(link.ours), axis=-1)
    return {name: np.ascontiguousarray(way.ours(part))
            for (name, way), part in zip(link.ours.items(), parts, strict=True)}


def to_theirs(links: Sequence[Link], ours: Mapping[str, np.ndarray]) -> dict[str, Float[np.ndarray, '...']]:
    """Converts this project's arrays to the arrays of the other library, in float32."""
    return {link.theirs: np.ascontiguousarray(np.concatenate(
        [way.theirs(np.asarray(ours[name], np.float32)) for name, way in link.ours.items()], axis=-1))
        for link in links}
