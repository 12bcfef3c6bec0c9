"""Writes the files of a token store, and joins the stores of several shards.

A store is a folder. A row of a store is a sentence pair with the sides 'source' and 'target', or a document with
one side, 'text'. For each side, the folder has two files: SIDE.tokens (uint32, the concatenation of all rows) and
SIDE.offsets.npy (int64, the index at which each row begins, and the end of the last row). stats.json has counts.
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

SIDES = ('source', 'target')  # the sides of a sentence pair
TEXT = 'text'  # the only side of a document
TOKEN = np.dtype(np.uint32)


def write_pairs(pairs: Iterable[Pair], folder: Path, *, tokenizers: Mapping[str, Tokenizer], max_length: int) -> None:
    """Writes a store of sentence pairs. Skips pairs that have an empty side or are too long."""
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
    """Writes a store of documents. Skips documents without text."""
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
    """Writes the two files of one side ('source', 'target' or 'text') of a token store, row by row."""

    def __init__(self, folder: Path, side: str):
        self._file = open(folder / f'{side}.tokens', 'wb')  # noqa: SIM115 (__exit__ closes it)
        self._offsets_file = folder / f'{side}.offsets.npy'
        self._offsets = array.array('q', [0])

    def append(self, parts: Iterable[UInt32[np.ndarray, ' _']]) -> None:
        """Appends a row. `parts` are the tokens of the row in several arrays."""
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


def sides_of(folder: Path) -> list[str]:
    """Returns the sides of a token store: ['source', 'target'] or ['text']."""
    return sorted(path.name.removesuffix('.tokens') for path in folder.glob('*.tokens'))


def join(parts: Sequence[Path], folder: Path) -> None:
    """Joins the stores of several shards into one store, with all rows in order.

    The files are equal, bit for bit, to the files of a store that is built without shards.
    """
    counts = [json.loads((part / 'stats.json').read_text()) for part in parts]
    for side in sides_of(parts[0]):
        offsets = [np.load(part / f'{side}.offsets.npy', allow_pickle=False) for part in parts]
        ends = np.cumsum([0, *(part_offsets[-1] for part_offsets in offsets)])
        with open(folder / f'{side}.tokens', 'wb') as file:
            for part, part_offsets in zip(parts, offsets, strict=True):
                if part_offsets[-1]:  # a file without tokens has a marker, which is not copied
                    with open(part / f'{side}.tokens', 'rb') as tokens:
                        shutil.copyfileobj(tokens, file, 2 ** 20)
            if not ends[-1]:
                file.write(bytes(TOKEN.itemsize))
        np.save(folder / f'{side}.offsets.npy', np.concatenate(
            [[0], *(part_offsets[1:] + begin for part_offsets, begin in zip(offsets, ends[:-1], strict=True))]))
    totals = {name: sum(part_counts[name] for part_counts in counts) for name in counts[0]}
    (folder / 'stats.json').write_text(json.dumps(totals))
