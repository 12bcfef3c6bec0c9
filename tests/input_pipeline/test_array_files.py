"""Files of arrays: IDX, NPZ and CSV, and what a user is told about a damaged one."""

import gzip
import pathlib
import pickle
import re
import zipfile

import numpy as np
import pytest
from PIL import Image

from input_pipeline import splits
from input_pipeline.array_batches import ArrayPlan
from input_pipeline.array_files import read_inputs
from input_pipeline.arrays import open_arrays
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing
from runtime.errors import UserError
from tests.input_pipeline.helpers import CLASSES, INPUTS, SPLITS, options

SERIES = InputFormat((7, 2), Preprocessing([0.0, 0.0], [1.0, 1.0], None, None), ('0', '1'))


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
        read_inputs(str(tmp_path / 'x.npz'), SERIES)
    assert not canary.exists()


def test_damaged_lzma(tmp_path):
    with zipfile.ZipFile(tmp_path / 'x.npz', 'w', zipfile.ZIP_LZMA) as archive, archive.open('inputs.npy', 'w') as file:
        np.save(file, INPUTS)
    np.testing.assert_array_equal(read_inputs(str(tmp_path / 'x.npz'), SERIES)[1], INPUTS)
    whole = (tmp_path / 'x.npz').read_bytes()
    (tmp_path / 'x.npz').write_bytes(whole[:200] + bytes(40) + whole[240:])
    with pytest.raises(UserError, match=r'x\.npz cannot be read'):
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
    with pytest.raises(UserError, match=r'train\.csv: class 3\.5 of example 1 \(train\.csv:3\): classes must be whole'):
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
    ([HEADER, 'a,0,1,1,1_0', 'b,0,1,1,2'], r"train\.csv:2: target is '1_0', not a number"),
    ([HEADER, ROWS[0], 'a,1,1,-1e300,1'], r"train\.csv:3: y is '-1e300', which exceeds 3\.4e38"),
    ([HEADER, 'a,0,1,1,1e300'], r"train\.csv:2: target is '1e300', which exceeds 3\.4e38"),
    ([HEADER, 'a,0,1,1,cat', 'b,0,1,1,3'], r"train\.csv:2: target is 'cat', not a number, but 1 of 2 targets are"),
    ([HEADER, 'a,0,1,1,cat', 'b,0,1,1,nan'], r"train\.csv:2: target is 'cat', not a number, but 1 of 2 targets are"),
    ([HEADER, ROWS[0], 'a,1,2.5,3'], r'train\.csv:3: the line has 4 columns, but the header has 5'),
    ([HEADER, *ROWS, *ROWS[:2]], r"train\.csv:6: time '0' of series 'a' is also at line 2\. The times .* different"),
    (['series,x,target', 'a,1,1', 'b,1,1', 'a,2,1'],
     r"train\.csv:4: series 'a' continues here, but it began at line 2 .*Sort the rows by series, or add"),
    ([HEADER, 'a,x,1,1,1', 'a,y,1,1,1'], r"train\.csv:2: time is 'x', not a date\. Times must be numbers, or dates"),
    ([HEADER, 'a,0,1,1,1', 'a,2024-01-31,1,1,1'], r"train\.csv:3: time is '2024-01-31', not a number"),
    ([HEADER, 'a,0,1,1,1', 'a,,1,1,1'], r"train\.csv:3: time is '', not a number"),
    ([HEADER, 'a,0,1,1,1', 'a,nan,1,1,1'], r"train\.csv:3: time is 'nan', not a number"),
    ([HEADER, ROWS[0], 'a,1,2.5,-3,0'], r"train\.csv:3: target is '0', but it is '1' at line 2\. All rows of a series"),
    ([HEADER, 'a,0,é'.encode().decode('latin-1')], r'train\.csv:2: the line has 3 columns'),
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
    with pytest.raises(UserError, match=r'test\.csv \(or test\.csv\.gz\) does not exist. Check config\.data\.dir'):
        read(tmp_path, 'test')


@pytest.mark.parametrize('times', [('10', '9', '8.5'), ('2024-03-01', '2024-02-29T12:00', '2024-02-28'),
                                   ('2024-01-01T00:00+00:00', '2024-01-01T00:30+01:00', '2023-12-31T23:00Z')])
def test_the_rows_of_a_series_are_sorted_by_time(tmp_path, times, caplog):
    """The rows of two series are also interleaved, in the order of decreasing time."""
    splits.say.cache_clear()
    caplog.set_level('INFO', logger='allyouneed')
    write_csv(tmp_path, 'time,series,x,target', *(f'{time},{series},{number + ord(series)},0'
                                                 for number, time in enumerate(times) for series in 'ab'))
    np.testing.assert_array_equal(read(tmp_path)[0][..., 0] - [[ord('a')], [ord('b')]], [[2, 1, 0], [2, 1, 0]])
    assert 'train.csv: 2 of 2 series are not in the order of time. Their rows are sorted' in caplog.text


def test_irregular_steps_of_time_are_logged_with_their_numbers(tmp_path, caplog):
    splits.warn.cache_clear()
    write_csv(tmp_path, 'series,time,x,target', *(f'{series},{time},1,0' for series in 'ab'
                                                 for time in (0, 1, 2, 3 + (series == 'b'))))
    read(tmp_path)
    assert ('train.csv: 1 of 6 steps of the column time differ by more than 10% from the median step of 1: they are 1 '
            'to 2. The model reads the rows as equally spaced') in caplog.text
    splits.warn.cache_clear()
    caplog.clear()
    write_csv(tmp_path, 'series,time,x,target', *(f'a,2024-0{month}-01,1,0' for month in range(1, 8)))
    read(tmp_path)  # February is shorter, by 6 %
    assert 'column time' not in caplog.text


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
        write_names(tmp_path, kind, ['dog', 'a cat', 'élan', 'dog'][split == 'test':], split)
    data = open_arrays(options(dir=str(tmp_path)), labelled=True)
    assert data.classes == ['a cat', 'dog', 'élan'] and data.sizes['outputs'] == 3
    expected = ([0, 1, 1, 2], [0, 1, 2]) if kind == 'images' else ([1, 0, 2, 1], [0, 2, 1])  # images by folder
    assert (data.targets('train').tolist(), data.targets('test').tolist()) == expected
    if kind == 'images':
        assert data.inputs('train')[:, 0, 0, 0].tolist() == [1, 0, 3, 2] and data.inputs('test').shape == (3, 4, 6, 3)


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

@pytest.mark.parametrize('kind', ['npz', 'csv'])
def test_a_group_is_in_one_split(tmp_path, kind):
    groups = [f'person {number % 10}' for number in range(40)]
    if kind == 'npz':
        inputs = np.random.default_rng(1).normal(size=(40, 5, 1))
        np.savez(tmp_path / 'train.npz', inputs=inputs, targets=np.arange(40) % 2, groups=groups)
    else:
        write_csv(tmp_path, 'series,group,x,target', *(f'{number},{group},{number},{number % 2}'
                                                      for number, group in enumerate(groups)), split='train')
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.2), labelled=True)
    found = {split: set(data.groups(split)) for split in SPLITS}
    assert [len(found[split]) for split in SPLITS] == [6, 2, 2]
    assert set.union(*found.values()) == set(groups)
    assert sum(len(data.targets(split)) for split in SPLITS) == 40


def test_groups_are_one_for_each_example(tmp_path):
    np.savez(tmp_path / 'train.npz', inputs=INPUTS, targets=CLASSES, groups=np.arange(9))
    with pytest.raises(UserError, match=r'train\.npz: groups have the shape \(9,\), but there are 10 inputs'):
        read(tmp_path)
    write_csv(tmp_path, 'series,group,x,target', 'a,p,1,0', 'a,q,2,0')
    (tmp_path / 'train.npz').unlink()
    with pytest.raises(UserError, match=r"train\.csv:3: group is 'q', but it is 'p' at line 2"):
        read(tmp_path)


# Images

def save_image(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


COLOUR = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)


def test_class_folders_without_folders_of_splits_are_divided(tmp_path):
    for number in range(24):
        save_image(tmp_path / 'ab'[number % 2] / 'more' / f'{number}.png', COLOUR[..., 0] + np.uint8(number))
    (tmp_path / 'a' / 'notes.txt').write_text('not an image')
    (tmp_path / '.hidden').mkdir()
    save_image(tmp_path / '.hidden' / 'x.png', COLOUR)
    save_image(tmp_path / 'a' / '._x.png', COLOUR)
    data = open_arrays(options(dir=str(tmp_path)), labelled=True)
    assert data.classes == ['a', 'b'] and [len(data.targets(split)) for split in SPLITS] == [12, 6, 6]
    assert data.inputs('train').shape == (12, 5, 4, 1) and data.inputs('train').dtype == np.uint8


def test_images_of_all_kinds_become_bytes(tmp_path):
    grey, transparent = COLOUR[..., 0], np.concatenate([COLOUR, COLOUR[..., :1]], axis=-1)
    save_image(tmp_path / 'train/a/1.png', COLOUR)
    save_image(tmp_path / 'train/a/2.PNG', transparent)
    save_image(tmp_path / 'train/b/3.bmp', grey)
    palette = Image.fromarray(COLOUR).quantize(20)
    palette.save(tmp_path / 'train/b/4.gif')
    images, _ = read(tmp_path, validation_share=0.0)
    np.testing.assert_array_equal(images[:2], [COLOUR, COLOUR])
    np.testing.assert_array_equal(images[2], np.repeat(grey[..., None], 3, axis=-1))
    np.testing.assert_array_equal(images[3], palette.convert('RGB'))


def test_images_are_scaled_and_cropped_to_squares(tmp_path):
    save_image(tmp_path / 'train/a/1.png', np.full((8, 4, 3), 7, np.uint8))
    save_image(tmp_path / 'train/b/2.png', np.full((3, 9, 3), 9, np.uint8))
    with pytest.raises(UserError, match=r'2\.png has 9 x 3 pixels, but .*1\.png has 4 x 8\. Set config\.data\.image_s'):
        read(tmp_path, validation_share=0.0)
    data = open_arrays(options(dir=str(tmp_path), image_size=6, validation_share=0.0), labelled=True)
    assert data.inputs('train').shape == (2, 6, 6, 3) and data.form.resized
    assert data.inputs('train')[:, 3, 3, 0].tolist() == [7, 9]
    names, images = read_inputs(str(tmp_path / 'train'), data.form)
    assert names == ['a/1.png', 'b/2.png'] and images.shape == (2, 6, 6, 3)


@pytest.mark.parametrize('write, message', [
    (lambda path: path.write_bytes(b'no image'), r'test/a/x\.png cannot be read as an image'),
    (lambda path: path.write_bytes(path.read_bytes()[:60]), r'test/a/x\.png cannot be read as an image'),
    (lambda path: path.write_bytes(b''), r'test/a/x\.png cannot be read as an image'),
    (lambda path: save_image(path, COLOUR[:4]), r'test/a/x\.png: images|test.*\(4, 4, 3\)'),
    (lambda path: Image.fromarray(np.arange(20, dtype=np.uint16).reshape(5, 4)).save(path), 'more than 8 bits per cha'),
])
def test_images_that_cannot_be_used_are_named(tmp_path, write, message):
    for split in 'train', 'test':
        save_image(tmp_path / split / 'a/x.png', COLOUR)
    write(tmp_path / 'test/a/x.png')
    with pytest.raises(UserError, match=message):
        read(tmp_path, 'test', validation_share=0.0)


def test_a_colour_image_among_greyscale_images_is_refused(tmp_path):
    save_image(tmp_path / 'train/a/x.png', COLOUR[..., 0])
    save_image(tmp_path / 'test/a/x.png', COLOUR)
    with pytest.raises(UserError, match=r'test/a/x\.png is a colour image \(RGB\), but the training images are grey'):
        read(tmp_path, 'test', validation_share=0.0)


def test_image_size_is_only_for_folders_of_images(tmp_path):
    write_npz(tmp_path, inputs=INPUTS, targets=CLASSES)
    with pytest.raises(UserError, match=r'image_size=8 is only for folders of images, but .* has train\.npz'):
        read(tmp_path, image_size=8)


# Inputs of a prediction

def test_inputs_are_read_from_a_folder_an_image_a_table_and_an_archive(tmp_path):
    for name in 'x.png', 'y/z.png':
        save_image(tmp_path / 'images' / name, COLOUR)
    pictures = InputFormat((5, 4, 3), Preprocessing([127.5] * 3, [127.5] * 3, None, None), ('0',), encoding='bytes',
                           dtype='uint8')
    names, images = read_inputs(str(tmp_path / 'images'), pictures)
    assert names == ['x.png', 'y/z.png']
    np.testing.assert_array_equal(images, [COLOUR, COLOUR])
    path = str(tmp_path / 'images/x.png')
    assert read_inputs(path, pictures)[0] == [path]
    write_csv(tmp_path, 'series,y,time,x', 'a,1,1,2', 'b,3,1,4', 'a,5,0,6', 'b,7,0,8', split='new')
    table = InputFormat((2, 2), Preprocessing([0.0] * 2, [1.0] * 2, None, None), ('0',), channels=('x', 'y'))
    names, series = read_inputs(str(tmp_path / 'new.csv'), table)
    assert names == ['a', 'b']
    np.testing.assert_array_equal(series, [[[6, 5], [2, 1]], [[8, 7], [4, 3]]])
    for path, form, message in ((tmp_path / 'images', table, 'images, but the model reads series'),
                                (tmp_path / 'new.csv', pictures, 'was not trained on tables.* or images'),
                                (tmp_path / 'new.csv', SERIES, 'was not trained on tables'),
                                (tmp_path / 'none.png', pictures, r'none\.png cannot be read as an image'),
                                (tmp_path / 'none', pictures, 'is not a file. Use a folder of images')):
        with pytest.raises(UserError, match=message):
            read_inputs(str(path), form)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(UserError, match='empty has no images'):
        read_inputs(str(tmp_path / 'empty'), pictures)


# Series of different lengths, and missing values

def test_shorter_series_are_padded_and_the_padding_is_hidden(tmp_path, caplog):
    splits.say.cache_clear()
    caplog.set_level('INFO', logger='allyouneed')
    write_csv(tmp_path, 'series,x,y,target', 'a,1,2,0', 'b,1,2,1', 'b,3,4,1', 'b,5,6,1', 'c,7,8,0', 'c,9,9,0')
    write_csv(tmp_path, 'series,x,y,target', 'd,3,4,0', split='test')
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.0), labelled=True, multiple=2)
    assert data.sizes['shape'] == [4, 2] and 'the series have 1 to 3 steps' in caplog.text
    values = np.array([[1, 2], [1, 2], [3, 4], [5, 6], [7, 8], [9, 9]])
    np.testing.assert_allclose(data.preprocessing.input_mean, values.mean(axis=0))
    np.testing.assert_allclose(data.preprocessing.input_std, values.std(axis=0))
    batch = ArrayPlan(data, 'train', rows=4, seed=None).batch(0)
    np.testing.assert_array_equal(batch['inputs']['visible'].sum(axis=1), [1, 3, 2, 4])  # the last row has no example
    assert not batch['inputs']['inputs'][0, 1:].any() and np.isfinite(batch['inputs']['inputs']).all()
    assert data.inputs('test').shape == (1, 4, 2)
    prepared = data.form.prepare([[[1, 2]], [[3, 4], [5, 6]]])
    np.testing.assert_array_equal(np.isnan(prepared).all(axis=-1).sum(axis=1), [3, 2])
    for wrong, message in (([[[1, 2]] * 5], r'example 0 has the shape \(5, 2\), but .* at most 4 steps with 2'),
                           ([[[1, 2]], [[1]]], r'example 1 has the shape \(1, 1\)'),
                           ([[[1, 2], [np.nan, 1], [1, 2]]], 'example 0 contains nan'),
                           ([[[1, 2]], []], r'example 1 has the shape \(0,\)'),
                           ([[[1, 2]], [[np.nan, np.nan]]], 'example 1 has no values')):
        with pytest.raises(UserError, match=message):
            data.form.prepare(wrong)


@pytest.mark.parametrize('kind', ['csv', 'npz'])
def test_missing_values_get_the_mean_of_the_channel(tmp_path, kind, caplog):
    splits.say.cache_clear()
    caplog.set_level('INFO', logger='allyouneed')
    if kind == 'csv':
        write_csv(tmp_path, 'series,x,y,target', 'a,1,2,0', 'a,,NA,0', 'a,4,nan,0', 'b,7,8,1', 'b,1,1,1')
    else:
        nan = np.nan
        write_npz(tmp_path, inputs=[[[1, 2], [nan, nan], [4, nan]], [[7, 8], [1, 1], [nan, nan]]], targets=[0, 1])
    with pytest.raises(UserError, match=r"(x is '', not a number|example 0 contains nan).*data\.missing=mean"):
        read(tmp_path, validation_share=0.0)
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.0, missing='mean'), labelled=True)
    np.testing.assert_allclose(data.preprocessing.input_mean, [13 / 4, 11 / 3])
    arguments = data.form.arguments(data.inputs('train'))
    np.testing.assert_array_equal(arguments['visible'], [[True, False, True], [True, True, False]])
    np.testing.assert_array_equal(arguments['inputs'] == 0, np.isnan(data.inputs('train')))
    assert '1 of 8 values are missing. They get the mean of the channel' in caplog.text
    assert data.form.missing and data.form.low == (1, 1) and data.form.high == (7, 8)


@pytest.mark.parametrize('rows, message', [
    (['a,1,2,0', 'b,,NA,1'], r'train\.csv: inputs: example 1 has no values'),
    (['a,1,,0', 'b,2,,1'], r'train\.csv: inputs: channel 1 has no values'),
    (['a,1,inf,0', 'b,2,,1'], r"train\.csv:2: y is 'inf', not a number"),
])
def test_missing_values_that_cannot_be_filled(tmp_path, rows, message):
    write_csv(tmp_path, 'series,x,y,target', *rows)
    with pytest.raises(UserError, match=message):
        read(tmp_path, missing='mean', validation_share=0.0)
