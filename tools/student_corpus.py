"""Writes the training data of a student: a teacher's translations of the training sources, and the held-out splits."""

import contextlib
import itertools
import logging
import re
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from inference.options import SearchOptions
from inference.run import Run
from inference.translate import Translator
from input_pipeline.data import PairData
from input_pipeline.sources import Pair
from input_pipeline.splits import sets_to_test, split_names
from run_directory.fingerprints import changed_data
from runtime.errors import UserError
from runtime.files import naming
from runtime.folders import written_folder

SIDES = 'source_lang', 'target_lang'

log = logging.getLogger('allyouneed.distil')


def write_corpus(run: Run, model: Translator, folder: Path, options: SearchOptions, sentences: int = 0,
                 with_pairs: bool = False) -> None:
    """Writes the training data of a student into `folder`. The folder has a temporary name until it is complete.

    Args:
      run: the run of the teacher, or an ensemble. The data of this run is translated.
      model: the translator of `run`.
      folder: a new or an empty folder.
      options: the options of the search.
      sentences: translate only the first `sentences` training sentences; 0 means all.
      with_pairs: whether to write the original training pairs as another split.
    """
    data = run.data()
    assert isinstance(data, PairData)
    for changed in changed_data(run.workdir, data, ['train']):
        log.warning('the training data has changed since the teacher was trained: %s', changed)
    pairs = list(data.pairs('train'))
    sources = read_whole(model, [source for source, _ in pairs], sentences)
    names, tests = split_names(run.config.data), sets_to_test(run.config.data)
    held_out, held_out_pairs = {}, {}
    for split in 'validation', *tests:
        try:
            held_out_pairs[split] = data.pairs(split)
            role = 'validation' if split == 'validation' else 'test'
            # Test sets must not have the name 'validation', which is a key of `held_out` since the first iteration.
            held_out[split] = file_name(names[split], role, {'train', 'distilled', *held_out, *held_out.values()})
        except UserError as error:
            if split == 'validation':
                raise
            log.info('the split %s is not written: %s', split, error)
    with naming(folder), written_folder(folder) as temporary:
        for split, name in held_out.items():
            write_pairs(run, temporary, name, held_out_pairs[split])
        if with_pairs:
            write_pairs(run, temporary, 'train', pairs)
        write_pairs(run, temporary, 'distilled' if with_pairs else 'train', translated(model, sources, options))
    splits = {'train': 'train,distilled' if with_pairs else 'train', 'validation': held_out.pop('validation'),
             'test': ','.join(held_out.values())}
    student = {'source': 'files', 'dir': folder, **{side: run.config.data[side] for side in SIDES},
               **{f'splits.{split}': name for split, name in splits.items() if name}}
    log.info('to train a student: train.py %s',
             shlex.join(f'--config.data.{option}={value}' for option, value in student.items()))


def file_name(split: str, role: str, taken: Collection[str]) -> str:
    """Returns a file name for a split that is not in `taken`: 'news/dev-*' becomes 'news-dev', or else 'news-dev-2'.

    If nothing remains of the name of the split, as for '*', the file is named after its role, 'validation' or 'test'.
    """
    name = re.sub(r'[^\w.+-]+', '-', split).strip('-') or role
    numbered = (f'{name}-{number}' for number in itertools.count(2))
    return next(unique for unique in itertools.chain([name], numbered) if unique not in taken)


def read_whole(model: Translator, sources: Sequence[str], sentences: int) -> list[str]:
    """Returns the chosen sources that are short enough for the teacher. The teacher would truncate longer sources.

    The first `sentences` sources are chosen; 0 means all.

    Raises:
      UserError: if every chosen source is blank or too long.
    """
    chosen = sources[:sentences or None]
    kept = [source for source in chosen if model.reads_whole(source)]
    if not any(source.strip() for source in kept):
        reason, remedies = f'blank: {len(kept)}', []
        if len(chosen) < len(sources):
            remedies.append('a larger --sentences')
        if long := len(chosen) - len(kept):
            reason += (f'; more than {model.max_length - 1} tokens (config.data.max_length={model.max_length}): '
                       f'{long}')
            remedies.append('a teacher that was trained with a larger config.data.max_length')
        raise UserError(f'no chosen training source can be translated: {reason}. '
                        f'Use {" or ".join(remedies) or "training data whose sources contain text"}')
    if omitted := len(chosen) - len(kept):
        log.warning('skipped %d of %d training sources: they have more than %d tokens (config.data.max_length), so '
                    'the teacher would translate only the first tokens',
                    omitted, len(chosen), model.max_length - 1)
    return kept


def translated(model: Translator, sources: Sequence[str], options: SearchOptions) -> Iterator[Pair]:
    """Yields each source with the translation of the teacher, and logs the progress."""
    began, count = time.perf_counter(), 0
    for outputs in model.respond_all(sources, options):
        yield from ((output.source, output.text) for output in outputs)
        count += len(outputs)
        log.info('translated %d of %d sentences in %.0f s', count, len(sources), time.perf_counter() - began)


def write_pairs(run: Run, folder: Path, split: str, pairs: Iterable[Pair]) -> None:
    """Writes the files SPLIT.SOURCE and SPLIT.TARGET, one line per pair. Line breaks in texts become spaces.

    If both languages have the same name, writes the table SPLIT.tsv instead. In a table, tabs also become spaces.
    """
    names = [run.config.data[side] for side in SIDES]
    table = names[0] == names[1]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / f'{split}.{name}', 'w', encoding='utf-8',
                                          errors='backslashreplace', newline='\n'))
                 for name in (['tsv'] if table else names)]
        for pair in pairs:
            texts = [text.replace('\n', ' ').replace('\r', ' ') for text in pair]
            lines = ['\t'.join(text.replace('\t', ' ') for text in texts)] if table else texts
            for file, line in zip(files, lines, strict=True):
                file.write(line + '\n')
