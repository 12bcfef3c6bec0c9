"""How the arrays of two libraries correspond: bijections, so that one description serves both directions."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from input_pipeline.foreign_tokenizers import NONE
from runtime.errors import UserError

Arrays = Mapping[str, np.ndarray]


class Way(NamedTuple):
    """A bijection of arrays.

    Attributes:
      ours: from their array to ours.
      theirs: from our array to theirs.
    """
    ours: Callable[[np.ndarray], np.ndarray]
    theirs: Callable[[np.ndarray], np.ndarray]


class Link(NamedTuple):
    """One of their arrays, and ours that it is made of, side by side along its last axis.

    Attributes:
      theirs: its name.
      ours: name and bijection of each part; the parts are equally wide.
    """
    theirs: str
    ours: Mapping[str, Way]


SAME = Way(lambda array: array, lambda array: array)
TRANSPOSED = Way(np.transpose, np.transpose)


def chain(*ways: Way) -> Way:
    """One after the other, beginning with what is done first to their array."""
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
    """Another shape of the same numbers; -1 is whatever is left."""
    return Way(lambda array: array.reshape(ours), lambda array: array.reshape(theirs))


def reordered(order: Int[np.ndarray, ' n'], axis: int) -> Way:
    """Along an axis, our number i is their number order[i]."""
    back = np.argsort(order)
    return Way(lambda array: np.take(array, order, axis), lambda array: np.take(array, back, axis))


def rows(order: Int[np.ndarray, ' tokens']) -> Way:
    """Of a table with a row for each token, where `order` is a tokenizer's: what they do not have is 0.

    Where two of our tokens are one of theirs, the later one is theirs.
    """
    there = order != NONE

    def ours(array):
        table = np.zeros((len(order), *array.shape[1:]), array.dtype)
        table[there] = array[order[there]]
        return table

    def theirs(array):
        table = np.zeros((int(order.max()) + 1, *array.shape[1:]), array.dtype)
        table[order[there]] = array[there]
        return table

    return Way(ours, theirs)


def halves(width: int) -> Int[np.ndarray, ' width']:
    """The order that puts numbers in pairs, (0, 1), (2, 3), of which they have all firsts, then all seconds."""
    return np.arange(width).reshape(2, -1).T.reshape(-1)


def to_ours(links: Sequence[Link], theirs: Arrays, ignored: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Our arrays, in float32, from theirs.

    Args:
      links: of all arrays that a model of ours has.
      theirs: by name.
      ignored: whether an array of theirs is no parameter: a table that follows from the config.

    Raises:
      UserError: if an array is missing, is more than the model has, or has another shape than its parts.
    """
    wanted = {link.theirs for link in links}
    if missing := sorted(wanted - theirs.keys()):
        raise UserError(f'its weights lack {len(missing)} of {len(wanted)} arrays, such as {missing[0]}: config.json '
                        'and weights are not of one model')
    if left := sorted(name for name in theirs.keys() - wanted if not ignored(name)):
        raise UserError(f'its weights hold {len(left)} arrays that such a model does not have, such as {left[0]}: it '
                        'is of another kind than its config.json says')
    found = {}
    for link in links:
        try:
            parts = np.split(theirs[link.theirs].astype(np.float32), len(link.ours), axis=-1)
            found |= {name: np.ascontiguousarray(way.ours(part))
                      for (name, way), part in zip(link.ours.items(), parts, strict=True)}
        except (ValueError, IndexError) as error:
            raise UserError(f'the array {link.theirs} of shape {list(theirs[link.theirs].shape)} does not fit '
                            f'config.json: {error}') from None
    return found


def to_theirs(links: Sequence[Link], ours: Arrays) -> dict[str, Float[np.ndarray, '...']]:
    """Their arrays, in float32, from ours."""
    return {link.theirs: np.ascontiguousarray(np.concatenate(
        [way.theirs(np.asarray(ours[name], np.float32)) for name, way in link.ours.items()], axis=-1))
        for link in links}
