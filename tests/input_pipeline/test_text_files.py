"""The lines of text files and of stdin."""

import gzip
import io
import sys
import types

import pytest

from input_pipeline.text_files import read_lines
from runtime.errors import UserError


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize('content, expected', [
    (b'', []), (b'\n', ['']), (b'a', ['a']), (b'a\n\nb', ['a', '', 'b']), (b'a\r\nb\r\n', ['a', 'b']),
    (b'\xef\xbb\xbfa\n\xef\xbb\xbfb\n', ['a', '\ufeffb']), (b'\xef\xbb\xbf', ['']), (b'a\rb\n', ['a\rb']),
    ('a\u2028b\u2029c\x85d\x0b\x0c\x1c\n'.encode(), ['a\u2028b\u2029c\x85d\x0b\x0c\x1c']),
    (b'\x00\n\x00', ['\x00', '\x00'])])
def test_only_line_feeds_end_lines(content, expected, tmp_path):
    assert list(read_lines(write(tmp_path / 'x.txt', content))) == expected
    assert list(read_lines(write(tmp_path / 'x.gz', gzip.compress(content)))) == expected


@pytest.mark.parametrize('name, content, message', [
    ('x.txt', b'good\nbad \xff\n', r'x\.txt:2: not UTF-8 \(byte 0xff at column 5\)'),
    ('x.txt', 'naïf '.encode() + b'\xff\n', r'x\.txt:1: not UTF-8 \(byte 0xff at column 6\)'),  # ï has two bytes
    ('x.txt', b'good\n\xed\xa0\x80', r'x\.txt:2: not UTF-8'),  # half a surrogate pair
    ('x.txt', 'text'.encode('utf-16'), r'x\.txt:1: not UTF-8'),
    ('x.gz', gzip.compress(b'text ' * 99, mtime=0)[:-9], r'x\.gz cannot be read: '),
    ('x.gz', b'no gzip', r'x\.gz cannot be read: Not a gzipped file'),
    ('x.gz', gzip.compress(b'a\n' * 9, mtime=0)[:12] + b'\xff' * 30, r'x\.gz cannot be read: '),
])
def test_a_damaged_file_is_named(name, content, message, tmp_path):
    with pytest.raises(UserError, match=message):
        list(read_lines(write(tmp_path / name, content)))


def test_a_folder_is_no_input(tmp_path):
    with pytest.raises(UserError, match='Is a directory'):
        list(read_lines(tmp_path))


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(b'one\n\xff\n')))
    lines = read_lines('-')
    assert next(lines) == 'one'
    with pytest.raises(UserError, match='stdin:2: not UTF-8'):
        next(lines)
    monkeypatch.setattr(sys, 'stdin', None)
    with pytest.raises(UserError, match='stdin is closed'):
        list(read_lines('-'))


@pytest.mark.parametrize('damage', [lambda whole: whole[:len(whole) // 2], lambda whole: whole[:-4],
                                    lambda whole: whole[:30] + bytes(30) + whole[60:], lambda whole: b'plain text'])
def test_damaged_gz(tmp_path, damage):
    whole = gzip.compress(''.join(f'{number ** 3}\n' for number in range(1000)).encode())
    with pytest.raises(UserError, match=r'train\.en\.gz cannot be read: '):
        list(read_lines(write(tmp_path / 'train.en.gz', damage(whole))))
