"""SentencePiece subwords (Kudo and Richardson 2018, arXiv:1808.06226), lossless by default.

decode(encode(s)) == s for every string: nothing is normalised, spaces are kept as they are, and characters
outside the vocabulary become bytes. (SentencePiece's own default folds no-break spaces into plain ones, so
French numbers could not come out as they went in.)
"""

import io
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import sentencepiece

from errors import UserError

PAD, BOS, EOS, UNK = range(4)
SPACE = '\u2581'  # how SentencePiece writes a space; a real one in the text is spelled out in bytes
NORMALIZATIONS = ('identity', 'nfkc')
KINDS = ('bpe', 'unigram')


class Tokenizer:
    """Text <-> token numbers. Picklable; `model` is the SentencePiece file's bytes."""

    def __init__(self, model: bytes):
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._space = [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in SPACE.encode()]

    def __len__(self) -> int:
        """Number of pieces, the four special ones and the 256 bytes included."""
        return self._processor.get_piece_size()

    def __reduce__(self):
        return Tokenizer, (self.model,)

    def encode(self, text: str) -> list[int]:
        """Token numbers, without start or end. A word begins with its space, the first one too."""
        first, *rest = (' ' + text).split(SPACE)
        tokens = self._processor.encode(first)
        for part in rest:
            tokens += self._space + self._processor.encode(part)
        return tokens

    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        """The text of `tokens`; the special ones (start, end, padding) are left out."""
        text = self._processor.decode([int(token) for token in tokens if token > UNK])
        return text.removeprefix(' ')

    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        """How each token is written in the vocabulary, for people."""
        return [self._processor.id_to_piece(int(token)) for token in tokens]

    def save(self, path: Path) -> None:
        """Writes the SentencePiece model file."""
        path.write_bytes(self.model)

    @classmethod
    def load(cls, path: Path) -> 'Tokenizer':
        """Reads a SentencePiece model file."""
        return cls(path.read_bytes())


def train_tokenizer(lines: Iterable[str], *, kind: str, vocab_size: int, split_digits: bool,
                    normalization: str) -> Tokenizer:
    """Learns a vocabulary from `lines`; the same lines give the same vocabulary.

    Args:
      lines: text; at most a million of them are used, drawn by SentencePiece.
      kind: 'bpe' or 'unigram'.
      vocab_size: number of pieces, of which 260 are special ones and bytes.
      split_digits: every digit is a piece of its own, which makes numbers easy to copy.
      normalization: 'identity' (lossless) or 'nfkc'.

    Raises:
      UserError: if `vocab_size` does not suit the text; the message gives the bound.
    """
    model = io.BytesIO()
    failure = []

    def sentences():
        try:
            yield from (' ' + line for line in lines)
        except (Exception, KeyboardInterrupt) as error:
            failure.append(error)  # SentencePiece makes it a RuntimeError, whatever it is
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(), model_writer=model,
            model_type=kind, vocab_size=vocab_size, split_digits=split_digits,
            normalization_rule_name=normalization, remove_extra_whitespaces=False, add_dummy_prefix=False,
            byte_fallback=True, character_coverage=0.9995,
            pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            input_sentence_size=1_000_000, shuffle_input_sentence=True,
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
    return Tokenizer(model.getvalue())
