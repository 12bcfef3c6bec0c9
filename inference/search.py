"""Decoding with an explicit cache: greedy search, sampling and beam search.

A search calls the function `decode_step` of a model: (tokens [batch, beam], cache) -> (logits [batch, beam, vocab],
cache). The search begins with an empty cache. `start` [batch] is the token that the model reads first: the start token
of a translation, or the last token of a prompt. `limits` [batch] is the maximum number of tokens of each sentence. An
output that reaches its limit is completed in one of two ways. If `cut` is false (a translation), the last token is
forced to be the end token. If `cut` is true (a continuation), the output stops without an end token.

The caller may require that an output begins with a prefix. The caller may also pass an automaton that excludes words to
avoid (`Follow`, inference/constraints.py). Without prefixes and automaton, a step has no operations for these features.

A search may forbid tokens, but this does not change any probability. The model computes the log-probabilities over its
whole vocabulary, even if the end token is forced. Teacher forcing gives the same values for the same tokens.

`Sample` and `Beam` define the beginning, the step and the end of the two searches; `advance` is the loop.
inference/batches.py stops a search between two steps, and continues with only the sentences that are still open (not
finished).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kernels.largest import largest, log_normaliser
from model.cache import Cache

DecodeStep = Callable[[Int[Array, 'batch beam'], Cache], tuple[Float[Array, 'batch beam vocab'], Cache]]
IMPOSSIBLE = jnp.finfo(jnp.float32).min
NEW_WORD = -1  # in a prefix: any token that begins a word


class Hypotheses(flax.struct.PyTreeNode):
    """The result of a search: hypotheses, best score first.

    Attributes:
      tokens: int [batch, hypotheses, length], including the end token if there is one, then padding.
      log_probs: float [batch, hypotheses], log-probability of the tokens under the model.
      scores: float [batch, hypotheses], log_probs / length_penalty. Hypotheses are ranked by these scores. The score of
        a missing hypothesis is IMPOSSIBLE.
    """
    tokens: Any  # any type, because tree.map may replace the arrays
    log_probs: Any
    scores: Any


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The special tokens of a vocabulary. A search never produces the tokens `pad`, `bos` and `others`."""
    pad: int
    bos: int
    eos: int
    others: tuple[int, ...] = ()

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The tokens that a search never produces."""
        return self.pad, self.bos, *self.others


class Follow(NamedTuple):
    """Rules about which tokens a search may choose next.

    Attributes:
      table: int [states, vocab], the state after each token, or DEAD (-1) if the token is excluded; None without
        automaton.
      ends: int, the number of states in which an output may end. These states have the lowest numbers.
      new_word: bool [vocab], the tokens that begin a word; required if a prefix has NEW_WORD.
      joins: bool [vocab], the tokens that begin with a letter or a digit, so that they continue a word. If the most
        probable token would begin and complete a word to avoid, the tokens of this mask are excluded, too. Otherwise a
        search would often append a few letters to the previous word.
    """
    table: Any = None
    ends: Any = None
    new_word: Any = None
    joins: Any = None


def length_penalty(length: Int[Array, '*n'] | int, alpha: float) -> Float[Array, '*n'] | float:
    """Returns ((5 + length) / 6)^alpha (Wu et al. 2016, arXiv:1609.08144, eq. 14). `length` includes the end token."""
    return ((5.0 + length) / 6.0) ** alpha


def _wanted(state, vocabulary):
    """Returns an array [batch] with the entry of each prefix for this step: a token, NEW_WORD or padding."""
    return jnp.take(state.prefixes, state.step, axis=1, mode='fill', fill_value=vocabulary.pad)


def _excluded(logits, state, vocabulary, cut, follow):
    """Returns a mask of the excluded tokens, [batch, hypotheses, vocab], or None if no token can be excluded."""
    excluded = None
    if state.places is not None:
        behind = follow.table[state.places]
        last_choice = (state.step >= state.limits - (1 if cut else 2))[:, None, None]
        excluded = (behind < 0) | last_choice & (behind >= follow.ends)
        if follow.joins is not None:
            best = logits.argmax(axis=-1)
            after = jnp.take_along_axis(behind, best[..., None], axis=-1)[..., 0]
            begins = follow.new_word[best] & ((after < 0) | (after >= follow.ends)) & (state.places < follow.ends)
            excluded |= begins[..., None] & follow.joins
    if state.prefixes is not None and follow is not None and follow.new_word is not None:
        inside = (_wanted(state, vocabulary) == NEW_WORD)[:, None, None] & ~follow.new_word
        excluded = inside if excluded is None else excluded | inside
    return excluded


def _next_places(places, token, follow):
    """Returns the automaton's state after each token. Entries of dead hypotheses are arbitrary."""
    return None if places is None else jnp.maximum(follow.table[places, token], 0)


def _best(logits, count, state, vocabulary, cut, follow):
    """Returns the `count` most probable allowed tokens, and their log-probabilities (IMPOSSIBLE for missing tokens).

    Padding, the start token and the vocabulary's `others` are never allowed. If `cut` is false, only the end token is
    allowed at the limit. Within a prefix, only the token of the prefix is allowed.
    """
    excluded = _excluded(logits, state, vocabulary, cut, follow)
    if excluded is None:
        values, tokens = largest(logits, count, vocabulary.forbidden)
        # The normaliser includes the forbidden tokens.
        forbidden = [logits[..., token, None] for token in vocabulary.forbidden]
        greatest = functools.reduce(jnp.maximum, forbidden, values[..., :1])
    else:
        values, tokens = largest(jnp.where(excluded, -jnp.inf, logits), count, vocabulary.forbidden)
        greatest = logits.max(axis=-1, keepdims=True)
    normaliser = log_normaliser(logits, greatest)[..., None]
    values = jnp.maximum(values - normaliser, IMPOSSIBLE)
    if state.prefixes is not None:
        wanted = _wanted(state, vocabulary)[:, None, None]
        log_prob = jnp.take_along_axis(logits, jnp.maximum(wanted, 0), axis=-1) - normaliser
        forced = (wanted != vocabulary.pad) & (wanted != NEW_WORD)
        values = jnp.where(forced, jnp.where(jnp.arange(count) == 0, log_prob, IMPOSSIBLE), values)
        tokens = jnp.where(forced, wanted, tokens)
    if cut:
        return values, tokens
    at_limit = (state.step >= state.limits - 1)[:, None, None]
    only_end = jnp.where(jnp.arange(count) == 0, logits[..., vocabulary.eos, None] - normaliser, IMPOSSIBLE)
    return jnp.where(at_limit, only_end, values), jnp.where(at_limit, vocabulary.eos, tokens)


def _allowed(logits, vocabulary):
    return jnp.ones(logits.shape[-1], bool).at[jnp.array(vocabulary.forbidden)].set(False)


def _spread(places, shape):
    return None if places is None else jnp.broadcast_to(places[:, None], shape).astype(jnp.int32)


class SampleState(flax.struct.PyTreeNode):
    """The state of a sampling search (`Sample`) between two steps."""
    step: Any
    limits: Any     # [batch]
    keys: Any       # [batch], or None
    last: Any       # [batch, samples] the token that is read next
    ended: Any      # [batch, samples]
    tokens: Any     # [batch, samples, length]
    log_probs: Any  # [batch, samples]
    lengths: Any    # [batch, samples]
    cache: Any
    prefixes: Any = None  # [batch, length]
    places: Any = None    # [batch, samples]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Sampling of `num_samples` outputs for each sentence, token by token. Temperature 0 is greedy search.

    The samples for a sentence depend only on the key of the sentence, not on the other sentences in the batch.

    Attributes:
      vocabulary: the special tokens.
      max_length: the maximum number of steps. The limit of each sentence must be at most this number.
      num_samples: the number of outputs for each sentence.
      alpha: the exponent of the length penalty. Outputs are ranked by log-probability / length_penalty.
      cut: if true, an output that reaches its limit stops without an end token. If false, its last token is forced to
        be the end token.
      temperature: the divisor of the logits.
      top_k: the number of most probable tokens from which a token is drawn (0: all).
      top_p: a probability, applied after top_k. A token is drawn from the smallest set of most probable tokens whose
        total probability is at least top_p (Holtzman et al. 2020, arXiv:1904.09751).
    """
    vocabulary: Vocabulary
    max_length: int
    num_samples: int = 1
    alpha: float = 0.0
    cut: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def begin(self, cache: Cache, start: Int[Array, ' batch'], limits: Int[Array, ' batch'],
              keys: Key[Array, ' batch'] | None = None, *, prefixes: Int[Array, 'batch length'] | None = None,
              places: Int[Array, ' batch'] | None = None) -> SampleState:
        """Returns the state before the first step.

        `prefixes` are the tokens with which the outputs must begin, padded to the same length. `places` are the initial
        states of the automaton in `Follow.table`.
        """
        shape = limits.shape[0], self.num_samples
        return SampleState(step=jnp.zeros((), jnp.int32), limits=limits, keys=keys,
                           last=jnp.broadcast_to(start[:, None], shape).astype(jnp.int32),
                           ended=jnp.broadcast_to((limits <= 0)[:, None], shape),
                           tokens=jnp.full((*shape, self.max_length), self.vocabulary.pad, jnp.int32),
                           log_probs=jnp.zeros(shape, jnp.float32), lengths=jnp.zeros(shape, jnp.int32), cache=cache,
                           prefixes=prefixes, places=_spread(places, shape))

    def open(self, state: SampleState) -> Bool[Array, ' batch']:
        """Returns a mask of the sentences that have an unfinished output."""
        return ~state.ended.all(axis=1)

    def step(self, decode_step: DecodeStep, state: SampleState, follow: Follow | None = None) -> SampleState:
        """Draws the next token of each output, and returns the new state."""
        logits, cache = decode_step(state.last, state.cache)
        token, new = self._choose(logits, state, follow)
        token = jnp.where(state.ended, self.vocabulary.pad, token).astype(jnp.int32)
        return state.replace(
            step=state.step + 1, last=token, cache=cache, places=_next_places(state.places, token, follow),
            ended=state.ended | (token == self.vocabulary.eos) | (state.step >= state.limits - 1)[:, None],
            tokens=state.tokens.at[:, :, state.step].set(token),
            log_probs=jnp.where(state.ended, state.log_probs, state.log_probs + new),
            lengths=jnp.where(state.ended, state.lengths, state.lengths + 1))

    def _choose(self, logits, state, follow):
        if self.temperature == 0:
            values, tokens = _best(logits, 1, state, self.vocabulary, self.cut, follow)
            return tokens[..., 0], values[..., 0]
        assert state.keys is not None, 'a temperature above 0 needs keys'
        keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
        allowed = jnp.where(_allowed(logits, self.vocabulary), logits, IMPOSSIBLE)
        if (excluded := _excluded(logits, state, self.vocabulary, self.cut, follow)) is not None:
            allowed = jnp.where(excluded, IMPOSSIBLE, allowed)
        token = jax.vmap(jax.random.categorical)(
            keys, filter_logits(allowed, self.temperature, self.top_k, self.top_p))
        if not self.cut:
            token = jnp.where((state.step >= state.limits - 1)[:, None], self.vocabulary.eos, token)
        if state.prefixes is not None:
            wanted = _wanted(state, self.vocabulary)[:, None]
            token = jnp.where((wanted != self.vocabulary.pad) & (wanted != NEW_WORD), wanted, token)
        chosen = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
        return token, chosen - jax.nn.logsumexp(logits, axis=-1)

    def found(self, state: SampleState) -> Hypotheses:
        """Returns the outputs that the search has produced so far."""
        scores = state.log_probs / length_penalty(state.lengths, self.alpha)
        best = jnp.argsort(-scores, axis=1)
        rows = jnp.arange(len(best))[:, None]
        return Hypotheses(state.tokens[rows, best], state.log_probs[rows, best], scores[rows, best])


def filter_logits(logits: Float[Array, '*batch vocab'], temperature: float, top_k: int,
                  top_p: float) -> Float[Array, '*batch vocab']:
    """Returns the logits of the distribution that `Sample` draws from, with IMPOSSIBLE for excluded tokens."""
    logits = logits / temperature
    if top_k:
        smallest = largest(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < smallest, IMPOSSIBLE, logits)
    if top_p < 1.0:
        order = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(order, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # total probability of the more probable tokens
        smallest = jnp.min(jnp.where(before < top_p, order, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, IMPOSSIBLE, logits)
    return logits


class BeamState(flax.struct.PyTreeNode):
    """The state of a beam search (`Beam`) between two steps."""
    step: Any
    limits: Any         # [batch]
    last: Any           # [batch, beam] the token that is read next
    alive_tokens: Any   # [batch, beam, length]
    alive_scores: Any   # [batch, beam] log-probabilities; IMPOSSIBLE where there is no hypothesis
    ended_tokens: Any   # [batch, beam, length]
    ended_probs: Any    # [batch, beam] log-probabilities
    ended_scores: Any   # [batch, beam] with the length penalty; IMPOSSIBLE where there is no hypothesis
    ended_count: Any    # [batch] number of hypotheses that have ended, including hypotheses that are no longer kept
    cache: Any
    prefixes: Any = None  # [batch, length]
    places: Any = None    # [batch, beam]


@dataclasses.dataclass(frozen=True)
class Beam:
    """Beam search: at each step, the `beam` best extensions of a sentence's hypotheses are kept.

    Hypotheses that end, or reach their limit, move from the beam to the list of ended hypotheses. So a beam of 1 is
    greedy search, and a beam that holds all hypotheses is exhaustive search. The search for a sentence stops when no
    alive hypothesis can become one of the n best. A log-probability can only decrease. So the score of an alive
    hypothesis is at most its current log-probability divided by the length penalty at the limit. With `patience`, the
    search also stops when enough hypotheses have ended (Kasai et al. 2022, arXiv:2204.05424).

    Attributes:
      vocabulary: the special tokens.
      max_length: the maximum number of steps. The limit of each sentence must be at most this number.
      beam: the number of hypotheses of a sentence that are alive at a time.
      alpha: the exponent of the length penalty: the score is log-probability / length_penalty.
      n_best: the number of hypotheses to return.
      patience: the search for a sentence also stops when round(beam * patience) of its hypotheses, and at least one,
        have ended. Halves are rounded up. So it may find fewer than n_best. With 0, this condition is not used.
      cut: if true, a hypothesis that reaches its limit stops without an end token. If false, its last token is forced
        to be the end token.
    """
    vocabulary: Vocabulary
    max_length: int
    beam: int
    alpha: float = 0.6
    n_best: int = 1
    patience: float = 0.0
    cut: bool = False

    def begin(self, cache: Cache, start: Int[Array, ' batch'], limits: Int[Array, ' batch'], *,
              prefixes: Int[Array, 'batch length'] | None = None,
              places: Int[Array, ' batch'] | None = None) -> BeamState:
        """Returns the state before the first step: one empty hypothesis for each sentence.

        If the limit of a sentence is 0, its empty hypothesis has already ended. `Sample.begin` explains the arguments.
        """
        shape = limits.shape[0], self.beam
        no_scores = jnp.full(shape, IMPOSSIBLE)
        empty = jnp.full((*shape, self.max_length), self.vocabulary.pad, jnp.int32)
        ends = limits <= 0
        ended = no_scores.at[:, 0].set(jnp.where(ends, 0.0, IMPOSSIBLE))
        return BeamState(step=jnp.zeros((), jnp.int32), limits=limits,
                     last=jnp.broadcast_to(start[:, None], shape).astype(jnp.int32),
                     alive_tokens=empty, alive_scores=no_scores.at[:, 0].set(jnp.where(ends, IMPOSSIBLE, 0.0)),
                     ended_tokens=empty, ended_probs=ended, ended_scores=ended,
                     ended_count=ends.astype(jnp.int32), cache=cache, prefixes=prefixes, places=_spread(places, shape))

    def open(self, state: BeamState) -> Bool[Array, ' batch']:
        """Returns a mask of the sentences in which an alive hypothesis may still become one of the n best."""
        best_alive = state.alive_scores.max(axis=1)
        attainable = best_alive / length_penalty(state.limits, max(self.alpha, 0.0))
        attainable = jnp.where(best_alive > IMPOSSIBLE, attainable, IMPOSSIBLE)
        if self.alpha < 0:  # the penalty decreases with the length, so the shortest continuation gives the bound
            attainable = best_alive / length_penalty(state.step + 1, self.alpha)
        is_open = (state.ended_scores[:, self.n_best - 1] < attainable) & (state.limits > state.step)
        if self.patience:
            is_open &= state.ended_count < max(1, math.floor(self.beam * self.patience + 0.5))
        return is_open

    def step(self, decode_step: DecodeStep, state: BeamState, follow: Follow | None = None) -> BeamState:
        """Selects the `beam` best extensions of each hypothesis, then the `beam` best extensions of each sentence."""
        logits, cache = decode_step(state.last, state.cache)
        batch, beam, size = logits.shape
        rows, width = jnp.arange(batch)[:, None], min(beam, size)
        log_probs, tokens = _best(logits, width, state, self.vocabulary, self.cut, follow)
        possible = (log_probs > IMPOSSIBLE) & (state.alive_scores > IMPOSSIBLE)[..., None]
        if state.places is not None:
            possible &= ~self._given_up(logits, tokens[..., 0], state, follow)[..., None]
        candidates = jnp.where(possible, state.alive_scores[..., None] + log_probs, IMPOSSIBLE)
        scores, index = jax.lax.top_k(candidates.reshape(batch, -1), beam)
        if state.places is not None and beam > 1:
            scores, index = self._with_free(candidates, scores, index, tokens, state, follow)
        parent, token = index // width, tokens.reshape(batch, -1)[rows, index].astype(jnp.int32)
        sequences = state.alive_tokens[rows, parent].at[:, :, state.step].set(token)
        ends = (token == self.vocabulary.eos) | (state.step >= state.limits - 1)[:, None]
        ends &= scores > IMPOSSIBLE
        if self.patience:  # further steps must not change the result of a finished sentence
            ends &= self.open(state)[:, None]

        new_scores = jnp.where(ends, scores / length_penalty(state.step + 1, self.alpha), IMPOSSIBLE)
        ended_scores, best = jax.lax.top_k(jnp.concatenate([state.ended_scores, new_scores], axis=1), beam)
        return state.replace(
            step=state.step + 1, last=token,
            alive_tokens=sequences, alive_scores=jnp.where(ends, IMPOSSIBLE, scores),
            ended_tokens=jnp.concatenate([state.ended_tokens, sequences], axis=1)[rows, best],
            ended_probs=jnp.concatenate([state.ended_probs, scores], axis=1)[rows, best],
            ended_scores=ended_scores, ended_count=state.ended_count + ends.sum(axis=1, dtype=jnp.int32),
            places=None if state.places is None else _next_places(state.places[rows, parent], token, follow),
            cache=cache.replace(state=jax.tree.map(lambda leaf: leaf[rows, parent], cache.state)))

    def _with_free(self, candidates, scores, index, tokens, state, follow):
        """Replaces the worst of the selected candidates if all of them end with a word to avoid.

        The next step drops such hypotheses (`_given_up`). So the replacement is the best candidate that does not end
        with a word to avoid.
        """
        free = jnp.where(follow.table[state.places[..., None], tokens] < follow.ends, candidates, IMPOSSIBLE)
        free = free.reshape(len(index), -1)
        has_free = (jnp.take_along_axis(free, index, axis=1) > IMPOSSIBLE).any(axis=1)
        index = index.at[:, -1].set(jnp.where(has_free | (free.max(axis=1) <= IMPOSSIBLE), index[:, -1],
                                              free.argmax(axis=1).astype(index.dtype)))
        return jnp.take_along_axis(candidates.reshape(free.shape), index, axis=1), index

    def _given_up(self, logits, best, state, follow):
        """Returns a mask [batch, beam] of hypotheses to drop. Their text ends with the letters of a word to avoid.

        After these letters, only another letter may follow. But the most probable token would end the word, and is
        excluded. Another letter would often make a word that does not exist, so the hypothesis is dropped. If a
        sentence has no other alive or ended hypothesis, its hypotheses are kept.
        """
        alive = state.alive_scores > IMPOSSIBLE
        most_probable = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0] >= logits.max(axis=-1)
        given_up = alive & (state.places >= follow.ends) & ~most_probable
        others = (alive & ~given_up).any(axis=1) | (state.ended_scores[:, 0] > IMPOSSIBLE)
        return given_up & others[:, None]

    def found(self, state: BeamState) -> Hypotheses:
        """Returns the hypotheses that have ended so far."""
        return Hypotheses(*(array[:, :self.n_best] for array in (state.ended_tokens, state.ended_probs,
                                                               state.ended_scores)))


Search = Sample | Beam


def advance(search: Search, decode_step: DecodeStep, state: Any, until: Int[Array, ''] | int,
            at_least: Int[Array, ''] | int = 1, follow: Follow | None = None) -> Any:
    """Runs steps until step `until`, or until fewer than `at_least` sentences are open."""
    def running(state):
        return (state.step < until) & (search.open(state).sum() >= at_least)

    return jax.lax.while_loop(running, functools.partial(search.step, decode_step, follow=follow), state)
