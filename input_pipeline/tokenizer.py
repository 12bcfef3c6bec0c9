"""Text <-> token numbers: SentencePiece subwords (Kudo and Richardson 2018, arXiv:1808.06226), characters or bytes.

Subwords and bytes are lossless: decode(encode(s)) == s for every string. Nothing is normalised unless it is asked
for, spaces and line breaks are kept as they are, and characters outside a subword vocabulary become bytes.
(SentencePiece's own default folds no-break spaces into plain ones, so French numbers could not come out as they
went in.) Characters are lossless for the characters of the text that they were learned from.
"""

import abc
import io
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece
from jaxtyping import UInt32
from typing_extensions import override

from errors import UserError
from files import read_bytes

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ('<pad>', '<s>', '</s>', '<unk>')
SPACE = '\u2581'  # how SentencePiece writes a space; a real one in the text is spelled out in bytes

# Where a long text may be cut without any change to its subwords: these hold no line break, and no space behind
# something else. (Inside a word of more than 65,536 characters is the exception.)
PART = re.compile(r'.{1,65536} {0,65536}[^ \n]{0,65536}', re.DOTALL)
PART_CHARACTERS = 2 ** 20  # of characters or bytes, which may be cut anywhere
SAMPLE = 1_000_000  # lines that subwords are learned from at most: their memory, and SentencePiece's, is bounded
LINE_CHARACTERS = 1000  # SentencePiece leaves lines of more than 4,192 bytes out when it learns


class Tokenizer(abc.ABC):
    """Text <-> token numbers. It can be pickled.

    Attributes:
      model: the bytes of its file, from which it is made again.
    """

    model: bytes

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of tokens, the four special ones included."""

    @abc.abstractmethod
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        """The tokens of a text of any length, a part of it at a time."""

    @abc.abstractmethod
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        """The text of `tokens`; padding, start and end are left out."""

    @abc.abstractmethod
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        """Each token as people read it in the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Token numbers, without start or end."""
        return [token for part in self.encode_parts(text) for token in part.tolist()]

    def __reduce__(self):
        return type(self), (self.model,)

    def save(self, path: Path) -> None:
        """Writes what `load_tokenizer` reads."""
        path.write_bytes(self.model)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer of any kind: a SentencePiece model file, or ours, which is JSON.

    Raises:
      UserError: if it cannot be read, is damaged, or is none of ours.
    """
    try:
        model = read_bytes(path)
        if not model.startswith(b'{'):  # no SentencePiece file begins so: it would be a field of an unused type
            return SubwordTokenizer(model)
        return {'char': CharTokenizer, 'byte': ByteTokenizer}[json.loads(model)['kind']](model)
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f'the tokenizer {path} cannot be read: {str(error) or type(error).__name__}. '
                        'Take it from the run directory as it was written') from None


class SubwordTokenizer(Tokenizer):
    """SentencePiece's, BPE or unigram. The first 260 are the special ones and the bytes."""

    def __init__(self, model: bytes):
        self.model = model
        if not model:
            raise ValueError('it is empty')  # SentencePiece takes that for a model to be loaded later
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        if [self._processor.id_to_piece(token) for token in range(4)] != list(SPECIAL):
            raise ValueError(f'its first pieces are not {" ".join(SPECIAL)}')
        self._space = [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in SPACE.encode()]

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @override
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        for part in PART.finditer(' ' + text):  # a word begins with its space, the first one too
            first, *rest = part[0].split(SPACE)
            tokens = self._processor.encode(first)
            for behind_it in rest:
                tokens += self._space + self._processor.encode(behind_it)
            yield np.array(tokens, np.uint32)

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        text = self._processor.decode([int(token) for token in tokens if token > UNK])
        return text.removeprefix(' ')

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        return [self._processor.id_to_piece(int(token)) for token in tokens]


class CharTokenizer(Tokenizer):
    """A token for each character of the training text, in their order.

    Another character becomes the unknown token, which decodes to U+FFFD: the only kind that can lose something,
    for the sake of figures that compare with those of others (tiny Shakespeare: 65 characters).
    """

    def __init__(self, model: bytes):
        self.model = model
        self._characters = json.loads(model)['characters']
        self._codes = np.array([ord(character) for character in self._characters], np.uint32)
        if not len(self._codes) or (self._codes[1:] <= self._codes[:-1]).any():
            raise ValueError('its characters are not in ascending order')

    def __len__(self) -> int:
        return len(SPECIAL) + len(self._characters)

    @override
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        for begin in range(0, len(text), PART_CHARACTERS):
            codes = np.frombuffer(text[begin:begin + PART_CHARACTERS].encode('utf-32-le'), '<u4')
            places = np.searchsorted(self._codes[:-1], codes)  # the last one stands for all that are beyond it
            yield np.where(self._codes[places] == codes, places + len(SPECIAL), UNK).astype(np.uint32)

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        return ''.join('\ufffd' if token == UNK else self._characters[token - len(SPECIAL)]
                       for token in tokens if token >= UNK)

    @override
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        written = [*SPECIAL, *(_visible(character, f'<U+{ord(character):04X}>') for character in self._characters)]
        return [written[token] for token in tokens]


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, behind the special tokens. What is not UTF-8 decodes to U+FFFD."""

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
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        written = [*SPECIAL, *(_visible(chr(byte), f'<0x{byte:02X}>') if byte < 128 else f'<0x{byte:02X}>'
                               for byte in range(256))]
        return [written[token] for token in tokens]


def _visible(character: str, otherwise: str) -> str:
    """A character as people read it in a line of pieces; `otherwise` if it cannot be printed."""
    return SPACE if character == ' ' else character if character.isprintable() else otherwise


def train_tokenizer(texts: Iterable[str], *, kind: str, vocab_size: int, split_digits: bool, normalization: str,
                    indentation: bool = False) -> Tokenizer:
    """Learns a vocabulary from `texts`; the same texts give the same vocabulary.

    Args:
      texts: sentences or documents. Subwords are learned from SAMPLE of their lines, drawn from all, if there are more.
      kind: 'bpe', 'unigram', 'char' or 'byte'; the options below are of the first two.
      vocab_size: number of subwords, of which 260 are special ones and bytes.
      split_digits: every digit is a subword of its own, which makes numbers easy to copy.
      normalization: of subwords, 'identity' (lossless) or 'nfkc'.
      indentation: subwords may begin with several spaces, or be nothing else.

    Raises:
      UserError: if `vocab_size` does not suit the text; the message gives the bound.
    """
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
    """What SentencePiece learns from: lines, as `encode_parts` will see them, cut where they are too long for it."""
    for text in texts:
        for line in io.StringIO(' ' + text, newline='\n'):
            line = line.removesuffix('\n')
            yield from (line[begin:begin + LINE_CHARACTERS] for begin in range(0, len(line), LINE_CHARACTERS))


def _sample(lines: Iterable[str], size: int) -> Iterator[str]:
    """`size` of the lines, each with the same probability; if there are no more lines, all of them, in order.

    The same lines give the same sample, which SentencePiece's own sampling does not promise.
    (Reservoir sampling, algorithm R of Vitter 1985.)
    """
    rng, lines = random.Random(0), iter(lines)
    sample = list(itertools.islice(lines, size))
    for number, line in enumerate(lines, size + 1):
        if (place := rng.randrange(number)) < size:
            sample[place] = line
    sample.reverse()
    while sample:
        yield sample.pop()  # SentencePiece has a copy from now on


def _train_subwords(lines: Iterable[str], kind: str, vocab_size: int, split_digits: bool, normalization: str,
                    indentation: bool) -> SubwordTokenizer:
    model = io.BytesIO()
    failure = []

    def sentences():
        try:
            yield from lines
        except (Exception, KeyboardInterrupt) as error:
            failure.append(error)  # SentencePiece makes it a RuntimeError, whatever it is
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(), model_writer=model,
            model_type=kind, vocab_size=vocab_size, split_digits=split_digits,
            normalization_rule_name=normalization, remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=indentation, byte_fallback=True, character_coverage=0.9995,
            pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            input_sentence_size=1_000_000, shuffle_input_sentence=True,  # no more are given: it draws nothing
            num_threads=1, minloglevel=2)  # one thread: the result depends on nothing but the text
    except RuntimeError as error:
        if failure:
            raise failure[0] from None
        bound = re.search(r'value <= (\d+)|required_chars\. \d+ vs (\d+)', str(error))
        if not bound:
            raise
        advice = f'at most {bound[1]}' if bound[1] else f'at least {bound[2]}'
        raise UserError(f'config.data.tokenizer.vocab_size={vocab_size} does not suit this text: '
                        f'it must be {advice}') from None
    return SubwordTokenizer(model.getvalue())
