"""Decoding as jitted loops over an explicit cache: greedy, sampling, beam.

Each takes `decode_step(tokens [batch, beam], cache) -> logits [batch, beam, vocab], cache`, any model's, and
an empty cache of as many hypotheses as it is to follow. `start` [batch] is the token that the model reads first:
the start token of a translation, the last one of a prompt. `limits` [batch] is the greatest number of tokens of
each sentence. What reaches it is complete in one of two ways: its last token is forced to be the end token
(a translation), or, with `cut`, it stays as it is, without an end token (a continuation of so many tokens).

A search may forbid tokens, but forbidding changes no probability: the log-probabilities are the model's own, over its
whole vocabulary, those of a forced end token too. They are what teacher forcing gives for the same tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from model.cache import Cache

DecodeStep = Callable[[Int[Array, 'batch beam'], Cache], tuple[Float[Array, 'batch beam vocab'], Cache]]
IMPOSSIBLE = jnp.finfo(jnp.float32).min


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


def length_penalty(length: Int[Array, '*n'] | int, alpha: float) -> Float[Array, '*n'] | float:
    """The penalty ((5 + |Y|) / 6)^alpha, |Y| with the end token (Wu et al. 2016, arXiv:1609.08144, equation 14)."""
    return ((5.0 + length) / 6.0) ** alpha


def _allowed(logits, step, limits, vocabulary, cut):
    """Logits to choose a token from, IMPOSSIBLE where one may not come; they give no probabilities.

    Padding, the start token and the vocabulary's `others` never come. At the limit nothing but the end token does,
    unless `cut`.
    """
    logits = logits.at[..., jnp.array([vocabulary.pad, vocabulary.bos, *vocabulary.others])].set(IMPOSSIBLE)
    if cut:
        return logits
    only_end = jnp.where(jnp.arange(logits.shape[-1]) == vocabulary.eos, logits, IMPOSSIBLE)
    # The select costs a pass over the logits, so it waits until the first sentence is at its limit.
    return jax.lax.cond(step >= jnp.min(limits) - 1,
                        lambda: jnp.where((step >= limits - 1)[:, None, None], only_end, logits), lambda: logits)


# The two searches take what a decoder is by position, and the settings of the search, which are many, by keyword.

def sample(decode_step: DecodeStep, cache: Cache, start: Int[Array, ' batch'], limits: Int[Array, ' batch'], *,
           vocabulary: Vocabulary, max_length: int, num_samples: int = 1, alpha: float = 0.0, cut: bool = False,
           keys: Key[Array, ' batch'] | None = None,
           temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Hypotheses:
    """Draws `num_samples` outputs for each sentence, token by token; temperature 0 is greedy search.

    Logits are divided by `temperature`; then the `top_k` most probable tokens are kept (0: all), and of
    these the smallest set whose probability reaches `top_p` (Holtzman et al. 2020, arXiv:1904.09751).
    A sentence's draws depend on its key alone, not on its neighbours in the batch.
    """
    batch = limits.shape[0]

    def choose(logits, step):
        if temperature == 0:
            return jnp.argmax(logits, axis=-1)
        assert keys is not None, 'a temperature above 0 draws'
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        return jax.vmap(jax.random.categorical)(step_keys, filter_logits(logits, temperature, top_k, top_p))

    def body(carry):
        step, last, ended, tokens, log_probs, lengths, cache = carry
        logits, cache = decode_step(last, cache)
        token = choose(_allowed(logits, step, limits, vocabulary, cut), step).astype(jnp.int32)
        new = jnp.take_along_axis(logits, token[..., None], -1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
        token = jnp.where(ended, vocabulary.pad, token)
        log_probs = jnp.where(ended, log_probs, log_probs + new)
        lengths = jnp.where(ended, lengths, lengths + 1)
        tokens = tokens.at[:, :, step].set(token)
        ended |= (token == vocabulary.eos) | (step >= limits - 1)[:, None]
        return step + 1, token, ended, tokens, log_probs, lengths, cache

    def running(carry):
        return (carry[0] < max_length) & ~jnp.all(carry[2])

    shape = batch, num_samples
    carry = (jnp.zeros((), jnp.int32), jnp.broadcast_to(start[:, None], shape),
             jnp.broadcast_to((limits <= 0)[:, None], shape), jnp.full((*shape, max_length), vocabulary.pad, jnp.int32),
             jnp.zeros(shape), jnp.zeros(shape, jnp.int32), cache)
    _, _, _, tokens, log_probs, lengths, _ = jax.lax.while_loop(running, body, carry)
    scores = log_probs / length_penalty(lengths, alpha)
    best = jnp.argsort(-scores, axis=1)
    return jax.tree.map(lambda each: each[jnp.arange(batch)[:, None], best], Hypotheses(tokens, log_probs, scores))


def filter_logits(logits: Float[Array, '*batch vocab'], temperature: float, top_k: int,
                  top_p: float) -> Float[Array, '*batch vocab']:
    """Logits of the distribution that `sample` draws from: tempered, and what is cut off made impossible."""
    logits = logits / temperature
    if top_k:
        smallest = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < smallest, IMPOSSIBLE, logits)
    if top_p < 1.0:
        order = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(order, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the tokens that are more probable
        smallest = jnp.min(jnp.where(before < top_p, order, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, IMPOSSIBLE, logits)
    return logits


class _Beam(flax.struct.PyTreeNode):
    step: Any
    alive_tokens: Any   # [batch, beam, length]
    alive_scores: Any   # [batch, beam] log-probabilities; IMPOSSIBLE where there is no hypothesis
    ended_tokens: Any   # [batch, beam, length]
    ended_probs: Any    # [batch, beam] log-probabilities
    ended_scores: Any   # [batch, beam] with the length penalty; IMPOSSIBLE where there is none
    cache: Any


def beam_search(decode_step: DecodeStep, cache: Cache, start: Int[Array, ' batch'], limits: Int[Array, ' batch'], *,
                vocabulary: Vocabulary, max_length: int, beam: int, alpha: float = 0.6, n_best: int = 1,
                cut: bool = False) -> Hypotheses:
    """The `n_best` of the hypotheses that a beam finds, ranked by log-probability / length_penalty.

    At each step the `beam` best extensions of the alive hypotheses survive. Those that end, or reach their limit, leave
    the beam for the list of the ended. So a beam of 1 is greedy search, and a beam as wide as the space is exhaustive.
    A sentence is done when its n-th best ended hypothesis scores at least what the best alive one can still reach:
    its log-probability now, which only falls, under the penalty of the greatest length.
    """
    batch = limits.shape[0]
    rows = jnp.arange(batch)[:, None]

    def done(state):
        best_alive = state.alive_scores.max(axis=1)
        attainable = best_alive / length_penalty(limits, max(alpha, 0.0))
        attainable = jnp.where(best_alive > IMPOSSIBLE, attainable, IMPOSSIBLE)
        if alpha < 0:  # a penalty that falls with the length: the shortest continuation is the best case
            attainable = best_alive / length_penalty(state.step + 1, alpha)
        return (state.ended_scores[:, n_best - 1] >= attainable) | (limits <= state.step)

    def body(state):
        last = jnp.where(state.step == 0, start[:, None], state.alive_tokens[:, :, jnp.maximum(state.step - 1, 0)])
        logits, cache = decode_step(last, state.cache)
        # The `beam` best extensions of each hypothesis, then the best of those.
        width = min(beam, logits.shape[-1])
        values, tokens = jax.lax.top_k(_allowed(logits, state.step, limits, vocabulary, cut), width)
        log_probs = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        possible = (values > IMPOSSIBLE) & (state.alive_scores > IMPOSSIBLE)[..., None]
        candidates = jnp.where(possible, state.alive_scores[..., None] + log_probs, IMPOSSIBLE)
        scores, index = jax.lax.top_k(candidates.reshape(batch, -1), beam)
        parent, token = index // width, tokens.reshape(batch, -1)[rows, index]
        sequences = state.alive_tokens[rows, parent].at[:, :, state.step].set(token)
        ends = ((token == vocabulary.eos) | (state.step >= limits - 1)[:, None]) & (scores > IMPOSSIBLE)

        new_scores = jnp.where(ends, scores / length_penalty(state.step + 1, alpha), IMPOSSIBLE)
        ended_scores, best = jax.lax.top_k(jnp.concatenate([state.ended_scores, new_scores], axis=1), beam)
        return _Beam(
            step=state.step + 1,
            alive_tokens=sequences, alive_scores=jnp.where(ends, IMPOSSIBLE, scores),
            ended_tokens=jnp.concatenate([state.ended_tokens, sequences], axis=1)[rows, best],
            ended_probs=jnp.concatenate([state.ended_probs, scores], axis=1)[rows, best],
            ended_scores=ended_scores,
            cache=cache.replace(state=jax.tree.map(lambda leaf: leaf[rows, parent], cache.state)))

    nothing = jnp.full((batch, beam), IMPOSSIBLE)
    empty = jnp.full((batch, beam, max_length), vocabulary.pad, jnp.int32)
    first = _Beam(step=jnp.zeros((), jnp.int32), alive_tokens=empty, alive_scores=nothing.at[:, 0].set(0.0),
                  ended_tokens=empty, ended_probs=nothing, ended_scores=nothing, cache=cache)
    state = jax.lax.while_loop(lambda state: (state.step < max_length) & ~jnp.all(done(state)), body, first)
    return Hypotheses(state.ended_tokens[:, :n_best], state.ended_probs[:, :n_best], state.ended_scores[:, :n_best])
