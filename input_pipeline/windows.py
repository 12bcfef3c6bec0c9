"""Batches of token windows for language models. A batch is a pure function of (store, settings, step).

The stream is the concatenation of all documents. Each document consists of a start token, the tokens of its text, and
an end token. The stream is divided into windows of a fixed number of tokens. The `places` of a batch are an array of
indices into the stream, with -1 for padding. Tokens, targets and segments are computed from the places.
"""

import bisect
import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int, UInt32

from input_pipeline.batches import ALL, Batch, Part
from input_pipeline.token_store import TEXT, TokenStore
from input_pipeline.tokenizer import BOS, EOS, PAD

Places = Int[np.ndarray, 'rows context']
Cut = Callable[[Int[np.ndarray, ' windows']], Places]  # indices of windows in an epoch -> the places of these windows


class WindowPlan:
    """Batches of windows, one batch for every step from 0 on. `len(plan)` is the number of batches in an epoch.

    In every epoch, every token of every document and every end token is a target exactly once. A window has `context`
    inputs and `context` targets. `packing` is one of two ways to make windows:

    'contiguous': The stream is divided after every `context` tokens. In each epoch, the division begins at a
      different place of the stream (the phase). A window may begin in the middle of a document, and may contain the
      end of one document and the beginning of the next document. If the phase is not 0, the end of the stream is
      followed by its beginning. In a window that contains both, they are two segments.
    'packed': A window contains whole documents. Only documents longer than `context` are divided into pieces.

    Attributes:
      rows: the number of windows in a batch, as a sequence of one number.
      context: the number of tokens in a window.
      padding_share: the share of padding among the targets.
      characters: the number of characters of the documents. Bits per character are the summed loss of an evaluation,
        divided by ln 2 and by this number.
      bytes: the number of bytes of the documents in UTF-8, for bits per byte.
    """

    def __init__(self, store: TokenStore, *, rows: int, context: int, packing: str, seed: int | None):
        """Plans every epoch. If `seed` is None, as for evaluation, the windows are in order and begin at token 0."""
        self.rows, self.context = (rows,), context
        self.characters, self.bytes = store.stats['characters'], store.stats['bytes']
        self._store, self._seed = store, seed
        lengths = store.lengths(TEXT)
        self._begins = np.concatenate([[0], np.cumsum(lengths + 2)])  # begin of each document; end of the stream
        self._windows = {'contiguous': _Contiguous, 'packed': _Packed}[packing](self._begins, context)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)
        self.padding_share = 1 - float(lengths.sum() + len(lengths)) / (len(self) * rows * context)

    def __len__(self) -> int:
        return -(-len(self._windows) // self.rows[0])

    def describe(self) -> str:
        """Returns a description of the batches for the log, in one line."""
        return (f'{len(self)} batches per epoch, of {self.rows[0]} windows x {self.context} tokens; '
                f'{100 * self.padding_share:.1f} % of the targets are padding')

    def batch(self, step: int, part: Part = ALL) -> Batch:
        """Returns batch `step`. All batches have the same shape. Rows without a window are padding.

        `segments` numbers the documents of a window from 1, and is 0 on padding. `positions` counts from 0 in each
        segment. A target is always in the same document as its input.
        """
        places = self.places(step, part)
        real = places >= 0
        here = np.maximum(places, 0)
        ahead = here + real  # the target is the next token of the stream
        document, target_document = self._documents(here), self._documents(ahead)
        weights = real & (document == target_document)
        begins = _segment_begins(places, document)
        column = np.broadcast_to(np.arange(self.context), places.shape)
        position = column - np.maximum.accumulate(np.where(begins, column, 0), axis=1)
        return {'inputs': {'tokens': np.where(real, self._tokens(here, document), PAD).astype(np.int32),
                           'segments': np.where(real, np.cumsum(begins, axis=1), 0).astype(np.int32),
                           'positions': np.where(real, position, 0).astype(np.int32)},
                'targets': np.where(weights, self._tokens(ahead, target_document), PAD).astype(np.int32),
                'weights': weights.astype(np.float32)}

    def places(self, step: int, part: Part = ALL) -> Places:
        """Returns the positions of the inputs of batch number `step` in the token stream. Padding has position -1."""
        epoch, index = divmod(step, len(self))
        order, cut = self._epoch(epoch)
        rows = part.rows(self.rows[0])
        windows = cut(order[index * self.rows[0]:(index + 1) * self.rows[0]][rows])
        return np.pad(windows, ((0, rows.stop - rows.start - len(windows)), (0, 0)), constant_values=-1)

    def _plan_epoch(self, epoch: int) -> tuple[Int[np.ndarray, ' windows'], Cut]:
        rng = None if self._seed is None else np.random.default_rng([self._seed, epoch])
        cut = self._windows.cut(rng)
        count = len(self._windows)
        return np.arange(count) if rng is None else rng.permutation(count), cut

    def _documents(self, places: Places) -> Places:
        """Returns the index of the document at each of the given positions of the token stream."""
        return np.searchsorted(self._begins, places, side='right') - 1

    def _tokens(self, places: Places, document: Places) -> UInt32[np.ndarray, 'rows context']:
        first, last = places == self._begins[document], places == self._begins[document + 1] - 1
        text = ~first & ~last
        tokens = np.where(first, BOS, EOS).astype(np.uint32)
        # The store has no start and end tokens. So the index in the store is smaller by two for each earlier document,
        # and by one for the start token of this document.
        tokens[text] = self._store.at(TEXT, places[text] - 2 * document[text] - 1)
        return tokens


def _segment_begins(places: Places, document: Places) -> Bool[np.ndarray, 'rows context']:
    """Returns True where a segment begins: at the beginning of a document, and after a gap in the stream."""
    begins = places >= 0
    begins[:, 1:] &= (np.diff(places, axis=1) != 1) | (np.diff(document, axis=1) != 0)
    return begins


class _Contiguous:
    """Consecutive windows of the token stream. `len` is the number of windows.

    The stream is read cyclically from a position that is called the phase.
    """

    def __init__(self, begins: Int[np.ndarray, ' begins'], context: int):
        self._inputs, self._context = int(begins[-1]) - 1, context  # the last token is only a target

    def __len__(self) -> int:
        return -(-self._inputs // self._context)

    def cut(self, rng: np.random.Generator | None) -> Cut:
        phase = 0 if rng is None else int(rng.integers(self._context))

        def places(windows: Int[np.ndarray, ' windows']) -> Places:
            inputs = windows[:, None] * self._context + np.arange(self._context)
            return np.where(inputs < self._inputs, (phase + inputs) % self._inputs, -1)

        return places


class _Packed:
    """Windows with one or more pieces of documents. A row is one window, and `len` is the number of rows.

    The lengths of the pieces in each row are the same in all epochs, so that all epochs have the same number of rows.
    In each epoch, the pieces of each length are shuffled.
    """

    def __init__(self, begins: Int[np.ndarray, ' begins'], context: int):
        inputs = np.diff(begins) - 1  # number of inputs of each document; the end token is only a target
        pieces = -(-inputs // context)
        # The index of each piece in its document.
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._begins = np.repeat(begins[:-1], pieces) + number * context
        self._lengths = np.minimum(context, np.repeat(inputs, pieces) - number * context)
        self._context = context
        # Each piece gets a slot: a row, a first column and a length. The slots are sorted by row.
        self._row, self._column, self._room = _lay_out(pack(np.bincount(self._lengths), context))
        self._by_room = np.argsort(self._room, kind='stable')

    def __len__(self) -> int:
        return int(self._row[-1]) + 1

    def cut(self, rng: np.random.Generator | None) -> Cut:
        order = np.arange(len(self._lengths)) if rng is None else rng.permutation(len(self._lengths))
        by_length = order[np.argsort(self._lengths[order], kind='stable')]
        begins = np.empty_like(self._begins)
        begins[self._by_room] = self._begins[by_length]

        def places(windows: Int[np.ndarray, ' windows']) -> Places:
            filled = np.full((len(windows), self._context), -1)
            for row, window in zip(filled, windows, strict=True):
                for piece in range(*np.searchsorted(self._row, [window, window + 1])):
                    column, length = self._column[piece], self._room[piece]
                    row[column:column + length] = begins[piece] + np.arange(length)
            return filled

        return places


def pack(counts: Int[np.ndarray, ' lengths'], context: int) -> list[tuple[int, tuple[int, ...]]]:
    """Packs pieces of documents into rows of at most `context` tokens. There are counts[n] pieces of length n.

    The method is best-fit decreasing on the histogram of lengths (Krell et al. 2021, arXiv:2107.02027), so the time
    does not depend on the number of pieces.

    Returns:
      (number of rows, lengths of the pieces in each of these rows), for each way to fill a row.
    """
    rows = []  # (free space, number of such rows, lengths of the pieces in each row), sorted
    for length in range(len(counts) - 1, 0, -1):
        left = int(counts[length])
        while left and (fit := bisect.bisect_left(rows, (length,))) < len(rows):
            space, number, lengths = rows.pop(fit)
            filled = min(number, left)
            bisect.insort(rows, (space - length, filled, (*lengths, length)))
            if number > filled:
                bisect.insort(rows, (space, number - filled, lengths))
            left -= filled
        most = context // length  # maximum number of pieces in a row
        for number, pieces in ((left // most, most), (1, left % most)):
            if number and pieces:
                bisect.insort(rows, (context - pieces * length, number, (length,) * pieces))
    return [(number, lengths) for _, number, lengths in rows]


def _lay_out(ways: list[tuple[int, tuple[int, ...]]]) -> tuple[Int[np.ndarray, ' pieces'], ...]:
    """Returns the row, the first column and the length of each piece. The pieces are sorted by row."""
    rows, columns, lengths, first_row = [], [], [], 0
    for number, pieces in ways:
        rows.append(np.repeat(np.arange(first_row, first_row + number), len(pieces)))
        columns.append(np.tile(np.cumsum([0, *pieces[:-1]]), number))
        lengths.append(np.tile(pieces, number))
        first_row += number
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(lengths)
