"""Prompts in, continuations out."""

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from errors import UserError
from inference.scores import Evaluation, bits_per_character
from inference.search import length_penalty
from inference.text import (
    LENGTHS,
    Hypothesis,
    Output,
    SearchOptions,
    TextModel,
    attention_weights,
    checked_texts,
    search_options,
)
from input_pipeline.data import DocumentData
from input_pipeline.tokenizer import BOS, PAD, Tokenizer
from training.loss import Sums, cross_entropy
from training.objective import forward, supervised
from training.resources import compile_time
from training.step import eval_step, evaluate

log = logging.getLogger('allyouneed.decode')

SAMPLES = 3


class Generator(TextModel):
    """A decoder-only language model.

    Attributes:
      context: tokens of a training window. The model is never shown more at a time: what is generated beyond
        continues the last half of it.
      whole_documents: it was trained on whole documents, so that a prompt begins one, after the start token.
        Otherwise a prompt is a place in the middle of a text.
    """

    cut = True

    def __init__(self, module: nn.Module, params: Any, tokenizer: Tokenizer, context: int, whole_documents: bool):
        super().__init__(module, params, {'source': tokenizer, 'target': tokenizer})
        self.context, self.whole_documents = context, whole_documents

    def generate(self, prompts: Sequence[str], options: SearchOptions = SearchOptions(method='sample'), *,
                 first: int = 0) -> list[Output]:
        """Continues each prompt by options.extra_length tokens, or until its document ends. The log-probability of a
        continuation is that of its tokens, and of the end token if its document ends: none is forced.

        The prompt is read in one pass; of one that is longer than a window only the end, with a warning. `first` is
        the number of the first prompt in its file: with the seed, it decides what is drawn.

        Raises:
          UserError: if more is asked for than fits a window, of a search that cannot go on in another one.
        """
        prompts = checked_texts(prompts)
        one_way = options.n_best == 1 and options.method != 'beam'
        if not one_way and options.extra_length >= self.context:
            raise UserError(f'a continuation of {options.extra_length} tokens is asked for, but the model was trained '
                            f'on windows of {self.context}, its prompt included: beam search and n_best>1 stay in one '
                            'window; lower extra_length')
        # As many as can be read: of a window that is full its last half, to go on from there.
        room, kept = (max(1, self.context - 1), max(1, self.context // 2)) if one_way else (
            (self.context - options.extra_length,) * 2)
        tokens = [self._begin(prompt, first + row, room, kept) for row, prompt in enumerate(prompts)]
        best = [Hypothesis('', [], 0.0, 0.0, ended=False) for _ in prompts]
        open_rows, rest = [row for row in range(len(prompts)) if options.extra_length], {}
        draw = 0  # windows that a row has had: one after the other, each filled whatever the other rows need
        while open_rows:
            sources = [self._window([*tokens[row], *best[row].tokens]) for row in open_rows]
            rooms = [min(max(1, self.context - len(source)), options.extra_length - len(best[row].tokens))
                     for row, source in zip(open_rows, sources, strict=True)]
            longest = min(-(-max(rooms) // LENGTHS) * LENGTHS, options.extra_length)  # few of them: a program for each
            found = self.find_all(sources, [first + row for row in open_rows],
                                  dataclasses.replace(options, extra_length=longest), draw, rooms)
            still = []
            for row, hypotheses in zip(open_rows, found, strict=True):
                best[row], rest[row] = self._joined(best[row], hypotheses[0], options.alpha), hypotheses[1:]
                if not best[row].ended and len(best[row].tokens) < options.extra_length:
                    still.append(row)
            open_rows, draw = still, draw + 1
        return [Output(prompt, tokens[row], [best[row], *rest.get(row, [])]) for row, prompt in enumerate(prompts)]

    respond = generate

    @property
    def example(self) -> dict[str, Int[np.ndarray, '1 1']]:
        """Inputs of the module, of which only names, types and axes count."""
        return {'tokens': np.ones((1, 1), np.int32)}

    def validate(self, data: DocumentData, sums: Sums, config: ConfigDict) -> Evaluation:
        """Bits per character of the validation split; shows a sample."""
        output, = self.generate([self.opening], search_options(config, method='sample', n_best=1))
        bits = bits_per_character(float(sums.others['nll']), data.characters('validation'))
        return Evaluation({'bits_per_character': bits}, f'  {output.text!r}')

    def score(self, data: DocumentData, split: str, config: ConfigDict,
              options: SearchOptions) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
        """Cross-entropy of a whole split, window by window, and samples."""
        step = jax.jit(functools.partial(eval_step, apply=forward(self.module), objective=supervised(
            functools.partial(cross_entropy, label_smoothing=0.0))))
        plan = data.plan(split)
        began, compiled_before = time.perf_counter(), compile_time.seconds
        sums = jax.block_until_ready(evaluate(step, self.params, map(plan.batch, range(len(plan)))))
        seconds, compiling = time.perf_counter() - began, compile_time.seconds - compiled_before
        samples = [output.text for output in self.generate([self.opening] * SAMPLES, options)]
        results = sums.means() | {
            'n': int(sums.tokens), 'bits_per_character': bits_per_character(float(sums.others['nll']),
                                                                            data.characters(split)),
            'characters': data.characters(split), 'seconds': seconds, 'compile_seconds': compiling,
            'tokens_per_second': float(sums.tokens) / max(seconds - compiling, 1e-9), 'samples': samples}
        return results, [(sample,) for sample in samples]

    def examples(self, data: DocumentData, split: str, count: int,
                 options: SearchOptions) -> list[tuple[Output, str]]:
        """The first windows of a split as prompts without a continuation: what the model makes of text that it reads."""
        plan = data.plan(split)
        windows = itertools.chain.from_iterable(plan.batch(step)['inputs']['tokens'] for step in range(len(plan)))
        tokens = [window[window != PAD].tolist() for window in itertools.islice(windows, count)]
        decode = self.tokenizers['source'].decode
        nothing = Hypothesis('', [], 0.0, 0.0, ended=False)
        return [(Output(decode(each), each, [nothing]), '') for each in tokens if each]

    @property
    def opening(self) -> str:
        """A prompt that says nothing: the beginning of a document, or of a line."""
        return '' if self.whole_documents else '\n'

    def attention(self, output: Output) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """{'encoder': [layer, head, t, s]} of prompt and best continuation, as far as one window reaches."""
        tokens = self._shown(output)
        weights = attention_weights(self._attention(self.params, {'tokens': self._padded([tokens])}))
        return {kind: each[:, 0, :, :len(tokens), :len(tokens)] for kind, each in weights.items()}

    def axes(self, output: Output) -> dict[str, tuple[list[str], list[str]]]:
        pieces = self.tokenizers['target'].pieces(self._shown(output))
        return {'encoder': (pieces, pieces)}

    def _read_and_written(self, output: Output) -> tuple[dict[str, list[int]], list[int]]:
        tokens = self._shown(output)
        return {'tokens': tokens[:-1]}, tokens[1:]

    def _shown(self, output):
        return [*output.source_tokens, *output.hypotheses[0].tokens][:self.context]

    def _begin(self, prompt: str, number: int, room: int, kept: int) -> list[int]:
        """A prompt's tokens, the last `kept` of them if they are more than `room`."""
        length, first, last = self._ends(prompt, room)
        start = [BOS] if self.whole_documents or not length else []
        if len(start) + length <= room:
            return start + first
        log.warning('line %d has %d tokens: only the last %d are read (config.data.context)', number + 1, length,
                    min(kept, length))
        return last[-kept:]

    def _window(self, tokens: list[int]) -> list[int]:
        return tokens if len(tokens) < self.context else tokens[-max(1, self.context // 2):]

    def _joined(self, so_far: Hypothesis, new: Hypothesis, alpha: float) -> Hypothesis:
        tokens, log_prob = [*so_far.tokens, *new.tokens], so_far.log_prob + new.log_prob
        return Hypothesis(self.tokenizers['target'].decode(tokens), tokens, log_prob,
                          log_prob / length_penalty(len(tokens) + new.ended, alpha), new.ended)

    def _problem(self, tokens: Sequence[int], options: SearchOptions) -> tuple[list[int], int, int]:
        return list(tokens[:-1]), tokens[-1], options.extra_length

    def _max_length(self, width: int, options: SearchOptions) -> int:
        return options.extra_length
