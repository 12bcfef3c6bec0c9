"""Makes a run directory from a model of another library."""

import json
from pathlib import Path

import jax.numpy as jnp
from ml_collections import ConfigDict

from configs.versions import VERSION
from input_pipeline.data import KEPT, SIZES, save_tokenizers
from interchange.huggingface import read_huggingface
from run_directory.checkpoints import open_checkpoints
from run_directory.progress import Progress
from run_directory.records import CONFIG
from run_directory.trained import TrainedModel
from run_directory.workdir import FINGERPRINTS
from runtime.errors import UserError
from runtime.files import check_folder, expanded, naming, write_text
from training.optimizer import make_optimizer, make_schedule
from training.step import TrainState

RECIPE = 'recipe.py'
RECIPE_TEXT = '''"""The config of this imported model, for training it further with train.py."""

from pathlib import Path

from run_directory.records import read_config


def get_config():
    return read_config(Path(__file__).parent)
'''


def import_weights(source: str | Path, workdir: str | Path, recipe: ConfigDict | None = None) -> TrainedModel:
    """Makes a run directory from a folder that Hugging Face's save_pretrained wrote, and returns its model.

    It can be used like the run directory of a training: decoded, explained, exported. It has a checkpoint of step 0
    with a fresh optimizer. train.py resumes from it with the config in the directory.

    Args:
      source: the folder.
      workdir: a new or an empty directory.
      recipe: a config from which the run gets its data, batches and optimizer, for training.

    Raises:
      UserError: if the folder cannot be read, its model is not supported, or the directory is not empty.
    """
    folder = expanded(workdir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'--workdir={folder} is not empty. Use a new or an empty directory')
    check_folder(folder)
    model = read_huggingface(expanded(source), recipe=recipe)
    config = model.config
    schedule = make_schedule(config.optimizer, d_model=config.model.d_model, steps=config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    state = TrainState(step=jnp.zeros((), jnp.int32), params=model.params, opt_state=optimizer.init(model.params))
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizers(folder / KEPT, dict(model.tokenizers))
    write_text(folder / KEPT / SIZES, json.dumps(dict(model.sizes), indent=2) + '\n')
    write_text(folder / KEPT / FINGERPRINTS, '{}\n')  # it is not trained on data yet
    write_text(folder / RECIPE, RECIPE_TEXT)
    with open_checkpoints(folder) as checkpoints:
        checkpoints.save(0, state, Progress().to_dict())
    write_text(folder / CONFIG, json.dumps({'version': VERSION, **config.to_dict()}, indent=2) + '\n')
    return model
