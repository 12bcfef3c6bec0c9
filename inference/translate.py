"""Translation of sentences with an encoder-decoder."""

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict
from typing_extensions import override

from inference.forced import Forced
from inference.inputs import Begin, SearchInput, checked_pairs, checked_texts, encode_prefix
from inference.options import BEAM_SEARCH, SearchOptions, search_options
from inference.outputs import Hypothesis, Output
from inference.scores import Evaluation, corpus_scores, perplexity, short_references_warning
from inference.search import NEW_WORD
from inference.text import SearchModel, attention_weights
from input_pipeline.data import PairData
from input_pipeline.tokenizer import BOS, EOS, UNK, Tokenizer
from model import Params
from model.losses import Sums
from runtime.errors import UserError
from runtime.once import warn_once
from runtime.resources import Stopwatch

log = logging.getLogger('allyouneed.decode')
END = '</s>'  # the end token in lists of pieces
SAMPLES = 3  # number of translations that an evaluation logs
CASED = ('bleu', 'chrf', 'chrf++', 'exact_match')  # scores that distinguish upper and lower case

TokenPair = tuple[Sequence[int], Sequence[int]]  # the tokens of a source and a target


def note_on_case(config: ConfigDict) -> dict[str, str]:
    """Returns {'note': text} and logs the note if the tokenizer of the run folds case. Otherwise, returns {}.

    The note lists the scores that count missing capitals as errors.
    """
    if config.data.tokenizer.normalization != 'nfkc_cf':
        return {}
    note = ('the translations have no capitals (config.data.tokenizer.normalization=nfkc_cf), but the references have '
            f'capitals. {", ".join(CASED)} count this difference as an error; the lowercased scores and ter do not')
    warn_once(note)
    return {'note': note}


def warn_of_short_references(references: Sequence[str], config: ConfigDict) -> None:
    """Logs a warning if most references are too short for BLEU."""
    if warning := short_references_warning(references, config.data.target_lang):
        warn_once(warning)


class Translator(SearchModel):
    """An encoder-decoder model of any kind, which translates sentences.

    Attributes:
      max_length: the maximum number of tokens of a source, including the end token. A longer source is truncated, with
        a warning.
    """

    unpredicted = 0
    titles = {'cross': ('translation', 'source'), 'encoder': ('source', 'source'),
              'decoder': ('translation', 'translation so far')}

    def __init__(self, module: nn.Module, params: Params, tokenizers: Mapping[str, Tokenizer], max_length: int):
        super().__init__(module, params, tokenizers)
        self.max_length = max_length

    def translate(self, sentences: Sequence[str], options: SearchOptions = BEAM_SEARCH, *, first: int = 0,
                  prefixes: Sequence[str] | None = None) -> list[Output]:
        """Translates sentences, in order. An empty or blank sentence has an empty translation.

        `first` is the number of earlier sentences in the file. Random samples depend on the index of the sentence in
        the file, and on the seed. Each translation begins with its prefix in `prefixes`; a prefix '' has no effect. The
        log-probability of a translation includes the prefix. The translation may continue the last word of a prefix,
        unless the prefix ends with a space.

        Raises:
          UserError: if a prefix is too long, has characters that are not in the vocabulary, contains a word to avoid,
            or belongs to an empty sentence.
        """
        sentences = checked_texts(sentences)
        sources = [self._tokens(text, first + row) if text.strip() else [] for row, text in enumerate(sentences)]
        begins = None if prefixes is None else self._begins(sentences, sources, prefixes, options, first)
        rows = [row for row, tokens in enumerate(sources) if tokens]
        hypotheses = self.find_all([sources[row] for row in rows], [first + row for row in rows], options,
                                   begins=begins and [begins[row] for row in rows])
        by_row = dict(zip(rows, hypotheses, strict=True))
        return [Output(text, tokens, by_row.get(row, [Hypothesis('', [], 0.0, 0.0)]))
                for row, (text, tokens) in enumerate(zip(sentences, sources, strict=True))]

    def _begins(self, sentences, sources, prefixes, options, first) -> list[Begin]:
        """Returns the required beginning of each translation, from its prefix."""
        prefixes = checked_texts(prefixes)
        if len(prefixes) != len(sentences):
            raise UserError(f'there are {len(prefixes)} prefixes for {len(sentences)} sentences. Each sentence needs a '
                            "prefix. Use '' for a sentence without prefix")
        tokenizer, automaton = self.tokenizers['target'], self.automaton(options)
        begins = []
        for number, (tokens, prefix) in enumerate(zip(sources, prefixes, strict=True), first + 1):
            begin = encode_prefix(tokenizer, prefix)
            # After a space at the end, the next word needs room. NEW_WORD already counts for its first token.
            before_word = bool(begin.prefix) and prefix.endswith(' ')
            count = len(begin.prefix) + (before_word and NEW_WORD not in begin.prefix)
            limit = self._search_input(tokens, options).limit
            problem = None
            if prefix.strip() and not tokens:
                problem = 'the sentence is empty, so its translation is empty'
            elif UNK in begin.prefix:
                problem = 'this prefix has characters that are not in the vocabulary'
            elif count >= limit:
                advice = (' (config.model.max_length). Shorten the prefix' if limit == self.module.length_limit else
                          '. Increase --extra_length, or shorten the prefix')
                with_word = ', including the beginning of the next word' if before_word else ''
                problem = (f'this prefix needs {count} tokens{with_word}, but the translation may have at most {limit} '
                           f'tokens, including the end token{advice}')
            elif automaton and not automaton.allows(begin.prefix, count == limit - 1, prefix):
                problem = 'this prefix contains a word to avoid'
            if problem:
                raise UserError(f'line {number}: the translation cannot begin with {prefix[:80]!r}: {problem}')
            begins.append(begin)
        return begins

    @override
    def respond(self, lines: Sequence[str], options: SearchOptions, *, first: int = 0) -> list[Output]:
        return self.translate(lines, options, first=first)

    def forced(self, source: str, target: str) -> Output:
        """Returns the result of `forced_all` for one pair. The score is the log-probability, without length penalty."""
        return self.forced_all([(source, target)], SearchOptions(alpha=0.0))[0]

    def forced_all(self, pairs: Sequence[tuple[str, str]], options: SearchOptions = BEAM_SEARCH, *,
                   first: int = 0) -> list[Output]:
        """Scores given targets. Returns an output for each pair (source, target), whose only hypothesis is the target.

        The log-probability of an output covers the target's tokens and the end token, given the source. An empty target
        has only the end token. Attention and token probabilities can also be computed for these outputs. A long source
        is truncated as in `translate`. `first` is the number of earlier pairs in the file.

        Raises:
          UserError: if `pairs` is not a list of pairs, or a target is longer than the model's table of learned
            positions, or longer than the longest translation that the options allow.
        """
        pairs = checked_pairs(pairs)
        source_texts, target_texts = (checked_texts([pair[side] for pair in pairs]) for side in range(2))
        sources = [self._tokens(text, first + row) for row, text in enumerate(source_texts)]
        targets = [self._target_tokens(text, first + row, options) for row, text in enumerate(target_texts)]
        scores = self.token_log_probs(list(zip(sources, targets, strict=True)), options.batch_size)
        return [Output(source, tokens, [Hypothesis.forced(target, written, log_probs, options.alpha)])
                for source, target, tokens, written, log_probs in zip(source_texts, target_texts, sources, targets,
                                                                      scores, strict=True)]

    def unscored(self, source: str, target: str, options: SearchOptions, number: int = 0) -> Output:
        """Returns the result of `forced_all` for one pair, with a log-probability of 0 in place of the score.

        `number` is the index of the pair, for messages.

        Raises:
          UserError: if the target is longer than the longest translation that the model and the options allow.
        """
        return Output(source, self._tokens(source, number),
                      [Hypothesis(target, self._target_tokens(target, number, options), 0.0, 0.0)])

    def validate(self, data: PairData, sums: Sums, config: ConfigDict) -> Evaluation:
        """Returns BLEU and chrF of the validation split, decoded with config.eval.method, and a few translations.

        The result also has the first output and its attention.
        """
        pairs = data.pairs('validation')[:config.eval.bleu_sentences or None]
        sources, references = zip(*pairs, strict=True)
        options = search_options(config, method=config.eval.method)
        outputs = self.translate(sources, options)
        scores = corpus_scores([output.text for output in outputs], references, config.data.target_lang)
        samples = '\n'.join(f'  {output.source}\n    = {reference}\n    ? {output.text}'
                            for output, reference in zip(outputs[:SAMPLES], references, strict=False))
        weights = self.attention(outputs[0])  # a recurrent model with a fixed context has no attention
        if config.eval.metric in CASED:
            note_on_case(config)
        if config.eval.metric.startswith('bleu'):
            warn_of_short_references(references, config)
        return Evaluation({name: scores[name] for name in ('bleu', 'bleu_lowercased_tokenised', 'chrf', 'exact_match')},
                          samples, outputs[0], weights)

    def score(self, data: PairData, split: str, config: ConfigDict,
              options: SearchOptions) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
        """Translates a split. Returns its corpus scores, and its sources, references and translations.

        Logs a warning if sentences are too long to be read or scored completely, or most references are too short for
        BLEU.
        """
        pairs = data.pairs(split)
        sources, references = zip(*pairs, strict=True)
        encoded = self.encoded(pairs)
        stopwatch = Stopwatch()
        outputs = self.translate(sources, options)
        speed = stopwatch.speed(sum(len(output.hypotheses[0].tokens) + 1 for output in outputs))
        translations = [output.text for output in outputs]
        warn_of_short_references(references, config)
        results = corpus_scores(translations, references, config.data.target_lang, complete=True)
        results |= note_on_case(config) | {'perplexity': self.perplexity(encoded, options.batch_size)} | speed
        return results, list(zip(sources, references, translations, strict=True))

    @override
    def examples(self, data: PairData, split: str, count: int, options: SearchOptions) -> list[tuple[Output, str]]:
        """Returns translations of the first pairs of a split, and their references."""
        pairs = data.pairs(split)[:count]
        outputs = self.translate([source for source, _ in pairs], options)
        return [(output, reference) for output, (_, reference) in zip(outputs, pairs, strict=True)]

    def perplexity(self, pairs: Sequence[TokenPair], batch_size: int) -> float | None:
        """Returns the exponential of the mean cross-entropy per target token, without label smoothing.

        Two models can be compared only if they have the same vocabulary. A perplexity above 1.8e308 is None.

        Args:
          pairs: sources and targets, including end tokens.
          batch_size: the number of pairs that are scored at a time.
        """
        log_probs = self._forced_pairs(pairs, batch_size)
        return perplexity(-float(np.mean([log_prob for sentence in log_probs for log_prob in sentence])))

    def reference_log_probs(self, pairs: Sequence[tuple[str, str]], batch_size: int) -> list[float]:
        """Returns the log-probability of the tokens of each reference that the perplexity of a split includes.

        Args:
          pairs: sources and references. Unlike `forced_all`, this method accepts references of any length. Long
            sources and references are truncated as in `score`.
          batch_size: the number of pairs that are scored at a time.
        """
        return [math.fsum(sentence) for sentence in self._forced_pairs(self.encoded(pairs, warn=False), batch_size)]

    def references(self, pairs: Sequence[tuple[str, str]]) -> list[Output]:
        """Returns an output for each pair (source, reference). Its only hypothesis is the reference, without a score.

        Unlike `forced_all`, this method accepts references of any length. Long sources and references are truncated
        as in `score`, with a warning.
        """
        return [Output(source, list(tokens[:-1]), [Hypothesis(reference, list(written[:-1]), 0.0, 0.0)])
                for (source, reference), (tokens, written) in zip(pairs, self.encoded(pairs), strict=True)]

    def encoded(self, pairs: Sequence[tuple[str, str]], warn: bool = True) -> list[TokenPair]:
        """Returns the tokens of each pair (source, reference), including end tokens, as two lists without padding.

        Long sources are truncated as in `translate`. Long references are truncated to the number of learned positions.
        With `warn`, truncation is logged as a warning.
        """
        source, target = (self.tokenizers[side] for side in ('source', 'target'))
        whole = [(source.encode(a), [*target.encode(b), EOS]) for a, b in pairs]
        most, reach = self.max_length - 1, self.module.length_limit or sys.maxsize
        long_sources = sum(len(tokens) > most for tokens, _ in whole)
        long_references = sum(len(tokens) > reach for _, tokens in whole)
        if warn and long_sources:
            log.warning('%d of %d sources have more than %d tokens (config.data.max_length). These sources are '
                        'truncated, but the references are complete', long_sources, len(pairs), most)
        if warn and long_references:
            log.warning('%d of %d references have more than %d tokens (config.model.max_length). Translations cannot '
                        'be longer than this limit, and the perplexity includes only the first %d tokens. BLEU, chrF '
                        'and exact match use the complete references',
                        long_references, len(pairs), reach, reach)
        return [([*tokens[:most], EOS], tokens_out[:reach]) for tokens, tokens_out in whole]

    @override
    def attention(self, output: Output) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """Returns the weights of every layer and head for the source and the best hypothesis.

        Returns:
          {'encoder': [layer, head, source, source], 'decoder': [layer, head, target, target],
          'cross': [layer, head, target, source]}, including the end tokens. Row t of 'decoder' and 'cross' predicts
          target token t. A recurrent model has only 'cross', with one layer and one head.
        """
        # The inputs are padded to a multiple of LENGTHS, so that many sentences use the same compiled program.
        read, _ = self.read_and_written(output)
        source, target = read['source'], read['target']
        inputs = {'source': self.padded([source]), 'target': self.padded([target])}
        ends = {'encoder': (len(source), len(source)), 'decoder': (len(target), len(target)),
                'cross': (len(target), len(source))}
        return {kind: weights[:, 0, :, :ends[kind][0], :ends[kind][1]]
                for kind, weights in attention_weights(self._attention(self.params, inputs)).items()}

    @override
    def axes(self, output: Output) -> dict[str, tuple[list[str], list[str]]]:
        source = [*self.tokenizers['source'].pieces(output.source_tokens), END]
        # Row t of the decoder's self-attention reads token t - 1 and predicts token t. The label of the row is token t.
        target = [*self.tokenizers['target'].pieces(output.hypotheses[0].tokens), END]
        return {'encoder': (source, source), 'decoder': (target, ['<s>', *target[:-1]]), 'cross': (target, source)}

    @override
    def text_names(self, output: Output) -> tuple[str, str]:
        return 'source', 'translation'

    def token_log_probs(self, pairs: Sequence[TokenPair], batch_size: int = 64) -> list[list[float]]:
        """Returns the log-probability of each target token and the end token, given the source and earlier tokens."""
        return self._forced_pairs([([*source, EOS], [*target, EOS]) for source, target in pairs], batch_size)

    def _forced_pairs(self, pairs: Sequence[TokenPair], batch_size: int) -> list[list[float]]:
        return self._forced_log_probs(
            [Forced({'source': source, 'target': [BOS, *target[:-1]]}, target) for source, target in pairs], batch_size)

    @override
    def read_and_written(self, output: Output) -> tuple[dict[str, list[int]], list[int]]:
        target = output.hypotheses[0].tokens
        return {'source': [*output.source_tokens, EOS], 'target': [BOS, *target]}, [*target, EOS]

    @override
    def _search_input(self, tokens: Sequence[int], options: SearchOptions) -> SearchInput:
        limit = len(tokens) + options.extra_length + 1  # 1 for the end token
        return SearchInput([*tokens, EOS], BOS, min(limit, self.module.length_limit or limit))

    @override
    def _max_length(self, width: int, options: SearchOptions) -> int:
        return width + options.extra_length  # source and translation both have an end token

    def _target_tokens(self, text: str, number: int, options: SearchOptions) -> list[int]:
        """Returns the tokens of a target.

        Raises:
          UserError: if there are more tokens than the longest translation can have.
        """
        most, reach = self._target_limits(options)
        length, tokens, _ = self._ends(text, min(most, reach), 'target')
        if length >= min(most, reach):
            limit = (f'the model supports at most {reach}, including the end token (config.model.max_length)'
                     if reach <= most else f'at most {most} can be scored, including the end token '
                     '(config.data.max_length and --extra_length)')
            raise UserError(f'line {number + 1}: this translation has {length} tokens, but {limit}. Shorten '
                            'the translation')
        return tokens

    def _target_limits(self, options: SearchOptions) -> tuple[int, int]:
        """Returns two limits of the number of tokens of a target in `forced_all`, including the end token.

        The first limit is the length of the longest translation. The second limit is the number of learned positions.
        """
        return self._max_length(self.max_length, options), self.module.length_limit or sys.maxsize

    def reads_whole(self, source: str) -> bool:
        """Returns whether `translate` reads the whole source. A longer source is truncated."""
        return self._ends(source, 0)[0] < self.max_length

    def scores_whole(self, target: str, options: SearchOptions) -> bool:
        """Returns whether `forced_all` accepts the target. A longer target is an error."""
        return self._ends(target, 0, 'target')[0] < min(self._target_limits(options))

    def _tokens(self, text: str, number: int) -> list[int]:
        length, tokens, _ = self._ends(text, self.max_length - 1)
        if length > len(tokens):
            log.warning('%s %d has %d tokens: only the first %d tokens are read (config.data.max_length)', self.unit,
                        number + 1, length, len(tokens))
        return tokens
