"""Tokenizers of imported models: SentencePiece's models as others train them, and those of the library tokenizers.

Their vocabularies number the special tokens in ways of their own, and lack some. Here PAD, BOS, EOS and UNK are the
first four tokens as in every vocabulary of this project, and the other tokens follow in their own order. Whoever
imports or exports a model puts the rows of its embeddings in this order (`ForeignTokenizer.order`), so nothing else has
to know of it.

The text of a document is encoded in one piece, as the original libraries do.
"""

import abc
import base64
import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece
from jaxtyping import Int, UInt32
from typing_extensions import override

from input_pipeline.tokens import BOS, EOS, SPECIAL, UNK, Tokenizer
from runtime.errors import UserError

NONE = -1  # in `order`: a token that the original vocabulary does not have


class ForeignTokenizer(Tokenizer):
    """A tokenizer with a numbering of its own, the original one.

    Attributes:
      order: int [tokens], the original number of each token; NONE for those that the original does not have.
    """

    def __init__(self, model: bytes):
        self.model = model
        self._settings = json.loads(model)
        special, size = self._settings['special'], self._settings['size']
        if len(special) != len(SPECIAL) or not all(each is None or 0 <= each < size for each in special):
            raise ValueError(f'its special tokens {special} are not four of {size}')
        first = [NONE if each is None else each for each in special]
        self.order: Int[np.ndarray, ' tokens'] = np.array(
            first + [each for each in range(size) if each not in set(first)], np.int64)
        # One original token may both begin and end a text. Then it is what ends it that has the probability.
        twice = (BOS,) if special[BOS] is not None and special[BOS] == special[EOS] else ()
        self.absent = tuple(sorted({*twice, *(token for token in range(len(SPECIAL)) if first[token] == NONE)}))
        self._ours = np.full(size, UNK, np.uint32)
        there = [token for token in range(len(self.order)) if self.order[token] != NONE and token not in twice]
        self._ours[self.order[there]] = there

    def __len__(self) -> int:
        return len(self.order)

    @abc.abstractmethod
    def original(self, text: str) -> Sequence[int]:
        """Returns the original numbers of a text's tokens, without those that begin and end it."""

    @property
    @abc.abstractmethod
    def vocabulary(self) -> list[str]:
        """Each token as the original library writes it; the special ones as this project does."""

    @override
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        if text:  # some tokenizers write a space in front of any text, even an empty one
            yield self._ours[np.array(self.original(text), np.int64)]

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        return [self.vocabulary[token] for token in tokens]

    def _originals(self, tokens: Iterable[int | np.integer]) -> list[int]:
        """The original numbers of what is text: of the special tokens, that is at most the unknown one."""
        return [int(self.order[token]) for token in tokens if token >= UNK and self.order[token] != NONE]

    def _named(self, names: Mapping[int, str]) -> list[str]:
        return [*SPECIAL, *(names.get(int(each), f'<{each}>') for each in self.order[len(SPECIAL):])]


class SentencePieceTokenizer(ForeignTokenizer):
    """A model of SentencePiece, its pieces numbered by itself or, as Marian does, by a vocabulary beside it.

    With a vocabulary, a text may begin with a language code of it, as in '>>fra<< How are you?'.
    """

    def __init__(self, model: bytes):
        super().__init__(model)
        original = base64.b64decode(self._settings['model'], validate=True)
        if not original:
            raise ValueError('it is empty')  # SentencePiece would accept it as a model to load later
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=original)
        self._numbers: dict[str, int] | None = self._settings['vocabulary']
        self._unknown: int = self._settings['special'][UNK]

    @property
    def parts(self) -> tuple[bytes, Mapping[str, int] | None]:
        """The original model and, if there is one, the vocabulary beside it."""
        return base64.b64decode(self._settings['model']), self._numbers

    @override
    def original(self, text: str) -> Sequence[int]:
        if self._numbers is None:
            return self._processor.encode(text)
        code = []
        if text.startswith('>>') and (end := text.find('<<')) != -1:
            code, text = [text[:end + 2]], text[end + 2:]
        pieces = [*code, *self._processor.encode(text, out_type=str)]
        return [self._numbers.get(piece, self._unknown) for piece in pieces]

    @functools.cached_property
    @override
    def vocabulary(self) -> list[str]:
        size = min(self._processor.get_piece_size(), self._settings['size'])
        numbers = self._numbers or {self._processor.id_to_piece(each): each for each in range(size)}
        return self._named({number: piece for piece, number in numbers.items()})

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        tokens = list(tokens)
        if self._numbers is None:
            size = self._processor.get_piece_size()
            return self._processor.decode([each for each in self._originals(tokens) if each < size])
        return self._processor.decode([self.vocabulary[token] for token in tokens if token > UNK])

    @override
    def bytes_of(self, token: int) -> bytes:
        return _bytes_of_piece(self.vocabulary[token]) if token > UNK else b''


class TokenizersTokenizer(ForeignTokenizer):
    """What a tokenizer.json of the library tokenizers describes: byte-level BPE, as GPT-2's, and all others."""

    def __init__(self, model: bytes):
        super().__init__(model)
        try:
            self._tokenizer = tokenizers_library().Tokenizer.from_str(self._settings['model'])
        except UserError:
            raise
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f'the library tokenizers says: {error}') from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def json(self) -> str:
        """The original tokenizer.json."""
        return self._settings['model']

    def name_of(self, number: int) -> str:
        """How the library writes the token of this original number."""
        return self._tokenizer.id_to_token(number) or f'<{number}>'

    @override
    def original(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    @override
    def vocabulary(self) -> list[str]:
        return self._named({number: piece for piece, number in self._tokenizer.get_vocab().items()})

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        return self._tokenizer.decode(self._originals(tokens), skip_special_tokens=True)

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        return [self._readable(int(token)) for token in tokens]

    @override
    def bytes_of(self, token: int) -> bytes:
        if token <= UNK:
            return b''
        piece = self.vocabulary[token]
        if '"ByteLevel"' not in self._settings['model']:
            return _bytes_of_piece(piece)
        letters = letters_of_bytes()  # an added token, which is not text, is written as it is
        return bytes(letters[letter] for letter in piece) if {*piece} <= letters.keys() else piece.encode()

    def _readable(self, token: int) -> str:
        """A token as text, where it is text: byte-level BPE writes each byte as some letter."""
        if token < len(SPECIAL):
            return SPECIAL[token]
        text = self._tokenizer.decode([int(self.order[token])], skip_special_tokens=False).replace(' ', '\u2581')
        return text if text and text.isprintable() and '\ufffd' not in text else self.vocabulary[token]


def _bytes_of_piece(piece: str) -> bytes:
    """What a piece of SentencePiece writes: text with its sign for a space, or one byte, as '<0x0A>'."""
    byte = re.fullmatch('<0x([0-9A-F]{2})>', piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace('\u2581', ' ').encode()


@functools.cache
def letters_of_bytes() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: printable ones as they are, others from U+0100 on.

    Radford et al. 2019, as in the published code of GPT-2.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def tokenizers_library() -> Any:
    """The library tokenizers.

    Raises:
      UserError: if it is not installed.
    """
    if importlib.util.find_spec('tokenizers') is None:
        raise UserError("this tokenizer needs the library tokenizers: pip install -e '.[interchange]'")
    return importlib.import_module('tokenizers')


def sentencepiece_tokenizer(model: bytes, special: Sequence[int | None], size: int,
                            vocabulary: Mapping[str, int] | None = None) -> SentencePieceTokenizer:
    """A tokenizer of a SentencePiece model.

    Args:
      model: the content of its file.
      special: the original numbers of PAD, BOS, EOS and UNK; None for one that there is not.
      size: original tokens, as many as the model has rows for.
      vocabulary: {piece: number}, where the pieces are not numbered by the model itself.

    Raises:
      ValueError: if the parts are not of one vocabulary.
      RuntimeError: if SentencePiece cannot read the model.
    """
    return SentencePieceTokenizer(json.dumps({
        'kind': 'sentencepiece', 'special': list(special), 'size': size,
        'vocabulary': None if vocabulary is None else dict(vocabulary),
        'model': base64.b64encode(model).decode()}).encode())


def tokenizers_tokenizer(model: str, special: Sequence[int | None], size: int) -> TokenizersTokenizer:
    """A tokenizer of a tokenizer.json; see `sentencepiece_tokenizer`."""
    return TokenizersTokenizer(json.dumps({
        'kind': 'tokenizers', 'special': list(special), 'size': size, 'model': model}).encode())
