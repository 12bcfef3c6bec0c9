"""Words that outputs must not contain. An automaton reads an output and excludes tokens that would complete a phrase.

A phrase is excluded for every way of splitting it into tokens, but only as a whole word, not inside another word. The
last letter of a phrase is allowed, because another letter may follow and make a different word: if 'Mann' is excluded,
'Mannschaft' is still allowed. After the last letter, everything that ends the word is excluded: a space, a full stop,
the end of the text.

Words consist of letters, marks and the underscore. Digits make numbers: a word may begin directly after a number, and
a number may begin directly after a word, so '3heures' contains the word 'heures'. Upper and lower case are equivalent,
and so are the composed and the decomposed Unicode form of a character. Scripts without spaces between words (Chinese,
Japanese, Thai, ...) have no word boundaries, so a phrase in such a script is excluded wherever it occurs. A space in a
phrase stands for any white space.
"""

import functools
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from input_pipeline.tokenizer import EOS, UNK, Tokenizer
from runtime.errors import UserError

DEAD = -1  # the state after an excluded token
MAX_PHRASE = 1000  # maximum number of characters of a phrase; each character is a state of the automaton
MAX_ENTRIES = 2 ** 28  # maximum number of entries of a table: 1 GB
WITHOUT_SPACES = ((0x0e00, 0x0eff), (0x1000, 0x109f), (0x1780, 0x17ff), (0x3040, 0x30ff), (0x31f0, 0x31ff),
                  (0x3400, 0x9fff), (0xf900, 0xfaff))  # Thai, Lao, Burmese, Khmer, kana, Han
# Placeholders for the characters that no phrase contains: word characters, digits, other characters.
WORD, DIGIT, OTHER = '\ue000', '\ue001', '\ufffd'
WORD_LEADS = {*range(0xc3, 0xe2), *range(0xea, 0xee)}  # first UTF-8 bytes whose characters are mostly word characters
BYTES = [chr(0xdc80 + place) for place in range(128)]  # bytes of incomplete characters, decoded by 'surrogateescape'


def checked_phrases(phrases: Iterable[Any]) -> tuple[str, ...]:
    """Returns the phrases as a tuple.

    Raises:
      UserError: if `phrases` is a string, or a phrase is blank, too long, or cannot be encoded in UTF-8.
    """
    if isinstance(phrases, str):
        raise UserError(f'avoid={phrases[:40]!r}: must be a list of phrases. Use [{phrases[:40]!r}]')
    phrases = tuple(phrases)
    for phrase in phrases:
        try:
            written = phrase.encode() and phrase.split()
        except (AttributeError, UnicodeEncodeError):
            written = False
        if not written:
            raise UserError(f'avoid: {phrase!r:.80} is not a phrase. Use a word, or words with spaces between them')
        if len(phrase) > MAX_PHRASE:
            raise UserError(f'avoid: {phrase[:40]!r}... has {len(phrase):,} characters. Use phrases of at most '
                            f'{MAX_PHRASE:,} characters')
    return phrases


@functools.cache
def _kind(character: str) -> str:
    """Returns WORD for a character that is part of words, DIGIT for a digit, and OTHER for all other characters.

    A character of a script without spaces between words is OTHER.
    """
    code = ord(character)
    if code > 0xffff or any(first <= code <= last for first, last in WITHOUT_SPACES):
        return OTHER
    if character == DIGIT or character.isnumeric():
        return DIGIT
    in_word = character in (WORD, '_') or character.isalpha() or unicodedata.category(character)[0] == 'M'
    return WORD if in_word else OTHER


def _folded(text: str) -> str:
    folded = unicodedata.normalize('NFD', unicodedata.normalize('NFD', text).casefold())
    return ''.join(' ' if character.isspace() else character for character in folded)


class _State(NamedTuple):
    """A state of the automaton: the properties of the text so far that determine which tokens may follow.

    Attributes:
      begun: the incomplete phrases at the end of the text.
      kind: the kind of the last character (`_kind`). A word may begin after a character of another kind.
      ended: if true, the text ends with a complete phrase. Then only a character of the same kind may follow, because
        this character makes another word.
      pending: the first bytes of an incomplete character that a phrase may contain.
    """
    begun: frozenset[str] = frozenset()
    kind: str = OTHER
    ended: bool = False
    pending: bytes = b''


class _Phrases:
    """The transitions between the states of the automaton.

    The input symbols of the automaton are the characters of the phrases, WORD, DIGIT, OTHER and BYTES.
    """

    def __init__(self, phrases: Sequence[str]):
        self._phrases = {' '.join(_folded(phrase).split()) for phrase in phrases}
        self._prefixes = {phrase[:end] for phrase in self._phrases for end in range(1, len(phrase))}
        letters = {' '}.union(*self._phrases)
        symbols = [*sorted(letters - {WORD, DIGIT, OTHER}), WORD, DIGIT, OTHER, *BYTES]
        self.symbols = {symbol: column for column, symbol in enumerate(symbols)}
        possible = {*map(chr, range(0x80, 0xd800)), *map(chr, range(0xe000, 0x10000)), *letters}
        self._incomplete = {character.encode()[:end] for character in possible if letters.issuperset(_folded(character))
                            for end in range(1, len(character.encode()))}

    def read(self, written: bytes) -> list[str]:
        """Returns the input symbols of the automaton for `written`, a text in UTF-8."""
        return [symbol if symbol in self.symbols else _kind(symbol)
                for symbol in _folded(written.decode('utf-8', 'surrogateescape'))]

    def step(self, state: _State, symbol: str) -> _State | None:
        """Returns the state after a symbol, or None if the symbol is excluded."""
        if state.pending and not BYTES[0] <= symbol <= BYTES[63]:  # the incomplete character becomes U+FFFD
            after = self.step(state._replace(pending=b''), OTHER)
            return after and self.step(after, symbol)
        if symbol in BYTES:
            return self._byte(state, symbol.encode('utf-8', 'surrogateescape'))
        kind = _kind(symbol)
        joins = kind != OTHER and kind == state.kind
        if state.ended and not joins:
            return None
        texts = {text + symbol for text in state.begun} | (set() if joins else {symbol})
        if symbol == ' ':
            texts |= {text for text in state.begun if text[-1] == ' '}  # white space of any length
        complete = texts & self._phrases
        if not all(_kind(text[-1]) != OTHER for text in complete):
            return None
        return _State(frozenset(texts & self._prefixes), kind, bool(complete))

    def _byte(self, state: _State, byte: bytes) -> _State | None:
        """Returns the state after a byte of a character that is split across tokens.

        If no phrase contains the character, the first byte determines whether the character counts as a word character.
        The remaining bytes have no effect.
        """
        pending, state = state.pending + byte, state._replace(pending=b'')
        if pending in self._incomplete:
            return state._replace(pending=pending)
        try:
            symbols = self.read(pending.decode().encode())
        except UnicodeDecodeError:
            if pending[0] < 0xc0:
                return state
            symbols = [WORD if pending[0] in WORD_LEADS else OTHER]
        return functools.reduce(lambda state, symbol: state and self.step(state, symbol), symbols, state)

    def states(self, continued: bool) -> tuple[list[_State], Int[np.ndarray, 'rows symbols']]:
        """Returns all states, and a table of next states [state, symbol]. The last row of the table is the dead state.

        If `continued` is true, the states at the end of a prompt are included.
        """
        states, numbers, rows = [_State()], {_State(): 0}, []

        def number(state):
            if state is None:
                return DEAD
            if state not in numbers:
                numbers[state] = len(states)
                states.append(state)
            return numbers[state]

        for state in states:  # `number` appends to this list
            rows.append([number(self.step(state, symbol)) for symbol in self.symbols])
            if continued:
                number(_opened(state))
        table = np.array([*rows, [DEAD] * len(self.symbols)], np.int32)
        return states, np.where(table == DEAD, len(states), table)


def _opened(state: _State) -> _State:
    """Returns the state at the end of a prompt, where a new word may begin. The prompt may contain any words."""
    return state._replace(ended=False, kind=OTHER)


class Automaton:
    """A table of the tokens that may follow in each state, so that no output contains a phrase.

    Attributes:
      table: int [states, vocab], the state after each token, or DEAD if the token is excluded. State 0 is the initial
        state. The states where the text may end have the lowest numbers. The end token is allowed only in these states.
      ends: the number of states where the text may end.
    """

    def __init__(self, phrases: Sequence[str], tokenizer: Tokenizer, continued: bool):
        """Builds the table. If `continued` is True, outputs may continue a prompt; see the method `behind`.

        Raises:
          UserError: if there are too many phrases.
        """
        rules, size = _Phrases(phrases), len(tokenizer)
        states, by_symbol = rules.states(continued)
        if len(states) * size > MAX_ENTRIES:
            raise UserError(f'avoid: {len(phrases)} phrases are too many for a vocabulary of {size} tokens. Use fewer '
                            'phrases')
        table = _token_table(by_symbol, [[] if token <= UNK else [
            rules.symbols[symbol] for symbol in rules.read(tokenizer.bytes_of(token))] for token in range(size)])
        may_end = np.array([not state.ended for state in states])
        table[~may_end, EOS] = DEAD
        # The next step may be the last step. So a state where the text may not end needs a token that leads to a state
        # where the text may end. States without such a token are excluded.
        stuck = ~may_end & ~(may_end[table] & (table != DEAD)).any(axis=1)
        table[(table != DEAD) & stuck[table]] = DEAD
        order = np.argsort(~may_end, kind='stable')
        places = np.argsort(order).astype(np.int32)
        self.table = np.where(table == DEAD, DEAD, places[table])[order].astype(np.int32)
        self.ends = int(may_end.sum())
        numbers = dict(zip(states, places.tolist(), strict=True))
        self._opened = [numbers.get(_opened(states[number]), 0) for number in order.tolist()]

    @functools.cached_property
    def padded(self) -> Int[np.ndarray, 'states vocab']:
        """The table, padded to a number of states that is a power of two, so that few shapes are compiled."""
        more = (1 << (len(self.table) - 1).bit_length()) - len(self.table)
        return np.pad(self.table, ((0, more), (0, 0)), constant_values=DEAD)

    def after(self, tokens: Iterable[int], state: int = 0) -> int:
        """Returns the state after the tokens, or DEAD if a token is excluded."""
        for token in tokens:
            state = int(self.table[state, token]) if state != DEAD else DEAD
        return state

    def allows(self, tokens: Sequence[int], whole: bool, text: str) -> bool:
        """Returns whether an output may begin with the tokens of `text`.

        If `whole` is True, the tokens fill the output, so that only the end token can follow.
        """
        state = self.after(token for token in tokens if token > UNK)
        if state != DEAD and text.endswith(' '):
            return state < self.ends
        return state != DEAD and (state < self.ends or not whole)

    def behind(self, tokens: Iterable[int]) -> int:
        """Returns the state after the tokens of a prompt. The prompt may contain any words."""
        state = 0
        for token in tokens:
            state = max(0, *(int(self.table[before, token]) for before in (0, state))) if (
                self.table[state, token] == DEAD) else int(self.table[state, token])
        return self._opened[state]


@functools.cache
def begin_words(tokenizer: Tokenizer) -> Bool[np.ndarray, ' vocab']:
    """Returns a mask of the tokens that begin with a space."""
    return np.array([tokenizer.bytes_of(token).startswith(b' ') for token in range(len(tokenizer))])


@functools.cache
def join_words(tokenizer: Tokenizer) -> Bool[np.ndarray, ' vocab']:
    """Returns a mask of the tokens that begin with a letter or a digit, so that they continue a word or a number."""
    texts = [tokenizer.bytes_of(token).decode('utf-8', 'replace') if token > UNK else '' for token in
             range(len(tokenizer))]
    return np.array([bool(text) and _kind(text[0]) != OTHER for text in texts])


def _token_table(by_symbol: Int[np.ndarray, 'states symbols'],
                 written: Sequence[Sequence[int]]) -> Int[np.ndarray, 'rows vocab']:
    """Returns a table [state, token] of the next states, or DEAD for an excluded token.

    `by_symbol` is the table of next states after single input symbols. `written` has the input symbols of each token;
    a special token has no symbols.
    """
    dead = len(by_symbol) - 1
    table = np.repeat(np.arange(dead, dtype=np.int32)[:, None], len(written), axis=1)
    lengths = np.array([len(symbols) for symbols in written])
    for place in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > place)
        table[:, tokens] = by_symbol[table[:, tokens], [written[token][place] for token in tokens.tolist()]]
    return np.where(table == dead, DEAD, table)
