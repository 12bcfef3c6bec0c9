"""Sources of sentence pairs with one interface: text files, a TFDS dataset, or the built-in corpus."""

import codecs
import contextlib
import errno
import functools
import gzip
import hashlib
import importlib.util
import itertools
import os
import stat
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, runtime_checkable

from ml_collections import ConfigDict
from typing_extensions import override

from input_pipeline import builtin
from input_pipeline.splits import HeldOut, naming_option, split_names, text_key, without_files
from runtime.errors import UserError
from runtime.files import expanded, named_files, plain_or_gz

Pair = tuple[str, str]
T = TypeVar('T')


@runtime_checkable
class Corpus(Protocol):
    """Splits of sentence pairs. `split` is 'train', 'validation' or 'test', and not its name on disk.

    If config.data.splits.test has several names, each of them is a split, instead of 'test'.
    """

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yields the (source, target) pairs of a split in order, without line ends."""
        ...

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Returns a description of the split's content, as JSON: equal fingerprints mean equal pairs."""
        ...


def open_corpus(data: ConfigDict) -> Corpus:
    """Opens the corpus that `config.data` describes.

    Raises:
      UserError: if there is no such source, file or dataset.
    """
    return source_of(data, SOURCES).from_config(data)


def source_of(data: ConfigDict, sources: Mapping[str, T]) -> T:
    """Returns the entry of config.data.source in the `sources` of one kind of data.

    Raises:
      UserError: if this kind of data has no such source.
    """
    if data['source'] not in sources:
        raise UserError(f'config.data.source={data["source"]!r}: must be one of {", ".join(sources)} for this task')
    return sources[data['source']]


class BuiltinCorpus(Corpus):
    """Dates, amounts, quantities, lists and the like in two languages, made from Unicode CLDR.

    `plain_spaces` is the share of the source sentences with no-break spaces that get plain spaces instead.
    """

    @classmethod
    def from_config(cls, data: ConfigDict) -> 'BuiltinCorpus':
        """Makes the corpus that `config.data` describes."""
        return cls(data['source_lang'], data['target_lang'], data['seed'], data['plain_spaces'])

    def __init__(self, source_lang: str, target_lang: str, seed: int, plain_spaces: float = 0.0):
        try:
            corpus = builtin.make_corpus(source_lang, target_lang, seed=seed)
        except ValueError as error:
            raise UserError(f'config.data (source=builtin): {error}') from None
        self._splits = builtin.with_plain_spaces(corpus, plain_spaces, seed=seed)
        self._fingerprint = {'source': 'builtin', 'languages': [source_lang, target_lang], 'seed': seed,
                             'version': builtin.GENERATOR_VERSION}
        if plain_spaces:  # runs that are older than this option have fingerprints without it
            self._fingerprint['plain_spaces'] = plain_spaces

    @override
    def pairs(self, split: str) -> Iterator[Pair]:
        return iter(self._splits[split])

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        # A digest of the pairs themselves: they also depend on the CLDR of the installed babel.
        digest = hashlib.sha256(repr(self._splits[split]).encode()).hexdigest()
        return self._fingerprint | {'split': split, 'sha256': digest}


class TextCorpus(Corpus):
    """Files with one sentence a line: DIR/SPLIT.LANG for each language, or DIR/SPLIT.tsv; each may end in .gz.

    The name of a split may be a pattern, such as 'train-*', or several names or patterns separated by commas. Then the
    split is the concatenation of these files; the files of a pattern are in the order of their names.

    If there are no validation files, `validation_share` of the different source sentences of the training data is held
    out instead; if there are no test files either, as many again are held out for test (see
    input_pipeline/splits.py).

    Attributes:
      parts: the splits that are held out from the training files.
    """

    @classmethod
    def from_config(cls, data: ConfigDict) -> 'TextCorpus':
        """Opens the corpus that `config.data` describes."""
        return cls(expanded(data['dir']), data['source_lang'], data['target_lang'], split_names(data),
                   data['validation_share'])

    def __init__(self, folder: Path, source_lang: str, target_lang: str, names: Mapping[str, str],
                 validation_share: float = 0.0):
        if not os.path.isdir(folder):
            raise UserError(f'config.data.dir={str(folder)!r} is not a folder. Give the folder of the text files')
        self._folder, self._languages, self._names = folder, (source_lang, target_lang), names
        self.parts = without_files(names, self.has_files, validation_share)

    def has_files(self, split: str) -> bool:
        """Whether there is any file for the split; if so, all of its files must exist."""
        return any(plain_or_gz(base, suffix) for base in self._bases(split) for suffix in (*self._languages, 'tsv'))

    @override
    def pairs(self, split: str) -> Iterator[Pair]:
        if not self.parts.is_part(split):
            return self.all_pairs(split)
        return (pair for pair in self.all_pairs('train') if self._split(pair) == split)

    def _split(self, pair: Pair) -> str | None:
        """Returns the split of a pair of the training files, or None if it is in no split."""
        source_key = text_key(pair[0])
        if all(text.strip() for text in pair):
            return self._held_out.split(source_key)
        # A pair with an empty side cannot be scored, so it is for training, unless its source is held out.
        return None if self._held_out.has(source_key) else 'train'

    @functools.cached_property
    def _held_out(self) -> HeldOut:
        keys = (text_key(source) for source, target in self.all_pairs('train') if source.strip() and target.strip())
        return HeldOut(self.parts, keys, f'source sentences of {self.files("train")[0]}')

    def all_pairs(self, split: str) -> Iterator[Pair]:
        """Yields all pairs in the files of a split, even if the split is only a part of them."""
        split = self.parts.origin(split)
        for base in self._bases(split):
            yield from _read_pairs(self._files_of(base, split))

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        # A list: the order distinguishes source and target, since the other direction is another corpus.
        files = [[file.name, sha256(file)] for file in self.files(split)]
        return {'source': 'text', 'files': files} | self.parts.fingerprint(split)

    def _bases(self, split: str) -> list[Path]:
        """Returns the files of a split without their suffixes."""
        suffixes = tuple(f'.{suffix}{gz}' for suffix in (*self._languages, 'tsv') for gz in ('', '.gz'))
        return named_files(self._folder, self._names[split], suffixes)

    def files(self, split: str) -> list[Path]:
        """Returns the files that a split is read from.

        Raises:
          UserError: if one is missing.
        """
        split = self.parts.origin(split)
        files = [file for base in self._bases(split) for file in self._files_of(base, split)]
        if not files:
            raise UserError(f'{self._folder} has no files {self._names[split]}.{self._languages[0]}. See '
                            f'config.data.dir and {naming_option(split)}')
        return files

    def _files_of(self, base: Path, split: str) -> list[Path]:
        """Returns the files of a name: those of source and target, or the table with both."""
        files = [plain_or_gz(base, language) for language in self._languages]
        if all(files):
            return [file for file in files if file]
        if table := plain_or_gz(base, 'tsv'):
            return [table]
        source, target = (Path(f'{base}.{language}') for language in self._languages)
        missing = (source, target)[files.index(None)]
        raise UserError(f'{missing} (or {missing.name}.gz) does not exist. For the {split} split, '
                        f'{self._folder} must have {source.name} and {target.name}, or {base.name}.tsv. '
                        f'See config.data.dir, source_lang, target_lang and {naming_option(split)}')


def _read_pairs(files: Sequence[Path]) -> Iterator[Pair]:
    """Yields the pairs in one file with two columns, or in two files."""
    if len(files) == 1:
        for number, line in enumerate(read_lines(files[0]), 1):
            columns = line.split('\t')
            if len(columns) != 2:
                raise UserError(f'{files[0]}:{number}: {len(columns)} columns instead of 2 (source TAB target)')
            yield columns[0], columns[1]
        return
    for source, target in itertools.zip_longest(*map(read_lines, files)):
        if source is None or target is None:
            counts = [sum(1 for _ in read_lines(file)) for file in files]
            raise UserError(f'{files[0]} has {counts[0]} lines but {files[1]} has {counts[1]}: '
                            'they must have the same number of lines, because line n of one is the translation of '
                            'line n of the other')
        yield source, target


class TfdsCorpus(Corpus):
    """A TensorFlow Datasets translation dataset."""

    @classmethod
    def from_config(cls, data: ConfigDict) -> 'TfdsCorpus':
        """Opens the corpus that `config.data` describes."""
        return cls(data['name'], data['dir'], data['source_lang'], data['target_lang'], split_names(data))

    def __init__(self, name: str, folder: str, source_lang: str, target_lang: str, names: Mapping[str, str]):
        import tensorflow_datasets.translate  # noqa: F401  (registers wmt and flores; slow, so imported here)
        self._languages, self._names = (source_lang, target_lang), names
        self._builder = open_tfds(name, folder, self._languages,
                                  'config.data.source_lang and target_lang')

    @override
    def pairs(self, split: str) -> Iterator[Pair]:
        with self._reading(split):
            for record in self._builder.as_data_source(self._names[split]):
                # A line break inside a record would break line counts.
                source, target = (' '.join(tfds_text(record[language]).splitlines()) for language in self._languages)
                yield source, target

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        with self._reading(split):
            return {'source': 'tfds', 'languages': self._languages, 'split': self._names[split],
                    'files': tfds_files(self._builder, self._names[split])}

    def _reading(self, split: str) -> contextlib.AbstractContextManager:
        return tfds_errors(f'config.data.{naming_option(split)}={self._names[split]!r} cannot be read from '
                           f'{self._builder.data_dir}')


# Sources of sentence pairs: the value of config.data.source -> its class. A source that reads files needs all methods
# of TextCorpus, such as `files`, because input_pipeline/problems.py checks the files before training.
SOURCES: Mapping[str, type[BuiltinCorpus | TextCorpus | TfdsCorpus]] = {
    'builtin': BuiltinCorpus, 'files': TextCorpus, 'tfds': TfdsCorpus}


def open_tfds(name: str, folder: str, features: Collection[str], asked: str) -> Any:
    """Returns the TFDS builder of a prepared dataset, which is read as array records without TensorFlow.

    Only the preparation of a dataset of the catalogue needs TensorFlow, because TFDS unpacks archives with it.

    Args:
      name: the name of the dataset, such as wmt14_translate/de-en.
      folder: TFDS's data_dir; '' for its default.
      features: the features that the dataset must have.
      asked: the options that name the features, for messages.

    Raises:
      UserError: if there is no such dataset, it lacks a feature, or it cannot be prepared.
    """
    if ':' in name:
        raise UserError(f'config.data.name={name!r}: TFDS would download the code of this dataset and run it. Prepare '
                        'the dataset yourself, and give its name without the part before the colon')
    import tensorflow_datasets as tfds  # slow to import, so only where it is used
    from tensorflow_datasets.core.constants import DATA_DIR
    folder = folder or DATA_DIR
    with tfds_errors(f'config.data.name={name!r} cannot be opened in {folder}'):
        builder: Any = tfds.builder(name, data_dir=folder, file_format='array_record')
        present = set(builder.info.features)
    if not set(features) <= present:
        raise UserError(f'config.data.name={name}: the dataset has the features {", ".join(sorted(present))}, but it '
                        f'must have {" and ".join(features)} (see {asked})')
    if not builder.is_prepared():
        if not importlib.util.find_spec('tensorflow'):
            raise UserError(
                f'{name} is not in {folder}, and TFDS unpacks archives with TensorFlow, which is not installed. '
                'Prepare the dataset once, on any machine: pip install tensorflow; '
                f'tfds build {name} --file_format=array_record --data_dir={folder}. '
                'Training does not need TensorFlow')
        # TFDS prints its progress to stdout, which is for results.
        with tfds_errors(f'{name} cannot be prepared'), contextlib.redirect_stdout(sys.stderr):
            builder.download_and_prepare()
    return builder


@contextlib.contextmanager
def tfds_errors(what: str) -> Iterator[None]:
    """Turns errors of TFDS and its libraries about their input into a UserError."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition('\n')[0]  # the rest may be a list of all datasets
        raise UserError(f'{what}: {reason}') from error


def tfds_files(builder: Any, name: str) -> list[list[str]]:
    """Returns name and digest of each file of a split of a prepared dataset."""
    files = [Path(part.filename) for part in builder.info.splits[name].file_instructions]
    return [[file.name, sha256(file)] for file in files]


def tfds_text(value: Any) -> str:
    """Returns the text of a feature. It is bytes in TFDS, and str in its mocks."""
    if not isinstance(value, bytes | str):
        raise ValueError(f'a record has {type(value).__name__} instead of text')
    return value.decode() if isinstance(value, bytes) else value


def read_lines(path: Path | str) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, plain or .gz, without line ends (line feed, or carriage return and line feed).

    A byte order mark at the beginning, as Windows writes, is removed. The path - is stdin.

    Raises:
      UserError: if the file cannot be read, or with file:line where it is not UTF-8.
    """
    with open_binary(path) as file:
        yield from decode_lines(file, 'stdin' if path == '-' else str(path))


@contextlib.contextmanager
def open_binary(path: Path | str) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Opens a file, plain or .gz, or stdin (-), for reading.

    Raises:
      UserError: if the file cannot be opened, or if reading fails inside the context.
    """
    try:
        if path == '-':
            if sys.stdin is None:
                raise UserError('stdin is closed: give --input=FILE')
            yield sys.stdin.buffer
            return
        mode = os.stat(path)
        if stat.S_ISCHR(mode.st_mode) and mode.st_rdev != os.stat(os.devnull).st_rdev and not _is_terminal(path):
            raise OSError(errno.EINVAL, 'it is a device')
        opened = gzip.open if str(path).endswith('.gz') else open
        with opened(path, 'rb') as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:  # the last two: a truncated or damaged .gz
        raise UserError(f'{path} cannot be read: {error}') from None


def _is_terminal(path: Path | str) -> bool:
    with open(path, 'rb') as file:
        return file.isatty()


def decode_text(content: bytes) -> str:
    """Decodes the beginning of a UTF-8 file, or all of it. A byte order mark, as Windows writes, is removed."""
    return content.removeprefix(codecs.BOM_UTF8).decode()


def has_mark(path: Path) -> bool:
    """Returns whether a file, plain or .gz, begins with a byte order mark."""
    with open_binary(path) as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Yields the lines of an open binary file; messages call it `name`."""
    for number, line in enumerate(file, 1):
        try:
            text = decode_text(line) if number == 1 else line.decode()
        except UnicodeDecodeError as error:
            raise UserError(f'{name}:{number}: not UTF-8 (byte {error.object[error.start]:#04x} at column '
                            f'{error.start + 1}). Convert the file, for example with iconv -t UTF-8') from None
        yield text.removesuffix('\n').removesuffix('\r')


def sha256(path: Path) -> str:
    """Returns the SHA-256 digest of a file's content.

    Raises:
      UserError: if the file cannot be read.
    """
    try:
        with open(path, 'rb') as file:
            return hashlib.file_digest(file, 'sha256').hexdigest()
    except OSError as error:
        raise UserError(f'{path} cannot be read: {error}') from None
