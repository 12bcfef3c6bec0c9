"""Tokenizers: SentencePiece subwords (Kudo and Richardson 2018, arXiv:1808.06226), characters or bytes.

Tokenizers of subwords and bytes are lossless: decode(encode(s)) == s for every string. By default nothing is
normalised, spaces and line breaks are kept, and characters outside a subword vocabulary become bytes. (SentencePiece's
own default replaces no-break spaces by plain spaces. This would change French numbers.) Character tokenizers are
lossless for the characters of their training text.
"""

import io
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import sentencepiece
from jaxtyping import UInt32
from typing_extensions import override

from configs.tasks import IMPORTED, TOKENIZERS
from input_pipeline.foreign_tokenizers import SentencePieceTokenizer, TokenizersTokenizer
from input_pipeline.tokens import BOS, EOS, PAD, SPECIAL, UNK, Tokenizer
from runtime.errors import UserError
from runtime.files import RESTORE, read_bytes

SPACE = '\u2581'  # SentencePiece's character for a space; if a text has this character, it is encoded as bytes

# Divides a long text only at places where this does not change the subwords. Subwords contain no line breaks, and
# contain spaces only at their beginning. (Words of more than 65,536 characters are an exception.)
PART = re.compile(r'.{1,65536} {0,65536}[^ \n]{0,65536}', re.DOTALL)
PART_CHARACTERS = 2 ** 20  # for characters and bytes, where a text can be divided at any place
SAMPLE = 1_000_000  # maximum number of lines to learn subwords from; limits the memory in use
UNKNOWN = '\u2585'  # SentencePiece's character for unknown characters; training ignores lines with this character
LINE_CHARACTERS = 1000  # SentencePiece ignores lines of more than 4,192 bytes in training


class VocabularyTooLarge(UserError):
    """Raised if a text does not allow `vocab_size` subwords. `most` is the largest size that the text allows."""

    def __init__(self, vocab_size: int, most: int):
        super().__init__(f'config.data.tokenizer.vocab_size={vocab_size}: too large for this text. Use at most {most}')
        self.most = most


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer of any kind, from a SentencePiece model file or from a JSON file for the other kinds.

    Raises:
      UserError: if the file cannot be read, is damaged, or has another format.
    """
    try:
        model = read_bytes(path)
        if not model.startswith(b'{'):  # in a SentencePiece file, this byte would be an unused field type
            return SubwordTokenizer(model)
        return KINDS[json.loads(model)['kind']](model)
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f'the tokenizer {path} cannot be read: {str(error) or type(error).__name__}. {RESTORE}'
                        ) from None


class SubwordTokenizer(Tokenizer):
    """BPE or unigram subwords of SentencePiece. The first 260 tokens are the special tokens and the bytes."""

    def __init__(self, model: bytes):
        self.model = model
        if not model:
            raise ValueError('the file is empty')  # SentencePiece accepts b'', because a model may be loaded later
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        if [self._processor.id_to_piece(token) for token in range(4)] != list(SPECIAL):
            raise ValueError(f'the first pieces of the vocabulary must be {" ".join(SPECIAL)}')
        self._space = [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in SPACE.encode()]

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @override
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        for part in PART.finditer(' ' + text if text else ''):  # a space before every word, also the first
            first, *rest = part[0].split(SPACE)
            tokens = self._processor.encode(first)
            for following in rest:
                tokens += self._space + self._processor.encode(following)
            yield np.array(tokens, np.uint32)

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        text = self._processor.decode([int(token) for token in tokens if token > UNK])
        return text.removeprefix(' ')

    @override
    def bytes_of(self, token: int) -> bytes:
        piece = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])
        return piece.replace(SPACE, ' ').encode() if token > UNK else b''

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        return [self._processor.id_to_piece(int(token)) for token in tokens]


class CharTokenizer(Tokenizer):
    """A tokenizer with one token for each character of the training text, in the order of code points.

    Any other character becomes the unknown token, which decodes to U+FFFD. So this tokenizer is not lossless. Results
    are comparable with published results of character models (tiny Shakespeare has 65 characters).
    """

    def __init__(self, model: bytes):
        self.model = model
        self.characters = json.loads(model)['characters']
        self._codes = np.array([ord(character) for character in self.characters], np.uint32)
        if not len(self._codes) or (self._codes[1:] <= self._codes[:-1]).any():
            raise ValueError('the characters are not in ascending order')

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.characters)

    @override
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        for begin in range(0, len(text), PART_CHARACTERS):
            codes = np.frombuffer(text[begin:begin + PART_CHARACTERS].encode('utf-32-le'), '<u4')
            places = np.searchsorted(self._codes[:-1], codes)  # larger codes get the index of the last character
            yield np.where(self._codes[places] == codes, places + len(SPECIAL), UNK).astype(np.uint32)

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        return ''.join('\ufffd' if token == UNK else self.characters[token - len(SPECIAL)]
                       for token in tokens if token >= UNK)

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        written = [*SPECIAL, *(_visible(character, f'<U+{ord(character):04X}>') for character in self.characters)]
        return [written[token] for token in tokens]


class ByteTokenizer(Tokenizer):
    """A tokenizer with one token for each byte of UTF-8. Special tokens are first. Invalid UTF-8 decodes to U+FFFD."""

    def __init__(self, model: bytes = b'{"kind": "byte"}'):
        self.model = model

    def __len__(self) -> int:
        return len(SPECIAL) + 256

    @override
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        for begin in range(0, len(text), PART_CHARACTERS):
            content = text[begin:begin + PART_CHARACTERS].encode()
            yield np.frombuffer(content, np.uint8).astype(np.uint32) + np.uint32(len(SPECIAL))

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        return bytes(int(token) - len(SPECIAL) for token in tokens if token > UNK).decode(errors='replace')

    @override
    def bytes_of(self, token: int) -> bytes:
        return bytes([token - len(SPECIAL)]) if token > UNK else b''

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        written = [*SPECIAL, *(_visible(chr(byte), f'<0x{byte:02X}>') if byte < 128 else f'<0x{byte:02X}>'
                               for byte in range(256))]
        return [written[token] for token in tokens]


# Tokenizers that are saved in a JSON file: the value of 'kind' in the file -> the class.
KINDS: Mapping[str, Callable[[bytes], Tokenizer]] = {
    'char': CharTokenizer, 'byte': ByteTokenizer, 'sentencepiece': SentencePieceTokenizer,
    'tokenizers': TokenizersTokenizer}


def _visible(character: str, otherwise: str) -> str:
    """Returns the visible form of a character in a piece: SPACE for a space.

    Returns `otherwise` if the character is not printable, or is SPACE itself.
    """
    if character == ' ':
        return SPACE
    return character if character.isprintable() and character != SPACE else otherwise


def train_tokenizer(texts: Iterable[str], *, kind: str, vocab_size: int, split_digits: bool, normalization: str,
                    indentation: bool = False) -> Tokenizer:
    """Learns a vocabulary from `texts`. The same texts always give the same vocabulary.

    Args:
      texts: sentences or documents. If they have more than SAMPLE lines, subwords are learned from a random sample.
      kind: 'bpe', 'unigram', 'char' or 'byte'. The arguments below are only for 'bpe' and 'unigram'.
      vocab_size: config.data.tokenizer.vocab_size.
      split_digits: config.data.tokenizer.split_digits.
      normalization: config.data.tokenizer.normalization.
      indentation: whether subwords may begin with several spaces or consist of several spaces.

    Raises:
      VocabularyTooLarge: if the text does not allow `vocab_size` subwords.
      UserError: if `vocab_size` is too small for the characters of the text, or if tokenizers of this kind cannot be
        learned.
    """
    if kind in IMPORTED:
        raise UserError(f'config.data.tokenizer.kind={kind}: only imported models have such a tokenizer. Continue a '
                        f'run that tools.import_weights has written, or choose {", ".join(TOKENIZERS)}')
    if kind == 'byte':
        return ByteTokenizer()
    if kind == 'char':
        characters = set()
        for text in texts:
            characters.update(text)
        return CharTokenizer(json.dumps({'kind': 'char', 'characters': ''.join(sorted(characters))}).encode())
    lines = _sample(_training_lines(texts), SAMPLE)
    return _train_subwords(lines, kind, vocab_size, split_digits, normalization, indentation)


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yields the lines that SentencePiece learns from, with a space before each text.

    Long lines are divided, and so are lines that contain UNKNOWN. The parts do not contain UNKNOWN.
    """
    for text in texts:
        for line in io.StringIO(' ' + text, newline='\n'):
            for part in line.removesuffix('\n').split(UNKNOWN):
                yield from (part[begin:begin + LINE_CHARACTERS] for begin in range(0, len(part), LINE_CHARACTERS))


def _sample(lines: Iterable[str], size: int) -> Iterator[str]:
    """Yields `size` lines that are sampled uniformly. If there are at most `size` lines, yields all lines in order.

    The same lines always give the same sample. SentencePiece's own sampling does not guarantee this. The method is
    reservoir sampling (algorithm R, Vitter 1985).
    """
    rng, lines = random.Random(0), iter(lines)
    sample = list(itertools.islice(lines, size))
    for number, line in enumerate(lines, size + 1):
        if (place := rng.randrange(number)) < size:
            sample[place] = line
    sample.reverse()
    while sample:
        yield sample.pop()  # frees the line, because SentencePiece keeps a copy


def _train_subwords(lines: Iterable[str], kind: str, vocab_size: int, split_digits: bool, normalization: str,
                    indentation: bool) -> SubwordTokenizer:
    # Imported here, because this import is slow and decoding does not need it.
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
    model = io.BytesIO()
    failure = []

    def sentences():
        try:
            yield from lines
        except (Exception, KeyboardInterrupt) as error:
            failure.append(error)  # SentencePiece replaces any exception by a RuntimeError
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(), model_writer=model,
            model_type=kind, vocab_size=vocab_size, split_digits=split_digits,
            normalization_rule_name=normalization, remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=indentation, byte_fallback=True, character_coverage=0.9995,
            # Without this piece, rare spaces would be encoded as the bytes of U+2581 (SPACE), which decode to U+2581.
            required_chars=SPACE,
            pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            input_sentence_size=1_000_000, shuffle_input_sentence=True,  # at most SAMPLE lines, so all are used
            num_threads=1, minloglevel=2)  # with one thread, the result depends only on the text
    except RuntimeError as error:
        if failure:
            raise failure[0] from None
        bound = re.search(r'value <= (\d+)|required_chars\. \d+ vs (\d+)', str(error))
        if not bound:
            raise
        if bound[1]:
            raise VocabularyTooLarge(vocab_size, int(bound[1])) from None
        raise UserError(f'config.data.tokenizer.vocab_size={vocab_size}: too small for the characters of this text. '
                        f'Use at least {bound[2]}') from None
    proto = ModelProto.FromString(model.getvalue())
    # Runs compare vocabularies byte for byte. Earlier versions did not set this option, and learned the same pieces
    # from texts with enough spaces.
    proto.trainer_spec.ClearField('required_chars')
    return SubwordTokenizer(proto.SerializeToString())
