"""Text tokenised once, into memory-mapped files that every later run and every process shares.

A store is a folder named by the fingerprint of all that it depends on: the text, the tokenizers and the
settings. It is built beside its final place and moved there whole, so a build that is killed leaves
nothing that is taken for good, and two builds at once both succeed. What a killed build left is removed by
the next one.
"""

import array
import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32
from ml_collections import ConfigDict

from errors import UserError
from files import expanded
from input_pipeline.documents import Documents
from input_pipeline.sources import Corpus, Pair
from input_pipeline.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

log = logging.getLogger('allyouneed.data')

SIDES = ('source', 'target')  # of a pair
TEXT = 'text'  # the only side of a document
BUILDING = '.building-'  # in the names of folders where something is built


def cache_folder(cache_dir: str) -> Path:
    """The folder where runs share tokenizers, token stores and compiled programs.

    It is config.cache_dir or, without that, allyouneed in the user's cache: $XDG_CACHE_HOME or, if that is no absolute
    path, ~/.cache, as the XDG base directory specification says.
    """
    if cache_dir:
        return expanded(cache_dir)
    users = Path(os.environ.get('XDG_CACHE_HOME', ''))
    return (users if users.is_absolute() else expanded('~/.cache')) / 'allyouneed'


class TokenStore:
    """A split as token numbers, without start and end tokens, memory-mapped.

    A row has a side for each tokenizer: 'source' and 'target' of a sentence pair, or 'text' of a document.

    Attributes:
      stats: of pairs: 'pairs', 'dropped_empty', 'dropped_long', 'source_tokens', 'target_tokens';
        of documents: 'documents', 'dropped_empty', 'text_tokens', 'characters', 'bytes' (the text's, in UTF-8).
    """

    def __init__(self, folder: Path):
        """Opens a store.

        Raises:
          UserError: if a file is missing or damaged.
        """
        try:
            self.stats = json.loads((folder / 'stats.json').read_text())
            sides = sorted({path.name.partition('.')[0] for path in folder.iterdir()} - {'stats'})
            # Views as plain arrays of what is mapped: taking a part of a np.memmap is several times as slow.
            self._offsets = {side: np.asarray(np.load(folder / f'{side}.offsets.npy', 'r', allow_pickle=False))
                             for side in sides}
            self._tokens = {side: np.asarray(np.memmap(folder / f'{side}.tokens', np.uint32, 'r')) for side in sides}
            for side, offsets in self._offsets.items():
                if offsets.dtype != np.int64 or max(1, offsets[-1]) != len(self._tokens[side]):
                    raise ValueError(f'{side}.offsets.npy does not fit {side}.tokens')
            if not sides:
                raise ValueError('it holds no tokens')
        except (OSError, EOFError, IndexError, ValueError) as error:
            raise UserError(f'the token store {folder} is damaged: {error}. Delete that folder: it is built again '
                            'from the text') from None

    def __len__(self) -> int:
        return len(next(iter(self._offsets.values()))) - 1

    def lengths(self, side: str) -> Int[np.ndarray, ' rows']:
        """Tokens of a side in each row."""
        return np.diff(self._offsets[side])

    def tokens(self, side: str, row: int | np.integer) -> UInt32[np.ndarray, ' length']:
        """The tokens of a side of one row."""
        begin, end = self._offsets[side][row:row + 2]
        return self._tokens[side][begin:end]

    def at(self, side: str, places: Int[np.ndarray, ' places']) -> UInt32[np.ndarray, ' places']:
        """Tokens of a side by their places in all the rows, one row after another."""
        return self._tokens[side][places]


def tokenizers_for(corpus: Corpus, settings: ConfigDict, cache: Path) -> dict[str, Tokenizer]:
    """{'source': ..., 'target': ...}, learned from the training split unless the cache has them.

    With settings['joint'] both are the same one, learned from both languages.
    """
    def tokenizer(side: str | None) -> Tokenizer:
        def sentences() -> Iterator[str]:
            pairs = corpus.pairs('train')
            return itertools.chain.from_iterable(pairs) if side is None else (pair[SIDES.index(side)] for pair in pairs)

        return _tokenizer({'corpus': corpus.fingerprint('train'), 'side': side}, sentences, settings, cache)

    if settings['joint']:
        return dict.fromkeys(SIDES, tokenizer(None))
    return {side: tokenizer(side) for side in SIDES}


def document_tokenizers(documents: Documents, settings: ConfigDict, cache: Path) -> dict[str, Tokenizer]:
    """{'text': ...}, learned from the training split unless the cache has it."""
    origin = {'documents': documents.fingerprint('train')}
    return {TEXT: _tokenizer(origin, lambda: documents.documents('train'), settings, cache, indentation=True)}


def _tokenizer(origin: dict[str, Any], texts: Callable[[], Iterator[str]], settings: ConfigDict, cache: Path,
               **more: bool) -> Tokenizer:
    """A tokenizer that is learned from texts(), whose fingerprint is `origin`, unless the cache has it."""
    names = ('kind', 'vocab_size', 'split_digits', 'normalization')
    options: dict[str, Any] = {name: settings[name] for name in names} | more

    def learn(folder: Path):
        nonempty = (text for text in texts() if text.strip())
        first = next(nonempty, None)
        if first is None:
            raise UserError(f'the training split has no text: {origin}')
        train_tokenizer(itertools.chain([first], nonempty), **options).save(folder / 'tokenizer.model')

    return load_tokenizer(_build_once(cache / 'tokenizers' / _digest(origin | options), learn) / 'tokenizer.model')


def open_store(corpus: Corpus, split: str, tokenizers: Mapping[str, Tokenizer], max_length: int,
               cache: Path) -> TokenStore:
    """The split's store of sentence pairs, built first if the cache does not have it.

    Pairs with an empty side, or with more than `max_length` tokens on one (end token included), are
    dropped, counted and logged.

    Raises:
      UserError: if nothing is left.
    """
    key = _digest({'corpus': corpus.fingerprint(split), 'max_length': max_length,
                   'tokenizers': [hashlib.sha256(tokenizers[side].model).hexdigest() for side in SIDES]})
    store = TokenStore(_build_once(cache / 'tokens' / key,
                                   lambda folder: _write_pairs(corpus.pairs(split), tokenizers, max_length, folder)))
    stats = store.stats
    log.info('%s: %d pairs, %d source and %d target tokens; dropped %d with an empty side, %d longer than %d',
             split, stats['pairs'], stats['source_tokens'], stats['target_tokens'], stats['dropped_empty'],
             stats['dropped_long'], max_length)
    if not len(store):
        raise UserError(f'the {split} split is empty: {stats["dropped_empty"]} pairs with an empty side and '
                        f'{stats["dropped_long"]} longer than config.data.max_length={max_length} were dropped. '
                        f'Looked at: {corpus.fingerprint(split)}')
    return store


def open_document_store(documents: Documents, split: str, tokenizers: Mapping[str, Tokenizer],
                        cache: Path) -> TokenStore:
    """The split's store of documents, built first if the cache does not have it.

    Documents without text are dropped, counted and logged; none is dropped for its length.

    Raises:
      UserError: if nothing is left.
    """
    key = _digest({'documents': documents.fingerprint(split),
                   'tokenizer': hashlib.sha256(tokenizers[TEXT].model).hexdigest()})
    store = TokenStore(_build_once(cache / 'tokens' / key, lambda folder: _write_documents(
        documents.documents(split), tokenizers[TEXT], folder)))
    stats = store.stats
    log.info('%s: %d documents, %d characters in %d tokens; dropped %d without text',
             split, stats['documents'], stats['characters'], stats['text_tokens'], stats['dropped_empty'])
    if not len(store):
        raise UserError(f'the {split} split is empty: {stats["dropped_empty"]} documents without text were dropped. '
                        f'Looked at: {documents.fingerprint(split)}')
    return store


def _write_pairs(pairs: Iterable[Pair], tokenizers: Mapping[str, Tokenizer], max_length: int, folder: Path) -> None:
    stats = {'dropped_empty': 0, 'dropped_long': 0}
    with _SideWriter(folder, 'source') as source, _SideWriter(folder, 'target') as target:
        for pair in pairs:
            if not all(text.strip() for text in pair):
                stats['dropped_empty'] += 1
                continue
            row = [np.array(tokenizers[side].encode(text), np.uint32) for side, text in zip(SIDES, pair, strict=True)]
            if max(map(len, row)) >= max_length:
                stats['dropped_long'] += 1
                continue
            source.append(row[:1])
            target.append(row[1:])
    stats |= {'pairs': source.rows, 'source_tokens': source.tokens, 'target_tokens': target.tokens}
    (folder / 'stats.json').write_text(json.dumps(stats))


def _write_documents(documents: Iterable[str], tokenizer: Tokenizer, folder: Path) -> None:
    stats = {'dropped_empty': 0, 'characters': 0, 'bytes': 0}
    with _SideWriter(folder, TEXT) as side:
        for text in documents:
            if not text.strip():
                stats['dropped_empty'] += 1
                continue
            side.append(tokenizer.encode_parts(text))
            stats['characters'] += len(text)
            stats['bytes'] += len(text.encode())
    stats |= {'documents': side.rows, 'text_tokens': side.tokens}
    (folder / 'stats.json').write_text(json.dumps(stats))


class _SideWriter(contextlib.AbstractContextManager):
    """Writes the tokens of a side, row after row, and at the end where each row begins."""

    def __init__(self, folder: Path, side: str):
        self._file = open(folder / f'{side}.tokens', 'wb')  # noqa: SIM115 (__exit__ closes it)
        self._offsets_file = folder / f'{side}.offsets.npy'
        self._offsets = array.array('q', [0])

    def append(self, parts: Iterable[UInt32[np.ndarray, ' _']]) -> None:
        """Adds a row, which comes a part at a time."""
        written = sum(self._file.write(part.data) for part in parts)
        self._offsets.append(self.tokens + written // np.uint32().itemsize)

    @property
    def rows(self) -> int:
        return len(self._offsets) - 1

    @property
    def tokens(self) -> int:
        return self._offsets[-1]

    def __exit__(self, *exception) -> None:
        if not self.tokens:
            self._file.write(bytes(4))  # an empty file cannot be memory-mapped
        self._file.close()
        np.save(self._offsets_file, np.frombuffer(self._offsets, np.int64))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`; if it does not exist yet, `build` makes it in a temporary place, and it is renamed.

    Raises:
      UserError: if it cannot be written: no space, no permission.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        with _workshop(folder) as temporary:
            build(temporary)
            for path in temporary.iterdir():  # a power cut after the renaming must not leave empty files
                with open(path, 'rb') as file:
                    os.fsync(file.fileno())
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was quicker, and its result is the same
                    raise
    except OSError as error:
        raise UserError(f'{folder} cannot be written: {error}. Set config.cache_dir to a folder with space') from None
    return folder


@contextlib.contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, locked while somebody works there, and removed at the end."""
    with contextlib.ExitStack() as afterwards:
        while True:
            place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f'{folder.name}{BUILDING}'))
            try:
                afterwards.callback(os.close, _locked(place))
            except (FileNotFoundError, BlockingIOError):
                continue  # removed as abandoned before it was locked: another one
            except OSError:
                pass  # a file system without locks: nobody removes anything there
            break
        afterwards.callback(shutil.rmtree, place, ignore_errors=True)
        (place / 'content').mkdir()
        yield place / 'content'


def _remove_abandoned(parent: Path) -> None:
    """Removes what killed builds left, which the system unlocked when they ended."""
    for place in parent.glob(f'*{BUILDING}*'):
        try:
            lock = _locked(place)
        except OSError:  # somebody builds there, it is gone by now, or is not ours to remove
            continue
        log.info('%s is what a killed build left: removed', place)
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _locked(place: Path) -> int:
    """The descriptor of the lock in a workshop, held until it is closed or the process ends.

    Raises:
      BlockingIOError, FileNotFoundError: if another process holds it, or has removed the folder.
      OSError: if the file system has no locks.
    """
    lock = os.open(place / 'lock', os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(place / 'lock')
    except OSError:
        os.close(lock)
        raise
    return lock
