"""Writes a teacher's translations as training data: python -m tools.distil --workdir=RUN --output=DIR

Sequence-level distillation (Kim and Rush 2016, arXiv:1606.07947, section 3.2): a student is trained on the teacher's
beam-search translations of the training sources, instead of the references. --workdir=A,B,C is an ensemble of teachers.
DIR gets the files that data.source=files reads, where line n of one file belongs to line n of the other: train.SOURCE
and train.TARGET have the sources and their translations. The splits for validation and test are copied under their
names. Sources that are too long for the teacher (config.data.max_length) are left out. Then

    python train.py --config=... --config.data.source=files --config.data.dir=DIR --workdir=STUDENT

With --pairs, train.* has the original training pairs and distilled.* the sources and their translations. A student of
both has --config.data.splits.train=train,distilled. At the end, the log has all flags of the data. For a student with
the teacher's vocabulary, add --config.train.teacher=RUN.
"""

from absl import flags

from command_line import run_script
from configs.options import COUNT
from runtime.errors import UserError
from runtime.files import check_folder, expanded

WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory of the teacher; A,B,C: an ensemble of several.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', "The teacher's checkpoint, as for decode.py.")
OUTPUT = flags.DEFINE_string('output', None, 'The folder of the new files: a new or an empty one.')
PAIRS = flags.DEFINE_bool('pairs', False, 'Write the training pairs as train.*, and the translations as distilled.*.')
SENTENCES = flags.DEFINE_integer('sentences', 0, 'Translate only the first N training sentences; 0: all.')
BEAM = flags.DEFINE_integer('beam', None, 'Beam size; default as configured.')
ALPHA = flags.DEFINE_float('alpha', None, 'Length penalty ((5 + |Y|) / 6)^alpha; default as configured.')
BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Sentences per batch; default as configured.')


def main() -> None:
    """Writes the files that the flags ask for."""
    if not WORKDIR.value or not OUTPUT.value:
        missing = 'output' if WORKDIR.value else 'workdir'
        raise UserError(f'--{missing} is missing. Use --workdir=RUN, the teacher, and --output=DIR, a new folder')
    if problem := COUNT.problem(SENTENCES.value):
        raise UserError(f'--sentences={SENTENCES.value} {problem}')
    folder = expanded(OUTPUT.value)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f'--output={folder} is not empty. Use a new folder')
    check_folder(folder)

    from inference.run import load  # seconds of imports, which --help does not wait for
    from inference.text import search_options
    from inference.translate import Translator
    from run_directory.trained import run_paths
    from tools.student_corpus import write_corpus

    run = load(run_paths(WORKDIR.value), CHECKPOINT.value)
    if not isinstance(run.model, Translator):
        raise UserError(f'{run.workdir}: task={run.config.task} does not support distillation into a corpus. Use a '
                        'run that translates')
    options = search_options(run.config, method='beam', beam=BEAM.value, alpha=ALPHA.value,
                             batch_size=BATCH_SIZE.value)
    write_corpus(run, run.model, folder, options, sentences=SENTENCES.value, with_pairs=PAIRS.value)


if __name__ == '__main__':
    run_script(main)
