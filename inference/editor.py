"""Applies edits (inference/edits.py) to the values at the places of a model."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from inference.edits import FIRST, FREE, KINDS, Edit, Sizes, matching
from model.places import PAIRS, At
from runtime.errors import UserError

# Errors of a function that needs the numbers of an array, which a traced array does not have.
NEEDS_NUMBERS = (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError,
                 jax.errors.TracerIntegerConversionError, jax.errors.NonConcreteBooleanIndexError)


class Editor:
    """Edits with their arrays, checked against the places of a model.

    Attributes:
      edits: the edits, in the order in which they are applied.
      numbers: for each edit, {place: array}, or {} if the edit has no array.
    """

    def __init__(self, edits: Sequence[Edit], numbers: Sequence[Mapping[str, Any]], places: Mapping[str, Sizes]):
        order = sorted(range(len(edits)), key=lambda index: _rank(edits[index]))
        self.edits = [edits[index] for index in order]
        self._matched: dict[str, list[int]] = {}
        self.numbers: list[dict[str, Any]] = [{} for _ in order]
        for rank, index in enumerate(order):
            for name in matching(edits[index].place, places):
                edit, array = edits[index], numbers[index].get(name)
                _check(edit, array, name, places[name])
                if array is not None:
                    self.numbers[rank][name] = np.asarray(array, np.float32)
                for earlier in self._matched.get(name, []):
                    _check_apart(self.edits[earlier], edit, name)
                self._matched.setdefault(name, []).append(rank)

    def __call__(self, numbers: Any = None) -> Callable[[str], Callable[[Array, At], Array] | None]:
        """Returns a function that maps the name of a place to the function that edits the value there, or to None.

        If `numbers` is given, it is used instead of `self.numbers`.
        """
        numbers = self.numbers if numbers is None else numbers

        def edit_of(name):
            ranks = self._matched.get(name)

            def edited(value, at):
                for rank in ranks or ():
                    value = _applied(self.edits[rank], numbers[rank].get(name), value, at)
                return value
            return edited if ranks else None
        return edit_of


def _rank(edit: Edit) -> tuple[int, str]:
    return (0 if callable(edit.edit) else KINDS.index(edit.edit)), json.dumps(edit.as_json(), default=str)


def _check(edit: Edit, numbers: Any, name: str, sizes: Sizes) -> None:
    """Raises UserError if an edit cannot be applied to the place `name`. `numbers` is the edit's array, or None."""
    where = dataclasses.replace(edit, place=name).where
    check_selection(where, edit.heads, edit.positions, name, sizes)
    pairs = tuple(sizes) == PAIRS
    if edit.edit == 'freeze' and not name.endswith('/weights'):
        raise UserError(f'{where}: only attention weights can be frozen. Use a place that ends in /weights')
    if edit.edit == 'mean' and pairs:
        raise UserError(f'{where}: attention weights cannot be averaged over inputs of different lengths. '
                        'Use "freeze"')
    if numbers is None:
        return
    shape = np.shape(numbers)
    rest = [sizes['head'], 1, 1] if pairs else [size for axis, size in sizes.items() if axis not in FREE]
    if edit.edit in ('scale', 'add'):
        expected, fits = rest, _broadcasts(shape, rest)
    elif edit.edit == 'mean':
        expected, fits = rest, shape == tuple(rest)
    elif pairs:
        expected = [sizes['head'], sizes['query'] or 'query', sizes['key'] or 'key']
        fits = (len(shape) == 3 and shape[0] in (1, sizes['head']) or len(shape) == 2) and all(
            0 < length <= (sizes[axis] or length) for axis, length in zip(('query', 'key'), shape[-2:], strict=True))
    else:
        positioned, length = 'position' in sizes, sizes.get('position')
        expected = [length or 'position'] * positioned + rest
        fits = shape[positioned:] == tuple(rest) and len(shape) > 0 and 0 not in shape and (
            length is None or shape[0] <= length)
    if not fits:
        raise UserError(f'{where}: the numbers have the shape {list(shape)}, but the place has '
                        f'[{", ".join(map(str, expected))}]. Use numbers of this shape')


def check_selection(where: str, heads: Sequence[int] | None, positions: Sequence[int] | None, name: str,
                    sizes: Sizes) -> None:
    """Raises UserError if the place `name` does not have these heads or positions. The message begins with `where`."""
    if heads is not None:
        count = sizes.get('head')
        if count is None:
            raise UserError(f'{where}: the values at this place are not split into heads. Remove "heads", or use '
                            f'{name}/heads')
        for head in heads:
            if not 0 <= head < count:
                raise UserError(f'{where}: there is no head {head}. Use numbers from 0 to {count - 1}')
    if any(position < 0 for position in positions or ()):
        raise UserError(f'{where}: positions={list(positions or ())} must be at least 0')
    if positions is not None and not {'position', 'query'} & {*sizes}:
        raise UserError(f'{where}: the value at this place belongs to the whole input. Remove "positions"')
    length = sizes.get('position', sizes.get('query'))
    if length is not None and max(positions or (), default=0) >= length:
        raise UserError(f'{where}: positions={list(positions or ())}: this place has only {length} positions. Use '
                        f'positions from 0 to {length - 1}')


def _broadcasts(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    return len(shape) <= len(sizes) and all(
        one in (1, size) for one, size in zip(reversed(shape), reversed(sizes), strict=False))


def _check_apart(first: Edit, second: Edit, name: str) -> None:
    """Raises UserError if two edits replace the same values at the place `name`."""
    def shared(one, other):
        return one is None or other is None or bool(set(one) & set(other))

    if all(callable(edit.edit) or edit.edit in FIRST for edit in (first, second)) and (
            shared(first.heads, second.heads) and shared(first.positions, second.positions)):
        raise UserError(f'two edits replace the same values of {name}. Remove one of the edits, or set "heads" or '
                        '"positions" so that the edits do not overlap')


def _applied(edit: Edit, numbers: Any, value: Array, at: At) -> Array:
    """Returns `value` after an edit. Only the heads and positions that the edit selects are changed."""
    new = _called(edit, value, at) if callable(edit.edit) else _new(edit, numbers, value, at)
    return jnp.where(selected(edit.heads, edit.positions, value, at), new.astype(value.dtype), value)


def _called(edit: Any, value: Array, at: At) -> Array:
    """Returns the result of the function of an edit.

    Raises:
      UserError: if the result has another shape than `value` or is not an array of numbers, or the function needs the
        numbers of a traced array.
    """
    where = dataclasses.replace(edit, place=at.name).where
    try:
        new = edit.edit(value, at)
    except NEEDS_NUMBERS as error:  # the cause shows the line of the function
        raise UserError(f'{where}: jax.jit traces the function, so its array has no numbers yet. Use functions of '
                        'jax.numpy, not of NumPy, and jax.numpy.where instead of a condition') from error
    shape = getattr(new, 'shape', None)
    if shape != value.shape:
        result = f'an object of type {type(new).__name__}' if shape is None else f'an array of shape {shape}'
        advice = 'Return an array of this shape'
        if shape is not None and len(shape) == len(at.axes) and all(
                axis in FREE or size == expected
                for axis, size, expected in zip(at.axes, shape, value.shape, strict=True)):
            advice += ('. The axis batch, and for texts the axes of tokens, differ in size between passes. Compute the '
                       "result from the value. For stored values, use Edit('replace', ...)")
        raise UserError(f'{where} returns {result}, but the value has the shape {value.shape} ({", ".join(at.axes)}). '
                        f'{advice}')
    try:
        return jnp.asarray(new)
    except TypeError as error:  # such as objects, strings and dates
        raise UserError(f'{where} returns an array of {getattr(new, "dtype", type(new).__name__)}. Return an array of '
                        'numbers') from error


def selected(heads: Sequence[int] | None, positions: Sequence[int] | None, value: Array, at: At) -> Bool[Array, '...']:
    """Returns a mask that broadcasts to `value`: True at the given heads and positions. None selects all of them."""
    mask = jnp.array(True)
    if heads is not None:
        chosen = jnp.isin(jnp.arange(value.shape[at.axes.index('head')]), jnp.asarray(heads))
        mask = mask & _along(chosen[None], 'head', at.axes)
    if positions is not None:
        chosen = jnp.isin(at.positions, jnp.asarray(positions))
        mask = mask & _along(chosen, 'query' if at.axes == PAIRS else 'position', at.axes)
    return mask


def _along(chosen: Bool[Array, '#batch n'], axis: str, axes: tuple[str, ...]) -> Bool[Array, '...']:
    shape = [1] * len(axes)
    shape[0], shape[axes.index(axis)] = chosen.shape
    return chosen.reshape(shape)


def _new(edit: Edit, numbers: Any, value: Array, at: At) -> Array:
    """Returns the value after an edit of all heads and positions. The caller then selects heads and positions."""
    numbers = None if numbers is None else jnp.asarray(numbers)
    if edit.edit == 'zero':
        return jnp.zeros_like(value)
    if edit.edit == 'scale':
        return value * numbers
    if edit.edit == 'add':
        return value + (numbers if at.mask is None else jnp.where(at.mask, numbers, 0))
    if edit.edit == 'freeze' and numbers is None:
        visible = jnp.ones(value.shape, bool) if at.mask is None else jnp.broadcast_to(at.mask, value.shape)
        if edit.by == 'first':
            assert at.keys is not None, 'attention weights have keys'
            visible = visible & (at.keys == 0)[:, None, None]
        return visible / jnp.maximum(visible.sum(axis=-1, keepdims=True), 1)
    assert numbers is not None, 'Edit has checked that numbers are given'
    if at.axes == PAIRS:
        return _pairs(numbers, value, at)
    if edit.edit == 'mean' or 'position' not in at.axes:
        return jnp.broadcast_to(numbers, value.shape)
    within = _along(at.positions < len(numbers), 'position', at.axes)
    return jnp.where(within, numbers[jnp.minimum(at.positions, len(numbers) - 1)], value)


def _pairs(numbers: Float[Array, '...'], value: Array, at: At) -> Array:
    """Returns attention weights or scores with the values of `numbers`, [query, key] or [head, query, key].

    Queries outside `numbers` keep their values. For the queries in `numbers`, keys outside `numbers` keep their scores,
    and get the weight 0.
    """
    numbers = numbers if numbers.ndim == 3 else numbers[None]
    _, queries, keys = numbers.shape
    assert at.keys is not None, 'weights have keys'
    # [#batch, head, query, key]. A step of a search has one query position, and keys of all hypotheses.
    new = numbers[:, jnp.minimum(at.positions, queries - 1)[:, :, None],
                  jnp.minimum(at.keys, keys - 1)[:, None]].swapaxes(0, 1)
    has_number = (at.keys < keys)[:, None, None] & (True if at.mask is None else at.mask)
    outside = 0.0 if at.name.endswith('/weights') else value
    return jnp.where((at.positions < queries)[:, None, :, None], jnp.where(has_number, new, outside), value)
