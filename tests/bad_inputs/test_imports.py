"""Damaged folders of other formats: one message with the file and the field, no traceback, nothing left."""

import re
import shutil

import pytest

pytest.importorskip('safetensors', reason="it is in the extra 'interchange', and is not installed here")

from interchange.folders import read_models
from runtime.errors import UserError
from tests.bad_inputs.cases import place
from tests.bad_inputs.imports import ROWS
from tests.interchange.small_models import POSSIBLE, write_small


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp('originals')
    for name in (*POSSIBLE, 'own'):
        write_small(name, folder / name)
    return folder


@pytest.mark.parametrize('row', ROWS, ids=[f'{number}-{row[0]}-{row[1]}' for number, row in enumerate(ROWS)])
def test_a_damaged_folder_is_refused(originals, row, tmp_path):
    name, file, change, says = row
    folder = tmp_path / 'model'
    shutil.copytree(originals / name, folder)
    place(folder / file, change)
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(UserError) as refused:
        read_models([folder], 'best')
    for word in (says,) if isinstance(says, str) else says:
        assert re.search(re.escape(word), str(refused.value)), str(refused.value)
    assert str(folder) in str(refused.value) and '\n' not in str(refused.value)
    assert sorted(tmp_path.rglob('*')) == before


def test_there_are_as_many_rows_as_we_say():
    assert len(ROWS) >= 300
