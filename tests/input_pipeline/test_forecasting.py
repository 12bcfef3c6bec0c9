"""Windows of series for forecasting: the division by time, the scale of errors, tables, and error messages."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import co2_forecast
from input_pipeline.array_batches import ArrayPlan
from input_pipeline.array_files import read_inputs
from input_pipeline.batches import Part
from input_pipeline.data import SeriesData
from input_pipeline.forecasting import SeriesWindows, co2, open_series
from runtime import once
from runtime.errors import UserError
from tests.input_pipeline.helpers import options

RAMP = np.arange(40.0)[:, None]  # each value is the number of its step


def windows(series=RAMP, **changes):
    settings = {'context': 6, 'horizon': 2, 'season': 3, 'validation_share': 0.1} | changes
    named = series if isinstance(series, dict) else {'': series}
    return SeriesWindows(named, ['x'], 'data', options(**settings))


def open_table(tmp_path, table, metric='loss', **changes):
    (tmp_path / 'series.csv').write_text(table)
    return open_series(options(file=str(tmp_path / 'series.csv'), **{
        'context': 6, 'horizon': 2, 'season': 3, 'validation_share': 0.1} | changes), metric)


def test_splits_are_divided_by_time_and_no_step_is_a_target_in_two_splits():
    data = windows()
    targets = {split: data.targets(split) for split in ('train', 'validation', 'test')}
    for split, steps in ('train', range(6, 32)), ('validation', range(32, 36)), ('test', range(36, 40)):
        np.testing.assert_array_equal(np.unique(targets[split]), list(steps))
        np.testing.assert_array_equal(targets[split], [[step, step + 1] for step in steps[:-1]])
        # The context is the six steps before the targets.
        np.testing.assert_array_equal(data.inputs(split)[:, :, 0], targets[split][:, :1] - np.arange(6, 0, -1))
        assert data.names(split) == [str(step) for step in steps[:-1]]  # the first target step of each window


def test_statistics_are_those_of_the_training_steps():
    data = windows(np.concatenate([RAMP[:32], np.full((8, 1), 1e6)]))
    mean, std = data.preprocessing.input_mean, data.preprocessing.input_std
    # 25 contexts of 6 steps begin at the steps 0 to 24. The variances of 0 ... 24 and of 0 ... 5 are 52 and 35 / 12.
    assert mean == pytest.approx([12 + 2.5]) and std == pytest.approx([(52 + 35 / 12) ** 0.5])
    assert data.preprocessing.target_mean == mean * 2 and data.preprocessing.target_std == std * 2


def test_errors_are_scaled_by_the_seasonal_naive_errors_of_the_training_steps():
    rng = np.random.default_rng(0)
    series = {'a': rng.normal(size=(40, 1)), 'b': 5 * rng.normal(size=(60, 1))}
    data = windows(series)
    expected = [np.mean([abs(values[t, 0] - values[t - 3, 0]) for t in range(3, len(values) - 2 * held_out)])
                for values, held_out in ((series['a'], 4), (series['b'], 6))]
    np.testing.assert_allclose(data.naive_errors('test')[:, 0], np.repeat(expected, [3, 5]))
    assert len(data.inputs('test')) == 8


def test_series_whose_scaled_error_is_not_defined_are_counted(caplog):
    caplog.set_level('INFO')
    once.log_once.cache_clear()
    data = windows({'a': RAMP, 'b': np.ones((40, 1)), 'c': np.ones((40, 1))})
    assert data.naive_errors('test')[:, 0].tolist() == [3] * 3 + [0] * 6
    assert caplog.text.count('data: the training steps of 2 of 3 series repeat exactly after config.data.season=3') == 1
    with pytest.raises(UserError, match="series 'b' repeats .* Use --config.eval.metric=absolute_error, or remove the"):
        data.check_scaled_error()


def test_batches_contain_the_targets_for_teacher_forcing():
    data = windows()
    batch = ArrayPlan(data, 'train', rows=8, seed=0, following=True).batch(1)
    following = batch['inputs']['following']
    assert following.shape == (8, 2, 1)
    np.testing.assert_array_equal(following.reshape(8, 2), batch['targets'])
    step = (following[0, 1] - following[0, 0])[0]  # contexts and targets have the same scale
    np.testing.assert_allclose(np.diff(batch['inputs']['inputs'][0, :, 0]), step, rtol=1e-4)


def test_targets_have_the_scale_of_their_channel():
    data = SeriesWindows({'': np.concatenate([RAMP, 100 * RAMP], axis=1)}, ['x', 'y'], 'data', options(
        context=6, horizon=2, season=3, validation_share=0.1))
    following = ArrayPlan(data, 'train', rows=25, seed=None, following=True).batch(0)['inputs']['following']
    np.testing.assert_allclose(following[..., 0], following[..., 1], atol=1e-5)


def test_batches_have_the_rows_and_the_seed_of_the_config():
    config, data = co2_forecast.get_config(), object.__new__(SeriesData)
    config.update_from_flattened_dict({'seed': 3, 'batch.rows': 8})
    data._config, data.arrays = config, windows()
    data._preprocessing = data.arrays.preprocessing
    for split, seed in ('train', 3), ('validation', None):
        expected = ArrayPlan(data.arrays, split, rows=8, seed=seed, following=True)
        jax.tree.map(np.testing.assert_array_equal, data.plan(split).batch(0), expected.batch(0))


def test_a_part_of_a_batch_without_examples_has_the_targets_for_teacher_forcing_too():
    plan = ArrayPlan(windows(), 'validation', rows=8, seed=None, following=True)  # 3 examples
    whole, parts = plan.batch(0), [plan.batch(0, Part(first, first + 1, 2)) for first in range(2)]
    assert not parts[1]['weights'].any()
    for name in 'inputs', 'following':
        np.testing.assert_array_equal(np.concatenate([part['inputs'][name] for part in parts]), whole['inputs'][name])


def test_a_table_may_have_several_series_and_channels(tmp_path):
    rows = [f'{name},{time},{time + shift},{-time}' for name, shift, steps in (('a', 0, 40), ('b', 100, 50))
            for time in reversed(range(steps))]
    data = open_table(tmp_path, 'series,time,up,down\n' + '\n'.join(rows))
    assert data.form.channels == ('up', 'down') and data.form.targets == ('up+1', 'down+1', 'up+2', 'down+2')
    assert data.inputs('test').shape == (3 + 4, 6, 2)
    np.testing.assert_array_equal(data.targets('test')[[0, 3]], [[36, -36, 37, -37], [145, -45, 146, -46]])
    assert data.names('test') == ['a:36', 'a:37', 'a:38', 'b:45', 'b:46', 'b:47', 'b:48']


def test_blank_lines_before_and_after_a_table_with_one_column_are_ignored(tmp_path):
    data = open_table(tmp_path, '\n\nx\n' + ''.join(f'{n}\n' for n in range(40)) + '\n\n')
    assert data.targets('test')[-1].tolist() == [38, 39]


def test_inputs_of_a_forecast_are_the_last_steps_of_each_series(tmp_path, logged):
    form = dataclasses.replace(windows().form, latest=True)
    (tmp_path / 'new.csv').write_text('series,x\n' + ''.join(f'a,{n}\n' for n in range(9)) + 'b,1\n' * 6)
    names, inputs = read_inputs(str(tmp_path / 'new.csv'), form)
    assert names == ['a', 'b']
    np.testing.assert_array_equal(inputs[:, :, 0], [range(3, 9), [1] * 6])
    with pytest.raises(UserError, match=r'example 1 has 5 steps, but a forecast is based on the last 6 steps'):
        form.prepare([np.ones((9, 1)), np.ones((5, 1))])
    with pytest.raises(UserError, match=r'example 0 contains nan\. .*\. Forecasting needs every value: fill the gaps$'):
        form.prepare(np.where(np.arange(9) == 5, np.nan, 1.0).reshape(1, 9, 1))
    (tmp_path / 'new.csv').write_text('series,x\n' + ''.join(f'a,{n}\n' for n in range(9)) + 'b,999\n' * 6)
    read_inputs(str(tmp_path / 'new.csv'), form)
    assert "such as value 999 in channel 'x' of series 'b'. In training" in logged.text
    (tmp_path / 'new.csv').write_text('series,x\n' + ''.join(f'a,{n}\n' for n in range(9)) + 'b,1\n' * 5)
    with pytest.raises(UserError, match=r"new.csv: series 'b' has 5 steps, .* Add steps, or remove the series$"):
        read_inputs(str(tmp_path / 'new.csv'), form)
    (tmp_path / 'new.csv').write_text('y\n1\n')
    with pytest.raises(UserError, match='the channels are y, but in the training data they are x'):
        read_inputs(str(tmp_path / 'new.csv'), form)


def test_columns_named_like_ids_or_times_are_read_as_channels_with_a_warning(tmp_path, logged):
    open_table(tmp_path, 'unique_id,ds,y\n' + ''.join(f'1,{n},{n % 7}\n' for n in range(40)))
    assert "series.csv:1: 'unique_id', 'ds' will be read as channels. If a column" in logged.text
    logged.clear()
    open_table(tmp_path, 'series,time,ideas\n' + ''.join(f'a,{n},{n % 7}\n' for n in range(40)))
    assert not logged.text


def test_windows_are_neither_taken_for_images_nor_for_shared_examples(logged):
    data = SeriesWindows({'': np.zeros((60, 8))}, [*'abcdefgh'], 'data', options(
        context=8, horizon=2, season=3, validation_share=0.2))
    assert data.inputs('train').shape[1:] == (8, 8) and not data.inputs('test').any()
    assert not logged.text


@pytest.mark.parametrize('table, changes, message', [
    ('x\n' + '1\n' * 9, {}, "the series has 9 steps, of which 7 are for training .*= 8 are needed"),
    ('series,x\n' + 'a,1\n' * 40 + 'b,1\n' * 9, {}, "series 'b' has 9 steps, of which 7 are for training"),
    ('x\n' + '1\n' * 40, {'horizon': 5}, '4 are for validation and 4 for the test .*config.data.horizon=5 are needed'),
    ('x\n' + '1\n' * 40, {'validation_share': 0.0}, '0 are for validation'),
    ('x\n' + '1\n' * 40, {'validation_share': 0.6}, 'of which 0 are for training'),
    ('x\n1\n\n,\n', {}, r'series.csv:4: the line has 2 columns, but the header has 1'),
    ('x\n1\n2\n\n\n4\n', {}, r"series.csv:4: x is '', not a number. Forecasting needs every value: fill the gaps"),
    ('time,x\n1,1\n2,nan\n', {}, r"csv:3: x is 'nan', not a number. Forecasting needs every value: fill the gaps"),
    ('time,x\n1,1\n2,\n', {}, r"series.csv:3: x is '', not a number. Forecasting needs every value"),
    ('time,x\n1,1\n1,2\n', {}, r"csv:3: time '1' is also at line 2.* contains the names of the series, name it series"),
    ('item_id,x\nA,1\n', {}, "item_id is 'A', not a number. If the column contains the names of .*, name it series"),
    ('series,x\na,B\n', {}, "x is 'B', not a number$"),
    ('x,target\n1,1\n', {}, "column 'target' is not used for forecasting. Remove the column. If it is a"),
    ('time\n1\n', {}, 'no column is a channel'),
])
def test_tables_from_which_no_forecast_can_be_learned(tmp_path, table, changes, message):
    with pytest.raises(UserError, match=message):
        open_table(tmp_path, table, **changes)


def test_a_series_whose_scaled_error_is_not_defined_is_refused_before_the_training(tmp_path):
    table = 'x\n' + '1\n2\n3\n' * 14
    message = r'repeats exactly after config.data.season=3 steps, .* Use --config.eval.metric=absolute_error'
    with pytest.raises(UserError, match=message):
        open_table(tmp_path, table, 'mean_absolute_scaled_error')
    open_table(tmp_path, table, 'absolute_error')
    open_table(tmp_path, table, 'mean_absolute_scaled_error', season=2)


def test_a_batch_is_shown_with_one_line_for_each_window():
    batch = {'inputs': {'inputs': np.ones((2, 6, 1))}, 'targets': np.arange(200.0).reshape(2, 100),
             'weights': np.array([1.0, 0.0])}
    assert list(SeriesData.show(object.__new__(SeriesData), batch)) == [
        f'{" ".join(map(str, batch["targets"][0]))}\t6 x 1, mean 1.000, standard deviation 0.000']


def test_co2_is_the_published_series():
    pytest.importorskip('statsmodels')
    series = co2()
    assert series.shape == (2284, 1) and np.isfinite(series).all()
    assert series[0, 0] == 316.1 and series[-1, 0] == 371.5  # 29 March 1958 and 29 December 2001
    assert SeriesData.needed <= {*open_series(options(source='builtin', name='co2', context=104, horizon=52, season=52,
                                                      validation_share=0.1), 'loss').sizes,
                                 'classes', 'preprocessing'}
