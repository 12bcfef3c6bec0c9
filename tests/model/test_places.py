"""Places: they do not change a compiled program, and the value at a place is the value that the place names."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import attention, blocks, language_model, patches, recurrent, transformer
from model.forecaster import Forecaster
from model.language_model import LanguageModel
from model.patches import PatchTransformer
from model.places import Observed, observing
from model.recurrent import RNNSearch
from model.transformer import Transformer
from tests.model.helpers import random_params
from tests.model.small_transformer import SOURCE, TARGET, tiny
from tests.model.small_transformer import transformer as small

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 1)), jnp.float32)


def recurrent_model():
    module = RNNSearch(12, 12, 8, 6, share_embeddings='none')
    return module, {'params': random_params(module, SOURCE, TARGET)}, (SOURCE, TARGET)


def language():
    module = LanguageModel(tiny(norm='pre', position='rotary', num_key_value_heads=1), 2, 12)
    return module, {'params': random_params(module, TARGET)}, (TARGET,)


def images():
    module = PatchTransformer(tiny(), 1, 2, 3)
    return module, {'params': random_params(module, IMAGES)}, (IMAGES,)


MODELS = {
    'remat': lambda: (*small(remat=True, norm='pre', dropout=0.1), (SOURCE, TARGET)),
    'chunked': lambda: (*small(attention_kernel='chunked'), (SOURCE, TARGET)),
    'recurrent': recurrent_model, 'language_model': language, 'patches': images}


def programs(module, variables, inputs):
    """Fingerprints of teacher forcing, of its gradient and of a step of a search."""
    def loss(variables):
        return module.apply(variables, *inputs, deterministic=False, rngs={'dropout': jax.random.key(0)}).sum()

    def step(variables):
        memory = module.apply(variables, inputs[0], method='encode')
        cache = module.apply(variables, memory, 2, 5, method='init_cache')
        return module.apply(variables, jnp.ones((2, 2), jnp.int32), cache, method='decode_step')

    functions = [lambda variables: module.apply(variables, *inputs), loss]
    functions += [jax.grad(loss)] if getattr(getattr(module, 'config', None), 'remat', False) else []
    functions += [step] if hasattr(module, 'decode_step') else []
    return [hashlib.md5(jax.jit(function).lower(variables).as_text().encode()).hexdigest() for function in functions]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('kind', [
    pytest.param(kind, marks=[pytest.mark.slow] if kind in ('remat', 'chunked') else []) for kind in MODELS])
def test_a_program_without_a_lens_is_the_program_of_a_model_without_places(kind, monkeypatch):
    with_places = programs(*MODELS[kind]())
    for package in attention, blocks, language_model, patches, recurrent, transformer:
        monkeypatch.setattr(package, 'place', lambda module, name, value, relation=None: value)
    assert programs(*MODELS[kind]()) == with_places


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('kind', MODELS)
def test_reading_changes_nothing_and_editing_with_the_identity_changes_no_bit(kind):
    module, variables, inputs = MODELS[kind]()
    plain = jax.jit(module.apply)(variables, *inputs)
    observed, values = jax.jit(observing(module.apply, read=lambda name: True))(variables, *inputs)
    edited = jax.jit(Observed(module, lambda numbers: lambda name: lambda value, at: value).apply)(variables, *inputs)
    assert len(values) > 10
    np.testing.assert_allclose(observed, plain, atol=1e-5)  # XLA may fuse a program with more outputs differently
    if kind != 'chunked':  # an edit of the weights is made with the plain kernel
        np.testing.assert_array_equal(edited, plain)


def test_an_edit_of_another_shape_names_the_place_and_both_shapes():
    module, variables, inputs = MODELS['patches']()
    def cut(value, at):
        return value[:, :2]

    observed = Observed(module, lambda numbers: {'encoder': cut}.get)
    with pytest.raises(ValueError, match=r'^encoder: an edit returns the shape \(2, 2, 8\), but the value has '
                                         r'\(2, 5, 8\) \(batch, position, width\)'):
        jax.eval_shape(observed.apply, variables, *inputs)


def test_the_weights_of_a_place_are_those_that_the_heads_are_made_of():
    module, variables, inputs = MODELS['language_model']()
    read = functools.partial(observing, read=lambda name: name.startswith('encoder/layers_1/self_attention/'))
    values = jax.jit(read(module.apply))(variables, *inputs)[1]
    weights, value, heads = (values[f'encoder/layers_1/self_attention/{name}'] for name in (
        'weights', 'values', 'heads'))
    np.testing.assert_allclose(heads, jnp.einsum('bhts,bsv->bthv', weights, value[:, :, 0]), atol=1e-5)


@pytest.mark.parametrize('make, inputs', [
    (lambda config: Transformer(config, 1, 12, 12), (SOURCE, TARGET)),
    (lambda config: LanguageModel(config, 1, 12), (TARGET,)),
    (lambda config: PatchTransformer(config, 1, 2, 3), (IMAGES,)),
    (lambda config: Forecaster(config, 1, 2), (jnp.ones((2, 4, 1)), jnp.ones((2, 4, 1))))],
    ids=['transformer', 'language_model', 'patches', 'forecaster'])
def test_only_scores_weights_and_outputs_of_a_bfloat16_model_are_float32(make, inputs):
    module = make(tiny(dtype=jnp.bfloat16))
    _, values = jax.eval_shape(observing(module.apply, read=lambda name: True),
                               {'params': random_params(module, *inputs)}, *inputs)
    assert {name for name, value in values.items() if value.dtype != jnp.bfloat16} == {
        name for name in values if name.endswith(('/scores', '/weights')) or name == 'head'}
