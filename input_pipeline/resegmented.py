"""Batches of sentence pairs that are segmented anew in every epoch. A batch is a function of (store, settings, step).

The segmentation of a whole epoch is drawn at once. The lengths of the segmented sentences determine the batches of the
epoch. All epochs have the same number of batches and the same shapes. So step t is in epoch t // len(plan), and
does not depend on earlier epochs.
"""

import functools
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int, UInt32
from typing_extensions import override

from input_pipeline.batches import BatchPlan, Epoch, batch_shapes, padded_lengths
from input_pipeline.bpe_dropout import BpeDropout
from input_pipeline.token_links import TokenLinks
from input_pipeline.token_store import TokenStore

TOGETHER = 2048  # rows that are segmented at a time, with one random generator


class Resegmented(TokenStore):
    """A token store with another segmentation of the text. A sentence that would become too long is not changed."""

    def __init__(self, store: TokenStore, dropouts: Mapping[str, BpeDropout], seed: int, epoch: int, longest: int):
        """Segments all rows.

        Args:
          store: the rows, as the tokenizer segments them without dropout.
          dropouts: the segmenter of each side.
          seed: the seed of the run. Together with `epoch`, it determines the segmentation.
          epoch: the index of the epoch.
          longest: the maximum number of tokens of a side.
        """
        self._store, self._tokens, self._offsets, self._kept = store, {}, {}, {}
        for number, (side, dropout) in enumerate(dropouts.items(), 1):
            parts, lengths = [], store.lengths(side)  # outside of the loop, because each call reads all offsets
            for begin in range(0, len(store), TOGETHER):
                counts = lengths[begin:begin + TOGETHER]
                rng = np.random.default_rng([seed, epoch, number, begin])  # [seed, epoch] is for the order of batches
                parts.append(dropout.segment(store.tokens_of(side, begin, begin + len(counts)), counts, rng))
            tokens, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
            self._tokens[side], self._offsets[side] = tokens, np.append(0, np.cumsum(counts))
            self._kept[side] = counts > longest

    def keep(self, rows: Int[np.ndarray, ' some']) -> None:
        """Restores the original segmentation of the given rows."""
        for kept in self._kept.values():
            kept[rows] = True

    @override
    def lengths(self, side: str) -> Int[np.ndarray, ' rows']:
        return np.where(self._kept[side], self._store.lengths(side), super().lengths(side))

    @override
    def tokens(self, side: str, row: int | np.integer) -> UInt32[np.ndarray, ' length']:
        return self._store.tokens(side, row) if self._kept[side][row] else super().tokens(side, row)


class ResegmentedPlan(BatchPlan):
    """One batch of sentence pairs for each step. The sentences are segmented anew in every epoch.

    Every epoch contains every sentence pair exactly once, in `len(plan)` batches. The pairs are ordered by length
    bucket, the longest first, and shuffled within each bucket. Then they are divided into batches. The last batch of a
    bucket is filled up with pairs of the next bucket.
    """

    def __init__(self, store: TokenStore, dropouts: Mapping[str, BpeDropout], *, tokens: int, num_buckets: int,
                 seed: int, longest: int, links: TokenLinks | None = None):
        """Segments the first epoch. The lengths of its sentences determine the shapes and the number of batches.

        Args:
          store: the sentence pairs in the segmentation of the tokenizers.
          dropouts: the segmenter of each side.
          tokens: config.batch.tokens.
          num_buckets: config.batch.buckets.
          seed: the seed of the segmentation and of the order of the pairs.
          longest: the maximum length of a sentence, end token included.
          links: the gold links of the rows of the store, which are added to the batches.

        Raises:
          UserError: if `tokens` is too small for a batch of ROWS sentences of the greatest length.
        """
        self._store, self._dropouts, self._seed, self._longest, self._links = store, dropouts, seed, longest, links
        first = self._resegmented(0)
        # A batch must also have room for sentences that keep their original segmentation.
        lengths = np.maximum(padded_lengths(store), padded_lengths(first))
        self.bucket_lengths, self.rows = batch_shapes(lengths, tokens=tokens, num_buckets=num_buckets, longest=longest)
        self._longest = min(longest, int(self.bucket_lengths[-1]))
        batches = self._cut(np.arange(len(store)), lengths)
        # Other epochs need slightly more or fewer batches, so a few batches are added. The number of added batches
        # grows like the square root of the number of batches, because the standard deviation of a sum of n lengths is
        # proportional to the square root of n.
        self._length = min(len(store), len(batches) + 1 + math.isqrt(len(batches)) // 10)
        self.padding_share = 1 - (first.lengths('target').sum() + len(store)) / sum(
            self.rows[bucket] * self.bucket_lengths[bucket] for bucket, _ in batches)
        self._epoch = functools.lru_cache(maxsize=1)(self._plan_epoch)

    @override
    def describe(self) -> str:
        return f'{super().describe()}; with a new segmentation in every epoch'

    @override
    def _plan_epoch(self, epoch: int) -> Epoch:
        store, rng = self._resegmented(epoch), np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(store))
        batches, kept = self._cut(order, padded_lengths(store)), 0
        while len(batches) > len(self):  # this is very rare
            kept += len(store) // 100 + 1
            store.keep(order[:kept])
            batches = self._cut(order, padded_lengths(store))
        while len(batches) < len(self):
            bucket, sentences = batches.pop(max(range(len(batches)), key=lambda index: len(batches[index][1])))
            batches += [(bucket, half) for half in np.array_split(sentences, 2)]
        return Epoch(store, [batches[index] for index in rng.permutation(len(batches))])

    def _resegmented(self, epoch: int) -> Resegmented:
        return Resegmented(self._store, self._dropouts, self._seed, epoch, self._longest - 1)

    def _cut(self, order: Int[np.ndarray, ' pairs'], lengths: Int[np.ndarray, ' pairs'],
             ) -> list[tuple[np.integer, Int[np.ndarray, ' rows']]]:
        """Divides the pairs, in the given order, into batches. A batch is a tuple (bucket, rows of the store)."""
        buckets = np.searchsorted(self.bucket_lengths, lengths)
        order = order[np.argsort(-buckets[order], kind='stable')]
        batches, begin = [], 0
        while begin < len(order):
            bucket = buckets[order[begin]]
            batches.append((bucket, order[begin:begin + self.rows[bucket]]))
            begin += self.rows[bucket]
        return batches
