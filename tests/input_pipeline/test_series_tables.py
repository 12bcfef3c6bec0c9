"""Tables of series (CSV): columns, times, padding and missing values, and messages about mistakes."""

import numpy as np
import pytest

from input_pipeline.array_batches import ArrayPlan
from input_pipeline.array_files import read_inputs
from runtime import once
from runtime.errors import UserError
from tests.input_pipeline.helpers import open_arrays, options, read, write_csv, write_npz

HEADER = 'series,time,x,y,target'
ROWS = ['a,0,1.5,-2,1', 'a,1,2.5,-3,1', 'b,0,1e3,0,0', 'b,1,4,5,0']


@pytest.mark.parametrize('suffix', ['', '.gz'])
def test_csv_files(tmp_path, suffix):
    write_csv(tmp_path, HEADER, *ROWS[:2], '', *ROWS[2:], suffix=suffix)
    inputs, targets = read(tmp_path)
    np.testing.assert_array_equal(inputs, [[[1.5, -2], [2.5, -3]], [[1000, 0], [4, 5]]])
    np.testing.assert_array_equal(targets, [1, 0])
    assert open_arrays(options(dir=str(tmp_path)), labelled=True).names('test') == (
        f'test.csv{suffix}:2', f'test.csv{suffix}:5')
    assert inputs.dtype == np.float64 and targets.dtype == np.int32


def test_csv_channels_go_by_their_names_in_the_training_file(tmp_path):
    write_csv(tmp_path, HEADER, *ROWS)
    write_csv(tmp_path, '\ufefftarget,y,series,x', '0,1,s,2', split='test')
    with pytest.raises(UserError, match=r'test\.csv: inputs are float64 \(1, 2\), but .* \(2, 2\)'):
        read(tmp_path, 'test')
    write_csv(tmp_path, '\ufefftarget,y,series,x', '0,1,s,2', '0,3,s,4', split='test')
    np.testing.assert_array_equal(read(tmp_path, 'test')[0], [[[2, 1], [4, 3]]])


@pytest.mark.parametrize('three', ['3', '3.0', '3e0'])
def test_the_task_determines_the_type_of_csv_targets(tmp_path, three):
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
    ([HEADER, *ROWS, *ROWS[:2]], r"train\.csv:6: time '0' of series 'a' is also at line 2\. The times .* unique"),
    (['series,x,target', 'a,1,1', 'b,1,1', 'a,2,1'],
     r"train\.csv:4: series 'a' continues here, but it began at line 2 .*Sort the rows by series, or add"),
    ([HEADER, 'a,x,1,1,1', 'a,y,1,1,1'], r"train\.csv:2: time is 'x', not a date\. Times must be numbers, or dates"),
    ([HEADER, 'a,2024-01-01T02+02:00,1,1,1', 'a,2024-01-02,1,1,1'], "time '2024-01-02' has no time zone, but '2024"),
    ([HEADER, 'a,2024-01-01,1,1,1', 'a,2024-01-02T00Z,1,1,1'], "time '2024-01-02T00Z' has a time zone, but '2024"),
    ([HEADER, 'a,0,1,1,1', 'a,2024-01-31,1,1,1'], r"train\.csv:3: time is '2024-01-31', not a number"),
    ([HEADER, 'a,0,1,1,1', 'a,,1,1,1'], r"train\.csv:3: time is '', not a number"),
    ([HEADER, 'a,0,1,1,1', 'a,nan,1,1,1'], r"train\.csv:3: time is 'nan', not a number"),
    ([HEADER, ROWS[0], 'a,1,2.5,-3,0'], r"train\.csv:3: target is '0', but it is '1' at line 2\. All rows of a series"),
    ([HEADER, 'a,0,"1,5",1,1'], r"train\.csv:2: x is '1,5', not a number\. Write 1234\.5: with a decimal point"),
    (['series,date,x,target', 'a,2024-01-31,1,0'], r"train\.csv:2: date is '2024-01-31', not a number.*name it time"),
    (['series,x,target', 'a,1,cat', 'b,2,'], r'train\.csv:3: the cell of column target is empty\. Each series needs a'),
    (['series,x,target,target_target', 'a,1,2,3'], 'target and target_target would both have the name'),
    (['series,x,target_a,target_b', 'a,1,2,cat'],
     r"target_b is 'cat', not a number\. Several targets must be numbers \(task=regression\)\. For classification, k"),
    (['series,x,target\ra,1,0\rb,2,1'], r'train\.csv:1: lines end with carriage returns.* Save the file as CSV \(UTF'),
    (['series;x;target', 'a;1;0'], r"train\.csv:1: the columns are separated by ';'\. Separate them by commas"),
    (['series\tx\ttarget', 'a\t1\t0'], r"train\.csv:1: the columns are separated by '\\t'\. Separate them by commas"),
    (['series,x\x07,target', 'a,1,0'], r"train\.csv:1: column 'x\\x07' has a control character or a line end"),
    ([',series,x,target', '0,a,1,0'], r'train\.csv:1: column 1 has no name.*to_csv.index=False.'),
    (['series,x,target', 'a,1,0', ',2,1'], r'train\.csv:3: the cell of column series is empty'),
    (['series,group,x,target', 'a,p,1,0', 'b,,2,1'], r'train\.csv:3: the cell of column group is empty\. Each series'),
    (['series,x,target', 'a,1,up', 'a,2,up', 'b,3,"down', 'b,4,down', 'c,5,up', 'c,6,up'],
     r'train\.csv:4: a cell in quotation marks has a line break, or its closing quotation mark is missing\. Each'),
    (['series,x,target', 'a,1,"up', 'per"', 'b,2,down'], r'train\.csv:2: a cell in quotation marks has a line break'),
    (['series,"x,target', 'a,1,up'], r'train\.csv:1: a cell in quotation marks has a line break'),
    (['series,x,target', '', 'a,1,"up', *['b,2,down'] * 20_000], r'train\.csv:3: a cell in quotation marks has a'),
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
    once.log_once.cache_clear()
    caplog.set_level('INFO', logger='allyouneed')
    write_csv(tmp_path, 'time,series,x,target', *(f'{time},{series},{number + ord(series)},0'
                                                 for number, time in enumerate(times) for series in 'ab'))
    np.testing.assert_array_equal(read(tmp_path)[0][..., 0] - [[ord('a')], [ord('b')]], [[2, 1, 0], [2, 1, 0]])
    assert 'train.csv: 2 of 2 series are not in the order of time. Their rows are sorted' in caplog.text


@pytest.mark.parametrize('times', [
    [str(1_700_000_000_000_000_000 + 100 * number) for number in range(20)],
    [f'2024-01-01T00:00:00.0000{number:02}' for number in range(20)],
    [f'1969-12-31T23:59:59.9999999{number:02}Z' for number in range(20)]])
def test_close_times_keep_their_order_and_their_equal_steps(tmp_path, times, caplog):
    write_csv(tmp_path, 'time,series,x,target', *(f'{time},a,{number},0' for number, time in [*enumerate(times)][::-1]))
    np.testing.assert_array_equal(read(tmp_path)[0], [[[number] for number in range(20)]])
    assert 'differ by more than' not in caplog.text


def test_irregular_steps_of_time_are_logged_with_their_numbers(tmp_path, caplog):
    once.warn_once.cache_clear()
    write_csv(tmp_path, 'series,time,x,target', *(f'{series},{time},1,0' for series in 'ab'
                                                 for time in (0, 1, 2, 3 + (series == 'b'))))
    read(tmp_path)
    assert ('train.csv: 1 of 6 steps of the column time differ by more than 10% from the median step of 1: they are 1 '
            'to 2. The model reads the rows as equally spaced') in caplog.text
    once.warn_once.cache_clear()
    caplog.clear()
    write_csv(tmp_path, 'series,time,x,target', *(f'a,2024-0{month}-01,1,0' for month in range(1, 8)))
    read(tmp_path)  # February is shorter, by 6 %
    assert 'column time' not in caplog.text


# Series of different lengths, and missing values

def test_the_splits_do_not_depend_on_the_padding_of_series(tmp_path):
    write_csv(tmp_path, 'series,x,target', *(f'{series},{series},{series % 2}' for series in range(60)
                                             for _ in range(1 + series % 3)), split='train')

    def held_out(multiple):
        data = open_arrays(options(dir=str(tmp_path)), labelled=True, multiple=multiple)
        return [set(data.inputs(split)[:, 0, 0].tolist()) for split in ('validation', 'test')]

    assert held_out(1) == held_out(2) == held_out(5) and all(held_out(1))


def test_shorter_series_are_padded_and_the_padding_is_hidden(tmp_path, caplog):
    once.log_once.cache_clear()
    caplog.set_level('INFO', logger='allyouneed')
    write_csv(tmp_path, 'series,x,y,target', 'a,1,2,0', 'b,1,2,1', 'b,3,4,1', 'b,5,6,1', 'c,7,8,0', 'c,9,9,0')
    write_csv(tmp_path, 'series,x,y,target', 'd,3,4,0', split='test')
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.0), labelled=True, multiple=2)
    assert data.sizes['shape'] == [4, 2] and (
        'the series have 1 to 3 steps. Shorter series are padded with the mean of each channel, and patches without '
        'any value are hidden from the model') in caplog.text
    values = np.array([[1, 2], [1, 2], [3, 4], [5, 6], [7, 8], [9, 9]])
    np.testing.assert_allclose(data.preprocessing.input_mean, values.mean(axis=0))
    np.testing.assert_allclose(data.preprocessing.input_std, values.std(axis=0))
    batch = ArrayPlan(data, 'train', rows=4, seed=None).batch(0)
    np.testing.assert_array_equal(batch['inputs']['visible'].sum(axis=1), [1, 3, 2, 4])  # the last row has no example
    assert not batch['inputs']['inputs'][0, 1:].any() and np.isfinite(batch['inputs']['inputs']).all()
    assert data.inputs('test').shape == (1, 4, 2)
    prepared = data.form.prepare([[[1, 2]], [[3, 4], [5, 6]]])
    np.testing.assert_array_equal(np.isnan(prepared).all(axis=-1).sum(axis=1), [3, 2])
    for wrong, message in (([[[1, 2]] * 5], r'example 0 has the shape \(5, 2\), .* at most 4 steps with 2 .* Shorten'),
                           ([[[1, 2]], [[1]]], r'example 1 has the shape \(1, 1\).* Use series of this form'),
                           ([[[1, 2], [np.nan, 1], [1, 2]]], 'example 0 contains nan'),
                           ([[[1, 2]], []], r'example 1 has the shape \(0,\)'),
                           ([[[1, 2]], [[np.nan, np.nan]]], 'example 1 has no values')):
        with pytest.raises(UserError, match=message):
            data.form.prepare(wrong)


def test_a_series_that_is_shorter_than_all_training_series_is_reported_as_shorter(tmp_path):
    write_csv(tmp_path, HEADER, *ROWS)
    write_csv(tmp_path, HEADER, *ROWS[:3], split='test')
    data = open_arrays(options(dir=str(tmp_path)), labelled=True)
    message = r'has values in only 1 of 2 steps\. Use series of 2 steps\. .*config\.data\.missing=mean'
    with pytest.raises(UserError, match=rf'test\.csv: inputs: example 1 \(test\.csv:4\) {message}'):
        data.inputs('test')
    with pytest.raises(UserError, match=rf"test\.csv: series 'b' {message}"):
        read_inputs(str(tmp_path / 'test.csv'), data.form)


@pytest.mark.parametrize('kind', ['csv', 'npz'])
def test_missing_values_get_the_mean_of_the_channel(tmp_path, kind, caplog):
    once.log_once.cache_clear()
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
    assert '3 of 10 values are missing. They are replaced by the mean of the channel' in caplog.text
    assert data.form.missing and data.form.low == (1, 1) and data.form.high == (7, 8)


@pytest.mark.parametrize('rows, message', [
    (['a,1,2,0', 'b,,NA,1'], r'train\.csv: inputs: example 1 \(train\.csv:3\) has no values'),
    (['a,1,,0', 'b,2,,1'], r"train\.csv: channel 'y' has no values\. Add data, or remove the channel"),
    (['a,1,inf,0', 'b,2,,1'], r"train\.csv:2: y is 'inf', not a number"),
])
def test_missing_values_that_cannot_be_filled(tmp_path, rows, message):
    write_csv(tmp_path, 'series,x,y,target', *rows)
    with pytest.raises(UserError, match=message):
        read(tmp_path, missing='mean', validation_share=0.0)


def test_a_channel_needs_values_only_in_the_training_data(tmp_path):
    write_csv(tmp_path, 'series,x,y,target', 'a,1,2,0', 'b,3,,1')
    write_csv(tmp_path, 'series,x,y,target', 'c,1,,0', 'd,3,,1', split='test')
    data = open_arrays(options(dir=str(tmp_path), validation_share=0.0, missing='mean'), labelled=True)
    arguments = data.form.arguments(data.inputs('test'))
    assert arguments['visible'].all() and not arguments['inputs'][..., 1].any()


def test_a_channel_whose_values_are_all_held_out_is_refused(tmp_path):
    def table(groups):
        """Opens a table in which only the series of some groups have values of the channel y."""
        write_csv(tmp_path, 'series,group,x,y,target', *(
            f'{name},{name},{ord(name)},{ord(name) if name in groups else ""},{ord(name)}' for name in 'abcdefghijkl'),
            split='train')
        return open_arrays(options(dir=str(tmp_path), missing='mean'), labelled=False)

    held_out = {*table('abcdefghijkl').groups('validation')}
    message = r"\(train, validation_share=0\.25\): channel 'y' has no values\. Add data, provide files for validation,"
    with pytest.raises(UserError, match=message):
        table(held_out).inputs('train')
