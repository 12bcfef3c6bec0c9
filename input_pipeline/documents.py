"""Sources of documents for language models: text files, a TFDS dataset, or Python's standard library."""

import functools
import hashlib
import io
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ml_collections import ConfigDict
from typing_extensions import override

from input_pipeline.sources import source_of
from input_pipeline.splits import (
    HeldOut,
    Parts,
    SplitFiles,
    check_only_form,
    naming_option,
    split_names,
    text_key,
    warn_of_unread,
)
from input_pipeline.text_files import decode_text, divided, has_mark, read_lines, read_text
from input_pipeline.tfds import Dataset
from runtime.errors import UserError
from runtime.files import check_link, expanded, files_in, is_broken_link, plain_or_gz, sha256
from runtime.once import warn_once

log = logging.getLogger('allyouneed.data')


@runtime_checkable
class Documents(Protocol):
    """The splits of a collection of documents. `split` is 'train', 'validation' or 'test', not the name of a file."""

    def documents(self, split: str) -> Iterator[str]:
        """Yields the documents of a split in order. Only one document is in memory at a time."""
        ...

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Returns a description of the split's content, as JSON.

        Splits with equal fingerprints have equal documents.
        """
        ...


def open_documents(data: ConfigDict) -> Documents:
    """Opens the documents that `config.data` describes.

    Raises:
      UserError: if there is no such source, file or dataset.
    """
    return source_of(data, SOURCES)(data)


def open_files(data: ConfigDict) -> 'OneFile | FileDocuments':
    """Opens documents in text files (data.source=files): one file, or a folder with the files of each split.

    Raises:
      UserError: if the file or folder does not exist.
    """
    if data['file']:
        return OneFile(expanded(data['file']), data['documents'], data['validation_share'])
    return FileDocuments(expanded(data['dir']), data['documents'], split_names(data), data['validation_share'])


class FileDocuments(SplitFiles, Documents):
    """Documents in the file DIR/SPLIT.txt (or .jsonl), or in all files of the folder DIR/SPLIT and its subfolders.

    Symbolic links to files and folders are followed. `kind` is config.data.documents: a document is a whole file
    ('file'), a line ('line'), the text between two blank lines ('blank_line'), or the text in a line of JSON ('jsonl').

    If there are no validation files, the share `validation_share` of the distinct training documents is held out for
    validation. If there are no test files either, the same number of documents is held out for test (see
    input_pipeline/splits.py). If documents are files and there is only one file, its last characters are held out.
    """

    def __init__(self, folder: Path, kind: str, names: Mapping[str, str], validation_share: float):
        self._kind, self._ending = kind, '.jsonl' if kind == 'jsonl' else '.txt'
        super().__init__(folder, names, validation_share, (self._ending,))
        warn_of_unread(folder, names, self.parts, [''])

    @override
    def has_files(self, split: str) -> bool:
        """Returns whether there is a file or a folder for the split.

        A file or a folder without text also counts, but causes an error when the documents are read.
        """
        return any(_text_files(base, self._ending) or os.path.isdir(base) for base in self._bases(split))

    @override
    def documents(self, split: str) -> Iterator[str]:
        if not self.parts.is_part(split):
            return self._read(split)
        if self._kind == 'file' and len(files := self.files('train')) == 1:
            return iter([self.parts.characters(read_text(files[0]), split, str(files[0]))])
        return (text for text in self._read('train') if self._held_out.split(text_key(text)) == split)

    @functools.cached_property
    def _held_out(self) -> HeldOut:
        keys = (text_key(text) for text in self._read('train') if text.strip())
        return HeldOut(self.parts, keys, f'documents of {self.files("train")[0]}')

    def _read(self, split: str) -> Iterator[str]:
        for path in self.files(split):
            if self._kind == 'file':
                yield read_text(path)
            else:
                yield from divided(read_lines(path), self._kind, str(path))

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        files = [[self._name(file), sha256(file)] for file in self.files(split)]
        return {'source': 'files', 'documents': self._kind, 'split': self._names[self.parts.origin(split)],
                'files': files} | self.parts.fingerprint(split) | (
                    _marks(self.files(split)) if self._kind == 'file' else {})

    def _name(self, path: Path) -> str:
        """Returns a path relative to the folder. The name of a split may be an absolute path outside of the folder."""
        return str(path.relative_to(self._folder) if path.is_relative_to(self._folder) else path)

    @override
    def _files_of(self, base: Path, split: str) -> list[Path]:
        files = _text_files(base, self._ending)
        for file in files:
            check_link(file)
        if files:
            _warn_of_json(files[0], self._kind)
            return files
        name = self._name(base)
        raise UserError(f'for the {split} split, {self._folder} must have {name}{self._ending}, '
                        f'{name}{self._ending}.gz or a folder {name} of text files. See config.data.dir and '
                        f'{naming_option(split)}')


def _text_files(base: Path, ending: str) -> list[Path]:
    """Returns all files in the folder `base` and its subfolders (`files_in`), or else the file with the `ending`.

    The ending is .txt or .jsonl. The file may be compressed (.gz). Broken symbolic links in the folder are included, so
    that they cause an error when the documents are read.

    Raises:
      UserError: if `base` or the file is a broken symbolic link, or there are files in the folder and the file.
    """
    check_link(base)
    files = sorted(path for path in files_in(base) if os.path.isfile(path) or is_broken_link(path))
    plain = plain_or_gz(Path(f'{base}{ending}'))
    if files:
        check_only_form(base, plain)
    return files or ([plain] if plain else [])


def _warn_of_json(path: Path, kind: str) -> None:
    """Logs a warning if a file of JSON Lines is read as plain text."""
    if kind != 'jsonl' and path.name.removesuffix('.gz').endswith('.jsonl'):
        warn_once(f'{path} is read as plain text, with the syntax of JSON. To read the texts in its lines, set '
                  '--config.data.documents=jsonl')


class OneFile(Documents):
    """One file that is divided into two parts. The last characters of the file are for validation.

    `validation_share` is the fraction of the characters that are for validation.

    With a share of 0.1 this is nanoGPT's split of tiny Shakespeare. nanoGPT reports results on the validation part, so
    the test split is the same as the validation split.
    """

    def __init__(self, path: Path, kind: str, validation_share: float):
        if not os.path.isfile(path):
            raise UserError(f'config.data.file={str(path)!r} does not exist, or is not a file. Set it to a text file')
        _warn_of_json(path, kind)
        self._path, self._kind, self._validation_share = path, kind, validation_share
        self.parts = Parts(('validation', 'test'), validation_share)  # held out by nanoGPT's rule, not by a hash

    def has_files(self, split: str) -> bool:
        """Returns True, because every split is a part of the file."""
        return True

    def files(self, split: str) -> list[Path]:
        """Returns the file, which is the same for every split."""
        return [self._path]

    @override
    def documents(self, split: str) -> Iterator[str]:
        text = read_text(self._path)
        if not text.strip():
            raise UserError(f'config.data.file={str(self._path)!r} is empty, or has only white space. Use a file with '
                            'text')
        border = int(len(text) * (1 - self._validation_share))
        if self._kind == 'jsonl':
            border = text.rfind('\n', 0, border) + 1  # half a line is not JSON
        part = text[:border] if split == 'train' else text[border:]
        if self._kind == 'file':
            yield part
        else:
            lines = (line.removesuffix('\n').removesuffix('\r') for line in io.StringIO(part, newline='\n'))
            yield from divided(lines, self._kind, str(self._path), 1 if split == 'train' else 1 + text.count(
                '\n', 0, border))

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        return {'source': 'file', 'documents': self._kind, 'file': [self._path.name, sha256(self._path)],
                'validation_share': self._validation_share, 'part': 'train' if split == 'train' else 'validation'
                } | _marks([self._path])


class TfdsDocuments(Documents):
    """Documents of a TensorFlow Datasets dataset. A document is the text of one feature in one record."""

    def __init__(self, name: str, folder: str, feature: str, names: Mapping[str, str]):
        self._feature = feature
        self._dataset = Dataset(name, folder, names, [feature], 'config.data.feature')

    @override
    def documents(self, split: str) -> Iterator[str]:
        return (text for text, in self._dataset.texts(split))

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        return {'source': 'tfds', 'feature': self._feature} | self._dataset.fingerprint(split)


class LibraryDocuments(Documents):
    """The modules of Python's standard library: 9 MB of source code that comes with Python.

    A hash of the path of a module decides its split: 90 % train, 5 % validation, 5 % test. Another version of Python
    has a different text, but each module is in the same split.
    """

    # Tests, generated tables, files that depend on the machine, and packages that are not part of the library.
    LEFT_OUT = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', 'lib2to3', 'encodings', 'pydoc_data'}
    SHARES = {'train': range(90), 'validation': range(90, 95), 'test': range(95, 100)}

    def __init__(self, folder: Path):
        self._modules = {split: [] for split in self.SHARES}
        undecodable = 0
        for path in self._paths(folder):
            name = path.relative_to(folder).as_posix()
            hundredth = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
            split = next(split for split, share in self.SHARES.items() if hundredth in share)
            try:
                self._modules[split].append((name, decode_text(path.read_bytes())))
            except UnicodeDecodeError:
                undecodable += 1
        if undecodable:
            log.info('%s: ignored %d modules that are not UTF-8', folder, undecodable)

    def _paths(self, folder: Path) -> Iterator[Path]:
        for parent, folders, files in os.walk(folder):
            folders[:] = sorted(set(folders) - self.LEFT_OUT)  # os.walk skips the removed folders
            yield from (Path(parent, file) for file in sorted(files)
                        if file.endswith('.py') and not file.startswith('_sysconfigdata'))

    @override
    def documents(self, split: str) -> Iterator[str]:
        return (text for _, text in self._modules[split])

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        digest = hashlib.sha256(repr(self._modules[split]).encode()).hexdigest()
        return {'source': 'standard library', 'split': split, 'sha256': digest}


# Sources of documents: the value of config.data.source -> the function that opens the source. A source that reads files
# is a SplitFiles, or has `parts`, `files` and `has_files` like OneFile, because input_pipeline/problems.py checks the
# files before training.
SOURCES: Mapping[str, Callable[[ConfigDict], Documents]] = {
    'builtin': lambda data: LibraryDocuments(Path(sysconfig.get_paths()['stdlib'])),
    'files': open_files,
    'tfds': lambda data: TfdsDocuments(data['name'], data['dir'], data['feature'], split_names(data)),
}


def _marks(files: Iterable[Path]) -> dict[str, str]:
    """Returns an entry for the fingerprint if a file begins with a byte order mark. Otherwise returns {}.

    Earlier versions read a byte order mark as text, so the fingerprints of earlier versions do not have this entry.
    """
    return {'byte_order_marks': 'removed'} if any(map(has_mark, files)) else {}
