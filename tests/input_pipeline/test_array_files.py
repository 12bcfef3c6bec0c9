"""Files of arrays: IDX, NPZ and CSV, and what a user is told about a damaged one."""

import gzip
import pathlib
import pickle
import zipfile

import numpy as np
import pytest

from input_pipeline.array_files import read_inputs
from input_pipeline.arrays import open_arrays
from runtime.errors import UserError
from tests.input_pipeline.helpers import CLASSES, INPUTS, SPLITS, options


def read(folder, split='train', labelled=True, **changes):
    data = open_arrays(options(dir=str(folder), **changes), labelled)
    return data.inputs(split), data.targets(split)


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


@pytest.mark.parametrize('damage, message', [
    (lambda whole: whole[:-1], r'train-images-idx3-ubyte is truncated or damaged: its header announces 12 x 5 x 4, '
                               r'so the file must have 256 bytes, but it has 255\. Download the file again'),
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
    with pytest.raises(UserError, match=rf'validation_share={share} of the 12 examples in .* leaves a split empty'):
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
    with pytest.raises(UserError, match=r't10k-labels-idx1-ubyte \(or t10k-labels-idx1-ubyte\.gz\) does not exist'):
        read(idx[0], 'test')


# NPZ

def write_npz(folder, **arrays):
    for split in SPLITS:
        np.savez(folder / f'{split}.npz', **arrays)


@pytest.mark.parametrize('targets, expected, outputs, classes', [
    (CLASSES, CLASSES, 4, list('0123')),
    (CLASSES.astype(np.uint8), CLASSES, 4, list('0123')),
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
    ({'inputs': INPUTS, 'targets': CLASSES.astype(str)}, r'train\.npz: targets must be finite numbers, .*U'),
    ({'inputs': INPUTS, 'targets': CLASSES[:-1]}, r'train\.npz: 10 inputs, but targets of shape \(9,\)'),
    ({'inputs': INPUTS, 'targets': INPUTS}, r'train\.npz: 10 inputs, but targets of shape \(10, 7, 2\)'),
    ({'inputs': INPUTS, 'targets': CLASSES - 1}, r'train\.npz: class -1 of example 0: classes must be'),
    ({'inputs': INPUTS[:, :, 0], 'targets': CLASSES}, r'train\.npz: inputs have the shape \(10, 7\)\. They must be'),
    ({'inputs': INPUTS[:0], 'targets': CLASSES[:0]}, r'train\.npz has no examples'),
    ({'inputs': np.where(INPUTS > 6, np.nan, INPUTS), 'targets': CLASSES}, r'train\.npz: inputs must be finite'),
    ({'inputs': INPUTS * 1e300, 'targets': CLASSES}, r'train\.npz: inputs must be finite numbers .*example 0 .*float64'),
    ({'inputs': INPUTS * np.longdouble('1e4000'), 'targets': CLASSES}, r'train\.npz: inputs must be finite numbers'),
    ({'inputs': INPUTS, 'targets': CLASSES * 1e300}, r'train\.npz: targets must be finite numbers .*float64'),
    ({'inputs': INPUTS, 'targets': np.float64(3)}, r'train\.npz: 10 inputs, but targets of shape \(\)'),
    ({'inputs': INPUTS, 'targets': np.zeros((10, 0))}, r'train\.npz: 10 inputs, but targets of shape \(10, 0\)'),
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


def test_inputs_to_predict_from(tmp_path):
    for inputs in INPUTS, INPUTS[:0], INPUTS.astype(np.uint8), np.asfortranarray(INPUTS):
        np.savez_compressed(tmp_path / 'x.npz', inputs=inputs, others=['are', 'not', 'read'])
        np.testing.assert_array_equal(read_inputs(str(tmp_path / 'x.npz'), (7, 2)), inputs)


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
        read_inputs(str(tmp_path / 'x.npz'), (7, 2))


@pytest.mark.parametrize('name, content', [
    ('x.npz', None), ('inputs', None), ('inputs.npy', None), ('inputs.npy', b'text'), ('inputs.npy', b''),
    ('inputs.npy', b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60, 7, 2)}   \n"),
    ('inputs.npy', b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 7, 2)}\n"),
    *(('inputs.npy', b'\x93NUMPY\x01\x00\x46\x00' + header.ljust(69) + b'\n') for header in (
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (10**23, 3, 3)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 3)}" % 10 ** 17,
        b"{'descr': '<f4', 'fortran_order': False, 'shape': ((9, 7, 2)}",
        b"{'descr': '<f4, 'fortran_order': False, 'shape': (9, 7, 2)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (09L, 7, 2)}")),
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
        read_inputs(str(tmp_path / 'x.npz'), (7, 2))
    assert not canary.exists()


def test_damaged_lzma(tmp_path):
    with zipfile.ZipFile(tmp_path / 'x.npz', 'w', zipfile.ZIP_LZMA) as archive, archive.open('inputs.npy', 'w') as file:
        np.save(file, INPUTS)
    np.testing.assert_array_equal(read_inputs(str(tmp_path / 'x.npz'), (7, 2)), INPUTS)
    whole = (tmp_path / 'x.npz').read_bytes()
    (tmp_path / 'x.npz').write_bytes(whole[:200] + bytes(40) + whole[240:])
    with pytest.raises(UserError, match=r'x\.npz cannot be read'):
        read_inputs(str(tmp_path / 'x.npz'), (7, 2))


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


# CSV

HEADER = 'series,time,x,y,target'
ROWS = ['a,0,1.5,-2,1', 'a,1,2.5,-3,1', 'b,0,1e3,0,0', 'b,1,4,5,0']


def write_csv(folder, *lines, split=None, suffix=''):
    for name in [split] if split else SPLITS:
        content = ''.join(f'{line}\n' for line in lines).encode()
        (folder / f'{name}.csv{suffix}').write_bytes(gzip.compress(content) if suffix else content)


@pytest.mark.parametrize('suffix', ['', '.gz'])
def test_csv_files(tmp_path, suffix):
    write_csv(tmp_path, HEADER, *ROWS[:2], '', *ROWS[2:], suffix=suffix)
    inputs, targets = read(tmp_path)
    np.testing.assert_array_equal(inputs, [[[1.5, -2], [2.5, -3]], [[1000, 0], [4, 5]]])
    np.testing.assert_array_equal(targets, [1, 0])
    assert inputs.dtype == np.float64 and targets.dtype == np.int32


def test_csv_channels_go_by_their_names_in_the_training_file(tmp_path):
    write_csv(tmp_path, HEADER, *ROWS)
    write_csv(tmp_path, '\ufefftarget,y,series,x', '0,1,s,2', split='test')
    with pytest.raises(UserError, match=r'test\.csv: inputs are float64 \(1, 2\), but .* \(2, 2\)'):
        read(tmp_path, 'test')
    write_csv(tmp_path, '\ufefftarget,y,series,x', '0,1,s,2', '0,3,s,4', split='test')
    np.testing.assert_array_equal(read(tmp_path, 'test')[0], [[[2, 1], [4, 3]]])


@pytest.mark.parametrize('three', ['3', '3.0', '3e0'])
def test_csv_targets_are_what_the_task_says(tmp_path, three):
    write_csv(tmp_path, 'series,x,target', f'a,1,{three}', 'b,2,4')
    np.testing.assert_array_equal(read(tmp_path, labelled=False)[1], np.float64([[3], [4]]), strict=True)
    np.testing.assert_array_equal(read(tmp_path)[1], np.int32([3, 4]), strict=True)
    write_csv(tmp_path, 'series,x,target', 'a,1,3', 'b,2,3.5')
    with pytest.raises(UserError, match=r'train\.csv: class 3\.5 of example 1: classes must be whole numbers from 0'):
        read(tmp_path)


@pytest.mark.parametrize('lines, message', [
    ([], r'train\.csv is empty. It must begin with a header'),
    ([HEADER], r'train\.csv has a header but no rows'),
    (['series,x', 'a,1'], r"train\.csv:1: column 'target' is missing\. The columns are series, x"),
    (['id,x,target', 'a,1,1'], r"train\.csv:1: column 'series' is missing\. The columns are id, x, target"),
    (['series,time,target', 'a,1,1'], r'train\.csv:1: no column is a channel'),
    (['series,x,x,target', 'a,1,2,1'], r"train\.csv:1: column 'x' appears 2 times"),
    ([HEADER, ROWS[0], 'a,1,2.5,,1'], r"train\.csv:3: y is '', not a number"),
    ([HEADER, 'a,0,nan,1,1'], r"train\.csv:2: x is 'nan', not a number"),
    ([HEADER, ROWS[0], 'a,1,1_0,1,1'], r"train\.csv:3: x is '1_0', not a number"),
    ([HEADER, 'a,0,1,1,1_0'], r"train\.csv:2: target is '1_0', not a number"),
    ([HEADER, ROWS[0], 'a,1,1,-1e300,1'], r"train\.csv:3: y is '-1e300', which exceeds 3\.4e38"),
    ([HEADER, 'a,0,1,1,1e300'], r"train\.csv:2: target is '1e300', which exceeds 3\.4e38"),
    ([HEADER, 'a,0,1,1,cat'], r"train\.csv:2: target is 'cat', not a number"),
    ([HEADER, ROWS[0], 'a,1,2.5,3'], r'train\.csv:3: 4 columns instead of 5'),
    ([HEADER, *ROWS[:3]], r"train\.csv:4: series 'b' has 1 rows, but the first series, 'a', has 2\. All series"),
    ([HEADER, *ROWS[:3], 'c,0,1,1,1', 'c,1,1,1,1'], r"train\.csv:4: series 'b' has 1 rows"),
    ([HEADER, *ROWS, *ROWS[:2]], r"train\.csv:6: series 'a' continues here, but it began at line 2"),
    ([HEADER, ROWS[0], 'a,1,2.5,-3,0'], r"train\.csv:3: target '0', but '1' at line 2\. All rows of a series"),
    ([HEADER, 'a,0,é'.encode().decode('latin-1')], r'train\.csv:2: 3 columns'),
])
def test_csv_mistakes_are_located(tmp_path, lines, message):
    write_csv(tmp_path, *lines)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_csv_split_with_other_columns(tmp_path):
    write_csv(tmp_path, HEADER, *ROWS)
    write_csv(tmp_path, 'series,x,target', 'a,1,1', split='test')
    with pytest.raises(UserError, match=r"test\.csv:1: column 'y' is missing\. The columns are series, x, target"):
        read(tmp_path, 'test')
    write_csv(tmp_path, 'series,x,y,z,target', 'a,1,1,1,1', split='test')
    with pytest.raises(UserError, match=r"test\.csv:1: column 'z' is not in the training data"):
        read(tmp_path, 'test')
    (tmp_path / 'test.csv').unlink()
    with pytest.raises(UserError, match=r'test\.csv \(or test\.csv\.gz\) does not exist. See config\.data\.dir'):
        read(tmp_path, 'test')
