"""Text in, text out: what translating a sentence and continuing a prompt have in common."""

import abc
import collections
import dataclasses
import functools
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from configs.options import METHODS, SEARCH_NUMBERS
from errors import UserError
from inference import search
from input_pipeline.data import Data
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK, Tokenizer

VOCABULARY = search.Vocabulary(pad=PAD, bos=BOS, eos=EOS, others=(UNK,))
LENGTHS = 16  # inputs are padded to multiples of this: a handful of compilations
CHUNK = 32  # batches of lines that are read, sorted by length and answered at a time: memory is bounded
CHUNK_CHARACTERS = 2 ** 23  # a chunk ends at the line that exceeds this
HINTS = {'temperature': '; method=greedy takes the best', 'top_k': '; 0 keeps every token'}


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One output.

    Attributes:
      text: of the tokens.
      tokens: without the end token.
      log_prob: the model's, of the tokens and, where it has `ended`, of the end token: what teacher forcing gives.
      score: log_prob / ((5 + length) / 6)^alpha, of the same tokens: what ranks it.
      ended: whether an end token follows; a continuation that was cut off by its length has none.
    """
    text: str
    tokens: list[int]
    log_prob: float
    score: float
    ended: bool = True


@dataclasses.dataclass(frozen=True)
class Output:
    """A line of text and what was found for it, the best first. For an empty one that is one empty hypothesis."""
    source: str
    source_tokens: list[int]
    hypotheses: list[Hypothesis]

    @property
    def text(self) -> str:
        return self.hypotheses[0].text

    @property
    def line(self) -> str:
        """The text as one line for every reader: some end a line at U+2028, U+0085 or a form feed too."""
        return ' '.join(self.text.splitlines())


class TokenProbability(NamedTuple):
    """A token, the probability that the model gave it, and the most probable others at its place, the best first."""
    piece: str
    probability: float
    alternatives: list[tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """How to decode.

    Attributes:
      method: 'beam', 'greedy' or 'sample'.
      beam: hypotheses that live at a time.
      alpha: of the length penalty ((5 + |Y|) / 6)^alpha.
      n_best: hypotheses to return; for 'sample', independent draws.
      extra_length: a translation has at most this many tokens more than its source, a continuation this many.
      batch_size: sentences at a time.
      temperature, top_k, top_p, seed: of sampling; top_k 0 and top_p 1 cut nothing off.

    Raises:
      UserError: if a value is impossible.
    """
    method: str = 'beam'
    beam: int = 4
    alpha: float = 0.6
    n_best: int = 1
    extra_length: int = 50
    batch_size: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        def require(holds, message):
            if not holds:
                raise UserError(message)
        require(self.method in METHODS.choices, f'method={self.method!r} is not beam, greedy or sample')
        for name, bounds in SEARCH_NUMBERS.items():
            value, whole = getattr(self, name), isinstance(getattr(SearchOptions, name), int)
            require(isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool),
                    f'{name}={value!r} must be {"a whole number" if whole else "a number"}')
            wanted = bounds.problem(value)
            require(not wanted, f'{name}={value} {wanted}{HINTS.get(name, "")}')
        require(self.method != 'beam' or self.n_best <= self.beam,
                f'n_best={self.n_best} is more than beam={self.beam} can hold: raise beam')
        require(self.method != 'greedy' or self.n_best == 1, 'greedy search has one result: use n_best=1 or method=beam')


def checked_texts(texts: Sequence[str]) -> list[str]:
    """The texts, if they are texts.

    Raises:
      UserError: if they are one text instead of a list, or one of them is none that UTF-8 can write.
    """
    if isinstance(texts, str):
        raise UserError(f'give a list of texts, [{texts[:40]!r}], not a text: each of its characters would be one')
    texts = list(texts)
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise UserError(f'number {number} of the texts is {text!r:.80}: it must be text that UTF-8 can write') from None
    return texts


def search_options(config: ConfigDict, **changes) -> SearchOptions:
    """`config.decode` as options, with `changes` that are not None."""
    return SearchOptions(**(dict(config.decode) | {name: value for name, value in changes.items() if value is not None}))


class TextModel(abc.ABC):
    """A model that writes text, with its parameters and tokenizers.

    Attributes:
      module: any module with encode, init_cache, decode_step and length_limit.
      params: its parameters.
      tokenizers: {'source': of what is read, 'target': of what is written}.
      cut: what reaches its greatest length is left without an end token; otherwise it gets one.
      spread: puts the arrays of a search where the parameters are; those on one device need nothing.
    """

    cut = False

    def __init__(self, module: nn.Module, params: Any, tokenizers: Mapping[str, Tokenizer]):
        self.module, self.params, self.tokenizers = module, params, dict(tokenizers)
        self.spread: Callable[[Any], Any] = lambda arrays: arrays
        self._search = jax.jit(self._encode_and_search, static_argnames=('max_length', 'options'))
        self._log_probs = jax.jit(self._teacher_forced)
        self._ranked = jax.jit(self._teacher_forced_ranks, static_argnames=('top',))
        self._attention = jax.jit(
            lambda params, inputs: module.apply({'params': params}, **inputs, mutable=['attention'])[1])

    @abc.abstractmethod
    def respond(self, lines: Sequence[str], options: SearchOptions, *, first: int = 0) -> list[Output]:
        """What is written for each line, in order; `first` is the number of the first one in its file."""

    def respond_all(self, lines: Iterable[str], options: SearchOptions) -> Iterator[list[Output]]:
        """What is written for each line, in order, some at a time; no more lines are read than are answered."""
        lines, first = iter(lines), 0
        while chunk := _chunk(lines, CHUNK * options.batch_size):
            yield self.respond(chunk, options, first=first)
            first += len(chunk)

    @abc.abstractmethod
    def examples(self, data: Data, split: str, count: int, options: SearchOptions) -> list[tuple[Output, str]]:
        """At most `count` examples of a split, answered, each with what was expected where that is known."""

    @abc.abstractmethod
    def attention(self, output: Output) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """Weights of every layer and head while the model reads and writes what `output` holds, by kind."""

    @abc.abstractmethod
    def axes(self, output: Output) -> dict[str, tuple[list[str], list[str]]]:
        """For each kind of `attention`, the tokens that look and those that are looked at."""

    @abc.abstractmethod
    def _read_and_written(self, output: Output) -> tuple[dict[str, list[int]], list[int]]:
        """(what the module reads, by argument; the tokens that its outputs predict) for the best hypothesis."""

    @abc.abstractmethod
    def _problem(self, tokens: Sequence[int], options: SearchOptions) -> tuple[list[int], int, int]:
        """(what the model encodes, the token that decoding starts from, the greatest number of new tokens)."""

    @abc.abstractmethod
    def _max_length(self, width: int, options: SearchOptions) -> int:
        """The greatest number of new tokens for any input that is padded to `width`."""

    def token_probabilities(self, output: Output, top: int = 5) -> list[TokenProbability]:
        """What the model thought of each token of the best hypothesis, given those before it (teacher forcing).

        Of a translation these are its tokens and the end token. Of a language model they are those of prompt and
        continuation as far as one window reaches, from the second on: nothing predicts the first.

        Args:
          top: alternatives to each token, at most.
        """
        read, written = self._read_and_written(output)
        inputs = {name: self._padded([tokens]) for name, tokens in read.items()}
        probabilities, others, of_others = (np.asarray(each)[0] for each in self._ranked(
            self.params, inputs, self._padded([written]), top=top + 1))
        pieces = self.tokenizers['target'].pieces
        found = []
        for place, (token, piece) in enumerate(zip(written, pieces(written), strict=True)):
            ranked = zip(others[place].tolist(), pieces(others[place]), of_others[place].tolist(), strict=True)
            alternatives = [(name, probability) for other, name, probability in ranked if other != token]
            found.append(TokenProbability(piece, float(probabilities[place]), alternatives[:top]))
        return found

    def find_all(self, sources: Sequence[Sequence[int]], numbers: Sequence[int], options: SearchOptions,
                 draw: int = 0, limits: Sequence[int] | None = None) -> list[list[Hypothesis]]:
        """The hypotheses of each tokenised source, the best first; see `find`."""
        results: list[list[Hypothesis]] = [[] for _ in sources]
        # Inputs of like length together: less padding, and they end at about the same step.
        order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
        for begin in range(0, len(order), options.batch_size):
            rows = order[begin:begin + options.batch_size]
            found = self.find([sources[row] for row in rows], [numbers[row] for row in rows], options, draw,
                              limits and [limits[row] for row in rows])
            for index, row in enumerate(rows):
                results[row] = [self._hypothesis(found, index, rank) for rank in range(options.n_best)
                                if found.scores[index, rank] > search.IMPOSSIBLE]
        return results

    def find(self, sources: Sequence[Sequence[int]], numbers: Sequence[int], options: SearchOptions,
             draw: int = 0, limits: Sequence[int] | None = None) -> search.Hypotheses:
        """The hypotheses of at most options.batch_size tokenised sources, as NumPy arrays.

        What is drawn for a source depends on the seed, its number and `draw`, not on the other sources. `limits` are
        the greatest numbers of new tokens, where they are less than `options` allow.
        """
        # Few batch shapes: a full batch, or the next power of two.
        rows = min(options.batch_size, 1 << (len(sources) - 1).bit_length())
        read, starts, most = zip(*(self._problem(tokens, options) for tokens in sources), strict=True)
        batch = self._padded(read, rows)
        start, at_most = np.full(rows, BOS, np.int32), np.zeros(rows, np.int32)
        start[:len(sources)], at_most[:len(sources)] = starts, most if limits is None else limits
        numbers = np.array([*numbers, *[0] * (rows - len(sources))], np.uint32)
        # The seed is an argument: another one needs no other program.
        found = self._search(self.params, *self.spread((batch, start, at_most, numbers)), np.uint32(options.seed),
                             np.uint32(draw), options=dataclasses.replace(options, seed=0),
                             max_length=self._max_length(batch.shape[1], options))
        return process_allgather(found, tiled=True)

    def _ends(self, text: str, count: int) -> tuple[int, list[int], list[int]]:
        """(the number of tokens of a text, its first `count`, its last `count`); not all are in memory at a time."""
        length, first, last = 0, [], collections.deque(maxlen=count)
        for part in self.tokenizers['source'].encode_parts(text):
            length += len(part)
            first += part[:count - len(first)].tolist()
            last.extend(part[-count:].tolist())
        return length, first, list(last)

    def _hypothesis(self, found: search.Hypotheses, row: int, rank: int) -> Hypothesis:
        tokens = found.tokens[row, rank]
        tokens = tokens[tokens != PAD].tolist()
        ended = tokens[-1:] == [EOS]
        tokens = tokens[:-1] if ended else tokens
        return Hypothesis(self.tokenizers['target'].decode(tokens), tokens, float(found.log_probs[row, rank]),
                          float(found.scores[row, rank]), ended)

    def _encode_and_search(self, params, source, start, limits, numbers, seed, draw, *, max_length, options):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(jax.random.key(seed), draw), numbers)
        apply = functools.partial(self.module.apply, {'params': params})
        memory = apply(source, method='encode')

        def decode_step(tokens, cache):
            return apply(tokens, cache, method='decode_step')

        width = options.beam if options.method == 'beam' else options.n_best
        cache = apply(memory, width, max_length, method='init_cache')
        if options.method == 'beam':
            return search.beam_search(decode_step, cache, start, limits, vocabulary=VOCABULARY, max_length=max_length,
                                      beam=width, alpha=options.alpha, n_best=options.n_best, cut=self.cut)
        return search.sample(decode_step, cache, start, limits, vocabulary=VOCABULARY, max_length=max_length,
                             num_samples=width, alpha=options.alpha, cut=self.cut, keys=keys,
                             temperature=options.temperature if options.method == 'sample' else 0.0,
                             top_k=options.top_k, top_p=options.top_p)

    def _teacher_forced(self, params, inputs, targets):
        logits = self.module.apply({'params': params}, **inputs)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]

    def _teacher_forced_ranks(self, params, inputs, targets, *, top):
        probabilities = jax.nn.softmax(self.module.apply({'params': params}, **inputs))
        of_others, others = jax.lax.top_k(probabilities, min(top, probabilities.shape[-1]))
        return jnp.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0], others, of_others

    def _padded(self, rows: Sequence[Sequence[int]], count: int = 0) -> Int[np.ndarray, 'rows length']:
        """The rows as an array of at least `count`, their length a multiple of LENGTHS where the model reaches it."""
        longest = max(1, *map(len, rows))
        length = max(longest, min(-(-longest // LENGTHS) * LENGTHS, self.module.length_limit or sys.maxsize))
        padded = np.full((max(count, len(rows)), length), PAD, np.int32)
        for row, tokens in enumerate(rows):
            padded[row, :len(tokens)] = tokens
        return padded


def _chunk(lines: Iterator[str], count: int) -> list[str]:
    """The next `count` lines, or fewer if they are long."""
    chunk, characters = [], 0
    while len(chunk) < count and characters <= CHUNK_CHARACTERS and (line := next(lines, None)) is not None:
        chunk.append(line)
        characters += len(line)
    return chunk


def attention_weights(collections: Mapping[str, Any]) -> dict[str, Float[np.ndarray, 'layer batch head t s']]:
    """What a module has sown into 'attention', by kind: 'encoder' and 'decoder' (self-attention), 'cross'."""
    weights: dict[str, np.ndarray] = {}
    # In a training of many processes, each has a part of the weights.
    for stack, layers in process_allgather(dict(collections.get('attention', {})), tiled=True).items():
        order = sorted(layers, key=lambda name: int(name.rpartition('_')[2]))
        for sublayer, kind in ('self_attention', stack), ('cross_attention', 'cross'):
            if sublayer in layers[order[0]]:
                weights[kind] = np.stack([layers[layer][sublayer]['weights'][0] for layer in order])
    return weights
