"""Stores of tokens. Text is tokenised once, into memory-mapped files that later runs and all processes share.

A store is a folder. The name of the folder is a fingerprint of the text, the tokenizers and the settings. A store is
complete or absent, and a damaged store is built again (input_pipeline/builds.py). All cores and all processes of a job
build the store of a large text together (input_pipeline/shards.py).
"""

import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int, UInt32
from ml_collections import ConfigDict

from input_pipeline.builds import build_once, open_built
from input_pipeline.documents import Documents
from input_pipeline.shards import Rows, Write, build_together
from input_pipeline.sources import Corpus
from input_pipeline.stores import SIDES, TEXT, TOKEN, sides_of, write_documents, write_pairs
from input_pipeline.tokenizer import Tokenizer, VocabularyTooLarge, load_tokenizer, train_tokenizer
from runtime.errors import UserError
from runtime.once import log_once
from runtime.schema import Count, read_as

ADVICE = 'Delete the folder of the store. The next run builds the store again'
# The format of the folders in the cache. Versions of this code with different formats may use the same cache at the
# same time. Format 2 has checksums.
FORMAT = 2
# The version of the learning of tokenizers. Version 2 learns subwords that are lossless for texts with few spaces.
LEARNING = 2

log = logging.getLogger('allyouneed.data')


class PairStats(msgspec.Struct, kw_only=True):
    """The counts in stats.json of a store of sentence pairs. `TokenStore.stats` explains the counts."""
    pairs: Count
    dropped_empty: Count
    dropped_long: Count
    source_tokens: Count
    target_tokens: Count


class DocumentStats(msgspec.Struct, kw_only=True):
    """The counts in stats.json of a store of documents. `TokenStore.stats` explains the counts."""
    documents: Count
    dropped_empty: Count
    text_tokens: Count
    characters: Count
    bytes: Count


class TokenStore:
    """The memory-mapped token ids of a split, without start and end tokens.

    A row is a sentence pair with the sides 'source' and 'target', or a document with one side, 'text'.

    Attributes:
      stats: counts. For pairs: 'pairs', 'dropped_empty', 'dropped_long', 'source_tokens', 'target_tokens'. For
        documents: 'documents', 'dropped_empty', 'text_tokens', 'characters', 'bytes' (of the text in UTF-8).
    """

    def __init__(self, folder: Path):
        """Opens a store.

        Raises:
          UserError: if a file is missing, or the files contradict each other.
        """
        self._folder, sides = folder, sides_of(folder)
        schema = DocumentStats if sides == [TEXT] else PairStats
        self.stats: dict[str, int] = msgspec.to_builtins(read_as(folder / 'stats.json', schema, ADVICE))
        try:
            # Plain-array views of the mapped files: slicing an np.memmap is several times slower.
            self._offsets = {side: np.asarray(np.load(folder / f'{side}.offsets.npy', 'r', allow_pickle=False))
                             for side in sides}
            self._tokens = {side: np.asarray(np.memmap(folder / f'{side}.tokens', TOKEN, 'r')) for side in sides}
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f'the token store {folder} cannot be read: {error}. {ADVICE}') from None
        rows = self.stats['documents' if sides == [TEXT] else 'pairs']
        for side in sides or [TEXT]:
            self._check_offsets(side, rows)

    def _check_offsets(self, side: str, rows: int) -> None:
        offsets, count = self._offsets.get(side), self.stats[f'{side}_tokens']
        if (offsets is None or offsets.dtype != np.int64 or offsets.shape != (rows + 1,) or offsets[0]
                or offsets[-1] != count or max(1, count) != len(self._tokens[side])):
            raise UserError(f'the token store {self._folder}: {side}.offsets.npy does not fit {side}.tokens and '
                            f'stats.json. {ADVICE}')

    def check_rows(self, tokenizers: Mapping[str, Tokenizer]) -> None:
        """Reads all rows. Raises UserError if a row has a negative length or a token outside of its vocabulary."""
        for side, tokens in self._tokens.items():
            if (self.lengths(side) < 0).any():
                raise UserError(f'the token store {self._folder}: {side}.offsets.npy contains decreasing offsets. '
                                f'{ADVICE}')
            if (largest := int(tokens.max())) >= len(tokenizers[side]):
                raise UserError(f'the token store {self._folder}: {side}.tokens contains the token {largest}, but the '
                                f'vocabulary has only {len(tokenizers[side])} tokens. {ADVICE}')

    def __len__(self) -> int:
        return len(next(iter(self._offsets.values()))) - 1

    def lengths(self, side: str) -> Int[np.ndarray, ' rows']:
        """Returns the number of tokens in each row of one side, such as 'source'."""
        return np.diff(self._offsets[side])

    def tokens(self, side: str, row: int | np.integer) -> UInt32[np.ndarray, ' length']:
        """Returns the tokens of a row on one side, such as 'source'."""
        begin, end = self._offsets[side][row:row + 2]
        return self._tokens[side][begin:end]

    def tokens_of(self, side: str, begin: int, end: int) -> UInt32[np.ndarray, ' tokens']:
        """Returns the tokens of the rows `begin` to `end` - 1 on one side, concatenated."""
        offsets = self._offsets[side]
        return self._tokens[side][offsets[begin]:offsets[end]]

    def at(self, side: str, places: Int[np.ndarray, ' places']) -> UInt32[np.ndarray, ' places']:
        """Returns the tokens at `places`, which are indices into the concatenation of all rows of one side."""
        return self._tokens[side][places]


def tokenizers_for(corpus: Corpus, settings: ConfigDict, cache: Path) -> dict[str, Tokenizer]:
    """Returns {'source': tokenizer, 'target': tokenizer}, learned from the training split unless they are cached.

    If settings['joint'] is True, both sides have the same tokenizer, which is learned from both languages.

    Raises:
      VocabularyTooLarge: if a text does not allow settings['vocab_size'] subwords. The error has the largest size that
        the texts of both sides allow.
    """
    def tokenizer(side: str | None) -> Tokenizer:
        def sentences() -> Iterator[str]:
            pairs = corpus.pairs('train')
            return itertools.chain.from_iterable(pairs) if side is None else (pair[SIDES.index(side)] for pair in pairs)

        return _tokenizer({'corpus': corpus.fingerprint('train'), 'side': side}, sentences, settings, cache)

    if settings['joint']:
        return dict.fromkeys(SIDES, tokenizer(None))
    tokenizers, errors = {}, []
    for side in SIDES:
        try:
            tokenizers[side] = tokenizer(side)
        except VocabularyTooLarge as error:
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: error.most)
    return tokenizers


def document_tokenizers(documents: Documents, settings: ConfigDict, cache: Path) -> dict[str, Tokenizer]:
    """Returns {'text': tokenizer}, learned from the training split unless it is cached."""
    origin = {'documents': documents.fingerprint('train')}
    return {TEXT: _tokenizer(origin, lambda: documents.documents('train'), settings, cache, indentation=True)}


def _tokenizer(origin: dict[str, Any], texts: Callable[[], Iterator[str]], settings: ConfigDict, cache: Path,
               **more: bool) -> Tokenizer:
    """Returns the tokenizer of the texts with the fingerprint `origin`. Learns the tokenizer unless it is cached."""
    names = ('kind', 'vocab_size', 'split_digits', 'normalization')
    options: dict[str, Any] = {name: settings[name] for name in names} | more

    def learn(folder: Path):
        nonempty = (text for text in texts() if text.strip())
        first = next(nonempty, None)
        if first is None:
            raise UserError(f'the training split has no text: {origin}. Use files with text')
        train_tokenizer(itertools.chain([first], nonempty), **options).save(folder / 'tokenizer.model')

    folder = cache / 'tokenizers' / _digest(origin | options | {'learning': LEARNING})
    return open_built(folder, lambda: build_once(folder, learn),
                      lambda folder, _: load_tokenizer(folder / 'tokenizer.model'))


def open_store(corpus: Corpus, split: str, tokenizers: Mapping[str, Tokenizer], max_length: int,
               cache: Path) -> TokenStore:
    """Opens the store of a split of sentence pairs. Builds the store first if it is not cached.

    Pairs with an empty side, or with more than `max_length` tokens on one side (end token included), are dropped,
    counted and logged.

    Raises:
      UserError: if no pair remains.
    """
    key = _digest({'corpus': corpus.fingerprint(split), 'max_length': max_length,
                   'tokenizers': [hashlib.sha256(tokenizers[side].model).hexdigest() for side in SIDES]})
    store = _open(cache / 'tokens' / key, functools.partial(corpus.pairs, split), functools.partial(
        write_pairs, tokenizers=dict(tokenizers), max_length=max_length), tokenizers)
    stats = store.stats
    log.info('%s: %d pairs, %d source and %d target tokens; dropped %d pairs with an empty side, and %d with more than '
             '%d tokens, including the end token', split, stats['pairs'], stats['source_tokens'],
             stats['target_tokens'], stats['dropped_empty'], stats['dropped_long'], max_length)
    if not len(store):
        raise UserError(f'the {split} split is empty: {stats["dropped_empty"]} pairs with an empty side and '
                        f'{stats["dropped_long"]} with more than config.data.max_length={max_length} tokens, including '
                        f'the end token, were dropped. The split was read from {corpus.fingerprint(split)}. Use other '
                        'files, or increase config.data.max_length')
    return store


def open_document_store(documents: Documents, split: str, tokenizers: Mapping[str, Tokenizer],
                        cache: Path) -> TokenStore:
    """Opens the store of a split of documents. Builds the store first if it is not cached.

    Documents without text are dropped, counted and logged. Documents may have any length.

    Raises:
      UserError: if no document remains.
    """
    key = _digest({'documents': documents.fingerprint(split),
                   'tokenizer': hashlib.sha256(tokenizers[TEXT].model).hexdigest()})
    store = _open(cache / 'tokens' / key, functools.partial(documents.documents, split), functools.partial(
        write_documents, tokenizer=tokenizers[TEXT]), tokenizers)
    stats = store.stats
    log_once(f'{split}: {stats["documents"]} documents, {stats["characters"]} characters in {stats["text_tokens"]} '
             f'tokens; dropped {stats["dropped_empty"]} documents without text')
    if not len(store):
        raise UserError(f'the {split} split is empty: {stats["dropped_empty"]} documents without text were dropped. '
                        f'The split was read from {documents.fingerprint(split)}. Use files with text')
    return store


def _open(folder: Path, rows: Rows, write: Write, tokenizers: Mapping[str, Tokenizer]) -> TokenStore:
    """Opens the store of `rows()`. Builds the store with `write` if it does not exist or is damaged."""
    def read(folder: Path, is_unknown: bool) -> TokenStore:
        store = TokenStore(folder)
        if is_unknown:
            store.check_rows(tokenizers)
        return store

    return open_built(folder, lambda: build_together(folder, rows, write), read)


def _digest(content: Mapping[str, Any]) -> str:
    """Returns a hash of `content`. The hash is the name of a folder in the cache."""
    return hashlib.sha256(json.dumps({**content, 'format': FORMAT}, sort_keys=True).encode()).hexdigest()[:16]
