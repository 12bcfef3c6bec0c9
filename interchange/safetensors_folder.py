"""A folder with the parameters of one checkpoint in a safetensors file. The arrays have the names of this project.

    config.json         the run's config
    data/               the run's tokenizers, vocabulary sizes and fingerprints of the data
    model.safetensors   the parameters, in float32, such as 'encoder/layers_0/feed_forward/inner/kernel'. The metadata
                        of this file also contains the config and the vocabulary sizes, as JSON, for programs that read
                        only this file

The folder can be loaded like a run directory, but its model cannot be trained further.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from configs.versions import config_text
from input_pipeline.kept_data import KEPT, SIZES, save_kept_data
from interchange.safetensors_files import ADVICE, open_arrays, save_arrays
from run_directory.fingerprints import FINGERPRINTS
from run_directory.records import CONFIG, EXPORTED, read_config
from run_directory.trained import TrainedModel, make_model, parts_of_one_run
from runtime.errors import UserError
from runtime.files import write_text
from runtime.schema import Count

WEIGHTS = EXPORTED
STEPS = 'steps'  # the entry of the metadata with the steps of the checkpoints that the parameters come from
OTHER_CHECKPOINT = 'Export another checkpoint'


def write_safetensors(trained: TrainedModel, folder: Path) -> None:
    """Writes a trained model into an existing folder, for `read_safetensors` and for other programs.

    Raises:
      UserError: if a parameter contains NaN or infinity, because `read_safetensors` would refuse the folder.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in flatten_dict(trained.params, sep='/').items()}
    if wrong := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise UserError(f'{trained.workdirs[0]}: the parameter {wrong[0]} contains NaN or infinity: the training of '
                        f'this model has diverged. {OTHER_CHECKPOINT}, or use the format huggingface')
    config = config_text(trained.config)
    save_kept_data(folder / KEPT, trained.tokenizers, trained.sizes)
    sizes = (folder / KEPT / SIZES).read_text('utf-8')
    fingerprints = trained.workdirs[0] / KEPT / FINGERPRINTS  # an imported folder has no fingerprints
    write_text(folder / KEPT / FINGERPRINTS, fingerprints.read_text('utf-8') if fingerprints.is_file() else '{}\n')
    save_arrays(folder / WEIGHTS, arrays, {'config': config, 'sizes': sizes, STEPS: json.dumps(trained.steps)})
    write_text(folder / CONFIG, config)


def read_safetensors(folder: Path, dtype: str | None = None) -> TrainedModel:
    """Reads the model of a folder that `write_safetensors` wrote.

    Raises:
      UserError: if a file of the folder is missing or damaged.
    """
    config = read_config(folder)
    with open_arrays(folder / WEIGHTS) as file:
        for name, path in ('config', folder / CONFIG), ('sizes', folder / KEPT / SIZES):
            if name in file.metadata and (not path.is_file() or path.read_bytes() != file.metadata[name].encode()):
                raise UserError(f'{path} differs from the metadata of {WEIGHTS}. {ADVICE}')
        steps = file.entry(STEPS, list[Count], [])
        with parts_of_one_run(folder):
            arrays = {name: jnp.asarray(file.array(name, OTHER_CHECKPOINT)) for name in file.shapes}
    return make_model(folder, config, unflatten_dict(arrays, sep='/'), steps, dtype)
