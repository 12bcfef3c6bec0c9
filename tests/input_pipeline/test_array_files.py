"""Folders of arrays: IDX, NPZ, names of classes, splits and groups, and messages about damaged files."""

import gzip
import pathlib
import pickle
import re
import zipfile

import numpy as np
import pytest
from PIL import Image

from configs import fashion_mnist_vit, mnist_vit
from configs.checks import check_config
from input_pipeline.array_files import read_inputs
from input_pipeline.problems import data_problems
from runtime.errors import UserError
from tests.input_pipeline.helpers import (
    CLASSES,
    INPUTS,
    SERIES,
    SPLITS,
    open_arrays,
    options,
    read,
    write_csv,
    write_npz,
)

# IDX

def write_idx(path, array):
    content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, '>u4').tobytes() + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == '.gz' else content)


@pytest.fixture
def idx(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for name, count in (('train', 12), ('t10k', 4)):
        arrays[name] = rng.integers(0, 256, (count, 5, 4), np.uint8), np.arange(count, dtype=np.uint8) % 3
        write_idx(tmp_path / f'{name}-images-idx3-ubyte', arrays[name][0])
        write_idx(tmp_path / f'{name}-labels-idx1-ubyte.gz', arrays[name][1])
    return tmp_path, arrays


def test_idx_files(idx):
    folder, arrays = idx
    for split, name, part in (('train', 'train', slice(9)), ('validation', 'train', slice(9, 12)),
                              ('test', 't10k', slice(4))):
        inputs, targets = read(folder, split)
        assert inputs.dtype == np.uint8 and targets.dtype == np.int32
        np.testing.assert_array_equal(inputs[..., 0], arrays[name][0][part])
        np.testing.assert_array_equal(targets, arrays[name][1][part])
        names = open_arrays(options(dir=str(folder), validation_share=0.25), labelled=True).names(split)
        assert names == list(map(str, range(12)[part] if name == 'train' else range(4)))


@pytest.mark.parametrize('recipe', [mnist_vit, fashion_mnist_vit])
def test_the_recipes_of_mnist_and_fashion_mnist_read_idx_files(idx, recipe):
    config = recipe.get_config()
    config.data.update(dir=str(idx[0]), validation_share=0.25)
    check_config(config)
    assert data_problems(config) == []
    data = open_arrays(config.data, labelled=True)
    assert [len(data.inputs(split)) for split in SPLITS] == [9, 3, 4]


@pytest.mark.parametrize('damage, message', [
    (lambda whole: whole[:-1],
     r'train-images-idx3-ubyte is truncated or damaged: according to its header, the shape is 12 x 5 x 4, so the file '
     r'must have 256 bytes, but it has 255\. Download the file again'),
    (lambda whole: whole + b'x', 'is truncated or damaged: .* must have 256 bytes, but it has 257'),
    (lambda whole: b'', 'not an IDX file of unsigned bytes with 3 axes: it begins with nothing instead of 00000803'),
    (lambda whole: b'\0\0\x0d\3' + whole[4:], 'it begins with 00000d03 instead of 00000803'),
])
def test_damaged_idx_files_are_named(idx, damage, message):
    path = idx[0] / 'train-images-idx3-ubyte'
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        read(idx[0])


@pytest.mark.parametrize('share', [0.01, 0.99])
def test_a_share_of_idx_files_that_leaves_a_split_empty_is_refused(idx, share):
    with pytest.raises(UserError, match=rf'validation_share={share}: .* has only 12 examples, so .* would be empty'):
        read(idx[0], validation_share=share)


def test_damaged_gz(idx):
    path = idx[0] / 'train-labels-idx1-ubyte.gz'
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=r'train-labels-idx1-ubyte\.gz cannot be read: '):
        read(idx[0])


def test_idx_files_that_do_not_belong_together(idx):
    (idx[0] / 't10k-labels-idx1-ubyte.gz').rename(idx[0] / 'train-labels-idx1-ubyte.gz')
    with pytest.raises(UserError, match='images-idx3-ubyte has 12 images, but .*labels-idx1-ubyte.gz has 4 labels'):
        read(idx[0])
    with pytest.raises(UserError, match=r't10k-labels-idx1-ubyte \(or t10k-labels-idx1-ubyte\.gz\) does not exist\. '
                                        't10k-images-idx3-ubyte needs this file with its labels$'):
        read(idx[0], 'test')


@pytest.mark.parametrize('targets, expected, outputs, classes', [
    (CLASSES, CLASSES, 4, list('0123')),
    (CLASSES.astype(np.uint8), CLASSES, 4, list('0123')),
    (np.array(list('abcd'))[CLASSES, None], CLASSES, 4, list('abcd')),
    (CLASSES / 2, CLASSES[:, None] / 2, 1, None),
    (INPUTS[:, 0], INPUTS[:, 0], 2, None),
])
def test_npz_files(tmp_path, targets, expected, outputs, classes):
    write_npz(tmp_path, inputs=INPUTS, targets=targets)
    data = open_arrays(options(dir=str(tmp_path)), labelled=bool(classes))
    assert data.inputs('test').dtype == np.float64
    assert data.targets('test').dtype == (np.int32 if classes else np.float64)
    np.testing.assert_allclose(data.inputs('test'), INPUTS, rtol=1e-6)
    np.testing.assert_allclose(data.targets('test'), expected, rtol=1e-6)
    assert data.sizes == {'outputs': outputs, 'shape': [7, 2]} and data.classes == classes


@pytest.mark.parametrize('arrays, message', [
    ({'inputs': INPUTS}, r"train\.npz has no array 'targets'\. It contains inputs\. Write it with numpy\.savez"),
    ({'inputs': INPUTS, 'targets': CLASSES.astype(object)}, r'train\.npz cannot be read: .*allow_pickle'),
    ({'inputs': INPUTS, 'targets': CLASSES[:-1]}, r'train\.npz has 10 inputs, but targets of the shape \(9,\)'),
    ({'inputs': INPUTS, 'targets': INPUTS}, r'train\.npz has 10 inputs, but targets of the shape \(10, 7, 2\)'),
    ({'inputs': INPUTS, 'targets': CLASSES - 1}, r'train\.npz: class -1 of example 0: classes must be'),
    ({'inputs': INPUTS[:, :, 0], 'targets': CLASSES}, r'train\.npz: inputs have the shape \(10, 7\)\. They must be'),
    ({'inputs': INPUTS[:0], 'targets': CLASSES[:0]}, r'train\.npz has no examples'),
    ({'inputs': np.where(INPUTS > 6, np.nan, INPUTS), 'targets': CLASSES}, r'train\.npz: inputs must be finite'),
    ({'inputs': INPUTS * 1e300, 'targets': CLASSES}, r'train\.npz: inputs must be finite .*example 0 .*float64'),
    ({'inputs': INPUTS * np.longdouble('1e4000'), 'targets': CLASSES}, r'train\.npz: inputs must be finite numbers'),
    ({'inputs': INPUTS, 'targets': CLASSES * 1e300}, r'train\.npz: targets must be finite numbers .*float64'),
    ({'inputs': INPUTS, 'targets': np.float64(3)}, r'train\.npz has 10 inputs, but targets of the shape \(\)'),
    ({'inputs': INPUTS, 'targets': np.zeros((10, 0))}, r'train\.npz has 10 inputs, but targets of the shape \(10, 0\)'),
])
def test_npz_mistakes(tmp_path, arrays, message):
    write_npz(tmp_path, **arrays)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self._path,)


def test_an_archive_without_read_permission_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, 'Permission denied', str(path))
    np.savez(tmp_path / 'x.npz', inputs=INPUTS)
    monkeypatch.setattr('input_pipeline.text_files.open', refuse, raising=False)
    with pytest.raises(UserError, match=r'x\.npz cannot be read: .*Permission denied'):
        read_inputs(str(tmp_path / 'x.npz'), SERIES)


def test_inputs_to_predict_from(tmp_path):
    for inputs in INPUTS, INPUTS[:0], INPUTS.astype(np.uint8), np.asfortranarray(INPUTS):
        np.savez_compressed(tmp_path / 'x.npz', inputs=inputs, others=['are', 'not', 'read'])
        names, found = read_inputs(str(tmp_path / 'x.npz'), SERIES)
        np.testing.assert_array_equal(found, inputs)
        assert names == [str(number) for number in range(len(inputs))]


@pytest.mark.parametrize('inputs, message', [
    (INPUTS.astype(object), r'x\.npz cannot be read: .*allow_pickle'),
    (INPUTS.astype(str), r'x\.npz: inputs must be finite numbers, .*U'),
    (INPUTS.astype(complex), r'x\.npz: inputs must be finite numbers, .*complex'),
    (INPUTS * np.inf, r'x\.npz: inputs must be finite numbers'),
    (INPUTS * 1e300, r'x\.npz: inputs must be finite numbers .*example 0 .*float64'),
    (INPUTS * np.longdouble('1e4000'), r'x\.npz: inputs must be finite numbers'),
    (INPUTS[0], r'x\.npz: inputs have the shape \(7, 2\), but the model reads \[n, 7, 2\]'),
    (INPUTS[:, :6], r'x\.npz: inputs have the shape \(10, 6, 2\)'),
    (np.float32(1), r'x\.npz: inputs have the shape \(\)'),
])
def test_inputs_that_do_not_suit_the_model_are_refused(tmp_path, inputs, message):
    np.savez(tmp_path / 'x.npz', inputs=inputs)
    with pytest.raises(UserError, match=message):
        read_inputs(str(tmp_path / 'x.npz'), SERIES)


@pytest.mark.parametrize('name, content', [
    ('x.npz', None), ('inputs', None), ('inputs.npy', None), ('inputs.npy', b'text'), ('inputs.npy', b''),
    ('inputs.npy', b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60, 7, 2)}   \n"),
    ('inputs.npy', b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 7, 2)}\n"),
    *(('inputs.npy', b'\x93NUMPY\x01\x00\x46\x00' + header.ljust(69) + b'\n') for header in (
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (10**23, 3, 3)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 3)}" % 10 ** 17,
        b"{'descr': '<f4', 'fortran_order': False, 'shape': ((9, 7, 2)}",
        b"{'descr': '<f4, 'fortran_order': False, 'shape': (9, 7, 2)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (09L, 7, 2)}",
        b"{'descr': (), 'fortran_order': False, 'shape': (9, 7, 2)}",
        b"{1: 'f4', 'fortran_order': False, 'shape': (9, 7, 2)}")),
    ('inputs.npy', b"\x93NUMPY\x01\x00\x46\x00{'descr': '|O', 'fortran_order': False, 'shape': (1, 7, 2)}".ljust(
        80) + pickle.dumps(np.zeros((1, 7, 2), object)))])
def test_an_archive_of_something_else_runs_nothing(tmp_path, name, content):
    canary = tmp_path / 'canary'
    content = content if content is not None else pickle.dumps(Canary(canary))
    if name == 'x.npz':
        (tmp_path / name).write_bytes(content)
    else:
        with zipfile.ZipFile(tmp_path / 'x.npz', 'w') as archive:
            archive.writestr(name, content)
    with pytest.raises(UserError, match=r'x\.npz'):
        read_inputs(str(tmp_path / 'x.npz'), SERIES)
    assert not canary.exists()


def test_damaged_lzma(tmp_path):
    with zipfile.ZipFile(tmp_path / 'x.npz', 'w', zipfile.ZIP_LZMA) as archive, archive.open('inputs.npy', 'w') as file:
        np.save(file, INPUTS)
    np.testing.assert_array_equal(read_inputs(str(tmp_path / 'x.npz'), SERIES)[1], INPUTS)
    whole = (tmp_path / 'x.npz').read_bytes()
    (tmp_path / 'x.npz').write_bytes(whole[:200] + bytes(40) + whole[240:])
    with pytest.raises(UserError, match=r'x\.npz cannot be read: .*\. Write the file again'):
        read_inputs(str(tmp_path / 'x.npz'), SERIES)


def test_damaged_npz(tmp_path):
    write_npz(tmp_path, inputs=INPUTS, targets=CLASSES)
    path = tmp_path / 'train.npz'
    whole = path.read_bytes()
    for content in (whole[:200], b'', whole[:150] + bytes(40) + whole[190:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r'train\.npz '):
            read(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match='has no data set'):
        read(tmp_path)


# Names of classes and of values

def write_names(folder, kind, names, split='train'):
    if kind == 'npz':
        np.savez(folder / f'{split}.npz', inputs=INPUTS[:len(names)], targets=np.array(list(names)))
    elif kind == 'csv':
        write_csv(folder, 'series,x,target', *(f'{number},{number},{name}' for number, name in enumerate(names)),
                  split=split)
    else:
        for number, name in enumerate(names):
            path = folder / split / name / f'{number}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 6, 3), number, np.uint8)).save(path)


@pytest.mark.parametrize('kind', ['npz', 'csv', 'images'])
def test_names_of_classes_are_kept(tmp_path, kind):
    for split in SPLITS:
        write_names(tmp_path, kind, ['élan', 'dog'] if split == 'test' else ['dog', 'a cat', 'élan', 'dog'], split)
    data = open_arrays(options(dir=str(tmp_path)), labelled=True)
    assert data.classes == ['a cat', 'dog', 'élan'] and data.sizes['outputs'] == 3
    expected = ([0, 1, 1, 2], [1, 2]) if kind == 'images' else ([1, 0, 2, 1], [2, 1])  # images in the order of folders
    assert (data.targets('train').tolist(), data.targets('test').tolist()) == expected
    if kind == 'images':
        assert data.inputs('train')[:, 0, 0, 0].tolist() == [1, 0, 3, 2] and data.inputs('test').shape == (2, 4, 6, 3)


@pytest.mark.parametrize('kind', ['npz', 'csv', 'images'])
def test_a_class_that_is_not_in_the_training_split_is_named_with_its_place(tmp_path, kind):
    write_names(tmp_path, kind, ['dog', 'cat', 'cat'])
    write_names(tmp_path, kind, ['dog', 'cta'], 'test')
    place = {'npz': r'example 1', 'csv': r'example 1 \(test\.csv:3\)', 'images': r'example 0 \(cta/1\.png\)'}[kind]
    with pytest.raises(UserError, match=f"class 'cta' of {place} is not in the training split.*did you mean cat"):
        read(tmp_path, 'test', validation_share=0.0)


@pytest.mark.parametrize('train, test, message', [
    (['cat', 'dog'], [0, 1], "the classes are numbers, such as 0, but in the training split they are names, such"),
    ([0, 1], ['cat', 'dog'], "the classes are names, such as 'cat', but in the training split they are numbers"),
    (['cat', ' '], ['cat'], "the class of example 1 is ' '. The name of a class must be one line of text"),
    (['cat', 'a\nb'], ['cat'], 'The name of a class must be one line of text'),
])
def test_classes_are_names_or_numbers(tmp_path, train, test, message):
    write_names(tmp_path, 'npz', train)
    write_names(tmp_path, 'npz', test, 'test')
    with pytest.raises(UserError, match=message):
        read(tmp_path, 'test', validation_share=0.0)


def test_names_are_no_values(tmp_path):
    write_names(tmp_path, 'csv', ['cat', 'dog'])
    with pytest.raises(UserError, match=r"target 'cat' of example 0 \(train\.csv:2\) is not a number\. Use task=cl"):
        read(tmp_path, labelled=False)


def test_several_values_of_a_table_have_names(tmp_path):
    write_csv(tmp_path, 'series,x,target_height,target_width', 'a,1,2,3', 'b,4,5,6')
    data = open_arrays(options(dir=str(tmp_path)), labelled=False)
    np.testing.assert_array_equal(data.targets('train'), [[2, 3], [5, 6]])
    assert data.form.targets == ('height', 'width') and data.form.channels == ('x',)


def test_a_single_value_of_a_table_may_have_a_name(tmp_path):
    write_csv(tmp_path, 'series,x,target_height', 'a,1,2', 'b,4,5')
    data = open_arrays(options(dir=str(tmp_path)), labelled=False)
    np.testing.assert_array_equal(data.targets('train'), [[2], [5]])
    assert data.form.targets == ('height',) and data.form.channels == ('x',)


# Names of the splits

@pytest.mark.parametrize('kind', ['npz', 'csv', 'images'])
def test_the_names_of_the_splits_are_used(tmp_path, kind):
    for split, names in (('fit', 'aab'), ('dev', 'abab')):
        write_names(tmp_path, kind, names, split)
    sets = options(dir=str(tmp_path), splits={'train': 'fit', 'validation': 'dev', 'test': 'dev'})
    data = open_arrays(sets, labelled=True)
    assert [len(data.targets(split)) for split in SPLITS] == [3, 4, 4] and not data.parts.names


@pytest.mark.parametrize('kind', ['npz', 'csv', 'images'])
@pytest.mark.parametrize('split, name', [('train', 'nosuch'), ('train', 'train[:90%]'), ('validation', 'dev'),
                                         ('test', 'a,b')])
def test_a_split_without_files_is_refused_with_its_option(tmp_path, kind, split, name):
    write_names(tmp_path, kind, 'aabbab')
    names = {name: name for name in SPLITS} | {split: name}
    with pytest.raises(UserError, match=re.escape(f'splits.{split}') + '|' + re.escape(name)):
        open_arrays(options(dir=str(tmp_path), splits=names), labelled=True).inputs(split)


def test_a_test_split_may_be_missing_if_there_is_validation_data(tmp_path):
    for split in 'train', 'validation':
        write_names(tmp_path, 'npz', 'aabb', split)
    data = open_arrays(options(dir=str(tmp_path)), labelled=True)
    assert data.fingerprint('test') == {'source': 'arrays', 'files': []}
    with pytest.raises(UserError, match=r'test\.npz does not exist'):
        data.targets('test')


def test_names_of_idx_files(idx):
    names = {'train': 'train', 'validation': 't10k', 'test': 'test'}
    inputs, _ = read(idx[0], 'validation', splits=names)
    np.testing.assert_array_equal(inputs[..., 0], idx[1]['t10k'][0])


# Groups

@pytest.mark.parametrize('kind', ['npz', 'npz of bytes', 'csv'])
def test_a_group_is_in_one_split(tmp_path, kind):
    groups = [f'élève {number % 10}' for number in range(40)]
    if kind != 'csv':
        inputs = np.random.default_rng(1).normal(size=(40, 5, 1))
        np.savez(tmp_path / 'train.npz', inputs=inputs, targets=np.arange(40) % 2,
                 groups=groups if kind == 'npz' else [group.encode() for group in groups])
    else:
        write_csv(tmp_path, 'series,group,x,target', *(f'{number},{group},{number},{number % 2}'
                                                      for number, group in enumerate(groups)), split='train')
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.2), labelled=True)
    found = {split: set(data.groups(split)) for split in SPLITS}
    assert [len(found[split]) for split in SPLITS] == [6, 2, 2]
    assert set.union(*found.values()) == set(groups)
    assert sum(len(data.targets(split)) for split in SPLITS) == 40


@pytest.mark.parametrize('groups', [
    [1, 2, np.nan], ['a', 'b', ' '], [b'a', b'b', b''], np.array(['2024', '2025', 'NaT'], 'M8[s]')])
def test_a_missing_group_is_an_error(tmp_path, groups):
    np.savez(tmp_path / 'train.npz', inputs=INPUTS[:3], targets=CLASSES[:3], groups=groups)
    with pytest.raises(UserError, match=r'train\.npz: the group of example 2 is empty or NaN\. Each input needs'):
        read(tmp_path)


def test_groups_are_one_for_each_example(tmp_path):
    for inputs, shape in (INPUTS, r'\(10, 7, 2\)'), (np.float64(3), r'\(\)'):
        np.savez(tmp_path / 'train.npz', inputs=inputs, targets=CLASSES, groups=np.arange(9))
        with pytest.raises(UserError, match=rf'train\.npz: groups have the shape \(9,\), but inputs have .* {shape}\.'):
            read(tmp_path)
    write_csv(tmp_path, 'series,group,x,target', 'a,p,1,0', 'a,q,2,0')
    (tmp_path / 'train.npz').unlink()
    with pytest.raises(UserError, match=r"train\.csv:3: group is 'q', but it is 'p' at line 2"):
        read(tmp_path)
