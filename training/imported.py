"""A model of another library as a run directory."""

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
RECIPE_TEXT = '''"""The config of this run, for train.py: the model that was imported, to be trained further."""

from pathlib import Path

from run_directory.records import read_config


def get_config():
    return read_config(Path(__file__).parent)
'''


def import_weights(source: str | Path, workdir: str | Path, recipe: ConfigDict | None = None) -> TrainedModel:
    """Makes a run directory of a folder that Hugging Face's save_pretrained wrote, and returns its model.

    It is one like those of training: answers, explains, exports. Its checkpoint is of step 0, with a fresh optimizer,
    from which train.py goes on with the config that is in the directory.

    Args:
      source: the folder.
      workdir: a new or an empty directory.
      recipe: a config whose data, batches and optimizer the run gets, for training.

    Raises:
      UserError: if the folder cannot be read, its model is not supported, or the directory holds something.
    """
    folder = expanded(workdir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'--workdir={folder} is there already: give a new or an empty directory')
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
    write_text(folder / KEPT / FINGERPRINTS, '{}\n')  # it has been trained on none of the data yet
    write_text(folder / RECIPE, RECIPE_TEXT)
    with open_checkpoints(folder) as checkpoints:
        checkpoints.save(0, state, Progress().to_dict())
    write_text(folder / CONFIG, json.dumps({'version': VERSION, **config.to_dict()}, indent=2) + '\n')
    return model
