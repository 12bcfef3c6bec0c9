"""The base classes of models that write text: translators and language models."""

import abc
import collections
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Array, Float, Int

from configs.options import BEAM_METHODS
from inference import search
from inference.arriving import PAUSE, Arriving
from inference.batches import BatchSearch, SearchBatch, find_in_threads, rows_per_thread, threads_for
from inference.constraints import Automaton, begin_words, join_words
from inference.forced import Forced, forced_log_probs
from inference.inputs import Begin, SearchInput
from inference.minimum_risk import by_expected_chrf
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output, TokenProbability
from input_pipeline.data import Data
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK, Tokenizer
from model import Params
from model.places import EDITS
from runtime.errors import UserError

VOCABULARY = search.Vocabulary(pad=PAD, bos=BOS, eos=EOS, others=(UNK,))
LENGTHS = 32  # inputs are padded to multiples of this number, so that few lengths are compiled
# Number of batches in a chunk. All lines of a chunk are read, sorted by length and answered together. So the memory is
# bounded for an input of any length.
CHUNK = 32
CHUNK_CHARACTERS = 2 ** 23  # a chunk ends when its lines exceed this number of characters together


class TextModel(abc.ABC):
    """A model that writes text, with its parameters and tokenizers.

    Attributes:
      module: a module that reads tokens and has the attribute length_limit.
      params: the parameters of the module.
      tokenizers: {'source': tokenizer of the input, 'target': tokenizer of the output}.
      multiline: whether an output may have several lines.
      unit: the name of an input in messages, 'line' or 'text'.
      unpredicted: the number of tokens at the beginning of a text that the model does not predict.
        `token_probabilities` begins after these tokens.
      titles: {kind of attention, such as 'cross': (name of the queries, name of the keys)}.
      name: the name of the run, for messages.
      target_log_probs: `teacher_forced_log_probs`, compiled.
    """

    multiline = False
    unit = 'line'
    name = 'this model'
    unpredicted: ClassVar[int]
    titles: ClassVar[Mapping[str, tuple[str, str]]]

    def __init__(self, module: nn.Module, params: Params, tokenizers: Mapping[str, Tokenizer]):
        self.module, self.params, self.tokenizers = module, params, dict(tokenizers)
        self.target_log_probs = jax.jit(self.teacher_forced_log_probs)
        self._ranked = jax.jit(self._teacher_forced_ranks, static_argnames=('top',))
        self._attention = jax.jit(
            lambda params, inputs: module.apply({'params': params}, **inputs, mutable=['attention'])[1])

    @abc.abstractmethod
    def respond(self, lines: Sequence[str], options: SearchOptions, *, first: int = 0) -> list[Output]:
        """Returns an output for each line, in order. `first` is the number of earlier lines in the file."""

    def respond_all(self, lines: Iterable[str], options: SearchOptions,
                    respond: Callable[..., list[Output]] | None = None) -> Iterator[list[Output]]:
        """Reads lines in chunks, and yields a list of outputs for each chunk, with one output for each line, in order.

        A chunk is read when its outputs are requested. If `respond` is given, it is called instead of `self.respond`.
        """
        remaining, first = iter(lines), 0
        while chunk := _chunk(remaining, CHUNK * options.batch_size):
            yield (respond or self.respond)(chunk, options, first=first)
            first += len(chunk)

    @abc.abstractmethod
    def examples(self, data: Data, split: str, count: int, options: SearchOptions) -> list[tuple[Output, str]]:
        """Returns at most `count` outputs for examples of a split, each with its reference or ''."""

    @abc.abstractmethod
    def attention(self, output: Output) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """Returns {kind: weights of every layer and head} for the source and the best hypothesis of `output`."""

    @abc.abstractmethod
    def axes(self, output: Output) -> dict[str, tuple[list[str], list[str]]]:
        """Returns the pieces of text along the axes of the attention: {kind: (pieces of queries, pieces of keys)}."""

    def left_out(self, output: Output) -> int:
        """Returns the number of tokens at the end of `output` that `attention` and `axes` leave out."""
        return 0

    @abc.abstractmethod
    def text_names(self, output: Output) -> tuple[str, str]:
        """Returns the names of the input and the output, such as ('source', 'translation').

        The name of the output is '' if the model has written nothing, not even an end token.
        """

    @abc.abstractmethod
    def read_and_written(self, output: Output) -> tuple[dict[str, list[int]], list[int]]:
        """Returns the tokens that the module reads for the best hypothesis, and the tokens that it must predict.

        The first result is {name of an argument of the module: tokens}. The second result is a list of target tokens.
        """

    def token_probabilities(self, output: Output, top: int = 5) -> list[TokenProbability]:
        """Returns the probability of each token of the best hypothesis, given the tokens before it (teacher forcing).

        Args:
          output: an output of the model. For a translation, the result has an entry for each token of the translation
            and for the end token. For a language model, it has an entry for each token of the prompt and the
            continuation except the first token. Prompt and continuation are truncated to one window.
          top: the maximum number of alternatives to each token.
        """
        read, written = self.read_and_written(output)
        inputs = {name: self.padded([tokens]) for name, tokens in read.items()}
        probabilities, best, best_probabilities = (np.asarray(array)[0] for array in self._ranked(
            self.params, inputs, self.padded([written]), top=top + 1))
        pieces = self.tokenizers['target'].pieces
        result = []
        for place, (token, piece) in enumerate(zip(written, pieces(written), strict=True)):
            ranked = zip(best[place].tolist(), pieces(best[place]), best_probabilities[place].tolist(), strict=True)
            alternatives = [(name, probability) for rival, name, probability in ranked if rival != token]
            result.append(TokenProbability(piece, float(probabilities[place]), alternatives[:top]))
        return result

    def _ends(self, text: str, count: int, side: str = 'source') -> tuple[int, list[int], list[int]]:
        """Returns the number of tokens of a text, its first `count` tokens and its last `count` tokens.

        The text is encoded in parts, so that a long text needs little memory.
        """
        length, first, last = 0, [], collections.deque(maxlen=count)
        for part in self.tokenizers[side].encode_parts(text):
            length += len(part)
            first += part[:count - len(first)].tolist()
            last.extend(part[-count:].tolist())
        return length, first, list(last)

    def _forced_log_probs(self, texts: Sequence[Forced], batch_size: int) -> list[list[float]]:
        """Returns the log-probability of each target token of each text.

        Raises:
          UserError: if a log-probability is NaN or infinite.
        """
        rows = forced_log_probs(functools.partial(self.target_log_probs, self.params), self.padded, texts, batch_size)
        if not all(map(math.isfinite, itertools.chain.from_iterable(rows))):
            raise not_finite('the texts have no scores', self.name, self.params)
        return rows

    def _apply(self, params: Params, *args: Any, **options: Any) -> Any:
        return self.module.apply({'params': params}, *args, **options)

    def teacher_forced_log_probs(self, params: Params, inputs: Mapping[str, Int[Array, 'rows _']],
                                 targets: Int[Array, 'rows length']) -> Float[Array, 'rows length']:
        """Returns the log-probability of each target token, given the arguments `inputs` of the module."""
        logits = self._apply(params, **inputs)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]

    def _teacher_forced_ranks(self, params, inputs, targets, *, top):
        probabilities = jax.nn.softmax(self._apply(params, **inputs))
        best_probabilities, best = jax.lax.top_k(probabilities, min(top, probabilities.shape[-1]))
        return jnp.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0], best, best_probabilities

    def _width(self, length: int) -> int:
        """Returns the number of tokens to which an input of `length` tokens is padded.

        It is the next multiple of LENGTHS, or the maximum length of the model if this is smaller.
        """
        length = max(1, length)
        return max(length, min(-(-length // LENGTHS) * LENGTHS, self.module.length_limit or sys.maxsize))

    def padded(self, rows: Sequence[Sequence[int]], count: int = 0) -> Int[np.ndarray, 'rows length']:
        """Returns lists of tokens as an array with at least `count` rows. Missing tokens are PAD.

        The length is the `_width` of the longest list.
        """
        length = self._width(max(map(len, rows), default=1))
        padded = np.full((max(count, len(rows)), length), PAD, np.int32)
        for row, tokens in enumerate(rows):
            padded[row, :len(tokens)] = tokens
        return padded


class SearchModel(TextModel):
    """A model that writes text by a search, token by token. The module has encode, init_cache and decode_step.

    Attributes:
      cut: if true, an output that reaches its length limit stops without an end token. If false, its last token is
        forced to be the end token.
      distribute: a function that puts the arrays of a search on the devices of the parameters.
    """

    cut = False

    def __init__(self, module: nn.Module, params: Params, tokenizers: Mapping[str, Tokenizer]):
        super().__init__(module, params, tokenizers)
        self.distribute: Callable[[Any], Any] = lambda arrays: arrays  # no change for one device
        self._batches = BatchSearch(module)
        self._automata: dict[Any, Automaton] = {}  # {phrases: automaton}; only the last automaton is kept

    @abc.abstractmethod
    def _search_input(self, tokens: Sequence[int], options: SearchOptions) -> SearchInput:
        """Returns the encoder input, the start token and the length limit of a tokenised source."""

    @abc.abstractmethod
    def _max_length(self, width: int, options: SearchOptions) -> int:
        """Returns the largest possible `SearchInput.limit` for sources that are padded to `width` tokens."""

    def automaton(self, options: SearchOptions) -> Automaton | None:
        """Returns the automaton that excludes the words to avoid, or None if there are no words to avoid."""
        if not options.avoid:
            return None
        automaton = self._automata.get(options.avoid)
        if automaton is None:
            automaton = Automaton(options.avoid, self.tokenizers['target'], self.multiline)
            self._automata = {options.avoid: automaton}  # another thread may replace it before this method returns
        return automaton

    def check_options(self, options: SearchOptions) -> None:
        """Raises UserError if no search is possible with these options, whatever the input is."""
        self.automaton(options)

    def find_all(self, sources: Sequence[Sequence[int]], numbers: Sequence[int], options: SearchOptions,
                 draw: int = 0, limits: Sequence[int] | None = None,
                 begins: Sequence[Begin] | None = None) -> list[list[Hypothesis]]:
        """Returns the hypotheses for each tokenised source, best first. `find` explains the arguments.

        Raises:
          UserError: if a source has no hypothesis, because the logits are NaN or infinite.
        """
        threads = threads_for(options.batch_size)
        share = dataclasses.replace(options, batch_size=rows_per_thread(options.batch_size, threads, len(sources)),
                                    n_best=options.beam if options.method == 'mbr' else options.n_best)
        self.automaton(options)  # built once, before the threads start

        def find(rows: Sequence[int]) -> search.Hypotheses:
            return self.find([sources[row] for row in rows], [numbers[row] for row in rows], share, draw,
                             limits and [limits[row] for row in rows], begins and [begins[row] for row in rows])

        results: list[list[Hypothesis]] = [[] for _ in sources]
        batches = self._batched(sources, share)
        for rows, hypotheses in zip(batches, find_in_threads(find, batches, threads), strict=True):
            for index, row in enumerate(rows):
                results[row] = [self._hypothesis(hypotheses, index, rank) for rank in range(share.n_best)
                                if hypotheses.scores[index, rank] > search.IMPOSSIBLE]
        if not all(results):
            raise not_finite('the search finds no output', self.name, self.params)
        if options.method == 'mbr':
            results = [by_expected_chrf(hypotheses)[:options.n_best] for hypotheses in results]
        return results

    def _batched(self, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[list[int]]:
        """Divides the rows of `sources` into batches of at most options.batch_size rows.

        Inputs of similar length are in the same batch, because they need less padding and end at about the same step.
        The longest inputs come first. Otherwise one thread would still work on them when the other threads are idle.
        """
        def width(row: int) -> int:
            return self._width(len(self._search_input(sources[row], options).encoded))

        def slices(rows: Sequence[int]) -> list[list[int]]:
            return [list(rows[begin:begin + options.batch_size]) for begin in range(0, len(rows), options.batch_size)]

        order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))
        mixed = slices(order)
        # If there are several batches, all inputs of a batch are padded to the same width. So a few long inputs form a
        # small batch, which needs few programs, instead of making a full batch wider. But inputs of many widths, such
        # as prompts, would form many small batches. So there may be at most two batches more than without this rule.
        of_one_width = [rows for _, group in itertools.groupby(order, width) for rows in slices(list(group))]
        return of_one_width if len(mixed) > 1 and len(of_one_width) <= len(mixed) + 2 else mixed

    def find(self, sources: Sequence[Sequence[int]], numbers: Sequence[int], options: SearchOptions,
             draw: int = 0, limits: Sequence[int] | None = None,
             begins: Sequence[Begin] | None = None) -> search.Hypotheses:
        """Returns the hypotheses for at most options.batch_size tokenised sources, as NumPy arrays.

        Random samples for a source depend on the seed, on the index of the source (`numbers`) and on `draw`, not on
        the other sources. `limits` has the maximum number of new tokens for each source. By default, `options`
        determine these numbers. `begins` are the required beginnings of the outputs.
        """
        # The number of rows is the size of a full batch or a power of two, so that few shapes are compiled.
        rows = min(options.batch_size, 1 << (len(sources) - 1).bit_length())
        inputs = [self._search_input(tokens, options) for tokens in sources]
        source = self.padded([single.encoded for single in inputs], rows)
        start, at_most, number = np.full(rows, BOS, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.uint32)
        start[:len(sources)] = [single.start for single in inputs]
        at_most[:len(sources)] = [single.limit for single in inputs] if limits is None else limits
        number[:len(sources)] = numbers
        settings = self._settings(self._max_length(source.shape[1], options), options)
        batch = SearchBatch(source, start, at_most, number)
        automaton = self.automaton(options)
        if automaton is not None:
            places = np.zeros(rows, np.int32)
            places[:len(sources)] = [begin.place for begin in begins] if begins else 0
            batch = batch._replace(places=places)
        if begins and any(begin.prefix for begin in begins):
            batch = batch._replace(prefixes=self.padded([begin.prefix for begin in begins], rows))
        return self._batches.find(self.params, settings, SearchBatch(*self.distribute(tuple(batch))), options.seed,
                                  draw, self._follow(automaton, batch))

    def _follow(self, automaton: Automaton | None, batch: SearchBatch) -> search.Follow | None:
        """Returns the rules that restrict the next tokens of a batch, or None if there are no rules."""
        tokenizer = self.tokenizers['target']
        if automaton is not None:
            return search.Follow(automaton.padded, np.int32(automaton.ends), begin_words(tokenizer),
                                 join_words(tokenizer))
        if batch.prefixes is not None and (batch.prefixes == search.NEW_WORD).any():
            return search.Follow(new_word=begin_words(tokenizer))
        return None

    def _settings(self, max_length: int, options: SearchOptions) -> search.Search:
        max_length = min(2 ** (max_length - 1).bit_length(), self.module.length_limit or max_length)
        common = {'vocabulary': VOCABULARY, 'max_length': max_length, 'alpha': options.alpha, 'cut': self.cut}
        if options.method in BEAM_METHODS:
            return search.Beam(**common, beam=options.beam, n_best=options.n_best, patience=options.patience)
        return search.Sample(**common, num_samples=options.n_best, top_k=options.top_k, top_p=options.top_p,
                             temperature=options.temperature if options.method == 'sample' else 0.0)

    def _hypothesis(self, hypotheses: search.Hypotheses, row: int, rank: int) -> Hypothesis:
        tokens = hypotheses.tokens[row, rank]
        tokens = tokens[tokens != PAD].tolist()
        ended = tokens[-1:] == [EOS]
        tokens = tokens[:-1] if ended else tokens
        return Hypothesis(self.tokenizers['target'].decode(tokens), tokens, float(hypotheses.log_probs[row, rank]),
                          float(hypotheses.scores[row, rank]), ended)


def _chunk(lines: Iterator[str], count: int) -> list[str]:
    """Returns the next `count` lines, or fewer if they exceed CHUNK_CHARACTERS or the next line has not arrived."""
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


def not_finite(problem: str, name: str, params: Params) -> UserError:
    """Returns the error for a model whose outputs are NaN or infinite.

    Args:
      problem: the beginning of the message, such as 'the texts have no scores'.
      name: the name of the run.
      params: the parameters of the model. They may include the numbers of edits.
    """
    trained = {part: leaves for part, leaves in params.items() if part != EDITS}
    finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(trained))
    advice = ('Remove the edits of the model, or use smaller numbers in the edits' if finite and EDITS in params else
              'Use another --checkpoint, or train again with a lower learning rate')
    outputs = 'outputs' if finite else 'parameters and outputs'
    return UserError(f'{name}: {problem}, because the {outputs} of the model are NaN or infinite. {advice}')


def attention_weights(collections: Mapping[str, Any]) -> dict[str, Float[np.ndarray, 'layer batch head t s']]:
    """Returns {kind: weights} from the collection 'attention', in which the module has stored its attention weights.

    Kinds are 'encoder' and 'decoder' (self-attention) and 'cross'.

    Raises:
      UserError: for an ensemble, because each run of an ensemble has its own weights.
    """
    if 'members_0' in collections.get('attention', {}):
        raise UserError('each run of an ensemble has its own attention weights, so the ensemble has none. Open a '
                        'single run')
    weights: dict[str, np.ndarray] = {}
    # In training with several processes, each process has only a part of the weights.
    for stack, layers in process_allgather(dict(collections.get('attention', {})), tiled=True).items():
        order = sorted(layers, key=lambda name: int(name.rpartition('_')[2]))
        for sublayer, kind in ('self_attention', stack), ('cross_attention', 'cross'):
            if sublayer in layers[order[0]]:
                weights[kind] = np.stack([layers[layer][sublayer]['weights'][0] for layer in order])
    return weights
