"""Problems of the data: all problems are reported together before any work; valid data causes no message."""

import gzip
import re

import numpy as np
import pytest

from configs import base
from configs.checks import check_config
from input_pipeline import problems
from input_pipeline.data import open_data
from input_pipeline.problems import data_problems
from runtime.errors import UserError

LINES = [f'number {number}' for number in range(60)]
OTHER = ['another mistake']
ASKED = ['data.tokenizer.vocab_size']


def config_of(folder, tmp_path, **changes):
    config = base.get_config()
    config.update_from_flattened_dict({
        'cache_dir': str(tmp_path / 'cache'), 'data.source': 'files', 'data.dir': str(folder), 'data.max_length': 24,
        'data.tokenizer.vocab_size': 280, 'batch.tokens': 512,
        **{key.replace('__', '.'): value for key, value in changes.items()}})
    return config


def language_config(folder, tmp_path, **changes):
    return config_of(folder, tmp_path, **{'task': 'language_model', 'model__kind': 'language_model'} | changes)


def array_config(folder, tmp_path, task='classification', **changes):
    return config_of(folder, tmp_path, **{'task': task, 'model__kind': 'patches'} | changes)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / 'data'
    path.mkdir()
    return path


def write(path, lines):
    content = ''.join(f'{line}\n' for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == '.gz' else content)


def write_pairs(folder, split='train', lines=LINES):
    write(folder / f'{split}.en', lines)
    write(folder / f'{split}.fr', lines)


def test_correct_data_has_no_problems_and_no_tokenizer_is_learned(folder, tmp_path):
    write_pairs(folder)
    write(folder / 'train.txt', LINES)
    np.savez(folder / 'train.npz', inputs=np.random.default_rng(0).normal(size=(20, 4, 1)), targets=np.arange(20) % 2)
    for make in config_of, language_config, array_config:
        assert data_problems(make(folder, tmp_path)) == []
    assert data_problems(base.get_config(), OTHER) == []
    assert not (tmp_path / 'cache').exists()


def test_all_problems_are_reported_together(folder, tmp_path):
    write_pairs(folder)
    (folder / 'train.fr').unlink()
    write(folder / 'validation.tsv', ['one\tun', 'two'])
    write(folder / 'test.tsv.gz', [])
    found = data_problems(config_of(folder, tmp_path))
    assert len(found) == 3
    assert 'train.fr (or train.fr.gz) does not exist' in found[0]
    assert 'validation.tsv:2: 1 columns instead of 2' in found[1]
    assert 'the test split has no text' in found[2] and 'test.tsv.gz' in found[2]


@pytest.mark.parametrize('make', [config_of, language_config])
def test_a_vocabulary_is_tried_where_something_else_is_wrong(folder, tmp_path, make):
    write_pairs(folder)
    write(folder / 'train.txt', LINES)
    large = make(folder, tmp_path, data__tokenizer__vocab_size=9000)
    message, = data_problems(large, OTHER, ASKED)
    assert 'config.data.tokenizer.vocab_size=9000: too large for this text. Use at most' in message
    assert data_problems(large, OTHER) == []  # a recipe's size is lowered
    assert data_problems(make(folder, tmp_path), OTHER) == []
    for name in 'validation.en', 'validation.fr', 'validation.txt':
        write(folder / name, [])
    assert ['no text' in found for found in data_problems(large, (), ASKED)] == [True, False]
    with pytest.raises(UserError, match='vocab_size=9000: too large'):  # the message of the training
        open_data(large, asked=ASKED)


@pytest.mark.parametrize('changes', [
    {'data__tokenizer__kind': 'tokenizers'}, {'train__teacher': 'runs/a'}, {'train__init_from': 'runs/a'}])
@pytest.mark.parametrize('make', [config_of, language_config])
def test_no_vocabulary_is_tried_where_the_vocabulary_of_another_run_is_used(folder, tmp_path, make, changes):
    write_pairs(folder)
    write(folder / 'train.txt', LINES)
    changes = {'data__tokenizer__vocab_size': 9000} | changes
    assert data_problems(make(folder, tmp_path, **changes), OTHER, ASKED) == []
    assert not (tmp_path / 'cache').exists()


@pytest.mark.parametrize('changes', [
    {'data__tokenizer__vocab_size': 100}, {'data__tokenizer__kind': 'word'}, {'data__tokenizer__normalization': 'nfd'},
    {'data__source': 'csv'}, {'data__dir': ''}, {'task': 'parsing'}, {'data__documents': 'page'},
    {'data__validation_share': -1.0}, {'data__validation_share': 7.0}])
def test_configs_that_fail_their_own_check_do_not_break_the_check_of_the_data(folder, tmp_path, changes):
    write_pairs(folder)
    write(folder / 'train.txt', LINES)
    for make in config_of, language_config, array_config:
        config = make(folder, tmp_path, **changes)
        with pytest.raises(UserError):
            check_config(config)
        data_problems(config, OTHER)


def test_a_file_that_the_task_does_not_use_does_not_stand_for_the_current_folder(tmp_path):
    assert data_problems(config_of('', tmp_path, data__file='x.txt'), OTHER) == []


def test_of_large_files_the_beginning_is_looked_at(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(problems, 'SMALL', 100)
    write(folder / 'train.tsv', [*(f'{line}\t{line}' for line in LINES * 20), 'alone'])
    assert data_problems(config_of(folder, tmp_path), OTHER) == []
    write(folder / 'train.tsv', ['alone', *(f'{line}\t{line}' for line in LINES)])
    message, = data_problems(config_of(folder, tmp_path))
    assert 'train.tsv:1: 1 columns instead of 2' in message


@pytest.mark.parametrize('split', ['train', 'validation', 'test'])
@pytest.mark.parametrize('content', [[], ['', '  ']])
def test_an_empty_split_is_reported_in_every_task(folder, tmp_path, split, content):
    for name in ('train', 'validation', 'test'):
        write_pairs(folder, name, content if name == split else LINES)
        write(folder / f'{name}.txt', content if name == split else LINES)
        count = 0 if name == split else 20
        np.savez(folder / f'{name}.npz', inputs=np.ones((count, 4, 1)), targets=np.arange(count) % 2)
    message, = data_problems(config_of(folder, tmp_path))
    assert f'the {split} split has no text' in message
    for kind in ('file', 'line', 'blank_line'):
        message, = data_problems(language_config(folder, tmp_path, data__documents=kind))
        assert f'the {split} split has no text' in message
    message, = data_problems(array_config(folder, tmp_path))
    assert f'{split}.npz has no examples' in message
    (folder / f'{split}.npz').unlink()
    for name in ('train', 'validation', 'test'):
        (folder / f'{name}.npz').unlink(missing_ok=True)
        write(folder / f'{name}.csv', ['series,x,target', *([] if name == split else ['a,1,0', 'b,2,1'])])
    message, = data_problems(array_config(folder, tmp_path))
    assert f'{split}.csv has a header but no rows' in message


@pytest.mark.parametrize('kind', ['file', 'line', 'blank_line'])
@pytest.mark.parametrize('content', ['', ' \n\n'])
def test_a_language_model_of_an_empty_file_names_the_file_once(tmp_path, kind, content):
    path = tmp_path / 'train.txt'
    path.write_text(content)
    message, = data_problems(language_config(
        tmp_path, tmp_path, data__dir='', data__file=str(path), data__documents=kind))
    assert message == f'config.data.file={str(path)!r} is empty, or has only white space. Use a file with text'
    messages = data_problems(language_config(tmp_path, tmp_path, data__documents=kind))
    if kind == 'file':
        assert messages == [f'{path} is empty, or has only white space. Use a file with text']
    for message in messages:
        assert re.search(r'. Use (a file|files) with', message) and str(path) in message and '{' not in message


def test_a_text_that_is_too_short_for_the_splits_names_its_file(tmp_path):
    (tmp_path / 'x.txt').write_text('x')
    messages = data_problems(language_config(tmp_path, tmp_path, data__dir='', data__file=str(tmp_path / 'x.txt')))
    assert messages[0] == (f'the train split has no text. The split was read from {tmp_path}/x.txt. Use files with '
                           'more text')


@pytest.mark.parametrize('content', [[], ['', '  ']])
def test_an_empty_test_split_is_an_error_where_it_is_scored(folder, tmp_path, content):
    """As decode.py --split=test meets it, after a training that it did not trouble."""
    for name in ('train', 'validation'):
        write_pairs(folder, name)
    write_pairs(folder, 'test', content)
    data = open_data(config_of(folder, tmp_path))
    assert len(data.pairs('train')) == len(LINES)
    with pytest.raises(UserError, match=r'the test split has no text\. The split was read from .*test\.en'):
        data.pairs('test')


@pytest.mark.parametrize('make', [config_of, language_config, array_config])
def test_a_folder_that_is_not_there(tmp_path, make):
    message, = data_problems(make(tmp_path / 'nowhere', tmp_path), OTHER)
    assert 'nowhere' in message and 'is not a folder' in message


def test_a_test_split_may_be_missing_where_there_is_validation_data(folder, tmp_path):
    for split in ('train', 'validation'):
        write_pairs(folder, split)
        write(folder / f'{split}.txt', LINES)
        np.savez(folder / f'{split}.npz', inputs=np.ones((20, 4, 1)), targets=np.arange(20) % 2)
    for make in config_of, language_config, array_config:
        assert data_problems(make(folder, tmp_path)) == []


@pytest.mark.parametrize('make, name', [(config_of, 'test.fr'), (language_config, 'test.txt'), (array_config, 'test')])
def test_a_broken_link_of_the_test_split_is_a_problem(folder, tmp_path, make, name):
    for split in ('train', 'validation'):
        write_pairs(folder, split)
        write(folder / f'{split}.txt', LINES)
        np.savez(folder / f'{split}.npz', inputs=np.ones((20, 4, 1)), targets=np.arange(20) % 2)
    (folder / name).symlink_to(tmp_path / 'nowhere')
    message, = data_problems(make(folder, tmp_path))
    assert f'/{name} is a broken symbolic link' in message


@pytest.mark.parametrize('small', [True, False])
@pytest.mark.parametrize('make', [config_of, language_config, array_config])
def test_a_test_split_on_which_the_model_will_be_scored_must_exist(folder, tmp_path, monkeypatch, make, small):
    for split in ('train', 'validation'):
        write_pairs(folder, split)
        write(folder / f'{split}.txt', LINES)
        np.savez(folder / f'{split}.npz', inputs=np.ones((20, 4, 1)), targets=np.arange(20) % 2)
    monkeypatch.setattr(problems, 'SMALL', problems.SMALL if small else 0)
    config = make(folder, tmp_path)
    assert [data_problems(config, scored=split) for split in ('', 'train', 'validation')] == [[], [], []]
    message, = data_problems(config, scored='test')
    assert re.search('test.*(does not exist|must have)', message)


def test_problems_of_arrays_are_reported_together(folder, tmp_path):
    for split, values in (('train', np.arange(20) % 3), ('validation', np.full(20, 7)), ('test', np.full(20, 0.5))):
        np.savez(folder / f'{split}.npz', inputs=np.ones((20, 4, 1)), targets=values)
    found = data_problems(array_config(folder, tmp_path))
    assert len(found) == 2 and 'example 0 has class 7' in found[0] and 'class 0.5 of example 0' in found[1]
    assert data_problems(array_config(folder, tmp_path, task='regression')) == []
    np.savez(folder / 'train.npz', inputs=np.ones((20, 4)), targets=np.arange(20) % 3)
    np.savez(folder / 'validation.npz', inputs=np.ones((20, 4, 1)), targets=np.arange(20) % 3)
    found = data_problems(array_config(folder, tmp_path))
    assert len(found) == 2 and 'train.npz: inputs have the shape (20, 4)' in found[0] and 'test.npz' in found[1]


@pytest.mark.parametrize('patch, messages', [
    (4, []), (0, []),
    (5, ['example 0 (validation.csv:2) has the shape (11, 1), but the model reads series of at most 10 steps with 1 '
         'channels. Shorten the series, or add a longer training series'])])
def test_series_may_be_longer_than_the_training_series_up_to_a_whole_patch(folder, tmp_path, patch, messages):
    for split, lengths in (('train', (10, 7)), ('validation', (11, 6))):
        rows = [f'{series},{step},{series}' for series, length in enumerate(lengths) for step in range(length)]
        write(folder / f'{split}.csv', ['series,x,target', *rows])
    config = array_config(folder, tmp_path, model__patches__patch=patch)
    assert [message.partition('inputs: ')[2] for message in data_problems(config, OTHER)] == messages
    if patch == 4:
        assert open_data(config).plan('validation').batch(0)['inputs']['inputs'].shape[1:] == (12, 1)
