"""Writes a teacher's translations as training data: python -m tools.distil --workdir=RUN --output=DIR

Sequence-level distillation (Kim and Rush 2016, arXiv:1606.07947, section 3.2): a student is trained on the teacher's
beam-search translations of the training sources, instead of the references. With --workdir=A,B,C, the teacher is an
ensemble of three runs. The files in DIR have the format of data.source=files: train.SOURCE contains the sources, and
train.TARGET contains the translations in the same order. If config.data.source_lang and target_lang are equal,
train.tsv contains both. The validation and test splits are copied under their names. Sources that are too long for the
teacher (config.data.max_length) are skipped. To train the student:

    python train.py --config=... --config.data.source=files --config.data.dir=DIR --workdir=STUDENT

With --pairs, train.* contains the original training pairs, and distilled.* contains the sources and their translations.
To train a student on both sets of pairs, use --config.data.splits.train=train,distilled. At the end, the script logs
all data flags that the training of the student needs. For a student with the teacher's vocabulary, add
--config.train.teacher=RUN.
"""

from absl import flags

from command_line import run_script
from configs.options import COUNT
from runtime.errors import UserError
from runtime.files import check_new_folder, expanded
from runtime.process_setup import slow_imports

WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory of the teacher, or A,B,C for an ensemble.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', "The teacher's checkpoint: the same choices as for decode.py.")
OUTPUT = flags.DEFINE_string('output', None, 'The folder for the new files. It must be new or empty.')
PAIRS = flags.DEFINE_bool('pairs', False, 'Write the training pairs as train.*, and the translations as distilled.*.')
SENTENCES = flags.DEFINE_integer('sentences', 0, 'Translate only the first N training sentences; 0 means all.')
BEAM = flags.DEFINE_integer('beam', None, 'Beam size; by default config.decode.beam.')
ALPHA = flags.DEFINE_float('alpha', None, 'Length penalty ((5 + |Y|) / 6)^alpha; by default config.decode.alpha.')
BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Sentences per batch; by default config.decode.batch_size.')


def main() -> None:
    """Translates the training sources with the teacher, and writes the training data of a student model."""
    if not WORKDIR.value or not OUTPUT.value:
        missing = 'output' if WORKDIR.value else 'workdir'
        raise UserError(f'--{missing} is missing. Use --workdir=RUN with the run of the teacher, and --output=DIR with '
                        'a new folder')
    if problem := COUNT.problem(SENTENCES.value):
        raise UserError(f'--sentences={SENTENCES.value} {problem}')
    folder = expanded(OUTPUT.value)
    check_new_folder(folder, '--output')

    with slow_imports():
        from inference.options import search_options
        from inference.run import load
        from inference.translate import Translator
        from run_directory.trained import run_paths
        from tools.student_corpus import write_corpus

    run = load(run_paths(WORKDIR.value), CHECKPOINT.value)
    if not isinstance(run.model, Translator):
        raise UserError(f'--workdir={run.workdir}: task={run.config.task} does not support distillation. Use a run '
                        'with task=translation')
    options = search_options(run.config, method='beam', beam=BEAM.value, alpha=ALPHA.value,
                             batch_size=BATCH_SIZE.value)
    write_corpus(run, run.model, folder, options, sentences=SENTENCES.value, with_pairs=PAIRS.value)


if __name__ == '__main__':
    run_script(main)
