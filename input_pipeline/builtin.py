"""The built-in parallel corpus: dates, quantities, amounts and names, written in two locales.

Nothing is downloaded. The Unicode Common Locale Data Repository (Unicode CLDR, https://cldr.unicode.org), which is
part of babel, defines how each of a thousand locales writes a date, an amount of money, a relative time such as 'three
hours ago', or a list of languages. Each random value is written in both locales. The result is a pair of sentences,
such as 'Friday, August 25, 1922' and 'vendredi 25 août 1922'. The two sentences can differ in the order and the number
of the words, and in the script. The correct translation is known exactly, so a small model can be judged by exact
match.

    corpus = make_corpus('en', 'fr')  # {'train': [(source, target), ...], 'validation': ..., 'test': ...}
"""

import collections
import contextlib
import datetime
import difflib
import functools
import math
import random
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import islice, product
from typing import Literal, NamedTuple

from babel import Locale, UnknownLocaleError
from babel.dates import format_timedelta, parse_pattern
from babel.lists import format_list
from babel.localedata import locale_identifiers
from babel.numbers import format_currency, format_percent, get_currency_precision
from babel.units import format_unit

# The version is part of the data's fingerprint. Increase the version whenever the output changes. The text also depends
# on babel.__version__, because each release of babel has a different version of the CLDR.
GENERATOR_VERSION = 1

LONGEST = 80  # maximum number of characters of a sentence; pairs with a longer sentence are rejected
PATIENCE = 5000  # consecutive draws without a new pair, after which an error is raised
TYPED = str.maketrans('\u00a0\u202f', '  ')  # keyboards do not have CLDR's no-break spaces

# The lists contain only common languages, territories, currencies and units. A model learns a name only if the name
# occurs often, and most names of CLDR are rare.
LANGUAGES = [
    'af', 'am', 'ar', 'bg', 'bn', 'ca', 'cs', 'cy', 'da', 'de', 'el', 'en', 'es', 'et', 'eu', 'fa', 'fi', 'fr',
    'ga', 'gl', 'gu', 'he', 'hi', 'hr', 'hu', 'hy', 'id', 'is', 'it', 'ja', 'ka', 'ko', 'la', 'lt', 'lv', 'mn',
    'mr', 'ms', 'ne', 'nl', 'no', 'pl', 'pt', 'ro', 'ru', 'sk', 'sl', 'sq', 'sr', 'sv', 'sw', 'ta', 'te', 'th',
    'tr', 'uk', 'ur', 'vi', 'yo', 'zh', 'zu']
TERRITORIES = [
    'AR', 'AT', 'AU', 'BE', 'BG', 'BR', 'CA', 'CH', 'CL', 'CN', 'CO', 'CU', 'CZ', 'DE', 'DK', 'EC', 'EE', 'EG',
    'ES', 'ET', 'FI', 'FR', 'GB', 'GR', 'HR', 'HU', 'ID', 'IE', 'IL', 'IN', 'IR', 'IS', 'IT', 'JP', 'KE', 'KR',
    'LT', 'LU', 'LV', 'MA', 'MX', 'MY', 'NG', 'NL', 'NO', 'NZ', 'PE', 'PH', 'PL', 'PT', 'RO', 'RS', 'RU', 'SA',
    'SE', 'SG', 'SK', 'SN', 'TH', 'TN', 'TR', 'UA', 'US', 'VN', 'ZA']
CURRENCIES = [
    'ARS', 'AUD', 'BRL', 'CAD', 'CHF', 'CLP', 'CNY', 'COP', 'CZK', 'DKK', 'EGP', 'EUR', 'GBP', 'HUF', 'IDR', 'ILS',
    'INR', 'ISK', 'JPY', 'KES', 'KRW', 'MAD', 'MXN', 'MYR', 'NGN', 'NOK', 'NZD', 'PEN', 'PHP', 'PLN', 'RON', 'RSD',
    'RUB', 'SAR', 'SEK', 'SGD', 'THB', 'TRY', 'TWD', 'UAH', 'USD', 'UYU', 'VND', 'ZAR']
UNITS = [
    'length-kilometer', 'length-meter', 'length-centimeter', 'length-millimeter', 'length-mile', 'length-yard',
    'length-foot', 'length-inch', 'length-light-year', 'area-hectare', 'area-acre', 'area-square-kilometer',
    'area-square-meter', 'volume-liter', 'volume-centiliter', 'volume-milliliter', 'volume-cubic-meter',
    'volume-gallon', 'volume-cup', 'volume-teaspoon', 'volume-tablespoon', 'mass-kilogram', 'mass-gram',
    'mass-milligram', 'mass-tonne', 'mass-pound', 'mass-ounce', 'duration-year', 'duration-month', 'duration-week',
    'duration-day', 'duration-hour', 'duration-minute', 'duration-second', 'duration-century',
    'speed-kilometer-per-hour', 'speed-meter-per-second', 'speed-mile-per-hour', 'speed-knot',
    'temperature-celsius', 'temperature-fahrenheit', 'angle-degree', 'energy-joule', 'energy-kilocalorie',
    'energy-kilowatt-hour', 'power-watt', 'power-kilowatt', 'power-horsepower', 'electric-volt', 'electric-ampere',
    'frequency-hertz', 'frequency-megahertz', 'pressure-hectopascal', 'pressure-bar', 'digital-bit', 'digital-byte',
    'digital-kilobyte', 'digital-megabyte', 'digital-gigabyte']
DATE_LENGTHS = ('full', 'long', 'medium', 'short')
TIME_LENGTHS = ('short', 'medium')  # 'long' and 'full' would add a time zone, which is always the same
LIST_STYLES = ('standard', 'or')
JOINS = (*LIST_STYLES, '{}: {}', '{}, {}', '{} – {}')  # the space keeps the words of the parts unchanged
DAY = 24 * 3600
RELATIVE_UNITS = {  # seconds in one unit (as babel counts), and the largest count in use
    'year': (365 * DAY, 99), 'month': (30 * DAY, 23), 'week': (7 * DAY, 51), 'day': (DAY, 99),
    'hour': (3600, 47), 'minute': (60, 59), 'second': (1, 59)}

DateLength = Literal['full', 'long', 'medium', 'short']
TimeUnit = Literal['year', 'month', 'week', 'day', 'hour', 'minute', 'second']
Length = Literal['long', 'short']
Writer = Callable[[Locale], str]  # writes a fixed value in the given locale


def date_pattern(date_length: DateLength, time_length: DateLength | None, locale: Locale) -> str:
    """Returns the CLDR pattern of a date, such as 'd MMM y', with the time of day if `time_length` is given."""
    date = locale.date_formats[date_length].pattern
    if time_length is None:
        return date
    time = locale.time_formats[time_length].pattern
    return locale.datetime_formats[date_length].replace('{0}', time).replace('{1}', date)


# The write functions write a value in a locale. Their arguments are a form (such as a length, a unit or a currency),
# the value and the locale. They raise KeyError or ValueError if the locale does not have the form.
def write_date(date_length: DateLength, time_length: DateLength | None, moment: datetime.datetime,
               locale: Locale) -> str:
    """Writes a date, such as 'Friday, August 25, 1922', with the time of day if `time_length` is given."""
    return parse_pattern(date_pattern(date_length, time_length, locale)).apply(moment, locale)


def write_relative(unit: TimeUnit, length: Length, count: int, locale: Locale) -> str:
    """Writes a relative time, such as '3 hours ago', or 'in 2 weeks' if `count` is positive."""
    delta = datetime.timedelta(seconds=count * RELATIVE_UNITS[unit][0])
    # With an infinite threshold babel keeps the unit. Otherwise 14 days would become 2 weeks.
    return format_timedelta(delta, unit, math.inf, add_direction=True, format=length, locale=locale)


def write_quantity(unit: str, length: Length, number: Decimal, locale: Locale) -> str:
    """Writes a quantity, such as '12 kilometers' (long) or '12 km' (short)."""
    text = format_unit(number, unit, length, locale=locale)
    if unit not in text:
        return text
    if length == 'short':  # babel writes '12 length-kilometer' for an unknown unit
        raise KeyError(unit)
    return write_quantity(unit, 'short', number, locale)  # babel does not follow an alias in CLDR's root


def write_amount(currency: str, style: Literal['name', 'standard'], number: Decimal, locale: Locale) -> str:
    """Writes an amount of money, such as '12 euros' (style 'name') or '€12.00' (style 'standard')."""
    if currency not in locale.currencies:
        raise KeyError(currency)
    if number % 1:  # rounds before babel chooses the plural, because yen have no decimals
        number = round(number, get_currency_precision(currency))
    cents = style == 'standard' or number % 1 != 0  # '12 euros' without cents, but '12.50 euros' and '€12.00'
    text = format_currency(number, currency, locale=locale, format_type=style, currency_digits=cents)
    if style == 'standard' and re.search(r'[^\W\d_]\d', text):
        raise KeyError(currency)  # babel writes 'CZK12.00', but CLDR has a space after such a sign
    return text


def write_percentage(number: Decimal, locale: Locale) -> str:
    """Writes a percentage, such as '12.5%'."""
    return format_percent(number / 100, locale=locale, decimal_quantization=False)


def write_name(table: str, code: str, locale: Locale) -> str:
    """Writes the name of a language or a territory, such as 'French'."""
    return getattr(locale, table)[code]


def write_joined(join: str, parts: list[Writer], locale: Locale) -> str:
    """Writes several parts as one text. `join` is a CLDR style of lists ('A, B, or C') or a format string."""
    texts = [part(locale) for part in parts]
    return format_list(texts, join, locale) if join in LIST_STYLES else join.format(*texts)


# The draw functions draw a random value for a form. They return the value as a tuple. Its elements are the arguments of
# the write function after the form and before the locale.
def draw_moment(rng: random.Random, form: tuple) -> tuple[datetime.datetime]:
    """Draws a random date and time from 1900 to 2050."""
    days = (datetime.date(2051, 1, 1) - datetime.date(1900, 1, 1)).days
    moment = datetime.datetime(1900, 1, 1) + datetime.timedelta(rng.randrange(days), rng.randrange(DAY))
    # Short dates may have a year of two digits, which is unambiguous only within a century: 1951 to 2050.
    if form[0] == 'short' and moment.year <= 1950:
        moment = moment.replace(year=moment.year + 100)
    return (moment,)


def draw_count(rng: random.Random, form: tuple) -> tuple[int]:
    """Draws a number of time units: negative for the past, positive for the future."""
    return (rng.randint(1, RELATIVE_UNITS[form[0]][1]) * rng.choice((-1, 1)),)


def draw_number(rng: random.Random, form: tuple) -> tuple[Decimal]:
    """Draws a whole number, or a number with one or two decimals."""
    largest, digits = rng.choice((20, 99, 999, 9999)), rng.choice((1, 1, 2))
    if not form or form[0].startswith('duration'):  # percentages and durations are small
        largest, digits = 100, 1 if form else digits
    # The last decimal is never 0, because Decimal('1.0') would be written as 1 but with the plural of 1.0.
    decimal = Decimal(10 * rng.randrange(10 ** (digits + 1)) + rng.randint(1, 9)).scaleb(-digits)
    return (rng.choice((Decimal(rng.randint(1, largest)), decimal)),)


def draw_letters(rng: random.Random, form: tuple) -> tuple[list[Writer]]:
    """Returns writers of the letters A and B. With these letters, `usable_kinds` compares the formats of lists.

    `draw_sentence` draws the words of a sentence.
    """
    return ([lambda locale: 'A', lambda locale: 'B'],)


class Kind(NamedTuple):
    """A kind of sentence, such as dates. A kind has forms, such as 'long', and functions that draw and write values."""
    share: int  # the share of this kind among the sentences, in percent
    write: Callable[..., str]
    forms: list[tuple]
    draw: Callable[[random.Random, tuple], tuple]
    rivals: Mapping[tuple, list[tuple]] = {}  # {form: earlier forms with the same source text}


KINDS = {
    'date': Kind(14, write_date, [*product(DATE_LENGTHS, (None,))], draw_moment),
    'datetime': Kind(8, write_date, [*product(DATE_LENGTHS, TIME_LENGTHS)], draw_moment),
    'relative': Kind(5, write_relative, [*product(RELATIVE_UNITS, ('long', 'short'))], draw_count),
    'quantity': Kind(13, write_quantity, [*product(UNITS, ('long', 'short'))], draw_number),
    'amount': Kind(13, write_amount, [*product(CURRENCIES, ('name', 'standard'))], draw_number),
    'percentage': Kind(3, write_percentage, [()], draw_number),
    'language': Kind(1, write_name, [*product(('languages',), LANGUAGES)], lambda rng, form: ()),
    'territory': Kind(1, write_name, [*product(('territories',), TERRITORIES)], lambda rng, form: ()),
    'names': Kind(14, write_joined, [*product(LIST_STYLES)], draw_letters),
    'pair': Kind(28, write_joined, [*product(JOINS)], draw_letters),
}
PARTS = ('date', 'relative', 'quantity', 'amount', 'percentage', 'language', 'territory')  # parts of a 'pair'


def usable_kinds(source: Locale, target: Locale) -> dict[str, Kind]:
    """Returns the kinds of sentences for two locales. A kind contains only the forms that both locales have.

    A kind also contains the rivals of each form. These are other forms that may have the same source text. For example,
    'May 25, 1922' is both a long and a medium date in English, but the long and the medium date differ in German. Two
    currencies may also have the same sign. A model cannot distinguish such forms. So if several forms have the same
    source text, the target is always written in the first of these forms. To find the rivals, this function writes the
    same 36 values in each form.
    """
    usable = {}
    for name, kind in KINDS.items():
        owner, rivals = {}, {}  # owner: source text -> the first form with this text
        for form in kind.forms:
            rng = random.Random(0)
            try:
                values = [(*form, *kind.draw(rng, form)) for _ in range(36)]
                pairs = {kind.write(*value, source): kind.write(*value, target) for value in values}
            except (KeyError, ValueError):
                continue
            if all((*pairs, *pairs.values())):
                owners = dict.fromkeys(owner.setdefault(text, form) for text in pairs)
                rivals[form] = [other for other in owners if other != form]
        if len(rivals) >= (3 if kind.write is write_name else 1):  # lists have up to three names
            usable[name] = kind._replace(forms=list(rivals), rivals=rivals)
    if 'language' not in usable and 'territory' not in usable:
        usable.pop('names', None)
    return usable


def draw_sentence(rng: random.Random, kinds: Mapping[str, Kind], name: str, source: Locale) -> Writer:
    """Draws a sentence of the kind `name`.

    If several forms have the same text in the locale `source`, the first of these forms is used.
    """
    kind = kinds[name]
    form = rng.choice(kind.forms)
    if name == 'names':  # two or three languages, or territories
        table = kinds[rng.choice([part for part in ('language', 'territory') if part in kinds])]
        chosen = rng.sample(table.forms, rng.choice((2, 3)))
        values = ([functools.partial(table.write, *code) for code in chosen],)
    elif name == 'pair':  # two parts of different kinds
        chosen = rng.sample([part for part in PARTS if part in kinds], 2)
        values = ([draw_sentence(rng, kinds, part, source) for part in chosen],)
    else:
        values = kind.draw(rng, form)
    writers = [functools.partial(kind.write, *rival, *values) for rival in (*kind.rivals[form], form)]
    return next(writer for writer in writers if writer(source) == writers[-1](source))


def make_corpus(source_locale: str = 'en', target_locale: str = 'fr', *, seed: int = 0,
                sizes: Mapping[str, int] = {'train': 20000, 'validation': 1000, 'test': 1000},
                writers: dict[tuple[str, str], Writer] | None = None) -> dict[str, list[tuple[str, str]]]:
    """Returns pairs (source, target) for each split in `sizes`. All source sentences of all splits are unique.

    If `writers` is given, it receives {pair: function that writes this pair in any locale}. links.py uses these
    functions to link words.
    """
    source, target = parse_locale(source_locale), parse_locale(target_locale)
    kinds = usable_kinds(source, target)
    names, shares = list(kinds), [kind.share for kind in kinds.values()]
    rng = random.Random(str(seed))  # a string, because Random(-1) equals Random(1)
    wanted, fruitless, target_of = sum(sizes.values()), 0, {}
    while len(target_of) < wanted:
        sentence = draw_sentence(rng, kinds, rng.choices(names, shares)[0], source)
        text, translation = sentence(source), sentence(target)
        if text not in target_of and max(len(text), len(translation)) <= LONGEST:
            target_of[text], fruitless = translation, 0
            if writers is not None:
                writers[text, translation] = sentence
        elif (fruitless := fruitless + 1) >= PATIENCE:
            raise ValueError(
                f'sizes={dict(sizes)}: the built-in corpus of {source_locale}-{target_locale} has too few sentences. '
                f'The search found {len(target_of)} unique pairs instead of {wanted}, and no new pair in the last '
                f'{PATIENCE} draws. Use at most {len(target_of)} pairs in total.')
    # Kinds with few sentences occur mainly among the first pairs, so the pairs are shuffled before they are split.
    rest = iter(rng.sample(list(target_of.items()), wanted))
    corpus = {split: list(islice(rest, sizes[split])) for split in sorted(sizes)}
    return {split: corpus[split] for split in sizes}


def with_plain_spaces(corpus: Mapping[str, list[tuple[str, str]]], share: float, *,
                      seed: int) -> dict[str, list[tuple[str, str]]]:
    """Replaces no-break spaces by plain spaces in some source sentences.

    The function changes the fraction `share` of the source sentences that contain no-break spaces. The changed
    sentences have the spaces that people type. The targets keep CLDR's spaces. All source sentences of all splits
    remain unique: if two sentences differ only in their spaces, neither sentence is changed. A larger share changes the
    same sentences as a smaller share, and further sentences.
    """
    typed = collections.Counter(source.translate(TYPED) for pairs in corpus.values() for source, _ in pairs)
    changed = {}
    for split, pairs in corpus.items():
        holding = [row for row, (source, _) in enumerate(pairs) if source.translate(TYPED) != source]
        order = random.Random(f'{seed} {split}').sample(holding, len(holding))
        plain = {row for row in order[:round(share * len(order))] if typed[pairs[row][0].translate(TYPED)] == 1}
        changed[split] = [(source.translate(TYPED) if row in plain else source, target)
                          for row, (source, target) in enumerate(pairs)]
    return changed


def parse_locale(identifier: str) -> Locale:
    """Returns the locale of an identifier such as 'pt_BR'.

    Raises:
      ValueError: if CLDR has no such locale. The message has similar identifiers.
    """
    with contextlib.suppress(UnknownLocaleError, ValueError):
        return Locale.parse(identifier.replace('-', '_'))
    # Misspellings ('pt_BX') and English names ('french') both get a suggestion.
    codes = sorted(locale_identifiers())
    known = {name.lower(): code for code, name in sorted(Locale('en').languages.items()) if code in codes}
    known |= {code.lower(): code for code in codes}
    near = difflib.get_close_matches(identifier.lower().replace('-', '_'), known, n=5)
    advice = ', '.join(dict.fromkeys(repr(known[name]) for name in near)) or "for example 'en', 'fr', 'pt_BR'"
    raise ValueError(f'Unknown locale {identifier!r}: CLDR has no data for it. Try {advice}.')
