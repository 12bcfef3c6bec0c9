"""Writes a trained model in another library's format: --workdir=RUN --to=FORMAT --output=DIR. For example:

    python -m tools.export --workdir=runs/demo --to=ctranslate2 --quantization=int8 --output=demo.ct2

There are three formats. The format ctranslate2 is for CTranslate2, an engine for CPUs and GPUs that needs neither JAX
nor this project. The format huggingface is for the library transformers, if that library supports the model. The format
safetensors is for `allyouneed.load`, with the parameters under the names of this project. If the export fails, no
folder is written.
"""

from absl import flags

from command_line import run_script
from runtime.errors import UserError
from runtime.process_setup import slow_imports

FORMATS = ('ctranslate2', 'huggingface', 'safetensors')
QUANTIZATIONS = ('float32', 'int8', 'float16')
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', "'best', 'latest', a step, 'average:K' or 'best:K'. See "
                                 'decode.py --help.')
TO = flags.DEFINE_enum('to', None, FORMATS, 'The format.')
OUTPUT = flags.DEFINE_string('output', None, 'A new or an empty folder outside of run directories.')
QUANTIZATION = flags.DEFINE_enum('quantization', None, QUANTIZATIONS, 'ctranslate2: the type of the weights; by '
                                 'default float32.')


def main() -> None:
    """Writes the model of the run --workdir in the format --to."""
    with slow_imports():
        from interchange.export import export

    if not WORKDIR.value or not TO.value or not OUTPUT.value:
        missing = [name for name in ('workdir', 'to', 'output') if not flags.FLAGS[name].value]
        raise UserError(f'--{missing[0]} is missing. Use --workdir=RUN --to=FORMAT --output=DIR')
    written = export(WORKDIR.value, OUTPUT.value, TO.value, CHECKPOINT.value, QUANTIZATION.value)
    print('\n'.join(str(path) for path in written))


if __name__ == '__main__':
    run_script(main)
