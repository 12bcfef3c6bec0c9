"""Sources of sentence pairs with one interface: text files, a TFDS dataset, or the built-in corpus."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from ml_collections import ConfigDict
from typing_extensions import override

from input_pipeline import builtin
from input_pipeline.links import Links, links_of, parse_links
from input_pipeline.splits import HeldOut, SplitFiles, check_only_form, naming_option, split_names, text_key
from input_pipeline.text_files import read_lines
from input_pipeline.tfds import Dataset
from runtime.errors import UserError
from runtime.files import expanded, plain_or_gz, sha256

Pair = tuple[str, str]
T = TypeVar('T')


@runtime_checkable
class Corpus(Protocol):
    """The splits of a parallel corpus. `split` is 'train', 'validation' or 'test', not the name of a file.

    If config.data.splits.test has several names, each name is a split, and there is no split 'test'.
    """

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yields the (source, target) pairs of a split in order, without line ends."""
        ...

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Returns a description of the split's content, as JSON. Splits with equal fingerprints have equal pairs."""
        ...


@runtime_checkable
class LinkedCorpus(Corpus, Protocol):
    """A parallel corpus that can have gold links."""

    def has_links(self, split: str) -> bool:
        """Returns whether a split has gold links, which are known word alignments."""
        ...

    def links(self, split: str) -> list[Links]:
        """Returns the gold links of each pair of a split: (source word, target word), as indices from 0.

        Raises:
          UserError: if the links are missing or wrong.
        """
        ...


def open_corpus(data: ConfigDict) -> Corpus:
    """Opens the corpus that `config.data` describes.

    Raises:
      UserError: if there is no such source, file or dataset.
    """
    return source_of(data, SOURCES)(data)


def source_of(data: ConfigDict, sources: Mapping[str, T]) -> T:
    """Returns the entry that config.data.source selects in `sources`, the table of sources of one kind of data.

    Raises:
      UserError: if this kind of data has no such source.
    """
    if data['source'] not in sources:
        raise UserError(f'config.data.source={data["source"]!r}: must be one of {", ".join(sources)} for this task')
    return sources[data['source']]


def no_text(split: str, source: Any) -> UserError:
    """Returns the error for a split without text. `source` is the corpus or the documents of the split."""
    origin = ', '.join(map(str, source.files(split))) if hasattr(source, 'files') else source.fingerprint(split)
    return UserError(f'the {split} split has no text. The split was read from {origin}. Use files with more text')


class BuiltinCorpus(LinkedCorpus):
    """Dates, amounts, quantities, lists and similar sentences in two languages, made from Unicode CLDR.

    Some source sentences have no-break spaces. `plain_spaces` is the share of these sentences in which plain spaces
    replace the no-break spaces.
    """

    def __init__(self, source_lang: str, target_lang: str, seed: int, plain_spaces: float = 0.0):
        self._locales, self._writers = (source_lang, target_lang), {}
        try:
            corpus = builtin.make_corpus(source_lang, target_lang, seed=seed, writers=self._writers)
        except ValueError as error:
            raise UserError(f'config.data (source=builtin): {error}') from None
        self._splits = builtin.with_plain_spaces(corpus, plain_spaces, seed=seed)
        self._fingerprint = {'source': 'builtin', 'languages': [source_lang, target_lang], 'seed': seed,
                             'version': builtin.GENERATOR_VERSION}
        if plain_spaces:  # older runs have fingerprints without this entry
            self._fingerprint['plain_spaces'] = plain_spaces

    @override
    def pairs(self, split: str) -> Iterator[Pair]:
        return iter(self._splits[split])

    @override
    def has_links(self, split: str) -> bool:
        return True

    @override
    def links(self, split: str) -> list[Links]:
        return links_of(self._splits[split], self._writers, *self._locales)

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        # The digest is needed because the pairs also depend on the CLDR of the installed babel.
        digest = hashlib.sha256(repr(self._splits[split]).encode()).hexdigest()
        return self._fingerprint | {'split': split, 'sha256': digest}


class TextCorpus(SplitFiles, LinkedCorpus):
    """Text files with one sentence per line: DIR/SPLIT.LANG for each language, or DIR/SPLIT.tsv for both languages.

    If both languages are equal, only DIR/SPLIT.tsv is read, because DIR/SPLIT.LANG would be a single file.

    If there are no validation files, the share `validation_share` of the distinct source sentences in the training
    data is held out for validation. If there are no test files either, the same number of source sentences is held out
    for test (see input_pipeline/splits.py).
    """

    def __init__(self, folder: Path, source_lang: str, target_lang: str, names: Mapping[str, str],
                 validation_share: float = 0.0):
        self._languages = source_lang, target_lang
        sides = () if source_lang == target_lang else (f'.{source_lang}', f'.{target_lang}')
        super().__init__(folder, names, validation_share, (*sides, '.tsv'))

    @override
    def has_files(self, split: str) -> bool:
        return any(plain_or_gz(Path(f'{base}{ending}')) for base in self._bases(split) for ending in self._endings)

    @override
    def pairs(self, split: str) -> Iterator[Pair]:
        if not self.parts.is_part(split):
            return self.all_pairs(split)
        return (pair for pair in self.all_pairs('train') if self._split(pair) == split)

    @override
    def has_links(self, split: str) -> bool:
        return all(plain_or_gz(Path(f'{base}.align')) for base in self._bases(self.parts.origin(split)))

    @override
    def links(self, split: str) -> list[Links]:
        """Returns the gold links of each pair of a split. They are in the file DIR/SPLIT.align beside the text."""
        origin = self.parts.origin(split)
        links = [line for base in self._bases(origin) for line in self._read_links(base, origin)]
        if not self.parts.is_part(split):
            return links
        return [line for pair, line in zip(self.all_pairs('train'), links, strict=True) if self._split(pair) == split]

    def _read_links(self, base: Path, split: str) -> Iterator[Links]:
        path, files = plain_or_gz(Path(f'{base}.align')), self._files_of(base, split)
        if path is None:
            raise UserError(f'{base}.align or {base}.align.gz does not exist. It must have one line of links, such '
                            f'as 0-0 1-2, for each line of {files[0]}. Add the file, or set train.guided_alignment=0')
        pairs, lines = _read_pairs(files), read_lines(path)
        for number, (pair, line) in enumerate(itertools.zip_longest(pairs, lines), 1):
            if pair is None or line is None:
                counts = [number - 1 + sum(1 for _ in rest) + (row is not None)
                          for row, rest in ((pair, pairs), (line, lines))]
                raise UserError(f'{path} has {counts[1]} lines but {files[0]} has {counts[0]}: they must have the same '
                                'number of lines, because each line has the links of the same line of the text')
            yield parse_links(line, pair, f'{path}:{number}')

    def _split(self, pair: Pair) -> str | None:
        """Returns the split of a pair of the training files, or None if the pair is in no split."""
        source_key = text_key(pair[0])
        if all(text.strip() for text in pair):
            return self._held_out.split(source_key)
        # A pair with an empty side cannot be scored, so the pair is for training, unless its source is held out.
        return None if self._held_out.has(source_key) else 'train'

    @functools.cached_property
    def _held_out(self) -> HeldOut:
        keys = (text_key(source) for source, target in self.all_pairs('train') if source.strip() and target.strip())
        return HeldOut(self.parts, keys, f'source sentences of {self.files("train")[0]}')

    def all_pairs(self, split: str) -> Iterator[Pair]:
        """Yields all pairs in the files of a split, including pairs that are held out for other splits."""
        split = self.parts.origin(split)
        for base in self._bases(split):
            yield from _read_pairs(self._files_of(base, split))

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        # The order of the list distinguishes source and target, because the reverse direction is a different corpus.
        files = [[file.name, sha256(file)] for file in self.files(split)]
        return {'source': 'text', 'files': files} | self.parts.fingerprint(split)

    @override
    def _files_of(self, base: Path, split: str) -> list[Path]:
        """Returns the source file and the target file with the path `base`, or the table with both sides."""
        *sides, table = [plain_or_gz(Path(f'{base}{ending}')) for ending in self._endings]
        files = [file for file in sides if file]
        if len(files) == 2:
            check_only_form(files[0], table)
            return files
        if table:
            return [table]
        if not sides:
            raise UserError(f'{base}.tsv (or {base.name}.tsv.gz) does not exist. config.data.source_lang and '
                            f'target_lang are both {self._languages[0]!r}, so the pairs of the {split} split must be '
                            'in this table. Add the table, or set different languages. See config.data.dir and '
                            f'{naming_option(split)}')
        source, target = (Path(f'{base}.{language}') for language in self._languages)
        missing = (source, target)[sides.index(None)]
        raise UserError(f'{missing} (or {missing.name}.gz) does not exist. For the {split} split, '
                        f'{self._folder} must have {source.name} and {target.name}, or {base.name}.tsv. '
                        f'See config.data.dir, source_lang, target_lang and {naming_option(split)}')


def _read_pairs(files: Sequence[Path]) -> Iterator[Pair]:
    """Yields the pairs in one file with two columns, or in two files with one sentence per line."""
    if len(files) == 1:
        for number, line in enumerate(read_lines(files[0]), 1):
            columns = line.split('\t')
            if len(columns) != 2:
                raise UserError(f'{files[0]}:{number}: {len(columns)} columns instead of 2 (source TAB target). '
                                'Separate source and target by one tab')
            yield columns[0], columns[1]
        return
    for source, target in itertools.zip_longest(*map(read_lines, files)):
        if source is None or target is None:
            counts = [sum(1 for _ in read_lines(file)) for file in files]
            raise UserError(f'{files[0]} has {counts[0]} lines but {files[1]} has {counts[1]}: '
                            'they must have the same number of lines, because each line must be the translation of '
                            'the same line in the other file')
        yield source, target


class TfdsCorpus(Corpus):
    """A parallel corpus from a translation dataset of TensorFlow Datasets."""

    def __init__(self, name: str, folder: str, source_lang: str, target_lang: str, names: Mapping[str, str]):
        if source_lang == target_lang:
            raise UserError(f'config.data.source_lang and target_lang are both {source_lang!r}, so each sentence would '
                            f'be its own translation. Set them to different features of {name}')
        import tensorflow_datasets.translate  # noqa: F401  (registers wmt and flores; slow, so imported here)
        self._languages = source_lang, target_lang
        self._dataset = Dataset(name, folder, names, self._languages, 'config.data.source_lang and target_lang')

    @override
    def pairs(self, split: str) -> Iterator[Pair]:
        for texts in self._dataset.texts(split):
            source, target = (' '.join(text.splitlines()) for text in texts)  # a line break would change line counts
            yield source, target

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        return {'source': 'tfds', 'languages': self._languages} | self._dataset.fingerprint(split)


# Sources of sentence pairs: the value of config.data.source -> the function that opens the source. A source that reads
# files is a SplitFiles and has the method `all_pairs`, because input_pipeline/problems.py checks the files before
# training.
SOURCES: Mapping[str, Callable[[ConfigDict], Corpus]] = {
    'builtin': lambda data: BuiltinCorpus(data['source_lang'], data['target_lang'], data['seed'], data['plain_spaces']),
    'files': lambda data: TextCorpus(expanded(data['dir']), data['source_lang'], data['target_lang'], split_names(data),
                                     data['validation_share']),
    'tfds': lambda data: TfdsCorpus(data['name'], data['dir'], data['source_lang'], data['target_lang'],
                                    split_names(data)),
}
