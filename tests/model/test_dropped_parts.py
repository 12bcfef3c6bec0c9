"""Dropout of words and of sublayers: what is dropped, how often, and no cost at a rate of 0."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.modes import CROSS_ENTROPY, Mode, ragged_batch
from model.blocks import BlockConfig, DecoderBlock, EncoderBlock, Residual, layer_norm
from model.dropout import WordDropout
from model.evaluation import forward
from model.forecaster import Forecaster
from model.language_model import LanguageModel
from model.patches import PatchTransformer
from model.places import observing
from model.recurrent import RNNSearch
from model.transformer import Transformer
from tests.model.helpers import close, normal, random_params
from training.compiled import Compiled
from training.step import init_state, train_step

CONFIG = BlockConfig(d_model=8, d_ff=12, num_heads=2, dropout=0.0)
TOKENS = jnp.array([[5, 3, 9, 4, 11], [10, 8, 2, 7, 6]])
MODELS = {
    'transformer': (lambda **options: Transformer(CONFIG, 1, 12, 12, **options), {'source': TOKENS, 'target': TOKENS}),
    'rnnsearch': (lambda **options: RNNSearch(12, 12, d_model=6, d_hidden=5, **options),
                  {'source': TOKENS, 'target': TOKENS}),
    'language_model': (lambda **options: LanguageModel(CONFIG, 1, 12, **options), {'tokens': TOKENS})}


def in_training(module, params, *args, key=0, **kwargs):
    return module.apply({'params': params}, *args, **kwargs, deterministic=False, rngs={'dropout': jax.random.key(key)})


# Words

@pytest.mark.parametrize('rate', [0.05, 0.4])
def test_whole_words_are_dropped_at_their_rate_and_the_others_stay_as_they_are(rate):
    embedded = normal(0, 200, 60, 3)
    found = np.asarray(in_training(WordDropout(rate), {}, embedded))
    there = (found != 0).any(axis=-1)
    np.testing.assert_array_equal(found, np.where(there[..., None], embedded, 0))
    deviation = (rate * (1 - rate) / there.size) ** 0.5
    assert abs(1 - there.mean() - rate) < 4 * deviation
    for one, other in (there[:, ::2], there[:, 1::2]), (there[::2], there[1::2]):  # words are dropped independently
        assert abs((one & other).mean() - (1 - rate) ** 2) < 8 * deviation
    assert not np.array_equal(found, in_training(WordDropout(rate), {}, embedded, key=1))
    np.testing.assert_array_equal(WordDropout(rate).apply({}, embedded), embedded)


@pytest.mark.slow
@pytest.mark.parametrize('kind', MODELS)
def test_a_model_without_its_words_sees_only_how_many_there_are(kind):
    """Compares the logits of two inputs at a rate of almost 1: all embeddings are zero, so the logits are equal."""
    make, inputs = MODELS[kind]
    params = random_params(make(), **inputs)
    others = {name: (tokens + 3) % 11 + 1 for name, tokens in inputs.items()}
    dropped, of_others = (in_training(make(word_dropout=1 - 2 ** -20), params, **each) for each in (inputs, others))
    np.testing.assert_array_equal(dropped, of_others)
    assert not np.allclose(make().apply({'params': params}, **inputs), make().apply({'params': params}, **others))
    evaluated = make(word_dropout=0.9).apply({'params': params}, **inputs)
    np.testing.assert_array_equal(evaluated, make().apply({'params': params}, **inputs))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['transformer', 'rnnsearch'])
def test_source_and_target_lose_words_of_their_own(kind):
    make, inputs = MODELS[kind]
    params = random_params(make(), **inputs)
    module = make(word_dropout=0.5)
    for side in ('source', 'target'):
        other = {**inputs, side: jnp.broadcast_to(jnp.array([[1]]), TOKENS.shape)}
        same = [np.array_equal(in_training(module, params, **inputs, key=key),
                               in_training(module, params, **other, key=key)) for key in range(4)]
        assert not all(same), side  # some words of this side remain


# Embeddings

@pytest.mark.parametrize('make, inputs', [
    (lambda config: Transformer(config, 0, 12, 12), {'source': TOKENS, 'target': TOKENS}),
    (lambda config: LanguageModel(config, 0, 12), {'tokens': TOKENS}),
    (lambda config: PatchTransformer(config, 0, 4, 5), {'inputs': normal(0, 2, 8, 8, 1)}),
    (lambda config: Forecaster(config, 0, 2), {'inputs': normal(0, 2, 4, 1), 'following': normal(1, 2, 4, 1)})],
    ids=['transformer', 'language_model', 'patches', 'forecaster'])
def test_activations_of_embeddings_are_dropped_in_training(make, inputs):
    """The models have no layers, so no other activations are dropped."""
    module, without = make(CONFIG.replace(dropout=0.5)), make(CONFIG)
    params = random_params(without, **inputs)
    expected = without.apply({'params': params}, **inputs)
    np.testing.assert_array_equal(module.apply({'params': params}, **inputs), expected)
    assert not np.allclose(in_training(module, params, **inputs), expected)


def test_rnnsearch_drops_embeddings_and_readouts():
    """The rate 1 is rounded to 1 - 2^-16. With this key, all embeddings and readouts are dropped."""
    module = RNNSearch(12, 12, d_model=6, d_hidden=5, dropout=1.0, share_embeddings='none')
    params = random_params(module, TOKENS, TOKENS)
    observed = observing(functools.partial(in_training, module), read=['encoder'])
    logits, values = jax.jit(observed)(params, TOKENS, TOKENS)
    np.testing.assert_array_equal(logits, 0)
    np.testing.assert_array_equal(*values['encoder'])  # of two sentences with different words


# Sublayers

@pytest.mark.parametrize('norm, expected', [('pre', lambda x, norm: x), ('post', lambda x, norm: norm(x))])
def test_a_sublayer_is_there_unscaled_or_not_at_all(norm, expected):
    config = CONFIG.replace(norm=norm, layer_dropout=0.3)
    module, x = Residual(config), normal(0, 4, 5, 8)
    params = random_params(module, x, jnp.sin)

    def normed(x):
        return layer_norm(config).apply({'params': params['norm']}, x)

    kept = Residual(config.replace(layer_dropout=0.0)).apply({'params': params}, x, jnp.sin)
    np.testing.assert_array_equal(module.apply({'params': params}, x, jnp.sin), kept)
    run = jax.jit(jax.vmap(lambda key: module.apply({'params': params}, x, jnp.sin, deterministic=False,
                                                    rngs={'dropout': key})))
    found = np.asarray(run(jax.random.split(jax.random.key(0), 1000)))
    is_kept = np.isclose(found, kept, atol=1e-5).all(axis=(1, 2, 3))
    is_left_out = np.isclose(found, expected(x, normed), atol=1e-5).all(axis=(1, 2, 3))
    assert (is_kept ^ is_left_out).all()  # for all sentences together
    assert abs(is_left_out.mean() - 0.3) < 4 * (0.3 * 0.7 / 1000) ** 0.5


def test_all_left_out_is_the_stream():
    x, memory, config = normal(0, 2, 4, 8), normal(1, 2, 5, 8), CONFIG.replace(norm='pre', layer_dropout=1.0)
    for module, args in (EncoderBlock(config), (x,)), (DecoderBlock(config), (x, memory)):
        close(in_training(module, random_params(module, *args), *args), x)


@pytest.mark.parametrize('make, inputs', [
    (lambda config: Transformer(config, 1, 12, 12), {'source': TOKENS, 'target': TOKENS}),
    (lambda config: LanguageModel(config, 1, 12), {'tokens': TOKENS}),
    (lambda config: PatchTransformer(config, 1, 4, 5), {'inputs': normal(0, 2, 8, 8, 1)}),
    (lambda config: Forecaster(config, 1, 2), {'inputs': normal(0, 2, 4, 1), 'following': normal(1, 2, 4, 1)})],
    ids=['transformer', 'language_model', 'patches', 'forecaster'])
def test_the_sublayers_of_every_stack_are_left_out_in_training(make, inputs):
    # With pre-norm and a rate of almost 1, each layer returns its input.
    module = make(CONFIG.replace(norm='pre', layer_dropout=1.0))
    params = random_params(module, **inputs)
    stacks = sorted({'encoder', 'decoder'} & params.keys())
    read = [f'{stack}/{name}' for stack in stacks for name in ('input', 'layers_0')]
    _, values = jax.jit(observing(functools.partial(in_training, module), read=read))(params, **inputs)
    for stack in stacks:
        np.testing.assert_array_equal(values[f'{stack}/layers_0'], values[f'{stack}/input'])


@pytest.mark.slow
def test_sublayers_are_left_out_each_for_itself():
    """Uses gradients: all or none of the parameters of a sublayer have one."""
    module = Transformer(CONFIG.replace(layer_dropout=0.5, norm='pre'), 2, 12, 12)
    params = random_params(module, TOKENS, TOKENS)
    gradient = jax.jit(jax.grad(lambda params, key: module.apply(
        {'params': params}, TOKENS, TOKENS, deterministic=False, rngs={'dropout': key}).std()))
    patterns = set()
    for key in jax.random.split(jax.random.key(1), 6):
        found = gradient(params, key)
        pattern = []
        for stack in ('encoder', 'decoder'):
            for layer in ('layers_0', 'layers_1'):
                for name, part in found[stack][layer].items():
                    if not name.endswith('residual'):
                        moved = [bool(jnp.abs(leaf).max() > 0) for path, leaf in
                                 jax.tree_util.tree_leaves_with_path(part)]
                        # An encoder's sublayer has no gradient if the sublayers that read it are left out.
                        assert all(moved) or not any(moved) or stack == 'encoder'
                        pattern.append(any(moved))
        patterns.add(tuple(pattern))
    assert len(patterns) > 3


@pytest.mark.slow
@pytest.mark.parametrize('remat', [False, True])
@pytest.mark.parametrize('make, inputs', [
    (lambda config: Transformer(config, 2, 12, 12), {'source': TOKENS, 'target': TOKENS}),
    (lambda config: LanguageModel(config, 2, 12), {'tokens': TOKENS}),
    (lambda config: PatchTransformer(config, 2, 4, 5), {'inputs': normal(0, 2, 8, 8, 1)})],
    ids=['transformer', 'language_model', 'patches'])
def test_every_stack_trains_with_it_and_evaluates_without(make, inputs, remat):
    module, without = make(CONFIG.replace(layer_dropout=0.5, remat=remat)), make(CONFIG)
    params = random_params(without, **inputs)
    evaluated = jax.jit(module.apply)({'params': params}, **inputs)
    close(evaluated, without.apply({'params': params}, **inputs))
    trained = [jax.jit(functools.partial(in_training, module, key=key))(params, **inputs) for key in range(3)]
    assert not all(np.allclose(each, evaluated) for each in trained)
    close(jax.jit(functools.partial(in_training, make(CONFIG.replace(layer_dropout=0.5)), key=1))(params, **inputs),
          trained[1])  # with and without rematerialisation


# Both, in training

def compiled(mode, **options):
    config = BlockConfig(d_model=16, d_ff=32, num_heads=8, d_k=4, d_v=4, dropout=mode.dropout, layer_dropout=0.3,
                         **options)
    return Compiled(Transformer(config, 1, 32, 32, word_dropout=0.3), optax.adam(1e-3, b2=0.98),
                    ragged_batch(0), parallel=dataclasses.asdict(mode), objective=CROSS_ENTROPY,
                    dropout_key=jax.random.key(1), accumulate=mode.accumulate, devices=jax.devices()[:mode.devices])


def losses(steps):
    state, found = steps.init(seed=0), []
    for step in range(3):
        state, sums = steps.train(state, ragged_batch(step, steps.part))
        found.append(float(sums.loss / sums.tokens))
    return found, state


@pytest.mark.slow
@pytest.mark.parametrize('mode', [Mode(data=2, fsdp=2, tensor=2), Mode(data=8)], ids=str)
def test_a_mesh_drops_what_one_device_drops(mode):
    one, other = losses(compiled(Mode())), losses(compiled(mode, remat=True))
    np.testing.assert_allclose(one[0], other[0], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one[1].params, other[1].params)


@pytest.mark.slow
@pytest.mark.parametrize('mode', [Mode(data=2, mode='pmap'), Mode(accumulate=2)], ids=str)
def test_devices_and_parts_may_drop_their_own(mode):
    np.testing.assert_allclose(losses(compiled(mode))[0], losses(compiled(Mode()))[0], rtol=0.3)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('kind', MODELS)
def test_rates_of_zero_leave_no_random_numbers_in_the_step(kind):
    make, inputs = MODELS[kind]
    batch = {'inputs': inputs, 'targets': TOKENS, 'weights': jnp.ones(TOKENS.shape)}
    module, optimizer = make(), optax.sgd(0.1)
    step = functools.partial(train_step, objective=CROSS_ENTROPY, apply=forward(module), optimizer=optimizer,
                             dropout_key=jax.random.key(1))
    operations = str(jax.make_jaxpr(step)(init_state(module, optimizer, batch, 0), batch))
    assert not re.search('random_bits|random_unwrap|shift_left', operations)
