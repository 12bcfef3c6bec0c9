"""Opens a run directory: its model, its config and its data."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from configs.options import choices
from configs.tasks import TASKS
from inference.editor import Editor
from inference.edits import Edit, Sizes, matching, parsed
from inference.forecast import Forecaster
from inference.generate import Generator
from inference.inspection import MOST_GB, Answerer, Inspected, inspect, inspect_each, list_places, places_of, resolved
from inference.options import SearchOptions, search_options
from inference.outputs import Output
from inference.predict import Predictor
from inference.predictions import Predictions
from inference.report import note_unknown
from inference.text import TextModel
from inference.translate import Translator
from input_pipeline.array_files import read_inputs
from input_pipeline.data import Data, open_data
from input_pipeline.input_format import InputFormat
from input_pipeline.splits import asked_splits
from input_pipeline.tokenizer import Tokenizer
from interchange.folders import read_models
from model import parameter_count
from model.build import build_model
from model.places import EDITS, Observed
from run_directory.trained import TrainedModel, parts_of_one_run
from runtime.cache import cache_folder, use_compilation_cache
from runtime.errors import UserError, prefixed
from runtime.files import expanded
from runtime.processes import check_devices

# {`answerer` of a task: the calls that `Run` supports}
CALLS = {'translator': 'run.translate or run.forced', 'generator': 'run.generate or run.forced',
         'predictor': 'run.predict', 'forecaster': 'run.predict'}
EDITS_OPTION = 'config.train.edits'
DOCUMENTS = 100  # for a language model, the edit 'mean' averages over this number of documents of a split


def make_answerer(config: ConfigDict, module: nn.Module, params: Any, tokenizers: Mapping[str, Tokenizer],
                  sizes: Mapping[str, Any]) -> Answerer:
    """Returns the object that computes answers with a module: a Translator, Generator, Predictor or Forecaster."""
    return ANSWERERS[TASKS[config.task].answerer](module, params, tokenizers, sizes, config.data)


# {`answerer` of a task (configs/tasks.py): function that returns an answerer}
ANSWERERS: Mapping[str, Callable[..., Answerer]] = {
    'translator': lambda module, params, tokenizers, sizes, data: Translator(
        module, params, tokenizers, data.max_length),
    'generator': lambda module, params, tokenizers, sizes, data: Generator(
        module, params, tokenizers['text'], data.context, data.packing == 'packed'),
    'predictor': lambda module, params, tokenizers, sizes, data: Predictor(
        module, params, InputFormat.of(sizes)),
    'forecaster': lambda module, params, tokenizers, sizes, data: Forecaster(
        module, params, dataclasses.replace(InputFormat.of(sizes), latest=True), data.horizon, data.season),
}


def trained_under_edits(config: ConfigDict, module: nn.Module, tokenizers: Mapping[str, Tokenizer],
                        sizes: Mapping[str, Any]) -> Any:
    """Returns a module that applies the edits of config.train.edits in each pass. Without edits, returns `module`.

    Raises:
      UserError: if an edit or a place does not exist. Also if an edit needs values that the model computes from texts,
        because this is not possible before training.
    """
    if not config.train.edits:
        return module
    return Observed(module, _trained_editor(config, list_places(make_answerer(config, module, {}, tokenizers, sizes))))


def _trained_editor(config: ConfigDict, places: Mapping[str, Sizes]) -> Editor:
    """Returns the edits in config.train.edits, checked against the places of the model."""
    edits = parsed(config.train.edits, EDITS_OPTION)
    for edit in edits:
        if edit.has_text:
            raise UserError(f'{EDITS_OPTION}: the edit {edit.edit!r} at {edit.place} needs values that the model '
                            'computes from texts. This is not possible in training. Use numbers')
    with prefixed(EDITS_OPTION):
        numbers = [{} if edit.by is None or isinstance(edit.by, str) else
                   dict.fromkeys(matching(edit.place, places), edit.by) for edit in edits]
        return Editor(edits, numbers, places)


def check_places(config: ConfigDict) -> None:
    """Checks the places in config.train.edits and config.track.places, before a run directory is created.

    The names of places depend neither on the data nor on the stem of a model of patches, which has no places. So this
    function reads no data, and uses the linear stem. `model.build.check_fits` checks the stem.

    Raises:
      UserError: if an edit or a place does not exist.
    """
    if not (config.train.edits or config.track.places):
        return
    patch, tokens = config.model.patches.patch, jnp.ones((1, 1), jnp.int32)  # each model can read one token
    sizes = dict.fromkeys(('source_vocab_size', 'target_vocab_size', 'vocab_size', 'outputs'), 8)
    example = jnp.zeros((1, patch, 1))
    inputs = {'translator': {'source': tokens, 'target': tokens}, 'generator': {'tokens': tokens},
              'predictor': {'inputs': example}, 'forecaster': {'inputs': example, 'following': example}}
    model = {**config.model, 'patches': {**config.model.patches, 'stem': 'linear'}}
    places = places_of(build_model(model, **sizes), {}, inputs[TASKS[config.task].answerer])
    if config.train.edits:
        _trained_editor(config, places)
    tracked_places(config, places)


def tracked_places(config: ConfigDict, places: Mapping[str, Sizes]) -> list[str]:
    """Returns the names of the places in config.track.places.

    The result has no attention scores, because masked scores are arbitrary and their statistics have no meaning.

    Raises:
      UserError: if no place matches a pattern, or a pattern matches only scores.
    """
    patterns = [pattern.strip() for pattern in config.track.places.split(',') if pattern.strip()]
    if config.track.places and not patterns:
        raise UserError(f'config.track.places={config.track.places!r} names no place. Use names or patterns of places')
    names = {pattern: matching(pattern, places, 'config.track.places: ') for pattern in patterns}
    useful = {pattern: [name for name in matches if not name.endswith('/scores')] for pattern, matches in names.items()}
    for pattern, matches in useful.items():
        if not matches:
            raise UserError(f'config.track.places: {pattern!r}: attention scores have no statistic, because masked '
                            f'scores are arbitrary. Use {names[pattern][0].removesuffix("scores")}weights')
    return sorted({name for matches in useful.values() for name in matches}, key=list(places).index)


class Run:
    """An opened run, or an ensemble of several runs.

    Attributes:
      workdirs: the run directories.
      workdir: the first run directory.
      config: the resolved config of the first run. It has the dtype that `load` received, if any.
      checkpoint: a list with the step of the loaded checkpoint. If several checkpoints are averaged, the list has the
        step of each. For an ensemble, there is such a list for each run.
      model: a Translator, Generator, Predictor or Forecaster, with the module and its parameters.
      options: the search options of the config.
      edits: the edits of the model (see `edited`), beginning with config.train.edits.
    """

    edits: tuple[Edit, ...] = ()

    def __init__(self, trained: TrainedModel):
        self.workdirs, self.workdir = trained.workdirs, trained.workdirs[0]
        self.config, self.checkpoint = trained.config, trained.steps
        self._trained = trained
        with parts_of_one_run(self.workdir):
            self.model = self._answerer(trained.module, trained.params)
        self._opened, self._numbers = self.model, ()
        self.options = search_options(self.config)
        if self.config.train.edits:
            learned = self.edited(parsed(self.config.train.edits, EDITS_OPTION))
            self.model, self.edits, self._opened = learned.model, learned.edits, learned.model

    def __repr__(self) -> str:
        languages = f' {self.config.data.source_lang}-{self.config.data.target_lang}' if (
            isinstance(self.model, Translator)) else ''
        kind = self.config.model.kind if len(self.workdirs) == 1 else f'ensemble of {len(self.workdirs)}'
        steps = ', '.join(map(str, self.checkpoint))
        edits = f' with {len(self.edits)} edits' if self.edits else ''
        return (f'<{self.config.task}{languages}: {kind}, {self.parameters:,} parameters of step {steps}{edits} '
                f'in {", ".join(map(str, self.workdirs))}>')

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return parameter_count(self._trained.params)

    def translate(self, sentences: Sequence[str], options: SearchOptions | None = None, *,
                  prefixes: Sequence[str] | None = None, avoid: Sequence[str] | None = None) -> list[Output]:
        """Returns translations in the order of `sentences`.

        The default of `options` is `self.options`. With `prefixes`, each translation begins with its prefix (see
        `Translator.translate`). `avoid` overrides `options.avoid`; outputs contain none of these words or phrases.

        Raises:
          UserError: if the model does not translate, or as in `Translator.translate`.
        """
        translator = self._supported(Translator, 'translation')
        return self._noted(translator.translate(sentences, self._options(options, avoid), prefixes=prefixes))

    def generate(self, prompts: Sequence[str], options: SearchOptions | None = None, *,
                 avoid: Sequence[str] | None = None) -> list[Output]:
        """Returns continuations in the order of `prompts`. `translate` explains the other arguments.

        Raises:
          UserError: if the model is not a language model, or as in `Generator.generate`.
        """
        generator = self._supported(Generator, 'continuation of prompts')
        return self._noted(generator.generate(prompts, self._options(options, avoid)))

    def predict(self, inputs: np.ndarray | Sequence | str | Path, batch_size: int = 64) -> Predictions:
        """Returns the predictions for images or series, in order, with the names and probabilities of the classes.

        Args:
          inputs: raw inputs [n, *space, channels]; or the path of a folder of images, an image, a .csv or an .npz file.
          batch_size: the number of inputs at a time.

        Raises:
          UserError: if the inputs do not have the form of the training inputs. `Predictor.predict` gives the details.
        """
        model = self._supported(Predictor, 'predictions of classes or values')
        if isinstance(inputs, str | Path):
            names, raw = read_inputs(str(expanded(inputs)), model.form)
            return model.predict_raw(raw, batch_size, names)
        return model.predict(inputs, batch_size)

    def forced(self, examples: Sequence[Any], options: SearchOptions | None = None) -> list[Output]:
        """Scores existing translations or texts. Returns an output with the log-probability for each example.

        Args:
          examples: pairs (source, target); for a language model, texts.
          options: the options for the length penalty and the batch size; by default `self.options`.

        Raises:
          UserError: if the model does not write text, or as in `Translator.forced_all`.
        """
        model = self._supported(Translator | Generator, 'scores of texts')
        return self._noted(model.forced_all(examples, options or self.options))

    def places(self) -> dict[str, Sizes]:
        """Returns the shapes of the values at all places: {place: {axis: size or None}}.

        A size is None if it depends on the text.
        """
        return list_places(self._opened)

    def inspect(self, inputs: Iterable[Any] | Path, places: str | Sequence[str],
                options: SearchOptions | None = None, most_gb: float = MOST_GB) -> list[Inspected]:
        """Returns the values at places, for each text or example; see `inference.inspection.inspect`.

        The inputs of a model of images or series may also be a path, as in `predict`.
        """
        return inspect(self.model, self._prepared(inputs), places, options or self.options, most_gb)

    def inspect_each(self, inputs: Iterable[Any] | Path, places: str | Sequence[str],
                     options: SearchOptions | None = None, most_gb: float = MOST_GB) -> Iterator[Inspected]:
        """Yields the results of `inspect`, and keeps few of them in memory; see `inference.inspection.inspect_each`."""
        return inspect_each(self.model, self._prepared(inputs), places, options or self.options, most_gb)

    def edited(self, edits: Sequence[Edit | Mapping[str, Any]]) -> 'Run':
        """Returns a run whose model applies edits at places, in every pass and every search. This run is unchanged.

        The edits of config.train.edits are a part of the model, and other edits are applied after them. For 'mean' and
        'replace', the values for the texts come from the model without other edits. So the result does not depend on
        the order of the edits, and one call with several edits equals several calls with one edit each.

        Args:
          edits: objects of class `inference.edits.Edit`, or dicts with the fields of this class.

        Raises:
          UserError: if an edit or a place does not exist, if an array or the result of a function has a wrong shape,
            or if two edits replace the same value.
        """
        if isinstance(edits, Edit | Mapping | str):
            raise UserError('the edits must be a list. Put a single edit into a list')
        new = [edit if isinstance(edit, Edit) else Edit.of(edit) for edit in edits]
        places, run = self.places(), copy.copy(self)
        run.edits = *self.edits, *new
        Editor(new, [{} for _ in new], places)  # refuses impossible edits before a model reads texts
        run._numbers = *self._numbers, *(resolved(self._opened, edit, places, self.options, self._texts_of)
                                         for edit in new)
        added = run.edits[len(run.edits) - len(run._numbers):]  # self._opened applies config.train.edits
        editor = Editor(added, run._numbers, places)
        module: Any = Observed(self._opened.module, editor)
        run.model = self._answerer(module, {**self._opened.params, EDITS: editor.numbers})
        list_places(run.model)  # raises an error if a function returns a value of another shape
        return run

    def _answerer(self, module: nn.Module, params: Any) -> Any:
        model = make_answerer(self.config, module, params, self._trained.tokenizers, self._trained.sizes)
        model.name = ', '.join(map(str, self.workdirs))
        return model

    def _texts_of(self, split: str) -> Sequence[Any] | np.ndarray:
        """Returns examples of a split for `inspect`: all examples; for a language model, the first documents.

        'test' stands for all test sets. Long pairs are truncated as for the perplexity.
        """
        splits = asked_splits(split, self.config.data, "edit 'mean': by")
        data: Any = self.data()
        if isinstance(self.model, Translator):
            return self.model.references([pair for name in splits for pair in data.pairs(name)])
        if isinstance(self.model, Predictor):
            return np.concatenate([data.arrays.prepared(name, self.model.form) for name in splits])
        return [output for name in splits
                for output, _ in self.model.examples(data, name, DOCUMENTS, self.options)]

    def data(self) -> Data:
        """Opens the data on which the run was trained, with the tokenizers of the run.

        The batches have no gold links: guided alignment reads them only in training.
        """
        config = self.config.copy_and_resolve_references()
        config.train.guided_alignment = 0.0
        return open_data(config, self.workdir)

    def _prepared(self, inputs: Any) -> Any:
        """Returns inputs for `inspect`: raw images or series in the encoding of the training inputs, or texts.

        Images and series may be a path, as in `predict`.
        """
        if not isinstance(self.model, Predictor):
            return inputs
        if isinstance(inputs, str | Path):
            return read_inputs(str(expanded(inputs)), self.model.form)[1]
        if not hasattr(inputs, '__getitem__') and isinstance(inputs, Iterable):  # a generator, which NumPy cannot read
            inputs = list(inputs)
        return self.model.form.prepare(inputs)

    def _noted(self, outputs: list[Output]) -> list[Output]:
        """Returns the outputs. Logs a warning if the inputs have characters that are not in the vocabulary."""
        note_unknown(self._supported(TextModel, 'text'), outputs)
        return outputs

    def _options(self, options: SearchOptions | None, avoid: Sequence[str] | None) -> SearchOptions:
        options = options or self.options
        return options if avoid is None else dataclasses.replace(options, avoid=avoid)

    def _supported(self, kind: Any, feature: str) -> Any:
        """Returns the model.

        Raises:
          UserError: if the model is not of this kind. The message names the calls that the task supports.
        """
        if not isinstance(self.model, kind):
            raise UserError(f'{self.workdir}: task={self.config.task} does not support {feature}. Use '
                            f'{CALLS[TASKS[self.config.task].answerer]}')
        return self.model


def load(workdir: str | Path | Sequence[str | Path], checkpoint: str | int = 'best', dtype: str | None = None) -> Run:
    """Opens a run directory, or several run directories as an ensemble. Any number of devices is possible.

    An ensemble averages the probabilities of its runs. The models may be of different kinds, but all models must write
    text and have the same vocabulary. After this call, JAX stores compiled programs in the user's cache, unless
    jax_compilation_cache_dir is set.

    Args:
      workdir: the --workdir of a training, or a list of such directories.
      checkpoint: 'best', 'latest', a step, 'average:K' (the mean of the last K checkpoints) or 'best:K' (the mean of
        the best K checkpoints). If a checkpoint has a moving average of the parameters, the moving average is used.
        With the prefix 'raw:', as in 'raw:average:5', the moving average is ignored. For an ensemble, the choice
        applies to each run.
      dtype: the dtype of the computation, 'float32' or 'bfloat16'; by default the dtype of the training.

    Raises:
      UserError: if a directory is not a run directory, a checkpoint does not exist, the runs cannot form an ensemble,
        or the dtype is unknown.
    """
    if dtype not in (None, *choices('model.dtype')):
        raise UserError(f'dtype={dtype!r} must be one of {", ".join(choices("model.dtype"))}')
    workdirs = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    if not workdirs:
        raise UserError('the list of run directories is empty. Use at least one run directory')
    check_devices()
    # Not config.cache_dir: the cache contains machine code, and the run directory may come from an untrusted source.
    use_compilation_cache(cache_folder(''))
    return Run(read_models([expanded(path) for path in workdirs], str(checkpoint), dtype))
