"""Folders that contain a trained model, in any format."""

import os
from collections.abc import Sequence
from pathlib import Path

from interchange.huggingface import is_huggingface, read_huggingface
from interchange.safetensors_folder import WEIGHTS, read_safetensors
from run_directory.trained import TrainedModel, join_models, read_model
from runtime.errors import UserError

ONE_CHECKPOINT = ('best', 'latest')  # the allowed values of --checkpoint for a folder with a single checkpoint


def read_models(folders: Sequence[Path], checkpoint: str, dtype: str | None = None) -> TrainedModel:
    """Reads the model of one folder, or the models of several folders as an ensemble.

    Args:
      folders: run directories, exported safetensors folders, or folders that Hugging Face's save_pretrained has
        written.
      checkpoint: the checkpoint to read from every folder. Only a run directory has several checkpoints. For other
        folders, use 'best' or 'latest'.
      dtype: overrides config.model.dtype.

    Raises:
      UserError: if a folder cannot be read, or the models cannot form an ensemble.
    """
    return join_models([_read(folder, checkpoint, dtype) for folder in folders])


def _read(folder: Path, checkpoint: str, dtype: str | None) -> TrainedModel:
    huggingface = is_huggingface(folder)
    if not huggingface and not os.path.lexists(folder / WEIGHTS):
        return read_model(folder, checkpoint, dtype)
    if checkpoint not in ONE_CHECKPOINT:
        raise UserError(f'checkpoint={checkpoint!r}: {folder} is not a run directory and has only one checkpoint. '
                        'Remove the argument checkpoint')
    return read_huggingface(folder, dtype) if huggingface else read_safetensors(folder, dtype)
