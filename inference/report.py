"""Reports the unknown characters of an input, texts longer than a window, and the scores of all texts together."""

import collections
import logging
from collections.abc import Sequence
from typing import Any

from inference.generate import Generator
from inference.outputs import Output
from inference.scores import change_warning, text_scores
from inference.text import TextModel
from input_pipeline.tokenizer import UNK
from runtime.errors import first_names

log = logging.getLogger('allyouneed.decode')

SHOWN = 10  # maximum number of unknown characters in a message


class Report:
    """Statistics of all inputs and outputs of a model. `write` logs the statistics at the end of the input.

    Attributes:
      model: the model.
      scored: if true, the outputs are texts from the input, and a language model has scored these texts. If false, the
        model has written the outputs.
      first: the number of earlier inputs, which are not in the report.
    """

    def __init__(self, model: TextModel, *, scored: bool, first: int = 0):
        self.model, self.scored, self.first = model, scored, first
        self._count, self._changed, self._log_prob = 0, 0, 0.0
        self._attended, self._long = 0, 0  # numbers of outputs
        self._sizes: collections.Counter[str] = collections.Counter()  # bytes, characters and tokens
        self._unknown: collections.Counter[str] = collections.Counter()
        self._unknown_tokens, self._place = 0, ''
        self._is_unknown: collections.defaultdict[str, dict[str, bool]] = collections.defaultdict(dict)  # by side

    def add(self, outputs: Sequence[Output]) -> None:
        """Adds the outputs for the next inputs to the statistics."""
        for output in outputs:
            self._count += 1
            hypothesis = output.hypotheses[0]
            self._count_unknown(output.source, output.source_tokens, 'source')
            self._count_unknown(hypothesis.text, hypothesis.tokens, 'target')
            if self.scored:
                self._log_prob += hypothesis.log_prob
                self._sizes.update(_sizes(output))
                self._changed += self.model.tokenizers['target'].decode(hypothesis.tokens) != hypothesis.text

    def add_attention(self, output: Output) -> None:
        """Counts an output whose attention is written, drawn or explained."""
        self._attended += 1
        self._long += self.model.left_out(output) > 0

    def scores(self, output: Output) -> dict[str, Any]:
        """Returns the scores of one text, its size in bytes and in characters, the window and the stride."""
        assert isinstance(self.model, Generator), 'only texts of language models have bits per byte'
        sizes = _sizes(output)
        return text_scores(output.hypotheses[0].log_prob, **sizes) | {
            'bytes': sizes['bytes'], 'characters': sizes['characters'], 'window': self.model.context,
            'stride': self.model.stride}

    def write(self) -> None:
        """Logs the report. Logs nothing if there is nothing to report."""
        if self._unknown_tokens:
            log.warning('%s', self._about_unknown())
        if self._long:
            assert isinstance(self.model, Generator), 'only language models leave tokens out'
            log.warning('%d of %d texts have more than %d tokens (config.data.context). Attention, pictures and '
                        'explanations include only the first %d tokens of a text', self._long, self._attended,
                        self.model.context, self.model.context)
        if not self.scored or not self._count:
            return
        assert isinstance(self.model, Generator), 'only texts of language models have bits per byte'
        units = f'{self.model.unit}s' if self._count > 1 else self.model.unit
        scores = text_scores(self._log_prob, **self._sizes)
        bits = [f'{scores[name]:.4f} {name.replace("_", " ")}, ' for name in ('bits_per_byte', 'bits_per_character')
                if scores[name] is not None]
        perplexity = 'above 1.8e308' if scores['perplexity'] is None else f'{scores["perplexity"]:.4f}'
        log.info('%d %s with %d bytes, %d characters and %d tokens (including end tokens): %sperplexity %s per '
                 'token. Windows have %d tokens, and the stride is %d tokens', self._count, units, self._sizes['bytes'],
                 self._sizes['characters'], self._sizes['tokens'], ''.join(bits), perplexity,
                 self.model.context, self.model.stride)
        if warning := change_warning(self._changed, self._count, self.model.unit):
            log.warning('%s', warning)

    def _about_unknown(self) -> str:
        if not self._unknown:  # a tokenizer of whole words
            count = self._unknown_tokens
            return f'{count} {"tokens" if count > 1 else "token"} of the input {"are" if count > 1 else "is"} <unk>, ' \
                   f'the first in {self._place}'
        total, several = self._unknown.total(), self._unknown.total() > 1
        shown = first_names([f'{character!r} ({count})' for character, count in self._unknown.most_common()], SHOWN)
        return (f'{total} character{"s" if several else ""} of the input {"are" if several else "is"} not in the '
                f'vocabulary, and the model reads {"them" if several else "it"} as <unk>: {shown}. The first is '
                f'{self._place}. Replace the characters, or train with text that contains them')

    def _count_unknown(self, text: str, tokens: Sequence[int], side: str) -> None:
        if not (count := tokens.count(UNK)):
            return
        self._unknown_tokens += count
        is_unknown, tokenizer = self._is_unknown[side], self.model.tokenizers[side]
        for character in set(text) - is_unknown.keys():
            is_unknown[character] = UNK in tokenizer.encode(character)
        unknown = [number for number, character in enumerate(text, 1) if is_unknown[character]]
        if len(unknown) > count and sum(map(len, tokenizer.encode_parts(text))) > len(tokens):
            # The text is truncated: a language model reads the end of a prompt, a translator the beginning of a source.
            unknown = unknown[-count:] if isinstance(self.model, Generator) else unknown[:count]
        self._unknown.update(text[number - 1] for number in unknown)
        where = f'{self.model.unit} {self.first + self._count}'
        self._place = self._place or (f'character {unknown[0]} of {where}' if unknown else where)


def note_unknown(model: TextModel, outputs: Sequence[Output]) -> None:
    """Logs a warning if inputs have characters that are not in the vocabulary."""
    report = Report(model, scored=False)
    report.add(outputs)
    report.write()


def _sizes(output: Output) -> dict[str, int]:
    """Returns the numbers of bytes, characters and tokens of a scored text. The tokens include the end token."""
    hypothesis = output.hypotheses[0]
    return {'bytes': len(hypothesis.text.encode()), 'characters': len(hypothesis.text),
            'tokens': len(hypothesis.tokens) + 1}
