"""Splits without files are held out from the training data: duplicates together, the same in any order."""

import collections
import gzip
import json
import random
import re

import numpy as np
import pytest

from configs import base
from input_pipeline.documents import open_documents
from input_pipeline.sources import open_corpus
from input_pipeline.splits import HeldOut, Parts, key, text_key
from runtime.errors import UserError
from tests.input_pipeline.helpers import SPLITS, open_arrays, options

PAIRS = [(f'sentence {number}', f'phrase {number}') for number in range(300)]


def opened(folder, opener=open_corpus, **changes):
    data = base.get_config().data
    data.update(source='files', dir=str(folder), **changes)
    return opener(data)


def write(folder, pairs, split='train', form='tsv'):
    columns = ['\t'.join(pair) for pair in pairs], *zip(*pairs, strict=True)
    for name, lines in zip({'tsv': ['tsv'], 'gz': ['tsv.gz'], 'two': ['en', 'fr']}[form], columns[form == 'two':],
                           strict=False):
        content = ''.join(f'{line}\n' for line in lines).encode()
        (folder / f'{split}.{name}').write_bytes(gzip.compress(content) if form == 'gz' else content)


def split_of(corpus):
    """The splits that each source is in."""
    found = collections.defaultdict(set)
    for split in SPLITS:
        for source, _ in corpus.pairs(split):
            found[source].add(split)
    return found


@pytest.mark.parametrize('form', ['tsv', 'gz', 'two'])
@pytest.mark.parametrize('count, share, each', [
    (300, 0.1, 30), (300, 0.01, 3), (12, 0.1, 1), (3, 0.1, 1), (300, 0.45, 135)])
def test_one_file_makes_three_splits(tmp_path, logged, form, count, share, each):
    write(tmp_path, PAIRS[:count], form=form)
    corpus = opened(tmp_path, validation_share=share)
    parts = {split: list(corpus.pairs(split)) for split in SPLITS}
    assert {split: len(pairs) for split, pairs in parts.items()} == {
        'train': count - 2 * each, 'validation': each, 'test': each}
    assert sorted(pair for pairs in parts.values() for pair in pairs) == sorted(PAIRS[:count])
    assert f'held out from the training data, because there are no files. {each} of {count} distinct' in logged.text
    assert f'for each split (config.data.validation_share={share})' in logged.text
    assert len({json.dumps(corpus.fingerprint(split)) for split in SPLITS}) == 3


def test_the_parts_are_the_same_in_any_order_and_doubles_stay_together(tmp_path):
    doubled = [*PAIRS, *((source, 'other') for source, _ in PAIRS), *(
        (f' {source.upper()}\u00a0', 'shouted') for source, _ in PAIRS[:99])]
    write(tmp_path, doubled)
    before = split_of(opened(tmp_path))
    assert all(len(splits) == 1 for splits in before.values())
    assert collections.Counter(*zip(*(before[source] for source, _ in PAIRS), strict=True)) == {
        'train': 240, 'validation': 30, 'test': 30}
    for source, _ in PAIRS[:99]:
        assert before[f' {source.upper()}\u00a0'] == before[source]
    random.Random(0).shuffle(doubled)
    write(tmp_path, doubled)
    assert split_of(opened(tmp_path)) == before


def test_parts_are_spread_over_the_file(tmp_path):
    write(tmp_path, PAIRS)
    places = sorted(int(source.split()[1]) for source, _ in opened(tmp_path).pairs('validation'))
    assert places[0] < 100 and places[-1] >= 200 and np.diff(places).max() > 1


@pytest.mark.parametrize('files, cut', [
    (['validation', 'test'], []), (['validation'], []), (['test'], ['validation']), ([], ['validation', 'test'])])
def test_only_splits_without_files_are_held_out(tmp_path, files, cut):
    """If there are validation files, nothing is held out, as in all earlier versions."""
    write(tmp_path, PAIRS[:100])
    for split in files:
        write(tmp_path, PAIRS[200:250], split)
    corpus = opened(tmp_path)
    assert len(list(corpus.pairs('train'))) == 100 - 10 * len(cut)
    for split in files:
        assert list(corpus.pairs(split)) == PAIRS[200:250]
        assert corpus.fingerprint(split).keys() == {'source', 'files'}
    for split in cut:
        assert len(list(corpus.pairs(split))) == 10 and corpus.fingerprint(split)['validation_share'] == 0.1
    assert corpus.fingerprint('train').get('cut_off', []) == cut


@pytest.mark.parametrize('prepare, message', [
    (lambda folder: (folder / 'validation.en').touch(), r'validation\.fr \(or validation\.fr\.gz\) does not exist'),
    (lambda folder: {'validation_share': 0.0}, r'validation\.en \(or validation\.en\.gz\) does not exist'),
    (lambda folder: {'splits': {'train': 'train', 'validation': 'vla', 'test': 'test'}}, r'vla\.en \(or .* not exist'),
])
def test_a_missing_split_that_was_requested_is_an_error(tmp_path, prepare, message):
    write(tmp_path, PAIRS)
    changes = prepare(tmp_path) or {}
    with pytest.raises(UserError, match=message):
        list(opened(tmp_path, **changes).pairs('validation'))
    assert len(list(opened(tmp_path, **changes).pairs('train'))) == 300


@pytest.mark.parametrize('pairs, share, message', [
    (PAIRS[:2], 0.1,
     r'of 2 distinct source sentences of .*train\.tsv would .* 1 are held out for each of validation and test\. '
     'Add data, or provide files for validation and test$'),
    (PAIRS[:1] * 99, 0.1, 'of 1 distinct source sentences of .* 1 are held out'),
    (PAIRS, 0.5, r'^config\.data\.validation_share=0\.5: too few of 300 distinct .* 150 .* Use a smaller share, add'),
])
def test_too_little_to_cut(tmp_path, pairs, share, message):
    write(tmp_path, pairs)
    with pytest.raises(UserError, match=message):
        list(opened(tmp_path, validation_share=share).pairs('train'))


# Broken links, and splits in two forms

def classes(data):
    return open_arrays(data, labelled=True)


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('text\n')


@pytest.mark.parametrize('opener, train, link', [
    (open_corpus, 'train.tsv', 'validation.tsv'), (open_corpus, 'train.tsv', 'validation.fr'),
    (open_corpus, 'train.tsv', 'test.en.gz'), (open_corpus, 'train.en', 'train.fr'),
    (open_documents, 'train.txt', 'validation.txt'), (open_documents, 'train/one', 'test'),
    (open_documents, 'train.txt', 'train'), (classes, 'train.csv', 'validation.csv'),
    (classes, 'train.npz', 'test.npz.gz'), (classes, 'train.npz', 'train'), (classes, 'train.csv', 'test')])
def test_a_broken_link_with_the_name_of_a_split_is_an_error(tmp_path, opener, train, link):
    """Otherwise the split would be held out from the training data, or lack a file."""
    touch(tmp_path, train)
    (tmp_path / link).symlink_to(tmp_path / 'nowhere')
    with pytest.raises(UserError, match=f'/{link} is a broken symbolic link. Repair or remove the link'):
        opened(tmp_path, opener).fingerprint('train')


def test_a_broken_link_beside_the_file_that_is_read_is_no_error(tmp_path):
    write(tmp_path, PAIRS)
    (tmp_path / 'train.tsv.gz').symlink_to(tmp_path / 'nowhere')
    assert len(list(opened(tmp_path, validation_share=0.0).pairs('train'))) == 300


@pytest.mark.parametrize('opener, files, read, unread', [
    (open_corpus, ['train.en', 'train.fr', 'train.tsv'], 'train.en', 'train.tsv'),
    (open_documents, ['train/README', 'train.txt'], 'train', 'train.txt'),
    (classes, ['train.npz', 'train.csv'], 'train.npz', 'train.csv'),
    (classes, ['train.csv', 'validation.npz'], 'train.csv', 'validation.npz'),
    (classes, ['train.csv.gz', 'validation.csv', 'test/figures/x.png'], 'train.csv.gz', 'test'),
    (classes, ['a/x.png', 'b/x.png', 'test.csv'], '', 'test.csv')])
def test_files_that_would_not_be_read_are_an_error(tmp_path, opener, files, read, unread):
    touch(tmp_path, *files)
    message = f'{tmp_path / unread} would not be read, because the data is read from {tmp_path / read}. '
    with pytest.raises(UserError, match=re.escape(message)):
        opened(tmp_path, opener).fingerprint('train')


def test_figures_and_notes_beside_the_data_are_ignored(tmp_path):
    save(tmp_path)
    touch(tmp_path, 'README.txt', 'notes/README', 'figures/a.png', 'train.md', 'validation.txt')
    assert [len(opened(tmp_path, classes).inputs(split)) for split in SPLITS] == [32, 4, 4]


# Documents

def documents(folder, **changes):
    """The documents of each split, and their fingerprints."""
    found = opened(folder, open_documents, **changes)
    return {split: list(found.documents(split)) for split in SPLITS}, {
        json.dumps(found.fingerprint(split)) for split in SPLITS}


@pytest.mark.parametrize('kind', ['line', 'blank_line'])
def test_documents_of_one_file_are_held_out(tmp_path, kind):
    texts = [f'document {number}' for number in range(100)]
    (tmp_path / 'train.txt').write_text({'line': '\n', 'blank_line': '\n\n'}[kind].join([*texts, *texts]) + '\n')
    parts, fingerprints = documents(tmp_path, documents=kind)
    assert [len(parts[split]) for split in SPLITS] == [160, 20, 20] and len(fingerprints) == 3
    assert sorted(sum(parts.values(), [])) == sorted(2 * texts)
    assert not set(parts['train']) & {*parts['validation'], *parts['test']}


def test_whole_files_of_a_folder_are_held_out(tmp_path):
    (tmp_path / 'train').mkdir()
    for number in range(20):
        (tmp_path / f'train/{number}').write_text(f'text {number}\n')
    parts, _ = documents(tmp_path)
    assert [len(parts[split]) for split in SPLITS] == [16, 2, 2]
    assert sorted(sum(parts.values(), [])) == sorted(f'text {number}\n' for number in range(20))


def test_an_empty_folder_of_a_split_is_an_error(tmp_path):
    (tmp_path / 'train.txt').write_text('one\ntwo\nthree\n')
    (tmp_path / 'validation').mkdir()
    with pytest.raises(UserError, match='for the validation split, .* must have validation.txt'):
        documents(tmp_path, documents='line')


@pytest.mark.parametrize('opener', [open_corpus, open_documents, lambda data: open_arrays(data, labelled=False)])
def test_a_name_that_no_file_system_takes_is_no_folder(opener):
    with pytest.raises(UserError, match='is not a folder'):
        opened('x' * 5000, opener)


def test_the_last_characters_of_a_single_document_are_held_out(tmp_path):
    text = ''.join(map(str, range(1000)))[:1000]
    (tmp_path / 'train.txt').write_text(text)
    parts, fingerprints = documents(tmp_path)
    assert parts == {'train': [text[:800]], 'validation': [text[800:900]], 'test': [text[900:]]}
    assert len(fingerprints) == 3
    (tmp_path / 'test.txt').write_text('other')
    assert documents(tmp_path)[0] == {'train': [text[:900]], 'validation': [text[900:]], 'test': ['other']}


# Arrays

def save(folder, split='train', count=40, first=0):
    targets = np.arange(first, first + count)
    np.savez(folder / f'{split}.npz', inputs=targets[:, None, None] * np.ones((1, 5, 2)), targets=targets % 4)


def numbers(data, split):
    """Of the examples; and that each has its own target."""
    found = data.inputs(split)[:, 0, 0].astype(int)
    np.testing.assert_array_equal(data.targets(split).ravel(), found % 4)
    return found.tolist()


@pytest.mark.parametrize('labelled', [True, False], ids=['classes', 'values'])
@pytest.mark.parametrize('kind', ['npz', 'csv'])
def test_arrays_of_one_file_make_three_splits(tmp_path, labelled, kind):
    if kind == 'npz':
        save(tmp_path)
    else:
        rows = [f'{number},{number},{number % 4}' for number in range(40) for _ in range(2)]
        (tmp_path / 'train.csv').write_text('\n'.join(['series,x,target', *rows]))
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.1), labelled)
    parts = [numbers(data, split) for split in SPLITS]
    assert [len(part) for part in parts] == [32, 4, 4] and sorted(sum(parts, [])) == list(range(40))
    name, digest = data.fingerprint('validation')['files'][0]
    assert name == f'train.{kind} (validation, validation_share=0.1)'


def test_equal_inputs_stay_together_and_no_class_is_lost_to_training(tmp_path):
    inputs = np.arange(30).repeat(2)[:, None, None] * np.ones((1, 5, 2))
    targets = np.where(np.arange(60) < 54, 0, np.arange(60) // 2 - 26)  # the classes 1, 2 and 3 have one input each
    np.savez(tmp_path / 'train.npz', inputs=inputs, targets=targets)
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.4), labelled=True)
    parts = [set(data.inputs(split)[:, 0, 0].tolist()) for split in SPLITS]
    assert [len(part) for part in parts] == [6, 12, 12] and len(set.union(*parts)) == 30
    assert set(data.targets('train').tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize('files, counts', [
    (['validation', 'test'], [40, 5, 5]), (['test'], [36, 4, 5]), (['validation'], [40, 5])])
def test_only_array_splits_without_files_are_held_out(tmp_path, files, counts):
    save(tmp_path)
    for split in files:
        save(tmp_path, split, count=5, first=100)
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.1), labelled=True)
    assert [len(numbers(data, split)) for split in SPLITS[:len(counts)]] == counts
    if 'validation' in files:
        assert data.fingerprint('train')['files'][0][0] == 'train.npz'


@pytest.mark.parametrize('training, other, warned', [
    ('train.npz', 'val.npz', True), ('train.csv', 'valid.csv', True), ('train.csv', 'dev.npz', False),
    ('train.npz', 'test.npz', False), ('train.en', 'eval.en', True), ('train.en', 'dev.pdf', False),
    ('train.txt', 'dev.txt.gz', True), ('train.txt', 'val', True), ('train/a.txt', 'val', True),
    ('train/a/1.png', 'val', True), ('train/a/1.png', 'value', False), ('a/1.png', 'val', False)])
def test_validation_data_with_another_name_is_logged(tmp_path, logged, training, other, warned):
    path, text = tmp_path / training, training.endswith('.txt')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    (tmp_path / 'train.fr').touch()
    if '.' in other:
        (tmp_path / other).touch()
    else:
        (tmp_path / other).mkdir()
    renamed = other.partition('.')[0]
    for name in ('validation', *[renamed] * warned):
        logged.clear()
        if training.endswith('.en'):
            opened(tmp_path, splits={'validation': name})
        elif text:
            opened(tmp_path, open_documents, splits={'validation': name})
        else:
            open_arrays(options(dir=str(tmp_path), splits={'train': 'train', 'validation': name, 'test': 'test'}),
                        labelled=True)
        expected = [f'{tmp_path / other} would not be read, because validation data is held out from the training '
                    f'data. If it is the validation data, set --config.data.splits.validation={renamed}']
        assert [record.message for record in logged.records] == (expected if warned and name == 'validation' else [])


def test_a_pair_with_an_empty_side_is_not_scored_with(tmp_path):
    """Wherever its hash would put it: it is for training, which leaves it out."""
    empty = [(f'empty {number}', '') for number in range(40)]
    write(tmp_path, [*PAIRS[:20], *empty])
    corpus = opened(tmp_path, validation_share=0.2)
    parts = {split: list(corpus.pairs(split)) for split in ('train', 'validation', 'test')}
    assert len(parts['validation']) == len(parts['test']) == 4
    assert all(source.strip() and target.strip() for split in ('validation', 'test') for source, target in parts[split])
    assert len(parts['train']) == 12 + 40


def test_a_held_out_source_is_in_no_pair_of_training_not_even_beside_an_empty_side(tmp_path):
    write(tmp_path, [*PAIRS[:20], *((f' {source.upper()}', ' ') for source, _ in PAIRS[:20]), ('', 'alone')])
    corpus = opened(tmp_path, validation_share=0.2)
    assert all(len(splits) == 1 for splits in split_of(corpus).values())
    sources = {split: {source.strip().casefold() for source, _ in corpus.pairs(split)} for split in SPLITS}
    assert [len(sources[split] - {''}) for split in SPLITS] == [12, 4, 4]
    assert len(list(corpus.pairs('train'))) == 2 * 12 + 1
    assert not sources['train'] & (sources['validation'] | sources['test'])


def test_the_same_text_written_in_other_characters_stays_together():
    assert text_key('Caf\u00e9  NOIR') == text_key('cafe\u0301 noir') == text_key('\uff23\uff21\uff26\u00c9 noir')
    assert text_key('cafe noir') != text_key('caf\u00e9 noir')


@pytest.mark.parametrize('names, expected', [
    (('validation', 'test'), [[10, 14, 17], [6, 13, 27]]), (('validation',), [[10, 14, 17]])])
def test_held_out_examples_are_those_of_earlier_versions(names, expected):
    """A resumed run must not train on the examples that an earlier version held out."""
    assert key(b'one') == 0x7692c3ad3540bb80 and text_key(' \uff23AF\u00c9  noir') == 0xec1259cc2e6c783e
    keys = [text_key(f'sentence {number}') for number in range(30)]
    held_out = HeldOut(Parts(names, 0.1), keys, 'sentences')
    splits = [held_out.split(value) for value in keys]
    assert [[number for number in range(30) if splits[number] == name] for name in names] == expected
