"""What is wrong with the data of a config, all of it at once and before any work."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from configs.checks import ELSEWHERE, data_can_be_looked_for
from configs.tasks import SUBWORDS, TASKS
from errors import UserError, told
from files import expanded
from input_pipeline.arrays import open_arrays
from input_pipeline.documents import FileDocuments, OneFile, open_documents
from input_pipeline.sources import Corpus, TextCorpus, open_corpus
from input_pipeline.token_store import cache_folder, document_tokenizers, tokenizers_for

SMALL = 10_000_000  # bytes of files that are read to their end; in larger ones the first lines are looked at
FIRST_LINES = 1000
SPLITS = ('train', 'validation', 'test')


def data_problems(config: ConfigDict, others: Sequence[str] = ()) -> list[str]:
    """The messages about all that the data of `config` lacks, as far as it shows cheaply.

    Of files: that folder, files and languages are there, that their lines and arrays are what they should be, that no
    split is empty. A test split may be missing where there is a validation split. Nothing is tokenised; but where
    something is wrong anyway, here or among the `others`, a vocabulary is learned from text that is small, into the
    cache, for that would fail next. TFDS tells of its own when it is opened, since it may have to prepare a dataset.
    """
    named = data_can_be_looked_for(config) and bool(config.data.dir or config.data.file)
    if not named or config.data.source in ELSEWHERE:
        return []  # what is built in lacks nothing, and the `others` tell the rest
    find = PROBLEMS[TASKS[config.task].data]
    return list(dict.fromkeys(find(config, others)))  # what holds for several splits is told once


def _pair_problems(config: ConfigDict, others: Sequence[str]) -> list[str]:
    return _text_problems(config, others, open_corpus, tokenizers_for)


def _document_problems(config: ConfigDict, others: Sequence[str]) -> list[str]:
    return _text_problems(config, others, open_documents, document_tokenizers)


def _text_problems(config: ConfigDict, others: Sequence[str], open_text: Callable, learn: Callable) -> list[str]:
    try:
        text = open_text(config.data)
    except UserError as error:
        return [str(error)]
    splits = SPLITS if 'test' in text.parts or text.has_files('test') else SPLITS[:2]
    found = {split: told(functools.partial(_look_at, text, split)) for split in splits}
    problems, settings = list(itertools.chain(*found.values())), config.data.tokenizer
    possible = settings.kind in TASKS[config.task].tokenizers and (
        settings.kind not in SUBWORDS or settings.vocab_size > 260)  # which the `others` tell
    if (problems or others) and possible and not found['train'] and _is_small(text.files('train')):
        problems += told(lambda: learn(text, settings, cache_folder(config.cache_dir)))
    return problems


def _look_at(text: TextCorpus | FileDocuments | OneFile, split: str) -> None:
    """Raises UserError for what is wrong with the files of a split of sentence pairs or documents."""
    pairs = isinstance(text, Corpus)
    if not _is_small(text.files(split)):
        if pairs and split not in text.parts:  # a document may be as large as the file
            list(itertools.islice(text.all_pairs(split), FIRST_LINES))
        return
    rows = text.pairs(split) if pairs else ((document,) for document in text.documents(split))
    if not sum(all(each.strip() for each in row) for row in rows):  # to the end, whatever comes first
        raise UserError(f'the {split} split has no text. Looked at: {text.fingerprint(split)}')


def _array_problems(config: ConfigDict, others: Sequence[str]) -> list[str]:
    folder = expanded(config.data.dir)
    try:
        arrays = open_arrays(config.data, TASKS[config.task].data == 'classes')
    except UserError as error:
        return [str(error)]
    if not _is_small([path for path in folder.iterdir() if path.is_file()]):
        return []
    has_test = 'test' in arrays.parts or any(folder.glob('test.*')) or any(folder.glob('t10k-*'))
    splits = SPLITS if has_test else SPLITS[:2]
    return [problem for split in splits for problem in told(functools.partial(arrays.inputs, split))]


def _is_small(files: Sequence[Path]) -> bool:
    return sum(file.stat().st_size for file in files) <= SMALL


# The name of a task's data (configs/tasks.py) -> what finds its problems.
PROBLEMS: Mapping[str, Callable[[ConfigDict, Sequence[str]], list[str]]] = {
    'pairs': _pair_problems, 'documents': _document_problems, 'classes': _array_problems, 'values': _array_problems}
