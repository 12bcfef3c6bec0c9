"""Finds all problems of the data of a config before training starts, to report them together."""

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from configs.checks import data_options_are_possible
from configs.options import ELSEWHERE, flatten, is_used
from configs.tasks import IMPORTED, SUBWORDS, TASKS
from input_pipeline.arrays import open_arrays
from input_pipeline.data import learned_tokenizers
from input_pipeline.documents import FileDocuments, OneFile, open_documents
from input_pipeline.forecasting import open_series
from input_pipeline.sources import Corpus, TextCorpus, no_text, open_corpus
from input_pipeline.splits import SPLITS, sets_to_test
from input_pipeline.token_store import document_tokenizers, tokenizers_for
from runtime.errors import UserError, messages_of
from runtime.files import expanded, files_in

SMALL = 10_000_000  # bytes; if files are larger, only their first lines are read
FIRST_LINES = 1000


def data_problems(config: ConfigDict, others: Sequence[str] = (), asked: Collection[str] = (),
                  scored: str = '') -> list[str]:
    """Returns a message for each problem of the data that can be found quickly.

    If the data is in files, the function checks that the folder, the files and the languages exist, that lines and
    arrays have the right form, and that no split is empty. The test split may be missing if there is a validation
    split and `scored` is not the test split. If there are several test sets, either all or none of them must exist.

    The text is not tokenised. However, if the text is small and there is a problem here or in `others`, a tokenizer is
    learned and cached. So an error of the tokenizer is reported together with the other problems. This does not apply
    to a config that takes its tokenizers from another run.

    TFDS datasets are not checked, because a dataset may have to be prepared before it can be opened.

    Args:
      config: the config.
      others: messages about problems of the config that were already found.
      asked: the options that the user set; see `learned_tokenizers`.
      scored: the split on which the trained model will be scored, or ''.
    """
    named = data_options_are_possible(config) and bool(
        config.data.dir or config.data.file and is_used('data.file', flatten(config)))
    if not named or config.data.source in ELSEWHERE:
        return []  # built-in data has no problems, and `others` has the problems of options
    find = PROBLEMS[TASKS[config.task].data]
    return list(dict.fromkeys(find(config, others, asked, scored)))  # a problem of several splits is reported once


def _text_problems(open_text: Callable, learn: Callable, config: ConfigDict, others: Sequence[str],
                   asked: Collection[str], scored: str) -> list[str]:
    tests = sets_to_test(config.data)
    try:
        text = open_text(config.data)
        has_test = scored in tests or 'test' in text.parts.names or any(map(text.has_files, tests))
    except UserError as error:
        return [str(error)]
    splits = [*SPLITS[:2], *(tests if has_test else ())]
    found = {split: messages_of(functools.partial(_check_split, text, split)) for split in splits}
    problems, settings = list(itertools.chain(*found.values())), config.data.tokenizer
    if isinstance(text, TextCorpus) and config.train.guided_alignment and not found['train']:
        problems += messages_of(lambda: text.links('train'))
    possible = settings.kind not in SUBWORDS or settings.vocab_size > 260  # if not, `others` has a message
    learned = settings.kind not in IMPORTED and not config.train.teacher and not (
        config.train.init_from and config.train.init_vocabulary)  # otherwise, another run has the tokenizers
    if (problems or others) and possible and learned and not found['train'] and _is_small(text.files('train')):
        problems += messages_of(lambda: learned_tokenizers(learn, text, config.copy_and_resolve_references(), asked))
    return problems


def _check_split(text: TextCorpus | FileDocuments | OneFile, split: str) -> None:
    """Raises UserError if the files of a split have a problem. The text is sentence pairs or documents."""
    pairs = isinstance(text, Corpus)
    if not _is_small(text.files(split)):
        if pairs and split not in text.parts.names:  # reading one document may mean reading the whole file
            list(itertools.islice(text.all_pairs(split), FIRST_LINES))
        return
    rows = text.pairs(split) if pairs else ((document,) for document in text.documents(split))
    if not sum(all(text.strip() for text in row) for row in rows):  # sum instead of any, to read all rows
        raise no_text(split, text)


def _array_problems(config: ConfigDict, others: Sequence[str], asked: Collection[str], scored: str) -> list[str]:
    try:
        arrays = open_arrays(config.data, TASKS[config.task].data == 'classes', config.model.patches.patch)
    except UserError as error:
        return [str(error)]
    has_test = arrays.has_split('test')
    missing = scored == 'test' and not has_test
    if _is_small([path for path in files_in(expanded(config.data.dir)) if path.is_file()]):
        splits = SPLITS if has_test or missing else SPLITS[:2]
    else:
        splits = ('test',) if missing else ()  # a missing split is an error before any file is read
    return [problem for split in splits for problem in messages_of(functools.partial(arrays.inputs, split))]


def _series_problems(config: ConfigDict, others: Sequence[str], asked: Collection[str], scored: str) -> list[str]:
    return [] if others else messages_of(lambda: open_series(config.data, config.eval.metric))


def _is_small(files: Sequence[Path]) -> bool:
    return sum(file.stat().st_size for file in files) <= SMALL


# The name of a task's data (configs/tasks.py) -> the function that finds its problems.
PROBLEMS: Mapping[str, Callable[[ConfigDict, Sequence[str], Collection[str], str], list[str]]] = {
    'pairs': functools.partial(_text_problems, open_corpus, tokenizers_for),
    'documents': functools.partial(_text_problems, open_documents, document_tokenizers),
    'classes': _array_problems, 'values': _array_problems, 'series': _series_problems}
