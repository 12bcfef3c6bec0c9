"""Translates, continues or classifies with a trained model, or scores it on a split of its data.

    python decode.py --workdir=RUN --input=FILE|- [--output=FILE] [--method=beam|greedy|sample] ...
    python decode.py --workdir=RUN                     # on a terminal: prompts for sentences
    python decode.py --workdir=RUN --input=PAIRS.tsv --score
    python decode.py --workdir=RUN --split=test [--confidence] [--compare=OTHER_RUN]

--workdir=A,B,C uses an ensemble of several runs with the same vocabulary.
stdout has one line for each input line, in order. The translation of an empty sentence is empty; the continuation of an
empty prompt begins a text. A continuation may have several lines, so a line of dashes separates two continuations;
--format=jsonl has one line for each prompt. A model of images or series reads an .npz file with an array `inputs`, and
writes a line for each example.
"""

import sys

from absl import flags

from analysis.request import Request
from command_line import run_script
from configs.allowed import OneOf
from configs.options import OPTIONS
from runtime.flags import define_flags, flags_as

define_flags(Request)
SEARCH = {option.name.removeprefix('decode.'): option for option in OPTIONS if option.name.startswith('decode.')}
for name, option in SEARCH.items():  # every option of config.decode is a flag of the same name
    if isinstance(option.allowed, OneOf):
        flags.DEFINE_enum(name, None, option.allowed.choices, f'{option.meaning}; default as configured.')
    else:
        define = {int: flags.DEFINE_integer, float: flags.DEFINE_float}[type(option.default)]
        define(name, None, f'{option.meaning}; default as configured.')
flags.DEFINE_integer('n_best', None, 'Hypotheses per sentence, or draws with --method=sample (jsonl only).')
flags.DEFINE_integer('seed', None, 'sample: the seed of the draws.')


def main() -> None:
    """Answers or scores, as the flags request."""
    from analysis.answering import decode  # slow to import, and not needed for --help

    search = {name: flags.FLAGS[name].value for name in (*SEARCH, 'n_best', 'seed')}
    nothing_to_read = flags.FLAGS['input'].value is None and not flags.FLAGS['split'].value
    decode(flags_as(Request, search=search,
                    typed=nothing_to_read and sys.stdin is not None and sys.stdin.isatty()))


if __name__ == '__main__':
    run_script(main, computes=True, ends_at_once=True)
