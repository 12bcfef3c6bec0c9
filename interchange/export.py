"""Exports a checkpoint as a folder in another library's format."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from configs.checks import check_config
from configs.versions import is_run
from input_pipeline.tokenizer import PAD
from interchange.equal_models import without_heads
from interchange.folders import read_models
from interchange.huggingface import write_huggingface
from interchange.safetensors_folder import write_safetensors
from interchange.to_ctranslate2 import QUANTIZATIONS, write_ctranslate2
from model.build import build_model
from model.positional import ADDED
from run_directory.records import CONFIG
from run_directory.trained import TrainedModel
from runtime.errors import UserError
from runtime.files import check_new_folder, expanded, naming
from runtime.folders import written_folder
from runtime.processes import check_devices

FORMATS: Mapping[str, Callable[..., None]] = {
    'ctranslate2': write_ctranslate2, 'huggingface': write_huggingface, 'safetensors': write_safetensors}


def export(workdir: str | Path, output: str | Path, to: str, checkpoint: str | int = 'best',
           quantization: str | None = None) -> list[Path]:
    """Writes the model of a run in another library's format. Returns the new files. A failure leaves no files behind.

    Args:
      workdir: the run directory.
      output: a new or an empty folder outside of run directories.
      to: the format, one of FORMATS.
      checkpoint: the same choices as --checkpoint of decode.py, including averages.
      quantization: the type of the weights for ctranslate2: 'float32' (the default), 'int8' or 'float16'.

    Raises:
      UserError: if the format or the type is unknown, the type does not apply to the format, the run has no such
        checkpoint, the folder is not empty or cannot be written, the format cannot express the model or its
        config.train.edits, or the format is safetensors and a parameter contains NaN or infinity.
    """
    if to not in FORMATS:
        raise UserError(f'to={to}: there is no such format. Use {", ".join(FORMATS)}')
    if quantization is not None and to != 'ctranslate2':
        raise UserError(f'quantization={quantization} does not apply to the format {to}. Remove this argument')
    if quantization not in (None, *QUANTIZATIONS):
        raise UserError(f'quantization={quantization}: there is no such type. Use {", ".join(QUANTIZATIONS)}')
    folder = _new_folder(output)
    check_devices()
    trained = read_models([expanded(workdir)], str(checkpoint))
    if trained.config.train.edits and to != 'safetensors':
        raise UserError(f'{trained.workdirs[0]} was trained with config.train.edits, which {to} cannot apply. Use '
                        'the format safetensors')
    options = {} if quantization is None else {'quantization': quantization}
    with naming(folder), written_folder(folder) as temporary:
        FORMATS[to](trained, temporary, **options)
    return sorted(folder.iterdir())


def export_without_heads(workdir: str | Path, output: str | Path, removed: Iterable[tuple[str, int | np.integer]],
                         checkpoint: str | int = 'best') -> list[Path]:
    """Removes attention heads from the model of a run, writes the model as safetensors, and returns the new files.

    The folder can be loaded like a run directory. The outputs equal the run's outputs with the removed heads set to
    zero. `interchange.equal_models.without_heads` explains how many heads remain.

    Args:
      workdir: the run directory.
      output: a new or an empty folder outside of run directories.
      removed: the heads to remove, as pairs (place of the heads, index of the head), such as
        ('decoder/layers_0/cross_attention/heads', 2). `analysis.heads` uses the same pairs.
      checkpoint: the same choices as --checkpoint of decode.py, including averages.

    Raises:
      UserError: if a head does not exist, the heads of the model cannot be removed, a parameter contains NaN or
        infinity, or the folder is not empty or cannot be written.
    """
    folder = _new_folder(output)
    check_devices()
    pruned = pruned_model(read_models([expanded(workdir)], str(checkpoint)), removed)
    check_config(pruned.config)  # otherwise the folder could not be opened
    with naming(folder), written_folder(folder) as temporary:
        write_safetensors(pruned, temporary)
    return sorted(folder.iterdir())


def pruned_model(trained: TrainedModel, removed: Iterable[tuple[str, int | np.integer]]) -> TrainedModel:
    """Returns the model without the heads in `removed`, which `export_without_heads` explains."""
    config, run = trained.config, trained.workdirs[0]
    model, heads = config.model, {}
    if len(trained.workdirs) > 1 or model.kind not in ('transformer', 'language_model'):
        raise UserError(f'{run}: heads can be removed only from a single run with model.kind=transformer or '
                        'language_model')
    if model.position not in (*ADDED, 'rotary', 'none'):
        raise UserError(f'{run}: with config.model.position={model.position}, each head may have a different bias, so '
                        'heads cannot be removed. Set the heads to zero')
    if model.num_key_value_heads not in (0, model.num_heads):
        raise UserError(f'{run}: config.model.num_key_value_heads={model.num_key_value_heads}: heads share keys and '
                        'values, so heads cannot be removed. Set the heads to zero')
    if config.train.edits:
        raise UserError(f'{run}: config.train.edits may contain indices of heads, so heads cannot be removed. Set '
                        'the heads to zero')
    arrays = {name: np.array(leaf) for name, leaf in flatten_dict(trained.params, sep='/').items()}
    for place, head in removed:
        layer = place.removesuffix('/heads')
        if f'{layer}/output/kernel' not in arrays or not 0 <= head < model.num_heads:
            raise UserError(f'{run}: there is no head {head} at {place}. Use places such as '
                            f'decoder/layers_0/cross_attention/heads, and heads 0 to {model.num_heads - 1}')
        heads.setdefault(layer, set()).add(int(head))
    options, arrays = without_heads(model, arrays, heads)
    new = ConfigDict({**config.to_dict(), 'model': options.to_dict()})
    new.train.guided_head = ''  # its head may have another number now, and the new model cannot be trained further
    module = build_model(new.model, **trained.sizes, pad=PAD)
    params = unflatten_dict({name: jnp.asarray(array) for name, array in arrays.items()}, sep='/')
    return trained._replace(config=new, module=module, params=params)


def _new_folder(output: str | Path) -> Path:
    """Returns the path of a folder to be written.

    Raises:
      UserError: if the folder is not empty, is inside a run directory or cannot be written.
    """
    folder = expanded(output)
    check_new_folder(folder, 'output')
    if runs := [parent for parent in folder.absolute().parents if (parent / CONFIG).is_file() and is_run(parent)]:
        raise UserError(f'output={folder} is inside {runs[0]}, which is a run or an exported model. Use a folder '
                        f'outside of {runs[0]}')
    return folder
