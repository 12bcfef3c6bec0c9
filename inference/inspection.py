"""Reads values inside a model at named places (model/places.py), for texts or images.

A value is a NumPy array with the names of its axes, and the pieces of text that belong to the entries of an axis.
xarray would be the usual type, but the import of xarray takes as long as a translation and needs pandas. So only
`Values.to_xarray` imports xarray.
"""

import dataclasses
import functools
import importlib
import itertools
import math
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from inference.edits import FREE, Edit, Sizes, matching
from inference.generate import Generator
from inference.inputs import checked_texts, is_pair
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from inference.predict import Predictor
from inference.translate import Translator
from input_pipeline.tokenizer import BOS
from model.patches import visible_patches
from model.places import argument_of, axes_of, observing
from runtime.errors import UserError

MOST_GB = 4.0  # default limit for the size of all captured values
ROWS = 64  # maximum number of texts that the model reads at a time

Answerer = Translator | Generator | Predictor
# A cache {module: {shapes of its arguments: shapes at its places}}. Computing the shapes takes up to a second. Equal
# modules can have inputs of different sizes, and then different shapes.
_SHAPES = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Values:
    """The value at one place of a model, for one text or example.

    Attributes:
      name: the name of the place.
      axes: the names of the axes.
      values: the array, in float32.
      labels: {axis: the piece of text of each entry}, for axes of tokens.
    """
    name: str
    axes: tuple[str, ...]
    values: Shaped[np.ndarray, '...']
    labels: Mapping[str, list[str]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype, copy=copy)

    def to_xarray(self) -> Any:
        """Returns an xarray.DataArray.

        Raises:
          UserError: if xarray is not installed.
        """
        try:
            xarray = importlib.import_module('xarray')
        except ImportError:
            raise UserError('to_xarray needs xarray, which is not installed. Run pip install xarray') from None
        return xarray.DataArray(self.values, dims=self.axes, coords=dict(self.labels), name=self.name)


class Inspected(dict[str, Values]):
    """The captured values for one text: a dict from the name of a place to its `Values`."""

    def stacked(self, pattern: str) -> Values:
        """Stacks the values of all places that match a pattern. The pattern must match one place in each layer.

        The first axis of the result is 'layer'.

        Raises:
          UserError: if no place matches, or the matching places have different kinds or shapes.
        """
        parts = [self[name] for name in matching(pattern, {name: {} for name in self})]
        kinds = {(re.sub(r'(?<=layers)_\d+', '', part.name), part.values.shape) for part in parts}
        if len(kinds) > 1:
            raise UserError(f'place {pattern!r} matches different kinds of places. Use a pattern that matches one '
                            f'place in each layer, not {", ".join(part.name for part in parts[:8])}')
        return Values(pattern, ('layer', *parts[0].axes), np.stack([part.values for part in parts]), parts[0].labels)


def list_places(model: Answerer) -> dict[str, Sizes]:
    """Returns the shapes of the values at all places, {place: {axis: size}}. A size is None if it depends on the text.

    The parameters of the model may be {}, because only shapes are computed.
    """
    # All images or series have the same length.
    return _sizes(_shapes(model), {'batch'} if isinstance(model, Predictor) else FREE)


def places_of(module: Any, params: Any, inputs: Mapping[str, Any]) -> dict[str, Sizes]:
    """Returns {place: {axis: size}} for a module with the arguments `inputs`. `params` may be {}."""
    return _sizes(_computed_shapes(module, params, inputs))


def _shapes(model: Answerer) -> Mapping[str, tuple[int, ...]]:
    """Returns {place: shape of the value} for one example, or for one text of up to 4 tokens."""
    if isinstance(model, Predictor):
        inputs: Any = model.example_arguments()
    else:
        length = min(4, model.module.length_limit or 4)  # with 1 token, an edit to a wrong length would not be noticed
        names = ('source', 'target') if isinstance(model, Translator) else ('tokens',)
        inputs = {name: jnp.ones((1, length), jnp.int32) for name in names}
    by_inputs, key = _SHAPES.setdefault(model.module, {}), tuple(array.shape for array in inputs.values())
    if key not in by_inputs:
        by_inputs[key] = _computed_shapes(model.module, model.params, inputs)
    return by_inputs[key]


def _computed_shapes(module: Any, params: Any, inputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    apply = observing(module.apply, read=lambda name: True)
    params = params or nn.unbox(jax.eval_shape(module.init, jax.random.key(0), **inputs))['params']
    _, shapes = jax.eval_shape(lambda params, inputs: apply({'params': params}, **inputs), params, inputs)
    return {name: shapes[name].shape for name in sorted(shapes, key=_in_order)}


def _sizes(shapes: Mapping[str, tuple[int, ...]], free: Collection[str] = FREE) -> dict[str, Sizes]:
    """Returns {place: {axis: size}} for {place: shape}. The size of an axis in `free` is None."""
    return {name: {axis: None if axis in free else size for axis, size in zip(axes_of(name), shape, strict=True)}
            for name, shape in shapes.items()}


def inspect(model: Answerer, given: Iterable[Any], places: str | Sequence[str], options: SearchOptions,
            most_gb: float = MOST_GB) -> list[Inspected]:
    """Returns the values at places for each text or example.

    The model reads a whole text in one pass (teacher forcing). The steps of a search compute the same values.

    Args:
      model: the model.
      given: a list of outputs of the model, or raw inputs for a model of images or series. A translator also accepts
        sources, which are translated first, and pairs (source, target). A language model also accepts texts. It reads
        the start token before a text, and all tokens of the text. It does not read the last token of a continuation,
        because this token is only predicted. Tokens after the first window are left out, with a warning.
      places: names or patterns of places.
      options: the search options for the translation of sources.
      most_gb: the maximum size of all values together, in GB.

    Raises:
      UserError: if no place matches, or the values are larger than `most_gb`.
    """
    names, rows = _names(model, places), _rows(model, given, options)
    _check_size(rows, names, _shapes(model), most_gb)
    return _values(model, rows, names)


def inspect_each(model: Answerer, given: Iterable[Any], places: str | Sequence[str], options: SearchOptions,
                 most_gb: float = MOST_GB) -> Iterator[Inspected]:
    """Yields the results of `inspect`, in order. All values of a long list of texts would not fit into memory.

    The model reads up to ROWS texts at a time: fewer if their values together are larger than `most_gb`, but at least
    one. `inspect` explains the arguments.
    """
    names = _names(model, places)
    return _each(model, _rows(model, given, options), names, most_gb)


def _names(model: Answerer, places: str | Sequence[str]) -> list[str]:
    """Returns the names of the places that match the names or patterns `places`, in the order of the layers."""
    listed = list_places(model)
    patterns = [places] if isinstance(places, str) or not isinstance(places, Iterable) else list(places)
    return sorted({name for pattern in patterns for name in matching(pattern, listed)}, key=_in_order)


@functools.lru_cache(maxsize=16)  # another call with the same places needs no compilation
def _program(module: Any, names: tuple[str, ...]) -> Callable[[Any, Mapping[str, Any]], dict[str, Array]]:
    """Returns a compiled function (parameters, arguments of the module) -> {place: value}."""
    apply = observing(module.apply, read=set(names).__contains__)
    return jax.jit(lambda params, inputs: apply({'params': params}, **inputs)[1])


@dataclasses.dataclass(frozen=True)
class _Row:
    """The arguments of the module for one text or example.

    Attributes:
      inputs: {name of the argument: value}.
      pieces: {name of the argument: pieces of text}; {} for images and series.
    """
    inputs: Mapping[str, Any]
    pieces: Mapping[str, list[str]]

    @property
    def length(self) -> int:
        return max(map(len, self.inputs.values()))

    def side(self, name: str, axis: str) -> str:
        """Returns the name of the argument that contains the tokens along `axis` of the place `name`."""
        return argument_of(name, axis, list(self.inputs))

    def cut(self, name: str, array: Shaped[np.ndarray, '...']) -> Values:
        """Returns the values at the place `name` for this text, without padding."""
        axes, labels = axes_of(name)[1:], {}
        for index, axis in enumerate(axes):
            if axis in FREE and self.pieces:
                labels[axis] = self.pieces[self.side(name, axis)]
                array = np.take(array, range(len(labels[axis])), axis=index)
        if not labels:  # np.take copies. A view would be read-only, and would keep the whole batch in memory
            array = array.copy()
        return Values(name, axes, array, labels)


def _rows(model: Answerer, given: Iterable[Any], options: SearchOptions) -> list[_Row]:
    """Returns the arguments of the module for each text or example."""
    if isinstance(model, Predictor):
        arguments = model.arguments(np.asarray(given))
        return [_Row(dict(zip(arguments, row, strict=True)), {}) for row in zip(*arguments.values(), strict=True)]
    if isinstance(given, (str, Output)) or not isinstance(given, Iterable):
        raise UserError('the texts or outputs must be a list. Put a single text or output into a list')
    given = list(given)  # an iterator such as zip(...) can be read only once
    for number, text in enumerate(given, 1):
        if not (isinstance(text, str | Output) or isinstance(model, Translator) and is_pair(text)):
            kinds = 'a source, a pair (source, target)' if isinstance(model, Translator) else 'a text'
            raise UserError(f'text {number} is {str(text)[:80]!r}: must be {kinds} or an output of the model')
    texts = [(row, text) for row, text in enumerate(given) if not isinstance(text, Output)]
    outputs = {row: output for row, output in enumerate(given) if isinstance(output, Output)}
    plain = [pair for pair in texts if isinstance(pair[1], str)]
    if isinstance(model, Generator):
        encode = model.tokenizers['target'].encode
        outputs |= {row: Output(text, [BOS, *encode(text)], [Hypothesis('', [], 0.0, 0.0)])
                    for (row, _), text in zip(texts, checked_texts([text for _, text in texts]), strict=True)}
    else:
        outputs |= zip([row for row, _ in plain], model.translate([text for _, text in plain], options), strict=True)
        for row, (source, target) in ((row, checked_texts(pair)) for row, pair in texts if not isinstance(pair, str)):
            outputs[row] = model.unscored(source, target, options, row)
    ordered = [outputs[row] for row in range(len(given))]
    if isinstance(model, Generator):
        ordered = model.in_one_window(ordered)
    rows = []
    for output in ordered:
        inputs, _ = model.read_and_written(output)
        if isinstance(model, Generator) and not output.hypotheses[0].tokens:
            inputs = {'tokens': output.source_tokens}  # without a continuation, all tokens are read
        sides = {'source': 'source'} if isinstance(model, Translator) else {}
        rows.append(_Row(inputs, {name: model.tokenizers[sides.get(name, 'target')].pieces(tokens)
                                  for name, tokens in inputs.items()}))
    return rows


def _values(model: Answerer, rows: Sequence[_Row], names: Sequence[str]) -> list[Inspected]:
    """Computes the values at the places `names` for each text or example."""
    captured = _program(model.module, tuple(names))
    results: list[Inspected] = [Inspected() for _ in rows]
    order = sorted(range(len(rows)), key=lambda row: -rows[row].length)
    for begin in range(0, len(order), ROWS):
        part = order[begin:begin + ROWS]
        values = captured(model.params, _batch(model, [rows[row] for row in part]))
        for name in names:
            arrays = np.asarray(values[name], np.float32)  # np.savez loses the dtype bfloat16
            for index, row in enumerate(part):
                results[row][name] = rows[row].cut(name, arrays[index])
    return [Inspected({name: result[name] for name in names}) for result in results]


def _each(model: Answerer, rows: Sequence[_Row], names: Sequence[str], most_gb: float = MOST_GB) -> Iterator[Inspected]:
    """Yields the values for each text or example, in order. `inspect_each` explains `most_gb`."""
    shapes, room = _shapes(model), 0.0
    parts: list[list[_Row]] = []
    for row in rows:
        gigabytes = _gigabytes(row, names, shapes)
        if not parts or len(parts[-1]) == ROWS or gigabytes > room:
            parts.append([])
            room = most_gb
        parts[-1].append(row)
        room -= gigabytes
    return itertools.chain.from_iterable(_values(model, part, names) for part in parts)


def _batch(model: Answerer, rows: Sequence[_Row]) -> dict[str, Any]:
    names = rows[0].inputs
    if isinstance(model, Predictor):
        return {name: np.stack([row.inputs[name] for row in rows]) for name in names}
    count = 1 << (len(rows) - 1).bit_length()
    return {name: model.padded([row.inputs[name] for row in rows], count) for name in names}


def _check_size(rows: Sequence[_Row], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]],
                most_gb: float) -> None:
    """Raises UserError if the requested values together are larger than `most_gb`. `shapes` is from `_shapes`."""
    gigabytes = sum(_gigabytes(row, names, shapes) for row in rows)
    if not gigabytes <= most_gb:
        raise UserError(f'the values at {len(names)} places for {len(rows)} inputs have {gigabytes:.2g} GB, more than '
                        f'most_gb={most_gb:g}. Read fewer places or inputs at a time, or increase most_gb')


def _gigabytes(row: _Row, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the size of the values at the places `names` for one text or example, in GB."""
    return sum(4 * math.prod(  # all images or series have the same shapes; texts have different lengths
        len(row.pieces[row.side(name, axis)]) if axis in FREE and row.pieces else length
        for axis, length in zip(axes_of(name)[1:], shapes[name][1:], strict=True)) for name in names) / 1e9


def resolved(model: Answerer, edit: Edit, places: Mapping[str, Sizes], options: SearchOptions,
             split: Any = None) -> dict[str, Any]:
    """Returns {place: array}, with one array for each place of an edit. Returns {} if the edit has no array.

    If the edit has texts, the model reads the texts, and the arrays are computed from its values at the places. `split`
    is a function that takes the name of a split and returns the texts of this split.

    Raises:
      UserError: if no place matches, or the model cannot read the texts.
    """
    names, by = matching(edit.place, places), edit.by
    if edit.edit == 'freeze' and isinstance(by, str):
        return {}
    if edit.has_text:
        if isinstance(model, Predictor) and not (edit.edit == 'mean' and isinstance(by, str)):
            raise UserError(f'{edit.where}: by={str(by)[:80]!r}: the model reads no text. Use numbers')
        if edit.edit == 'replace':
            values, = inspect_each(model, [by], names, options)
            return {name: values[name].values for name in names}
        return _means(model, _rows(model, split(by) if isinstance(by, str) else by, options), names)
    # A copy, because the caller may change the array later.
    return {} if by is None else dict.fromkeys(names, np.array(by, np.float32))


def _means(model: Answerer, rows: Sequence[_Row], names: Sequence[str]) -> dict[str, Float[np.ndarray, '...']]:
    """Returns {place: mean value}. The mean is over all tokens of all texts, without hidden patches of series."""
    @functools.cache
    def visible(tokens):  # [row, token]
        steps = np.stack([row.inputs['visible'] for row in rows])
        return np.asarray(visible_patches(steps, model.module.patch, tokens))

    sums: dict[str, Any] = dict.fromkeys(names, 0.0)
    counts = dict.fromkeys(names, 0)
    for number, inspected in enumerate(_each(model, rows, names)):
        for name, value in inspected.items():
            array = value.values if 'position' in value.axes else value.values[None]
            if 'position' in value.axes and 'visible' in rows[number].inputs:
                array = array[visible(len(array))[number]]
            sums[name] += array.sum(axis=0, dtype=np.float64)
            counts[name] += len(array)
    return {name: sums[name] / counts[name] for name in names}


def _in_order(name: str) -> list[tuple[str, int]]:
    """Returns a sort key for names of places that orders layers by number: layer 2 comes before layer 10."""
    parts = [(part, part.rpartition('_')) for part in name.split('/')]
    return [(head, int(number)) if number.isdecimal() else (part, -1) for part, (head, _, number) in parts]

