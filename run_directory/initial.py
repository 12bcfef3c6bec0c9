"""Reads the initial parameters of a training from another run, for fine-tuning."""

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Bool, Float
from ml_collections import ConfigDict

from configs.options import TEXTS
from configs.tasks import TASKS
from input_pipeline.data import Data, read_sizes
from input_pipeline.input_format import InputFormat
from input_pipeline.kept_data import KEPT, load_tokenizers
from input_pipeline.tokenizer import Tokenizer
from model import Params
from model.patches import patch_grid
from run_directory.checkpoints import Checkpoints, checkpoint_options
from run_directory.records import read_config
from runtime.errors import UserError, first_names
from runtime.files import expanded

DATA_AXES = {'vocab', 'position', 'patch'}  # axes of parameters whose sizes depend on the data, not on model options
MAX_NAMES = 4  # largest number of parameters that a line of the log lists

log = logging.getLogger('allyouneed.train')


class InitialValues(NamedTuple):
    """The initial values of a parameter, taken from another run.

    Attributes:
      values: an array with the shape of the parameter.
      rows: True for the rows that get these values. `rows` broadcasts to the shape of `values`. The remaining rows
        are initialised randomly.
    """
    values: Float[np.ndarray, '*shape']
    rows: Bool[np.ndarray, '*#shape']


def split_choice(choice: str) -> tuple[Path, str]:
    """Splits 'RUN' or 'RUN:CHECKPOINT', such as 'runs/a:average:5', into the run directory and the checkpoint."""
    parts = choice.split(':')
    for count in range(len(parts), 0, -1):  # the name of a directory may contain colons
        path = expanded(':'.join(parts[:count]))
        if path.is_dir():
            return path, ':'.join(parts[count:]) or 'best'
    return expanded(choice), 'best'  # the code that reads the run reports that the directory does not exist


def read_initial(config: ConfigDict, data: Data, boxed: Params) -> dict[str, InitialValues]:
    """Reads initial parameters from the run in config.train.init_from, and logs which parameters are used.

    A parameter is used if the other run has a parameter with the same name and shape. Axes that depend on the data may
    differ in size. If the other run shares one table of embeddings, and this run has a separate table of the source,
    both tables begin with the shared table. If the vocabularies differ, only the rows of the tokens in both
    vocabularies are used. If the tables of learned positions differ, only the rows of the positions in both tables are
    used. The position of a patch of an image is its row and column. If the runs have different classes or different
    predicted values, the output layer (the head) is initialised randomly. The head of a forecaster does not depend on
    the horizon, so it is initialised randomly only if the number of channels differs.

    Args:
      config: the config of the new run.
      data: the data of the new run.
      boxed: the shapes of the new run's parameters, in Flax metadata boxes with the names of the axes.

    Returns:
      {name: initial values}. Parameters that are initialised randomly have no entry.

    Raises:
      UserError: if the other run cannot be read, if only one of the two tasks reads text, or if the model of the other
        run has other sizes.
    """
    path, choice = split_choice(config.train.init_from)
    parent = read_config(path)
    if _reads_text(parent.task) != _reads_text(config.task):
        raise UserError(f'config.train.init_from={config.train.init_from}: that run has task={parent.task}, this run '
                        f'has task={config.task}, and only one of these tasks reads text. Use a run of the same task')
    params, steps = Checkpoints(path, **checkpoint_options(parent)).parameters(choice)
    parent_sizes = read_sizes(path, parent.task)
    tokenizers = load_tokenizers(path / KEPT) if data.tokenizers else {}
    fresh_head = not data.tokenizers and _outputs_differ(path, parent.task, data, config.task)
    saved: dict[str, Any] = flatten_dict(params, sep='/')
    leaves: dict[str, Any] = flatten_dict(boxed, sep='/')
    source, target = 'source_embedding/embedding', 'target_embedding/embedding'
    if source in leaves and source not in saved and target in saved:
        saved[source] = saved[target]  # the only table of that run is also the table of sources
    initial, partial, random, mismatched = {}, [], [], []
    for name, leaf in leaves.items():
        shape, axes, values = nn.unbox(leaf).shape, getattr(leaf, 'names', ()), saved.pop(name, None)
        if values is None:
            random.append(name)
            continue
        values, sizes = np.asarray(values), f'{name} ({values.shape} in that run, {shape} in this run)'
        vocabularies = _vocabularies(name, tokenizers, data.tokenizers) if 'vocab' in axes else None
        differing = {axis for axis, new, old in zip(axes or shape, shape, values.shape, strict=False) if new != old}
        if len(values.shape) != len(shape) or differing - DATA_AXES:
            mismatched.append(sizes)
        elif vocabularies:
            initial[name] = _by_name(values, axes.index('vocab'), *(
                tokenizer.pieces(range(len(tokenizer))) for tokenizer in vocabularies))
        elif 'position' in axes:
            axis = axes.index('position')
            initial[name] = _by_name(values, axis, _positions(name, values.shape[axis], parent.model, parent_sizes),
                                     _positions(name, shape[axis], config.model, data.sizes))
        elif differing or fresh_head and 'vocab' in axes:
            random.append(sizes)
        else:
            initial[name] = InitialValues(values, np.ones((), bool))
        if name in initial and not initial[name].rows.all():
            partial.append(f'{name} ({initial[name].rows.sum():,} of {initial[name].rows.size:,})')
    if mismatched or not initial:
        raise UserError(f'config.train.init_from={config.train.init_from}: the model of that run does not fit this '
                        f'model: {"; ".join(mismatched[:MAX_NAMES]) or "no parameter has the same name"}. Use the '
                        f'model options of that run: --config=configs/fine_tune.py:{path}')
    _log_origins(f'{path}, step {", ".join(map(str, steps))}', initial, partial, random, sorted(saved))
    return initial


def _log_origins(origin: str, initial: Mapping[str, InitialValues], partial: Sequence[str], random: Sequence[str],
                 unused: Sequence[str]) -> None:
    """Logs how many arrays are taken from the run `origin`, and which arrays are taken only in part or not at all."""
    log.info('initialised %d of %d arrays (%s parameters) from %s', len(initial), len(initial) + len(random),
             f'{sum(map(_count, initial.values())):,}', origin)
    for names, meaning in ((partial, 'initialised only in the rows that both runs have'),
                           (random, 'initialised randomly'),
                           (unused, 'not used, because this model has no parameter with this name')):
        if names:
            log.info('  %s: %s', meaning, first_names(names, MAX_NAMES))


def with_initial(initial: Mapping[str, InitialValues], fresh: Params) -> Params:
    """Returns the parameters `fresh`, with some values replaced by the values in `initial`.

    `fresh` are randomly initialised parameters. The leaves of this tree may be Flax metadata boxes.
    """
    if not initial:
        return fresh
    leaves = flatten_dict(fresh, sep='/')

    def replaced(leaf: Any, values: Any, rows: Any) -> Any:
        array = jnp.where(rows, values.astype(nn.unbox(leaf).dtype), nn.unbox(leaf))
        return leaf.replace_boxed(array) if isinstance(leaf, nn.meta.AxisMetadata) else array

    return unflatten_dict(leaves | {name: replaced(leaves[name], *initial[name]) for name in initial}, sep='/')


def _reads_text(task: str) -> bool:
    return TASKS[task].data in TEXTS['task.data']


def _outputs_differ(path: Path, parent_task: str, data: Data, task: str) -> bool:
    """Returns True if the two runs have different outputs, for images and series.

    If so, logs the outputs of both runs, because the output layer of the other run cannot be used. The names of values
    are compared only if both runs have names. The names of the channels of a forecast are not compared, because the
    embedding of these channels is also used for other names.
    """
    before, now = InputFormat.of(read_sizes(path, parent_task)), InputFormat.of(data.sizes)
    (kind, old), (new_kind, new) = _outputs(before, parent_task), _outputs(now, task)
    by_count = kind == 'channels' or kind == 'values' and not (before.target_names and now.target_names)
    if kind == new_kind and (len(old) == len(new) if by_count else old == new):
        return False
    log.info('the head starts with random values, because the outputs differ: %s in %s, %s in this run',
             _described(kind, old), path, _described(new_kind, new))
    return True


def _outputs(form: InputFormat, task: str) -> tuple[str, tuple[str, ...]]:
    """Returns the kind of the outputs, and their names.

    The kind is 'classes', 'values', or, for a forecast, 'channels'.
    """
    if TASKS[task].data == 'series':
        return 'channels', form.channels
    return ('values', form.targets) if form.classes is None else ('classes', form.classes)


def _described(kind: str, names: tuple[str, ...]) -> str:
    return f'the {kind} {first_names(names, MAX_NAMES)}'


def _vocabularies(name: str, old: Mapping[str, Tokenizer],
                  new: Mapping[str, Tokenizer]) -> tuple[Tokenizer, Tokenizer] | None:
    """Returns the two different vocabularies of the parameter `name`: in the other run, and in this run.

    Returns None if the vocabularies are equal, or if one of the runs has no vocabulary. `old` and `new` are the
    tokenizers of the other run and of this run.
    """
    side = 'source' if name.startswith('source') else 'target'
    before, now = (tokenizers.get('text', tokenizers.get(side)) for tokenizers in (old, new))
    return None if before is None or now is None or before.model == now.model else (before, now)


def _positions(name: str, rows: int, model: ConfigDict, sizes: Mapping[str, Any]) -> Sequence[tuple[int, ...]]:
    """Returns the position of each row of the table `name`, from config.model and the sizes of a run.

    The position of a patch is its index along each axis, such as (row, column). The first row may belong to the class
    token, whose position is ().
    """
    of_patches = name == 'positions' and model.kind == 'patches'
    counts = patch_grid(tuple(sizes['shape'][:-1]), model.patches.patch)[0] if of_patches else (rows,)
    return [()] * (rows - math.prod(counts)) + [*np.ndindex(*counts)]


def _by_name(values: Float[np.ndarray, '...'], axis: int, old: Sequence[Hashable],
             new: Sequence[Hashable]) -> InitialValues:
    """Returns the `values` of another run, with the rows along `axis` in the order of `new`.

    `old` and `new` are the names of the rows in the other run and in this run: pieces of a vocabulary, or positions.
    Rows whose name is missing in `old` are initialised randomly.
    """
    index = dict(zip(old, range(values.shape[axis]), strict=False))
    places = np.array([index.get(row, -1) for row in new])
    rows = np.expand_dims(places >= 0, [other for other in range(values.ndim) if other != axis])
    return InitialValues(np.take(values, np.maximum(places, 0), axis=axis), rows)


def _count(initial: InitialValues) -> int:
    return int(np.broadcast_to(initial.rows, initial.values.shape).sum())
