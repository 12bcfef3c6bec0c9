"""Words that must not come: an automaton over the bytes of the text that a search writes.

A phrase is forbidden in the text, however it is cut into tokens, and as a word: not inside another one. Where a word
ends is known only from the character behind it. So its last letter may come, and what would end it there may not: a
space, a full stop, the end of the text. With 'Mann' to avoid, 'Mannschaft' may come.

Letters, digits, marks and the underscore make words. Upper and lower case are the same, and so are the composed and
the decomposed form of a character. Scripts without spaces between words (Chinese, Japanese, Thai, ...) have no such
ends, so a phrase in one of them is forbidden wherever it stands. A space in a phrase is any white space.

It is made in three steps: what one byte does to the set of phrases that have begun (`_Phrases.step`); the sets that
there are, and what each byte does to them (`_byte_table`: the subset construction); what each token does to them
(`Automaton`). In a search, that is one look-up in a table for each hypothesis.
"""

import functools
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from input_pipeline.tokenizer import EOS, UNK, Tokenizer
from runtime.errors import UserError

DEAD = -1  # the state behind what must not come
LONGEST = 1000  # characters of a phrase; each one is a state of the automaton
MOST = 2 ** 28  # entries of a table: 1 GB
LAST_LETTER = 0x20000  # beyond are only characters that are words of their own, and none
WITHOUT_SPACES = ((0x0e00, 0x0eff), (0x1000, 0x109f), (0x1780, 0x17ff), (0x3040, 0x30ff), (0x31f0, 0x31ff),
                  (0x3400, 0x9fff), (0xf900, 0xfaff))  # Thai, Lao, Burmese, Khmer, kana, Han


def checked_phrases(phrases: Iterable[Any]) -> tuple[str, ...]:
    """The phrases, if they are such.

    Raises:
      UserError: if they are one text instead of a list, or one of them is blank, too long, or no text in UTF-8.
    """
    if isinstance(phrases, str):
        raise UserError(f'avoid={phrases[:40]!r}: give a list of phrases, [{phrases[:40]!r}]')
    phrases = tuple(phrases)
    for phrase in phrases:
        try:
            written = phrase.encode() and phrase.split()
        except (AttributeError, UnicodeEncodeError):
            written = False
        if not written:
            raise UserError(f'avoid: {phrase!r:.80} is no phrase: give words to avoid')
        if len(phrase) > LONGEST:
            raise UserError(f'avoid: {phrase[:40]!r}... has {len(phrase):,} characters. Use phrases of at most '
                            f'{LONGEST:,} characters')
    return phrases


def _in_word(code: int) -> bool:
    """Whether a character makes words, with its neighbours."""
    if code >= LAST_LETTER or any(first <= code <= last for first, last in WITHOUT_SPACES):
        return False
    character = chr(code)
    return character.isalnum() or character == '_' or unicodedata.category(character)[0] == 'M'


@functools.cache
def _characters() -> list[dict[int, int | bool]]:
    """UTF-8 as a graph: in a node, byte -> the next node, or, behind a character's last byte, whether it makes words.

    Nodes that go on alike are one; the last is the first.
    """
    nodes: list[dict] = []
    numbers: dict[tuple, int] = {}

    def node(children):
        key = tuple(sorted(children.items()))
        if key not in numbers:
            numbers[key] = len(nodes)
            nodes.append(children)
        return numbers[key]

    def rest(lead, code, left):
        """The node behind some bytes of the characters from `code` on, of which `left` more bytes follow."""
        if left == 1:
            if code >= LAST_LETTER:
                return node(dict.fromkeys(range(0x80, 0xc0), False))
            return node({0x80 + low: _in_word(code + low) for low in range(64)})
        allowed = {0xe0: range(0xa0, 0xc0), 0xed: range(0x80, 0xa0), 0xf0: range(0x90, 0xc0),
                   0xf4: range(0x80, 0x90)}.get(lead, range(0x80, 0xc0))  # no other bytes are UTF-8 here
        return node({byte: rest(0, code + (byte - 0x80 << 6 * (left - 1)), left - 1) for byte in allowed})

    first: dict[int, int | bool] = {byte: _in_word(byte) for byte in range(0x80)}
    for leads, mask, left in (range(0xc2, 0xe0), 0x1f, 1), (range(0xe0, 0xf0), 0x0f, 2), (range(0xf0, 0xf5), 0x07, 3):
        first |= {lead: rest(lead, (lead & mask) << 6 * left, left) for lead in leads}
    nodes.append(first)
    return nodes


def _folded(text: str) -> str:
    return unicodedata.normalize('NFD', unicodedata.normalize('NFD', text).casefold())


@functools.cache
def _unfolded() -> dict[str, list[str]]:
    """What is folded -> the characters that are folded to it, where that is another."""
    found: dict[str, list[str]] = {}
    for code in range(LAST_LETTER):
        if not 0x3400 <= code < 0xa000 and not 0xd800 <= code < 0xe000 and (
                folded := _folded(character := chr(code))) != character:
            found.setdefault(folded, []).append(character)
    return found


WHITE = [character for character in map(chr, range(0x3001)) if character.isspace()]


class _State(NamedTuple):
    """What is known after some bytes.

    Attributes:
      begun: (phrase, characters of it that have come, bytes that must come before they have) of each that has begun.
      ended: whether the last character ended a phrase that is a word if no other letter follows.
      node: of `_characters`.
      free: whether a word may begin here.
    """
    begun: frozenset[tuple[int, int, bytes]]
    ended: bool
    node: int
    free: bool


class _Phrases:
    """The phrases, and what a byte does."""

    def __init__(self, phrases: Sequence[str]):
        self.nodes, self.texts = _characters(), [' '.join(_folded(phrase).split()) for phrase in phrases]
        self.start = _State(frozenset(), False, len(self.nodes) - 1, True)
        self._inside = [(_in_word(ord(text[0])), _in_word(ord(text[-1]))) for text in self.texts]
        self._next = [[self._ways(text, place) for place in range(len(text))] for text in self.texts]
        self._begins = {free: _by_byte(
            (phrase, *way) for phrase, (at_begin, _) in enumerate(self._inside) if free or not at_begin
            for way in self._next[phrase][0]) for free in (True, False)}

    @staticmethod
    def _ways(text: str, place: int) -> list[tuple[int, bytes]]:
        """(the place behind, bytes) of each character that goes on from a place."""
        if text[place] == ' ':
            return [(place + 1, white.encode()) for white in WHITE]
        parts = [text[place:place + count] for count in range(1, 5) if place + count <= len(text)]
        return [(place + 1, text[place].encode()),
                *((place + len(part), each.encode()) for part in parts for each in _unfolded().get(part, ()))]

    def ways(self, state: _State) -> dict[int, list[tuple[int, int, bytes]]]:
        """{byte: (phrase, place, bytes) of what begins with it and goes on with a phrase that has begun}."""
        if state.node != self.start.node:
            return _by_byte(each for each in state.begun if each[2])
        found = [each for each in state.begun if each[2]]
        for phrase, place, rest in state.begun:
            if not rest:
                found += [(phrase, *way) for way in self._next[phrase][place]]
                if self.texts[phrase][place - 1] == ' ':  # white space may be longer
                    found += [(phrase, place, white.encode()) for white in WHITE]
        return _by_byte(found)

    def begins(self, state: _State) -> dict[int, list[tuple[int, int, bytes]]]:
        """The same of the phrases that may begin."""
        return self._begins[state.free] if state.node == self.start.node else {}

    def step(self, state: _State, byte: int, ways: Iterable[tuple[int, int, bytes]]) -> _State | None:
        """What is known after another byte, of which `ways` are those that begin with it; None: it must not come."""
        child = self.nodes[state.node].get(byte)
        if child is None and state.node != self.start.node:  # a character that was cut off, which is none
            return None if state.ended else self.step(self.start, byte, self._begins[True].get(byte, ()))
        begun = {(phrase, place, rest[1:]) for phrase, place, rest in ways}
        if child is not None and not isinstance(child, bool):
            return _State(frozenset(begun), state.ended, child, False)
        over = {each for each in begun if not each[2] and each[1] == len(self.texts[each[0]])}
        if state.ended and not child or any(not self._inside[phrase][1] for phrase, *_ in over):
            return None
        return _State(frozenset(begun - over), bool(over), self.start.node, not child)


def _by_byte(ways: Iterable[tuple[int, int, bytes]]) -> dict[int, list[tuple[int, int, bytes]]]:
    found: dict[int, list] = {}
    for way in ways:
        found.setdefault(way[2][0], []).append(way)
    return found


def _byte_table(phrases: _Phrases, continued: bool) -> tuple[Int[np.ndarray, 'rows 256'], list[_State]]:
    """The state behind each byte in each state; where a byte must not come, one more, which leads nowhere else."""
    states, numbers, rows = [phrases.start], {phrases.start: 0}, []
    usual: dict[tuple, int] = {}  # where a byte leads that goes on with no phrase

    def number(state):
        if state is None:
            return DEAD
        if state not in numbers:
            numbers[state] = len(states)
            states.append(state)
        return numbers[state]

    for state in states:  # which grows
        ways, begins, row = phrases.ways(state), phrases.begins(state), []
        for byte in range(256):
            key = state.node, state.ended, state.free, byte
            if byte in ways:
                row.append(number(phrases.step(state, byte, [*ways[byte], *begins.get(byte, ())])))
                continue
            if key not in usual:
                usual[key] = number(phrases.step(state, byte, begins.get(byte, ())))
            row.append(usual[key])
        rows.append(row)
        if continued and state.node == phrases.start.node:
            number(state._replace(ended=False, free=True))
    table = np.array([*rows, [DEAD] * 256], np.int32)
    return np.where(table == DEAD, len(states), table), states


class Automaton:
    """Which tokens may come after which, so that no phrase does.

    Attributes:
      table: int [states, vocab], the state behind each token; DEAD where it must not come. State 0 is the first. The
        end token may come where the text may end; those states come first.
      ends: the number of states where the text may end.
    """

    def __init__(self, phrases: Sequence[str], tokenizer: Tokenizer, continued: bool):
        """`continued`: texts may go on from others (`behind`).

        Raises:
          UserError: if the phrases are too many.
        """
        rules = _Phrases(phrases)
        by_byte, states = _byte_table(rules, continued)
        size = len(tokenizer)
        if len(states) * size > MOST:
            raise UserError(f'avoid: {len(phrases)} phrases are too many for a vocabulary of {size} tokens: give fewer')
        table = _token_table(by_byte, [tokenizer.bytes_of(token) for token in range(size)])
        may_end = np.array([not state.ended for state in states])
        table[~may_end, EOS] = DEAD
        # Where a word has ended that must not, something must be able to follow, even at the last step.
        stuck = ~may_end & ~(may_end[table] & (table != DEAD)).any(axis=1)
        table[(table != DEAD) & stuck[table]] = DEAD
        order = np.argsort(~may_end, kind='stable')
        places = np.argsort(order).astype(np.int32)
        self.table = np.where(table == DEAD, DEAD, places[table])[order].astype(np.int32)
        self.ends = int(may_end.sum())
        numbers = {state: places[number] for number, state in enumerate(states)}
        self._open = np.array([numbers.get(states[number]._replace(ended=False, free=True), 0)
                               for number in order.tolist()])

    @functools.cached_property
    def padded(self) -> Int[np.ndarray, 'states vocab']:
        """The table with as many states as the next power of two, so that few shapes are compiled."""
        more = (1 << (len(self.table) - 1).bit_length()) - len(self.table)
        return np.pad(self.table, ((0, more), (0, 0)), constant_values=DEAD)

    def after(self, tokens: Iterable[int], state: int = 0) -> int:
        """The state behind some tokens, DEAD if they must not come."""
        for token in tokens:
            state = int(self.table[state, token]) if state != DEAD else DEAD
        return state

    def allows(self, tokens: Sequence[int], whole: bool, text: str) -> bool:
        """Whether an output may begin with some tokens, those of a `text`; `whole`: nothing can follow them."""
        state = self.after(token for token in tokens if token > UNK)
        if state != DEAD and text.endswith(' '):
            return state < self.ends
        return state != DEAD and (state < self.ends or not whole)

    def behind(self, tokens: Iterable[int]) -> int:
        """The state in which a text goes on from another one, which may have any words. A word may begin there."""
        state = 0
        for token in tokens:
            state = max(0, *(int(self.table[each, token]) for each in (0, state))) if (
                self.table[state, token] == DEAD) else int(self.table[state, token])
        return int(self._open[state])


@functools.cache
def begin_words(tokenizer: Tokenizer) -> Bool[np.ndarray, ' vocab']:
    """Which tokens begin with a space."""
    return np.array([tokenizer.bytes_of(token).startswith(b' ') for token in range(len(tokenizer))])


def _token_table(by_byte: Int[np.ndarray, 'states 256'], written: Sequence[bytes]) -> Int[np.ndarray, 'rows vocab']:
    """The state behind each token; special tokens write nothing and lead nowhere else."""
    dead = len(by_byte) - 1
    table = np.repeat(np.arange(dead, dtype=np.int32)[:, None], len(written), axis=1)
    lengths = np.array([0 if token <= UNK else len(each) for token, each in enumerate(written)])
    for place in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > place)
        table[:, tokens] = by_byte[table[:, tokens], [written[token][place] for token in tokens.tolist()]]
    return np.where(table == dead, DEAD, table)
