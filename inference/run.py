"""A run directory, opened: its config, its parameters and what it keeps of its data are all that is needed."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
from ml_collections import ConfigDict

from configs.options import choices
from configs.tasks import TASKS
from inference.edits import Edit, Editor, Sizes, has_text, matching, parsed
from inference.generate import Generator
from inference.inspection import MOST_GB, Inspected, inspect, list_places, resolved
from inference.options import SearchOptions, search_options
from inference.predict import Predictor
from inference.text import Output
from inference.translate import Translator
from input_pipeline.data import Data, open_data
from input_pipeline.preprocessing import Preprocessing
from input_pipeline.tokenizer import Tokenizer
from interchange.folders import read_models
from model import parameter_count
from model.places import EDITS, Observed
from run_directory.trained import Trained, parts_of_one_run
from runtime.cache import cache_folder, use_compilation_cache
from runtime.errors import UserError
from runtime.files import expanded
from runtime.processes import check_devices

Answerer = Translator | Generator | Predictor
EDITS_OPTION = 'config.train.edits'
WINDOWS = 100  # of a language model's split, of which a mean is taken


def make_answerer(config: ConfigDict, module: nn.Module, params: Any, tokenizers: Mapping[str, Tokenizer],
                  sizes: Mapping[str, Any]) -> Answerer:
    """A module with what turns its numbers into answers: the answerer of the config's task."""
    return ANSWERERS[TASKS[config.task].answerer](module, params, tokenizers, sizes, config.data)


# The name of a task's answerer (configs/tasks.py) -> what makes it of a module and what is known of its data.
ANSWERERS: Mapping[str, Callable[..., Answerer]] = {
    'translator': lambda module, params, tokenizers, sizes, data: Translator(
        module, params, tokenizers, data.max_length),
    'generator': lambda module, params, tokenizers, sizes, data: Generator(
        module, params, tokenizers['text'], data.context, data.packing == 'packed'),
    'predictor': lambda module, params, tokenizers, sizes, data: Predictor(
        module, params, sizes['classes'], Preprocessing(**sizes['preprocessing']), sizes['shape']),
}


def trained_under_edits(config: ConfigDict, module: nn.Module, tokenizers: Mapping[str, Tokenizer],
                        sizes: Mapping[str, Any]) -> Any:
    """Returns the module with the edits of config.train.edits in each pass; without any, the module itself.

    Raises:
      UserError: if there is no such edit or place, or an edit needs texts, which a training has not read yet.
    """
    if not config.train.edits:
        return module
    edits, places = parsed(config.train.edits, EDITS_OPTION), list_places(
        make_answerer(config, module, {}, tokenizers, sizes))
    for edit in edits:
        if edit.edit in ('mean', 'replace') and has_text(edit.by):
            raise UserError(f'{EDITS_OPTION}: edit {edit.edit!r} at {edit.place} needs the model to read texts, which '
                            'is not possible in training. Give numbers')
    numbers = [{} if edit.by is None or isinstance(edit.by, str) else
               dict.fromkeys(matching(edit.place, places), edit.by) for edit in edits]
    return Observed(module, Editor(edits, numbers, places))


class Run:
    """What `load` returns.

    Attributes:
      workdirs: the directory, or those of an ensemble.
      workdir: the first of them.
      config: as it was resolved when the run began, but for the dtype that `load` was given; of an ensemble, the first
        run's.
      checkpoint: steps that the parameters come from, more than one if they are a mean; of an ensemble, a list for
        each run.
      model: the module, its parameters and what goes with them: a Translator, Generator or Predictor.
      options: the search that the config asks for.
      edits: the edits of the model; see `edited`. A run of a training under edits, config.train.edits, has them.
    """

    edits: tuple[Edit, ...] = ()

    def __init__(self, trained: Trained):
        self.workdirs, self.workdir = trained.workdirs, trained.workdirs[0]
        self.config, self.checkpoint = trained.config, trained.steps
        with parts_of_one_run(self.workdir):
            self.model = make_answerer(self.config, trained.module, trained.params, trained.tokenizers, trained.sizes)
        if not isinstance(self.model, Predictor):
            self.model.name = ', '.join(map(str, self.workdirs))
        self._trained, self._plain, self._numbers = trained, self.model, ()
        self.options = search_options(self.config)
        if self.config.train.edits:
            learned = self.edited(parsed(self.config.train.edits, EDITS_OPTION))
            self.model, self.edits, self._numbers = learned.model, learned.edits, learned._numbers

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
        """The number of parameters."""
        return parameter_count(self._plain.params)

    def translate(self, sentences: Sequence[str], options: SearchOptions | None = None, *,
                  prefixes: Sequence[str] | None = None, avoid: Sequence[str] | None = None) -> list[Output]:
        """Translations in the order of `sentences`, by the config's search unless `options` says otherwise.

        Each begins with its one of `prefixes` (`Translator.translate`); no word or phrase of `avoid` comes, which
        stands for that of `options`.
        """
        translator = self._text_model(Translator, 'translates')
        return translator.translate(sentences, self._options(options, avoid), prefixes=prefixes)

    def generate(self, prompts: Sequence[str], options: SearchOptions | None = None, *,
                 avoid: Sequence[str] | None = None) -> list[Output]:
        """Continuations in the order of `prompts`, by the config's search unless `options` says otherwise."""
        return self._text_model(Generator, 'generates').generate(prompts, self._options(options, avoid))

    def forced(self, given: Sequence[Any], options: SearchOptions | None = None) -> list[Output]:
        """What the model says of translations or texts that are given: outputs with their log-probabilities.

        Args:
          given: (source, target) of each translation; for a language model, texts.
          options: whose length penalty and batch size are used; the config's by default.
        """
        return self._text_model(Translator | Generator, 'writes').forced_all(given, options or self.options)

    def places(self) -> dict[str, Sizes]:
        """Returns {name: {axis: size}} of the values that can be read and edited; None: it depends on the text."""
        return list_places(self._plain)

    def inspect(self, given: Sequence[Any] | np.ndarray, places: str | Sequence[str],
                options: SearchOptions | None = None, most_gb: float = MOST_GB) -> list[Inspected]:
        """Returns the values at places, for each text or example; see `inference.inspection.inspect`."""
        return inspect(self.model, given, places, options or self.options, most_gb)

    def edited(self, edits: Sequence[Edit | Mapping[str, Any]]) -> 'Run':
        """Returns a run whose model is edited at places, in every pass and every search; this run is unchanged.

        The texts of 'mean' and 'replace' are read by the model without any edits. So the result does not depend on the
        order of the edits, or on whether they are given at once.

        Args:
          edits: of class `inference.edits.Edit`, or dicts of its fields.

        Raises:
          UserError: if there is no such edit or place, numbers have a wrong shape, or two edits replace one value.
        """
        new = [each if isinstance(each, Edit) else Edit.of(each) for each in edits]
        places, run = self.places(), copy.copy(self)
        run.edits = *self.edits, *new
        run._numbers = *self._numbers, *(resolved(self._plain, edit, places, self.options, self._texts_of)
                                         for edit in new)
        editor = Editor(run.edits, run._numbers, places)
        module: Any = Observed(self._trained.module, editor)
        run.model = make_answerer(self.config, module, {**self._plain.params, EDITS: editor.numbers},
                                  self._trained.tokenizers, self._trained.sizes)
        try:
            list_places(run.model)
        except ValueError as error:  # of a function
            raise UserError(str(error).splitlines()[0]) from None
        return run

    def _texts_of(self, split: str) -> Sequence[Any] | np.ndarray:
        """Returns what `inspect` reads of a split: all examples, or of a language model the first windows."""
        data: Any = self.data()
        if isinstance(self.model, Translator):
            return data.pairs(split)
        if isinstance(self.model, Predictor):
            return data.arrays.inputs(split)
        return [output for output, _ in self.model.examples(data, split, WINDOWS, self.options)]

    def data(self) -> Data:
        """The data that the run was trained on, opened again, with the run's own tokenizers."""
        return open_data(self.config, self.workdir)

    def _options(self, options: SearchOptions | None, avoid: Sequence[str] | None) -> SearchOptions:
        options = options or self.options
        return options if avoid is None else dataclasses.replace(options, avoid=avoid)

    def _text_model(self, kind: Any, what: str) -> Any:
        if not isinstance(self.model, kind):
            raise UserError(f'{self.workdir} is a run of task={self.config.task}, which {what} nothing')
        return self.model


def load(workdir: str | Path | Sequence[str | Path], checkpoint: str | int = 'best', dtype: str | None = None) -> Run:
    """Opens a run directory; works on any number of devices. Of several, makes an ensemble: one model whose
    probabilities are the mean of theirs. They may be of any kinds that write text, if their vocabulary is the same.

    From here on, JAX keeps compiled programs in the user's cache, unless jax_compilation_cache_dir is set already.

    Args:
      workdir: what train.py was given, or a list of such directories.
      checkpoint: 'best', 'latest', a step, 'average:K' or 'best:K' for the mean of the last or the best K. A moving
        average that a checkpoint holds replaces its parameters, unless 'raw:' stands before: 'raw:average:5'. Of an
        ensemble, the choice is made for each run.
      dtype: of the computation, 'float32' or 'bfloat16', if it is not to be the one that the run was trained in.

    Raises:
      UserError: if the directory is not a run's, or has no such checkpoint, or runs do not make an ensemble, or there
        is no such dtype.
    """
    if dtype not in (None, *choices('model.dtype')):
        raise UserError(f'dtype={dtype!r} must be one of {", ".join(choices("model.dtype"))}')
    workdirs = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    if not workdirs:
        raise UserError('give at least one run directory')
    # Not the cache that the run names: it holds machine code, and the run directory may come from elsewhere.
    use_compilation_cache(cache_folder(''))
    check_devices()
    return Run(read_models([expanded(each) for each in workdirs], str(checkpoint), dtype))
