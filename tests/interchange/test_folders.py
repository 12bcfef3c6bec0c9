"""Folders of other formats: round trips, complete or absent, and models that give NaN. Needs no other library."""

import errno
import os

import jax
import numpy as np
import pytest

pytest.importorskip('safetensors', reason="it is in the extra 'interchange', and is not installed here")

import safetensors.numpy

import inference
from inference.options import SearchOptions
from interchange import export as export_module
from interchange.export import export
from interchange.folders import read_models
from runtime.errors import UserError
from tests.bad_inputs.imports import with_arrays
from tests.interchange.small_models import LINES, write_small
from training.imported import import_weights

GREEDY = SearchOptions(method='greedy', extra_length=3)


@pytest.mark.parametrize('name', ['marian', 'marian of two vocabularies'])
def test_a_marian_export_of_a_run_opens_again_and_is_the_same(name, tmp_path):
    trained = write_small(name, tmp_path / 'model')
    run = inference.load(tmp_path / 'model')
    assert run.model.tokenizers['target'].absent == ()
    for side, tokenizer in trained.tokenizers.items():
        assert run.model.tokenizers[side].encode(LINES[0]) == tokenizer.encode(LINES[0])
    expected = jax.tree_util.tree_leaves_with_path(trained.params)
    again = dict(jax.tree_util.tree_leaves_with_path(run.model.params))
    for path, leaf in expected:
        np.testing.assert_array_equal(again[path], leaf)


@pytest.mark.parametrize('other', [0.0, 1.0])
def test_a_copy_of_tied_embeddings_is_accepted_only_if_it_is_equal(other, tmp_path):
    trained = write_small('marian', tmp_path / 'model')
    path = tmp_path / 'model' / 'model.safetensors'
    table = safetensors.numpy.load_file(path)['model.shared.weight']
    path.write_bytes(with_arrays(**{'lm_head.weight': lambda _: table + np.float32(other)})(path.read_bytes()))
    if other:
        with pytest.raises(UserError, match='lm_head.weight and model.shared.weight differ'):
            read_models([tmp_path / 'model'], 'best')
    else:
        read, = jax.tree.leaves(read_models([tmp_path / 'model'], 'best').params['target_embedding'])
        np.testing.assert_array_equal(read, *jax.tree.leaves(trained.params['target_embedding']))


def test_an_export_inside_a_run_is_refused(tmp_path):
    write_small('own', tmp_path / 'run')
    with pytest.raises(UserError, match='is inside .*run'):
        export(tmp_path / 'run', tmp_path / 'run' / 'data' / 'x', 'safetensors')
    assert not (tmp_path / 'run' / 'data' / 'x').exists()


def test_a_full_disk_leaves_nothing_of_an_export(tmp_path, monkeypatch):
    def full(trained, folder):
        (folder / 'model.bin').write_bytes(b'truncated')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_small('own', tmp_path / 'run')
    monkeypatch.setitem(export_module.FORMATS, 'safetensors', full)
    with pytest.raises(UserError, match=r'a/b cannot be written: No space left on device \(model.bin\)'):
        export(tmp_path / 'run', tmp_path / 'a' / 'b', 'safetensors')
    assert [path.name for path in tmp_path.iterdir()] == ['run']


def test_weights_of_nan_are_imported_only_when_asked_for_and_a_search_names_the_run(tmp_path):
    write_small('gpt2', tmp_path / 'model')
    path = tmp_path / 'model' / 'model.safetensors'
    path.write_bytes(with_arrays(wte__weight=lambda array: array * np.float32('nan'))(path.read_bytes()))
    with pytest.raises(UserError, match='wte.weight contains NaN or infinity.*--allow_nonfinite'):
        import_weights(tmp_path / 'model', tmp_path / 'run')
    assert [path.name for path in tmp_path.iterdir()] == ['model']
    import_weights(tmp_path / 'model', tmp_path / 'run', allow_nonfinite=True)
    run = inference.load(tmp_path / 'run')
    for options in GREEDY, SearchOptions(beam=2, extra_length=3):
        with pytest.raises(UserError, match='/run: the search finds no output, .* parameters and logits are NaN'):
            run.generate(['the'], options)


@pytest.mark.parametrize('name, array', [('gpt2', 'ln_f__weight'), ('marian', 'model__shared__weight')])
def test_finite_weights_whose_logits_overflow_are_not_imported(name, array, tmp_path):
    write_small(name, tmp_path / 'model')
    path = tmp_path / 'model' / 'model.safetensors'
    path.write_bytes(with_arrays(**{array: lambda array: np.full_like(array, 3e38)})(path.read_bytes()))
    with pytest.raises(UserError, match='the imported model returns NaN for a line of text'):
        import_weights(tmp_path / 'model', tmp_path / 'run')
    assert [path.name for path in tmp_path.iterdir()] == ['model']
