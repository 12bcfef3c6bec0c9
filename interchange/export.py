"""Exports a checkpoint as a folder in another library's format."""

from collections.abc import Callable, Mapping
from pathlib import Path

from interchange.folders import read_models
from interchange.huggingface import write_huggingface
from interchange.safetensors_folder import write_safetensors
from interchange.to_ctranslate2 import write_ctranslate2
from run_directory.records import CONFIG
from runtime.errors import UserError
from runtime.files import check_folder, expanded, naming
from runtime.folders import written_folder

FORMATS: Mapping[str, Callable[..., None]] = {
    'ctranslate2': write_ctranslate2, 'huggingface': write_huggingface, 'safetensors': write_safetensors}


def export(workdir: str | Path, output: str | Path, to: str, checkpoint: str | int = 'best',
           quantization: str = 'float32') -> list[Path]:
    """Writes the model of a run in another library's format, and returns the new files. After a failure, none remains.

    Args:
      workdir: the run directory.
      output: a new or an empty folder outside of run directories.
      to: the format, one of FORMATS.
      checkpoint: the same choices as --checkpoint of decode.py, including averages.
      quantization: the type of the weights for ctranslate2: 'float32', 'int8' or 'float16'.

    Raises:
      UserError: if the run has no such checkpoint, the folder is not empty or cannot be written, or the format cannot
        express the model.
    """
    folder = expanded(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'--output={folder} exists and is not empty. Use a new or an empty folder')
    if runs := [parent for parent in folder.absolute().parents if (parent / CONFIG).is_file()]:
        raise UserError(f'--output={folder} is inside {runs[0]}, which is a run or an exported model. Use a folder '
                        f'outside of {runs[0]}')
    check_folder(folder)
    trained = read_models([expanded(workdir)], str(checkpoint))
    options = {'quantization': quantization} if to == 'ctranslate2' else {}
    with naming(folder), written_folder(folder) as temporary:
        FORMATS[to](trained, temporary, **options)
    return sorted(folder.iterdir())
