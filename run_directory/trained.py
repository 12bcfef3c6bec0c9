"""Reads trained models from run directories, for decoding or as teachers of other models."""

import contextlib
import functools
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

import model
from configs.options import TEXTS, flatten
from configs.tasks import TASKS
from input_pipeline.data import Data, read_sizes
from input_pipeline.kept_data import KEPT, SIZES, load_tokenizers
from input_pipeline.tokenizer import PAD, Tokenizer
from model import Params
from model.build import build_model
from model.ensemble import Ensemble
from run_directory.checkpoints import Checkpoints, checkpoint_options
from run_directory.initial import split_choice
from run_directory.records import lowered_options, read_config
from runtime.cache import cache_folder
from runtime.errors import UserError
from runtime.files import expanded
from runtime.once import log_once

VOCABULARY = ('task', *(f'data.tokenizer.{name}' for name in (  # the options that determine the vocabulary
    'kind', 'vocab_size', 'joint', 'split_digits', 'normalization')))
CAN_JOIN = ('translator', 'generator')  # values of `Task.answerer` for models that can be members of an ensemble


class TrainedModel(NamedTuple):
    """A Flax module with its parameters and tokenizers: the model of one run, or an ensemble of several runs.

    The model may also be imported from a folder that another library has written. `inference.run.Run` adds the search
    that produces outputs.

    Attributes:
      workdirs: the run directory, or a run directory for each member of an ensemble.
      config: the config of the run. For an ensemble, the config of the first run, but with the smallest maximum length
        of all members.
      module: the module that the config describes, or an Ensemble.
      params: the parameters of the module.
      steps: the steps of the checkpoints that were read. For an ensemble, a list of steps for each member.
      tokenizers: {'source': tokenizer, 'target': tokenizer} or {'text': tokenizer}; empty for images and series.
      sizes: the content of sizes.json, such as the sizes of the vocabularies. The module was built with these sizes.
    """
    workdirs: list[Path]
    config: ConfigDict
    module: nn.Module
    params: Params
    steps: list[Any]
    tokenizers: Mapping[str, Tokenizer]
    sizes: Mapping[str, Any]


def run_paths(text: str) -> list[Path]:
    """Splits a list of run directories, such as 'A' or 'A,B,C'. Names may contain commas, as in sweeps.

    Raises:
      UserError: if a name is empty.
    """
    paths, rest = [], text.split(',')
    while rest:
        if not rest[0]:
            raise UserError(f'{text!r} has an empty name. Write the run directories as A,B,C')
        # Takes the longest name that exists. If no such name exists, takes the whole remaining text. Then the code that
        # reads the run reports the error.
        counts = range(len(rest), 0, -1)
        count = next((count for count in counts if expanded(','.join(rest[:count])).is_dir()), len(rest))
        paths.append(expanded(','.join(rest[:count])))
        rest = rest[count:]
    return paths


def read_model(workdir: Path, checkpoint: str, dtype: str | None = None) -> TrainedModel:
    """Reads the trained model of a run. `dtype` overrides config.model.dtype.

    Raises:
      UserError: if the directory is not a run directory, the checkpoint does not exist, or the files do not match each
        other.
    """
    config = read_config(workdir)
    params, steps = Checkpoints(workdir, **checkpoint_options(config)).parameters(checkpoint)
    return make_model(workdir, config, params, steps, dtype)


def make_model(folder: Path, config: ConfigDict, params: Params, steps: Sequence[int],
               dtype: str | None = None) -> TrainedModel:
    """Makes a trained model from a config and parameters. Reads the tokenizers and sizes.json in `folder`.

    Raises:
      UserError: if config, parameters, tokenizers and sizes do not match each other.
    """
    config.model.dtype = dtype or config.model.dtype
    tokenizers, sizes = load_tokenizers(folder / KEPT), read_sizes(folder, config.task)
    with parts_of_one_run(folder):
        module = build_model(config.model, **sizes, pad=PAD)
        _check_parameters(module, config.task, sizes, params)
    return TrainedModel([folder], config, module, params, list(steps), tokenizers, sizes)


def vocabulary_difference(config: ConfigDict, tokenizers: Mapping[str, Tokenizer], other: TrainedModel) -> str:
    """Returns a phrase that describes how the vocabularies of two models differ, or '' if they are equal.

    The first model has the given config and tokenizers. The second model is `other`. Two models have the same
    vocabulary if they have the same task and if their tokenizers are equal byte for byte.
    """
    if other.config.task != config.task:
        return f'has another task ({other.config.task})'
    if sides := [side for side, tokenizer in tokenizers.items() if other.tokenizers[side].model != tokenizer.model]:
        return f'has another vocabulary ({KEPT}/{sides[0]}.model)'
    return ''


def join_models(models: Sequence[TrainedModel]) -> TrainedModel:
    """Returns an ensemble of the models. Returns the model itself if there is only one model.

    Raises:
      UserError: if a model cannot be a member of the ensemble.
    """
    first = models[0]
    if len(models) == 1:
        return first
    if TASKS[first.config.task].answerer not in CAN_JOIN:
        raise UserError(f'{first.workdirs[0]} is a run of task={first.config.task}, which cannot be in an ensemble. '
                        'Use runs that translate or generate text')
    _refuse_edits(models, 'An ensemble')
    for member in models[1:]:
        if difference := vocabulary_difference(first.config, first.tokenizers, member):
            raise UserError(f'{member.workdirs[0]} {difference} than {first.workdirs[0]}. The runs of an ensemble must '
                            'have the same task and the same vocabulary')
        if member.config.data.packing != first.config.data.packing:  # decides whether texts begin with the start token
            raise UserError(f'{member.workdirs[0]} has config.data.packing={member.config.data.packing}, and '
                            f'{first.workdirs[0]} has {first.config.data.packing}. The runs of an ensemble must have '
                            'the same config.data.packing. Remove one of the runs')
    config = first.config.copy_and_resolve_references()
    length = TASKS[config.task].longest.removeprefix('data.')
    config.data[length] = min(model.config.data[length] for model in models)
    return TrainedModel([model.workdirs[0] for model in models], config,
                        Ensemble(tuple(model.module for model in models)),
                        {f'members_{index}': model.params for index, model in enumerate(models)},
                        [model.steps for model in models], first.tokenizers, first.sizes)


def vocabulary_from(config: ConfigDict, asked: Collection[str]) -> Path | None:
    """Returns the run directory from which a new run takes its tokenizers, or None if the new run learns tokenizers.

    With a teacher, this is the directory of the first teacher. Otherwise, it is the directory in
    config.train.init_from if config.train.init_vocabulary is True. Images and series have no vocabulary.

    That run may have lowered a tokenizer option, because there was too little data. If the new run requests the value
    from before the lowering, `config` gets the lowered value. Options in `asked`, which the user set, are not changed.

    Raises:
      UserError: if the new run and the run in that directory have different tasks or tokenizer options.
    """
    train = config.train
    if TASKS[config.task].data not in TEXTS['task.data']:
        return None
    if train.teacher:
        path, option, why = run_paths(train.teacher)[0], 'teacher', 'A student uses the vocabulary of its teacher'
    elif train.init_from and train.init_vocabulary:
        path, option = split_choice(train.init_from)[0], 'init_from'
        why = ('The new run uses the vocabulary of that run. To make a vocabulary from the new data, set '
               'config.train.init_vocabulary=False')
    else:
        return None
    required, lowered = flatten(read_config(path)), lowered_options(path)
    for key, value in flatten(config).items():
        if key not in VOCABULARY or value == required[key]:
            continue
        if lowered.get(key) == value and key not in asked:
            config.update_from_flattened_dict({key: required[key]})
            log_once(f'config.{key}={required[key]!r} is used instead of {value!r}, as in the run '
                     f'config.train.{option}={train[option]}, whose value was lowered: there was too little data')
        else:
            raise UserError(f'config.{key}={value!r}: must be {required[key]!r}, as in the run '
                            f'config.train.{option}={train[option]}. {why}')
    return path


def read_teacher(config: ConfigDict, data: Data) -> TrainedModel:
    """Reads the teacher model in config.train.teacher. If the option lists several runs, the teacher is their ensemble.

    Raises:
      UserError: if the teacher cannot be read, was trained with edits, has another task or vocabulary than this run,
        or does not support texts of the maximum length of this run.
    """
    option = f'config.train.teacher={config.train.teacher}'
    models = [read_model(path, config.train.teacher_checkpoint) for path in run_paths(config.train.teacher)]
    _refuse_edits(models, 'A teacher')
    teacher = join_models(models)
    if difference := vocabulary_difference(config, data.tokenizers, teacher):
        raise UserError(f'{option}: the teacher {teacher.workdirs[0]} {difference} than this run. Use a teacher with '
                        'the same task and vocabulary')
    longest, limit = TASKS[config.task].longest, teacher.module.length_limit
    if limit and flatten(config)[longest] > limit:
        raise UserError(f'{option}: the teacher supports at most {limit} tokens, but config.{longest}='
                        f'{flatten(config)[longest]}. Lower config.{longest} to {limit}')
    return teacher


def _refuse_edits(models: Sequence[TrainedModel], user: str) -> None:
    """Raises UserError if a model was trained with edits. `user` is the subject of the message, such as 'A teacher'."""
    for trained in models:
        if trained.config.train.edits:
            raise UserError(f'{trained.workdirs[0]} was trained with config.train.edits. {user} cannot apply these '
                            'edits. Use runs without config.train.edits')


@contextlib.contextmanager
def parts_of_one_run(workdir: Path) -> Iterator[None]:
    """Runs the body, which combines the files of a run. Raises UserError if the files do not match each other."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f'{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}'
        raise UserError(f'{workdir}: config.json and {KEPT}/{SIZES} do not fit the checkpoint: {reason}. Use all three '
                        'files of the same run') from None


def parameter_shapes(module: nn.Module, task: str, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a module's parameters as {name: shape}.

    A name is a path such as 'encoder/layers_0/feed_forward/inner/kernel'.

    `sizes` is the content of sizes.json, as in `TrainedModel`.
    """
    return _traced_shapes(module, *_input_sizes(task, sizes))


def _input_sizes(task: str, sizes: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int]:
    """Returns the kind of data of the task, the shape of an example, and the number of outputs of the model."""
    return TASKS[task].data, tuple(sizes.get('shape', ())), sizes.get('outputs', 0)


@functools.lru_cache(maxsize=2)  # an import needs the shapes before and after it writes the run directory
def _traced_shapes(module: nn.Module, data: str, shape: tuple[int, ...], outputs: int) -> dict[str, tuple[int, ...]]:
    tokens = np.ones((1, 1), np.int32)
    texts: dict[str, dict[str, np.ndarray]] = {
        'pairs': {'source': tokens, 'target': tokens}, 'documents': {'tokens': tokens}}
    inputs = texts.get(data) or {'inputs': np.zeros((1, *shape), np.float32)}
    if data == 'series':
        inputs['following'] = np.zeros((1, outputs // shape[-1], shape[-1]), np.float32)
    fresh = jax.eval_shape(lambda inputs: nn.unbox(module.init(jax.random.key(0), **inputs)), inputs)
    return _shapes(fresh['params'])


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    leaves: dict[str, Any] = flatten_dict(params, sep='/')
    return {name: leaf.shape for name, leaf in leaves.items()}


def _check_parameters(module: nn.Module, task: str, sizes: Mapping[str, Any], params: Params) -> None:
    """Raises ValueError if names or shapes of `params` do not match the module. The message names one parameter.

    The check traces the module. This takes a tenth of the time of a short decoding. So the check is not repeated for a
    combination of code, module, sizes of the inputs and shapes of the parameters that has passed before. A file in the
    user's cache records that a combination has passed.
    """
    shapes = _shapes(params)
    code = [(path.name, path.stat().st_mtime_ns) for path in sorted(Path(model.__file__).parent.glob('*.py'))]
    combination = code, module, _input_sizes(task, sizes), sorted(shapes.items())
    key = hashlib.sha256(repr(combination).encode()).hexdigest()
    if (passed := cache_folder('') / 'checked' / key).exists():
        return
    expected = parameter_shapes(module, task, sizes)
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(f'{len(wrong)} of {len(expected)} parameters do not fit, such as {name}: '
                         f'{shapes.get(name, "none")} in the checkpoint, {expected.get(name, "none")} in the model')
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
