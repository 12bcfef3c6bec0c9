"""Trained models, read from their run directories: to answer, or to teach another one."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
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
from input_pipeline.data import KEPT, SIZES, Data, load_tokenizers, read_sizes
from input_pipeline.tokenizer import PAD, Tokenizer
from model import Params
from model.build import build_model
from model.ensemble import Ensemble
from run_directory.checkpoints import Checkpoints
from run_directory.initial import other_run
from run_directory.records import read_config
from runtime.cache import cache_folder
from runtime.errors import UserError
from runtime.files import expanded

VOCABULARY = ('task', *(f'data.tokenizer.{name}' for name in (  # options that decide it
    'kind', 'vocab_size', 'joint', 'split_digits', 'normalization')))
CAN_JOIN = ('translator', 'generator')  # answerers of models that can be an ensemble


class Trained(NamedTuple):
    """A trained model, or several as one.

    Attributes:
      workdirs: the run directory, or those of an ensemble.
      config: of the run; of an ensemble, that of the first run, with the least length that all of them have.
      module: what the config describes, or an Ensemble.
      params: its parameters.
      steps: the checkpoints that they come from, as Checkpoints.parameters gives them; of an ensemble, of each run.
      tokenizers: by the side of the text.
      sizes: of the data, which the module was built with.
    """
    workdirs: list[Path]
    config: ConfigDict
    module: nn.Module
    params: Params
    steps: list[Any]
    tokenizers: Mapping[str, Tokenizer]
    sizes: Mapping[str, Any]


def run_paths(text: str) -> list[Path]:
    """Returns the run directories of 'A' or 'A,B,C'. A name may have commas of its own, as those of a sweep's runs.

    Raises:
      UserError: if a name is empty.
    """
    paths, rest = [], text.split(',')
    while rest:
        if not rest[0]:
            raise UserError(f'{text!r} has an empty name among its run directories: they are written A,B,C')
        # The longest name that is there; or else all of it, and whoever opens it says that it is not there.
        counts = range(len(rest), 0, -1)
        count = next((count for count in counts if expanded(','.join(rest[:count])).is_dir()), len(rest))
        paths.append(expanded(','.join(rest[:count])))
        rest = rest[count:]
    return paths


def read_trained(workdirs: Sequence[Path], checkpoint: str, dtype: str | None = None) -> Trained:
    """Reads the model of a run, or the ensemble of several, with the same choice of checkpoints for each.

    A `dtype` takes the place of config.model.dtype.

    Raises:
      UserError: if a directory is not a run's, has no such checkpoint, or does not go together with the others.
    """
    return together([read_run(workdir, checkpoint, dtype) for workdir in workdirs])


def read_run(workdir: Path, checkpoint: str, dtype: str | None = None) -> Trained:
    """Reads the model of one run; as `read_trained`."""
    config = read_config(workdir)
    params, steps = Checkpoints(workdir, metric=config.eval.metric).parameters(checkpoint)
    return assembled(workdir, config, params, steps, dtype)


def assembled(folder: Path, config: ConfigDict, params: Params, steps: Sequence[int],
              dtype: str | None = None) -> Trained:
    """The model of a config and its parameters, with the tokenizers and the sizes that `folder` keeps.

    Raises:
      UserError: if they do not go together.
    """
    config.model.dtype = dtype or config.model.dtype
    tokenizers, sizes = load_tokenizers(folder / KEPT), read_sizes(folder, config.task)
    with parts_of_one_run(folder):
        module = build_model(config.model, **sizes, pad=PAD)
        _check_parameters(module, config.task, sizes, params)
    return Trained([folder], config, module, params, list(steps), tokenizers, sizes)


def other_vocabulary(config: ConfigDict, tokenizers: Mapping[str, Tokenizer], other: Trained) -> str:
    """Returns how the tokens of `other` differ from those of a run of this config and tokenizers; '' if they do not.

    Models of the same tokens are trained for one task, and their tokenizers are the same to the byte.
    """
    if other.config.task != config.task:
        return f'is a run of task={other.config.task}, which differs'
    if differing := [side for side, tokenizer in tokenizers.items() if other.tokenizers[side].model != tokenizer.model]:
        return f'has another vocabulary: its {KEPT}/{differing[0]}.model differs'
    return ''


def together(runs: Sequence[Trained]) -> Trained:
    """The models of several runs as one, their ensemble; of a single run, its model.

    Raises:
      UserError: if a run does not go together with the others.
    """
    first, *others = runs
    if not others:
        return first
    if TASKS[first.config.task].answerer not in CAN_JOIN:
        raise UserError(f'{first.workdirs[0]} is a run of task={first.config.task}: only runs that write text, '
                        'translations or continuations, make an ensemble')
    for other in others:
        if differs := other_vocabulary(first.config, first.tokenizers, other):
            raise UserError(f'{other.workdirs[0]} {differs} from that of {first.workdirs[0]}: an ensemble has runs of '
                            'one task and one vocabulary')
        if other.config.data.packing != first.config.data.packing:  # whether a text begins with the start token
            raise UserError(f'{other.workdirs[0]} has data.packing={other.config.data.packing}, and '
                            f'{first.workdirs[0]} {first.config.data.packing}: an ensemble is of runs that read texts '
                            'in the same way')
    config = first.config.copy_and_resolve_references()
    length = TASKS[config.task].longest.removeprefix('data.')
    config.data[length] = min(each.config.data[length] for each in runs)
    return Trained([each.workdirs[0] for each in runs], config, Ensemble(tuple(each.module for each in runs)),
                   {f'members_{index}': each.params for index, each in enumerate(runs)},
                   [each.steps for each in runs], first.tokenizers, first.sizes)


def vocabulary_from(config: ConfigDict) -> Path | None:
    """Returns the run directory whose tokenizers a new run takes over; None if it has its own.

    It is that of its first teacher, or else that of the run which it begins from, unless config.train.init_vocabulary
    is False. Images and series have no vocabulary.

    Raises:
      UserError: if the options of the tokenizers, or the task, are not that run's.
    """
    train = config.train
    if TASKS[config.task].data not in TEXTS['task.data']:
        return None
    if train.teacher:
        path, option, why = run_paths(train.teacher)[0], 'teacher', 'a student has the vocabulary of its teacher'
    elif train.init_from and train.init_vocabulary:
        path, option = other_run(train.init_from)[0], 'init_from'
        why = 'its vocabulary is taken over; or give train.init_vocabulary=False for one of this data'
    else:
        return None
    theirs = flatten(read_config(path))
    for key, value in flatten(config).items():
        if key in VOCABULARY and value != theirs[key]:
            raise UserError(f'config.{key}={value!r}: must be {theirs[key]!r}, as in the run of '
                            f'config.train.{option}={train[option]}: {why}')
    return path


def read_teacher(config: ConfigDict, data: Data) -> Trained:
    """Reads the model that config.train.teacher names, or the ensemble of several.

    Raises:
      UserError: if it cannot be read, has another task or vocabulary than `data`, or reads shorter texts only.
    """
    named = f'config.train.teacher={config.train.teacher}'
    teacher = read_trained(run_paths(config.train.teacher), config.train.teacher_checkpoint)
    if differs := other_vocabulary(config, data.tokenizers, teacher):
        raise UserError(f'{named}: {teacher.workdirs[0]} {differs} from that of this training')
    longest, limit = TASKS[config.task].longest, teacher.module.length_limit
    if limit and flatten(config)[longest] > limit:
        raise UserError(f'{named} has learned positions for {limit} tokens, but config.{longest}='
                        f'{flatten(config)[longest]}: lower that to {limit}')
    return teacher


@contextlib.contextmanager
def parts_of_one_run(workdir: Path) -> Iterator[None]:
    """Turns what is raised where a run's config, sizes and parameters do not fit each other into a UserError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f'{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}'
        raise UserError(f'{workdir}: its config.json and {KEPT}/{SIZES} do not make the model of its checkpoint: '
                        f'{reason}. Take all three from the same run') from None


def parameter_shapes(module: nn.Module, task: str, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a module's parameters by name: 'encoder/layers_0/feed_forward/inner/kernel'.

    `sizes` are those of the task's data.
    """
    tokens = np.ones((1, 1), np.int32)
    texts = {'pairs': {'source': tokens, 'target': tokens}, 'documents': {'tokens': tokens}}
    inputs = texts.get(TASKS[task].data) or {'inputs': np.zeros((1, *sizes['shape']), np.float32)}
    fresh = jax.eval_shape(lambda inputs: nn.unbox(module.init(jax.random.key(0), **inputs)), inputs)
    return _shapes(fresh['params'])


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    leaves: dict[str, Any] = flatten_dict(params, sep='/')
    return {name: leaf.shape for name, leaf in leaves.items()}


def _check_parameters(module: nn.Module, task: str, sizes: Mapping[str, Any], params: Params) -> None:
    """Raises ValueError, naming one, if `params` are not all the parameters of the module in their shapes.

    Tracing the module takes a tenth of the time of a short decoding. So a file in the user's cache records that the
    check has passed, for this module, these shapes and this code.
    """
    shapes = _shapes(params)
    code = [(path.name, path.stat().st_mtime_ns) for path in sorted(Path(model.__file__).parent.glob('*.py'))]
    key = hashlib.sha256(repr((code, module, sorted(shapes.items()))).encode()).hexdigest()
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
