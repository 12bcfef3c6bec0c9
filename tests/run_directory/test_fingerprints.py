"""Data that is compared with the data on which a run was trained."""

import json
import re
from unittest import mock

import numpy as np
import pytest

from configs import base
from input_pipeline.data import Data, open_data
from input_pipeline.documents import open_documents
from run_directory.fingerprints import changed_data
from tests.input_pipeline.helpers import SPLITS, save_image
from tests.tiny_run import tiny_config


@pytest.mark.parametrize('kind, changed', [('line', []), ('file', ['validation: its text'])])
def test_files_of_the_test_split_change_held_out_validation_data_only_in_a_single_document(kind, changed, tmp_path):
    (tmp_path / 'train.txt').write_text('one\ntwo\nthree\nfour\n')
    (tmp_path / 'data').mkdir()
    options = base.get_config().data
    options.update(source='files', dir=str(tmp_path), documents=kind)
    (tmp_path / 'data' / 'fingerprints.json').write_text(json.dumps(
        {'validation': open_documents(options).fingerprint('validation')}))
    (tmp_path / 'test.txt').write_text('five\n')
    data = mock.Mock(Data, fingerprint=open_documents(options).fingerprint)
    assert changed_data(tmp_path, data, ['validation']) == changed


def test_the_data_of_a_renamed_folder_is_unchanged(tmp_path, cache):
    """If the folders of the classes are the training data, the fingerprints contain the name of their folder."""
    def changed(folder):
        data = open_data(tiny_config(cache, data__source='files', data__name='', data__dir=str(folder)))
        if not (tmp_path / 'run').exists():
            (tmp_path / 'run' / 'data').mkdir(parents=True)
            (tmp_path / 'run' / 'data' / 'fingerprints.json').write_text(json.dumps(
                {split: data.fingerprint(split) for split in SPLITS}))
        return changed_data(tmp_path / 'run', data, SPLITS)

    for number in range(24):
        save_image(tmp_path / 'old' / 'ab'[number % 2] / f'{number}.png', np.full((8, 8), number, np.uint8))
    assert changed(tmp_path / 'old') == []
    (tmp_path / 'old').rename(tmp_path / 'new')
    assert changed(tmp_path / 'new') == []
    save_image(tmp_path / 'new' / 'a' / '0.png', np.full((8, 8), 99, np.uint8))
    messages = changed(tmp_path / 'new')
    assert messages and all(re.match(r'(\w+): new \(\1, ', message) for message in messages)


@pytest.mark.parametrize('saved, current, message', [
    ({'a': '1', 'train/.git/config': '2'}, {'a': '1'}, 'train: train/.git/config (no longer read)'),
    ({'a': '1', 'b': '2', 'c': '3'}, {'a': '4', 'd': '2'}, 'train: a, c (no longer read)'),  # b has a new name
    ({'a': '1', 'b': '2'}, {'b': '2', 'a': '1'}, 'train: its text'),  # another order
    ({'a': '1', **{f'.git/{number}': f'.{number}' for number in range(14)}}, {'a': '1'},
     f'train: {", ".join(f".git/{number} (no longer read)" for number in range(12))} and 2 more')])
def test_files_that_are_no_longer_read_are_named(saved, current, message, tmp_path):
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'fingerprints.json').write_text(json.dumps({'train': {'files': [*saved.items()]}}))
    data = mock.Mock(Data, fingerprint=lambda split: {'files': [*current.items()]})
    assert changed_data(tmp_path, data, ['train']) == [message]
