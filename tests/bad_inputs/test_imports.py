"""Damaged folders of other formats: one message with the file and the field, no traceback, nothing left."""

import functools
import re
import shutil

import pytest

pytest.importorskip('safetensors', reason="it is in the extra 'interchange', and is not installed here")

from interchange.folders import read_models
from runtime.errors import UserError
from tests.bad_inputs.cases import place
from tests.bad_inputs.imports import ROWS
from tests.interchange.small_models import write_small


@pytest.fixture(scope='module')
def original(tmp_path_factory):
    """A function that returns the folder of a small model."""
    folder = tmp_path_factory.mktemp('originals')

    @functools.cache
    def written(name):
        write_small(name, folder / name)
        return folder / name

    return written


def changes_of(row):
    """Returns the changes of the files of a folder, {name of a file: change}."""
    _, *changes, _ = row
    return changes[0] if len(changes) == 1 else {changes[0]: changes[1]}


def marks(number, row):
    """Returns the marks of a row. Neighbours in the table differ in a value only, so most of them are slow."""
    interchange = [pytest.mark.interchange] if 'tokenizer.json' in changes_of(row) else []
    return interchange + [pytest.mark.slow] if number % 10 else interchange


@pytest.mark.parametrize('row', [
    pytest.param(row, id=f'{number}-{row[0]}', marks=marks(number, row)) for number, row in enumerate(ROWS)])
def test_a_damaged_folder_is_refused(original, row, tmp_path):
    (name, *_, expected), changes = row, changes_of(row)
    if 'tokenizer.json' in changes:
        pytest.importorskip('tokenizers', reason="it is in the extra 'interchange', and is not installed here")
    folder = tmp_path / 'model'
    shutil.copytree(original(name), folder)
    for file, change in changes.items():
        place(folder / file, change)
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(UserError) as refused:
        read_models([folder], 'best')
    for word in (expected,) if isinstance(expected, str) else expected:
        assert re.search(re.escape(word), str(refused.value)), str(refused.value)
    assert str(folder) in str(refused.value) and '\n' not in str(refused.value)
    assert sorted(tmp_path.rglob('*')) == before


def test_there_are_at_least_400_rows():
    assert len(ROWS) >= 400
