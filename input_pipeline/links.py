"""The correct word alignment of the built-in corpus ("gold links").

A sentence pair is a value that is written in two locales (input_pipeline/builtin.py), so the fields of the value are
known: the day, the month and the year of a date, the number and the unit of a quantity, the parts of a list. A word of
the source and a word of the target are linked if both contain text of the same field.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from babel import Locale
from babel.dates import DateTimeFormat, tokenize_pattern

from input_pipeline import builtin
from runtime.errors import UserError

Span = tuple[str, int, int]  # the name of a field, its begin and its end in the text
Links = list[tuple[int, int]]  # (index of a word of the source, index of a word of the target)
# {symbol of a CLDR date pattern: field}. The period of the day, such as AM, belongs to the hour.
SYMBOLS = {'E': 'weekday', 'c': 'weekday', 'e': 'weekday', 'M': 'month', 'L': 'month', 'd': 'day', 'y': 'year',
           'Y': 'year', 'G': 'year', 'h': 'hour', 'H': 'hour', 'K': 'hour', 'k': 'hour', 'a': 'hour', 'b': 'hour',
           'B': 'hour', 'm': 'minute', 's': 'second'}
LINK = re.compile(r'(\d{1,9})-(\d{1,9})', re.ASCII)
NUMBER = re.compile(r'\d(?:[\d.,\s\u066b\u066c\u2019\'/]*\d)?')


def links_of(pairs: Sequence[tuple[str, str]], writers: Mapping[tuple[str, str], builtin.Writer], source_locale: str,
             target_locale: str) -> list[Links]:
    """Returns the gold links of each pair of a built-in corpus. Words are separated by white space.

    Args:
      pairs: sentence pairs of any splits.
      writers: the dict that `builtin.make_corpus` has filled.
      source_locale: the source locale of the corpus, as for `builtin.make_corpus`.
      target_locale: the target locale of the corpus.

    Raises:
      KeyError: if a pair is not in the corpus.
    """
    typed = {(source.translate(builtin.TYPED), target): writer for (source, target), writer in writers.items()}
    locales = builtin.parse_locale(source_locale), builtin.parse_locale(target_locale)
    links = []
    for source, target in pairs:
        writer = typed[source.translate(builtin.TYPED), target]
        sides = [_words(text, fields(writer, locale)) for text, locale in zip((source, target), locales, strict=True)]
        links.append([(i, j) for i, source_fields in enumerate(sides[0])
                      for j, target_fields in enumerate(sides[1]) if source_fields & target_fields])
    return links


def parse_links(line: str, pair: tuple[str, str], where: str) -> Links:
    """Returns the links in a line in the Pharaoh format, such as '0-0 1-2', for a sentence pair.

    Raises:
      UserError: if a link has another form, or a word does not exist. The message begins with `where`.
    """
    links = []
    for text in line.split():
        link = LINK.fullmatch(text)
        if link is None:
            raise UserError(f'{where}: {text[:40]!r} is not a link. Write links as SOURCE-TARGET, for example 0-0 1-2. '
                            'Words are counted from 0')
        links.append((int(link[1]), int(link[2])))
        for side, number, sentence in zip(('source', 'target'), links[-1], pair, strict=True):
            if number >= (count := len(sentence.split())):
                raise UserError(f'{where}: {text} links {side} word {number}, but the {side} has only {count} '
                                f'words, counted from 0. Check that the line belongs to {sentence[:60]!r}')
    return links


def fields(writer: Any, locale: Locale) -> list[Span]:
    """Returns the fields in the text of `writer`, a writer of builtin.py: (name, begin, end) of each field."""
    text, write, arguments = writer(locale), writer.func, writer.args
    if write is builtin.write_joined:
        spans, begin = [], 0
        for number, part in enumerate(arguments[1]):
            begin = max(begin, text.find(part(locale), begin))
            inner = fields(part, locale) if hasattr(part, 'func') else [('name', 0, len(part(locale)))]
            spans += [(f'{number} {name}', begin + first, begin + last) for name, first, last in inner]
            begin += len(part(locale))
        return spans
    if write is builtin.write_date:
        return _date_fields(arguments, locale)
    number = NUMBER.search(text)
    if write is builtin.write_name or number is None:
        return [('unit', 0, len(text))]
    return [('unit', 0, number.start()), ('number', *number.span()), ('unit', number.end(), len(text))]


def _date_fields(arguments: tuple[Any, ...], locale: Locale) -> list[Span]:
    """Returns a span for each symbol in the pattern of a date. `arguments` are the arguments of `write_date`."""
    date_length, time_length, moment = arguments
    tokens: list[tuple[str, Any]] = tokenize_pattern(builtin.date_pattern(date_length, time_length, locale))
    spans, begin, formatter = [], 0, DateTimeFormat(moment, locale)
    for kind, value in tokens:
        end = begin + len(formatter[value[0] * value[1]] if kind == 'field' else value)
        spans += [(SYMBOLS[value[0]], begin, end)] if kind == 'field' and value[0] in SYMBOLS else []
        begin = end
    return spans


def _words(text: str, spans: Sequence[Span]) -> list[set[str]]:
    """Returns, for each word, the names of the fields that overlap with the word."""
    return [{name for name, begin, end in spans if begin < word.end() and word.start() < end}
            for word in re.finditer(r'\S+', text)]
