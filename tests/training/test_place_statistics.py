"""Statistics of places at evaluations: they equal NumPy's, and a training without them is the same bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inference
from configs import fashion_mnist_vit, shakespeare_char
from inference.inspection import list_places
from inference.run import check_places, make_answerer
from input_pipeline.tokenizer import ByteTokenizer
from model.blocks import BlockConfig
from model.build import build_model
from model.patches import PatchTransformer
from model.places import observing
from runtime.errors import UserError
from tests.model.helpers import normal, random_params
from tests.random_run import random_run
from tests.tiny_run import outcome, tiny_config
from training.loop import train
from training.place_statistics import place_sums
from training.trackers import grouped

PLACES = '*/weights, encoder/layers_0, */queries, pooled'
WEIGHTS = 'encoder/layers_0/self_attention/weights'


def entropies(weights):
    """The entropy of each row in float64."""
    weights = np.asarray(weights, np.float64)
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=-1)


@pytest.mark.slow
def test_a_run_logs_statistics_of_its_validation_split_and_its_training_changes_no_bit(
        whole, cache, tmp_path):
    run = train(tiny_config(cache, track__places=PLACES), tmp_path / 'run')
    params, lines = outcome(tmp_path / 'run')
    logged = [{name: value for name, value in line.items() if '/' in name} for line in lines]
    assert (params, [{name: value for name, value in line.items() if '/' not in name} for line in lines]) == (
        outcome(whole))
    assert [bool(names) for names in logged] == ['validation_loss' in line for line in lines]
    images = run.data().arrays.inputs('validation')
    values = inference.load(tmp_path / 'run', 'latest').inspect(images, PLACES.split(', '))
    for head in range(2):
        weights = np.stack([each[WEIGHTS].values[head] for each in values])
        assert logged[-1][f'entropy/{WEIGHTS}/{head}'] == pytest.approx(entropies(weights).mean(), rel=1e-5)
        assert logged[-1][f'first_token/{WEIGHTS}/{head}'] == pytest.approx(weights[..., 0].mean(), rel=1e-5)
        queries = np.stack([each['encoder/layers_0/self_attention/queries'].values[:, head] for each in values])
        assert logged[-1][f'norm/encoder/layers_0/self_attention/queries/{head}'] == pytest.approx(
            np.linalg.norm(queries, axis=-1).mean(), rel=1e-5)
    for name in ('encoder/layers_0', 'pooled'):
        norms = [np.linalg.norm(each[name].values, axis=-1).mean() for each in values]
        assert logged[-1][f'norm/{name}'] == pytest.approx(np.mean(norms), rel=1e-5)
    assert len(logged[-1]) == 2 * 2 + 2 + 2
    assert grouped(f'entropy/{WEIGHTS}/0') == f'entropy/{WEIGHTS}/0'


@pytest.mark.slow
def test_padding_is_not_counted():
    run = random_run('transformer')
    pairs = [('abc', 'de'), ('f', 'ghijk')]
    side = {name: run.model.tokenizers[name].encode for name in ('source', 'target')}
    batch = {'inputs': {name: np.zeros((4, 8), np.int32) for name in side}, 'targets': None, 'weights': None}
    for row, texts in enumerate(pairs):
        for (name, encode), text, extra in zip(side.items(), texts, ([2], []), strict=True):
            tokens = [*([1] if name == 'target' else []), *encode(text), *extra]
            batch['inputs'][name][row, :len(tokens)] = tokens
    names = ['decoder/layers_1/cross_attention/weights', 'encoder/layers_0/self_attention/weights',
             'decoder/layers_0/cross_attention/keys', 'decoder/layers_1']
    apply = jax.jit(observing(run.model.module.apply, read=names.__contains__))
    batch['inputs'] = jax.tree.map(jax.numpy.asarray, batch['inputs'])
    _, captured = apply({'params': run.model.params}, **batch['inputs'])
    values = run.inspect(pairs, names)
    for name in names:
        arrays = [each[name].values for each in values]
        sums = place_sums(name, captured[name], batch, run.model.module)
        count = np.asarray(sums.pop('count'))
        axis = 0 if name.endswith('keys') or name == 'decoder/layers_1' else 1
        assert (count == sum(array.shape[axis] for array in arrays)).all()
        if axis:
            expected = {'entropy': sum(entropies(array).sum(axis=1) for array in arrays),
                        'first_token': sum(array[..., 0].sum(axis=1) for array in arrays)}
        else:
            expected = {'norm': sum(np.linalg.norm(array, axis=-1).sum(axis=0) for array in arrays)}
        assert sums.keys() == expected.keys()
        for statistic, numbers in expected.items():
            np.testing.assert_allclose(sums[statistic], numbers, rtol=1e-4)


@pytest.mark.slow
def test_documents_of_one_row_have_the_statistics_of_separate_rows():
    run = random_run('language_model')
    packed = jax.tree.map(jax.numpy.asarray, {
        'tokens': np.array([[1, 7, 8, 2, 1, 9, 5, 2]]), 'segments': np.array([[1] * 4 + [2] * 4]),
        'positions': np.array([[0, 1, 2, 3] * 2])})
    separate = {'tokens': packed['tokens'].reshape(2, 4)}
    names = ['encoder/layers_1/self_attention/weights', 'encoder/layers_0']
    apply = jax.jit(observing(run.model.module.apply, read=names.__contains__))
    one, other = ([place_sums(name, apply({'params': run.model.params}, **inputs)[1][name],
                              {'inputs': inputs, 'targets': None, 'weights': None}, run.model.module)
                   for name in names] for inputs in (packed, separate))
    jax.tree.map(lambda left, right: np.testing.assert_allclose(left, right, rtol=1e-5), one, other)


@pytest.mark.slow
@pytest.mark.parametrize('pooling, tokens', [('mean', 6), ('class_token', 8)])
def test_hidden_patches_of_series_are_not_counted(pooling, tokens):
    """Of the second series, only two of the four patches are visible. The third example is a padding row."""
    module = PatchTransformer(BlockConfig(d_model=8, d_ff=8, num_heads=2, d_k=4, d_v=4), 1, 2, 3, pooling=pooling)
    visible = np.arange(8) < np.array([[8], [3], [8]])
    inputs = {'inputs': normal(0, 3, 8, 1), 'visible': jnp.asarray(visible)}
    names = [WEIGHTS, 'embedding', 'pooled']
    apply = jax.jit(observing(module.apply, read=names.__contains__))
    _, captured = apply({'params': random_params(module, **inputs)}, **inputs)
    batch = {'inputs': inputs, 'targets': None, 'weights': jnp.array([1.0, 1.0, 0.0])}
    sums = {name: place_sums(name, captured[name], batch, module) for name in names}
    assert [sums[name]['count'].tolist() for name in names] == [[tokens, tokens], 6, 2]
    weights = np.asarray(captured[WEIGHTS])
    second = weights[1, :, :tokens - weights.shape[2]]  # the visible queries are the first
    expected = entropies(weights[0]).sum(axis=1) + entropies(second).sum(axis=1)
    np.testing.assert_allclose(sums[WEIGHTS]['entropy'], expected, rtol=1e-4)


@pytest.mark.parametrize('options, message', [
    ({'track__places': 'encoder/layer_0'}, "config.track.places: place 'encoder/layer_0': the model has no such place. "
                                           'Did you mean encoder/layers_0'),
    ({'track__places': ' ,'}, "config.track.places=' ,' names no place. Use names or patterns of places"),
    ({'track__places': 'encoder/layers_0/*/scores'}, 'attention scores have no statistic, .* Use '
                                                     'encoder/layers_0/self_attention/weights'),
    ({'train__edits': '[{"edit": "zero", "place": "encoder/layer_0"}]'}, "place 'encoder/layer_0': the model has no")])
def test_unknown_places_are_refused_before_the_run_directory_exists(options, message, cache, tmp_path):
    with pytest.raises(UserError, match=message):
        train(tiny_config(cache, **options), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('patch', [4, 3])  # only the data shows that patches of 3 x 3 pixels do not fit
def test_the_names_of_places_do_not_depend_on_the_stem(patch):
    config = fashion_mnist_vit.get_config()
    config.model.update(num_layers=1, patches={'patch': patch})
    config.track.places = '*/weights'
    check_places(config)


def test_a_model_with_fewer_positions_than_other_models_lists_its_places():
    config = shakespeare_char.get_config()
    config.model.update(num_layers=1, position='learned', max_length=2)
    config.data.context, config.track.places = 2, '*/weights'
    check_places(config)
    module = build_model(config.model, vocab_size=8)
    model = make_answerer(config, module, {}, {'text': ByteTokenizer()}, {'vocab_size': 8})
    assert 'encoder/layers_0/self_attention/weights' in list_places(model)
