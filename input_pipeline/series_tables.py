"""Reads time series from CSV tables."""

import collections
import contextlib
import csv
import datetime
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from input_pipeline.examples import Examples
from input_pipeline.input_format import FILL_GAPS, FLOAT32_END, USE_MEAN, is_name
from input_pipeline.text_files import read_lines
from runtime.errors import UserError
from runtime.once import log_once, warn_once

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
NOT_CHANNELS = ('series', 'time', 'group', 'target')  # every other column is a channel
RESERVED_LIKE = ('date', 'datetime', 'ds', 'id', 'item_id', 'series_id', 'timestamp', 'unique_id')  # rarely channels
NAME_SERIES = '. If the column contains the names of the series, name it series'
MISSING = ('', 'na', 'nan', 'null')  # cells of missing values, in lower case
REGULAR = 0.1  # a step of time is irregular if it differs from the median step by more than this share


class Row(NamedTuple):
    """A row of a CSV table, with its line number."""
    line: int
    cells: dict[str, str]
    time: Decimal = Decimal(0)  # float64 cannot separate nanoseconds since 1970


def is_channel(name: str) -> bool:
    """Returns whether a column is a channel. The columns of targets with names are target_NAME."""
    return name not in NOT_CHANNELS and not name.startswith('target_')


def read_csv(path: Path, training: Path, missing: bool = False) -> Examples:
    """Reads series with targets from a table with a row for each time step:

        series,time,height,speed,target
        a,0.0,1.5,-0.25,up
        a,0.1,1.4,-0.5,up
        b,0.0,...

    The rows of a series are sorted by the optional column `time`, which has numbers or dates such as 2024-01-31T12:00.
    Without the column `time`, the rows of a series must be consecutive and in the order of time. Shorter series are
    padded with NaN. A series has one target: a number, or the name of a class. The columns target_NAME have one target
    or several targets with names. Several targets must be numbers. The optional column `group` names the group of a
    series: all series of a group are in the same split. Every other column is a channel.

    Args:
      path: the table.
      training: the table of the training split, which determines the channels.
      missing: whether cells may be empty (config.data.missing). Empty cells become NaN.

    Raises:
      UserError: if the table has another form. The message has file:line.
    """
    columns = _read_table(training)[0]
    channels = list(filter(is_channel, columns))
    values = [name for name in columns if name == 'target' or name.startswith('target_')] or ['target']
    names = tuple(value.removeprefix('target_') for value in values)
    if len({*names}) < len(names):
        raise UserError(f"{training}:1: the columns target and target_target would both have the name 'target'. Rename "
                        'one of them')
    series = _read_series(path, training, channels, values)
    firsts = [rows[0] for rows in series.values()]
    targets = [_targets(firsts, value, path, only=len(values) == 1) for value in values]
    groups = None
    if all('group' in first.cells for first in firsts):
        groups = np.array([first.cells['group'] for first in firsts])
        if unnamed := [first for first in firsts if not first.cells['group']]:
            raise UserError(f'{path}:{unnamed[0].line}: the cell of column group is empty. Each series needs the name '
                            'of its group')
    lengths = [len(rows) for rows in series.values()]
    if min(lengths) < max(lengths):
        log_once(f'{path}: the series have {min(lengths)} to {max(lengths)} steps. Shorter series are padded with the '
                 'mean of each channel, and patches without any value are hidden from the model')
    return Examples(_channels(series, channels, path, missing),
                    targets[0] if len(targets) == 1 else np.stack(targets, axis=1), str(path), groups, tuple(channels),
                    names if values != ['target'] else (),
                    tuple(f'{path.name}:{first.line}' for first in firsts), padded=min(lengths) < max(lengths))


def read_unlabelled(path: Path, channels: Sequence[str],
                    missing: bool) -> tuple[list[str], Float[np.ndarray, 'series time channels']]:
    """Reads the names and the channels of series from a table that may have no targets.

    Raises:
      UserError: if the table has another form, or other channels.
    """
    series = _read_series(path, None, channels, [])
    return list(series), _channels(series, channels, path, missing)


def read_histories(path: Path) -> tuple[dict[str, Float[np.ndarray, 'time channels']], list[str]]:
    """Reads the series of a table for forecasting: {name: values}, and the names of the channels.

    The columns are the channels and, optionally, `series` and `time`. Without the column `series`, all rows are
    one series, whose name is ''.

    Raises:
      UserError: if the table has another form, or a value is missing.
    """
    channels = [name for name in _read_table(path)[0] if name not in ('series', 'time')]
    if wrong := [name for name in channels if not is_channel(name)]:
        raise UserError(f'{path}:1: column {wrong[0]!r} is not used for forecasting. Remove the column. If it '
                        'is a channel, rename it')
    series = _read_series(path, path, channels, [], named=False)
    return {name: _channels({name: rows}, channels, path, False, FILL_GAPS)[0]
            for name, rows in series.items()}, channels


def _read_series(path: Path, training: Path | None, channels: Sequence[str], values: Sequence[str],
                 named: bool = True) -> dict[str, list[Row]]:
    """Returns {name of a series: its rows in the order of time}. `values` are the columns of the targets.

    If `named` is False and the column `series` is missing, the table is one series with the name ''.
    """
    if not channels:
        raise UserError(f'{training}:1: no column is a channel. Add a column other than {", ".join(NOT_CHANNELS)}')
    header, table = _read_table(path)
    if missing := [name for name in (*['series'] * named, *channels, *values) if name not in header]:
        raise UserError(f'{path}:1: column {missing[0]!r} is missing. The columns are {", ".join(header)}')
    if extra := [name for name in header if is_channel(name) and name not in channels]:
        raise UserError(f'{path}:1: column {extra[0]!r} is not in the training data. Remove the column')
    if doubtful := [name for name in channels if name.lower() in RESERVED_LIKE]:
        warn_once(f'{path}:1: {", ".join(map(repr, doubtful))} will be read as channels. If a column contains the '
                  'names of the series, name it series. If it contains the times of the rows, name it time. Remove the '
                  'columns that are not channels')
    constant, series, previous = [*values, *(['group'] if 'group' in header else [])], {}, None
    for line, cells in table:
        name = cells.get('series', '')
        if 'series' in header and not name:
            raise UserError(f'{path}:{line}: the cell of column series is empty. Each row needs the name of its series')
        rows = series.setdefault(name, [])
        if rows and previous != name and 'time' not in header:
            raise UserError(f'{path}:{line}: series {name!r} continues here, but it began at line {rows[0].line} and '
                            'another series is between these lines. Sort the rows by series, or add a column time')
        for column in constant:
            if rows and cells[column] != rows[0].cells[column]:
                raise UserError(f'{path}:{line}: {column} is {cells[column]!r}, but it is {rows[0].cells[column]!r} at '
                                f'line {rows[0].line}. All rows of a series must have the same {column}')
        rows.append(Row(line, cells))
        previous = name
    if not series:
        raise UserError(f'{path} has a header but no rows. Add a row for each time step')
    if 'time' in header:
        series = _in_order_of_time(series, path)
    return series


def _in_order_of_time(series: dict[str, list[Row]], path: Path) -> dict[str, list[Row]]:
    """Sorts the rows of each series by time, and returns the series.

    Logs the number of series that were not in order. Logs a warning if the rows are not equally spaced in time.

    Raises:
      UserError: if two rows of a series have the same time.
    """
    parse = _time_parser(next(iter(series.values()))[0], path)
    ordered = {name: sorted((row._replace(time=parse(row)) for row in rows), key=lambda row: row.time)
               for name, rows in series.items()}
    for name, rows in ordered.items():
        for one, other in pairwise(rows):
            if one.time == other.time:
                of = f' of series {name!r}' if name else ''
                raise UserError(f'{path}:{other.line}: time {other.cells["time"]!r}{of} is also at line {one.line}. '
                                'The times of a series must be unique'
                                + ('' if name else '. If a column contains the names of the series, name it series'))
    unsorted = sum([row.line for row in rows] != sorted(row.line for row in rows) for rows in ordered.values())
    if unsorted:
        log_once(f'{path}: {unsorted} of {len(series)} series are not in the order of time. Their rows are sorted')
    steps = np.array([float(other.time - one.time) for rows in ordered.values() for one, other in pairwise(rows)])
    median = float(np.median(steps)) if len(steps) else 0.0
    irregular = int(np.sum(np.abs(steps - median) > REGULAR * median))
    if irregular:
        unit = '' if _is_number(next(iter(series.values()))[0].cells['time']) else ' s'
        warn_once(f'{path}: {irregular} of {len(steps)} steps of the column time differ by more than {REGULAR:.0%} '
                  f'from the median step of {median:g}{unit}: they are {steps.min():g} to {steps.max():g}{unit}. The '
                  'model reads the rows as equally spaced')
    return ordered


def _time_parser(first: Row, path: Path):
    """Returns a function that reads the time of a row. Times are numbers if the first time is a number, else dates.

    Either all dates have a time zone, or none has one.
    """
    numbers = _is_number(first.cells['time'])
    zoned = _has_zone(first.cells['time'])

    def parse(row: Row) -> Decimal:
        text = row.cells['time']
        if not numbers and _is_date(text) and _has_zone(text) != zoned:
            raise UserError(f'{path}:{row.line}: time {text!r} has {"no" if zoned else "a"} time zone, but '
                            f'{first.cells["time"]!r} at line {first.line} has {"one" if zoned else "none"}. Write all '
                            'times with a time zone, or all without')
        with contextlib.suppress(ValueError, ArithmeticError):
            if not numbers:
                date = datetime.datetime.fromisoformat(text)
                since = (date if zoned else date.replace(tzinfo=datetime.UTC)) - EPOCH
                digits = re.search(r'[.,]\d{6}(\d+)', text)  # fromisoformat ignores the digits after microseconds
                return (Decimal(since // datetime.timedelta(microseconds=1)) / 1_000_000
                        + Decimal(f'0.000000{digits[1]}' if digits else 0))
            if _is_number(text):
                return Decimal(text)
        raise UserError(f'{path}:{row.line}: time is {text!r}, not a {"number" if numbers else "date"}. Times must be '
                        'numbers, or dates such as 2024-01-31T12:00, in all rows')

    return parse


def _channels(series: dict[str, list[Row]], channels: Sequence[str], path: Path, missing: bool,
              hint: str = USE_MEAN) -> Float[np.ndarray, 'series time channels']:
    """Returns the channels. Shorter series end with NaN. If `missing` is True, empty cells are NaN, too.

    `hint` is the end of the message about a missing value. The name of a series is '' if no column has names.
    """
    array = np.full((len(series), max(map(len, series.values())), len(channels)), np.nan)
    text_hint = NAME_SERIES if '' in series else ''
    for index, rows in enumerate(series.values()):
        for step, row in enumerate(rows):
            for channel, name in enumerate(channels):
                if not (missing and row.cells[name].lower() in MISSING):
                    array[index, step, channel] = _number(
                        row.cells[name], f'{path}:{row.line}: {name}', hint, text_hint)
    return array


def _targets(firsts: Sequence[Row], column: str, path: Path, only: bool) -> np.ndarray:
    """Returns the targets in a column: as numbers, or as text if no target is a number.

    `only` is True if no other column has targets. Otherwise, text is an error.

    Raises:
      UserError: if a target is missing, or only some of the targets are numbers.
    """
    texts = [row.cells[column] for row in firsts]
    for row, text in zip(firsts, texts, strict=True):
        if not text:
            raise UserError(f'{path}:{row.line}: the cell of column {column} is empty. Each series needs a target')
        if not is_name(text):
            raise UserError(f'{path}:{row.line}: {column} is {text!r}, which is neither a number nor a line of text')
    numbers = [_is_number(text) or text.lower().lstrip('+-') in ('nan', 'inf', 'infinity') for text in texts]
    if only and not any(numbers):
        return np.array(texts)
    if not all(numbers):
        index = numbers.index(False)
        rule = (f', but {sum(numbers)} of {len(texts)} targets are numbers. Use only numbers, or only names of classes'
                if only else '. Several targets must be numbers (task=regression). For classification, keep one column '
                'of targets')
        raise UserError(f'{path}:{firsts[index].line}: {column} is {texts[index]!r}, not a number{rule}')
    return np.array([_number(text, f'{path}:{row.line}: {column}', '. Each series needs a target')
                     for row, text in zip(firsts, texts, strict=True)])


def _read_table(path: Path) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """Returns the names of the columns, and an iterator of (line number, {column: cell}) over the rows.

    Raises:
      UserError: if the header is missing or has no commas, or if a name is empty, a duplicate, or not one line of text.
        Also if a row has more or fewer cells than the header.
    """
    rows = _rows(path)
    line, header = next(rows, (0, []))
    if not header:
        raise UserError(f'{path} is empty. It must begin with a header such as series,x,y,target')
    if len(header) == 1 and (other := re.search('[;\t|]', header[0])):
        raise UserError(f'{path}:{line}: the columns are separated by {other[0]!r}. Separate them by commas')
    for name, count in collections.Counter(header).items():
        if not name:
            raise UserError(f'{path}:{line}: column {header.index(name) + 1} has no name. Name the column, or remove '
                            'it. Write tables of pandas with to_csv(index=False)')
        if count > 1:
            raise UserError(f'{path}:{line}: column {name!r} appears {count} times. Column names must be unique')
        if not is_name(name):
            raise UserError(f'{path}:{line}: column {name!r} has a control character or a line end in its name. Rename '
                            'the column')

    def cells() -> Iterator[tuple[int, dict[str, str]]]:
        for line, row in rows:
            if len(row) != len(header):
                raise UserError(f'{path}:{line}: the line has {len(row)} columns, but the header has {len(header)}. '
                                'Write one cell for each column')
            yield line, dict(zip(header, row, strict=True))

    return header, cells()


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and cells of each row.

    Blank lines are ignored. But in a table with one column, a blank line between two rows is a row with an empty cell.

    Raises:
      UserError: if the file is not CSV, or a row has more than one line.
    """
    table, columns, blank, before = csv.reader(read_lines(path)), 0, [], 0  # `before` is the last line of the last row
    try:
        for row in table:
            if table.line_num > before + 1:
                raise csv.Error
            before = table.line_num
            if not row:
                blank.append(table.line_num)
                continue
            if columns == 1:
                yield from ((line, ['']) for line in blank)
            yield table.line_num, [cell.strip() for cell in row]
            columns, blank = columns or len(row), []
    except csv.Error as error:
        reason = str(error)
        if table.line_num > before + 1:  # the cell may also exceed the maximum length of csv
            reason = ('a cell in quotation marks has a line break, or its closing quotation mark is missing. Each row '
                      'must be one line')
        elif 'new-line' in reason:
            # Python finds a carriage return that no line feed follows, and gives advice for Python programs.
            reason = 'lines end with carriage returns, as in old Mac files. Save the file as CSV (UTF-8)'
        raise UserError(f'{path}:{before + 1}: {reason}') from None


def _is_number(text: str) -> bool:
    """Returns whether a cell is a finite number. Python's float() would also accept 1_000."""
    try:
        return '_' not in text and math.isfinite(float(text))
    except ValueError:
        return False


def _is_date(text: str) -> bool:
    try:
        return bool(datetime.datetime.fromisoformat(text))
    except ValueError:
        return False


def _has_zone(text: str) -> bool:
    return _is_date(text) and datetime.datetime.fromisoformat(text).tzinfo is not None


def _number(text: str, where: str, hint: str = USE_MEAN, text_hint: str = '') -> float:
    """Returns the number in a cell. The hints end the messages about a missing value and about a text."""
    if not _is_number(text):
        if ',' in text:
            hint = '. Write 1234.5: with a decimal point, and without thousands separators'
        elif _is_date(text):
            hint = '. If the column contains the times of the rows, name it time'
        elif text.lower() not in MISSING:
            hint = text_hint
        raise UserError(f'{where} is {text!r}, not a number{hint}')
    if not abs(float(text)) < FLOAT32_END:
        raise UserError(f'{where} is {text!r}, which exceeds 3.4e38, the maximum of float32. Use a larger unit')
    return float(text)
