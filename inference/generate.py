"""Prompts in, continuations out."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from errors import UserError
from inference.scores import Evaluation, bits_per_character
from inference.text import (
    Hypothesis,
    Output,
    SearchOptions,
    TextModel,
    attention_weights,
    search_options,
)
from input_pipeline.data import DocumentData
from input_pipeline.tokenizer import BOS, Tokenizer
from training.loss import Sums, cross_entropy
from training.step import eval_step, evaluate

SAMPLES = 3


class Generator(TextModel):
    """A decoder-only language model.

    Attributes:
      context: tokens of a training window. The model is never shown more at a time: what is generated beyond
        continues the last half of it.
      whole_documents: it was trained on whole documents, so that a prompt begins one, after the start token.
        Otherwise a prompt is a place in the middle of a text.
    """

    def __init__(self, module: nn.Module, params: Any, tokenizer: Tokenizer, context: int, whole_documents: bool):
        super().__init__(module, params, {'source': tokenizer, 'target': tokenizer})
        self.context, self.whole_documents = context, whole_documents

    def generate(self, prompts: Sequence[str], options: SearchOptions = SearchOptions(method='sample'), *,
                 first: int = 0) -> list[Output]:
        """Continues each prompt by options.extra_length tokens, or until its document ends.

        The prompt is read in one pass. `first` is the number of the first prompt in its file: with the seed, it
        decides what is drawn.

        Raises:
          UserError: if more is asked for than fits a window, of a search that cannot go on in another one.
        """
        tokens = [self._begin(prompt) for prompt in prompts]
        one_way = options.n_best == 1 and options.method != 'beam'
        if not one_way and (longest := max(map(len, tokens)) + options.extra_length) > self.context:
            raise UserError(f'prompt and continuation have {longest} tokens, but the model was trained on windows of '
                            f'{self.context}: beam search and n_best>1 stay in one window; lower extra_length')
        best = [Hypothesis('', [], 0.0, 0.0) for _ in prompts]
        open_rows, rest = [row for row in range(len(prompts)) if options.extra_length], {}
        draw = 0
        while open_rows:
            sources = [self._window([*tokens[row], *best[row].tokens]) for row in open_rows]
            room = min(self.context - max(map(len, sources)),
                       options.extra_length - min(len(best[row].tokens) for row in open_rows))
            found = self.find_all(sources, [first + row for row in open_rows],
                                  dataclasses.replace(options, extra_length=room), draw)
            still = []
            for row, hypotheses in zip(open_rows, found, strict=True):
                best[row], rest[row] = self._joined(best[row], hypotheses[0]), hypotheses[1:]
                if len(hypotheses[0].tokens) == room and len(best[row].tokens) < options.extra_length:
                    still.append(row)
            open_rows, draw = still, draw + 1
        return [Output(prompt, tokens[row], [best[row], *rest.get(row, [])]) for row, prompt in enumerate(prompts)]

    respond = generate

    def validate(self, data: DocumentData, sums: Sums, config: ConfigDict) -> Evaluation:
        """Bits per character of the validation split; shows a sample."""
        output, = self.generate([self.opening], search_options(config, method='sample', n_best=1))
        bits = bits_per_character(float(sums.others['nll']), data.characters('validation'))
        return Evaluation({'bits_per_character': bits}, f'  {output.text!r}')

    def score(self, data: DocumentData, split: str, config: ConfigDict,
              options: SearchOptions) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
        """Cross-entropy of a whole split, window by window, and samples."""
        step = jax.jit(functools.partial(eval_step, module=self.module,
                                         loss=functools.partial(cross_entropy, label_smoothing=0.0)))
        began, plan = time.perf_counter(), data.plan(split)
        sums = evaluate(step, self.params, map(plan.batch, range(len(plan))))
        seconds = time.perf_counter() - began
        samples = [output.text for output in self.generate([self.opening] * SAMPLES, options)]
        results = sums.means() | {
            'n': int(sums.tokens), 'bits_per_character': bits_per_character(float(sums.others['nll']),
                                                                            data.characters(split)),
            'characters': data.characters(split), 'seconds': seconds,
            'tokens_per_second': float(sums.tokens) / seconds, 'samples': samples}
        return results, [(sample,) for sample in samples]

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

    def _begin(self, prompt: str) -> list[int]:
        tokens = list(self.tokenizers['source'].encode(prompt))
        return tokens if tokens and not self.whole_documents else [BOS, *tokens]

    def _window(self, tokens: list[int]) -> list[int]:
        return tokens if len(tokens) < self.context else tokens[-max(1, self.context // 2):]

    def _joined(self, so_far: Hypothesis, new: Hypothesis) -> Hypothesis:
        tokens = [*so_far.tokens, *new.tokens]
        return Hypothesis(self.tokenizers['target'].decode(tokens), tokens, so_far.log_prob + new.log_prob,
                          so_far.score + new.score)

    def _problem(self, tokens: Sequence[int], options: SearchOptions) -> tuple[list[int], int, int]:
        # One more, for the end token that the search puts at the limit.
        return list(tokens[:-1]), tokens[-1], options.extra_length + 1

    def _max_length(self, width: int, options: SearchOptions) -> int:
        return options.extra_length + 1
