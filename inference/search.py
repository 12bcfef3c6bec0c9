"""Decoding over an explicit cache: greedy, sampling, beam.

A search takes `decode_step(tokens [batch, beam], cache) -> logits [batch, beam, vocab], cache`, any model's, and
an empty cache of as many hypotheses as it is to follow. `start` [batch] is the token that the model reads first:
the start token of a translation, the last one of a prompt. `limits` [batch] is the greatest number of tokens of
each sentence. What reaches it is complete in one of two ways: its last token is forced to be the end token
(a translation), or, with `cut`, it stays as it is, without an end token (a continuation of so many tokens).

A search may forbid tokens, but forbidding changes no probability: the log-probabilities are the model's own, over its
whole vocabulary, those of a forced end token too. They are what teacher forcing gives for the same tokens.

`Sample` and `Beam` are the two searches as what they are at the beginning, at a step and at the end; `advance` is the
loop. `sample` and `beam_search` run one to its end, in one program. inference/batches.py stops between two steps
instead, and goes on with the sentences that are not done.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from model.cache import Cache

DecodeStep = Callable[[Int[Array, 'batch beam'], Cache], tuple[Float[Array, 'batch beam vocab'], Cache]]
IMPOSSIBLE = jnp.finfo(jnp.float32).min
PARTS = 32  # of a row of logits, that are read side by side


class Hypotheses(flax.struct.PyTreeNode):
    """What a search found, the hypothesis of the best score first.

    Attributes:
      tokens: int [batch, hypotheses, length], the end token included if there is one, then padding.
      log_probs: float [batch, hypotheses], log-probability of the tokens under the model.
      scores: float [batch, hypotheses], log_probs / length_penalty, which ranks them; IMPOSSIBLE where there is none.
    """
    tokens: Any  # arrays; of a tree.map's result whatever that gives
    log_probs: Any
    scores: Any


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The special tokens that a search must know. `pad`, `bos` and `others` are never produced."""
    pad: int
    bos: int
    eos: int
    others: tuple[int, ...] = ()

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The tokens that are never produced."""
        return self.pad, self.bos, *self.others


def length_penalty(length: Int[Array, '*n'] | int, alpha: float) -> Float[Array, '*n'] | float:
    """The penalty ((5 + |Y|) / 6)^alpha, |Y| with the end token (Wu et al. 2016, arXiv:1609.08144, equation 14)."""
    return ((5.0 + length) / 6.0) ** alpha


def largest(logits: Float[Array, '*batch vocab'], count: int, forbidden: Sequence[int] = (),
            parts: int = PARTS) -> tuple[Float[Array, '*batch count'], Int[Array, '*batch count']]:
    """jax.lax.top_k of what is not forbidden: the `count` greatest, and where they are; of equal ones the first.

    On CPUs it reads a row once. A forbidden one counts as -inf.
    """
    exactly = functools.partial(_top_k, count=count, forbidden=forbidden)
    if logits.shape[-1] <= 2 * count * parts:
        return exactly(logits)
    columns = functools.partial(_largest_of_columns, count=count, forbidden=forbidden, parts=parts)
    return jax.lax.platform_dependent(logits, cpu=columns, default=exactly)


def _top_k(logits, count, forbidden=()):
    """For any number of axes: XLA on CPUs sorts what has more than two."""
    allowed = _allowed(logits, jnp.arange(logits.shape[-1]), forbidden)
    values, places = jax.lax.top_k(allowed.reshape(-1, logits.shape[-1]), count)
    return values.reshape(*logits.shape[:-1], count), places.reshape(*logits.shape[:-1], count)


def _allowed(logits, places, forbidden):
    for token in forbidden:
        logits = jnp.where(places == token, -jnp.inf, logits)
    return logits


def _largest_of_columns(logits, count, forbidden, parts):
    """With the parts of a row one below the other, they are in the `count` columns of the greatest maxima."""
    rows = _cut(logits, parts)
    width = rows[0].shape[-1]
    allowed = [_allowed(row, jnp.arange(width) + begin, [token for token in forbidden if 0 <= token - begin < width])
               for row, begin in zip(rows, range(0, parts * width, width), strict=True)]
    maxima, columns = _top_k(functools.reduce(jnp.maximum, allowed), count + 1)
    columns = jnp.sort(columns[..., :count], axis=-1)
    places = jnp.arange(parts)[:, None] * width + columns[..., None, :]  # in the order of the logits
    places = places.reshape(*logits.shape[:-1], -1)
    candidates = jnp.take_along_axis(logits, places, axis=-1, mode='fill', fill_value=-jnp.inf)
    values, index = _top_k(_allowed(candidates, places, forbidden), count)
    # Another column may have one that equals the last, and comes before it.
    return jax.lax.cond((maxima[..., count] == values[..., -1]).any(),
                        functools.partial(_top_k, count=count, forbidden=forbidden),
                        lambda _: (values, jnp.take_along_axis(places, index, axis=-1)), logits)


def _cut(logits, parts=PARTS):
    """Parts of one length, the last padded. XLA vectorises what is done to all of them, number by number."""
    width = -(-logits.shape[-1] // parts)
    cut = [logits[..., begin:begin + width] for begin in range(0, parts * width, width)]
    padding = [(0, 0)] * (logits.ndim - 1)
    return [jnp.pad(part, [*padding, (0, width - part.shape[-1])], constant_values=-jnp.inf) for part in cut]


def _log_normaliser(logits, greatest):
    """The logsumexp of rows whose greatest logits [..., 1] are known."""
    powers = functools.reduce(jnp.add, [jnp.exp(part - greatest) for part in _cut(logits)])
    # In one pass: without the barrier, XLA would write all powers down for one sum of so many.
    return jnp.log(jax.lax.optimization_barrier(powers).sum(axis=-1)) + greatest[..., 0]


def _best(logits, count, state, vocabulary, cut):
    """The `count` greatest log-probabilities of tokens that may come, IMPOSSIBLE if there are no more, and the tokens.

    Padding, the start token and the vocabulary's `others` never come. At the limit nothing but the end token does,
    unless `cut`.
    """
    values, tokens = largest(logits, count, vocabulary.forbidden)
    forbidden = [logits[..., token, None] for token in vocabulary.forbidden]  # they have probabilities all the same
    normaliser = _log_normaliser(logits, functools.reduce(jnp.maximum, forbidden, values[..., :1]))[..., None]
    values = jnp.maximum(values - normaliser, IMPOSSIBLE)
    if cut:
        return values, tokens
    at_limit = (state.step >= state.limits - 1)[:, None, None]
    only_end = jnp.where(jnp.arange(count) == 0, logits[..., vocabulary.eos, None] - normaliser, IMPOSSIBLE)
    return jnp.where(at_limit, only_end, values), jnp.where(at_limit, vocabulary.eos, tokens)


def _may_come(logits, vocabulary):
    return jnp.ones(logits.shape[-1], bool).at[jnp.array(vocabulary.forbidden)].set(False)


class SampleState(flax.struct.PyTreeNode):
    """What `Sample` knows between two steps."""
    step: Any
    limits: Any     # [batch]
    keys: Any       # [batch], or None
    last: Any       # [batch, samples] the token that is read next
    ended: Any      # [batch, samples]
    tokens: Any     # [batch, samples, length]
    log_probs: Any  # [batch, samples]
    lengths: Any    # [batch, samples]
    cache: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draws `num_samples` outputs for each sentence, token by token; temperature 0 is greedy search.

    A sentence's draws depend on its key alone, not on its neighbours in the batch.

    Attributes:
      vocabulary: the special tokens.
      max_length: steps that there is room for; no sentence's limit is greater.
      num_samples: outputs of each sentence.
      alpha: exponent of the length penalty, by which outputs are ranked.
      cut: an output that reaches its limit stays as it is; otherwise it is given an end token there.
      temperature: what logits are divided by.
      top_k: so many of the most probable tokens may be drawn (0: all), and of these
      top_p: the smallest set whose probability reaches it (Holtzman et al. 2020, arXiv:1904.09751).
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
              keys: Key[Array, ' batch'] | None = None) -> SampleState:
        """Nothing is drawn yet."""
        shape = limits.shape[0], self.num_samples
        return SampleState(step=jnp.zeros((), jnp.int32), limits=limits, keys=keys,
                           last=jnp.broadcast_to(start[:, None], shape).astype(jnp.int32),
                           ended=jnp.broadcast_to((limits <= 0)[:, None], shape),
                           tokens=jnp.full((*shape, self.max_length), self.vocabulary.pad, jnp.int32),
                           log_probs=jnp.zeros(shape), lengths=jnp.zeros(shape, jnp.int32), cache=cache)

    def open(self, state: SampleState) -> Bool[Array, ' batch']:
        """Which sentences have an output that goes on."""
        return ~state.ended.all(axis=1)

    def step(self, decode_step: DecodeStep, state: SampleState) -> SampleState:
        """One token of each output."""
        logits, cache = decode_step(state.last, state.cache)
        token, new = self._choose(logits, state)
        token = jnp.where(state.ended, self.vocabulary.pad, token).astype(jnp.int32)
        return state.replace(
            step=state.step + 1, last=token, cache=cache,
            ended=state.ended | (token == self.vocabulary.eos) | (state.step >= state.limits - 1)[:, None],
            tokens=state.tokens.at[:, :, state.step].set(token),
            log_probs=jnp.where(state.ended, state.log_probs, state.log_probs + new),
            lengths=jnp.where(state.ended, state.lengths, state.lengths + 1))

    def _choose(self, logits, state):
        if self.temperature == 0:
            values, tokens = _best(logits, 1, state, self.vocabulary, self.cut)
            return tokens[..., 0], values[..., 0]
        assert state.keys is not None, 'a temperature above 0 draws'
        keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
        allowed = jnp.where(_may_come(logits, self.vocabulary), logits, IMPOSSIBLE)
        token = jax.vmap(jax.random.categorical)(
            keys, filter_logits(allowed, self.temperature, self.top_k, self.top_p))
        if not self.cut:
            token = jnp.where((state.step >= state.limits - 1)[:, None], self.vocabulary.eos, token)
        chosen = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
        return token, chosen - jax.nn.logsumexp(logits, axis=-1)

    def found(self, state: SampleState) -> Hypotheses:
        """The outputs as they are now."""
        scores = state.log_probs / length_penalty(state.lengths, self.alpha)
        best = jnp.argsort(-scores, axis=1)
        rows = jnp.arange(len(best))[:, None]
        return Hypotheses(state.tokens[rows, best], state.log_probs[rows, best], scores[rows, best])


def filter_logits(logits: Float[Array, '*batch vocab'], temperature: float, top_k: int,
                  top_p: float) -> Float[Array, '*batch vocab']:
    """Logits of the distribution that `sample` draws from: tempered, and what is cut off made impossible."""
    logits = logits / temperature
    if top_k:
        smallest = largest(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < smallest, IMPOSSIBLE, logits)
    if top_p < 1.0:
        order = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(order, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the tokens that are more probable
        smallest = jnp.min(jnp.where(before < top_p, order, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, IMPOSSIBLE, logits)
    return logits


class BeamState(flax.struct.PyTreeNode):
    """What `Beam` knows between two steps."""
    step: Any
    limits: Any         # [batch]
    last: Any           # [batch, beam] the token that is read next
    alive_tokens: Any   # [batch, beam, length]
    alive_scores: Any   # [batch, beam] log-probabilities; IMPOSSIBLE where there is no hypothesis
    ended_tokens: Any   # [batch, beam, length]
    ended_probs: Any    # [batch, beam] log-probabilities
    ended_scores: Any   # [batch, beam] with the length penalty; IMPOSSIBLE where there is none
    cache: Any


@dataclasses.dataclass(frozen=True)
class Beam:
    """At each step the `beam` best extensions of a sentence's hypotheses survive.

    Those that end, or reach their limit, leave the beam for the list of the ended. So a beam of 1 is greedy search, and
    a beam as wide as the space is exhaustive. A sentence is done when its n-th best ended hypothesis scores at least
    what the best alive one can still reach: its log-probability now, which only falls, under the penalty of the
    greatest length.

    Attributes:
      vocabulary: the special tokens.
      max_length: steps that there is room for; no sentence's limit is greater.
      beam: hypotheses of a sentence that are alive at a time.
      alpha: exponent of the length penalty: the score is log-probability / length_penalty.
      n_best: hypotheses that are returned.
      cut: a hypothesis that reaches its limit stays as it is; otherwise it is given an end token there.
    """
    vocabulary: Vocabulary
    max_length: int
    beam: int
    alpha: float = 0.6
    n_best: int = 1
    cut: bool = False

    def begin(self, cache: Cache, start: Int[Array, ' batch'], limits: Int[Array, ' batch']) -> BeamState:
        """One hypothesis of nothing; it has ended where the limit is 0."""
        shape = limits.shape[0], self.beam
        nothing = jnp.full(shape, IMPOSSIBLE)
        empty = jnp.full((*shape, self.max_length), self.vocabulary.pad, jnp.int32)
        ends = limits <= 0
        ended = nothing.at[:, 0].set(jnp.where(ends, 0.0, IMPOSSIBLE))
        return BeamState(step=jnp.zeros((), jnp.int32), limits=limits,
                     last=jnp.broadcast_to(start[:, None], shape).astype(jnp.int32),
                     alive_tokens=empty, alive_scores=nothing.at[:, 0].set(jnp.where(ends, IMPOSSIBLE, 0.0)),
                     ended_tokens=empty, ended_probs=ended, ended_scores=ended, cache=cache)

    def open(self, state: BeamState) -> Bool[Array, ' batch']:
        """Which sentences have a hypothesis that may still become one of the n best."""
        best_alive = state.alive_scores.max(axis=1)
        attainable = best_alive / length_penalty(state.limits, max(self.alpha, 0.0))
        attainable = jnp.where(best_alive > IMPOSSIBLE, attainable, IMPOSSIBLE)
        if self.alpha < 0:  # a penalty that falls with the length: the shortest continuation is the best case
            attainable = best_alive / length_penalty(state.step + 1, self.alpha)
        return (state.ended_scores[:, self.n_best - 1] < attainable) & (state.limits > state.step)

    def step(self, decode_step: DecodeStep, state: BeamState) -> BeamState:
        """The `beam` best extensions of each hypothesis, then the best of those."""
        logits, cache = decode_step(state.last, state.cache)
        batch, beam, size = logits.shape
        rows, width = jnp.arange(batch)[:, None], min(beam, size)
        log_probs, tokens = _best(logits, width, state, self.vocabulary, self.cut)
        possible = (log_probs > IMPOSSIBLE) & (state.alive_scores > IMPOSSIBLE)[..., None]
        candidates = jnp.where(possible, state.alive_scores[..., None] + log_probs, IMPOSSIBLE)
        scores, index = jax.lax.top_k(candidates.reshape(batch, -1), beam)
        parent, token = index // width, tokens.reshape(batch, -1)[rows, index].astype(jnp.int32)
        sequences = state.alive_tokens[rows, parent].at[:, :, state.step].set(token)
        ends = (token == self.vocabulary.eos) | (state.step >= state.limits - 1)[:, None]
        ends &= scores > IMPOSSIBLE

        new_scores = jnp.where(ends, scores / length_penalty(state.step + 1, self.alpha), IMPOSSIBLE)
        ended_scores, best = jax.lax.top_k(jnp.concatenate([state.ended_scores, new_scores], axis=1), beam)
        return state.replace(
            step=state.step + 1, last=token,
            alive_tokens=sequences, alive_scores=jnp.where(ends, IMPOSSIBLE, scores),
            ended_tokens=jnp.concatenate([state.ended_tokens, sequences], axis=1)[rows, best],
            ended_probs=jnp.concatenate([state.ended_probs, scores], axis=1)[rows, best],
            ended_scores=ended_scores,
            cache=cache.replace(state=jax.tree.map(lambda leaf: leaf[rows, parent], cache.state)))

    def found(self, state: BeamState) -> Hypotheses:
        """The ended hypotheses as they are now."""
        return Hypotheses(*(each[:, :self.n_best] for each in (state.ended_tokens, state.ended_probs,
                                                               state.ended_scores)))


Search = Sample | Beam


def advance(search: Search, decode_step: DecodeStep, state: Any, until: Int[Array, ''] | int,
            at_least: Int[Array, ''] | int = 1) -> Any:
    """Steps as far as step `until`, and while at least so many sentences are open."""
    def running(state):
        return (state.step < until) & (search.open(state).sum() >= at_least)

    return jax.lax.while_loop(running, functools.partial(search.step, decode_step), state)


def sample(decode_step: DecodeStep, cache: Cache, start: Int[Array, ' batch'], limits: Int[Array, ' batch'], *,
           keys: Key[Array, ' batch'] | None = None, **settings: Any) -> Hypotheses:
    """What the search `Sample(**settings)` finds; `keys` are needed where it draws."""
    search = Sample(**settings)
    state = search.begin(cache, start, limits, keys)
    return search.found(advance(search, decode_step, state, search.max_length))


def beam_search(decode_step: DecodeStep, cache: Cache, start: Int[Array, ' batch'], limits: Int[Array, ' batch'],
                **settings: Any) -> Hypotheses:
    """What the search `Beam(**settings)` finds."""
    search = Beam(**settings)
    return search.found(advance(search, decode_step, search.begin(cache, start, limits), search.max_length))
