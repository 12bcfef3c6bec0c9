"""The files of a token store: written row by row, and put together from those of the shards of a text.

A folder has, for each side of a row, SIDE.tokens (uint32, one row behind the other) and SIDE.offsets.npy (int64, where
each row begins, and the end), and stats.json, with counts.
"""

import array
import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt32

from input_pipeline.sources import Pair
from input_pipeline.tokens import Tokenizer

SIDES = ('source', 'target')  # of a pair
TEXT = 'text'  # the only side of a document
TOKEN = np.dtype(np.uint32)


def write_pairs(pairs: Iterable[Pair], folder: Path, *, tokenizers: Mapping[str, Tokenizer], max_length: int) -> None:
    """Writes a store of sentence pairs, without those that are empty or too long."""
    stats = {'dropped_empty': 0, 'dropped_long': 0}
    with _SideWriter(folder, 'source') as source, _SideWriter(folder, 'target') as target:
        for pair in pairs:
            if not all(text.strip() for text in pair):
                stats['dropped_empty'] += 1
                continue
            row = [list(tokenizers[side].encode_parts(text)) for side, text in zip(SIDES, pair, strict=True)]
            if max(sum(map(len, parts)) for parts in row) >= max_length:
                stats['dropped_long'] += 1
                continue
            source.append(row[0])
            target.append(row[1])
    stats |= {'pairs': source.rows, 'source_tokens': source.tokens, 'target_tokens': target.tokens}
    (folder / 'stats.json').write_text(json.dumps(stats))


def write_documents(documents: Iterable[str], folder: Path, *, tokenizer: Tokenizer) -> None:
    """Writes a store of documents, without those that have no text."""
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
        self._offsets.append(self.tokens + written // TOKEN.itemsize)

    @property
    def rows(self) -> int:
        return len(self._offsets) - 1

    @property
    def tokens(self) -> int:
        return self._offsets[-1]

    def __exit__(self, *exception) -> None:
        if not self.tokens:
            self._file.write(bytes(TOKEN.itemsize))  # an empty file cannot be memory-mapped
        self._file.close()
        np.save(self._offsets_file, np.frombuffer(self._offsets, np.int64))


def join(parts: Sequence[Path], folder: Path) -> None:
    """Writes the store of all rows of `parts`, in order: the same bits as if written at once."""
    counts = [json.loads((part / 'stats.json').read_text()) for part in parts]
    for side in sorted({path.name.partition('.')[0] for path in parts[0].iterdir()} - {'stats'}):
        offsets = [np.load(part / f'{side}.offsets.npy', allow_pickle=False) for part in parts]
        ends = np.cumsum([0, *(each[-1] for each in offsets)])
        with open(folder / f'{side}.tokens', 'wb') as file:
            for part, each in zip(parts, offsets, strict=True):
                if each[-1]:  # else the file holds what makes it none that is empty
                    with open(part / f'{side}.tokens', 'rb') as tokens:
                        shutil.copyfileobj(tokens, file, 2 ** 20)
            if not ends[-1]:
                file.write(bytes(TOKEN.itemsize))
        np.save(folder / f'{side}.offsets.npy', np.concatenate(
            [[0], *(each[1:] + begin for each, begin in zip(offsets, ends[:-1], strict=True))]))
    (folder / 'stats.json').write_text(json.dumps({name: sum(each[name] for each in counts) for name in counts[0]}))
