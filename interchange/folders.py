"""Folders that hold a trained model, of whatever kind they are."""

from collections.abc import Sequence
from pathlib import Path

from interchange.huggingface import is_theirs, read_huggingface
from interchange.safetensors_folder import WEIGHTS, read_safetensors
from run_directory.trained import TrainedModel, join_models, read_model
from runtime.errors import UserError

ONE_CHECKPOINT = ('best', 'latest')  # choices of a checkpoint that a folder with a single one understands


def read_models(folders: Sequence[Path], checkpoint: str, dtype: str | None = None) -> TrainedModel:
    """Reads the model of a folder, or the ensemble of several: run directories, exports as safetensors, and folders
    that Hugging Face's save_pretrained wrote.

    Args:
      folders: of any kinds.
      checkpoint: the same choice for each; a folder that is no run directory has one, which is 'best' and 'latest'.
      dtype: takes the place of config.model.dtype.

    Raises:
      UserError: if a folder cannot be read, or cannot be joined with the others in one ensemble.
    """
    return join_models([_read(folder, checkpoint, dtype) for folder in folders])


def _read(folder: Path, checkpoint: str, dtype: str | None) -> TrainedModel:
    theirs = is_theirs(folder)
    if not theirs and not (folder / WEIGHTS).is_file():
        return read_model(folder, checkpoint, dtype)
    if checkpoint not in ONE_CHECKPOINT:
        raise UserError(f'checkpoint={checkpoint!r}: {folder} is no run directory and holds one checkpoint: leave it '
                        'out')
    return read_huggingface(folder, dtype) if theirs else read_safetensors(folder, dtype)
