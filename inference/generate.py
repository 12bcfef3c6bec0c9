"""Continuation of prompts with a decoder-only language model."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict
from typing_extensions import override

from configs.options import BEAM_METHODS
from inference.forced import Forced
from inference.inputs import Begin, SearchInput, checked_texts
from inference.options import SAMPLING, SearchOptions, search_options
from inference.outputs import Hypothesis, Output
from inference.scores import Evaluation, change_warning, text_scores
from inference.search import length_penalty
from inference.text import LENGTHS, SearchModel, attention_weights, not_finite
from input_pipeline.data import DocumentData
from input_pipeline.stores import TEXT
from input_pipeline.tokenizer import BOS, EOS, UNK, Tokenizer
from model import Params
from model.evaluation import eval_step, evaluate, forward, supervised
from model.losses import Sums, cross_entropy
from runtime.errors import UserError
from runtime.resources import Stopwatch

log = logging.getLogger('allyouneed.decode')

SAMPLES = 3  # number of sample texts in the results of `score` with method='sample'
COMPARED = 1_000_000  # number of characters of a split that `score` compares with their decoded tokens


class Generator(SearchModel):
    """A decoder-only language model.

    Attributes:
      context: the number of tokens that the model reads in a training window. It never reads more tokens at a time. A
        longer text continues in a new window, which begins with the last half of the previous window.
      whole_documents: whether the model was trained on whole documents. If true, a prompt is the beginning of a
        document and follows the start token. Otherwise a prompt is a piece from the middle of a text.
    """

    cut, multiline, unit = True, True, 'text'
    unpredicted = 1
    titles = {'encoder': ('text', 'text')}

    def __init__(self, module: nn.Module, params: Params, tokenizer: Tokenizer, context: int, whole_documents: bool):
        super().__init__(module, params, {'source': tokenizer, 'target': tokenizer})
        self.context, self.whole_documents = context, whole_documents

    @property
    def stride(self) -> int:
        """The number of tokens between the beginnings of two windows in `forced_all`."""
        return max(1, self.context - self.context // 2)

    def generate(self, prompts: Sequence[str], options: SearchOptions = SAMPLING, *,
                 first: int = 0) -> list[Output]:
        """Continues each prompt by options.extra_length tokens, or until the model ends the document.

        The text of an output is the text after the prompt (`Tokenizer.continuation`). This text begins with a space if
        it begins with a new word. An empty prompt stands for the start token. The continuation is then a new text.

        No end token is forced. The log-probability of a continuation includes the end token only if the document ends.
        If a prompt is longer than a window, only its end is read, and a warning is logged. `first` is the number of
        earlier prompts in the file. Random samples depend on the index of the prompt in the file, and on the seed.

        Raises:
          UserError: if a search with several hypotheses would exceed one window. Only a search with one hypothesis can
            continue in a new window.
        """
        prompts = checked_texts(prompts)
        if self._one_way(options):  # when a window is full, the next window begins with its last half
            room, kept, limit = self.context, max(1, self.context // 2), 'config.data.context'
        else:
            room = kept = self.context + 1 - max(1, options.extra_length)  # the last new token is not read
            limit = f'config.data.context{" plus 1 minus --extra_length" if options.extra_length else ""}'
        begins = [self._begin(prompt, first + row, room, kept, limit) for row, prompt in enumerate(prompts)]
        tokens = [read for read, _ in begins]
        best = [Hypothesis('', [], 0.0, 0.0, ended=False) for _ in prompts]
        open_rows, worse = [row for row in range(len(prompts)) if options.extra_length], {}
        automaton = self.automaton(options)
        places = [automaton.behind(read) for read in tokens] if automaton else []
        draw = 0  # number of windows that each open row has filled
        while open_rows:
            sources = [self._window([*tokens[row], *best[row].tokens]) for row in open_rows]
            rooms = [min(self.context + 1 - len(source), options.extra_length - len(best[row].tokens))
                     for row, source in zip(open_rows, sources, strict=True)]
            # The length is a multiple of LENGTHS, so that few lengths are compiled.
            longest = min(-(-max(rooms) // LENGTHS) * LENGTHS, options.extra_length)
            states = automaton and [Begin(place=automaton.after(best[row].tokens, places[row]))
                                    for row in open_rows]
            results = self.find_all(sources, [first + row for row in open_rows],
                                    dataclasses.replace(options, extra_length=longest), draw, rooms, states)
            still_open = []
            for row, hypotheses in zip(open_rows, results, strict=True):
                best[row] = self._joined(best[row], hypotheses[0], options.alpha)
                worse[row] = hypotheses[1:]
                if not best[row].ended and len(best[row].tokens) < options.extra_length:
                    still_open.append(row)
            open_rows, draw = still_open, draw + 1
        tokenizer = self.tokenizers['target']
        return [Output(prompt, read, [
            dataclasses.replace(hypothesis, text=tokenizer.continuation(read, hypothesis.tokens, text))
            for hypothesis in (best[row], *worse.get(row, []))])
            for row, (prompt, (read, text)) in enumerate(zip(prompts, begins, strict=True))]

    def forced_all(self, texts: Sequence[str], options: SearchOptions = SAMPLING, *, first: int = 0) -> list[Output]:
        """Scores each text as a whole document. Returns an output for each text, with the text as the only hypothesis.

        The log-probability of an output covers the text's tokens and the end token, given the start token. A text that
        is longer than a window is scored in several windows. Each window begins with the last half of the previous
        window. `first` has no effect, because no text is too long for this method.
        """
        texts = checked_texts(texts)
        tokens = [self.tokenizers['target'].encode(text) for text in texts]
        size = self.context + 1  # as in training, a window has `context` inputs, and the next tokens are its targets
        windows, origins = [], []  # for each window: (index of the text, number of targets that are already scored)
        for row, text_tokens in enumerate(tokens):
            whole, done = [BOS, *text_tokens, EOS], 1
            while done < len(whole):
                begin = max(0, done + self.stride - size)
                window = whole[begin:begin + size]
                windows.append(Forced({'tokens': window[:-1]}, window[1:]))
                origins.append((row, done - begin - 1))
                done = begin + len(window)
        log_probs: list[list[float]] = [[] for _ in texts]
        for (row, scored), values in zip(origins, self._forced_log_probs(windows, options.batch_size), strict=True):
            log_probs[row] += values[scored:]
        return [Output('', [BOS], [Hypothesis.forced(*row, options.alpha)])
                for row in zip(texts, tokens, log_probs, strict=True)]

    @override
    def respond(self, lines: Sequence[str], options: SearchOptions, *, first: int = 0) -> list[Output]:
        return self.generate(lines, options, first=first)

    def validate(self, data: DocumentData, sums: Sums, config: ConfigDict) -> Evaluation:
        """Returns the bits per character of the validation split, and a sampled text."""
        output, = self.generate([self.opening(config.data)], search_options(config, method='sample', n_best=1))
        bits = float(sums.others['nll']) / np.log(2) / data.characters('validation')
        return Evaluation({'bits_per_character': bits}, f'  {output.text!r}')

    def score(self, data: DocumentData, split: str, config: ConfigDict,
              options: SearchOptions) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
        """Returns the scores of a whole split, and sample texts.

        The split is read window by window, with at most options.batch_size windows in a batch.

        Raises:
          UserError: if `generate` refuses the options (before the split is read), or if the loss is NaN or infinite.
        """
        self.check_options(options)  # before the evaluation, which may take long
        step = jax.jit(functools.partial(eval_step, apply=forward(self.module), objective=supervised(
            functools.partial(cross_entropy, label_smoothing=0.0))))
        plan, unknown = data.plan(split, options.batch_size), 0

        def batches():
            nonlocal unknown
            for number in range(len(plan)):
                batch = plan.batch(number)
                unknown += int(np.sum(batch['targets'] == UNK))
                yield batch

        stopwatch = Stopwatch()
        sums = evaluate(step, self.params, batches())
        speed = stopwatch.speed(float(sums.tokens))
        if not np.isfinite(sums.loss):
            raise not_finite('the split has no scores', self.name, self.params)
        count = SAMPLES if options.method == 'sample' else 1  # the other methods always find the same text
        samples = [output.text for output in self.generate([self.opening(config.data)] * count, options)]
        scores = text_scores(-float(sums.others['nll']), int(sums.tokens), plan.characters, plan.bytes)
        results = sums.means() | {
            'perplexity': scores['perplexity'], 'n': int(sums.tokens),
            'bits_per_character': scores['bits_per_character'], 'bits_per_byte': scores['bits_per_byte'],
            'characters': plan.characters, 'bytes': plan.bytes, **speed, 'samples': samples}
        if unknown:
            results['unknown_tokens'] = unknown
            log.warning('%s: %d of %d tokens are <unk>, because the vocabulary does not have their characters. Do not '
                        'compare bits per character or per byte with other models', split, unknown, results['n'])
        elif warning := self._changes(data.documents(split)):
            log.warning('%s: %s', split, warning)
        return results, [(sample,) for sample in samples]

    @override
    def examples(self, data: DocumentData, split: str, count: int,
                 options: SearchOptions) -> list[tuple[Output, str]]:
        """Returns outputs whose prompts are the first documents of a split. Continuations are empty.

        A document that is longer than a window is divided after every `context` tokens. Each part is one prompt. Parts
        with a single token are left out, because the model predicts nothing in them.
        """
        store, decode = data.store(split), self.tokenizers['source'].decode
        # A document has at most `count` prompts, so the rest of a long document is not read.
        documents = ([BOS, *store.tokens(TEXT, row)[:count * self.context].tolist()] for row in range(len(store)))
        parts = (tokens[begin:begin + self.context] for tokens in documents
                 for begin in range(0, len(tokens), self.context))
        empty = Hypothesis('', [], 0.0, 0.0, ended=False)
        return [(Output(decode(tokens), tokens, [empty]), '')
                for tokens in itertools.islice((tokens for tokens in parts if len(tokens) > 1), count)]

    def opening(self, data: ConfigDict) -> str:
        """Returns the prompt for a new text. `data` is the section config.data.

        If the model was trained on whole documents, '' is the beginning of a document. Otherwise, a line feed makes the
        text begin with a new line. If the model has not seen line feeds in training, the prompt is ''.
        """
        no_line_feed = data['documents'] == 'line' or UNK in self.tokenizers['target'].encode('\n')
        return '' if self.whole_documents or no_line_feed else '\n'

    @override
    def attention(self, output: Output) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """Returns {'encoder': [layer, head, t, s]}, the attention between the tokens of a prompt and its continuation.

        If there are several continuations, the best one is used. The tokens are truncated to one window.
        """
        tokens = self._shown(output)
        weights = attention_weights(self._attention(self.params, {'tokens': self.padded([tokens])}))
        return {kind: array[:, 0, :, :len(tokens), :len(tokens)] for kind, array in weights.items()}

    @override
    def axes(self, output: Output) -> dict[str, tuple[list[str], list[str]]]:
        pieces = self.tokenizers['target'].pieces(self._shown(output))
        return {'encoder': (pieces, pieces)}

    @override
    def left_out(self, output: Output) -> int:
        """Returns the number of tokens of the prompt and the best continuation that are after the first window."""
        return max(0, len(output.source_tokens) + len(output.hypotheses[0].tokens) - self.context)

    @override
    def text_names(self, output: Output) -> tuple[str, str]:
        best = output.hypotheses[0]  # an example of a split has no continuation, not even an end token
        return ('prompt', 'continuation') if best.tokens or best.ended else ('text', '')

    @override
    def read_and_written(self, output: Output) -> tuple[dict[str, list[int]], list[int]]:
        tokens = self._shown(output)
        return {'tokens': tokens[:-1]}, tokens[1:]

    def in_one_window(self, outputs: Sequence[Output]) -> list[Output]:
        """Returns outputs with only the best hypothesis, and only the tokens of the first window.

        Logs a warning if tokens are left out.
        """
        lengths = [len(output.source_tokens) + len(output.hypotheses[0].tokens) for output in outputs]
        if long := [length for length in lengths if length > self.context]:
            log.warning('%d of %d texts have more than %d tokens (config.data.context), up to %d. Only the first %d '
                        'tokens of a text are used', len(long), len(outputs), self.context, max(long), self.context)
        windows = []
        for output in outputs:
            tokens, prompt, best = self._shown(output), len(output.source_tokens), output.hypotheses[0]
            windows.append(dataclasses.replace(output, source_tokens=tokens[:prompt], hypotheses=[
                dataclasses.replace(best, tokens=tokens[prompt:])]))
        return windows

    def _shown(self, output):
        return [*output.source_tokens, *output.hypotheses[0].tokens][:self.context]

    def _changes(self, documents: Iterable[str]) -> str:
        """Returns a warning if the tokenizer changes one of the first documents, or ''. See `change_warning`.

        At most COMPARED characters are compared with their decoded tokens.
        """
        encode, decode = self.tokenizers['target'].encode, self.tokenizers['target'].decode
        remaining, count, changed = COMPARED, 0, 0
        for document in documents:
            # A tokenizer may drop a space at the end of a text, so a truncated document must not end with a space.
            text = document if len(document) <= remaining else document[:remaining].rstrip()
            remaining, count, changed = remaining - len(document), count + 1, changed + (decode(encode(text)) != text)
            if remaining <= 0:
                break
        return change_warning(changed, count, 'document')

    def _begin(self, prompt: str, number: int, room: int, kept: int, limit: str) -> tuple[list[int], str]:
        """Returns the tokens and the text of a prompt.

        If the start token and the prompt have more than `room` tokens, logs a warning and returns the last `kept`
        tokens and ''. The warning contains `limit`, the options that determine `room`.
        """
        length, first, last = self._ends(prompt, room)
        start = [BOS] if self.whole_documents or not length else []
        if len(start) + length <= room:
            return start + first, prompt
        if length > kept:
            read = f'only the last {kept} tokens are read' if kept > 1 else 'only the last token is read'
        else:
            read = f'the start token before {"them" if length > 1 else "it"} is not read'
        log.warning('%s %d has %d token%s: %s (%s)', self.unit, number + 1, length, 's'[:length > 1], read, limit)
        return last[-kept:], ''

    @override
    def check_options(self, options: SearchOptions) -> None:
        self._one_way(options)
        super().check_options(options)

    def _one_way(self, options: SearchOptions) -> bool:
        """Returns whether a search has only one hypothesis, so that it can continue in a new window.

        Raises:
          UserError: if a search with several hypotheses would exceed one window.
        """
        one_way = options.n_best == 1 and options.method not in BEAM_METHODS
        if not one_way and options.extra_length > self.context:
            raise UserError(f'extra_length={options.extra_length}: must be at most {self.context}, because beam '
                            'search and n_best>1 use only one window of the model. Decrease extra_length')
        return one_way

    def _window(self, tokens: list[int]) -> list[int]:
        return tokens if len(tokens) <= self.context else tokens[-max(1, self.context // 2):]

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
