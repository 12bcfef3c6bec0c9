"""Batches of sentences of similar length, as a pure function of (token store, settings, step).

There is no state: batch 1234 is the same before and after a resume, and on any number of devices.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict, runtime_checkable

import numpy as np
from jaxtyping import Int

from input_pipeline.token_links import TokenLinks
from input_pipeline.token_store import TokenStore
from input_pipeline.tokenizer import BOS, EOS, PAD
from runtime.errors import UserError

ROWS = 8  # batch sizes are multiples of ROWS, so that up to 8 devices share a batch without padding rows
LENGTHS = 4  # padded lengths are multiples of LENGTHS


class Batch(TypedDict):
    """The input of a training step. The arrays are NumPy arrays in the input pipeline, and JAX arrays on devices.

    inputs: the arguments of the model by name, such as 'source' and 'target', int32 [rows, length].
    targets: tokens int32 [rows, length], classes int32 [rows], or values float32 [rows, values].
    weights: float32, the weight of each target in the loss. The weight of padding is 0.
    links: bool [rows, target length, source length], whether tokens are linked; only for guided alignment.
    """
    inputs: dict[str, Any]
    targets: Any
    weights: Any
    links: NotRequired[Any]


class Part(NamedTuple):
    """The rows that one process reads from every batch. The default is all rows.

    A batch is first padded to a multiple of `multiple` rows, so that all devices get the same number of rows. Then the
    batch is divided into equal shares; `of` is the number of shares. The part consists of the shares from `first` to
    `last` - 1. Padding rows have weight 0 and do not change the results.
    """
    first: int = 0
    last: int = 1
    of: int = 1
    multiple: int = 1

    def filled(self, count: int) -> int:
        """Returns the number of rows after padding. `count` is the number of rows before padding."""
        return -(-count // self.multiple) * self.multiple

    def rows(self, count: int) -> slice:
        """Returns the rows of this part, for a batch of `count` rows. Rows from index `count` on are padding."""
        return slice(self.filled(count) * self.first // self.of, self.filled(count) * self.last // self.of)


ALL = Part()


@runtime_checkable
class Plan(Protocol):
    """The batches of a split. Each batch is a pure function of its step.

    `len(plan)` is the number of batches in an epoch.
    """

    @property
    def rows(self) -> Sequence[int] | Int[np.ndarray, ' buckets']:
        """The possible numbers of rows of a batch."""
        ...

    def __len__(self) -> int: ...

    def batch(self, step: int, part: Part = ALL) -> Batch:
        """Returns batch `step`, or only the rows of `part`. The parts of all processes form the batch.

        Padding rows have weight 0. They complete the last batch of an epoch, and make the number of rows divisible by
        the number of devices.
        """
        ...

    def describe(self) -> str:
        """Returns a description of the batches for the log, in one line."""
        ...


def bucket_lengths(lengths: Int[np.ndarray, ' pairs'], num_buckets: int) -> Int[np.ndarray, ' buckets']:
    """Returns at most `num_buckets` padded lengths that minimise the padding of sentences with these `lengths`.

    The padded lengths are multiples of LENGTHS, in ascending order. The last padded length fits all sentences. The
    method is dynamic programming over the histogram of lengths.
    """
    units = -(-lengths // LENGTHS)
    top = int(units.max())
    # below[u]: the number of sentences of at most u units.
    below = np.concatenate([[0], np.cumsum(np.bincount(units, minlength=top + 1)[1:])])
    # cost[u]: minimum padded size of all sentences of at most u units, with the buckets used so far.
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


class Epoch(NamedTuple):
    """The batches of one epoch, each as (length bucket, rows of the token store), and the token store."""
    store: TokenStore
    batches: list[tuple[int | np.integer, Int[np.ndarray, ' rows']]]


def padded_lengths(store: TokenStore) -> Int[np.ndarray, ' pairs']:
    """Returns the padded length that each pair needs: the tokens of the longer side, plus one end token."""
    return np.maximum(store.lengths('source'), store.lengths('target')) + 1


def batch_shapes(lengths: Int[np.ndarray, ' pairs'], *, tokens: int, num_buckets: int, longest: int | None = None,
                 ) -> tuple[Int[np.ndarray, ' buckets'], Int[np.ndarray, ' buckets']]:
    """Returns the padded length and the number of rows of each bucket. BatchPlan describes the arguments.

    Raises:
      UserError: if `tokens` is too small for a batch of ROWS sentences of the greatest length.
    """
    buckets = np.minimum(bucket_lengths(lengths, num_buckets), longest or sys.maxsize)
    rows = tokens // buckets // ROWS * ROWS
    if not rows.min():
        raise UserError(f'config.batch.tokens={tokens}: too small, because a batch must have {ROWS} sentences of up to '
                        f'{buckets.max()} tokens. Use at least {ROWS * buckets.max()}, or lower config.data.max_length')
    return buckets, rows


class BatchPlan:
    """Batches of sentence pairs, one batch for every step from 0 on.

    Every epoch contains every sentence pair exactly once. The pairs of each length bucket are shuffled and divided into
    batches of at most `tokens` padded target positions. Then the batches are shuffled. `len(plan)` is the number of
    batches in an epoch.
    """

    def __init__(self, store: TokenStore, *, tokens: int, num_buckets: int, seed: int | None,
                 longest: int | None = None, links: TokenLinks | None = None):
        """Plans every epoch.

        Args:
          store: the sentence pairs.
          tokens: config.batch.tokens.
          num_buckets: config.batch.buckets.
          seed: the seed of the order. With None, the shortest sentences are first, for evaluation.
          longest: the maximum padded length of a batch, such as the number of learned positions; None for no limit.
          links: the gold links of the rows of the store, which are added to the batches.

        Raises:
          UserError: if `tokens` is too small for a batch of ROWS sentences of the greatest length.
        """
        lengths = padded_lengths(store)
        self.bucket_lengths, self.rows = batch_shapes(lengths, tokens=tokens, num_buckets=num_buckets, longest=longest)
        self._store, self._seed, self._links = store, seed, links
        # A table of all lengths is faster than a search for each pair. Small integers use less memory.
        self._bucket = np.searchsorted(self.bucket_lengths, np.arange(lengths.max() + 1)).astype(np.int16)[lengths]
        counts = np.bincount(self._bucket, minlength=len(self.bucket_lengths))
        self._length = int(np.sum(-(-counts // self.rows)))
        self.padding_share = 1 - (store.lengths('target').sum() + len(store)) / np.sum(
            -(-counts // self.rows) * self.rows * self.bucket_lengths)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def __len__(self) -> int:
        return self._length

    def __call__(self, step: int) -> tuple[int | np.integer, Int[np.ndarray, ' rows']]:
        """Returns the bucket of batch `step`, and the rows of the store that are in the batch."""
        epoch, index = divmod(step, len(self))
        return self._epoch(epoch).batches[index]

    def batch(self, step: int, part: Part = ALL) -> Batch:
        """Returns batch `step`. The arrays have the static shape [rows, length] of the bucket.

        Rows without a sentence pair are padding.
        """
        (bucket, sentences), store = self(step), self._epoch(step // len(self)).store
        rows = part.rows(int(self.rows[bucket]))
        shape = rows.stop - rows.start, int(self.bucket_lengths[bucket])
        source, target, targets = (np.full(shape, PAD, np.int32) for _ in range(3))
        links = None if self._links is None else np.zeros((*shape, shape[1]), bool)
        for row, sentence in enumerate(sentences[rows]):
            source_tokens = store.tokens('source', sentence)
            target_tokens = store.tokens('target', sentence)
            # Assigns slices, because assigning single tokens would take most of the time.
            source[row, :len(source_tokens)], source[row, len(source_tokens)] = source_tokens, EOS
            target[row, 1:len(target_tokens) + 1], target[row, 0] = target_tokens, BOS
            targets[row, :len(target_tokens)], targets[row, len(target_tokens)] = target_tokens, EOS
            if self._links is not None and links is not None:
                links[row, :len(target_tokens), :len(source_tokens)] = self._links.matrix(
                    sentence, source_tokens, target_tokens)
        batch: Batch = {'inputs': {'source': source, 'target': target}, 'targets': targets,
                        'weights': (targets != PAD).astype(np.float32)}
        return batch if links is None else {**batch, 'links': links}

    def describe(self) -> str:
        """Returns a description of the batches for the log, in one line."""
        shapes = ', '.join(f'{rows} x {length}' for rows, length in zip(self.rows, self.bucket_lengths, strict=True))
        return (f'{len(self)} batches per epoch, of {shapes} sentences x tokens; '
                f'{100 * self.padding_share:.1f} % of the targets are padding')

    def _plan_epoch(self, epoch: int) -> Epoch:
        rng = None if self._seed is None else np.random.default_rng([self._seed, epoch])
        order = np.arange(len(self._bucket)) if rng is None else rng.permutation(len(self._bucket))
        buckets, batches = self._bucket[order], []
        for bucket, rows in enumerate(self.rows):
            members = order[buckets == bucket]
            batches += [(bucket, members[begin:begin + rows]) for begin in range(0, len(members), rows)]
        return Epoch(self._store, batches if rng is None else [
            batches[index] for index in rng.permutation(len(batches))])


class _Steps:
    """Makes a plan available as a random-access data source for the `grain` library."""

    def __init__(self, plan: Plan, first: int, last: int, part: Part):
        self._plan, self._first, self._last, self._part = plan, first, last, part

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> Batch:
        return self._plan.batch(self._first + index, self._part)


def prefetch(plan: Plan, first: int, last: int, part: Part = ALL) -> Iterator[Batch]:
    """Yields the batches `first` to `last` - 1, or `part` of each batch. A thread prepares the batches in advance."""
    import grain  # imported here, because the import is slow and decoding does not need grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(grain.MapDataset.source(_Steps(plan, first, last, part)).to_iter_dataset(options))
