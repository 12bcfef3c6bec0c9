"""Places: names for the values inside a model, by which they are read and replaced.

The code of a model names a value in one line:

    heads = place(self, 'heads', heads)

The name of the place is the path of the module and this word, `decoder/layers_1/cross_attention/heads`; without a word
it is the path alone, the output of the module. `place` returns the value unchanged unless a `Lens` is active, so that a
program without one is compiled as if there were no places. A lens is active while `observing` runs a forward pass.

The only thing that this module needs of Flax is the path of a module.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from model.relation import UNRESTRICTED, Relation

PER_HEAD = 'batch', 'position', 'head', 'width'
PAIRS = 'batch', 'head', 'query', 'key'
AXES = {'queries': PER_HEAD, 'keys': PER_HEAD, 'values': PER_HEAD, 'heads': PER_HEAD, 'scores': PAIRS, 'weights': PAIRS,
        'pooled': ('batch', 'width'), 'initial': ('batch', 'width'), 'head': ('batch', 'output')}
SEQUENCE = 'batch', 'position', 'width'  # the axes of all other places
EDITS = 'edits'  # the numbers of edits among the parameters


class At(NamedTuple):
    """What an edit may need besides the value.

    Attributes:
      name: of the place.
      axes: names of the axes of the value.
      positions: of the tokens along the axis 'position' or 'query'. A search computes one position at a time, and this
        axis has its hypotheses.
      keys: of 'scores' and 'weights', the positions of the keys.
      mask: of 'scores' and 'weights', the keys that a query may look at; None: all.
    """
    name: str
    axes: tuple[str, ...]
    positions: Int[Array, '#batch position']
    keys: Int[Array, '#batch key'] | None = None
    mask: Bool[Array, '#batch #head #query #key'] | None = None


Edit = Callable[[Array, At], Array]
Editor = Callable[[str], Edit | None]


@dataclasses.dataclass(frozen=True)
class Lens:
    """What a forward pass does at places.

    Attributes:
      edit: the name of a place -> the function that replaces its value, or None.
      read: the name of a place -> whether its value is captured, after its edit; None: nothing is read.
      captured: the values by name.
      positions: of the tokens of this step, int [#batch, 1]; None: the pass computes all positions.
    """
    edit: Editor = lambda name: None
    read: Callable[[str], bool] | None = None
    captured: dict[str, Array] = dataclasses.field(default_factory=dict)
    positions: Array | None = None

    def reads(self, name: str) -> bool:
        """Returns whether the value of a place is captured."""
        return self.read is not None and self.read(name)


_lens: contextvars.ContextVar[Lens | None] = contextvars.ContextVar('lens', default=None)


@contextlib.contextmanager
def _active(lens: Lens) -> Iterator[Lens]:
    token = _lens.set(lens)
    try:
        yield lens
    finally:
        _lens.reset(token)


def place(module: Any, name: str, value: Array, relation: Relation = UNRESTRICTED) -> Array:
    """Returns the value at a place of `module`: unchanged, unless a lens edits it.

    Args:
      module: the module that computes the value; it has a `path`.
      name: one of AXES, or another word for a value with the axes SEQUENCE; '' for the output of the module.
      value: the value.
      relation: of 'scores' and 'weights', the relation of their queries and keys.

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
    # A loop over positions may compute a vector for each sentence: the axis of positions is missing.
    whole = jnp.expand_dims(value, 1) if value.ndim < len(axes) else value
    if edit is not None:
        pairs, length = axes == PAIRS, whole.shape[2 if axes == PAIRS else 1]
        positions = jnp.arange(length)[None] if lens.positions is None else lens.positions
        keys = None
        if pairs:
            keys = jnp.arange(whole.shape[3])[None] if relation.source is None else jnp.asarray(relation.source)
        edited = jnp.asarray(edit(whole, At(name, axes, positions, keys, relation.whole_mask() if pairs else None)))
        if edited.shape != whole.shape:
            raise ValueError(f'{name}: an edit returns the shape {edited.shape}, but the value has {whole.shape} '
                             f'({", ".join(axes)})')
        whole = edited.astype(value.dtype)
    if lens.reads(name):
        lens.captured[name] = whole
    return whole.reshape(value.shape)


def place_name(module: Any, name: str = '') -> str:
    """Returns the name of a place of a module."""
    return '/'.join([*module.path, *([name] if name else [])])


def axes_of(name: str) -> tuple[str, ...]:
    """Returns the names of the axes of a place."""
    return AXES.get(name.rpartition('/')[2], SEQUENCE)


def wanted(module: Any, *names: str) -> bool:
    """Returns whether a lens reads or edits one of these places, which not every kernel computes."""
    lens = _lens.get()
    paths = [place_name(module, name) for name in names] if lens else []
    return lens is not None and any(lens.reads(path) or lens.edit(path) is not None for path in paths)


def reading() -> bool:
    """Returns whether a lens captures values. Then blocks are not rematerialised: captured values leave them."""
    lens = _lens.get()
    return lens is not None and lens.read is not None


@contextlib.contextmanager
def at_positions(positions: Int[Array, '*#batch']) -> Iterator[None]:
    """Within this, values belong to one step of a search, at these positions: of all sentences, or of each one."""
    lens = _lens.get()
    if lens is None:
        yield
    else:
        with _active(dataclasses.replace(lens, positions=positions.reshape(-1, 1))):
            yield


# Loops over positions (lax.scan): values in the body of a loop leave it as outputs of the loop.

def loop_positions(length: int) -> Int[Array, '1 length'] | None:
    """Returns the positions of a loop's steps, an input of the body that `looped` makes; None without a lens."""
    return jnp.arange(length)[None] if _lens.get() else None


def looped(step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, tuple[Any, dict[str, Array]]]]:
    """Returns the body of a loop over positions with places in it.

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
    """Captures what the steps of a loop have captured: [batch, step, ...] becomes the axis of positions."""
    lens = _lens.get()
    if lens is None:
        return
    for name, value in captured.items():
        if axes_of(name) == PAIRS:  # [batch, step, head, 1, key]
            lens.captured[name] = jnp.moveaxis(value[:, :, :, 0], 1, 2)
        else:  # [batch, step, 1, ...]
            lens.captured[name] = value[:, :, 0]


def observing(apply: Callable[..., Any], edit: Editor | None = None,
              read: Callable[[str], bool] | None = None) -> Callable[..., tuple[Any, dict[str, Array]]]:
    """Returns a function that calls `apply` with a lens, and returns its result and the captured values.

    It is a pure function of its arguments, as `apply` is, so it can be compiled and differentiated. Within another lens
    it adds to it: an `Observed` module can be read, too.
    """
    def observed(*args, **kwargs):
        lens = _lens.get() or Lens()
        lens = dataclasses.replace(lens, edit=edit or lens.edit, read=read or lens.read,
                                   captured=lens.captured if read is None else {})
        with _active(lens):
            result = apply(*args, **kwargs)
        return result, lens.captured
    return observed


class Observed:
    """A module whose forward passes are edited at places. It has the attributes of the module.

    Attributes:
      module: the module.
      editor: the numbers that the edits use -> (the name of a place -> the function that replaces its value, or None).
        The numbers are `params[EDITS]`, arguments of a compiled program: other numbers compile nothing. Parameters
        without them, as in a training, give None.
    """

    def __init__(self, module: Any, editor: Callable[[Any], Editor]):
        self.module, self.editor = module, editor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def __class__(self) -> type:  # it stands where a module is expected
        return type(self.module)

    def clone(self, **attributes: Any) -> 'Observed':
        """Returns a copy with other attributes."""
        return Observed(self.module.clone(**attributes), self.editor)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's `apply`, with the edits."""
        numbers = variables['params'].get(EDITS)
        params = {name: part for name, part in variables['params'].items() if name != EDITS}
        apply = observing(self.module.apply, self.editor(numbers))
        return apply({**variables, 'params': params}, *args, **kwargs)[0]
