"""Writes a trained model in a format of another library: --workdir=RUN --to=FORMAT --output=DIR. For example:

    python -m tools.export --workdir=runs/demo --to=ctranslate2 --quantization=int8 --output=demo.ct2

Formats: ctranslate2, for an engine for CPUs and GPUs that needs neither JAX nor this project; huggingface, a folder for
transformers, if it has such a model; safetensors, the parameters under our own names and everything else that
inference.load needs. The folder is complete or absent.
"""
# ruff: noqa: E402 (flags come before the imports that take seconds)

import logging

from absl import flags

from command_line import read_command_line, run_script

FORMATS = ('ctranslate2', 'huggingface', 'safetensors')
QUANTIZATIONS = ('float32', 'int8', 'float16')
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', "'best', 'latest', a step, 'average:K' or 'best:K', as for "
                                 'decode.py.')
TO = flags.DEFINE_enum('to', None, FORMATS, 'The format.')
OUTPUT = flags.DEFINE_string('output', None, 'A new or an empty folder outside of run directories.')
QUANTIZATION = flags.DEFINE_enum('quantization', 'float32', QUANTIZATIONS, 'Of the weights, for ctranslate2.')

if __name__ == '__main__':
    read_command_line()  # before the imports that take seconds

from interchange.export import export
from runtime.errors import UserError

log = logging.getLogger('allyouneed.export')


def main() -> None:
    """Exports the run that the flags name."""
    if not WORKDIR.value or not TO.value or not OUTPUT.value:
        missing = [name for name in ('workdir', 'to', 'output') if not flags.FLAGS[name].value]
        raise UserError(f'--{missing[0]} is missing; see --help')
    if QUANTIZATION.present and TO.value != 'ctranslate2':
        raise UserError(f'--quantization does not apply to --to={TO.value}. Remove it')
    written = export(WORKDIR.value, OUTPUT.value, TO.value, CHECKPOINT.value, QUANTIZATION.value)
    print('\n'.join(str(path) for path in written))


if __name__ == '__main__':
    run_script(main)
