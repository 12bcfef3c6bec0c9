"""Gold links between the tokens of sentence pairs, made from links between words. White space separates words."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt32

from input_pipeline.links import Links
from input_pipeline.stores import SIDES
from input_pipeline.token_store import TokenStore
from input_pipeline.tokenizer import UNK, Tokenizer

# White space in UTF-8. UTF-8 is self-synchronising, so the bytes of a space are never a part of another character.
# U+3000 is the space with the highest code point. A search of all code points takes 0.15 s at each start of Python.
SPACES = re.compile(b'(?:%s)+' % b'|'.join(re.escape(character.encode()) for character in map(chr, range(0x3001))
                                           if character.isspace()))


class TokenLinks:
    """The gold links between the tokens of the rows of a store. Tokens are linked if their words are linked."""

    def __init__(self, links: Sequence[Links], tokenizers: Mapping[str, Tokenizer]):
        """Stores the arguments. `links` contains, for each row, the links between its words."""
        self._links, self._tokenizers = links, tokenizers

    def matrix(self, row: int | np.integer, source: UInt32[np.ndarray, ' source'],
               target: UInt32[np.ndarray, ' target']) -> Bool[np.ndarray, 'target source']:
        """Returns whether each target token is linked to each source token of a row."""
        (sources, source_words), (targets, target_words) = (
            words_of_tokens(self._tokenizers[side], tokens)
            for side, tokens in zip(SIDES, (source, target), strict=True))
        linked = np.zeros((target_words + 1, source_words + 1), bool)  # the last row and column are for white space
        for one, other in self._links[int(row)]:
            if one < source_words and other < target_words:  # a tokenizer that normalises may join words
                linked[other, one] = True
        return linked[targets][:, sources]


def words_of_tokens(tokenizer: Tokenizer, tokens: Iterable[int | np.integer]) -> tuple[Int[np.ndarray, ' tokens'], int]:
    """Returns the index of the word that each token belongs to, and the number of words; see `word_numbers`.

    The unknown token stands for characters of a word.
    """
    return word_numbers([b'?' if token == UNK else tokenizer.bytes_of(int(token)) for token in tokens])


def word_numbers(pieces: Sequence[bytes]) -> tuple[Int[np.ndarray, ' pieces'], int]:
    """Returns the index of the word that each piece belongs to, and the number of words.

    White space belongs to the next word. White space at the end of the text has an index equal to the number of words.
    """
    text = b''.join(pieces)
    edges = [0, *itertools.chain.from_iterable(match.span() for match in SPACES.finditer(text)), len(text)]
    ends = [end for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
    begins = np.cumsum([0, *map(len, pieces)])[:-1]
    return np.searchsorted(ends, begins, side='right'), len(ends)


def rows_of_store(pairs: Sequence[tuple[str, str]], store: TokenStore, tokenizers: Mapping[str, Tokenizer],
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
