"""Imports models of Hugging Face Transformers: makes a run directory from a folder with a saved model."""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from configs.versions import config_text
from inference.run import Run
from inference.translate import Translator
from input_pipeline.kept_data import KEPT, save_kept_data
from input_pipeline.tokenizer import BOS
from interchange.huggingface import read_huggingface
from model import Params
from run_directory.checkpoints import open_checkpoints
from run_directory.fingerprints import FINGERPRINTS
from run_directory.progress import Progress
from run_directory.records import CONFIG, RECIPE, read_config
from run_directory.trained import TrainedModel, make_model
from runtime.cache import cache_folder, use_compilation_cache
from runtime.errors import UserError
from runtime.files import check_new_folder, expanded, naming, write_text
from runtime.folders import written_folder
from runtime.processes import check_devices
from training.optimizer import make_optimizer, make_schedule
from training.step import TrainState

RECIPE_TEXT = '''"""The config of this run, for train.py: the model that was imported, to be trained further."""

from pathlib import Path

from run_directory.records import read_config


def get_config():
    return read_config(Path(__file__).parent)
'''


def import_weights(source: str | Path, workdir: str | Path, recipe: ConfigDict | None = None,
                   allow_nonfinite: bool = False) -> TrainedModel:
    """Makes a run directory from a folder that Hugging Face's save_pretrained has written, and returns the model.

    The run has one checkpoint, at step 0, with a fresh optimizer state. The run can be used like any other run, and
    train.py can train the model further with the config in the directory. As a test, the model processes one line of
    text. The directory has a temporary name until this test has passed. There is no test if `allow_nonfinite` is True.

    Args:
      source: the folder.
      workdir: a new or an empty directory.
      recipe: a config for further training. The run gets the data, batch and optimizer options of this config.
      allow_nonfinite: if True, weights with NaN and infinity are accepted.

    Raises:
      UserError: if the folder cannot be read, the model is not supported or fails the test, the recipe freezes
        parameters, adds adapters or takes its parameters from another run, or the directory is not empty or cannot be
        written. After an error, no files remain.
    """
    folder = expanded(workdir)
    check_new_folder(folder, '--workdir')
    check_devices()
    use_compilation_cache(cache_folder(''))
    model = read_huggingface(expanded(source), recipe=recipe, allow_nonfinite=allow_nonfinite)
    config = model.config
    if other := config.train.init_from:
        raise UserError(f'config.train.init_from={other!r}: cannot be set in an import, because the weights come from '
                        '--from. Use another --config, or add --config.train.init_from= (nothing after =)')
    for option in 'frozen', 'lora_rank':
        if value := config.train[option]:
            raise UserError(f'config.train.{option}={value!r}: cannot be set in an import. Import the model first, and '
                            f'then train it with --config=configs/fine_tune.py:{folder} '
                            f'--config.train.{option}={value!r}')
    schedule = make_schedule(config.optimizer, d_model=config.model.d_model, steps=config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    state = TrainState(step=jnp.zeros((), jnp.int32), params=model.params, opt_state=optimizer.init(model.params))
    with naming(folder), written_folder(folder) as temporary:
        save_kept_data(temporary / KEPT, model.tokenizers, model.sizes)
        write_text(temporary / KEPT / FINGERPRINTS, '{}\n')  # the run has not been trained on data yet
        write_text(temporary / RECIPE, RECIPE_TEXT)
        write_text(temporary / CONFIG, config_text(config))
        with open_checkpoints(temporary) as checkpoints:
            checkpoints.save(0, state, Progress().to_dict())
            if not allow_nonfinite:
                answer_once(temporary, model.params)  # while the checkpoint is written
    return model


def answer_once(folder: Path, params: Params) -> None:
    """Tests an imported text model: opens its run, and computes the logits of one line of text with `params`.

    The parameters are not read from the checkpoint, because reading them would take longer than all other parts of an
    import. XLA compiles without optimization, because the program runs once: for GPT-2 with 124M parameters, this
    reduces the processor time of the test from 1.6 s to 1.3 s.

    Raises:
      UserError: if the run cannot be opened, or the logits are not finite.
    """
    model: Any = Run(make_model(folder, read_config(folder), params, [0])).model
    tokens = {side: np.array([[BOS, *tokenizer.encode('a')]]) for side, tokenizer in model.tokenizers.items()}
    inputs = tokens if isinstance(model, Translator) else {'tokens': tokens['target']}

    @functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
    def sum_of_outputs(params, inputs):
        logits: Any = model.module.apply({'params': params}, **inputs)
        return jax.nn.logsumexp(logits)

    if not math.isfinite(sum_of_outputs(params, inputs)):
        raise UserError('the imported model returns NaN or infinity for a line of text. Use other weights, or '
                        '--allow_nonfinite')
