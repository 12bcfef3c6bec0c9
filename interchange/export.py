"""From a checkpoint to a folder of another library's files."""

from collections.abc import Callable, Mapping
from pathlib import Path

from interchange.folders import read_models
from interchange.huggingface import write_huggingface
from interchange.safetensors_folder import write_safetensors
from interchange.to_ctranslate2 import write_ctranslate2
from runtime.errors import UserError
from runtime.files import check_folder, expanded, naming

FORMATS: Mapping[str, Callable[..., None]] = {
    'ctranslate2': write_ctranslate2, 'huggingface': write_huggingface, 'safetensors': write_safetensors}


def export(workdir: str | Path, output: str | Path, to: str, checkpoint: str | int = 'best',
           quantization: str = 'float32') -> list[Path]:
    """Writes the model of a run in another library's format, and returns the files.

    Args:
      workdir: the run directory.
      output: a new or an empty folder.
      to: one of FORMATS.
      checkpoint: as decode.py's --checkpoint: an average too.
      quantization: of the weights of ctranslate2: 'float32', 'int8' or 'float16'.

    Raises:
      UserError: if the run has no such checkpoint, the folder holds something, or the format has no such model.
    """
    folder = expanded(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'--output={folder} is there already: give a new or an empty folder')
    check_folder(folder)
    trained = read_models([expanded(workdir)], str(checkpoint))
    options = {'quantization': quantization} if to == 'ctranslate2' else {}
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        FORMATS[to](trained, folder, **options)
    return sorted(folder.iterdir())
