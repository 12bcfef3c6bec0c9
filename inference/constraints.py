"""Words that outputs must not contain. An automaton reads an output and excludes tokens that would complete a phrase.

A phrase is excluded for every way of splitting it into tokens, but only as a whole word, not inside another word. The
last letter of a phrase is allowed, because another letter may follow and make a different word: if 'Mann' is excluded,
'Mannschaft' is still allowed. After the last letter, everything that ends the word is excluded: a space, a full stop,
the end of the text.

Words consist of letters, marks and the underscore. Digits make numbers: a word may begin directly after a number, and
a number may begin directly after a word, so '3heures' contains the word 'heures'. Upper and lower case are equivalent,
and so are canonically equivalent Unicode texts: the composed and the decomposed form of a character, and the orders of
marks that the canonical ordering does not distinguish. Scripts without spaces between words (Chinese, Japanese, Thai,
...) have no word boundaries, so a phrase in such a script is excluded wherever it occurs. A space in a phrase stands
for any white space.
"""

import functools
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from input_pipeline.tokenizer import EOS, UNK, Tokenizer
from runtime.errors import UserError

DEAD = -1  # the state after an excluded token
MAX_PHRASE = 1000  # maximum number of characters of a phrase; each character is a state of the automaton
MAX_MARKS = 8  # maximum number of successive marks; each subset of them may be a state, because their order may vary
MAX_ENTRIES = 2 ** 28  # maximum number of entries of a table: 1 GiB
# A phrase that repeats itself has exponentially many states behind a prompt, so the states are counted while they are
# made.
MAX_STATES = 2 ** 18
# Thai, Lao, Burmese, Khmer, 々〆〇, kana, Bopomofo, Han, and the extensions of these scripts up to U+FFFF.
WITHOUT_SPACES = ((0x0e00, 0x0eff), (0x1000, 0x109f), (0x1780, 0x17ff), (0x3005, 0x3007), (0x3040, 0x30ff),
                  (0x3105, 0x312f), (0x31a0, 0x31bf), (0x31f0, 0x31ff), (0x3400, 0x9fff), (0xa9e0, 0xa9ff),
                  (0xaa60, 0xaa7f), (0xf900, 0xfaff), (0xff66, 0xff9f))
# Above U+FFFF, only the letters of these scripts make words: Osage, Rohingya, Chakma, Newa, Miao, Hmong, Wancho, Adlam.
# All scripts would add 275 states instead of 32 for a vocabulary with bytes.
WITH_SPACES = ((0x104b0, 0x104ff), (0x10d00, 0x10d3f), (0x11100, 0x1114f), (0x11400, 0x1147f), (0x16f00, 0x16f9f),
               (0x1e100, 0x1e14f), (0x1e2c0, 0x1e2ff), (0x1e900, 0x1e95f))
# Placeholders for the characters that no phrase contains: word characters, digits, other characters. They are lone
# surrogates, so neither a phrase nor a text contains them.
WORD, DIGIT, OTHER = '\ud800', '\ud801', '\ud802'
VOICED = '\u3099\u309a'  # marks that change a kana to another kana: U+3099 changes き to ぎ
BYTES = [chr(0xdc80 + place) for place in range(128)]  # bytes of incomplete characters, decoded by 'surrogateescape'
SURROGATES = range(0xd800, 0xe000)  # not characters, so they have no valid UTF-8


def checked_phrases(phrases: Iterable[Any]) -> tuple[str, ...]:
    """Returns the phrases as a tuple.

    Raises:
      UserError: if `phrases` is a string, or a phrase is blank, too long, has too many marks, or cannot be encoded in
        UTF-8.
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
        marked = ''.join('m' if unicodedata.combining(letter) else ' ' for letter in _folded(phrase))
        if 'm' * (MAX_MARKS + 1) in marked:
            raise UserError(f'avoid: {phrase[:40]!r} has a letter with too many marks. Use at most {MAX_MARKS} marks '
                            'per letter')
    return phrases


@functools.cache
def _kind(character: str) -> str:
    """Returns WORD for a character that is part of words, DIGIT for a digit, and OTHER for all other characters.

    A character of a script without spaces between words is OTHER.
    """
    code = ord(character)
    above = code > 0xffff
    if above != any(first <= code <= last for first, last in (WITH_SPACES if above else WITHOUT_SPACES)):
        return OTHER
    if character == DIGIT or character.isnumeric():
        return DIGIT
    in_word = character in (WORD, '_') or character.isalpha() or unicodedata.category(character)[0] == 'M'
    return WORD if in_word else OTHER


def _has_voiced_form(character: str) -> bool:
    """Returns whether the character is a kana that a mark of VOICED changes to another kana, as き to ぎ."""
    return len(unicodedata.normalize('NFC', character + VOICED[0])) == 1


def _folded(text: str) -> str:
    folded = unicodedata.normalize('NFD', unicodedata.normalize('NFD', text).casefold())
    return re.sub(r'\s', ' ', folded)


class _State(NamedTuple):
    """A state of the automaton: the properties of the text so far that determine which tokens may follow.

    Attributes:
      begun: the incomplete phrases at the end of the text, with their marks in canonical order.
      kind: the kind of the last character (`_kind`). A word may begin after a character of another kind.
      ended: if true, the text ends with a complete phrase. Then only a character of the same kind may follow, because
        this character makes another word. After a kana, only a mark of VOICED may follow.
    """
    begun: frozenset[str] = frozenset()
    kind: str = OTHER
    ended: bool = False


class _Phrases:
    """The transitions between the states of the automaton.

    The input symbols of the automaton are the characters of the phrases, WORD, DIGIT, OTHER and BYTES.
    """

    def __init__(self, phrases: Sequence[str]):
        self._phrases = {' '.join(_folded(phrase).split()) for phrase in phrases}
        self._following = {'': {' ', *VOICED}}  # {beginning of a phrase: the characters that may follow it in a phrase}
        texts = [*self._phrases]
        for text in texts:  # the loop appends to this list
            # The last character read may be any of the marks at the end, if the canonical order moves it to its place.
            for place in reversed(range(len(text))):
                before, letter = text[:place] + text[place + 1:], text[place]
                if unicodedata.normalize('NFD', before + letter) == text:
                    if before and before not in self._following:
                        texts.append(before)
                    self._following.setdefault(before, set()).add(letter)
                if not unicodedata.combining(letter):
                    break
        letters = {' ', *VOICED}.union(*self._phrases)
        self.characters = [*sorted(letters), WORD, DIGIT, OTHER]
        self.symbols = {symbol: column for column, symbol in enumerate([*self.characters, *BYTES])}

    def read(self, written: bytes) -> list[str]:
        """Returns the input symbols of the automaton for `written`, a text in UTF-8."""
        return [symbol if symbol in self.symbols else _kind(symbol)
                for symbol in _folded(written.decode('utf-8', 'surrogateescape'))]

    def step(self, state: _State, symbol: str) -> _State | None:
        """Returns the state after a character, or None if the character is excluded."""
        kind = _kind(symbol)
        joins = kind != OTHER and kind == state.kind
        voices = symbol in VOICED and state.kind == OTHER
        if state.ended and not joins and not voices:
            return None
        texts = {unicodedata.normalize('NFD', text + symbol) for text in state.begun} | (set() if joins else {symbol})
        if symbol == ' ':
            texts |= {text for text in state.begun if text[-1] == ' '}  # white space of any length
        complete = bool(texts & self._phrases)
        if complete and kind == OTHER and not _has_voiced_form(symbol):
            return None
        return _State(frozenset(texts & self._following.keys()), kind, complete)

    def states(self, continued: bool, most: int) -> tuple[list[_State], Int[np.ndarray, 'states characters']]:
        """Returns all states, and a table of next states [state, character]. DEAD means that a character is excluded.

        If `continued` is true, the states at the end of a prompt are included.

        Raises:
          UserError: if there are more than `most` states.
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
            if len(states) > most:
                raise _too_large(self._phrases)
            continuing = self._following[''].union(*(self._following[text] for text in state.begun))
            after = {}
            for character in self.characters:  # characters that continue no phrase differ only in their kind
                key = character if character in continuing else (_kind(character),)
                if key not in after:
                    after[key] = number(self.step(state, character))
                rows.append(after[key])
            if continued:
                number(_opened(state))
        return states, np.array(rows, np.int32).reshape(len(states), -1)

    def with_bytes(self, table: Int[np.ndarray, 'states characters']
                   ) -> tuple[Int[np.ndarray, 'rows symbols'], Int[np.ndarray, 'added 65']]:
        """Adds the columns BYTES to a table of `states`, and a row for each state inside a character.

        Each character is read whole: the last byte determines what the character is. Different incomplete characters
        share a row if the same states follow them, so the rows are few. Invalid UTF-8 becomes U+FFFD, as in `decode`.

        Returns:
          The table, and 65 states for each added row: first the state after U+FFFD, which applies if the text ends or
          another character follows, then the states after the bytes 0x80 to 0xBF.
        """
        reading = np.pad(table, ((0, 1), (0, 0)), constant_values=DEAD)  # the last row is the state DEAD (-1)
        first, numbers = np.arange(len(table), dtype=np.int32), {}
        invalid = ''.join(self.read('\ufffd'.encode()))  # U+FFFD if a phrase contains it, otherwise OTHER

        @functools.cache
        def after(symbols):  # -> int [states], the state after some characters
            return functools.reduce(lambda states, symbol: reading[states, self.symbols[symbol]], symbols, first)

        @functools.cache
        def inside(*kinds):  # -> int [states], the state inside a character; `kinds` are the keys of its 64 successors
            places = {kind: place for place, kind in enumerate(dict.fromkeys([invalid, *kinds]))}
            columns = [(inside(*kind) if isinstance(kind, tuple) else after(kind)).tolist() for kind in places]
            spread = [places[kind] for kind in (invalid, *kinds)]
            shared = {row: numbers.setdefault(tuple(row[place] for place in spread), len(table) + len(numbers))
                      for row in dict.fromkeys(zip(*columns, strict=True))}
            return np.array([shared[row] for row in zip(*columns, strict=True)], np.int32)

        def kind(code, length, missing):
            """Returns a hashable description (key) of all characters of `length` bytes that begin with the bits `code`.

            `missing` is the number of bytes that have not been read. If it is 0, the key is the symbols of the
            character. Otherwise, the key is a tuple with the key after each of the 64 possible next bytes, or the
            symbols of invalid UTF-8.
            """
            begin, end = code << 6 * missing, (code + 1) << 6 * missing
            if missing == length - 2 and (begin < (0, 0, 0, 0x800, 0x10000)[length] or begin > 0x10ffff
                                          or begin in SURROGATES):
                return invalid + invalid  # the second byte is invalid, so there are two invalid parts
            if not missing:
                return ''.join(self.read(chr(code).encode()))
            if begin > 0xffff and end <= 0x110000 and self._is_plain(begin, end):
                return functools.reduce(lambda kind, _: (kind,) * 64, range(missing), OTHER)
            return tuple(kind(64 * code + low, length, missing - 1) for low in range(64))

        leads = [inside(*kind(lead & (0x7f >> length), length, length - 1))
                 for lead in range(0xc2, 0xf5) for length in [2 + (lead >= 0xe0) + (lead >= 0xf0)]]
        by_byte = np.stack([*[after(invalid)] * 66, *leads, *[after(invalid)] * 11], axis=1)
        complete = np.pad(np.concatenate([table, by_byte], axis=1), ((0, 1), (0, 0)), constant_values=DEAD)
        added = np.array([*numbers], np.int32)
        rows = complete[added[:, 0]]
        rows[:, len(self.characters):][:, :64] = added[:, 1:]
        return np.concatenate([complete[:-1], rows]), added

    def _is_plain(self, begin: int, end: int) -> bool:
        """Returns whether the characters from `begin` to `end`, which are above U+FFFF, all count as OTHER."""
        text = ''.join(map(chr, range(begin, end)))
        other = all(end <= first or last < begin for first, last in WITH_SPACES)
        return other and self.symbols.keys().isdisjoint(text) and _folded(text) == text


def _too_large(phrases: Collection[str]) -> UserError:
    return UserError(f'avoid: the table for {len(phrases)} phrases is too large. Use fewer or shorter phrases')


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
          UserError: if there are too many phrases, or the tokenizer is not supported.
        """
        _check_tokenizer(phrases, tokenizer)
        rules, size = _Phrases(phrases), len(tokenizer)
        written = [[] if token <= UNK else [rules.symbols[symbol] for symbol in rules.read(tokenizer.bytes_of(token))]
                   for token in range(size)]
        states, by_symbol = rules.states(continued, min(MAX_STATES, MAX_ENTRIES // size))
        may_end = [not state.ended for state in states]
        if max(map(max, filter(None, written)), default=0) >= len(rules.characters):
            by_symbol, added = rules.with_bytes(by_symbol)
            # The text may also end in a character that is certainly a letter, whatever its last bytes are. Otherwise,
            # no letter of three bytes could follow a phrase, because a search looks only one token ahead.
            possible = [True] * len(states)
            for other, *after in added.tolist():
                possible.append(other != DEAD or all(state != DEAD and possible[state] for state in after))
            may_end += possible[len(states):]
        if len(by_symbol) * size > MAX_ENTRIES:
            raise _too_large(phrases)
        table, may_end = _token_table(by_symbol, written), np.array(may_end)
        table[~may_end, EOS] = DEAD
        # The next step may be the last step. So a state where the text may not end needs a token that leads to a state
        # where the text may end. States without such a token are excluded.
        stuck = ~may_end & ~(may_end[table] & (table != DEAD)).any(axis=1)
        table[(table != DEAD) & stuck[table]] = DEAD
        order = np.argsort(~may_end, kind='stable')
        places = np.argsort(order).astype(np.int32)
        self.table = np.where(table == DEAD, DEAD, places[table])[order].astype(np.int32)
        self.ends = int(may_end.sum())
        numbers = dict(zip(states, places[:len(states)].tolist(), strict=True))
        opened = [numbers.get(_opened(state), 0) for state in states] + places[len(states):].tolist()
        self._opened = [opened[number] for number in order.tolist()]

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
            # A word to avoid may begin a longer phrase. So the opened state is tried before state 0.
            after = (int(self.table[before, token]) for before in (state, self._opened[state], 0))
            state = next((number for number in after if number != DEAD), 0)
        return self._opened[state]


def _check_tokenizer(phrases: Sequence[str], tokenizer: Tokenizer) -> None:
    """Checks that the joined texts of the tokens equal the decoded text. In WordPiece, the joined texts lack spaces.

    The example text contains each phrase twice.

    Raises:
      UserError: if the two texts differ in more than the white space at both ends.
    """
    tokens = [token for token in tokenizer.encode(' '.join(' '.join((*phrases, *phrases)).split())) if token > UNK]
    joined = b''.join(map(tokenizer.bytes_of, tokens)).decode('utf-8', 'replace').strip()
    decoded = tokenizer.decode(tokens).strip()
    if joined != decoded:
        raise UserError(f'--avoid does not support this tokenizer: joined, its tokens are {joined[:40]!r}, but the '
                        f'decoded text is {decoded[:40]!r}. Remove --avoid')


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


def _token_table(by_symbol: Int[np.ndarray, 'rows symbols'],
                 written: Sequence[Sequence[int]]) -> Int[np.ndarray, 'rows vocab']:
    """Returns a table [state, token] of the next states, or DEAD for an excluded token.

    `by_symbol` is the table of next states after single input symbols. `written` has the input symbols of each token;
    a special token has no symbols.
    """
    by_symbol = np.pad(by_symbol, ((0, 1), (0, 0)), constant_values=DEAD)  # the last row is the state DEAD (-1)
    table = np.repeat(np.arange(len(by_symbol) - 1, dtype=np.int32)[:, None], len(written), axis=1)
    lengths = np.array([len(symbols) for symbols in written])
    for place in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > place)
        table[:, tokens] = by_symbol[table[:, tokens], [written[token][place] for token in tokens.tolist()]]
    return table
