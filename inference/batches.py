"""A batched search that removes finished sentences, so that short sentences do not wait for long sentences.

When the unfinished sentences fit into half of the rows, the search continues with half of the rows. The cache starts
with space for a few steps (ROOM), and its size doubles when necessary. The numbers of rows and steps are powers of
two, so that few shapes are compiled.

Most operations of a step are too small to divide them among cores, and each step depends on the previous step. So on a
CPU, each core searches a different batch (`threads_for`, `find_in_threads`).
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Array, Int

from inference.search import Beam, DecodeStep, Follow, Hypotheses, Search, advance
from model import Params

FEWEST = 16  # minimum number of rows of a batch that shrinks
SHARE = 32  # minimum number of rows for each thread
# Smallest and largest number of steps in the first cache. A step reads the whole cache, so the cache of many rows is
# small at first. With 16 steps, beam search with configs/multi30k.py takes 0.91 times as long as with 32 steps. With 8
# steps, it takes 0.90 times as long, but more programs are compiled. The keys of few rows are read quickly, so their
# cache is larger. With 64 steps for few rows instead of 16, the programs of the first search compile in 30 s instead of
# 37 s, and a search takes 1.02 times as long. `_first_room` has the rule for all numbers of rows (docs/results.md).
ROOM = 16
ROOM_OF_FEW = 64  # for at most FEWEST rows


class SearchBatch(NamedTuple):
    """The sentences of a search.

    Attributes:
      source: int [batch, length], the tokens that the module encodes.
      start: int [batch], the first input token of the decoder.
      limits: int [batch], the maximum number of new tokens, at most the search's `max_length`.
      numbers: uint [batch], the number of each sentence. Samples of a sentence depend on its number and on the seed.
      prefixes: int [batch, length], the tokens that outputs begin with, or None (search.py).
      places: int [batch], the initial states of the automaton in constraints.py, or None.
    """
    source: Any
    start: Any
    limits: Any
    numbers: Any
    prefixes: Any = None
    places: Any = None


def threads_for(batch_size: int) -> int:
    """Returns the number of threads for `batch_size` rows: one per core of a CPU, with at least SHARE rows each.

    With an accelerator, or with several devices, returns 1.
    """
    one_cpu = jax.default_backend() == 'cpu' and jax.device_count() == 1
    return max(1, min(_cores(), batch_size // SHARE)) if one_cpu else 1


def rows_per_thread(batch_size: int, threads: int, count: int) -> int:
    """Returns the number of rows in a batch of each thread, for `count` sentences.

    The rows of `batch_size` are divided among the threads. For few sentences, a thread has fewer rows, but at least
    SHARE rows, so that no thread searches all sentences while the other threads are idle.
    """
    rows = -(-batch_size // threads)
    while threads > 1 and rows // 2 >= SHARE and rows // 2 * threads >= count:
        rows //= 2
    return rows


def find_in_threads(find: Callable[[Sequence[int]], Hypotheses], batches: Sequence[Sequence[int]],
                    threads: int) -> Iterator[Hypotheses]:
    """Yields the result of `find` for each batch of rows, in order. `threads` batches are searched at the same time.

    An error or Ctrl-C takes effect at once. Searches that are already running end in the background.
    """
    if min(threads, len(batches)) < 2:  # JAX's context managers apply only to the caller's thread
        yield from map(find, batches)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(find, batches)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


class BatchSearch:
    """A search with one module, for use in several threads. Each shape is compiled only once."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._compiling = threading.Lock()  # held during a call of a program, because the first call compiles it
        self._begin = jax.jit(self._read, static_argnames=('search', 'room'))
        self._advance = jax.jit(self._go_on, static_argnames='search', donate_argnames='state')
        self._whole = jax.jit(self._to_the_end, static_argnames='search')
        self._keep = jax.jit(_kept, static_argnames='more_keys')

    def find(self, params: Params, search: Search, batch: SearchBatch, seed: int, draw: int = 0,
             follow: Follow | None = None) -> Hypotheses:
        """Returns the result of `search`, as NumPy arrays.

        Random samples depend on the seed, the number of the sentence and `draw`. Another value of `draw` gives other
        samples for the same sentence. If the batch is on several devices, finished sentences are not removed.
        """
        if isinstance(batch.source, jax.Array) and len(batch.source.sharding.device_set) > 1:
            return process_allgather(self._whole(params, batch, np.uint32(seed), np.uint32(draw), follow,
                                                 search=search), tiled=True)
        rows, room = len(batch.source), min(_first_room(len(batch.source)), search.max_length)
        # The seed is an argument of the compiled program, so another seed needs no compilation.
        with self._compiling:
            state = self._begin(params, batch, np.uint32(seed), np.uint32(draw), search=search, room=room)
        sentences, found = np.arange(rows), None  # the sentence of each row; the results of all sentences so far
        while True:
            half = 2 ** (rows - 1).bit_length() // 2
            with self._compiling:
                state, *news = self._advance(params, state, room, half + 1 if half >= FEWEST else 1, follow,
                                             search=search)
            step, is_open, now = jax.device_get(news)
            found = now if found is None else jax.tree.map(
                lambda whole, part, rows=sentences: _with_rows(whole, rows, part), found, now)
            if step == search.max_length or not is_open.any():
                return found
            keep = np.argsort(~is_open, kind='stable')[:max(FEWEST, 2 ** (int(is_open.sum()) - 1).bit_length())]
            larger = min(max(2 * room if step == room else room, _first_room(len(keep))), search.max_length)
            with self._compiling:
                state = self._keep(state, keep, more_keys=(larger - room) * _sharing(search))
            sentences, rows, room = sentences[keep], len(keep), larger

    # JAX traces the following methods. Samples are independent, so each sample is a separate row for the module.

    def _read(self, params, batch, seed, draw, *, search, room):
        memory = self.module.apply({'params': params}, batch.source, method='encode')
        if not isinstance(search, Beam):
            memory = jax.tree.map(lambda leaf: jnp.repeat(leaf, search.num_samples, axis=0), memory)
        sharing = _sharing(search)
        cache: Any = self.module.apply({'params': params}, memory, sharing, search.max_length, method='init_cache')
        cache = cache.resized((room - search.max_length) * sharing)
        if isinstance(search, Beam):
            return search.begin(cache, batch.start, batch.limits, prefixes=batch.prefixes, places=batch.places)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(jax.random.key(seed), draw), batch.numbers)
        return search.begin(cache, batch.start, batch.limits, keys, prefixes=batch.prefixes, places=batch.places)

    def _go_on(self, params, state, until, at_least, follow=None, *, search):
        state = advance(search, self._decode_step(params, search), state, until, at_least, follow)
        return state, state.step, search.open(state), search.found(state)

    def _to_the_end(self, params, batch, seed, draw, follow=None, *, search):
        state = self._read(params, batch, seed, draw, search=search, room=search.max_length)
        return search.found(advance(search, self._decode_step(params, search), state, search.max_length,
                                    follow=follow))

    def _decode_step(self, params: Params, search: Search) -> DecodeStep:
        def step(tokens, cache):
            answer: Any = self.module.apply({'params': params}, tokens.reshape(-1, _sharing(search)), cache,
                                            method='decode_step')
            logits, cache = answer
            return logits.reshape(*tokens.shape, -1), cache

        return step


def _first_room(rows: int) -> int:
    """Returns the number of steps in the first cache of `rows` sentences: half as many for twice the rows."""
    return min(max(ROOM, (ROOM_OF_FEW * FEWEST) >> (rows - 1).bit_length()), ROOM_OF_FEW)


def _sharing(search: Search) -> int:
    """Returns how many hypotheses of a sentence share one row of the cache."""
    return search.beam if isinstance(search, Beam) else 1


def _kept(state: Any, rows: Int[Array, ' rows'], *, more_keys: int) -> Any:
    """Returns the search state of the given rows, with a larger cache."""
    batch = len(state.limits)

    def take(leaf):
        if not leaf.ndim:
            return leaf
        return leaf.reshape(batch, -1, *leaf.shape[1:])[rows].reshape(-1, *leaf.shape[1:])

    state = jax.tree.map(take, state)
    return state.replace(cache=state.cache.resized(more_keys))


def _with_rows(whole, rows, part):
    whole = whole.copy()
    whole[rows] = part
    return whole
