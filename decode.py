"""Translates, continues or classifies the input with a trained model, or scores the model on a split of its data.

    python decode.py --workdir=RUN --input=FILE|- [--output=FILE] [--method=beam|mbr|greedy|sample] ...
    python decode.py --workdir=RUN                     # on a terminal: prompts for sentences
    python decode.py --workdir=RUN --input=PAIRS.tsv --score
    python decode.py --workdir=RUN --input=TEXT --documents=file --score    # bits per byte, for a language model
    python decode.py --workdir=RUN --split=test [--confidence] [--compare=OTHER_RUN]

--workdir=A,B,C uses an ensemble of several runs with the same vocabulary.
stdout has one line for each input line, in order. The translation of an empty sentence is empty; the continuation of an
empty prompt is a new text. A continuation may have several lines, so a line of dashes separates two continuations;
--format=jsonl prints one line for each prompt, and --documents reads prompts of several lines. For a model of images or
series, the input is a folder of images, an image, a .csv file or an .npz file, and the output has one line for each
image or series.
"""

import sys

from absl import flags

from analysis.request import Request
from command_line import run_script
from configs.allowed import OneOf
from configs.options import OPTIONS
from runtime.flags import define_flags, flags_as
from runtime.process_setup import slow_imports

define_flags(Request)
SEARCH = {option.name.removeprefix('decode.'): option for option in OPTIONS if option.name.startswith('decode.')}
for name, option in SEARCH.items():  # every option of config.decode is a flag of the same name
    if isinstance(option.allowed, OneOf):
        flags.DEFINE_enum(name, None, option.allowed.choices, f'{option.meaning}; default: as in the run\'s config.')
    else:
        define = {int: flags.DEFINE_integer, float: flags.DEFINE_float}[type(option.default)]
        define(name, None, f'{option.meaning}; default: as in the run\'s config.')
flags.DEFINE_integer('n_best', None, 'Number of hypotheses per sentence; with --method=sample, number of '
                     'independent samples. Values above 1 need --format=jsonl.')
flags.DEFINE_integer('seed', None, 'Seed of the random numbers of --method=sample.')


def main() -> None:
    """Decodes the input or scores the model, as the flags request."""
    with slow_imports():
        from analysis.answering import decode

    search = {name: flags.FLAGS[name].value for name in (*SEARCH, 'n_best', 'seed')}
    nothing_to_read = flags.FLAGS['input'].value is None and not flags.FLAGS['split'].value
    decode(flags_as(Request, search=search,
                    typed=nothing_to_read and sys.stdin is not None and sys.stdin.isatty()))


if __name__ == '__main__':
    run_script(main, computes=True, ends_at_once=True)
