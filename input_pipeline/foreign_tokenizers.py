"""Tokenizers of imported models: SentencePiece models of other projects, and models of the `tokenizers` library.

In every vocabulary of this project, PAD, BOS, EOS and UNK are the first four tokens. An imported vocabulary can have
other ids for these special tokens, and can lack some of them. So the tokens of an imported vocabulary get new ids: the
special tokens are first, and the other tokens follow in their original order. When a model is imported or exported, the
rows of its embeddings are put into the new order (`ForeignTokenizer.order`). The remaining code does not depend on the
original ids.

The text of a document is encoded in one piece, as in the original libraries.
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

from input_pipeline.tokens import BOS, EOS, PAD, SPECIAL, UNK, Tokenizer
from runtime.errors import UserError

NONE = -1  # in `order`: the original vocabulary does not have the token


class ForeignTokenizer(Tokenizer):
    """A tokenizer of an imported model. Its tokens have new ids, so that the special tokens are first.

    Attributes:
      order: int [tokens], the original id of each token, or NONE if the original vocabulary lacks the token.
    """

    def __init__(self, model: bytes):
        self.model = model
        self._settings = json.loads(model)
        special, size = self._settings['special'], self._settings['size']
        if len(special) != len(SPECIAL) or not all(number is None or 0 <= number < size for number in special):
            raise ValueError(f'the special tokens {special} are not four tokens of a vocabulary of {size} tokens')
        first = [NONE if number is None else number for number in special]
        self.order: Int[np.ndarray, ' tokens'] = np.array(
            first + [number for number in range(size) if number not in set(first)], np.int64)
        # The original start token and end token may be the same token. Then the token is EOS here, and BOS is absent.
        twice = (BOS,) if special[BOS] is not None and special[BOS] == special[EOS] else ()
        self.absent = tuple(sorted({*twice, *(token for token in range(len(SPECIAL)) if first[token] == NONE)}))
        self._renumbered = np.full(size, UNK, np.uint32)
        # A text that contains the name of the padding token gets UNK. Padding is masked, so PAD would shift positions.
        never = (PAD, *twice)
        present = [token for token in range(len(self.order)) if self.order[token] != NONE and token not in never]
        self._renumbered[self.order[present]] = present

    def __len__(self) -> int:
        return len(self.order)

    @abc.abstractmethod
    def original(self, text: str) -> Sequence[int]:
        """Returns the original ids of the tokens of a text, without start and end tokens."""

    @property
    @abc.abstractmethod
    def _names(self) -> Mapping[int, str]:
        """The original library's text for each original id."""

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        """The text of each token: SPECIAL for special tokens, and the text of the original library for other tokens."""
        return [*SPECIAL, *(self.name_of(int(number)) for number in self.order[len(SPECIAL):])]

    def name_of(self, number: int) -> str:
        """Returns the original library's text for the token with the original id `number`."""
        return self._names.get(number, f'<{number}>')

    @override
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        if text:  # some tokenizers add a space before every text, even before an empty text
            yield self._renumbered[np.array(self.original(text), np.int64)]

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        return [self.vocabulary[token] for token in tokens]

    def _originals(self, tokens: Iterable[int | np.integer]) -> list[int]:
        """Returns the original ids of tokens. Omits PAD, BOS, EOS and tokens without an original id."""
        return [int(self.order[token]) for token in tokens if token >= UNK and self.order[token] != NONE]


class SentencePieceTokenizer(ForeignTokenizer):
    """A SentencePiece model. A separate vocabulary, as in Marian, may give other ids to the pieces.

    With such a vocabulary, a text may begin with a language code of the vocabulary, as in '>>fra<< How are you?'.
    """

    def __init__(self, model: bytes):
        super().__init__(model)
        original = base64.b64decode(self._settings['model'], validate=True)
        if not original:
            raise ValueError('the model is empty')  # SentencePiece accepts b'', because a model may be loaded later
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=original)
        self._numbers: dict[str, int] | None = self._settings['vocabulary']
        self._unknown: int = self._settings['special'][UNK]

    @property
    def parts(self) -> tuple[bytes, Mapping[str, int] | None]:
        """The original SentencePiece model, and its separate vocabulary or None."""
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
    def _names(self) -> Mapping[int, str]:
        size = min(self._processor.get_piece_size(), self._settings['size'])
        numbers = self._numbers or {self._processor.id_to_piece(number): number for number in range(size)}
        return {number: piece for piece, number in numbers.items()}

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        tokens = list(tokens)
        if self._numbers is None:
            size = self._processor.get_piece_size()
            return self._processor.decode([number for number in self._originals(tokens) if number < size])
        return self._processor.decode([self.vocabulary[token] for token in tokens if token > UNK])

    @override
    def bytes_of(self, token: int) -> bytes:
        piece = self.vocabulary[token]
        unnamed = self._numbers is None and int(self.order[token]) not in self._names
        if token <= UNK or unnamed or self._processor.is_control(self._processor.piece_to_id(piece)):
            return b''
        return _bytes_of_piece(piece)


class TokenizersTokenizer(ForeignTokenizer):
    """A tokenizer.json of the `tokenizers` library: byte-level BPE, as in GPT-2, or any other kind of tokenizer."""

    def __init__(self, model: bytes):
        super().__init__(model)
        try:
            self._tokenizer = tokenizers_library().Tokenizer.from_str(self._settings['model'])
        except UserError:
            raise
        except Exception as error:  # the library has no more specific exceptions
            raise ValueError(f'the Python package tokenizers cannot read the file: {error}') from None
        self._tokenizer.encode_special_tokens = self.split_special_tokens
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def json(self) -> str:
        """The content of the original tokenizer.json."""
        return self._settings['model']

    @property
    def split_special_tokens(self) -> bool:
        """Whether the name of a special token in a text, such as '</s>', is ordinary text, as in transformers."""
        return self._settings.get('split_special_tokens', False)

    @override
    def original(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    @override
    def _names(self) -> Mapping[int, str]:
        return {number: piece for piece, number in self._tokenizer.get_vocab().items()}

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        """The original ids of all special tokens, which `decode` omits."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @functools.cached_property
    def _byte_level(self) -> bool:
        """Whether the vocabulary has one letter for each byte, as in GPT-2."""
        return '"ByteLevel"' in self._settings['model']  # cached, because the search takes 0.7 ms with 32,000 tokens

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        return self._tokenizer.decode(self._originals(tokens), skip_special_tokens=True)

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        if not self._byte_level:  # the names are as in SentencePiece, so train.init_from finds tokens by their names
            return super().pieces(tokens)
        return [_readable(self.bytes_of(int(token))) or self.vocabulary[token] for token in tokens]

    @override
    def bytes_of(self, token: int) -> bytes:
        number = int(self.order[token])
        if token <= UNK or number in self._special or number not in self._names:
            return b''
        piece = self.vocabulary[token]
        if not self._byte_level:
            return _bytes_of_piece(piece)
        letters = letters_of_bytes()  # added tokens are stored as plain text
        return bytes(letters[letter] for letter in piece) if {*piece} <= letters.keys() else piece.encode()


def _readable(content: bytes) -> str:
    """Returns the bytes of a token as text: U+2581 for a space, '<U+000A>' for a line feed, '<0xE6>' for a single byte.

    This is for byte-level BPE. There, the library's own text is hard to read, because it has one letter for each byte.
    """
    def written(character):
        if '\udc80' <= character <= '\udcff':  # a byte that is only a part of a character
            return f'<0x{ord(character) - 0xdc00:02X}>'
        return character if character.isprintable() else f'<U+{ord(character):04X}>'

    return ''.join(map(written, content.decode(errors='surrogateescape').replace(' ', '\u2581')))


def _bytes_of_piece(piece: str) -> bytes:
    """Returns the bytes of a SentencePiece piece: text with U+2581 for a space, or one byte such as '<0x0A>'."""
    byte = re.fullmatch('<0x([0-9A-F]{2})>', piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace('\u2581', ' ').encode()


@functools.cache
def letters_of_bytes() -> dict[str, int]:
    """Returns {letter: byte} for the letters that byte-level BPE writes instead of bytes.

    A printable byte is written as the character with the same code. The remaining bytes are written as the characters
    from U+0100 on, in order. This table is from the published code of GPT-2 (Radford et al. 2019).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def tokenizers_library() -> Any:
    """Imports the `tokenizers` library, and returns the module.

    Raises:
      UserError: if the library is not installed.
    """
    if importlib.util.find_spec('tokenizers') is None:
        raise UserError("the Python package tokenizers is not installed. Run pip install -e '.[interchange]'")
    return importlib.import_module('tokenizers')


def sentencepiece_tokenizer(model: bytes, special: Sequence[int | None], size: int,
                            vocabulary: Mapping[str, int] | None = None) -> SentencePieceTokenizer:
    """Returns a tokenizer of a SentencePiece model.

    Args:
      model: the content of the model file.
      special: the original ids of PAD, BOS, EOS and UNK. An id is None if the token does not exist.
      size: the number of original tokens, which is the number of rows of the imported model's embedding.
      vocabulary: {piece: id} if the ids differ from the ids in the SentencePiece model, otherwise None.

    Raises:
      ValueError: if the arguments do not describe the same vocabulary.
      RuntimeError: if SentencePiece cannot read the model.
    """
    return SentencePieceTokenizer(json.dumps({
        'kind': 'sentencepiece', 'special': list(special), 'size': size,
        'vocabulary': None if vocabulary is None else dict(vocabulary),
        'model': base64.b64encode(model).decode()}).encode())


def tokenizers_tokenizer(model: str, special: Sequence[int | None], size: int,
                         split_special_tokens: bool = False) -> TokenizersTokenizer:
    """Returns a tokenizer made from `model`, the content of a tokenizer.json.

    `TokenizersTokenizer` describes `split_special_tokens`, and `sentencepiece_tokenizer` the other arguments.
    """
    return TokenizersTokenizer(json.dumps({
        'kind': 'tokenizers', 'special': list(special), 'size': size, 'model': model,
        **({'split_special_tokens': True} if split_special_tokens else {})}).encode())
