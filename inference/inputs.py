"""The inputs of models that write text: checks of texts and pairs, required beginnings, and the input of a search."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from inference import search
from inference.constraints import begin_words
from input_pipeline.tokenizer import Tokenizer
from runtime.errors import UserError


class Begin(NamedTuple):
    """The required beginning of an output.

    Attributes:
      prefix: the first tokens. The last token may be search.NEW_WORD.
      place: the initial state of the automaton of the words to avoid.
    """
    prefix: Sequence[int] = ()
    place: int = 0


def encode_prefix(tokenizer: Tokenizer, prefix: str) -> Begin:
    """Encodes the text with which an output must begin.

    A space at the end of the text belongs to the next word if the tokenizer has subwords that begin with a space. The
    same holds if the tokenizer drops a space at the end of a text, as SentencePiece does by default. In these cases,
    the search may choose any token that begins with a space.
    """
    if not prefix.strip():
        return Begin()
    tokens, without_end = tokenizer.encode(prefix), tokenizer.encode(prefix[:-1])
    spaces = begin_words(tokenizer).sum() if prefix.endswith(' ') else 0
    new_word = spaces > 1 or spaces and tokens == without_end
    return Begin([*without_end, search.NEW_WORD]) if new_word else Begin(tokens)


class SearchInput(NamedTuple):
    """The input of a search for one source.

    Attributes:
      encoded: the tokens that the model encodes.
      start: the first input token of the decoder.
      limit: the maximum number of new tokens.
    """
    encoded: list[int]
    start: int
    limit: int


def checked_texts(texts: Sequence[str]) -> list[str]:
    """Returns the texts as a list.

    Raises:
      UserError: if `texts` is a string, or an element is not a string or cannot be encoded in UTF-8.
    """
    if isinstance(texts, str):
        raise UserError(f'{texts[:40]!r} is a string, but a list of texts is required. Use [{texts[:40]!r}]')
    texts = list(texts)
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise UserError(f'text {number} is {text!r:.80}: must be a string that UTF-8 can encode') from None
    return texts


def is_pair(value: Any) -> bool:
    """Returns whether `value` has the form of a pair (source, target): a tuple or a list of two elements."""
    return isinstance(value, tuple | list) and len(value) == 2


def checked_pairs(pairs: Iterable[Any]) -> list[Any]:
    """Returns the pairs (source, target) as a list.

    Raises:
      UserError: if an element of `pairs` is not a pair.
    """
    pairs = list(pairs)
    for number, pair in enumerate(pairs, 1):
        if not is_pair(pair):
            raise UserError(f'pair {number} is {pair!r:.80}: must be (source, target). Use a list of pairs, '
                            '[(source, target), ...]')
    return pairs
