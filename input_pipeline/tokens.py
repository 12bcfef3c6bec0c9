"""The interface of all tokenizers, and their common special tokens."""

import abc
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt32

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ('<pad>', '<s>', '</s>', '<unk>')


class Tokenizer(abc.ABC):
    """Converts between text and token ids. Tokenizers can be pickled.

    Attributes:
      model: the bytes of the tokenizer's file, from which the tokenizer can be restored.
      absent: the special tokens that the vocabulary of an imported model does not have. No text contains these tokens,
        and their probability is 0.
    """

    model: bytes
    absent: tuple[int, ...] = ()

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of tokens, including the four special tokens."""

    @abc.abstractmethod
    def encode_parts(self, text: str) -> Iterator[UInt32[np.ndarray, ' part']]:
        """Yields the tokens of a text of any length, one part at a time. Yields nothing for an empty text."""

    @abc.abstractmethod
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        """Returns the text of `tokens`, without padding, start and end tokens."""

    def continuation(self, before: Sequence[int | np.integer], tokens: Sequence[int | np.integer],
                     prompt: str = '') -> str:
        """Returns the text that `tokens` add to the text of the tokens `before`.

        decode(before) + continuation(before, tokens) == decode([*before, *tokens]), with one exception. If `before`
        ends within a character, the whole character belongs to the continuation.

        Args:
          before: the tokens of a prompt.
          tokens: the tokens that follow `before`.
          prompt: the text that `before` encodes, if it is known. Some imported tokenizers drop spaces at the end of a
            text, so decode(before) may lack spaces of the prompt. With `prompt`, these spaces are not part of the
            continuation.
        """
        whole = self.decode([*before, *tokens])
        known = prompt if prompt and whole.startswith(prompt) else self.decode(before)
        return whole[len(os.path.commonprefix([known, whole])):]

    @abc.abstractmethod
    def pieces(self, tokens: Iterable[int | np.integer]) -> list[str]:
        """Returns a readable text for each token."""

    def bytes_of(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of a token, or b'' for a special token or any other token that `decode` omits.

        A token may be only a part of a character.
        """
        return self.decode([token]).encode() if token > UNK else b''

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without start and end tokens."""
        return [token for part in self.encode_parts(text) for token in part.tolist()]

    def __reduce__(self):
        return type(self), (self.model,)

    def save(self, path: Path) -> None:
        """Saves the tokenizer in a file that `load_tokenizer` can read."""
        path.write_bytes(self.model)
