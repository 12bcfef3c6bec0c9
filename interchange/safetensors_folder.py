"""A folder with the parameters of one checkpoint in a safetensors file, under our own names.

    config.json         the run's config
    data/               the run's tokenizers, sizes and fingerprints of the data
    model.safetensors   the parameters, float32, 'encoder/layers_0/feed_forward/inner/kernel'; the config and the sizes
                        are in its metadata too, as JSON, for who has the file alone

It is a run directory whose checkpoints are one file: it answers, and trains no further.
"""

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from configs.versions import VERSION
from input_pipeline.data import KEPT, SIZES, save_tokenizers
from run_directory.records import CONFIG, read_config
from run_directory.trained import TrainedModel, make_model
from run_directory.workdir import FINGERPRINTS
from runtime.errors import UserError
from runtime.files import write_text

WEIGHTS = 'model.safetensors'
STEPS = 'steps'  # in the metadata: the checkpoints that the parameters come from


def write_safetensors(trained: TrainedModel, folder: Path) -> None:
    """Writes a trained model into an existing folder, for `read_safetensors` and for other programs."""
    config = json.dumps({'version': VERSION, **trained.config.to_dict()}, indent=2) + '\n'
    sizes = json.dumps(dict(trained.sizes), indent=2) + '\n'
    save_tokenizers(folder / KEPT, dict(trained.tokenizers))
    write_text(folder / KEPT / SIZES, sizes)
    known = trained.workdirs[0] / KEPT / FINGERPRINTS  # of the data; a folder of another library has none
    write_text(folder / KEPT / FINGERPRINTS, known.read_text('utf-8') if known.is_file() else '{}\n')
    arrays = {name: np.asarray(leaf) for name, leaf in flatten_dict(trained.params, sep='/').items()}
    save_arrays(folder / WEIGHTS, arrays, {'config': config, 'sizes': sizes, STEPS: json.dumps(trained.steps)})
    write_text(folder / CONFIG, config)


def read_safetensors(folder: Path, dtype: str | None = None) -> TrainedModel:
    """Reads the model of a folder that `write_safetensors` wrote.

    Raises:
      UserError: if a part of it is missing or damaged.
    """
    with opened(folder / WEIGHTS) as file:
        params = unflatten_dict({name: jnp.asarray(file.get_tensor(name)) for name in file.keys()}, sep='/')  # noqa: SIM118
        steps = json.loads((file.metadata() or {}).get(STEPS, '[]'))
    return make_model(folder, read_config(folder), params, steps, dtype)


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file."""
    _library().numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path,
                               metadata=dict(metadata))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file: `keys`, `get_tensor(name)`, which is a NumPy array, and `metadata`.

    Raises:
      UserError: naming the file, if it cannot be read.
    """
    library = _library()
    try:
        with library.safe_open(path, 'np') as file:
            yield file
    except (OSError, library.SafetensorError, ValueError) as error:
        raise UserError(f'{path} cannot be read: {error}. Take it from where it was written') from None


def _library() -> Any:
    if importlib.util.find_spec('safetensors') is None:
        raise UserError("safetensors is not installed: pip install -e '.[interchange]'")
    importlib.import_module('safetensors.numpy')
    return importlib.import_module('safetensors')
