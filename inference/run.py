"""A run directory, opened: its config, its parameters and what it keeps of its data are all that is needed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from configs.tasks import TASKS
from errors import UserError
from files import expanded
from inference.generate import Generator
from inference.predict import Predictor
from inference.text import Output, SearchOptions, search_options
from inference.translate import Translator
from input_pipeline.arrays import Preprocessing
from input_pipeline.data import KEPT, SIZES, Data, load_tokenizers, open_data, read_sizes
from input_pipeline.token_store import cache_folder
from input_pipeline.tokenizer import PAD, Tokenizer
from model.build import build_model
from training.checkpoints import Checkpoints
from training.processes import check_devices
from training.records import read_config
from training.step import use_compilation_cache

Answerer = Translator | Generator | Predictor


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


class Run:
    """What `load` returns.

    Attributes:
      workdir: the directory.
      config: as it was resolved when the run began.
      checkpoint: steps that the parameters come from; more than one if they are a mean.
      model: the module, its parameters and what goes with them: a Translator, Generator or Predictor.
      options: the search that the config asks for.
    """

    def __init__(self, workdir: Path, checkpoint: str):
        self.workdir, self.config = workdir, read_config(workdir)
        # Not the cache that the run names: it holds machine code, and the run directory may come from elsewhere.
        use_compilation_cache(cache_folder(''))
        check_devices()
        checkpoints = Checkpoints(workdir, metric=self.config.eval.metric)
        params, self.checkpoint = checkpoints.parameters(checkpoint)
        tokenizers, sizes = load_tokenizers(workdir / KEPT), read_sizes(workdir, self.config.task)
        try:
            module = build_model(self.config.model, **sizes, pad=PAD)
            self.model = make_answerer(self.config, module, params, tokenizers, sizes)
            check_parameters(self.model, params)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f'{workdir}: its config.json and {KEPT}/{SIZES} do not make the model of its checkpoint: '
                            f'{_first_line(error)}. Take all three from the same run') from None
        self.options = search_options(self.config)

    def translate(self, sentences: Sequence[str], options: SearchOptions | None = None) -> list[Output]:
        """Translations in the order of `sentences`, by the config's search unless `options` says otherwise."""
        return self._text_model(Translator, 'translates').translate(sentences, options or self.options)

    def generate(self, prompts: Sequence[str], options: SearchOptions | None = None) -> list[Output]:
        """Continuations in the order of `prompts`, by the config's search unless `options` says otherwise."""
        return self._text_model(Generator, 'generates').generate(prompts, options or self.options)

    def data(self) -> Data:
        """The data that the run was trained on, opened again, with the run's own tokenizers."""
        return open_data(self.config, self.workdir)

    def _text_model(self, kind: type, what: str) -> Any:
        if not isinstance(self.model, kind):
            raise UserError(f'{self.workdir} is a run of task={self.config.task}, which {what} nothing')
        return self.model


def check_parameters(model: Answerer, params: Any) -> None:
    """Raises ValueError, naming one, if `params` are not all the parameters of the model's module in their shapes."""
    fresh = jax.eval_shape(lambda inputs: nn.unbox(model.module.init(jax.random.key(0), **inputs)), model.example)
    wanted, there = (flatten_dict(jax.tree.map(lambda leaf: leaf.shape, tree), sep='/')
                     for tree in (fresh['params'], params))
    wrong = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(f'{len(wrong)} of {len(wanted)} parameters do not fit, such as {name}: '
                         f'{there.get(name, "none")} in the checkpoint, {wanted.get(name, "none")} in the model')


def _first_line(error: Exception) -> str:
    return f'{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}'


def load(workdir: str | Path, checkpoint: str | int = 'best') -> Run:
    """Opens a run directory; works on any number of devices.

    From here on, JAX keeps compiled programs in the user's cache, unless jax_compilation_cache_dir is set already.

    Args:
      workdir: what train.py was given.
      checkpoint: 'best', 'latest', a step, 'average:K' or 'best:K' for the mean of the last or the best K. A moving
        average that a checkpoint holds replaces its parameters, unless 'raw:' stands before: 'raw:average:5'.

    Raises:
      UserError: if the directory is not a run's, or has no such checkpoint.
    """
    return Run(expanded(workdir), str(checkpoint))
