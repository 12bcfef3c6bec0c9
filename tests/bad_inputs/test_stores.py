"""Damaged files of token stores: the store is built again with a warning, and nothing else remains."""

import gzip
import itertools

import pytest

from input_pipeline.token_store import SIDES, open_store
from input_pipeline.tokenizer import ByteTokenizer
from tests.bad_inputs.cases import FIFO, FOLDER, GONE, LOOP, NULL, cut, flipped, place
from tests.input_pipeline.test_token_store import PAIRS, Listed, texts

TOKENIZERS = dict.fromkeys(SIDES, ByteTokenizer())
CHANGES = {'missing': GONE, 'a folder': FOLDER, 'a pipe': FIFO, 'a link to itself': LOOP, '/dev/null': NULL,
           'empty': b'', 'truncated': cut, 'flipped': flipped, 'compressed': gzip.compress,
           'longer': lambda content: content + b'\0', 'text': b'<!DOCTYPE html>\n', 'deep': b'[' * 100_000,
           'of another type': lambda content: b'{"a": -1e400}'}


def opened(folder):
    return texts(open_store(Listed(PAIRS), 'train', TOKENIZERS, 64, folder), TOKENIZERS)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp('store')
    opened(folder)
    store, = (folder / 'tokens').iterdir()
    return sorted(path.name for path in store.iterdir())


# Every tenth row has all kinds of damage and all files.
@pytest.mark.parametrize('number, change', [
    pytest.param(*row, marks=[pytest.mark.slow] if index % 10 else [])
    for index, row in enumerate(itertools.product(range(7), CHANGES))])
def test_a_damaged_file_of_a_store_is_built_again(number, change, files, tmp_path):
    opened(tmp_path)
    store, = (tmp_path / 'tokens').iterdir()
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob('*'))
    place(store / files[number], CHANGES[change])
    assert opened(tmp_path) == PAIRS
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob('*')) == before


def test_a_store_has_as_many_files_as_the_table(files):
    assert len(files) == 7
