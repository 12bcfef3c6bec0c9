"""Writes a teacher's translations as training data: python -m tools.distil --workdir=RUN --output=DIR

Sequence-level distillation (Kim and Rush 2016, arXiv:1606.07947, section 3.2): a student is trained on what the teacher
makes of the training sources by beam search, instead of on the references. --workdir=A,B,C is an ensemble of teachers.
DIR gets the files that data.source=files reads, with line n of one for line n of the other: train.SOURCE and
train.TARGET, the sources and their translations, and the splits for validation and test as they are, under the names
that they have. Sources that are too long for the teacher (config.data.max_length) are left out. Then

    python train.py --config=... --config.data.source=files --config.data.dir=DIR --workdir=STUDENT

With --pairs train.* are the training pairs as they are and distilled.* the sources and their translations: a student of
both has --config.data.splits.train=train,distilled. At the end the log has all flags of the data. For a student of the
teacher's vocabulary, add --config.train.teacher=RUN.
"""
# ruff: noqa: E402 (flags come before the imports that take seconds)

from absl import flags

from command_line import read_command_line, run_script

WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory of the teacher; A,B,C: an ensemble of several.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', "The teacher's checkpoint, as decode.py's.")
OUTPUT = flags.DEFINE_string('output', None, 'The folder of the new files: a new or an empty one.')
PAIRS = flags.DEFINE_bool('pairs', False, 'Write the training pairs as train.*, and the translations as distilled.*.')
SENTENCES = flags.DEFINE_integer('sentences', 0, 'Translate the first so many training sentences, to try it; 0: all.')
BEAM = flags.DEFINE_integer('beam', None, 'Hypotheses that live at a time; default as configured.')
ALPHA = flags.DEFINE_float('alpha', None, 'Length penalty ((5 + |Y|) / 6)^alpha; default as configured.')
BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Sentences at a time; default as configured.')

if __name__ == '__main__':
    read_command_line()  # before the imports that take seconds

import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import inference
from configs.options import COUNT
from inference.run import Run
from inference.text import SearchOptions, search_options
from inference.translate import Translator
from input_pipeline.data import PairData
from input_pipeline.sources import Pair
from input_pipeline.splits import sets_to_test, split_names
from run_directory.trained import run_paths
from run_directory.workdir import changed_data
from runtime.errors import UserError
from runtime.files import check_folder, expanded, naming, written_whole

log = logging.getLogger('allyouneed.distil')


def main() -> None:
    """Writes the files that the flags ask for."""
    if not WORKDIR.value or not OUTPUT.value:
        raise UserError('--workdir=RUN and --output=DIR are needed: the teacher, and the folder of the new files')
    if wanted := COUNT.problem(SENTENCES.value):
        raise UserError(f'--sentences={SENTENCES.value} {wanted}')
    folder = expanded(OUTPUT.value)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f'--output={folder} is not empty: give a new folder')
    check_folder(folder)
    run = inference.load(run_paths(WORKDIR.value), CHECKPOINT.value)
    if not isinstance(run.model, Translator):
        raise UserError(f'{run.workdir} is a run of task={run.config.task}: only translators have translations to '
                        'learn from')
    options = search_options(run.config, method='beam', beam=BEAM.value, alpha=ALPHA.value,
                             batch_size=BATCH_SIZE.value)
    write_corpus(run, run.model, folder, options, sentences=SENTENCES.value, with_pairs=PAIRS.value)


def write_corpus(run: Run, model: Translator, folder: Path, options: SearchOptions, sentences: int = 0,
                 with_pairs: bool = False) -> None:
    """Writes the corpus of a student into `folder`. The translations get their names last, when they are whole.

    Args:
      run: the teachers, whose data it is.
      model: their translator.
      folder: a folder with nothing in it, or none yet.
      options: of the search.
      sentences: how many training sentences to translate, from the first on; 0: all.
      with_pairs: whether to write the training pairs, too, as a split beside the translations.
    """
    data = run.data()
    assert isinstance(data, PairData)
    for changed in changed_data(run.workdir, data, ['train']):
        log.warning('not the data that the run was trained with: %s', changed)
    pairs = list(data.pairs('train'))
    sources = read_whole(model, [source for source, _ in pairs][:sentences or None])
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    names, tests = split_names(run.config.data), sets_to_test(run.config.data)
    held_out = {split: file_name(names[split]) for split in ('validation', *tests)}
    for split in [*held_out]:
        try:
            write_pairs(run, folder, held_out[split], data.pairs(split))
        except UserError as error:
            if split == 'validation':
                raise
            log.info('%s is not written: %s', split, error)
            del held_out[split]
    if with_pairs:
        write_pairs(run, folder, 'train', pairs)
    write_pairs(run, folder, 'distilled' if with_pairs else 'train', translated(model, sources, options))
    named = {'train': 'train,distilled' if with_pairs else 'train', 'validation': held_out.pop('validation'),
             'test': ','.join(held_out.values())}
    log.info('a student of them: train.py --config.data.source=files --config.data.dir=%s %s', folder,
             ' '.join(f'--config.data.splits.{split}={name}' for split, name in named.items() if name))


def file_name(split: str) -> str:
    """Returns the name of a split on disk, with '-' for what no name of one file has: 'news/dev-*' has 'news-dev'."""
    return re.sub(r'[^\w.+-]+', '-', split).strip('-')


def read_whole(model: Translator, sources: Sequence[str]) -> list[str]:
    """Returns the sources that the teacher reads whole. A truncated source would not match its translation.

    Raises:
      UserError: if none of them has text.
    """
    kept = [source for source in sources if model.reads_whole(source)]
    if not any(source.strip() for source in kept):
        raise UserError(f'every training source has more than {model.max_length - 1} tokens (config.data.max_length='
                        f'{model.max_length}), so that the teacher would read only its beginning. Use a teacher that '
                        'was trained with a larger config.data.max_length')
    if left_out := len(sources) - len(kept):
        log.warning('left out: %d of %d training sources, of more than %d tokens (config.data.max_length), because the '
                    'teacher would translate only their beginnings', left_out, len(sources), model.max_length - 1)
    return kept


def translated(model: Translator, sources: Sequence[str], options: SearchOptions) -> Iterator[Pair]:
    """Yields each source with its translation; the log tells how far it has come."""
    began, count = time.perf_counter(), 0
    for outputs in model.respond_all(sources, options):
        yield from ((output.source, output.text) for output in outputs)
        count += len(outputs)
        log.info('%d of %d sentences in %.0f s', count, len(sources), time.perf_counter() - began)


def write_pairs(run: Run, folder: Path, split: str, pairs: Iterable[Pair]) -> None:
    """Writes SPLIT.SOURCE and SPLIT.TARGET, a line for each pair: line breaks within a text become spaces."""
    paths = [folder / f'{split}.{run.config.data[side]}' for side in ('source_lang', 'target_lang')]
    with written_whole(paths[0], '.partial') as sources, written_whole(paths[1], '.partial') as targets:
        for pair in pairs:
            for file, text in zip((sources, targets), pair, strict=True):
                file.write(text.replace('\n', ' ').replace('\r', ' ') + '\n')


if __name__ == '__main__':
    run_script(main)
