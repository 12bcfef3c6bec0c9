"""Documents from files, TFDS and the standard library: their boundaries, the splits, and error messages."""

import gzip
import json
import logging
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from input_pipeline.documents import LibraryDocuments, open_documents
from runtime.errors import UserError

SPLITS = ('train', 'validation', 'test')
CONTENT = 'one\r\ntwo\n\n  \nthree é\u2028\nfour\n'
CUT = {'file': [CONTENT], 'line': ['one', 'two', '', '  ', 'three é\u2028', 'four'],
       'blank_line': ['one\ntwo', 'three é\u2028\nfour']}


def opened(**options):
    data = ConfigDict({'source': 'files', 'file': '', 'dir': '', 'name': '', 'feature': 'text', 'documents': 'file',
                       'validation_share': 0.1, 'splits': {split: split for split in SPLITS}})
    data.update({name: str(value) if isinstance(value, Path) else value for name, value in options.items()})
    return open_documents(data)


def read(split='train', **options):
    return list(opened(**options).documents(split))


def fingerprint(split='train', **options):
    return json.dumps(opened(**options).fingerprint(split), sort_keys=True)


@pytest.mark.parametrize('kind', CUT)
@pytest.mark.parametrize('suffix', ['.txt', '.txt.gz'])
def test_file_of_a_split(tmp_path, kind, suffix):
    content = CONTENT.encode()
    (tmp_path / f'val{suffix}').write_bytes(gzip.compress(content) if suffix == '.txt.gz' else content)
    splits = {'train': 'train', 'validation': 'val', 'test': 'test'}
    assert read('validation', dir=tmp_path, documents=kind, splits=splits) == CUT[kind]


def test_lines_of_json_are_documents(tmp_path, logged):
    lines = [json.dumps({'text': f'{n}\n'}) if n % 2 else json.dumps(f'{n}\n') for n in range(10)]
    path, texts = tmp_path / 'train.jsonl', [f'{n}\n' for n in range(10)]
    path.write_text('\n'.join(lines) + '\n')
    assert read(dir=tmp_path, documents='jsonl', validation_share=0.0) == texts
    # The border is the beginning of the line that contains the border of a text.
    parts = [read(split, file=path, documents='jsonl', validation_share=0.35) for split in ('train', 'validation')]
    assert parts == [texts[:6], texts[6:]]
    assert not logged.text
    assert '"text"' in ''.join(read(file=path))
    assert f'{path} is read as plain text, with the syntax of JSON. To read the texts in' in logged.text
    path.write_text('\n'.join(lines) + '\n7\n')
    for options in {'file': path}, {'dir': tmp_path}:
        with pytest.raises(UserError, match=r'train\.jsonl:11: must be a JSON string or an object with'):
            read('validation', documents='jsonl', **options)


@pytest.mark.parametrize('kind', CUT)
def test_folder_of_a_split(tmp_path, kind):
    (tmp_path / 'train/b').mkdir(parents=True)
    (tmp_path / 'train/c.md').write_bytes(CONTENT.encode())
    (tmp_path / 'train/b/x').write_text('nested')
    (tmp_path / 'train/a.gz').write_bytes(gzip.compress(b'first'))
    for hidden in '.hidden', '.git/config', 'b/.ipynb_checkpoints/x-checkpoint':
        (tmp_path / 'train' / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / 'train' / hidden).write_text('hidden')
    assert read(dir=tmp_path, documents=kind, validation_share=0.0) == ['first', 'nested', *CUT[kind]]


def test_links_to_folders_are_followed_and_a_broken_link_is_an_error(tmp_path):
    """Also if a link leads back to a folder that contains the link."""
    for folder in 'train/a', 'elsewhere':
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / 'elsewhere/x').write_text('linked')
    (tmp_path / 'elsewhere/again').symlink_to(tmp_path / 'train')
    (tmp_path / 'train/a/b').symlink_to(tmp_path / 'elsewhere')
    (tmp_path / 'train/c').write_text('plain')
    assert read(dir=tmp_path, validation_share=0.0) == ['linked', 'plain']
    (tmp_path / 'train/a/d').symlink_to(tmp_path / 'nowhere')
    with pytest.raises(UserError, match='train/a/d is a broken symbolic link'):
        read(dir=tmp_path, validation_share=0.0)


def test_a_folder_without_files_does_not_hide_the_file_of_the_split(tmp_path):
    (tmp_path / 'train').mkdir()
    (tmp_path / 'train/.hidden').write_text('hidden')
    (tmp_path / 'train.txt').write_text('text')
    assert read(dir=tmp_path, validation_share=0.0) == ['text']


def test_several_sets_of_a_test(tmp_path):
    for name in 'ab':
        (tmp_path / f'{name}.txt').write_text(name * 3)
    splits = {'train': 'train', 'validation': 'val', 'test': 'a,b'}
    assert [read(split, dir=tmp_path, splits=splits) for split in 'ab'] == [['aaa'], ['bbb']]


def test_a_split_of_many_files_and_folders(tmp_path):
    for name in 'news-1', 'news-2', 'news-10', 'books':
        (tmp_path / f'{name}.txt').write_text(name)
    (tmp_path / 'news-3').mkdir()
    (tmp_path / 'news-3' / 'one.md').write_text('in a folder')

    def train(names):
        return read(dir=tmp_path, splits={'train': names, 'validation': 'val', 'test': 'test'}, validation_share=0.0)

    (tmp_path / 'news-4.txt').symlink_to(tmp_path / 'nowhere')
    with pytest.raises(UserError, match=r'/news-4\.txt is a broken symbolic link'):
        train('news-*')
    (tmp_path / 'news-4.txt').unlink()
    assert train('news-*') == ['news-1', 'news-10', 'news-2'], 'of files, not of folders'
    assert train('books,news-3,news-?') == ['books', 'in a folder', 'news-1', 'news-2']
    assert train(f'books,{tmp_path}/news-?') == ['books', 'news-1', 'news-2']
    for names, missing in (('d-*', 'd-*'), ('books,d-*', 'd-*'), ('books, news-*', ' news-*'), ('books,d', 'd')):
        with pytest.raises(UserError, match=re.escape(f'must have {missing}.txt, {missing}.txt.gz or a folder')):
            train(names)
    with pytest.raises(UserError, match='has an empty name'):
        train('books,')


@pytest.mark.parametrize('kind', CUT)
@pytest.mark.parametrize('name', ['all.txt', 'all.txt.gz'])
def test_one_file_is_cut_by_characters(tmp_path, kind, name):
    content = ('é' * 9 + '\r\n') * 100
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith('gz') else content.encode())
    parts = [read(split, file=tmp_path / name, documents=kind, validation_share=0.1) for split in SPLITS]
    assert parts[1] == parts[2]
    if kind == 'file':
        assert [len(part) for part in parts] == [1, 1, 1]
        assert len(parts[0][0]) == 990 and parts[0][0] + parts[1][0] == content
    else:
        assert '\n'.join(parts[0]) == '\n'.join(['é' * 9] * 90)
        assert '\n'.join(parts[1]) == '\n'.join(['é' * 9] * 10)


@pytest.mark.parametrize('kind', CUT)
@pytest.mark.parametrize('suffix', ['.txt', '.txt.gz'])
def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path, kind, suffix):
    content, plain = CONTENT.encode(), tmp_path / f'train{suffix}'
    found = []
    for begin in b'', b'\xef\xbb\xbf':
        whole = begin + content
        plain.write_bytes(gzip.compress(whole) if suffix == '.txt.gz' else whole)
        found.append((read(dir=tmp_path, documents=kind, validation_share=0.0), read(file=plain, documents=kind)))
    assert found[0] == found[1] and found[0][0] == CUT[kind]


@pytest.mark.parametrize('where', ['dir', 'file'])
def test_a_store_of_text_with_its_mark_is_not_used_for_text_without_it(tmp_path, where):
    """Earlier versions took the mark for text: their fingerprint of the same files must be another one."""
    path = tmp_path / 'train.txt'
    place = tmp_path if where == 'dir' else path
    path.write_text('one')
    assert 'mark' not in fingerprint(**{where: place})
    path.write_bytes(b'\xef\xbb\xbfone')
    assert '"byte_order_marks": "removed"' in fingerprint(**{where: place})


def test_a_module_with_a_mark_is_read_without_it(tmp_path):
    for number in range(60):
        (tmp_path / f'{number}.py').write_bytes(b'\xef\xbb\xbfx = 1\n')
    assert set(LibraryDocuments(tmp_path).documents('train')) == {'x = 1\n'}


def test_nanogpts_split_of_tiny_shakespeare(tmp_path):
    (tmp_path / 'input.txt').write_text('x' * 1_115_394)
    assert [len(read(split, file=tmp_path / 'input.txt')[0]) for split in SPLITS] == [1_003_854, 111_540, 111_540]


def test_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'train.txt').write_text('text')
    assert read(dir='~', validation_share=0.0) == read(file='~/train.txt', validation_share=0.0) == ['text']


def test_a_split_may_be_outside_of_the_folder(tmp_path):
    (tmp_path / 'data').mkdir()
    for name in 'data/train.txt', 'outside.txt':
        (tmp_path / name).write_text('text')
    for name, file in (('train', 'train.txt'), ('../outside', '../outside.txt'),
                       (f'{tmp_path}/outside', f'{tmp_path}/outside.txt')):
        documents = opened(dir=tmp_path / 'data', splits={split: name for split in SPLITS})
        assert list(documents.documents('train')) == ['text']
        assert documents.fingerprint('train')['files'][0][0] == file


@pytest.mark.parametrize('options, message', [
    ({'dir': '/no/where'}, r"config\.data\.dir='/no/where' is not a folder\. Set it to the folder of"),
    ({'file': '/no/where'}, r"config\.data\.file='/no/where' does not exist, or is not a file"),
    ({'source': 'text'}, r"config\.data\.source='text': must be one of builtin, files, tfds for this task"),
])
def test_a_missing_file_or_source_is_reported(options, message):
    with pytest.raises(UserError, match=message):
        opened(**options)


def test_missing_split(tmp_path):
    (tmp_path / 'val').mkdir()
    for split, name in (('train', 'train'), ('validation', 'val')):
        with pytest.raises(UserError, match=rf'for the {split} split, .* must have {name}\.txt, {name}\.txt\.gz or a '
                                            rf'folder {name} of text files\. See config.data.dir and splits.{split}'):
            read(split, dir=tmp_path, splits={'train': 'train', 'validation': 'val', 'test': 'test'})


@pytest.mark.parametrize('kind', CUT)
@pytest.mark.parametrize('where', ['dir', 'file'])
def test_invalid_utf8_is_located(tmp_path, kind, where):
    (tmp_path / 'train.txt').write_bytes(b'eins\nzwei\nd' + 'é'.encode('latin-1') + b'j\n')
    with pytest.raises(UserError, match=r'train\.txt:3: not UTF-8 \(byte 0xe9 at column 2\)\. .*iconv'):
        read(documents=kind, **{where: tmp_path / ('train.txt' if where == 'file' else '')})


def test_damaged_gz(tmp_path):
    (tmp_path / 'train.txt.gz').write_bytes(gzip.compress(b'text' * 1000)[:-4])
    with pytest.raises(UserError, match=r'train\.txt\.gz cannot be read: '):
        read(dir=tmp_path)


def test_fingerprint_follows_content_and_options_not_time(tmp_path):
    path = tmp_path / 'train.txt'
    path.write_text('one\n\ntwo')
    for where in ({'dir': tmp_path}, {'file': path}):
        before = fingerprint(**where)
        os.utime(path, (1, 1))
        assert fingerprint(**where) == before
        assert fingerprint(**where, documents='line') != before
    whole = {'file': path}
    assert fingerprint('validation', **whole) == fingerprint('test', **whole) != fingerprint(**whole)
    assert fingerprint(**whole, validation_share=0.5) != fingerprint(**whole)
    before = [fingerprint(dir=tmp_path), fingerprint(**whole)]
    path.write_text('one\n\ntwo!')
    assert not set(before) & {fingerprint(dir=tmp_path), fingerprint(**whole)}


# The standard library.

def test_standard_library_is_split_without_overlap_and_the_same_each_time():
    documents, again = opened(source='builtin'), opened(source='builtin')
    splits = [list(documents.documents(split)) for split in SPLITS]
    modules = [text for split in splits for text in split if text]
    characters = [sum(map(len, split)) for split in splits]
    assert 0.8 < characters[0] / sum(characters) < 0.97 and min(characters) > 20_000
    assert len(set(modules)) > 0.99 * len(modules)  # some packages have the same line of __init__
    assert (Path(sysconfig.get_paths()['stdlib']) / 'random.py').read_bytes().decode() in modules
    for split, texts in zip(SPLITS, splits, strict=True):
        assert list(again.documents(split)) == texts
        assert again.fingerprint(split) == documents.fingerprint(split)
    assert len({json.dumps(documents.fingerprint(split)) for split in SPLITS}) == 3


def test_a_module_stays_in_its_split_and_only_the_library_counts(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    caplog.set_level(logging.INFO, 'allyouneed')

    def splits(folder):
        documents = LibraryDocuments(folder)
        return [list(documents.documents(split)) for split in SPLITS]

    for number in range(200):
        (tmp_path / f'module{number}.py').write_text(f'{number}')
    before = splits(tmp_path)
    assert sorted(int(text) for split in before for text in split) == list(range(200))
    fingerprints = [LibraryDocuments(tmp_path).fingerprint(split) for split in SPLITS]
    (tmp_path / 'json').mkdir()
    for number in range(200):
        (tmp_path / f'json/{number}.py').write_text(f'{1000 + number}')
    for folder in ('test', 'json/tests', 'site-packages/package'):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / 'left.py').write_text('out')
    (tmp_path / '_sysconfigdata__linux.py').write_text('out')
    (tmp_path / 'latin.py').write_bytes(b'# -*- coding: latin-1 -*- \xe9')
    after = splits(tmp_path)
    assert [[text for text in split if len(text) < 4] for split in after] == before
    assert sum(map(len, after)) == 400
    assert 'ignored 1 modules that are not UTF-8' in caplog.text
    assert all(LibraryDocuments(tmp_path).fingerprint(split) != old
               for split, old in zip(SPLITS, fingerprints, strict=True))


# TFDS: a dataset that a process of its own has built, as in test_sources.py.

BUILD = """
import sys
import numpy as np
import tensorflow_datasets as tfds

class TinyText(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(
            {'text': tfds.features.Text(), 'title': tfds.features.Text(), 'label': tfds.features.Scalar(np.int64)}))

    def _split_generators(self, dl_manager):
        return {'train': self._generate_examples(10), 'test': self._generate_examples(4)}

    def _generate_examples(self, count):
        for number in range(count):
            yield number, {'text': f'two\\nlines é {number}\\n', 'title': f'title {number}', 'label': number}

TinyText(data_dir=sys.argv[1], file_format='array_record').download_and_prepare()
"""


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tfds')
    subprocess.run([sys.executable, '-c', BUILD, folder], check=True, capture_output=True)
    return {'source': 'tfds', 'name': 'tiny_text', 'dir': folder}


def test_tfds_dataset_on_disk(prepared):
    assert sorted(read(**prepared)) == [f'two\nlines é {number}\n' for number in range(10)]
    assert sorted(read('test', **prepared, feature='title')) == [f'title {number}' for number in range(4)]
    parts = {'train': 'train[:80%]', 'validation': 'train[80%:]', 'test': 'test'}
    assert read(**prepared, splits=parts) + read('validation', **prepared, splits=parts) == read(**prepared)
    assert len({fingerprint(**prepared), fingerprint('test', **prepared), fingerprint(**prepared, feature='title'),
                fingerprint(**prepared, splits=parts)}) == 4


@pytest.mark.parametrize('options, message', [
    ({'name': 'no_such'}, r"config\.data\.name='no_such' cannot be opened in "),
    ({'feature': 'body'}, r'name=tiny_text: the dataset has the features label, text, title, but it must have body'),
    ({'feature': 'label'}, r"splits\.train='train' cannot be read from .*: a record has int instead of text"),
    ({'splits': {'train': 'tarin'}}, r"splits\.train='tarin' cannot be read from .*Unknown split 'tarin'"),
])
def test_tfds_mistakes_are_explained(prepared, options, message):
    with pytest.raises(UserError, match=message):
        read(**prepared | options)
