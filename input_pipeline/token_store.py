"""Text is tokenised once, into memory-mapped files that every later run and every process shares.

A store is a folder named by the fingerprint of all that it depends on: the text, the tokenizers and the settings. It is
built in a temporary folder and then renamed. So a killed build never leaves an incomplete store, and two concurrent
builds both succeed. The next build removes what a killed build left.
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
BUILDING = '.building-'  # in the names of temporary folders


def cache_folder(cache_dir: str) -> Path:
    """Returns the folder where runs share tokenizers, token stores and compiled programs.

    This is config.cache_dir or, if that is empty, the folder allyouneed in the user's cache. By the XDG base directory
    specification, the user's cache is $XDG_CACHE_HOME or, if that is not an absolute path, ~/.cache.
    """
    if cache_dir:
        return expanded(cache_dir)
    users = Path(os.environ.get('XDG_CACHE_HOME', ''))
    return (users if users.is_absolute() else expanded('~/.cache')) / 'allyouneed'


class TokenStore:
    """The memory-mapped token ids of a split, without start and end tokens.

    A row has a side for each tokenizer: 'source' and 'target' of a sentence pair, or 'text' of a document.

    Attributes:
      stats: counts. For pairs: 'pairs', 'dropped_empty', 'dropped_long', 'source_tokens', 'target_tokens'. For
        documents: 'documents', 'dropped_empty', 'text_tokens', 'characters', 'bytes' (of the text in UTF-8).
    """

    def __init__(self, folder: Path):
        """Opens a store.

        Raises:
          UserError: if a file is missing or damaged.
        """
        try:
            self.stats = json.loads((folder / 'stats.json').read_text())
            sides = sorted({path.name.partition('.')[0] for path in folder.iterdir()} - {'stats'})
            # Plain-array views of the mapped files: slicing an np.memmap is several times slower.
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
        """Returns the number of tokens of a side in each row."""
        return np.diff(self._offsets[side])

    def tokens(self, side: str, row: int | np.integer) -> UInt32[np.ndarray, ' length']:
        """Returns the tokens of one side of one row."""
        begin, end = self._offsets[side][row:row + 2]
        return self._tokens[side][begin:end]

    def tokens_of(self, side: str, begin: int, end: int) -> UInt32[np.ndarray, ' tokens']:
        """Returns the tokens of one side of rows begin, begin + 1, ... end - 1, one row behind the other."""
        offsets = self._offsets[side]
        return self._tokens[side][offsets[begin]:offsets[end]]

    def at(self, side: str, places: Int[np.ndarray, ' places']) -> UInt32[np.ndarray, ' places']:
        """Returns tokens of a side by their indices in the concatenation of all rows."""
        return self._tokens[side][places]


def tokenizers_for(corpus: Corpus, settings: ConfigDict, cache: Path) -> dict[str, Tokenizer]:
    """Returns {'source': tokenizer, 'target': tokenizer}, learned from the training split unless they are cached.

    With settings['joint'] both are the same tokenizer, learned from both languages.
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
    """Returns {'text': tokenizer}, learned from the training split unless it is cached."""
    origin = {'documents': documents.fingerprint('train')}
    return {TEXT: _tokenizer(origin, lambda: documents.documents('train'), settings, cache, indentation=True)}


def _tokenizer(origin: dict[str, Any], texts: Callable[[], Iterator[str]], settings: ConfigDict, cache: Path,
               **more: bool) -> Tokenizer:
    """Returns a tokenizer learned from texts(), whose fingerprint is `origin`, unless it is cached."""
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
    """Opens the split's store of sentence pairs; builds it first if it is not cached.

    Pairs with an empty side, or with more than `max_length` tokens on one side (end token included), are dropped,
    counted and logged.

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
    """Opens the split's store of documents; builds it first if it is not cached.

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
    """Writes the tokens of a side row by row, and at the end the offsets of the rows."""

    def __init__(self, folder: Path, side: str):
        self._file = open(folder / f'{side}.tokens', 'wb')  # noqa: SIM115 (__exit__ closes it)
        self._offsets_file = folder / f'{side}.offsets.npy'
        self._offsets = array.array('q', [0])

    def append(self, parts: Iterable[UInt32[np.ndarray, ' _']]) -> None:
        """Appends a row, given in parts."""
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
    """Returns `folder`. If it does not exist yet, `build` fills a temporary folder, which is then renamed.

    Raises:
      UserError: if the folder cannot be written: no space, no permission.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        with _workshop(folder) as temporary:
            build(temporary)
            for path in temporary.iterdir():  # a power cut after the rename must not leave empty files
                with open(path, 'rb') as file:
                    os.fsync(file.fileno())
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.is_dir():  # if it exists, another process was faster and has built the same
                    raise
    except OSError as error:
        raise UserError(f'{folder} cannot be written: {error}. Set config.cache_dir to a folder with space') from None
    return folder


@contextlib.contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """Makes a temporary folder next to `folder`, which is locked while it is in use, and removed at the end."""
    with contextlib.ExitStack() as afterwards:
        while True:
            place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f'{folder.name}{BUILDING}'))
            try:
                afterwards.callback(os.close, _locked(place))
            except (FileNotFoundError, BlockingIOError):
                continue  # another process removed it as abandoned before it was locked: try again
            except OSError:
                pass  # a file system without locks: no process removes folders there
            break
        afterwards.callback(shutil.rmtree, place, ignore_errors=True)
        (place / 'content').mkdir()
        yield place / 'content'


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of killed builds. They are unlocked: the system releases a lock when its process ends."""
    for place in parent.glob(f'*{BUILDING}*'):
        try:
            lock = _locked(place)
        except OSError:  # it is in use, already gone, or we may not remove it
            continue
        log.info('%s is what a killed build left: removed', place)
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _locked(place: Path) -> int:
    """Locks a temporary folder. Returns the lock's descriptor; the lock lasts until it is closed or the process ends.

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
