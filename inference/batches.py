"""A search over a batch that finished sentences leave, so that the many short ones do not wait for the few long ones.

The search stops when half of the rows would do for the sentences that are still open, and goes on with those. The past
of the hypotheses is no longer than needed either: it begins with room for ROOM steps and doubles. Rows and room are
powers of two, so that few shapes are compiled.

Most operations of a step are too small for XLA to share them out among cores, and a step needs the one before it. So on
a CPU each core has a batch of its own: `threads_for`, `find_in_threads`.
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

FEWEST = 16  # rows of the smallest batch that is left of a larger one
SHARE = 32  # rows of the smallest batch that a thread is given
ROOM = 32  # steps that a past has room for at first


class Batch(NamedTuple):
    """The sentences of a search.

    Attributes:
      source: int [batch, length], the tokens that the module encodes.
      start: int [batch], the token that decoding starts from.
      limits: int [batch], the greatest number of new tokens, which is at most the search's `max_length`.
      numbers: uint [batch], what the draws of a sentence depend on, besides the seed.
      prefixes: int [batch, length], the tokens that outputs begin with; None: of no sentence (search.py).
      places: int [batch], the states of an automaton that outputs begin in; None: there is none.
    """
    source: Any
    start: Any
    limits: Any
    numbers: Any
    prefixes: Any = None
    places: Any = None


def threads_for(batch_size: int) -> int:
    """The threads that share `batch_size` rows, SHARE or more each: one for each core of a CPU.

    Devices that compute by themselves, or together, get all rows at once.
    """
    alone = jax.default_backend() == 'cpu' and jax.device_count() == 1
    return max(1, min(_cores(), batch_size // SHARE)) if alone else 1


def find_in_threads(find: Callable[[Sequence[int]], Hypotheses], batches: Sequence[Sequence[int]],
                    threads: int) -> Iterator[Hypotheses]:
    """What `find` returns for each batch of rows, in their order; so many are searched at a time."""
    if min(threads, len(batches)) < 2:  # JAX's context managers are those of a thread: the caller's where possible
        yield from map(find, batches)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(find, batches)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


class BatchSearch:
    """Searches with one module; each shape is compiled once, whichever thread asks for it."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._compiling = threading.Lock()  # held while a program is started, which is when it may be compiled
        self._begin = jax.jit(self._read, static_argnames=('search', 'room'))
        self._advance = jax.jit(self._go_on, static_argnames='search', donate_argnames='state')
        self._whole = jax.jit(self._to_the_end, static_argnames='search')
        self._keep = jax.jit(_kept, static_argnames='more_keys')

    def find(self, params: Params, search: Search, batch: Batch, seed: int, draw: int = 0,
             follow: Follow | None = None) -> Hypotheses:
        """What `search` finds, as NumPy arrays; draws depend on the seed, the sentence's number and `draw`.

        A batch that lies on several devices stays whole, from the first step to the last.
        """
        if isinstance(batch.source, jax.Array) and len(batch.source.sharding.device_set) > 1:
            return process_allgather(self._whole(params, batch, np.uint32(seed), np.uint32(draw), follow,
                                                 search=search), tiled=True)
        rows, room = len(batch.source), min(ROOM, search.max_length)
        # The seed is an argument of the compiled program, so another seed compiles nothing.
        with self._compiling:
            state = self._begin(params, batch, np.uint32(seed), np.uint32(draw), search=search, room=room)
        sentences, found = np.arange(rows), None  # those that the rows are of; what is known of every sentence
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
            more = min(room, search.max_length - room) if step == room else 0
            with self._compiling:
                state = self._keep(state, keep, more_keys=more * _sharing(search))
            sentences, rows, room = sentences[keep], len(keep), room + more

    # What is traced. Draws are independent, so each is a sentence of its own to the module: it looks at no others.

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


def _sharing(search: Search) -> int:
    """Hypotheses that share a past."""
    return search.beam if isinstance(search, Beam) else 1


def _kept(state: Any, rows: Int[Array, ' rows'], *, more_keys: int) -> Any:
    """The state of some of the sentences, with more room."""
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
