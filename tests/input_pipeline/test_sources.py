"""Text files and TFDS datasets on disk: the pairs that are read, error messages, and fingerprints."""

import gzip
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

from configs import base
from input_pipeline import data as data_module
from input_pipeline.data import DocumentData, PairData
from input_pipeline.documents import LibraryDocuments
from input_pipeline.sources import BuiltinCorpus, TextCorpus, open_corpus
from input_pipeline.splits import SPLITS, asked_splits, sets_to_test
from input_pipeline.token_store import TokenStore
from runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
PAIRS = [('one', 'un'), ('', 'vide'), (' two  spaces ', 'déjà\u00a0vu'), ('\u2028 is no line end', 'fin')]


def text_data(folder, **options):
    """config.data for the text files of a folder."""
    data = base.get_config().data
    data.update(source='files', dir=str(folder), **options)
    return data


def write(path, lines, end='\n'):
    content = ''.join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == '.gz' else content)


def write_pairs(folder, names, end='\n', pairs=PAIRS):
    """`pairs` in one TSV file, or in two files."""
    columns = ['\t'.join(pair) for pair in pairs], *zip(*pairs, strict=True)
    for name, lines in zip(names, columns[:1] if len(names) == 1 else columns[1:], strict=True):
        write(folder / name, lines, end)


def read(folder, split='train', validation_share=0.0, train='train', **options):
    """Returns the pairs of a split. Without a share, nothing is held out from the training files."""
    data = text_data(folder, validation_share=validation_share, **options)
    data.splits.train = train
    return list(open_corpus(data).pairs(split))


@pytest.mark.parametrize('end', ['\n', '\r\n'])
@pytest.mark.parametrize('names', [
    ['train.en', 'train.fr'], ['train.en.gz', 'train.fr.gz'], ['train.en', 'train.fr.gz'], ['train.en.gz', 'train.fr'],
    ['train.tsv'], ['train.tsv.gz']])
def test_layouts(tmp_path, names, end):
    write_pairs(tmp_path, names, end)
    assert read(tmp_path) == PAIRS


def test_pairs_within_one_language_are_only_read_from_tables(tmp_path):
    """Both sides of a pair would be the same line of train.en and of validation.en."""
    for split in 'train', 'validation':
        write_pairs(tmp_path, [f'{split}.en', f'{split}.fr'])
    with pytest.raises(UserError, match=r"/train\.tsv .* does not exist\. .* are both 'en', so the pairs of the train"):
        read(tmp_path, target_lang='en')
    pairs = [(source, f'{source} again') for source, _ in PAIRS]
    write_pairs(tmp_path, ['train.tsv'], pairs=pairs)
    assert read(tmp_path, target_lang='en') == read(tmp_path, target_lang='en', train='tr*') == pairs
    held_out = read(tmp_path, 'validation', 0.25, target_lang='en')
    assert len(held_out) == 1 and held_out[0] in pairs


def test_last_line_may_lack_its_end(tmp_path):
    (tmp_path / 'train.tsv').write_text('one\tun\ntwo\tdeux')
    assert read(tmp_path) == [('one', 'un'), ('two', 'deux')]


def test_split_names_and_languages_are_those_of_the_config(tmp_path):
    write_pairs(tmp_path, ['news2013.cs', 'news2013.de'])
    data = text_data(tmp_path, source_lang='de', target_lang='cs')
    data.splits.validation = 'news2013'
    assert list(open_corpus(data).pairs('validation')) == [(target, source) for source, target in PAIRS]


@pytest.mark.parametrize('names, sets', [('test', ['test']), ('flickr', ['test']), ('a,b', ['a', 'b']),
                                         ('test,b', ['test', 'b'])])
def test_a_test_has_one_set_or_several_by_their_names(tmp_path, names, sets):
    for number, name in enumerate(names.split(',')):
        write_pairs(tmp_path, [f'{name}.en', f'{name}.fr'], pairs=PAIRS[number:])
    data = text_data(tmp_path, splits={'train': 'train', 'validation': 'val', 'test': names})
    assert sets_to_test(data) == asked_splits('test', data) == sets
    corpus = open_corpus(data)
    for number, split in enumerate(sets):
        assert list(corpus.pairs(split)) == PAIRS[number:]
        assert asked_splits(split, data) == ([split] if split != 'test' else sets)
    assert asked_splits('validation', data) == ['validation']
    with pytest.raises(UserError, match=f'--split=none must be one of train, validation, .*{sets[-1]}'):
        asked_splits('none', data)


def test_a_missing_set_is_reported_with_its_option(tmp_path):
    write_pairs(tmp_path, ['a.en', 'a.fr'])
    corpus = open_corpus(text_data(tmp_path, splits={'train': 'train', 'validation': 'val', 'test': 'a,b'}))
    with pytest.raises(UserError, match=r'b\.en .* does not exist.*splits\.test'):
        corpus.fingerprint('b')


def test_a_split_of_many_files(tmp_path):
    """Patterns and lists: one behind the other."""
    for name, text in (('b-1', 'eins'), ('b-2', 'zwei'), ('a', 'null'), ('b-10', 'zehn')):
        (tmp_path / f'{name}.de').write_text(f'{text}\n')
        (tmp_path / f'{name}.en').write_text(f'{text} in English\n')
    (tmp_path / 'c.tsv').write_text('table\tTabelle\n')

    def read(names):
        corpus = TextCorpus(tmp_path, 'en', 'de', {'train': names, 'validation': 'a', 'test': 'a'})
        assert len(corpus.fingerprint('train')['files']) == len(corpus.files('train'))
        return [target for _, target in corpus.pairs('train')]

    assert read('b-*') == ['eins', 'zehn', 'zwei']
    assert read('a,b-?,c') == ['null', 'eins', 'zwei', 'Tabelle']
    assert read('b-2') == ['zwei']
    assert read(f'c,{tmp_path}/b-?') == ['Tabelle', 'eins', 'zwei']
    (tmp_path / 'b-2.de').unlink()
    for names in ('b-*', 'a,b-2'):
        with pytest.raises(UserError, match='b-2.de .* does not exist'):
            read(names)
    for names, missing in (('d-*', 'd-*'), ('a,d-*', 'd-*'), ('a, b-*', ' b-*'), ('a,d', 'd')):
        with pytest.raises(UserError, match=re.escape(f'/{missing}.en (or {missing}.en.gz) does not exist')):
            read(names)
    (tmp_path / 'a.de').write_text('null\nmore\n')
    with pytest.raises(UserError, match=r'a\.en has 1 lines but .*a\.de has 2'):
        read('a')
    for names in ('a,', ',a', 'a,,b-1', ' '):
        with pytest.raises(UserError, match='has an empty name'):
            read(names)


def test_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    write_pairs(tmp_path, ['train.tsv'])
    assert read('~') == PAIRS


def test_missing_folder(tmp_path):
    with pytest.raises(UserError, match=r'config\.data\.dir=.*nowhere.* is not a folder\. Set it to the folder of'):
        read(tmp_path / 'nowhere')


@pytest.mark.parametrize('present', ['fr', 'fr.gz', 'tsx'])
def test_missing_file_is_named_with_what_to_do(tmp_path, present):
    (tmp_path / f'train.{present}').touch()
    with pytest.raises(UserError, match=(
            r'/train\.en \(or train\.en\.gz\) does not exist\. For the train split, .* must have train\.en and '
            r'train\.fr, or train\.tsv\. See config\.data\.dir, source_lang, target_lang and splits\.train')):
        read(tmp_path)


def test_both_line_counts_are_reported(tmp_path):
    write(tmp_path / 'train.en', ['1', '2', '3'])
    write(tmp_path / 'train.fr', ['1', '2', '3', '4', '5'])
    with pytest.raises(UserError, match=r'train\.en has 3 lines but .*train\.fr has 5: they must have the same number'):
        read(tmp_path)


@pytest.mark.parametrize('suffix', ['', '.gz'])
def test_invalid_utf8_is_located(tmp_path, suffix):
    content = b'un\ndeux\nd' + 'é'.encode('latin-1') + b'j\n'
    (tmp_path / f'train.fr{suffix}').write_bytes(gzip.compress(content) if suffix else content)
    write(tmp_path / 'train.en', ['1', '2', '3'])
    with pytest.raises(UserError, match=rf'train\.fr{suffix}:3: not UTF-8 \(byte 0xe9 at column 2\)\. .*iconv -f '
                                        'ENCODING -t UTF-8, where ENCODING is the encoding of the file, such as WIN'):
        read(tmp_path)


@pytest.mark.parametrize('line, columns', [('alone', 1), ('', 1), ('a\tb\tc', 3)])
def test_tsv_with_other_than_two_columns(tmp_path, line, columns):
    write(tmp_path / 'train.tsv', ['one\tun', line, 'two\tdeux'])
    with pytest.raises(UserError, match=rf'train\.tsv:2: {columns} columns instead of 2 \(source TAB target\)'):
        read(tmp_path)


def test_fingerprint_follows_content_not_time(tmp_path):
    write_pairs(tmp_path, ['train.en', 'train.fr'])
    corpus = open_corpus(text_data(tmp_path))
    before = corpus.fingerprint('train')
    os.utime(tmp_path / 'train.en', (1, 1))
    assert corpus.fingerprint('train') == before
    write(tmp_path / 'train.fr', ['un', 'vide', 'déjà vu', 'fin'])
    assert corpus.fingerprint('train') != before


def test_fingerprint_distinguishes_directions(tmp_path):
    write_pairs(tmp_path, ['train.en', 'train.fr'])
    there, back = (open_corpus(text_data(tmp_path, source_lang=source, target_lang=target)).fingerprint('train')
                   for source, target in (('en', 'fr'), ('fr', 'en')))
    assert json.dumps(there, sort_keys=True) != json.dumps(back, sort_keys=True)


def test_builtin_fingerprint_follows_the_pairs(monkeypatch):
    def make_corpus(source, target, seed, **_):
        return {split: [(f'{split} {seed}', target)] for split in ('train', 'test')}

    monkeypatch.setattr('input_pipeline.builtin.make_corpus', make_corpus)
    digests = [BuiltinCorpus('en', 'fr', seed).fingerprint(split)['sha256']
               for seed in (0, 1) for split in ('train', 'test')]
    assert len(set(digests)) == 4
    assert BuiltinCorpus('en', 'fr', 0).fingerprint('train')['sha256'] == digests[0]


def test_a_builtin_corpus_has_the_languages_and_the_seed_of_the_config(monkeypatch):
    calls = []

    def make_corpus(*languages, seed, writers):
        calls.append((*languages, seed))
        return {split: PAIRS for split in SPLITS}

    monkeypatch.setattr('input_pipeline.builtin.make_corpus', make_corpus)
    data = base.get_config().data
    data.update(source='builtin', source_lang='de', target_lang='ja', seed=5)
    assert open_corpus(data).fingerprint('train')['seed'] == 5
    assert calls == [('de', 'ja', 5)]


@pytest.mark.parametrize('kind, open_source', [
    (PairData, lambda: BuiltinCorpus('en', 'fr', 0)),
    (DocumentData, lambda: LibraryDocuments(pathlib.Path(json.__file__).parent))], ids=['pairs', 'documents'])
def test_the_splits_of_a_built_in_source_change_together(kind, open_source):
    """They are held out from data that another version of Babel or of Python changes."""
    data = object.__new__(kind)
    data._source = open_source()
    assert [data.held_out(split) for split in SPLITS] == [False, True, True]


def test_a_corpus_without_plain_spaces_is_the_one_that_runs_were_made_of_before(monkeypatch):
    pairs = [('7:37\u202fAM', '07:37'), ('94.4%', '94,4\u00a0%')]
    monkeypatch.setattr('input_pipeline.builtin.make_corpus', lambda *_, **__: {'train': pairs})

    def opened(**options):
        data = base.get_config().data
        data.update(**options)
        corpus = open_corpus(data)
        return list(corpus.pairs('train')), corpus.fingerprint('train')

    digest = hashlib.sha256(repr(pairs).encode()).hexdigest()
    assert opened(plain_spaces=0.0) == (pairs, {'source': 'builtin', 'languages': ['en', 'fr'], 'seed': 0, 'version': 1,
                                                'split': 'train', 'sha256': digest})
    typed, fingerprint = opened(plain_spaces=0.6)
    assert typed == [('7:37 AM', '07:37'), pairs[1]]
    assert fingerprint['plain_spaces'] == 0.6 and fingerprint['sha256'] != digest


def test_builtin_with_an_unknown_locale():
    with pytest.raises(UserError, match=r"config\.data \(source=builtin\): Unknown locale 'pt_BX'"):
        BuiltinCorpus('en', 'pt_BX', 0)


# TFDS. The dataset is built by a process of its own: here only its files are known, as to a user of prepared data.

BUILD = """
import sys
import tensorflow_datasets as tfds

class TinyTranslate(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name='fr-en', version='1.0.0')]

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.Translation(languages=('en', 'fr')))

    def _split_generators(self, dl_manager):
        return {'train': self._generate_examples(10), 'test': self._generate_examples(4)}

    def _generate_examples(self, count):
        for number in range(count):
            yield number, {'en': f'two\\nlines {number}', 'fr': f'déjà {number}'}

TinyTranslate(data_dir=sys.argv[1], config='fr-en', file_format='array_record').download_and_prepare()
"""


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tfds')
    subprocess.run([sys.executable, '-c', BUILD, folder], check=True, capture_output=True)
    return folder


def tfds_data(folder, name='tiny_translate/fr-en', train='train', **options):
    data = base.get_config().data
    data.update(source='tfds', name=name, dir=str(folder), **options)
    data.splits.train = train
    return data


def test_tfds_dataset_on_disk(prepared):
    corpus = open_corpus(tfds_data(prepared))
    assert sorted(corpus.pairs('train')) == [(f'two lines {number}', f'déjà {number}') for number in range(10)]
    assert len(list(corpus.pairs('test'))) == 4
    assert list(corpus.pairs('train')) == list(corpus.pairs('train'))


def test_a_tfds_dataset_may_have_a_version_and_a_tilde(prepared, monkeypatch):
    pairs = list(open_corpus(tfds_data(prepared)).pairs('train'))
    assert list(open_corpus(tfds_data(prepared, name='tiny_translate/fr-en:1.0.0')).pairs('train')) == pairs
    monkeypatch.setenv('HOME', str(prepared.parent))
    assert list(open_corpus(tfds_data(f'~/{prepared.name}')).pairs('train')) == pairs


def test_tfds_subsplits(prepared):
    parts = [list(open_corpus(tfds_data(prepared, train=part)).pairs('train'))
             for part in ('train[:50%]', 'train[50%:]', 'train[2:4]')]
    assert [len(part) for part in parts] == [5, 5, 2]
    whole = open_corpus(tfds_data(prepared))
    assert parts[0] + parts[1] == list(whole.pairs('train'))
    fingerprints = [whole.fingerprint('train'), whole.fingerprint('test'),
                    open_corpus(tfds_data(prepared, train='train[:50%]')).fingerprint('train'),
                    open_corpus(tfds_data(prepared, source_lang='fr', target_lang='en')).fingerprint('train')]
    assert len({json.dumps(each, sort_keys=True) for each in fingerprints}) == 4


@pytest.mark.parametrize('options, message', [
    ({'name': 'no_such/fr-en'}, r"data\.name='no_such/fr-en' cannot be opened in .*: Dataset no_such not found"),
    ({'name': 'tiny_translate/de-en'}, r"config\.data\.name='tiny_translate/de-en' cannot be opened in "),
    ({'name': 'no such'}, r"config\.data\.name='no such' cannot be opened in "),
    ({'name': 'my-space:tiny_translate/fr-en:1.0.0'}, 'TFDS would download the code of this dataset and run it'),
    ({'target_lang': 'de'}, r'tiny_translate/fr-en: the dataset has the features en, fr, but it must have en and de '),
    ({'target_lang': 'en'}, "source_lang and target_lang are both 'en', .* different features of tiny_translate/fr-en"),
    ({'train': 'training'}, r"splits\.train='training' cannot .*Unknown split 'training'.* one of \['train', 'test'\]"),
    ({'train': 'train[:5'}, r"splits\.train='train\[:5' cannot .*Error parsing split"),
    ({'name': 'wmt14_translate/de-en', 'target_lang': 'de'},
     r'wmt14_translate/de-en is not in .* TensorFlow .*tfds build wmt14_translate/de-en --file_format=array_record'),
])
def test_tfds_mistakes_are_explained(prepared, monkeypatch, options, message):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)  # no TensorFlow
    with pytest.raises(UserError, match=message) as raised:
        corpus = open_corpus(tfds_data(prepared, **options))
        corpus.fingerprint('train')
    assert '\n' not in str(raised.value)  # not TFDS's list of all datasets
    with pytest.raises(UserError):
        list(open_corpus(tfds_data(prepared, **options)).pairs('train'))


def test_tfds_damaged_file(prepared, tmp_path):
    folder = tmp_path / 'tiny_translate/fr-en/1.0.0'
    folder.mkdir(parents=True)
    for file in (prepared / 'tiny_translate/fr-en/1.0.0').iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[:2 ** 16])
    with pytest.raises(UserError, match=r"splits\.train='train' cannot be read from .*/tiny_translate/fr-en/1\.0\.0: "):
        list(open_corpus(tfds_data(tmp_path)).pairs('train'))


def test_tfds_prepares_with_tensorflow_and_keeps_stdout_clean(tmp_path, monkeypatch, capsys):
    builder = 'tensorflow_datasets.core.dataset_builder.DatasetBuilder'
    monkeypatch.setattr('importlib.util.find_spec', lambda name: object())
    monkeypatch.setattr(f'{builder}.download_and_prepare', lambda self: print('preparing', self.info.full_name))
    open_corpus(tfds_data(tmp_path, name='wmt14_translate/de-en', target_lang='de'))
    assert capsys.readouterr() == ('', 'preparing wmt14_translate/de-en/1.0.0\n')


def test_tfds_finds_the_checksums_of_its_catalogue():
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate  # noqa: F401
    # It needs importlib_resources for this, which it does not install: see pyproject.toml.
    assert tfds.builder('wmt14_translate/de-en').url_infos


def test_tfds_is_read_without_tensorflow(prepared):
    script = ('import json, sys; from ml_collections import ConfigDict; from input_pipeline.sources import open_corpus'
              f'; corpus = open_corpus(ConfigDict({tfds_data(prepared).to_dict()})); corpus.fingerprint("train"); '
              'print(len(list(corpus.pairs("train"))), "tensorflow" in sys.modules, "jax" in sys.modules)')
    done = subprocess.run([sys.executable, '-c', script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert re.fullmatch('10 False False', done.stdout.strip())


def test_a_split_for_evaluations_is_read_once_and_training_pairs_are_not_kept(monkeypatch):
    read, stores = [], []
    pairs = object.__new__(PairData)
    pairs._pairs, pairs._source = {}, types.SimpleNamespace(pairs=lambda split: read.append(split) or [('a', 'b')])
    assert [pairs.pairs(split) for split in ('validation', 'train', 'validation', 'train')] == 4 * [[('a', 'b')]]
    assert read == ['validation', 'train', 'train']
    documents = object.__new__(DocumentData)
    documents._stores, documents._source, documents._cache, documents.tokenizers = {}, None, None, {}
    monkeypatch.setattr(data_module, 'open_document_store',
                        lambda _, split, *__: stores.append(split) or object.__new__(TokenStore))
    for split in ('validation', 'test', 'validation'):
        documents.store(split)
    assert stores == ['validation', 'test']
