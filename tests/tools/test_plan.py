"""python -m tools.plan without libtpu: by formula, its search, its errors; and programs that are kept, on the CPU."""

import dataclasses
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import demo, fine_tune, lm_1b, rnnsearch_demo, shakespeare_char, wmt14_base
from configs.checks import config_problems
from input_pipeline.kept_data import save_kept_data
from model import parameter_count
from runtime.errors import UserError
from tests.scripts import ROOT
from tools import planning
from tools.ahead import Ahead, Figures, Recipe, TooLarge, keep, load
from tools.chips import GPU_SHARE, parse_topology
from tools.formula import REMAT, bounds, candidates, estimate, meshes
from tools.planning import Plan, as_flags, by_formula, described, ranked, sizes_of_mesh, too_large

ONE = {'data': 1, 'fsdp': 1, 'tensor': 1}


def plan(*arguments):
    return subprocess.run([sys.executable, '-m', 'tools.plan', *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)


def small(**options):
    config = demo.get_config()
    config.model.update(num_layers=1, d_model=32, d_ff=64, num_heads=4)
    config.batch.tokens = 1024
    for name, value in options.items():
        section, name = name.split('__')
        config[section][name] = value
    return config


def with_flags(config, text):
    """Returns the config with the options that a text contains as flags."""
    changed = config.copy_and_resolve_references()
    for section, name, value in re.findall(r'--config\.(\w+)\.(\w+)=(\S+)', text):
        kind = type(config[section][name])
        changed[section][name] = value == 'True' if kind is bool else kind(value)
    return changed


@pytest.mark.slow
def test_a_plan_by_formula_is_printed():
    done = plan('--config=configs/wmt14_base.py', '--topology=h100:8', '--length=32', '--json')
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found['by'] == 'formula' and found['mesh'] == {'data': 8, 'fsdp': 1, 'tensor': 1}
    assert found['tokens_per_step'] == 25_000 // 32 // 8 * 8 * 32
    seconds = found['seconds']
    assert seconds['best'] == max(seconds['arithmetic'], seconds['memory'], seconds['links'])
    assert found['tokens_per_second'] == pytest.approx(found['tokens_per_step'] / seconds['best'])
    assert found['chip_hours'] == pytest.approx(found['days'] * 24 * 8)
    assert found['share_of_peak'] == pytest.approx(found['train']['flops'] / 989e12 / seconds['best'])


@pytest.mark.parametrize('arguments, message', [
    (['--config=configs/demo.py'], '--topology is missing. Use for example --topology=v5e:4x4'),
    (['--config=configs/digits_vit.py', '--topology=h100:8'],
     'config.task=classification: must be translation or language_model for a plan'),
    (['--config=configs/demo.py', '--topology=h100:8', '--slices=1000000000000'],
     '--slices=1000000000000: must be from 1 to 1,000,000'),
    (['--config=configs/demo.py', '--topology=h100:8', '--slices=1000000'],
     '--topology=h100:8 --slices=1000000: 8,000,000 devices are more than a plan supports. Use at most 1,000,000'),
])
@pytest.mark.slow
def test_mistakes_are_reported_in_one_line(arguments, message):
    done = plan(*arguments)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.splitlines()[-1] == f'error: {message}'


@pytest.mark.slow
@pytest.mark.skipif(bool(importlib.util.find_spec('libtpu')), reason='libtpu is there')
def test_the_error_without_libtpu_contains_the_command_that_installs_it():
    done = plan('--config=configs/demo.py', '--topology=v5e:4x4')
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.splitlines()[-1].endswith('Run pip install -e ".[plan]", or use --formula')


@pytest.mark.parametrize('options, length, message', [
    ({'parallel__data': 3}, None, 'product of data=3, fsdp=1, tensor=1 must be the number of devices, but h100:8 has 8 '
     'devices. Use other sizes, or set one axis to -1 if the product of the others divides 8$'),
    ({'parallel__fsdp': 3}, None, 'h100:8 has 8 devices. Set fsdp and tensor to sizes whose product divides 8$'),
    ({}, 1_000_000, 'must hold 8 sentences of 1000000 tokens. Use at least 8000000, or reduce --length'),
    ({'model__position': 'learned', 'model__max_length': 32}, 33, '--length=33: config.model.position=learned'),
    ({'train__teacher': 'runs/demo'}, None, 'config.train.teacher=runs/demo: plans do not support'),
    ({'model__kind': 'rnnsearch'}, None, 'config.model.kind=rnnsearch: the formula supports only transformer and'),
])
def test_what_cannot_be_planned(options, length, message):
    with pytest.raises(UserError, match=message):
        by_formula(small(**options), parse_topology('h100:8'), length)


@pytest.mark.slow
@pytest.mark.parametrize('options', [{'train__accumulate': 7}, {'batch__tokens': 512}])
def test_rows_of_padding_are_planned_as_they_are_trained(options):
    """7 parts, or 8 devices, do not divide the rows of a batch."""
    plan = by_formula(small(**options), parse_topology('h100:64'))
    assert plan.tokens == options.get('batch__tokens', 1024)
    assert plan.train.flops > by_formula(small(), parse_topology('h100:8')).train.flops / 8


def test_a_plan_assumes_the_vocabulary_that_the_training_would_have(tmp_path, monkeypatch):
    """A run that is fine-tuned has its own vocabulary. config.data.tokenizer.vocab_size applies only to subwords."""
    monkeypatch.setattr(Recipe, 'flops', 1)
    save_kept_data(tmp_path / 'data', {}, {'source_vocab_size': 260, 'target_vocab_size': 260})
    (tmp_path / 'config.json').write_text(small().to_json())
    subwords, tuned, characters, octets = small(), fine_tune.get_config(str(tmp_path)), small(), small()
    subwords.data.tokenizer.vocab_size = 260
    characters.data.tokenizer.kind, octets.data.tokenizer.kind = 'char', 'byte'
    first, *others = (by_formula(config, parse_topology('h100:8')) for config in (subwords, tuned, characters, octets))
    for plan in others:
        assert plan.train == first.train and 'the vocabulary has 260 tokens' in described(plan)


def test_a_plan_for_an_imported_model_needs_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Recipe, 'flops', 1)
    imported, topology = small(), parse_topology('h100:8')
    imported.data.tokenizer.kind = 'sentencepiece'
    save_kept_data(tmp_path / 'data', {}, {'source_vocab_size': 900, 'target_vocab_size': 900})
    (tmp_path / 'config.json').write_text(imported.to_json())
    with pytest.raises(UserError, match='tokenizer.kind=sentencepiece: .* Use --config=configs/fine_tune.py:RUN'):
        by_formula(imported, topology)
    assert 'has 900 tokens' in described(by_formula(fine_tune.get_config(str(tmp_path)), topology))


@pytest.mark.parametrize('variable, value, fits', [
    (None, None, False), ('XLA_CLIENT_MEM_FRACTION', '.9', True), ('XLA_PYTHON_CLIENT_MEM_FRACTION', '.9', True)])
def test_a_plan_for_a_gpu_fits_into_the_share_of_the_memory_that_jax_uses(monkeypatch, variable, value, fits):
    """The step needs 65.2 GiB. JAX uses 59.3 GiB of an H100 by default."""
    monkeypatch.setattr(Recipe, 'flops', 1)
    for name in GPU_SHARE:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    config, topology = demo.get_config(), parse_topology('h100:1')
    config.batch.tokens = 806_429
    plan = by_formula(config, topology)
    assert plan.fits is fits and 65 < plan.train.peak / 2 ** 30 < 65.5
    assert plan.to_dict()['memory']['available'] / 2 ** 30 == pytest.approx(79 * (0.9 if fits else 0.75))
    if not fits:
        message = str(too_large(config, topology, None, plan.train.peak))
        assert 'has 59.25 GiB for JAX, 75% of its memory (set XLA_CLIENT_MEM_FRACTION to change the share)' in message


@pytest.mark.parametrize('option', ['r_drop', 'simcut'])
def test_the_second_pass_of_r_drop_and_simcut_needs_memory_and_traffic(monkeypatch, option):
    monkeypatch.setattr(Recipe, 'flops', 1)
    one, two = (by_formula(small(batch__tokens=2 ** 20, **{f'train__{option}': weight}), parse_topology('h100:8')).train
                for weight in (0.0, 5.0))
    assert 1.5 * one.temporaries < two.temporaries
    assert 1.5 * one.traffic < two.traffic <= 2 * one.traffic


def test_arithmetic_and_memory_are_those_of_the_model():
    recipe = Recipe(small())
    figures = estimate(recipe, ONE)
    count = parameter_count(nn.unbox(recipe.boxed.params))
    assert figures.arguments == pytest.approx(4 * 3 * count, rel=1e-3)  # parameters and two moments
    eight = estimate(recipe, {'data': 2, 'fsdp': 4, 'tensor': 1})
    assert eight.flops == pytest.approx(figures.flops / 8)
    assert figures.arguments / 4 < eight.arguments < figures.arguments / 3.5  # norms and biases are whole
    assert {(each.kind, each.axes) for each in eight.collectives} == {('all-reduce', 'data+fsdp'),
                                                                    ('all-gather', 'fsdp')}
    assert not figures.collectives


def test_activations_of_float32_take_twice_the_bytes_of_bfloat16(monkeypatch):
    monkeypatch.setattr(Recipe, 'flops', 1)
    whole, half = (estimate(Recipe(small(model__dtype=dtype, batch__tokens=2 ** 20)), {**ONE, 'tensor': 2})
                   for dtype in ('float32', 'bfloat16'))
    assert 1.7 * half.temporaries < whole.temporaries < 2 * half.temporaries
    assert 1.7 * half.traffic < whole.traffic < 2 * half.traffic
    assert whole.collectives[0].bytes == 2 * half.collectives[0].bytes and whole.arguments == half.arguments


@pytest.mark.parametrize('topology, dtype, precision, rate', [
    ('h100:8', 'bfloat16', 'default', 989e12), ('h100:8', 'float32', 'default', 494.5e12),
    ('h100:8', 'float32', 'auto', 494.5e12), ('h100:8', 'float32', 'bfloat16', 989e12),
    ('h100:8', 'float32', 'float32', 67e12), ('a100:8', 'float32', 'default', 156e12),
    ('a100:8', 'float32', 'float32', 19.5e12), ('v5e:2x2', 'float32', 'default', 197e12),
    ('v5e:2x2', 'float32', 'float32', 197e12 / 6)])
def test_the_peak_rate_is_that_of_the_precision_of_the_products(monkeypatch, topology, dtype, precision, rate):
    monkeypatch.setattr(Recipe, 'flops', 10 ** 12)
    plan = by_formula(small(model__dtype=dtype, train__matmul_precision=precision), parse_topology(topology))
    assert plan.bounds.arithmetic == pytest.approx(plan.train.flops / rate)
    assert plan.to_dict()['peak_rate'] == pytest.approx(rate)


def test_a_step_of_beam_search_has_the_default_precision(monkeypatch):
    """train.matmul_precision has no effect on it."""
    monkeypatch.setattr(Recipe, 'flops', 1)
    config = small(model__dtype='float32', train__matmul_precision='float32')
    plan = dataclasses.replace(by_formula(config, parse_topology('v5e:2x2')), decode=Figures(197e12, 0, 0, 0, 0, 0, ()))
    assert plan.to_dict()['decode']['seconds'] == pytest.approx(1)


def test_frozen_parameters_have_no_gradients_and_no_moments(monkeypatch):
    monkeypatch.setattr(Recipe, 'flops', 1)
    whole, adapted = (estimate(Recipe(small(train__lora_rank=rank)), {'data': 4, 'fsdp': 1, 'tensor': 1})
                      for rank in (0, 1))
    recipe = Recipe(small(train__lora_rank=1))
    factors = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(recipe.boxed.params['adapters']['of']))
    assert adapted.collectives[0].bytes == jnp.dtype(recipe.config.model.dtype).itemsize * factors  # no table
    assert adapted.collectives[0].bytes < 0.1 * whole.collectives[0].bytes
    assert adapted.traffic < whole.traffic and adapted.arguments < whole.arguments / 2


def test_the_layers_of_the_decoder_count(monkeypatch):
    monkeypatch.setattr(Recipe, 'flops', 1)

    def links(num_layers, num_decoder_layers):
        recipe = Recipe(small(model__num_layers=num_layers, model__num_decoder_layers=num_decoder_layers))
        return estimate(recipe, {**ONE, 'tensor': 2}).collectives[0].bytes

    assert links(1, 2) == 1.5 * links(1, 0)


@pytest.mark.slow
def test_flops_are_six_for_each_parameter_and_token():
    recipe = Recipe(wmt14_base.get_config())
    embedded = 37_000 * 512  # as the output projection it is a matrix too
    expected = 6 * parameter_count(nn.unbox(recipe.boxed.params)) * recipe.tokens
    assert embedded < expected < recipe.flops < 1.15 * expected  # attention's products besides


@pytest.mark.slow
def test_remat_repeats_the_forward_pass_and_keeps_less():
    plain, products, again = (
        estimate(Recipe(small(model__remat=remat, model__remat_keep=keep, model__num_layers=6)), ONE)
        for remat, keep in REMAT)
    assert 1.1 < again.flops / plain.flops < 4 / 3 + 0.01
    assert plain.flops < products.flops < again.flops
    assert again.temporaries < products.temporaries < plain.temporaries


def test_meshes_multiply_to_the_devices():
    config = wmt14_base.get_config()
    for topology in parse_topology('v5e:4x4'), parse_topology('v5e:2x2', slices=2), parse_topology('h100:8'):
        found = list(meshes(topology, config))
        assert len(found) == len(set(found)) > 3
        assert all(math.prod(each) == topology.devices for each in found)
        assert all(fsdp * tensor <= math.prod(topology.shape) for _, fsdp, tensor in found)


@pytest.mark.parametrize('recipe', [lm_1b, rnnsearch_demo, shakespeare_char])
def test_the_flags_of_every_candidate_change_its_recipe_into_the_candidate(recipe):
    """lm_1b sets remat_keep=products, rnnsearch has no remat, and shakespeare_char has few rows."""
    config, topology, free = recipe.get_config(), parse_topology('v5e:1x2'), Figures(0, 0, 0, 0, 0, 0, ())
    config.parallel.mode, config.data.dir = 'pmap', 'x' if config.data.source == 'files' else ''
    for candidate in candidates(topology, config):
        flags = as_flags(Plan(candidate, topology, sizes_of_mesh(candidate, topology), (1, 1), {}, free))
        changed = with_flags(config, flags)
        assert changed.to_dict() == candidate.to_dict() and config_problems(changed) == [], flags


@pytest.mark.slow
def test_the_search_prefers_what_fits_and_is_fastest():
    topology, config = parse_topology('v5e:2x2'), small()
    plans = ranked(config, topology)
    assert len(plans) > 20 and len(plans) <= len(list(candidates(topology, config)))
    speeds = [each.tokens / bounds(each.train, topology, each.mesh, each.rate).seconds for each in plans if each.fits]
    assert all(one >= 0.99 * other for one, other in itertools.pairwise(speeds))
    assert [each.fits for each in plans] == sorted((each.fits for each in plans), reverse=True)


def test_a_search_plans_padding_rows(monkeypatch):
    """With one head, no mesh of 128 devices divides the 16 rows of a batch."""
    monkeypatch.setattr(planning, 'candidates', lambda *arguments: itertools.islice(candidates(*arguments), 1))
    topology = parse_topology('h100:128')
    found, = ranked(small(model__num_heads=1), topology)
    alone = by_formula(found.config, topology)
    assert found.tokens == alone.tokens == 1024 and found.train.temporaries == alone.train.temporaries
    assert found.train.flops == pytest.approx(alone.train.flops, rel=0.01)


def test_a_search_skips_only_candidates_that_are_too_large(monkeypatch):
    monkeypatch.setattr(Recipe, 'flops', 1)
    topology = parse_topology('v5e:2x2')
    best, second = by_formula(small(), topology), by_formula(small(model__remat=True), topology)
    errors: list[UserError] = [TooLarge('too large')]
    monkeypatch.setattr(planning, 'ranked', lambda *arguments: [best, second])
    monkeypatch.setattr(planning, 'devices_of', lambda topology: [])

    def compiled(config, *arguments, **options):
        if errors:
            raise errors.pop()
        return by_formula(config, topology)

    monkeypatch.setattr(planning, 'compiled', compiled)
    assert planning.search(small(), topology).config.model.remat
    errors.append(UserError('another mistake'))
    with pytest.raises(UserError, match='another mistake'):
        planning.search(small(), topology)
    errors += [TooLarge('too large')] * 2
    with pytest.raises(TooLarge, match='v5e:2x2: all 2 candidates that fit according to the formula were compiled, and '
                                       'none fits'):
        planning.search(small(), topology)


def test_a_search_compiles_the_best_candidates_by_formula_and_returns_the_fastest(monkeypatch):
    monkeypatch.setattr(Recipe, 'flops', 1)
    topology, compiled = parse_topology('v5e:2x2'), []
    traffic = {1: 3e9, 2: 2e9, 4: 1e9}
    plans = {accumulate: by_formula(small(train__accumulate=accumulate), topology) for accumulate in traffic}

    def compile_plan(config, *arguments, **options):
        compiled.append(number := config.train.accumulate)
        train = dataclasses.replace(plans[number].train, traffic=traffic[number])
        return dataclasses.replace(plans[number], train=train)

    monkeypatch.setattr(planning, 'ranked', lambda *arguments: list(plans.values()))
    monkeypatch.setattr(planning, 'devices_of', lambda topology: [])
    monkeypatch.setattr(planning, 'compiled', compile_plan)
    assert planning.search(small(), topology, count=2).config.train.accumulate == 2
    assert compiled == [1, 2]


@pytest.mark.skipif(bool(importlib.util.find_spec('libtpu')), reason='libtpu is there')
def test_a_search_without_libtpu_is_an_error():
    with pytest.raises(UserError, match='--topology=v5e:4x4: compiling for a TPU needs libtpu'):
        planning.search(small(), parse_topology('v5e:4x4'))


@pytest.mark.slow
def test_a_search_by_formula_compiles_nothing():
    done = plan('--config=configs/demo.py', '--topology=v5e:1x1', '--search', '--formula', '--json',
                *(f'--config.model.{name}' for name in ('num_layers=1', 'd_model=32', 'd_ff=64', 'num_heads=4')))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)['by'] == 'formula' and 'fit according to the formula. The best:' in done.stderr


@pytest.mark.slow
def test_a_plan_that_is_too_large_is_reported_with_options_that_fit():
    config, topology = lm_1b.get_config(), parse_topology('v5e:4x4')
    config.model.update(num_layers=1, d_model=8192, d_ff=32_768)
    whole = by_formula(config, topology)
    assert not whole.fits  # parameters and moments of 1.3 billion on every chip of 16 GiB
    assert 'available 16.00 GiB' in described(whole)
    with pytest.raises(UserError, match='By formula, these options would fit: .*fsdp=') as error:
        raise too_large(config, topology, None, 2.0 ** 35, 2.0 ** 34)
    assert '16.00 GiB, but the step needs about 32.00 GiB' in str(error.value)
    assert by_formula(with_flags(config, str(error.value)), topology).fits
    config.model.update(d_model=2 ** 15, num_heads=128, d_ff=2 ** 17)
    assert 'no mesh, remat or train.accumulate would fit' in str(too_large(config, topology, None, whole.train.peak))


def test_the_options_that_would_fit_need_less_memory_than_a_program_that_was_too_large(monkeypatch):
    """By formula, the program fits. If the compiler reports no size, the suggested options only need less memory."""
    monkeypatch.setattr(Recipe, 'flops', 1)
    config, topology = small(batch__tokens=2 ** 16), parse_topology('v5e:1x1')
    own, plans = by_formula(config, topology), ranked(config, topology)
    monkeypatch.setattr(planning, 'ranked', lambda *arguments: plans)
    assert own.fits
    for needed, factor in (None, 1), (2.0 ** 35, 2):
        suggested = with_flags(config, str(too_large(config, topology, None, needed, 2.0 ** 34)))
        assert by_formula(suggested, topology).train.peak < own.train.peak / factor


def test_the_error_about_a_step_of_beam_search_that_is_too_large_contains_advice(monkeypatch):
    class Programs:
        train, decode = 'train', 'decode'

        def __init__(self, *arguments):
            pass

        def figures(self, program):
            if program == 'decode':
                raise TooLarge('RESOURCE_EXHAUSTED', 2.0 ** 35, 2.0 ** 34)
            return Figures(0, 0, 0, 0, 0, 0, ())

        def held(self):
            return {}

    monkeypatch.setattr(planning, 'Ahead', Programs)
    monkeypatch.setattr(planning, 'devices_of', lambda topology: [])
    topology = parse_topology('v5e:2x2')
    assert planning.compiled(small(), topology, decode=False).decode is None
    with pytest.raises(TooLarge, match='v5e:2x2: a device has 16.00 GiB, but a step of beam search needs about 32.00 '
                       'GiB. Use --nodecode, or reduce config.decode.batch_size=7 or config.decode.beam=3'):
        planning.compiled(small(decode__batch_size=7, decode__beam=3), topology)


def test_a_model_without_a_formula_can_be_too_large():
    error = too_large(rnnsearch_demo.get_config(), parse_topology('v5e:2x2'), None, None)
    assert str(error) == ('v5e:2x2: a device has 16.00 GiB, but the step needs more. Use more or larger chips, or '
                          'reduce the model or the batch')


@pytest.mark.slow
def test_a_program_that_is_kept_computes_the_same(tmp_path):
    devices = jax.devices()[:4]
    ahead = Ahead(Recipe(small()), {'mode': 'jit', 'data': 2, 'fsdp': 2, 'tensor': 1}, devices)
    keep(ahead.train, tmp_path / 'step')
    loaded = load(tmp_path / 'step', ahead.steps.lower(ahead.batch), devices)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(lambda leaf: rng.integers(3, 100, leaf.shape).astype(leaf.dtype), ahead.batch)
    expected, sums = ahead.steps.train(ahead.steps.init(0), batch)
    placed = jax.device_put(batch, jax.sharding.NamedSharding(
        ahead.steps.mesh, jax.sharding.PartitionSpec(('data', 'fsdp'))))
    found, found_sums = loaded(ahead.steps.init(0), placed, ahead.steps.objective)
    jax.tree.map(np.testing.assert_array_equal, (found, found_sums), (expected, sums))


@pytest.mark.slow
def test_rnnsearch_is_planned_by_compiling():
    config = rnnsearch_demo.get_config()
    config.model.d_model = 8
    config.model.recurrent.update(d_hidden=8, d_align=8)
    ahead = Ahead(Recipe(config), {'mode': 'jit', 'data': 4, 'fsdp': 1, 'tensor': 1}, jax.devices()[:4])
    assert all(ahead.figures(program).traffic for program in (ahead.train, ahead.decode))


@pytest.mark.slow
def test_figures_of_a_compiled_step_are_near_the_formula():
    devices = jax.devices()[:4]
    recipe = Recipe(small(decode__batch_size=16))  # so that decoding needs less memory than a train step
    ahead = Ahead(recipe, {'mode': 'jit', 'data': 1, 'fsdp': 4, 'tensor': 1}, devices)
    figures, formula = ahead.figures(ahead.train), estimate(recipe, ahead.mesh)
    assert figures.flops == formula.flops
    batch = sum(leaf.nbytes for leaf in jax.tree.leaves(ahead.batch)) / 4
    assert figures.arguments == pytest.approx(formula.arguments + batch, rel=0.02)
    assert ahead.held()['optimizer'] == pytest.approx(2 * ahead.held()['parameters'], abs=16)
    assert {'fsdp'} == {each.axes for each in figures.collectives}
    decode = ahead.figures(ahead.decode)
    assert decode.traffic and decode.peak < figures.peak
