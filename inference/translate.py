"""Sentences in, translations out."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from errors import UserError
from inference import search
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK, Tokenizer

log = logging.getLogger('allyouneed.decode')

VOCABULARY = search.Vocabulary(pad=PAD, bos=BOS, eos=EOS, others=(UNK,))
LENGTHS = 16  # sources are padded to multiples of this: a handful of compilations


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One output: its text, its tokens without the end, log-probability, and the score that ranks it."""
    text: str
    tokens: list[int]
    log_prob: float
    score: float


@dataclasses.dataclass(frozen=True)
class Translation:
    """A source sentence and what was found for it, the best first. An empty source has one empty hypothesis."""
    source: str
    source_tokens: list[int]
    hypotheses: list[Hypothesis]

    @property
    def text(self) -> str:
        return self.hypotheses[0].text


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """How to decode.

    Attributes:
      method: 'beam', 'greedy' or 'sample'.
      beam: hypotheses that live at a time.
      alpha: of the length penalty ((5 + |Y|) / 6)^alpha.
      n_best: hypotheses to return; for 'sample', independent draws.
      extra_length: outputs have at most this many tokens more than their source.
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
        require(self.method in ('beam', 'greedy', 'sample'), f'method={self.method!r} is not beam, greedy or sample')
        require(self.beam >= 1, f'beam={self.beam} must be at least 1')
        require(self.n_best >= 1, f'n_best={self.n_best} must be at least 1')
        require(self.method != 'beam' or self.n_best <= self.beam,
                f'n_best={self.n_best} is more than beam={self.beam} can hold: raise beam')
        require(self.method != 'greedy' or self.n_best == 1, 'greedy search has one result: use n_best=1 or method=beam')
        require(self.extra_length >= 0, f'extra_length={self.extra_length} must not be negative')
        require(self.batch_size >= 1, f'batch_size={self.batch_size} must be at least 1')
        require(self.temperature > 0, f'temperature={self.temperature} must be positive; method=greedy takes the best')
        require(self.top_k >= 0, f'top_k={self.top_k} must not be negative; 0 keeps every token')
        require(0 < self.top_p <= 1, f'top_p={self.top_p} must be above 0 and at most 1')


class Translator:
    """A model with its parameters and tokenizers.

    Attributes:
      module: any module with encode, init_cache, decode_step and length_limit.
      params: its parameters.
      tokenizers: {'source': ..., 'target': ...}.
      max_length: longest source in tokens; the rest is cut, with a warning.
    """

    def __init__(self, module: nn.Module, params: Any, tokenizers: Mapping[str, Tokenizer], max_length: int):
        self.module, self.params, self.tokenizers, self.max_length = module, params, dict(tokenizers), max_length
        self._search = jax.jit(self._encode_and_search, static_argnames=('max_length', 'options'))
        self._token_log_probs = jax.jit(self._teacher_forced)
        self._attention = jax.jit(
            lambda params, inputs: module.apply({'params': params}, **inputs, mutable=['attention'])[1]['attention'])

    def translate(self, sentences: Sequence[str], options: SearchOptions = SearchOptions(), *,
                  first: int = 0) -> list[Translation]:
        """Translates, in the order given. An empty (or blank) sentence becomes an empty one.

        `first` is the number of the first sentence in its file: with the seed, it decides what is drawn.
        """
        tokenizer = self.tokenizers['source']
        sources = [self._cut(tokenizer.encode(text), first + row) if text.strip() else []
                   for row, text in enumerate(sentences)]
        results = [Translation(text, tokens, [Hypothesis('', [], 0.0, 0.0)])
                   for text, tokens in zip(sentences, sources, strict=True)]
        # Sentences of like length together: less padding, and they end at about the same step.
        order = sorted((row for row, tokens in enumerate(sources) if tokens), key=lambda row: len(sources[row]))
        for begin in range(0, len(order), options.batch_size):
            rows = order[begin:begin + options.batch_size]
            found = self.find([sources[row] for row in rows], [first + row for row in rows], options)
            for index, row in enumerate(rows):
                hypotheses = [self._hypothesis(found, index, rank) for rank in range(options.n_best)
                              if found.scores[index, rank] > search.IMPOSSIBLE]
                results[row] = dataclasses.replace(results[row], hypotheses=hypotheses)
        return results

    def find(self, sources: Sequence[Sequence[int]], numbers: Sequence[int],
             options: SearchOptions) -> search.Hypotheses:
        """The hypotheses of at most options.batch_size tokenised sentences, as NumPy arrays."""
        # Few batch shapes: a full batch, or the next power of two.
        rows = min(options.batch_size, 1 << (len(sources) - 1).bit_length())
        batch = self._padded([[*tokens, EOS] for tokens in sources], rows)
        max_length = batch.shape[1] - 1 + options.extra_length
        limits = np.zeros(rows, np.int32)
        for row, tokens in enumerate(sources):
            limits[row] = len(tokens) + options.extra_length
        limits = np.minimum(limits, self.module.length_limit or limits)
        numbers = np.array([*numbers, *[0] * (rows - len(sources))], np.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(options.seed), numbers)
        # The seed is in the keys: another one needs no other program.
        found = self._search(self.params, batch, limits, keys, max_length=max_length,
                             options=dataclasses.replace(options, seed=0))
        return jax.tree.map(np.asarray, found)

    def attention(self, translation: Translation) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """Weights of every layer and head while the model reads the source and writes its best hypothesis.

        Returns:
          {'encoder': [layer, head, source, source], 'decoder': [layer, head, target, target],
          'cross': [layer, head, target, source]}, the end tokens included; row t of the last two predicts
          target token t.
        """
        # Padded to a multiple of LENGTHS, so that many sentences share a compilation.
        source, target = [*translation.source_tokens, EOS], [BOS, *translation.hypotheses[0].tokens]
        inputs = {'source': self._padded([source]), 'target': self._padded([target])}
        tree = self._attention(self.params, inputs)
        ends = {'source': len(source), 'target': len(target)}

        def stack(part, kind, rows, columns):
            layers = sorted(tree[part], key=lambda name: int(name.rpartition('_')[2]))
            weights = np.stack([np.asarray(tree[part][layer][kind]['weights'][0])[0] for layer in layers])
            return weights[:, :, :ends[rows], :ends[columns]]

        return {'encoder': stack('encoder', 'self_attention', 'source', 'source'),
                'decoder': stack('decoder', 'self_attention', 'target', 'target'),
                'cross': stack('decoder', 'cross_attention', 'target', 'source')}

    def token_log_probs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """log p of each target token, the end token included, given the source and the tokens before it."""
        source = self._padded([[*source, EOS] for source, _ in pairs])
        target = self._padded([[BOS, *target] for _, target in pairs])
        targets = self._padded([[*target, EOS] for _, target in pairs])
        log_probs = np.asarray(self._token_log_probs(self.params, source, target, targets))
        return [log_probs[row, :len(target) + 1].tolist() for row, (_, target) in enumerate(pairs)]

    def _teacher_forced(self, params, source, target, targets):
        logits = self.module.apply({'params': params}, source=source, target=target)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]

    def _cut(self, tokens: list[int], number: int) -> list[int]:
        if len(tokens) < self.max_length:
            return tokens
        log.warning('line %d has %d tokens: only the first %d are translated (config.data.max_length)',
                    number + 1, len(tokens), self.max_length - 1)
        return tokens[:self.max_length - 1]

    def _hypothesis(self, found: search.Hypotheses, row: int, rank: int) -> Hypothesis:
        tokens = found.tokens[row, rank]
        tokens = tokens[:np.argmax(tokens == EOS)].tolist()
        return Hypothesis(self.tokenizers['target'].decode(tokens), tokens, float(found.log_probs[row, rank]),
                          float(found.scores[row, rank]))

    def _encode_and_search(self, params, source, limits, keys, *, max_length, options):
        apply = functools.partial(self.module.apply, {'params': params})
        memory = apply(source, method='encode')

        def decode_step(tokens, cache):
            return apply(tokens, cache, method='decode_step')

        width = options.beam if options.method == 'beam' else options.n_best
        cache = apply(memory, width, max_length, method='init_cache')
        if options.method == 'beam':
            return search.beam_search(decode_step, cache, limits, vocabulary=VOCABULARY, max_length=max_length,
                                      beam=width, alpha=options.alpha, n_best=options.n_best)
        return search.sample(decode_step, cache, limits, vocabulary=VOCABULARY, max_length=max_length,
                             num_samples=width, alpha=options.alpha, keys=keys,
                             temperature=options.temperature if options.method == 'sample' else 0.0,
                             top_k=options.top_k, top_p=options.top_p)

    def _padded(self, rows: Sequence[Sequence[int]], count: int = 0) -> Int[np.ndarray, 'rows length']:
        """The rows as an array of at least `count`, their length a multiple of LENGTHS where the model reaches it."""
        longest = max(map(len, rows))
        length = max(longest, min(-(-longest // LENGTHS) * LENGTHS, self.module.length_limit or sys.maxsize))
        padded = np.full((max(count, len(rows)), length), PAD, np.int32)
        for row, tokens in enumerate(rows):
            padded[row, :len(tokens)] = tokens
        return padded
