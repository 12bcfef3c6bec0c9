"""Edits: changes of intermediate values of a model, described as data.

A place is an intermediate value with a name (model/places.py). An edit names the place that it changes:

    Edit('zero', 'decoder/layers_0/cross_attention/heads', heads=[2])
    {"edit": "zero", "place": "decoder/layers_0/cross_attention/heads", "heads": [2]}

The two lines are the same edit: in Python, and in a JSON file. A JSON file contains a list of edits. The order of the
list has no effect. At each place, the edits that replace the value ('replace', 'mean', 'freeze' and functions) are
applied first, then 'scale', 'zero' and 'add'. For each head and position, at most one edit may replace the value.
inference/editor.py applies edits.
"""

import contextlib
import dataclasses
import fnmatch
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array

from model.places import At
from runtime.errors import UserError, nearest, prefixed
from runtime.files import read_bytes

FIRST = 'replace', 'mean', 'freeze'  # edits that replace the value; functions are applied together with these edits
KINDS = *FIRST, 'scale', 'zero', 'add'  # in the order in which they are applied
PATTERNS = 'uniform', 'first'  # named attention weights, for the edit 'freeze'
ATTENTION = {'encoder': 'encoder/layers_{}/self_attention', 'decoder': 'decoder/layers_{}/self_attention',
             'cross': 'decoder/layers_{}/cross_attention'}
FREE = 'batch', 'position', 'query', 'key'  # axes whose length depends on the text
MOST_INDEX = 2 ** 31 - 1

Sizes = Mapping[str, int | None]  # {axis of a place: size}; None: the size depends on the text or the batch


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change of the intermediate values at one or more places of a model.

    Attributes:
      edit: one of KINDS, or a function (value, at) -> value of the same shape; `at` is a `model.places.At`. jax.jit
        traces the function. Texts are padded, and a search computes one position at a time. So the function must select
        tokens by `at.positions`, not by an index.
      place: the name of a place, or a shell pattern such as '*/self_attention/heads'.
      by: the argument of the edit. 'zero' and functions take no argument. 'scale' takes a number, or an array that
        broadcasts to the last axes of the place, such as [heads, 1] for 'heads', and [heads, 1, 1] for 'weights'. 'add'
        takes a vector (steering), or an array that broadcasts to the last axes; weights of hidden keys are unchanged.
        'mean' takes an array, texts, or the name of a split. With texts or a split, the value at every token is
        replaced by the mean over all tokens of these texts, without hidden patches of series. For a language model, a
        split stands for its first 100 documents.
        'replace' takes an array [position, ...], another text, or a pair (source, target). With another text, the value
        is replaced by the value of that text at the same position (activation patching); values after the end of that
        text are unchanged, except weights of keys after its end, which become 0. A language model reads a text after
        the start token. If it was not trained on whole documents, a search reads no start token, so use an output of a
        search as `by` to edit a search (see docs/inside.md). 'freeze' is only for attention weights. It takes 'uniform'
        (equal weights of all keys that a query may attend to), 'first' (weight 1 on the first token; all weights of a
        query that may not attend to this token are 0), or an array [query, key] or [head, query, key].
      heads: the indices of heads, from 0; None: all heads.
      positions: the indices of the tokens that the model reads, from 0; None: all tokens. A start token is also
        counted. A class token has position 0, except at the place 'embedding', which does not have it. For 'scores'
        and 'weights', these are the query tokens.

    Raises:
      UserError: if `edit` is unknown, `by` is missing or not allowed for this edit, or `heads` or `positions` is not a
        list of whole numbers.
    """
    edit: str | Callable[[Array, At], Array]
    place: str
    by: Any = None
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None

    def __post_init__(self):
        for name in 'heads', 'positions':
            object.__setattr__(self, name, indices(getattr(self, name), f'{self.where}: {name}'))
        if not callable(self.edit) and self.edit not in KINDS:
            raise UserError(f'there is no edit {self.edit!r}. {nearest(self.edit, KINDS)}')
        takes_by = not callable(self.edit) and self.edit != 'zero'
        if (self.by is not None) != takes_by:
            raise UserError(f'{self.where}: "by" '
                            + ('is missing. See docs/inside.md' if takes_by else 'has no effect. Remove "by"'))
        if self.edit == 'freeze' and isinstance(self.by, str) and self.by not in PATTERNS:
            raise UserError(f'{self.where}: by={self.by!r} must be an array of numbers, or one of '
                            f'{", ".join(PATTERNS)}')
        if takes_by and not (self.has_text or self.edit == 'freeze' and isinstance(self.by, str)):
            _check_numbers(self.by, self.where)

    @property
    def where(self) -> str:
        """The edit and its place, for the beginning of an error message."""
        return f'edit {self.edit!r} at {self.place}' if isinstance(self.edit, str) else f'the function at {self.place}'

    @property
    def has_text(self) -> bool:
        """Whether the model computes the numbers of the edit from texts."""
        return self.edit in ('mean', 'replace') and _has_text(self.by)

    @classmethod
    def of(cls, fields: Any, where: str = 'edits') -> 'Edit':
        """Returns the edit that a JSON object describes. In Python, 'edit' may also be a function.

        Raises:
          UserError: if a field is unknown or missing, or has a wrong value. The message begins with `where`.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, dict):
            raise UserError(f'{where}: {str(fields)[:80]!r} is not an edit. Write {{"edit": "zero", "place": "..."}}')
        for name in fields:
            if name not in names:
                raise UserError(f'{where}: an edit has no field {name!r}. {nearest(name, names)}')
        for name in 'edit', 'place':
            if not (isinstance(fields.get(name), str) or name == 'edit' and callable(fields.get(name))):
                raise UserError(f'{where}: the edit {json.dumps(fields, default=str)[:80]} has no {name!r}. Add '
                                f'{name!r} with a string')
        with prefixed(where):
            return cls(**fields)

    def as_json(self) -> dict[str, Any]:
        """Returns the edit as a JSON object. A function is written as its name and cannot be read back."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if callable(self.edit):
            fields['edit'] = f'function {getattr(self.edit, "__name__", "")}'.strip()
        return {name: _as_json(value) for name, value in fields.items() if value is not None}


def read_edits(path: str) -> list[Edit]:
    """Reads a JSON file with a list of edits.

    Raises:
      UserError: if the file cannot be read, or is not a list of edits.
    """
    try:
        text = read_bytes(Path(path)).decode('utf-8-sig')
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
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where} is not JSON: {error}. Write a list of edits') from None
    if not isinstance(listed, list) or not listed:
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
    if rest or kind not in ATTENTION or not all(re.fullmatch('0*[1-9][0-9]{0,8}', number)
                                                for number in (layer, *listed)):
        raise UserError(f'--without={heads}: must be KIND:LAYER:HEADS. KIND is {", ".join(ATTENTION)}; numbers are '
                        'from 1 to 999999999. Example: --without=cross:1:2,3')
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


def _as_json(value: Any) -> Any:
    """Returns a field of an edit as a JSON value: outputs as [source, text], arrays as lists."""
    if hasattr(value, 'source_tokens'):
        return [value.source, value.text]
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    return value.tolist() if hasattr(value, 'tolist') else value


def _has_text(by: Any) -> bool:
    """Returns whether the argument `by` of an edit contains text.

    Such an argument is a text, the name of a split, an output of a model, or a sequence of texts or outputs.
    """
    return isinstance(by, str) or hasattr(by, 'source_tokens') or (
        isinstance(by, Sequence) and len(by) > 0 and _has_text(by[0]))


def indices(numbers: Any, where: str) -> list[int] | None:
    """Returns the indices of heads or tokens as a list. Raises UserError if they are empty or not whole numbers."""
    if numbers is None:
        return None
    with contextlib.suppress(TypeError):  # not a list, or an entry is not a whole number
        listed = [operator.index(number) for number in numbers if not isinstance(number, bool)]
        if not len(numbers):
            raise UserError(f'{where}=[] selects nothing. Use at least one number, or remove it to select everything')
        if len(listed) == len(numbers) and max(listed) <= MOST_INDEX:
            return listed
    raise UserError(f'{where}={str(numbers)[:80]} must be a list of whole numbers from 0 to {MOST_INDEX}')


def _check_numbers(by: Any, where: str) -> None:
    """Raises UserError if the argument `by` of an edit is not an array of finite numbers."""
    try:
        with np.errstate(over='ignore'):
            finite = np.isfinite(np.asarray(None if isinstance(by, str | bool) else by, np.float32)).all()
    except (TypeError, ValueError, OverflowError):  # texts, lists of different lengths, too large numbers
        finite = False
    if not finite:
        raise UserError(f'{where}: by={str(by)[:80]} must be a finite number, or a rectangular array of finite numbers')


def matching(pattern: str, places: Mapping[str, Sizes], where: str = '') -> list[str]:
    """Returns the names of places that match a pattern. An error message begins with `where`.

    Raises:
      UserError: if no place matches. The message suggests similar names.
    """
    names = fnmatch.filter(places, str(pattern))
    if not names:
        raise UserError(f'{where}place {pattern!r}: the model has no such place. {nearest(str(pattern), list(places))}')
    return names
