"""Writes a trained model in a format of another library: --workdir=RUN --to=FORMAT --output=DIR. For example:

    python -m tools.export --workdir=runs/demo --to=ctranslate2 --quantization=int8 --output=demo.ct2

Formats: ctranslate2, an engine for CPUs and GPUs that needs neither JAX nor this project; huggingface, a folder for
transformers, if it supports the model; safetensors, the parameters under our own names, with all files that
`allyouneed.load` needs. The folder is complete or absent.
"""

from absl import flags

from command_line import run_script
from runtime.errors import UserError

FORMATS = ('ctranslate2', 'huggingface', 'safetensors')
QUANTIZATIONS = ('float32', 'int8', 'float16')
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', "'best', 'latest', a step, 'average:K' or 'best:K', as for "
                                 'decode.py.')
TO = flags.DEFINE_enum('to', None, FORMATS, 'The format.')
OUTPUT = flags.DEFINE_string('output', None, 'A new or an empty folder outside of run directories.')
QUANTIZATION = flags.DEFINE_enum('quantization', 'float32', QUANTIZATIONS, 'ctranslate2: the type of the weights.')


def main() -> None:
    """Exports the run that the flags name."""
    from interchange.export import export  # seconds of imports, which --help does not wait for

    if not WORKDIR.value or not TO.value or not OUTPUT.value:
        missing = [name for name in ('workdir', 'to', 'output') if not flags.FLAGS[name].value]
        raise UserError(f'--{missing[0]} is missing. See --help')
    if QUANTIZATION.present and TO.value != 'ctranslate2':
        raise UserError(f'--quantization does not apply to --to={TO.value}. Remove it')
    written = export(WORKDIR.value, OUTPUT.value, TO.value, CHECKPOINT.value, QUANTIZATION.value)
    print('\n'.join(str(path) for path in written))


if __name__ == '__main__':
    run_script(main)
