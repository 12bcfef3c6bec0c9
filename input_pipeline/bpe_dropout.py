"""BPE-dropout: a new segmentation of every word in every epoch (Provilkov et al. 2020, arXiv:1910.13267).

Algorithm 1 of the paper segments a word. It first splits the word into characters. In each step, every possible merge
is skipped with probability p, and the remaining merge with the highest priority is applied. The word is finished when
no merge remains. So the result is plain byte pair encoding for p = 0, and single characters for p = 1.

SentencePiece can also sample segmentations, but its global random generator gives different numbers in every process.
Here the random numbers come from a NumPy Generator. Each step is applied to all words of a text at once. This takes a
few microseconds per sentence.
"""

import itertools

import numpy as np
from jaxtyping import Bool, Int, UInt32
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from input_pipeline.tokenizer import PAD, SPACE, Tokenizer

NORMAL = ModelProto.SentencePiece.NORMAL
PLACES = 32  # the lower 32 bits of a number are a place, and the higher bits are the priority of a merge
NONE = np.int64(2 ** 63 - 1)  # greater than the priority and the place of any merge

Tokens = UInt32[np.ndarray, ' _']


class BpeDropout:
    """A segmenter that splits the words of tokenised text into tokens at random. Its input is tokens, not text.

    Bytes and user-defined symbols are not changed, and are not part of any merge.
    """

    def __init__(self, tokenizer: Tokenizer, rate: float):
        """Reads the merges of a vocabulary.

        Args:
          tokenizer: a tokenizer of kind 'bpe'.
          rate: p, the probability of skipping a merge in a step, from 0 to 1.
        """
        self._rate = rate
        pieces = ModelProto.FromString(tokenizer.model).pieces
        normal = {piece.piece: token for token, piece in enumerate(pieces) if piece.type == NORMAL}
        self._space = normal.get(SPACE, len(pieces))

        def split(token: int, text: str) -> list[int]:
            characters = [normal.get(character, PAD) for character in text]
            # Bytes, symbols, and pieces with a character that is not itself a piece are not split.
            return characters if text in normal and PAD not in characters else [token]

        characters = [split(token, piece.piece) for token, piece in enumerate(pieces)]
        self._counts = np.array(list(map(len, characters)))
        self._begins = np.cumsum(self._counts) - self._counts
        self._characters = np.array(list(itertools.chain.from_iterable(characters)), np.uint32)
        self._fixed = np.array([piece.piece not in normal or len(parts) < len(piece.piece)
                                for piece, parts in zip(pieces, characters, strict=True)])

        # Two adjacent pieces can be merged if their concatenation is a piece. The score of the concatenation is the
        # priority of the merge.
        merges = {normal[text[:cut]] * len(pieces) + normal[text[cut:]]: token
                  for text, token in normal.items() if not self._fixed[token]
                  for cut in range(1, len(text)) if text[:cut] in normal and text[cut:] in normal}
        self._size = len(pieces)
        pairs = sorted(merges)
        self._pairs = np.array([*pairs, NONE], np.int64)
        self._merged = np.array([*map(merges.get, pairs), PAD], np.uint32)
        order = np.unique([-piece.score for piece in pieces], return_inverse=True)[1]  # 0 is the highest priority
        self._priority = order << PLACES

    def segment(self, tokens: Tokens, counts: Int[np.ndarray, ' rows'],
                rng: np.random.Generator) -> tuple[Tokens, Int[np.ndarray, ' rows']]:
        """Returns the tokens of all rows in a new segmentation, and the number of tokens of each row.

        Args:
          tokens: the tokens of all rows, concatenated. Each row has the segmentation of `Tokenizer.encode`.
          counts: the number of tokens of each row.
          rng: the generator that decides which merges are skipped.
        """
        pieces = self._split(tokens)
        rows = np.repeat(np.arange(len(counts)), counts).repeat(self._counts[tokens])
        self._merge(pieces, self._ends(pieces, rows), rng)
        used = pieces != PAD
        return pieces[used], np.bincount(rows[used], minlength=len(counts))

    def _split(self, tokens: Tokens) -> Tokens:
        """Returns tokens of single characters: each token is replaced by the tokens of its characters."""
        counts = self._counts[tokens]
        ends = np.cumsum(counts)
        places = np.repeat(self._begins[tokens] - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
        return self._characters[places]

    def _ends(self, characters: Tokens, rows: Int[np.ndarray, ' _']) -> Bool[np.ndarray, ' _']:
        """Returns for each character whether it is the last character of a word.

        A word begins with a space. A token that cannot be split is also a word.
        """
        space, fixed = characters == self._space, self._fixed[characters]
        ends = np.ones(len(characters), bool)
        ends[:-1] = (rows[1:] != rows[:-1]) | fixed[1:] | fixed[:-1] | space[1:] & ~space[:-1]
        return ends

    def _merge(self, pieces: Tokens, ends: Bool[np.ndarray, ' _'], rng: np.random.Generator) -> None:
        """Merges the characters of each word into pieces, in place.

        A piece is stored at the index of its first character. The indices of its other characters are set to PAD.
        """
        token, place = pieces.copy(), np.arange(len(pieces))  # tokens of unfinished words, and their places
        merged = np.full(len(pieces), PAD, np.uint32)  # the merge of each token with the next token, or PAD
        merged[:-1] = np.where(ends[:-1], np.uint32(PAD), self._look_up(token[:-1], token[1:]))
        while len(token):
            possible = merged != PAD
            possible[possible] = rng.random(np.count_nonzero(possible), np.float32) >= self._rate
            # For each word, the best merge (the first one of equal merges), or NONE if the word is finished.
            order = np.where(possible, self._priority[merged] | np.arange(len(token)), NONE)
            last = np.flatnonzero(ends)
            best = np.minimum.reduceat(order, np.append(0, last[:-1] + 1))
            left = best[best != NONE] & (2 ** PLACES - 1)

            token[left] = pieces[place[left]] = merged[left]
            pieces[place[left + 1]] = PAD
            merged[left], ends[left] = PAD, ends[left + 1]
            kept = np.repeat(best != NONE, np.diff(last, prepend=-1))
            kept[left + 1] = False
            left = (np.cumsum(kept) - 1)[left]
            token, place, merged, ends = token[kept], place[kept], merged[kept], ends[kept]
            for changed in left, left[left > 0] - 1:  # a new piece has new possible merges on both sides
                changed = changed[~ends[changed]]
                merged[changed] = self._look_up(token[changed], token[changed + 1])

    def _look_up(self, first: Tokens, second: Tokens) -> Tokens:
        """Returns the token that each pair (first, second) merges into, or PAD if the pair cannot be merged."""
        pairs = first.astype(np.int64) * self._size + second
        places = np.searchsorted(self._pairs, pairs)
        return np.where(self._pairs[places] == pairs, self._merged[places], np.uint32(PAD))
