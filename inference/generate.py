"""Continuation of prompts with a decoder-only language model."""

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
from jaxtyping import Float
from ml_collections import ConfigDict
from typing_extensions import override

from inference.forced import Forced
from inference.options import SAMPLING, SearchOptions, search_options
from inference.scores import Evaluation, bits_per_character
from inference.search import length_penalty
from inference.text import (
    LENGTHS,
    Begin,
    Hypothesis,
    Output,
    SearchInput,
    SearchModel,
    attention_weights,
    checked_texts,
)
from input_pipeline.data import DocumentData
from input_pipeline.tokenizer import BOS, EOS, PAD, Tokenizer
from model import Params
from model.evaluation import eval_step, evaluate, forward, supervised
from model.losses import Sums, cross_entropy
from runtime.errors import UserError
from runtime.resources import compile_time

log = logging.getLogger('allyouneed.decode')

SAMPLES = 3  # number of texts that a score shows


class Generator(SearchModel):
    """A decoder-only language model.

    Attributes:
      context: the number of tokens of a training window. The model never reads more at a time. A text that exceeds its
        window continues in a new window, which begins with the last half of the previous one.
      whole_documents: whether the model was trained on whole documents. Then a prompt is the beginning of a document
        and follows the start token; otherwise it is a piece from the middle of a text.
    """

    cut, multiline = True, True
    unpredicted = 1
    titles = {'encoder': ('text', 'text')}

    def __init__(self, module: nn.Module, params: Params, tokenizer: Tokenizer, context: int, whole_documents: bool):
        super().__init__(module, params, {'source': tokenizer, 'target': tokenizer})
        self.context, self.whole_documents = context, whole_documents

    def generate(self, prompts: Sequence[str], options: SearchOptions = SAMPLING, *,
                 first: int = 0) -> list[Output]:
        """Continues each prompt by options.extra_length tokens, or until its document ends.

        The text of an output is the text that follows its prompt (`Tokenizer.continuation`). It begins with a space if
        a new word begins there. An empty prompt stands for the start token, and its continuation begins a text.

        No end token is forced: the log-probability of a continuation is that of its tokens, with the end token if the
        document ends. Only the end of a prompt that is longer than a window is read, with a warning. `first` is the
        number of prompts before them in their file; draws depend on it and on the seed.

        Raises:
          UserError: if a search with several hypotheses, which cannot change its window, would exceed one window.
        """
        prompts = checked_texts(prompts)
        one_way = options.n_best == 1 and options.method != 'beam'
        if not one_way and options.extra_length >= self.context:
            raise UserError(f'extra_length={options.extra_length}: must be less than {self.context}, the window that '
                            'the model was trained on, because beam search and n_best>1 use one window. Decrease '
                            'extra_length')
        if one_way:  # a full window continues from its last half
            room, kept = max(1, self.context - 1), max(1, self.context // 2)
        else:
            room = kept = self.context - options.extra_length
        begins = [self._begin(prompt, first + row, room, kept) for row, prompt in enumerate(prompts)]
        tokens = [read for read, _ in begins]
        best = [Hypothesis('', [], 0.0, 0.0, ended=False) for _ in prompts]
        open_rows, rest = [row for row in range(len(prompts)) if options.extra_length], {}
        automaton = self.automaton(options)
        places = [automaton.behind(read) for read in tokens] if automaton else []
        draw = 0  # number of windows that each open row has filled
        while open_rows:
            sources = [self._window([*tokens[row], *best[row].tokens]) for row in open_rows]
            rooms = [min(max(1, self.context - len(source)), options.extra_length - len(best[row].tokens))
                     for row, source in zip(open_rows, sources, strict=True)]
            # A multiple of LENGTHS, because each length is compiled.
            longest = min(-(-max(rooms) // LENGTHS) * LENGTHS, options.extra_length)
            states = automaton and [Begin(place=automaton.after(best[row].tokens, places[row]))
                                    for row in open_rows]
            found = self.find_all(sources, [first + row for row in open_rows],
                                  dataclasses.replace(options, extra_length=longest), draw, rooms, states)
            still_open = []
            for row, hypotheses in zip(open_rows, found, strict=True):
                best[row], rest[row] = self._joined(best[row], hypotheses[0], options.alpha), hypotheses[1:]
                if not best[row].ended and len(best[row].tokens) < options.extra_length:
                    still_open.append(row)
            open_rows, draw = still_open, draw + 1
        tokenizer = self.tokenizers['target']
        return [Output(prompt, read, [
            dataclasses.replace(hypothesis, text=tokenizer.continuation(read, hypothesis.tokens, known))
            for hypothesis in (best[row], *rest.get(row, []))])
            for row, (prompt, (read, known)) in enumerate(zip(prompts, begins, strict=True))]

    def forced_all(self, texts: Sequence[str], options: SearchOptions = SAMPLING, *, first: int = 0) -> list[Output]:
        """Returns an output for each text, whose only hypothesis is the text as a whole document.

        Its log-probability is that of its tokens and the end token, after the start token. A text that is longer than a
        window is scored in several windows, each of which begins with the last half of the previous one. `first` is not
        used, because no text is too long.
        """
        texts = checked_texts(texts)
        tokens = [self.tokenizers['target'].encode(text) for text in texts]
        kept = max(1, self.context // 2)
        size = max(self.context, kept + 1)
        windows, origins = [], []  # of each window: its text, and how many of its targets are known
        for row, text_tokens in enumerate(tokens):
            whole, done = [BOS, *text_tokens, EOS], 1
            while done < len(whole):
                begin = max(0, done - kept) if done > 1 else 0
                window = whole[begin:begin + size]
                windows.append(Forced({'tokens': window[:-1]}, window[1:]))
                origins.append((row, done - begin - 1))
                done = begin + len(window)
        log_probs: list[list[float]] = [[] for _ in texts]
        for (row, known), values in zip(origins, self._forced_log_probs(windows, options.batch_size), strict=True):
            log_probs[row] += values[known:]
        return [Output('', [BOS], [Hypothesis.forced(*row, options.alpha)])
                for row in zip(texts, tokens, log_probs, strict=True)]

    @override
    def respond(self, lines: Sequence[str], options: SearchOptions, *, first: int = 0) -> list[Output]:
        return self.generate(lines, options, first=first)

    def validate(self, data: DocumentData, sums: Sums, config: ConfigDict) -> Evaluation:
        """Returns bits per character of the validation split, and a sample."""
        output, = self.generate([self.opening], search_options(config, method='sample', n_best=1))
        bits = bits_per_character(float(sums.others['nll']), data.characters('validation'))
        return Evaluation({'bits_per_character': bits}, f'  {output.text!r}')

    def score(self, data: DocumentData, split: str, config: ConfigDict,
              options: SearchOptions) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
        """Returns the cross-entropy of a whole split, window by window, and samples."""
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

    @override
    def examples(self, data: DocumentData, split: str, count: int,
                 options: SearchOptions) -> list[tuple[Output, str]]:
        """Returns the first windows of a split as prompts with empty continuations."""
        plan = data.plan(split)
        windows = itertools.chain.from_iterable(plan.batch(step)['inputs']['tokens'] for step in range(len(plan)))
        tokens = [window[window != PAD].tolist() for window in itertools.islice(windows, count)]
        decode = self.tokenizers['source'].decode
        empty = Hypothesis('', [], 0.0, 0.0, ended=False)
        return [(Output(decode(window), window, [empty]), '') for window in tokens if window]

    @property
    def opening(self) -> str:
        """The prompt without content: the beginning of a document, or of a line."""
        return '' if self.whole_documents else '\n'

    @override
    def attention(self, output: Output) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """Returns {'encoder': [layer, head, t, s]} of prompt and best continuation, as far as one window reaches."""
        tokens = self._shown(output)
        weights = attention_weights(self._attention(self.params, {'tokens': self._padded([tokens])}))
        return {kind: array[:, 0, :, :len(tokens), :len(tokens)] for kind, array in weights.items()}

    @override
    def axes(self, output: Output) -> dict[str, tuple[list[str], list[str]]]:
        pieces = self.tokenizers['target'].pieces(self._shown(output))
        return {'encoder': (pieces, pieces)}

    @override
    def text_names(self, output: Output) -> tuple[str, str]:
        return ('prompt', 'continuation') if output.text else ('text', '')

    @override
    def _read_and_written(self, output: Output) -> tuple[dict[str, list[int]], list[int]]:
        tokens = self._shown(output)
        return {'tokens': tokens[:-1]}, tokens[1:]

    def _shown(self, output):
        return [*output.source_tokens, *output.hypotheses[0].tokens][:self.context]

    def _begin(self, prompt: str, number: int, room: int, kept: int) -> tuple[list[int], str]:
        """Returns the tokens of a prompt, and the prompt; if it exceeds `room`, its last `kept` tokens and ''."""
        length, first, last = self._ends(prompt, room)
        start = [BOS] if self.whole_documents or not length else []
        if len(start) + length <= room:
            return start + first, prompt
        log.warning('line %d has %d tokens: only the last %d are read (config.data.context)', number + 1, length,
                    min(kept, length))
        return last[-kept:], ''

    def _window(self, tokens: list[int]) -> list[int]:
        return tokens if len(tokens) < self.context else tokens[-max(1, self.context // 2):]

    def _joined(self, so_far: Hypothesis, new: Hypothesis, alpha: float) -> Hypothesis:
        tokens, log_prob = [*so_far.tokens, *new.tokens], so_far.log_prob + new.log_prob
        score = float(log_prob / length_penalty(len(tokens) + new.ended, alpha))
        return Hypothesis('', tokens, log_prob, score, new.ended)  # `generate` adds the text

    @override
    def _search_input(self, tokens: Sequence[int], options: SearchOptions) -> SearchInput:
        return SearchInput(list(tokens[:-1]), tokens[-1], options.extra_length)

    @override
    def _max_length(self, width: int, options: SearchOptions) -> int:
        return options.extra_length
