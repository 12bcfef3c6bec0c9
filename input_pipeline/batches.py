"""Batches of sentences of like length, as a pure function of (token store, settings, step).

Nothing here remembers where it is: batch 1234 is the same whoever asks for it, before or after a resume,
and on however many devices.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int

from errors import UserError
from input_pipeline.token_store import TokenStore
from input_pipeline.tokenizer import BOS, EOS, PAD

ROWS = 8  # batch sizes are multiples of this, so that up to 8 devices share a batch without rows to fill it up
LENGTHS = 4  # padded lengths are multiples of this


class Batch(TypedDict):
    """What a training step reads. Arrays are NumPy's here, and JAX's on devices.

    inputs: the module's arguments by name, such as 'source' and 'target', int32 [rows, length].
    targets: int32 [rows, length] of tokens; classes int32 [rows], or values float32 [rows, values].
    weights: float32, for each target; 0 on padding.
    """
    inputs: dict[str, Any]
    targets: Any
    weights: Any


class Part(NamedTuple):
    """The rows of every batch that one process reads: from first/of to last/of of them. The default is all.

    A batch is first filled up with rows of weight 0, which change nothing, until there is a `multiple` of rows for
    devices to share.
    """
    first: int = 0
    last: int = 1
    of: int = 1
    multiple: int = 1

    def filled(self, count: int) -> int:
        """Rows of a batch of `count` that is filled up."""
        return -(-count // self.multiple) * self.multiple

    def rows(self, count: int) -> slice:
        """Which rows of a batch of `count` that is filled up: those from `count` on are the ones of weight 0."""
        return slice(self.filled(count) * self.first // self.of, self.filled(count) * self.last // self.of)


ALL = Part()


@runtime_checkable
class Plan(Protocol):
    """The batches of a split, each a pure function of its number; `len` is the number of batches in an epoch."""

    @property
    def rows(self) -> Sequence[int] | Int[np.ndarray, ' buckets']:
        """The row counts that its batches have."""
        ...

    def __len__(self) -> int: ...

    def batch(self, step: int, part: Part = ALL) -> Batch:
        """Batch `step`, or only some of its rows; the rows of several parts, one after the other, are the batch.

        Rows that are missing, at the end of an epoch or to fill a batch up, are padding of weight 0.
        """
        ...

    def describe(self) -> str:
        """A line for the log."""
        ...


def bucket_lengths(lengths: Int[np.ndarray, ' pairs'], num_buckets: int) -> Int[np.ndarray, ' buckets']:
    """The padded lengths, at most `num_buckets` of them, that waste the least padding on `lengths`.

    Dynamic programming over the histogram of lengths in units of LENGTHS; ascending, the last one fits all.
    """
    units = -(-lengths // LENGTHS)
    top = int(units.max())
    below = np.concatenate([[0], np.cumsum(np.bincount(units, minlength=top + 1)[1:])])  # below[u]: units <= u
    # cost[u]: least padded size of all sentences of at most u units, with the buckets used so far.
    cost = np.where(np.arange(top + 1) == 0, 0.0, np.inf)
    choices = []
    for _ in range(num_buckets):
        candidates = cost[:, None] + (below[None, :] - below[:, None]) * np.arange(top + 1)[None, :]
        candidates[np.tril_indices(top + 1, -1)] = np.inf
        choices.append(candidates.argmin(axis=0))
        cost = candidates.min(axis=0)
    edges, unit = [], top
    for choice in reversed(choices):
        edges.append(unit)
        unit = int(choice[unit])
    return np.unique(np.array([edge for edge in edges if edge > 0])) * LENGTHS


class BatchPlan:
    """Which sentences are in batch `step`, for every step from 0 on.

    Every epoch holds every sentence exactly once: sentences of one length bucket are shuffled and cut into
    batches of at most `tokens` padded target positions; then the batches are shuffled. `len` is the number
    of batches in an epoch.
    """

    def __init__(self, store: TokenStore, *, tokens: int, num_buckets: int, seed: int | None,
                 longest: int | None = None):
        """Plans every epoch.

        Args:
          store: of sentence pairs.
          tokens: padded target positions of a batch, at most.
          num_buckets: of lengths.
          seed: of the order; None keeps the shortest sentences first, for evaluation.
          longest: where learned positions end; no batch is padded beyond.

        Raises:
          UserError: if `tokens` is too small for ROWS of the longest sentences.
        """
        # One more than the text: the end token of the source and of the targets.
        lengths = np.maximum(store.lengths('source'), store.lengths('target')) + 1
        self.bucket_lengths = np.minimum(bucket_lengths(lengths, num_buckets), longest or sys.maxsize)
        self.rows = tokens // self.bucket_lengths // ROWS * ROWS
        if not self.rows.min():
            longest = int(self.bucket_lengths.max())
            raise UserError(f'config.batch.tokens={tokens} holds no {ROWS} sentences of {longest} tokens, which the '
                            f'data has: raise it to at least {ROWS * longest}, or lower config.data.max_length')
        self._store, self._seed = store, seed
        self._bucket = np.searchsorted(self.bucket_lengths, lengths)
        counts = np.bincount(self._bucket, minlength=len(self.bucket_lengths))
        self._length = int(np.sum(-(-counts // self.rows)))
        self.padding_share = 1 - (store.lengths('target').sum() + len(store)) / np.sum(
            -(-counts // self.rows) * self.rows * self.bucket_lengths)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def __len__(self) -> int:
        return self._length

    def __call__(self, step: int) -> tuple[int, Int[np.ndarray, ' rows']]:
        """The bucket of batch `step` and the sentences in it."""
        epoch, index = divmod(step, len(self))
        return self._epoch(epoch)[index]

    def batch(self, step: int, part: Part = ALL) -> Batch:
        """Batch `step` as arrays of its bucket's static shape [rows, length]; missing rows are padding."""
        bucket, sentences = self(step)
        rows = part.rows(int(self.rows[bucket]))
        shape = rows.stop - rows.start, int(self.bucket_lengths[bucket])
        source, target, targets = (np.full(shape, PAD, np.int32) for _ in range(3))
        for row, sentence in enumerate(sentences[rows]):
            source_tokens = self._store.tokens('source', sentence)
            target_tokens = self._store.tokens('target', sentence)
            source[row, :len(source_tokens) + 1] = [*source_tokens, EOS]
            target[row, :len(target_tokens) + 1] = [BOS, *target_tokens]
            targets[row, :len(target_tokens) + 1] = [*target_tokens, EOS]
        return {'inputs': {'source': source, 'target': target}, 'targets': targets,
                'weights': (targets != PAD).astype(np.float32)}

    def describe(self) -> str:
        """A line for the log."""
        shapes = ', '.join(f'{rows} x {length}' for rows, length in zip(self.rows, self.bucket_lengths, strict=True))
        return (f'{len(self)} batches an epoch, of {shapes} sentences x tokens; '
                f'{100 * self.padding_share:.1f} % of the targets are padding')

    def _plan_epoch(self, epoch: int) -> list[tuple[int, Int[np.ndarray, ' rows']]]:
        rng = None if self._seed is None else np.random.default_rng([self._seed, epoch])
        order = np.arange(len(self._bucket)) if rng is None else rng.permutation(len(self._bucket))
        batches = []
        for bucket, rows in enumerate(self.rows):
            members = order[self._bucket[order] == bucket]
            batches += [(bucket, members[begin:begin + rows]) for begin in range(0, len(members), rows)]
        return batches if rng is None else [batches[index] for index in rng.permutation(len(batches))]


class _Steps:
    """A plan as grain's random-access data source."""

    def __init__(self, plan: Plan, first: int, last: int, part: Part):
        self._plan, self._first, self._last, self._part = plan, first, last, part

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> Batch:
        return self._plan.batch(self._first + index, self._part)


def prefetch(plan: Plan, first: int, last: int, part: Part = ALL) -> Iterator[Batch]:
    """Batches first, first + 1, ... last - 1, or a part of each, made ahead of time in a thread."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(grain.MapDataset.source(_Steps(plan, first, last, part)).to_iter_dataset(options))
