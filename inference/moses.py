"""BLEU of lowercased Moses tokens, a score that papers on Multi30k report.

The authors of Multi30k produced the `lc.norm.tok` files with Moses' lowercase.perl, normalize-punctuation.perl and
tokenizer.perl, in this order and without aggressive hyphen splitting. Wu et al. 2021 (arXiv:2105.14462) compute BLEU on
such tokens with fairseq's generate.py, which splits texts at spaces. Here `sacremoses` performs the same steps on
outputs and references. The German references of test 2016 then have 12,103 tokens, as in Wu et al.'s log. With hyphen
splitting, the references would have 12,243 tokens.
"""

import importlib.metadata
import logging
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes

log = logging.getLogger('allyouneed.decode')
LANGUAGES = frozenset(NonbreakingPrefixes().available_langs.values()) | {'ja', 'ko'}  # languages of sacremoses


class MosesTokens:
    """A tokenizer for sacreBLEU's metrics: normalises punctuation, then tokenises by the rules of a language."""

    def __init__(self, language: str):
        """Loads the rules of a language, such as 'de', without the country.

        If sacremoses has no rules for the language, logs a warning and uses the rules of English.
        """
        if language not in LANGUAGES:
            log.warning('sacremoses has no rules for the language %r: bleu_lowercased_moses uses the rules of English',
                        language)
            language = 'en'
        self.language = language
        self._normalizer, self._tokenizer = MosesPunctNormalizer(self.language), MosesTokenizer(self.language)

    def __call__(self, line: str) -> str:
        """Returns the tokens of a line, with spaces between them."""
        return ' '.join(self._tokenizer.tokenize(self._normalizer.normalize(line)))

    def signature(self) -> str:
        """Returns the part of a score's signature that describes the tokens."""
        return f'moses.{self.language}|norm:moses|sacremoses:{importlib.metadata.version("sacremoses")}'


def moses_bleu(language: str) -> BLEU:
    """Returns the BLEU metric for texts in `language`. The metric lowercases the texts first."""
    bleu: Any = BLEU(lowercase=True, tokenize='none')
    bleu.tokenizer = MosesTokens(language)
    bleu.tokenizer_signature = bleu.tokenizer.signature()
    return bleu
