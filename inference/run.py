"""A run directory, opened: its config, tokenizers and parameters are all that is needed to use the model."""

import json
from pathlib import Path

from ml_collections import ConfigDict

from errors import UserError
from inference.translate import SearchOptions, Translation, Translator
from input_pipeline.tokenizer import Tokenizer, load_tokenizer
from model.build import build_model
from training.checkpoints import open_checkpoints

CONFIG = 'config.json'
TOKENIZERS = 'tokenizers'


class Run:
    """What `load` returns.

    Attributes:
      workdir: the directory.
      config: as it was resolved when the run began.
      checkpoint: steps that the parameters come from; more than one if they are a mean.
      translator: the model, its parameters and tokenizers.
      options: the search that the config asks for.
    """

    def __init__(self, workdir: Path, checkpoint: str):
        self.workdir, self.config = workdir, read_config(workdir)
        with open_checkpoints(workdir, metric=self.config.eval.metric) as checkpoints:
            self.checkpoint = checkpoints.resolve(checkpoint)
            params = checkpoints.parameters(checkpoint)
        tokenizers = load_tokenizers(workdir)
        module = build_model(self.config.model, len(tokenizers['source']), len(tokenizers['target']))
        self.translator = Translator(module, params, tokenizers, self.config.data.max_length)
        self.options = search_options(self.config)

    def translate(self, sentences: list[str], options: SearchOptions | None = None) -> list[Translation]:
        """Translations in the order of `sentences`, by the config's search unless `options` says otherwise."""
        return self.translator.translate(sentences, options or self.options)


def load(workdir: str | Path, checkpoint: str = 'best') -> Run:
    """Opens a run directory; works on any number of devices.

    Args:
      workdir: what train.py was given.
      checkpoint: 'best', 'latest', a step number, or 'average:K' for the mean of the last K.

    Raises:
      UserError: if the directory is not a run's, or has no such checkpoint.
    """
    return Run(Path(workdir), checkpoint)


def read_config(workdir: Path) -> ConfigDict:
    """The resolved config of a run."""
    try:
        return ConfigDict(json.loads((workdir / CONFIG).read_text()))
    except FileNotFoundError:
        raise UserError(f'{workdir} is not a run directory: it has no {CONFIG}. Give the --workdir of a training') from None
    except ValueError as error:
        raise UserError(f'{workdir / CONFIG} is damaged: {error}') from None


def load_tokenizers(workdir: Path) -> dict[str, Tokenizer]:
    """{'source': ..., 'target': ...} of a run."""
    return {side: load_tokenizer(workdir / TOKENIZERS / f'{side}.model') for side in ('source', 'target')}


def save_tokenizers(workdir: Path, tokenizers: dict[str, Tokenizer]) -> None:
    """Writes what `load_tokenizers` reads."""
    (workdir / TOKENIZERS).mkdir(parents=True, exist_ok=True)
    for side, tokenizer in tokenizers.items():
        tokenizer.save(workdir / TOKENIZERS / f'{side}.model')


def search_options(config: ConfigDict, **changes) -> SearchOptions:
    """`config.decode` as options, with `changes` that are not None."""
    return SearchOptions(**(dict(config.decode) | {name: value for name, value in changes.items() if value is not None}))
