"""Gold links between the tokens of sentence pairs, made from links between words. White space separates words."""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt32

from input_pipeline.links import Links
from input_pipeline.sources import Pair
from input_pipeline.stores import SIDES
from input_pipeline.token_store import TokenStore
from input_pipeline.tokenizer import UNK, Tokenizer

# White space in UTF-8. UTF-8 is self-synchronising, so the bytes of a space are never a part of another character.
# U+3000 is the space with the highest code point. A search of all code points takes 0.15 s at each start of Python.
SPACES = re.compile(b'(?:%s)+' % b'|'.join(re.escape(character.encode()) for character in map(chr, range(0x3001))
                                           if character.isspace()))


class TokenLinks:
    """The gold links between the tokens of the rows of a store. Tokens are linked if their words are linked."""

    def __init__(self, pairs: Sequence[Pair], links: Sequence[Links], tokenizers: Mapping[str, Tokenizer]):
        """Stores the arguments. `pairs` has the text of each row, and `links` has the links between its words."""
        self._pairs, self._links, self._tokenizers = pairs, links, tokenizers

    def matrix(self, row: int | np.integer, source: UInt32[np.ndarray, ' source'],
               target: UInt32[np.ndarray, ' target']) -> Bool[np.ndarray, 'target source']:
        """Returns a mask [target, source] of a row: True where a target token is linked to a source token."""
        (sources, source_words), (targets, target_words) = (
            words_of_tokens(self._tokenizers[side], tokens, text)
            for side, tokens, text in zip(SIDES, (source, target), self._pairs[int(row)], strict=True))
        linked = np.zeros((target_words + 1, source_words + 1), bool)  # the last row and column are for white space
        for one, other in self._links[int(row)]:
            linked[other, one] = True
        return linked[targets][:, sources]


def words_of_tokens(tokenizer: Tokenizer, tokens: Iterable[int | np.integer],
                    text: str) -> tuple[Int[np.ndarray, ' tokens'], int]:
    """Returns the index of the word of `text` that each token belongs to, and the number of words.

    `word_numbers` describes the indices. `tokens` are the tokens of `text`.
    """
    pieces, words = _bytes_of(tokenizer, tokens), re.findall(r'\s*\S+', text.rstrip())
    written = [word for word in SPACES.split(b''.join(pieces)) if word]
    # A normalisation may add white space: NFKC writes U+00B4 as a space and a combining mark. An unknown token may hide
    # white space. In these cases, each word is encoded by itself.
    if len(written) != len(words):
        written = [b''.join(_bytes_of(tokenizer, tokenizer.encode(word))) for word in words]
    return word_numbers(pieces, written), len(words)


def _bytes_of(tokenizer: Tokenizer, tokens: Iterable[int | np.integer]) -> list[bytes]:
    """Returns the bytes of each token. The unknown token stands for characters of a word."""
    return [b'?' if token == UNK else tokenizer.bytes_of(int(token)) for token in tokens]


def word_numbers(pieces: Sequence[bytes], words: Sequence[bytes]) -> Int[np.ndarray, ' pieces']:
    """Returns the index of the word that each piece belongs to: the word of its first byte that is not white space.

    So white space belongs to the next word. White space at the end of the text has an index equal to the number of
    words.

    Args:
      pieces: the text, divided into pieces.
      words: the text, divided into words. White space in a word has no effect.
    """
    text = b''.join(pieces)
    visible = np.ones(len(text) + 1, int)  # 0 for a byte of white space
    for match in SPACES.finditer(text):
        visible[match.start():match.end()] = 0
    before = np.cumsum(visible) - visible
    begins = np.cumsum([0, *map(len, pieces)])[:-1]
    ends = np.cumsum([len(SPACES.sub(b'', word)) for word in words])
    return np.searchsorted(ends, before[begins], side='right')


def rows_of_store(pairs: Sequence[Pair], store: TokenStore, tokenizers: Mapping[str, Tokenizer],
                  max_length: int) -> list[int]:
    """Returns, for each row of a store, the index of its pair in `pairs`.

    The store was built from `pairs`, but does not contain pairs that are empty or too long.
    `max_length` is the argument of `token_store.open_store`.
    """
    rows = [row for row, pair in enumerate(pairs) if all(text.strip() for text in pair)]
    if len(rows) > len(store):
        rows = [row for row in rows if all(len(tokenizers[side].encode(text)) < max_length
                                           for side, text in zip(SIDES, pairs[row], strict=True))]
    assert len(rows) == len(store), 'a store has the pairs that stores.write_pairs keeps'
    return rows
