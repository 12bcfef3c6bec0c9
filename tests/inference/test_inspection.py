"""Reading places: axes and labels without padding, of texts, pairs and outputs; large captures are refused."""

import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import inspection
from inference.edits import Edit
from inference.forecast import Forecaster
from inference.inspection import inspect, list_places, resolved
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from inference.predict import Predictor
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing
from model import forecaster
from model.blocks import BlockConfig
from model.patches import PatchTransformer
from runtime.errors import UserError
from runtime.resources import compile_time
from tests.model.helpers import random_params
from tests.random_run import random_run

OPTIONS = SearchOptions(method='greedy', extra_length=2)


@pytest.fixture(scope='module')
def run():
    return random_run('transformer')


def test_each_text_has_its_own_tokens_and_no_padding(run):
    outputs = run.translate(['one'], OPTIONS)
    given = [('a bc', 'd'), outputs[0], 'longer than the others']
    found = run.inspect(given, ['*/weights', 'decoder', 'source_embedding'], OPTIONS)
    for values, source in zip(found, ('a bc', 'one', 'longer than the others'), strict=True):
        weights = values['decoder/layers_1/cross_attention/weights']
        assert weights.axes == ('head', 'query', 'key')
        assert weights.labels['key'] == [*run.model.tokenizers['source'].pieces(
            run.model.tokenizers['source'].encode(source)), '</s>']
        assert weights.values.shape == (2, len(weights.labels['query']), len(weights.labels['key']))
        assert len(values['source_embedding'].values) == len(weights.labels['key'])
        assert len(values['decoder'].values) == len(weights.labels['query'])
        np.testing.assert_allclose(weights.values.sum(axis=-1), 1, atol=1e-5)
    assert found[0]['decoder'].labels['position'] == ['<s>', 'd']
    cross = found[1].stacked('decoder/*/cross_attention/weights')
    np.testing.assert_allclose(cross.values, run.model.attention(outputs[0])['cross'], atol=1e-5)


def test_a_language_model_reads_all_tokens_of_a_text_except_the_last_token_of_a_continuation(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    run = random_run('language_model', num_layers=1)
    run.model.context, encode = 4, run.model.tokenizers['target'].encode
    continued = Output('a', encode('a'), [Hypothesis('bc', encode('bc'), 0.0, 0.0)])
    found = run.inspect(['ab', continued, 'abcdefg', ''], 'encoder')
    assert [values['encoder'].labels['position'] for values in found] == [
        ['<s>', 'a', 'b'], ['a', 'b'], ['<s>', 'a', 'b', 'c'], ['<s>']]
    assert caplog.messages == ['1 of 4 texts have more than 4 tokens (config.data.context), up to 8. Only the first 4 '
                               'tokens of a text are used']


def test_values_of_a_model_in_bfloat16_are_float32():
    values, = random_run('transformer', num_layers=1, dtype='bfloat16').inspect([('a', 'b')], '*')
    assert {each.values.dtype for each in values.values()} == {np.dtype(np.float32)}


def test_places_are_listed_in_the_order_of_the_layers_with_sizes():
    places = random_run('language_model', num_layers=11, num_key_value_heads=1).places()
    layers = [name for name in places if name.count('/') == 1 and '/layers_' in name]
    assert layers == [f'encoder/layers_{layer}' for layer in range(11)]
    assert places['encoder/layers_10/self_attention/keys'] == {'batch': None, 'position': None, 'head': 1, 'width': 4}


@pytest.mark.parametrize('given, place, limit, message', [
    (['a'], 'decoder/layer_0', 1.0, "place 'decoder/layer_0': the model has no such place. Did you mean decoder/"),
    ([('a', 'b')], '*', 1e-6, r'the values at 70 places for 1 inputs have .* GB, more than most_gb=1e-06'),
    ('a text', 'decoder', 1.0, 'the texts or outputs must be a list'),
    (['a', 1], 'decoder', 1.0, r"text 2 is '1': must be a source, a pair \(source, target\) or an output of the model"),
    ([('a', 'b', 'c')], 'decoder', 1.0, 'text 1 is .* must be a source'),
    (['a'], 'decoder', float('nan'), 'more than most_gb=nan')])
def test_impossible_requests_are_refused(given, place, limit, message, run):
    with pytest.raises(UserError, match=message):
        run.inspect(given, place, OPTIONS, limit)


@pytest.mark.slow
def test_many_texts_are_read_in_parts_and_from_any_iterable(run, monkeypatch):
    def counted(model, rows, names, values=inspection._values):
        parts.append(len(rows))
        return values(model, rows, names)

    sources, targets, parts = ['a bc', 'one', 'x'], ['d', 'two', 'longer'], []  # 64, 128 and 224 bytes in the decoder
    whole = run.inspect(zip(sources, targets, strict=True), 'decoder')
    monkeypatch.setattr(inspection, '_values', counted)
    each = run.inspect_each(zip(sources, targets, strict=True), 'decoder', most_gb=200e-9)
    for one, other in zip(each, whole, strict=True):
        np.testing.assert_allclose(one['decoder'], other['decoder'], atol=1e-5)
    assert parts == [2, 1]


def test_the_size_of_the_values_of_images_is_exact():
    run, images = random_run('patches', num_layers=1), np.zeros((3, 8, 8, 1))
    places = ['*/weights', 'encoder/layers_0', 'head']
    size = sum(values.values.nbytes for image in run.inspect(images, places) for values in image.values()) / 1e9
    assert len(run.inspect(images, places, most_gb=1.001 * size)) == 3
    with pytest.raises(UserError, match='the values at 3 places for 3 '):
        run.inspect(images, places, most_gb=0.999 * size)
    assert run.inspect(images[:0], places) == []


def test_images_are_read_from_any_iterable():
    run, images = random_run('patches', num_layers=1), np.zeros((3, 8, 8, 1))
    assert len(run.inspect(iter(images), 'head')) == 3


def test_images_are_read_from_a_file(tmp_path):
    run, images = random_run('patches', num_layers=1), np.random.default_rng(0).normal(size=(3, 8, 8, 1))
    np.savez(tmp_path / 'images.npz', inputs=images)
    expected = run.inspect(images, 'head')
    for path in tmp_path / 'images.npz', str(tmp_path / 'images.npz'):
        for values, other in zip(run.inspect(path, 'head'), expected, strict=True):
            np.testing.assert_array_equal(values['head'], other['head'])
    with pytest.raises(UserError, match='nothing is not a file. Use a folder of images'):
        run.inspect(str(tmp_path / 'nothing'), 'head')


def test_hidden_patches_of_series_are_not_in_a_mean():
    """The class token and two of the four patches of the second series are visible."""
    series = np.random.default_rng(0).normal(size=(2, 8, 1))
    series[1, 3:] = np.nan
    form = InputFormat((8, 1), Preprocessing([0.0], [1.0], None, None), ('a', 'b', 'c'), missing=True)
    module = PatchTransformer(BlockConfig(d_model=8, d_ff=8, num_heads=2, d_k=4, d_v=4), 1, 2, 3)
    model = Predictor(module, random_params(module, **jax.tree.map(jnp.asarray, form.arguments(series))), form)
    place = 'encoder/layers_0'
    whole, partial = (values[place].values for values in inspect(model, series, place, OPTIONS))
    mean = resolved(model, Edit('mean', place, 'test'), list_places(model), OPTIONS, lambda split: series)[place]
    np.testing.assert_allclose(mean, np.concatenate([whole, partial[:3]]).mean(axis=0), atol=1e-5)


def test_equal_modules_with_other_inputs_have_other_sizes():
    def outputs(channels):
        model = object.__new__(Forecaster)
        model.module = forecaster.Forecaster(BlockConfig(d_model=4, d_ff=4, num_heads=1, dropout=0.0), 1, 2)
        model.params, model.shape, model.horizon = {}, (4, channels), 2
        kept.append(model)  # the cache has weak references to modules
        return list_places(model)['head']['output']

    kept = []
    assert [outputs(1), outputs(3), outputs(1)] == [2, 6, 2]


def test_values_of_different_kinds_of_places_are_not_stacked(run):
    different, equal = (run.inspect([pair], ['decoder', '*/layers_*/self_attention/weights'])[0]
                        for pair in [('abc', 'b'), ('ab', 'xy')])
    for values, pattern in (different, '*'), (different, '*/weights'), (equal, '*/weights'):
        with pytest.raises(UserError, match='matches different kinds of places. Use a pattern that matches one'):
            values.stacked(pattern)
    assert equal.stacked('encoder/*/weights').axes[0] == 'layer'


def test_a_copy_of_values_is_independent(run):
    values = run.inspect([('ab', 'xy')], 'decoder')[0]['decoder']
    copied = np.array(values)
    copied += 1
    assert not np.array_equal(values, copied) and np.shares_memory(np.asarray(values), values.values)


def test_xarray_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'xarray', None)
    with pytest.raises(UserError, match='to_xarray needs xarray, which is not installed. Run pip install xarray'):
        inspection.Values('encoder', ('position',), np.zeros(1, np.float32), {}).to_xarray()


def test_values_can_be_changed_and_do_not_keep_the_whole_batch():
    values = random_run('patches', num_layers=1).inspect(np.zeros((2, 8, 8, 1)), 'head')[0]['head'].values
    assert values.base is None and values.flags.writeable


def test_a_second_call_with_the_same_places_compiles_nothing(run):
    run.inspect([('one', 'un')], 'decoder')
    before = compile_time.seconds
    run.inspect([('two', 'de')], 'decoder')
    assert compile_time.seconds == before
