"""What models that write text have in common, whether they translate a sentence or continue a prompt."""

import abc
import collections
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Float, Int

from inference import search
from inference.arriving import PAUSE, Arriving
from inference.batches import Batch, BatchSearch, find_in_threads, threads_for
from inference.constraints import Automaton, begin_words
from inference.forced import Forced, forced_log_probs
from inference.options import SearchOptions
from inference.options import search_options as search_options  # had from here by notebooks
from input_pipeline.data import Data
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK, Tokenizer
from model import Params
from runtime.errors import UserError

VOCABULARY = search.Vocabulary(pad=PAD, bos=BOS, eos=EOS, others=(UNK,))
LENGTHS = 16  # inputs are padded to multiples of this, so that few lengths are compiled
CHUNK = 32  # batches of lines that are read, sorted by length and answered at a time, so that memory is bounded
CHUNK_CHARACTERS = 2 ** 23  # a chunk ends at the line that exceeds this


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One output.

    Attributes:
      text: what the tokens decode to.
      tokens: without the end token.
      log_prob: the model's log-probability of the tokens and, if it has `ended`, of the end token, as teacher forcing
        gives it.
      score: log_prob / ((5 + length) / 6)^alpha, with the length of the same tokens; hypotheses are ranked by it.
      ended: whether an end token follows; a continuation that was cut off by its length has none.
    """
    text: str
    tokens: list[int]
    log_prob: float
    score: float
    ended: bool = True

    @classmethod
    def forced(cls, text: str, tokens: list[int], log_probs: Sequence[float], alpha: float) -> 'Hypothesis':
        """Returns a text that was given, not found, with the log-probabilities of its tokens and its end token."""
        log_prob = math.fsum(log_probs)
        return cls(text, tokens, log_prob, float(log_prob / search.length_penalty(len(log_probs), alpha)))


@dataclasses.dataclass(frozen=True)
class Output:
    """A line of text and the hypotheses for it, the best first; an empty line has one empty hypothesis."""
    source: str
    source_tokens: list[int]
    hypotheses: list[Hypothesis]

    @property
    def text(self) -> str:
        """The text of the best hypothesis."""
        return self.hypotheses[0].text

    @property
    def line(self) -> str:
        """The text as one line, whatever a reader takes for the end of one (U+2028, U+0085, a form feed)."""
        return ' '.join(self.text.splitlines())


class TokenProbability(NamedTuple):
    """A token, the probability that the model gave it, and the most probable others at its place, the best first."""
    piece: str
    probability: float
    alternatives: list[tuple[str, float]]


class Begin(NamedTuple):
    """How an output begins.

    Attributes:
      prefix: its first tokens; behind the last may be search.NEW_WORD.
      place: the state of the search's automaton in which it goes on, where there are words to avoid.
    """
    prefix: Sequence[int] = ()
    place: int = 0


def encode_prefix(tokenizer: Tokenizer, prefix: str) -> Begin:
    """Returns how an output begins with a text.

    Of subwords, a space at the end is the beginning of the next word. The search chooses it: any token that begins with
    a space. So it does if the tokenizer drops a space at the end of a text, as SentencePiece does by default.
    """
    if not prefix.strip():
        return Begin()
    tokens, without = tokenizer.encode(prefix), tokenizer.encode(prefix[:-1])
    spaces = begin_words(tokenizer).sum() if prefix.endswith(' ') else 0
    return Begin([*without, search.NEW_WORD]) if spaces > 1 or spaces and tokens == without else Begin(tokens)


class SearchInput(NamedTuple):
    """What a search needs to know of one source.

    Attributes:
      encoded: the tokens that the model encodes.
      start: the token that decoding starts from.
      limit: the greatest number of new tokens.
    """
    encoded: list[int]
    start: int
    limit: int


def checked_texts(texts: Sequence[str]) -> list[str]:
    """The texts, if they are texts.

    Raises:
      UserError: if they are one text instead of a list, or one of them is no text or not to be written in UTF-8.
    """
    if isinstance(texts, str):
        raise UserError(f'give a list of texts, [{texts[:40]!r}], not a text: each of its characters would be one')
    texts = list(texts)
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise UserError(f'number {number} of the texts is {text!r:.80}: it must be text that UTF-8 can '
                            'write') from None
    return texts


class TextModel(abc.ABC):
    """A model that writes text, with its parameters and tokenizers.

    Attributes:
      module: any module that reads tokens and has a length_limit.
      params: its parameters.
      tokenizers: {'source': of what is read, 'target': of what is written}.
      multiline: whether what it writes may have line ends; otherwise an output is one line.
      unpredicted: tokens at the beginning of a text that nothing predicts; `token_probabilities` begins behind them.
      titles: {kind of `attention`: (what its queries are, what its keys are)}, in a word or two.
      name: of the run, for messages.
    """

    multiline = False
    name = 'this model'
    unpredicted: ClassVar[int]
    titles: ClassVar[Mapping[str, tuple[str, str]]]

    def __init__(self, module: nn.Module, params: Params, tokenizers: Mapping[str, Tokenizer]):
        self.module, self.params, self.tokenizers = module, params, dict(tokenizers)
        self._log_probs = jax.jit(self._teacher_forced)
        self._ranked = jax.jit(self._teacher_forced_ranks, static_argnames=('top',))
        self._attention = jax.jit(
            lambda params, inputs: module.apply({'params': params}, **inputs, mutable=['attention'])[1])

    @abc.abstractmethod
    def respond(self, lines: Sequence[str], options: SearchOptions, *, first: int = 0) -> list[Output]:
        """An output for each line, in order; `first` is the number of the first one in its file."""

    def respond_all(self, lines: Iterable[str], options: SearchOptions,
                    respond: Callable[..., list[Output]] | None = None) -> Iterator[list[Output]]:
        """An output for each line, in order, a list of some at a time; lines are read only as they are answered.

        `respond` answers them instead of `self.respond`.
        """
        remaining, first = iter(lines), 0
        while chunk := _chunk(remaining, CHUNK * options.batch_size):
            yield (respond or self.respond)(chunk, options, first=first)
            first += len(chunk)

    @abc.abstractmethod
    def examples(self, data: Data, split: str, count: int, options: SearchOptions) -> list[tuple[Output, str]]:
        """Outputs for at most `count` examples of a split, each with its reference, or '' if there is none."""

    @abc.abstractmethod
    def attention(self, output: Output) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """{kind: weights of every layer and head} while the model reads and writes what `output` holds."""

    @abc.abstractmethod
    def axes(self, output: Output) -> dict[str, tuple[list[str], list[str]]]:
        """{kind of `attention`: (the pieces that are queries, those that are keys)}."""

    @abc.abstractmethod
    def text_names(self, output: Output) -> tuple[str, str]:
        """What is read and what is written, in a word each: 'source' and 'translation'; '' if nothing is written."""

    @abc.abstractmethod
    def _read_and_written(self, output: Output) -> tuple[dict[str, list[int]], list[int]]:
        """For the best hypothesis, the module's arguments by name, and the tokens that its outputs predict."""

    def token_probabilities(self, output: Output, top: int = 5) -> list[TokenProbability]:
        """The probability of each token of the best hypothesis, given those before it (teacher forcing).

        Args:
          output: of a translation, its tokens count and the end token; of a language model, the tokens of prompt and
            continuation as far as one window reaches, except the first, which nothing predicts.
          top: at most so many alternatives to each token.
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

    def _ends(self, text: str, count: int, side: str = 'source') -> tuple[int, list[int], list[int]]:
        """The number of tokens of a text, its first `count` and its last `count`, without all of them in memory."""
        length, first, last = 0, [], collections.deque(maxlen=count)
        for part in self.tokenizers[side].encode_parts(text):
            length += len(part)
            first += part[:count - len(first)].tolist()
            last.extend(part[-count:].tolist())
        return length, first, list(last)

    def _forced_log_probs(self, texts: Sequence[Forced], batch_size: int) -> list[list[float]]:
        """The log-probability of each target of each text."""
        return forced_log_probs(functools.partial(self._log_probs, self.params), self._padded, texts, batch_size)

    def _apply(self, params: Params, *args: Any, **options: Any) -> Any:
        return self.module.apply({'params': params}, *args, **options)

    def _teacher_forced(self, params, inputs, targets):
        logits = self._apply(params, **inputs)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]

    def _teacher_forced_ranks(self, params, inputs, targets, *, top):
        probabilities = jax.nn.softmax(self._apply(params, **inputs))
        of_others, others = jax.lax.top_k(probabilities, min(top, probabilities.shape[-1]))
        return jnp.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0], others, of_others

    def _padded(self, rows: Sequence[Sequence[int]], count: int = 0) -> Int[np.ndarray, 'rows length']:
        """The rows as an array of at least `count` rows, padded to a multiple of LENGTHS if the model reads so many."""
        longest = max(1, *map(len, rows))
        length = max(longest, min(-(-longest // LENGTHS) * LENGTHS, self.module.length_limit or sys.maxsize))
        padded = np.full((max(count, len(rows)), length), PAD, np.int32)
        for row, tokens in enumerate(rows):
            padded[row, :len(tokens)] = tokens
        return padded


class SearchModel(TextModel):
    """A model whose text is searched for, token by token. Its module has encode, init_cache and decode_step, too.

    Attributes:
      cut: whether an output that reaches its greatest length stays without an end token; otherwise it gets one.
      distribute: puts the arrays of a search on the devices that the parameters are on.
    """

    cut = False

    def __init__(self, module: nn.Module, params: Params, tokenizers: Mapping[str, Tokenizer]):
        super().__init__(module, params, tokenizers)
        self.distribute: Callable[[Any], Any] = lambda arrays: arrays  # one device needs nothing
        self._batches = BatchSearch(module)
        self._automata: dict[Any, Automaton] = {}  # the last one

    @abc.abstractmethod
    def _search_input(self, tokens: Sequence[int], options: SearchOptions) -> SearchInput:
        """What is searched for a tokenised source."""

    @abc.abstractmethod
    def _max_length(self, width: int, options: SearchOptions) -> int:
        """The greatest `SearchInput.limit` of sources that are padded to `width`."""

    def automaton(self, options: SearchOptions) -> Automaton | None:
        """What keeps the words to avoid away; None where there are none."""
        if options.avoid and options.avoid not in self._automata:
            self._automata = {options.avoid: Automaton(options.avoid, self.tokenizers['target'], self.multiline)}
        return self._automata.get(options.avoid)

    def find_all(self, sources: Sequence[Sequence[int]], numbers: Sequence[int], options: SearchOptions,
                 draw: int = 0, limits: Sequence[int] | None = None,
                 begins: Sequence[Begin] | None = None) -> list[list[Hypothesis]]:
        """The hypotheses for each tokenised source, the best first; see `find`."""
        threads = threads_for(options.batch_size)
        share = dataclasses.replace(options, batch_size=-(-options.batch_size // threads))
        self.automaton(options)  # made before the threads

        def find(rows: Sequence[int]) -> search.Hypotheses:
            return self.find([sources[row] for row in rows], [numbers[row] for row in rows], share, draw,
                             limits and [limits[row] for row in rows], begins and [begins[row] for row in rows])

        # Inputs of about one length share a batch: they need less padding, and end at about the same step. The longest
        # come first, so that no thread is left alone with them at the end.
        order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))
        results: list[list[Hypothesis]] = [[] for _ in sources]
        batches = [order[begin:begin + share.batch_size] for begin in range(0, len(order), share.batch_size)]
        for rows, found in zip(batches, find_in_threads(find, batches, threads), strict=True):
            for index, row in enumerate(rows):
                results[row] = [self._hypothesis(found, index, rank) for rank in range(options.n_best)
                                if found.scores[index, rank] > search.IMPOSSIBLE]
        if not all(results):
            finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(self.params))
            raise UserError(f'{self.name}: the search finds no output, because the logits are NaN or infinite'
                            + ('' if finite else ', as the parameters are') + '. Use another --checkpoint, or train '
                            'again with a lower learning rate')
        return results

    def find(self, sources: Sequence[Sequence[int]], numbers: Sequence[int], options: SearchOptions,
             draw: int = 0, limits: Sequence[int] | None = None,
             begins: Sequence[Begin] | None = None) -> search.Hypotheses:
        """The hypotheses for at most options.batch_size tokenised sources, as NumPy arrays.

        A source's draws depend on the seed, its number and `draw`, not on the other sources. `limits` are the greatest
        numbers of new tokens, where they are less than `options` allow, and `begins` how the outputs begin.
        """
        # Few batch shapes: a full batch, or the next power of two.
        rows = min(options.batch_size, 1 << (len(sources) - 1).bit_length())
        inputs = [self._search_input(tokens, options) for tokens in sources]
        source = self._padded([each.encoded for each in inputs], rows)
        start, at_most, number = np.full(rows, BOS, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.uint32)
        start[:len(sources)] = [each.start for each in inputs]
        at_most[:len(sources)] = [each.limit for each in inputs] if limits is None else limits
        number[:len(sources)] = numbers
        settings = self._settings(self._max_length(source.shape[1], options), options)
        batch = Batch(source, start, at_most, number)
        automaton = self.automaton(options)
        if automaton is not None:
            places = np.zeros(rows, np.int32)
            places[:len(sources)] = [each.place for each in begins] if begins else 0
            batch = batch._replace(places=places)
        if begins and any(each.prefix for each in begins):
            batch = batch._replace(prefixes=self._padded([each.prefix for each in begins], rows))
        return self._batches.find(self.params, settings, Batch(*self.distribute(tuple(batch))), options.seed, draw,
                                  self._follow(automaton, batch))

    def _follow(self, automaton: Automaton | None, batch: Batch) -> search.Follow | None:
        """What the search looks up of the batch's rules; None if there are none."""
        new_word = None
        if batch.prefixes is not None and (batch.prefixes == search.NEW_WORD).any():
            new_word = begin_words(self.tokenizers['target'])
        if automaton is None:
            return None if new_word is None else search.Follow(new_word=new_word)
        return search.Follow(automaton.padded, np.int32(automaton.ends), new_word)

    def _settings(self, max_length: int, options: SearchOptions) -> search.Search:
        max_length = min(2 ** (max_length - 1).bit_length(), self.module.length_limit or max_length)
        what = {'vocabulary': VOCABULARY, 'max_length': max_length, 'alpha': options.alpha, 'cut': self.cut}
        if options.method == 'beam':
            return search.Beam(**what, beam=options.beam, n_best=options.n_best)
        return search.Sample(**what, num_samples=options.n_best, top_k=options.top_k, top_p=options.top_p,
                             temperature=options.temperature if options.method == 'sample' else 0.0)

    def _hypothesis(self, found: search.Hypotheses, row: int, rank: int) -> Hypothesis:
        tokens = found.tokens[row, rank]
        tokens = tokens[tokens != PAD].tolist()
        ended = tokens[-1:] == [EOS]
        tokens = tokens[:-1] if ended else tokens
        return Hypothesis(self.tokenizers['target'].decode(tokens), tokens, float(found.log_probs[row, rank]),
                          float(found.scores[row, rank]), ended)


def _chunk(lines: Iterator[str], count: int) -> list[str]:
    """The next `count` lines, or fewer: if they have more than CHUNK_CHARACTERS together, or the next is not there."""
    chunk, characters, deadline = [], 0, 0.0
    while len(chunk) < count and characters <= CHUNK_CHARACTERS:
        if chunk and isinstance(lines, Arriving) and not lines.ready(deadline):
            break
        if (line := next(lines, None)) is None:
            break
        deadline = deadline or time.monotonic() + PAUSE
        chunk.append(line)
        characters += len(line)
    return chunk


def attention_weights(collections: Mapping[str, Any]) -> dict[str, Float[np.ndarray, 'layer batch head t s']]:
    """{kind: weights} that a module has sown into 'attention'.

    Kinds are 'encoder' and 'decoder' (self-attention) and 'cross'.

    Raises:
      UserError: of an ensemble, whose members have sown theirs.
    """
    if 'members_0' in collections.get('attention', {}):
        raise UserError('an ensemble has no attention: each of its runs has one; open one of them')
    weights: dict[str, np.ndarray] = {}
    # In a training with many processes, each has a part of the weights.
    for stack, layers in process_allgather(dict(collections.get('attention', {})), tiled=True).items():
        order = sorted(layers, key=lambda name: int(name.rpartition('_')[2]))
        for sublayer, kind in ('self_attention', stack), ('cross_attention', 'cross'):
            if sublayer in layers[order[0]]:
                weights[kind] = np.stack([layers[layer][sublayer]['weights'][0] for layer in order])
    return weights
