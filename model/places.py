"""Places: names of intermediate values of a model. Values can be read or replaced by the names of their places.

The code of a model names a value in one line:

    heads = place(self, 'heads', heads)

The name of this place consists of the path of the module and the word 'heads', such as
`decoder/layers_1/cross_attention/heads`. The place of a module's output has the path of the module as its name. `place`
returns the value unchanged unless a `Lens` is active. So a program without a lens is compiled as if there were no
places. A lens is active while `observing` runs a forward pass.

This file uses only one feature of Flax: the path of a module.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from model.relation import UNRESTRICTED, Relation

PER_HEAD = 'batch', 'position', 'head', 'width'
PAIRS = 'batch', 'head', 'query', 'key'
AXES = {'queries': PER_HEAD, 'keys': PER_HEAD, 'values': PER_HEAD, 'heads': PER_HEAD, 'scores': PAIRS, 'weights': PAIRS,
        'pooled': ('batch', 'width'), 'initial': ('batch', 'width'), 'head': ('batch', 'output')}
SEQUENCE = 'batch', 'position', 'width'  # the axes of values at all other places
EDITS = 'edits'  # key in the parameters for the arrays that edits use


class At(NamedTuple):
    """The place of a value, as an argument of an edit.

    Attributes:
      name: name of the place.
      axes: names of the axes of the value.
      positions: positions of the tokens along the axis 'position' or 'query'. In a search, this is the axis of the
        hypotheses, which are all at the same position.
      keys: for 'scores' and 'weights', the positions of the keys.
      mask: for 'scores' and 'weights', True where a query sees a key; None if every query sees every key.
    """
    name: str
    axes: tuple[str, ...]
    positions: Int[Array, '#batch position']
    keys: Int[Array, '#batch key'] | None = None
    mask: Bool[Array, '#batch #head #query #key'] | None = None


Change = Callable[[Array, At], Array]  # takes a value and its place, and returns the new value
ChangeOf = Callable[[str], Change | None]  # takes the name of a place; returns None if its value is unchanged
Read = Callable[[str], bool] | Collection[str]


@dataclasses.dataclass(frozen=True)
class Lens:
    """An object that edits and captures values at places during a forward pass.

    Attributes:
      edit: a function that takes the name of a place and returns the function that replaces the value. It returns
        None for a place without an edit.
      read: the names of the places whose values are captured, or a function that takes the name of a place and returns
        True if the value is captured. If `read` is None, no value is captured. An edited value is captured after the
        edit.
      captured: the captured values by the name of the place.
      positions: positions of the tokens, int [#batch, 1] in a step of a search; None if the tokens of the pass have
        the positions 0, 1, 2 ...
      keys: positions of the keys of self-attention, int [#batch, key]; None if the relation has these positions.
    """
    edit: ChangeOf = lambda name: None
    read: Read | None = None
    captured: dict[str, Array] = dataclasses.field(default_factory=dict)
    positions: Array | None = None
    keys: Array | None = None

    def reads(self, name: str) -> bool:
        """Returns whether the lens captures the value at the place `name`."""
        if callable(self.read):
            return self.read(name)
        return self.read is not None and name in self.read


_lens: contextvars.ContextVar[Lens | None] = contextvars.ContextVar('lens', default=None)


@contextlib.contextmanager
def _active(lens: Lens) -> Iterator[Lens]:
    token = _lens.set(lens)
    try:
        yield lens
    finally:
        _lens.reset(token)


def place(module: Any, name: str, value: Array, relation: Relation = UNRESTRICTED) -> Array:
    """Names a value of a module. Returns the value, or the edited value if the active `Lens` edits the place.

    Args:
      module: the module that computes the value; it has a `path`.
      name: the last part of the place's name. This is a word in AXES, or any other word if the value has the axes
        SEQUENCE, or '' for the output of the module.
      value: the value.
      relation: for 'scores' and 'weights', the relation of the queries and keys.

    Raises:
      ValueError: if an edit returns another shape.
    """
    lens = _lens.get()
    if lens is None:
        return value
    name = place_name(module, name)
    edit, axes = lens.edit(name), axes_of(name)
    if edit is None and not lens.reads(name):
        return value
    # In a loop over positions, the value may be a vector for each sentence, without the axis of positions.
    whole = jnp.expand_dims(value, 1) if value.ndim < len(axes) else value
    if edit is not None:
        pairs, length = axes == PAIRS, whole.shape[2 if axes == PAIRS else 1]
        positions = jnp.arange(length)[None] if lens.positions is None else lens.positions
        keys = None
        if pairs:
            keys = lens.keys if relation.source is None or lens.keys is not None else jnp.asarray(relation.source)
            keys = jnp.arange(whole.shape[3])[None] if keys is None else keys
        edited = edit(whole, At(name, axes, positions, keys, relation.whole_mask() if pairs else None))
        if np.shape(edited) != whole.shape:
            raise ValueError(f'{name}: an edit returns the shape {np.shape(edited)}, but the value has {whole.shape} '
                             f'({", ".join(axes)})')
        whole = jnp.asarray(edited, value.dtype)
    if lens.reads(name):
        lens.captured[name] = whole
    return whole.reshape(value.shape)


def place_name(module: Any, name: str = '') -> str:
    """Returns the full name of a place: the path of `module`, '/' and `name`. If `name` is '', returns the path."""
    return '/'.join([*module.path, *([name] if name else [])])


def axes_of(name: str) -> tuple[str, ...]:
    """Returns the names of the axes of the value at the place `name`."""
    return AXES.get(name.rpartition('/')[2], SEQUENCE)


def argument_of(name: str, axis: str, arguments: Sequence[str]) -> str:
    """Returns the name of the module's argument that contains the tokens along `axis` of the place `name`.

    `arguments` are the names of all arguments. An encoder-decoder has the arguments 'source' and 'target'. A language
    model has 'tokens', and in training also the names of the segments and positions. For images and series, the tokens
    are the patches of 'inputs', and there may be more names, such as the name of a mask.
    """
    for single in 'inputs', 'tokens':
        if single in arguments:
            return single
    name = name.partition('/')[2] if name.startswith('members_') else name
    cross = 'cross_attention' in name and (axis == 'key' or name.endswith(('/keys', '/values')))
    return 'source' if cross or name.startswith(('encoder', 'source')) else 'target'


def wanted(module: Any, *names: str) -> bool:
    """Returns True if the active `Lens` captures or edits at least one of the places `names` of `module`."""
    lens = _lens.get()
    paths = [place_name(module, name) for name in names] if lens else []
    return lens is not None and any(lens.reads(path) or lens.edit(path) is not None for path in paths)


def reading(module: Any, name: str) -> bool:
    """Returns True if the active `Lens` may capture values inside the part `name` of `module`.

    Such a part cannot be rematerialised. If `Lens.read` is a function, the result is True for every part.
    """
    lens = _lens.get()
    if lens is None or lens.read is None:
        return False
    part = f'{place_name(module, name)}/'
    return callable(lens.read) or any(f'{read}/'.startswith(part) for read in lens.read)


@contextlib.contextmanager
def at_positions(positions: Int[Array, '*#batch'] | Int[Array, '#batch length'] | None,
                 keys: Int[Array, '#batch length'] | None = None) -> Iterator[None]:
    """Sets the positions of tokens while the body runs: a step of a search, or a pass over rows of several documents.

    Args:
      positions: for a step of a search, one position for all sentences or for each sentence. For a row of documents,
        the position of each token in its document. If `positions` is None, this context manager has no effect.
      keys: the positions of the keys of self-attention. By default, the relation of the attention has these positions.
    """
    lens = _lens.get()
    if lens is None or positions is None:
        yield
    else:
        positions = positions if positions.ndim == 2 else positions.reshape(-1, 1)
        with _active(dataclasses.replace(lens, positions=positions, keys=keys)):
            yield


# For loops over positions (lax.scan): a value that is captured in the body of a loop must be an output of the loop.

def loop_positions(length: int) -> Int[Array, '1 length'] | None:
    """Returns the positions of the steps of a loop. The function that `looped` returns takes one position per step.

    Returns None if no values are read or edited.
    """
    return jnp.arange(length)[None] if _lens.get() else None


def looped(step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, tuple[Any, dict[str, Array]]]]:
    """Converts `step`, which computes one position, into the body of a loop. Inside `step`, values may have places.

    `step(module, carry, *args) -> carry, outputs` becomes
    `body(module, carry, position, *args) -> carry, (outputs, captured)`. Stack `captured` along axis 1, and pass it to
    `leave_loop` after the loop.
    """
    def body(module, carry, position, *args):
        lens = _lens.get()
        if lens is None:
            carry, outputs = step(module, carry, *args)
            return carry, (outputs, {})
        with _active(dataclasses.replace(lens, captured={}, positions=position[:, None])) as inner:
            carry, outputs = step(module, carry, *args)
        return carry, (outputs, inner.captured)
    return body


def leave_loop(captured: dict[str, Array]) -> None:
    """Stores in the lens the values that a loop has captured. The axis of steps becomes the axis of positions."""
    lens = _lens.get()
    if lens is None:
        return
    for name, value in captured.items():
        if axes_of(name) == PAIRS:  # [batch, step, head, 1, key]
            lens.captured[name] = jnp.moveaxis(value[:, :, :, 0], 1, 2)
        else:  # [batch, step, 1, ...]
            lens.captured[name] = value[:, :, 0]


def observing(apply: Callable[..., Any], edit: ChangeOf | None = None,
              read: Read | None = None) -> Callable[..., tuple[Any, dict[str, Array]]]:
    """Returns a function that calls `apply` with a lens. The function returns (result of `apply`, captured values).

    Like `apply`, the returned function is pure, so it can be compiled and differentiated. If another lens is active
    during the call, both lenses have an effect: the edits of the other lens are applied after `edit`, and if `read` is
    None, the other lens decides which values are captured. So the places of an `Observed` module can be read and
    edited, too.
    """
    def observed(*args, **kwargs):
        lens = _lens.get() or Lens()
        lens = dataclasses.replace(lens, edit=_in_turn(edit, lens.edit) if edit else lens.edit,
                                   read=lens.read if read is None else read,
                                   captured=lens.captured if read is None else {})
        with _active(lens):
            result = apply(*args, **kwargs)
        return result, lens.captured
    return observed


def _in_turn(first: ChangeOf, second: ChangeOf) -> ChangeOf:
    """Returns a function that applies the changes of `first`, and then the changes of `second`."""
    def edit_of(name):
        first_edit, second_edit = first(name), second(name)
        if first_edit is None or second_edit is None:
            return first_edit or second_edit
        return lambda value, at: second_edit(first_edit(value, at), at)
    return edit_of


class Observed:
    """A module with edits at places. This wrapper has all attributes of the original module.

    Attributes:
      module: the original module.
      editor: a function that takes the arrays `params[EDITS]` and returns the attribute `edit` of a Lens. The arrays
        are arguments of the compiled program, so their values can change without a new compilation. In training,
        `params` has no entry EDITS, and the argument of `editor` is None.
    """

    def __init__(self, module: Any, editor: Callable[[Any], ChangeOf]):
        self.module, self.editor = module, editor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def __class__(self) -> type:  # so that isinstance() accepts it as a module
        return self.module.__class__  # it may be an `Observed`, too

    def clone(self, **attributes: Any) -> 'Observed':
        """Returns a copy of the wrapper, with a copy of the module in which `attributes` have new values."""
        return Observed(self.module.clone(**attributes), self.editor)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's `apply` while the edits are active."""
        numbers = variables['params'].get(EDITS)
        params = {name: part for name, part in variables['params'].items() if name != EDITS}
        apply = observing(self.module.apply, self.editor(numbers))
        return apply({**variables, 'params': params}, *args, **kwargs)[0]
