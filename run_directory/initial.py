"""The parameters that a training begins with, where they are those of another run: fine-tuning."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Bool, Float
from ml_collections import ConfigDict

from input_pipeline.data import KEPT, Data, load_tokenizers
from input_pipeline.tokenizer import Tokenizer
from model import Params
from run_directory.checkpoints import Checkpoints
from run_directory.records import read_config
from runtime.errors import UserError
from runtime.files import expanded

OF_THE_DATA = {'vocab', 'position', 'patch'}  # axes of parameters whose sizes are not options of the model
MOST_NAMES = 4  # of a kind, in the log

log = logging.getLogger('allyouneed.train')


class Known(NamedTuple):
    """First values of a parameter.

    Attributes:
      values: of its shape.
      rows: which of them are meant, broadcast to that shape; the others are drawn as in a training from scratch.
    """
    values: Float[np.ndarray, '*shape']
    rows: Bool[np.ndarray, '*#shape']


def other_run(choice: str) -> tuple[Path, str]:
    """Returns the run directory and the checkpoint of 'RUN' or 'RUN:CHECKPOINT', as in 'runs/a:average:5'."""
    parts = choice.split(':')
    for count in range(len(parts), 0, -1):  # a name may have colons of its own
        path = expanded(':'.join(parts[:count]))
        if path.is_dir():
            return path, ':'.join(parts[count:]) or 'best'
    return expanded(choice), 'best'  # whoever opens it says that it is not there


def begin_from(config: ConfigDict, data: Data, boxed: Params) -> dict[str, Known]:
    """Reads what config.train.init_from names, and logs what is taken from it, what is fresh and what is left there.

    A parameter is taken where that run has one of the same name and shape. Some axes depend on the data: where the
    vocabularies differ, a piece that both have keeps its row; of learned positions those that both have are taken.
    `boxed` are the parameters' shapes, in Flax's boxes with the names of the axes.

    Returns:
      {name: first values}, without the parameters that are fresh.

    Raises:
      UserError: if the run cannot be read, or is of a model of other sizes.
    """
    path, choice = other_run(config.train.init_from)
    params, steps = Checkpoints(path, metric=read_config(path).eval.metric).parameters(choice)
    tokenizers = load_tokenizers(path / KEPT) if data.tokenizers else {}
    there: dict[str, Any] = flatten_dict(params, sep='/')
    leaves: dict[str, Any] = flatten_dict(boxed, sep='/')
    known, partly, fresh, unlike = {}, [], [], []
    for name, leaf in leaves.items():
        shape, axes, values = nn.unbox(leaf).shape, getattr(leaf, 'names', ()), there.pop(name, None)
        if values is None:
            fresh.append(name)
            continue
        values, sizes = np.asarray(values), f'{name} ({values.shape} there, {shape} here)'
        pair = _vocabularies(name, tokenizers, data.tokenizers) if 'vocab' in axes else None
        others = {axis for axis, here, size in zip(axes or shape, shape, values.shape, strict=False) if here != size}
        if len(values.shape) != len(shape) or others - OF_THE_DATA:
            unlike.append(sizes)
        elif pair:
            known[name] = _by_piece(values, axes.index('vocab'), *pair)
        elif others == {'position'}:
            known[name] = _by_position(values, axes.index('position'), shape)
        elif others:
            fresh.append(sizes)
        else:
            known[name] = Known(values, np.ones((), bool))
        if name in known and known[name].rows.ndim:
            partly.append(f'{name} ({known[name].rows.sum():,} of {known[name].rows.size:,})')
    if unlike or not known:
        raise UserError(f'config.train.init_from={config.train.init_from}: is of a model of other sizes: '
                        f'{"; ".join(unlike[:MOST_NAMES]) or "no parameter has a name that one here has"}. Give the '
                        f'model options of that run, as --config=configs/fine_tune.py:{path} does')
    log.info('begins with the parameters of %s, step %s: %d of %d, %s numbers', path, ', '.join(map(str, steps)),
             len(known), len(known) + len(fresh), f'{sum(map(_count, known.values())):,}')
    for names, what in ((partly, 'rows that both have'), (fresh, 'fresh'),
                        (sorted(there), 'left there, as this model has none of this name')):
        if names:
            log.info('  %s: %s%s', what, ', '.join(names[:MOST_NAMES]),
                     f' and {len(names) - MOST_NAMES} others' if len(names) > MOST_NAMES else '')
    return known


def put_first(known: Mapping[str, Known], fresh: Params) -> Params:
    """Returns the `fresh` parameters, in Flax's boxes or not, with the known values in their places."""
    if not known:
        return fresh
    leaves = flatten_dict(fresh, sep='/')

    def first(leaf: Any, values: Any, rows: Any) -> Any:
        found = jnp.where(rows, values.astype(nn.unbox(leaf).dtype), nn.unbox(leaf))
        return leaf.replace_boxed(found) if isinstance(leaf, nn.meta.AxisMetadata) else found

    return unflatten_dict(leaves | {name: first(leaves[name], *each) for name, each in known.items()}, sep='/')


def _vocabularies(name: str, theirs: Mapping[str, Tokenizer],
                  ours: Mapping[str, Tokenizer]) -> tuple[Tokenizer, Tokenizer] | None:
    """The vocabularies of a parameter, there and here, or None if they are the same or there are none."""
    side = 'source' if name.startswith('source') else 'target' if 'target' in ours else 'text'
    if {*ours} != {*theirs} or side not in ours or ours[side].model == theirs[side].model:
        return None
    return theirs[side], ours[side]


def _by_piece(values: Float[np.ndarray, '...'], axis: int, theirs: Tokenizer, ours: Tokenizer) -> Known:
    """Rows along `axis` for the vocabulary `ours`; a piece that `theirs` lacks has none."""
    number = {piece: index for index, piece in enumerate(theirs.pieces(range(len(theirs))))}
    places = np.array([number.get(piece, -1) for piece in ours.pieces(range(len(ours)))])
    rows = np.expand_dims(places >= 0, [other for other in range(values.ndim) if other != axis])
    return Known(np.take(values, np.maximum(places, 0), axis=axis), rows)


def _by_position(values: Float[np.ndarray, '...'], axis: int, shape: Sequence[int]) -> Known:
    """The positions of a table of `shape`, as far as they are there."""
    rows = np.expand_dims(np.arange(shape[axis]) < values.shape[axis],
                          [other for other in range(values.ndim) if other != axis])
    places = np.minimum(np.arange(shape[axis]), values.shape[axis] - 1)
    return Known(np.take(values, places, axis=axis), rows)


def _count(known: Known) -> int:
    return int(np.broadcast_to(known.rows, known.values.shape).sum())
