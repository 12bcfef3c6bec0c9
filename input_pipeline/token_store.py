"""Text tokenised once, into memory-mapped files that every later run and every process shares.

A store is a folder named by the fingerprint of all that it depends on: the text, the tokenizers and the
settings. It is built beside its final place and moved there whole, so a build that is killed leaves
nothing that is taken for good, and two builds at once both succeed.
"""

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
from input_pipeline.sources import Corpus, Pair
from input_pipeline.tokenizer import Tokenizer, train_tokenizer

log = logging.getLogger('allyouneed.data')

SIDES = ('source', 'target')
CHUNK = 10_000  # pairs that are tokenised before they are written


def cache_folder(cache_dir: str) -> Path:
    """Where runs share tokenizers, token stores and compiled programs: config.cache_dir, or the user's cache."""
    return Path(cache_dir or '~/.cache/allyouneed').expanduser()


class TokenStore:
    """A split as token numbers, without start and end tokens. Opened in no time, read by random access.

    Attributes:
      stats: 'pairs', 'dropped_empty', 'dropped_long', 'source_tokens', 'target_tokens'.
    """

    def __init__(self, folder: Path):
        self.stats = json.loads((folder / 'stats.json').read_text())
        self._offsets = {side: np.load(folder / f'{side}.offsets.npy', mmap_mode='r') for side in SIDES}
        self._tokens = {side: np.memmap(folder / f'{side}.tokens', np.uint32, 'r') for side in SIDES}

    def __len__(self) -> int:
        return self.stats['pairs']

    def lengths(self, side: str) -> Int[np.ndarray, ' pairs']:
        """Tokens in each sentence of a side, 'source' or 'target'."""
        return np.diff(self._offsets[side])

    def tokens(self, side: str, row: int | np.integer) -> UInt32[np.ndarray, ' length']:
        """The tokens of sentence `row` of a side."""
        begin, end = self._offsets[side][row:row + 2]
        return self._tokens[side][begin:end]


def tokenizers_for(corpus: Corpus, settings: ConfigDict, cache: Path) -> dict[str, Tokenizer]:
    """{'source': ..., 'target': ...}, learned from the training split unless the cache has them.

    With settings['joint'] both are the same one, learned from both languages.
    """
    options = {name: settings[name] for name in ('kind', 'vocab_size', 'split_digits', 'normalization')}

    def learn(side: str | None, path: Path):
        pairs = corpus.pairs('train')
        lines = itertools.chain.from_iterable(pairs) if side is None else (pair[SIDES.index(side)] for pair in pairs)
        nonempty = (line for line in lines if line.strip())
        first = next(nonempty, None)
        if first is None:
            raise UserError(f'the training split has no text: {corpus.fingerprint("train")}')
        train_tokenizer(itertools.chain([first], nonempty), **options).save(path / 'tokenizer.model')

    def tokenizer(side: str | None) -> Tokenizer:
        key = _digest({'corpus': corpus.fingerprint('train'), 'side': side, **options})
        folder = _build_once(cache / 'tokenizers' / key, lambda path: learn(side, path))
        return Tokenizer.load(folder / 'tokenizer.model')

    if settings['joint']:
        return dict.fromkeys(SIDES, tokenizer(None))
    return {side: tokenizer(side) for side in SIDES}


def open_store(corpus: Corpus, split: str, tokenizers: Mapping[str, Tokenizer], max_length: int,
               cache: Path) -> TokenStore:
    """The split's store, built first if the cache does not have it.

    Pairs with an empty side, or with more than `max_length` tokens on one (end token included), are
    dropped, counted and logged.

    Raises:
      UserError: if nothing is left.
    """
    key = _digest({'corpus': corpus.fingerprint(split), 'max_length': max_length,
                   'tokenizers': [hashlib.sha256(tokenizers[side].model).hexdigest() for side in SIDES]})
    folder = _build_once(cache / 'tokens' / key,
                         lambda path: _write(corpus.pairs(split), tokenizers, max_length, path))
    store = TokenStore(folder)
    stats = store.stats
    log.info('%s: %d pairs, %d source and %d target tokens; dropped %d with an empty side, %d longer than %d',
                 split, stats['pairs'], stats['source_tokens'], stats['target_tokens'], stats['dropped_empty'],
                 stats['dropped_long'], max_length)
    if not len(store):
        raise UserError(f'the {split} split is empty: {stats["dropped_empty"]} pairs with an empty side and '
                        f'{stats["dropped_long"]} longer than config.data.max_length={max_length} were dropped. '
                        f'Looked at: {corpus.fingerprint(split)}')
    return store


def _write(pairs: Iterable[Pair], tokenizers: Mapping[str, Tokenizer], max_length: int, folder: Path) -> None:
    stats = {'pairs': 0, 'dropped_empty': 0, 'dropped_long': 0, 'source_tokens': 0, 'target_tokens': 0}
    lengths = {side: [np.zeros(1, np.int64)] for side in SIDES}
    with open(folder / 'source.tokens', 'wb') as source, open(folder / 'target.tokens', 'wb') as target:
        for chunk in _chunks(pairs):
            kept = [pair for pair in chunk if pair[0].strip() and pair[1].strip()]
            stats['dropped_empty'] += len(chunk) - len(kept)
            rows = [tuple(tokenizers[side].encode(text) for side, text in zip(SIDES, pair, strict=True))
                    for pair in kept]
            fitting = [row for row in rows if max(map(len, row)) < max_length]
            stats['dropped_long'] += len(rows) - len(fitting)
            stats['pairs'] += len(fitting)
            if not fitting:
                continue
            for side, file, sentences in zip(SIDES, (source, target), zip(*fitting, strict=True)):
                lengths[side].append(np.array([len(sentence) for sentence in sentences], np.int64))
                stats[f'{side}_tokens'] += int(lengths[side][-1].sum())
                np.concatenate([np.array(sentence, np.uint32) for sentence in sentences]).tofile(file)
        for file in (source, target):
            if not file.tell():
                file.write(bytes(4))  # an empty file cannot be memory-mapped
    for side in SIDES:
        np.save(folder / f'{side}.offsets.npy', np.cumsum(np.concatenate(lengths[side])))
    (folder / 'stats.json').write_text(json.dumps(stats))


def _chunks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    pairs = iter(pairs)
    while chunk := list(itertools.islice(pairs, CHUNK)):
        yield chunk


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, made by `build` in a temporary place and renamed if it does not exist yet."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f'{folder.name}.building-'))
    try:
        build(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was quicker, and its result is the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
