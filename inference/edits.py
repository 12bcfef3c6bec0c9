"""Edits: changes of intermediate values of a model, described as data.

A place is an intermediate value with a name (model/places.py). An edit has the name of a place:

    Edit('zero', 'decoder/layers_0/cross_attention/heads', heads=[2])
    {"edit": "zero", "place": "decoder/layers_0/cross_attention/heads", "heads": [2]}

The two lines are the same edit: in Python, and in a JSON file. A JSON file contains a list of edits. The order of the
list has no effect. At each place, the edits 'replace', 'mean', 'freeze' and functions are applied first, then 'scale',
'zero' and 'add'. For each head and position, at most one of 'replace', 'mean', 'freeze' and functions is allowed.
"""

import dataclasses
import difflib
import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from model.places import PAIRS, At
from runtime.errors import UserError

FIRST = 'replace', 'mean', 'freeze'  # edits that replace the value; functions are applied together with these edits
KINDS = *FIRST, 'scale', 'zero', 'add'  # in the order in which they are applied
PATTERNS = 'uniform', 'first'  # named attention weights, for the edit 'freeze'
ATTENTION = {'encoder': 'encoder/layers_{}/self_attention', 'decoder': 'decoder/layers_{}/self_attention',
             'cross': 'decoder/layers_{}/cross_attention'}
FREE = 'batch', 'position', 'query', 'key'  # axes whose length depends on the text

Sizes = Mapping[str, int | None]  # {axis of a place: size}; None: the size depends on the text


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change of the intermediate values at one or more places of a model.

    Attributes:
      edit: one of KINDS, or a function (value, at) -> value of the same shape; `at` is a `model.places.At`.
      place: the name of a place, or a shell pattern such as '*/self_attention/heads'.
      by: the argument of the edit. 'zero' takes no argument. 'scale' takes a number, or an array that broadcasts to the
        last axes of the place, such as [heads, 1] for 'heads'. 'add' takes a vector (steering), or an array that
        broadcasts to the last axes. 'mean' takes an array, texts, or the name of a split. With texts or a split, the
        value at every token is replaced by the mean over all tokens of these texts. 'replace' takes an array
        [position, ...], another text, or a pair (source, target). With another text, the value is replaced by the
        value of that text at the same position (activation patching); values after the end of that text are unchanged.
        'freeze' is only for attention weights. It takes 'uniform' (equal weights of all keys that a query may attend
        to), 'first' (weight 1 on the first token), or an array [query, key] or [head, query, key].
      heads: the indices of heads, from 0; None: all heads.
      positions: the indices of tokens, from 0; None: all tokens. For 'scores' and 'weights', these are the query
        tokens.
    """
    edit: str | Callable[[Array, At], Array]
    place: str
    by: Any = None
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None

    def __post_init__(self):
        if callable(self.edit):
            return
        if self.edit not in KINDS:
            raise UserError(f'there is no edit {self.edit!r}. {nearest(self.edit, KINDS)}')
        if self.by is None and self.edit != 'zero' or self.by is not None and self.edit == 'zero':
            raise UserError(f'edit {self.edit!r} at {self.place}: "by" '
                            + ('is missing. See docs/inside.md' if self.by is None else 'has no effect. Remove "by"'))
        if self.edit == 'freeze' and isinstance(self.by, str) and self.by not in PATTERNS:
            raise UserError(f'edit \'freeze\' at {self.place}: by={self.by!r} must be an array of numbers, or one of '
                            f'{", ".join(PATTERNS)}')

    @classmethod
    def of(cls, fields: Any, where: str = 'edits') -> 'Edit':
        """Returns the edit that a JSON object describes.

        Raises:
          UserError: if a field is unknown or missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, dict):
            raise UserError(f'{where}: {str(fields)[:80]!r} is not an edit. Write {{"edit": "zero", "place": "..."}}')
        for name in fields:
            if name not in names:
                raise UserError(f'{where}: an edit has no field {name!r}. {nearest(name, names)}')
        if missing := [name for name in ('edit', 'place') if not isinstance(fields.get(name), str)]:
            raise UserError(f'{where}: the edit {json.dumps(fields)[:80]} has no {missing[0]!r}. Add {missing[0]!r} '
                            'with a string')
        return cls(**fields)

    def as_json(self) -> dict[str, Any]:
        """Returns the edit as a JSON object. A function is written as its name and cannot be read back."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if callable(self.edit):
            fields['edit'] = f'function {getattr(self.edit, "__name__", "")}'.strip()
        if hasattr(self.by, 'source_tokens'):  # `by` is an output
            fields['by'] = [self.by.source, self.by.text]
        return {name: value.tolist() if hasattr(value, 'tolist') else value
                for name, value in fields.items() if value is not None}


def read_edits(path: str) -> list[Edit]:
    """Reads a JSON file with a list of edits.

    Raises:
      UserError: if the file cannot be read, or is not a list of edits.
    """
    try:
        text = Path(path).read_text('utf-8')
    except (OSError, ValueError) as error:
        raise UserError(f'--edit={path} cannot be read: {error}. Use a JSON file with a list of edits') from None
    return parsed(text, f'--edit={path}')


def parsed(text: str, where: str) -> list[Edit]:
    """Returns the edits in a JSON text. Error messages begin with `where`.

    Raises:
      UserError: if the text is not a list of edits.
    """
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise UserError(f'{where} is not JSON: {error}. Write a list of edits') from None
    if not isinstance(listed, list):
        raise UserError(f'{where} must be a list of edits, [{{"edit": ..., "place": ...}}, ...]')
    return [Edit.of(fields, where) for fields in listed]


def without(heads: str) -> Edit:
    """Returns the edit that sets attention heads to zero.

    `heads` is KIND:LAYER:HEADS, such as 'cross:1:2,3'. Layers and heads are counted from 1, as in --look of decode.py.

    Raises:
      UserError: if `heads` has another form.
    """
    kind, layer, numbers, *rest = [*heads.split(':'), '', '', ''][:max(3, 1 + heads.count(':'))]
    listed = numbers.split(',')
    if rest or kind not in ATTENTION or not all(number.isdecimal() and int(number) for number in (layer, *listed)):
        raise UserError(f'--without={heads}: must be KIND:LAYER:HEADS. KIND is {", ".join(ATTENTION)}; numbers start '
                        'at 1. Example: --without=cross:1:2,3')
    place = ATTENTION[kind].format(int(layer) - 1) + '/heads'
    return Edit('zero', place, heads=[int(number) - 1 for number in listed])


def check_without(heads: str, places: Mapping[str, Sizes]) -> None:
    """Raises UserError if the model has no such layer or head. `heads` has the form that `without` accepts."""
    edit, kind = without(heads), heads.partition(':')[0]
    if not (layers := len(fnmatch.filter(places, ATTENTION[kind].format('*') + '/heads'))):
        existing = [place for place in places if place.endswith('/heads')] or [*places]
        raise UserError(f'--without={heads}: the model has no place {edit.place}. Use --edit with a place of this '
                        f'model, such as {existing[0]}')
    if edit.place not in places:
        raise UserError(f'--without={heads}: the model has {layers} layers of this kind. Use a layer from 1 to '
                        f'{layers}')
    count = places[edit.place]['head'] or 0
    if max(edit.heads or ()) >= count:
        raise UserError(f'--without={heads}: this layer has {count} heads. Use heads from 1 to {count}')


def has_text(by: Any) -> bool:
    """Returns whether the argument `by` of an edit contains text.

    Such an argument is a text, the name of a split, an output of a model, or a sequence of texts or outputs.
    """
    return isinstance(by, str) or hasattr(by, 'source_tokens') or (
        isinstance(by, Sequence) and len(by) > 0 and has_text(by[0]))


def matching(pattern: str, places: Mapping[str, Sizes], where: str = '') -> list[str]:
    """Returns the names of places that match a pattern. An error message begins with `where`.

    Raises:
      UserError: if no place matches. The message has similar names.
    """
    names = fnmatch.filter(places, pattern)
    if not names:
        raise UserError(f'{where}place {pattern!r}: the model has no such place. {nearest(pattern, list(places))}')
    return names


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns the last sentence of an error message. It suggests the names that are most similar to `name`."""
    close = difflib.get_close_matches(name, names, 3, 0.4)
    return f'Did you mean {", ".join(close)}?' if close else f'Use one of {", ".join(list(names)[:8])}'


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
    where = f'edit {edit.edit!r} at {name}' if isinstance(edit.edit, str) else f'the function at {name}'
    check_selection(where, edit.heads, edit.positions, name, sizes)
    pairs = tuple(sizes) == PAIRS
    if edit.edit == 'freeze' and not name.endswith('/weights'):
        raise UserError(f'{where}: only attention weights can be frozen. Use a place that ends in /weights')
    if edit.edit == 'mean' and pairs:
        raise UserError(f'{where}: attention weights cannot be averaged over sentences of different lengths. '
                        'Use "freeze"')
    if numbers is None:
        return
    shape = np.shape(numbers)
    rest = [size for axis, size in sizes.items() if axis not in FREE]
    if edit.edit in ('scale', 'add'):
        expected, fits = rest, _broadcasts(shape, rest)
    elif edit.edit == 'mean':
        expected, fits = rest, shape == tuple(rest)
    elif pairs:
        expected = [sizes['head'], 'query', 'key']
        fits = len(shape) == 3 and shape[0] in (1, sizes['head']) or len(shape) == 2
    else:
        positioned = 'position' in sizes
        expected, fits = ['position'] * positioned + rest, shape[positioned:] == tuple(rest) and len(shape) > 0
    if not fits:
        raise UserError(f'{where}: the numbers have the shape {list(shape)}, but the place has '
                        f'[{", ".join(map(str, expected))}]. Use numbers of this shape')


def check_selection(where: str, heads: Sequence[int] | None, positions: Sequence[int] | None, name: str,
                    sizes: Sizes) -> None:
    """Raises UserError, beginning with `where`, if the place `name` does not have these heads or positions."""
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
        raise UserError(f'{where}: the value at this place belongs to the whole text. Remove "positions"')


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
    if callable(edit.edit):
        new = edit.edit(value, at)
        if edit.heads is None and edit.positions is None:
            return new  # model/places.py checks the shape
    else:
        new = _new(edit, numbers, value, at)
    return jnp.where(selected(edit.heads, edit.positions, value, at), new.astype(value.dtype), value)


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
        return value + numbers
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

    Queries outside `numbers` keep their values. For the queries in `numbers`, keys outside `numbers` get 0.
    """
    numbers = numbers if numbers.ndim == 3 else numbers[None]
    _, queries, keys = numbers.shape
    assert at.keys is not None, 'weights have keys'
    # [#batch, head, query, key]. A step of a search has one query position, and keys of all hypotheses.
    new = numbers[:, jnp.minimum(at.positions, queries - 1)[:, :, None],
                  jnp.minimum(at.keys, keys - 1)[:, None]].swapaxes(0, 1)
    has_number = (at.keys < keys)[:, None, None] & (True if at.mask is None else at.mask)
    return jnp.where((at.positions < queries)[:, None, :, None], jnp.where(has_number, new, 0.0), value)
