"""Runs without some of their heads: the outputs equal the outputs of the run with these heads set to zero."""

import numpy as np
import pytest

import inference
from configs.checks import check_config
from inference.edits import Edit
from inference.run import Run
from interchange import export as module
from interchange.export import export_without_heads, pruned_model
from run_directory.workdir import RunDirectory
from runtime.errors import UserError
from tests.random_run import random_run

PAIRS = [('a source', 'its target'), ('b', 'c d')]
REMOVED = [('encoder/layers_0/self_attention/heads', 1), ('encoder/layers_1/self_attention/heads', 3),
           ('decoder/layers_0/self_attention/heads', 0), ('decoder/layers_1/self_attention/heads', 2),
           ('decoder/layers_0/cross_attention/heads', 0), ('decoder/layers_0/cross_attention/heads', 1),
           ('decoder/layers_1/cross_attention/heads', 3)]


def log_probs(run):
    return [output.hypotheses[0].log_prob for output in run.forced(PAIRS)]


@pytest.mark.slow
def test_the_exported_run_is_smaller_and_has_the_outputs_of_heads_set_to_zero(tmp_path, monkeypatch):
    run = random_run('transformer', num_heads=4, attention_bias='all', score='general')
    monkeypatch.setattr(module, 'read_models', lambda folders, checkpoint: run._trained)
    export_without_heads('random', tmp_path / 'pruned', REMOVED)
    pruned = inference.load(tmp_path / 'pruned')
    zeroed = run.edited([Edit('zero', place, heads=[head]) for place, head in REMOVED])
    assert pruned.config.model.num_heads == 3 and run.config.model.num_heads == 4
    assert pruned.parameters < run.parameters
    np.testing.assert_allclose(log_probs(pruned), log_probs(zeroed), rtol=1e-5)
    assert np.abs(np.subtract(log_probs(zeroed), log_probs(run))).min() > 1e-3
    with pytest.raises(UserError, match='pruned is an exported model, which cannot be trained further'):
        RunDirectory(str(tmp_path / 'pruned'), pruned.config)


@pytest.mark.slow
def test_all_heads_of_all_layers_can_be_removed():
    run = random_run('language_model', num_heads=2)
    every = [(f'encoder/layers_{layer}/self_attention/heads', head) for layer in range(2) for head in range(2)]
    pruned = Run(pruned_model(run._trained, every))
    zeroed = run.edited([Edit('zero', '*/heads')])
    assert pruned.config.model.num_heads == 1
    np.testing.assert_allclose(*([output.hypotheses[0].log_prob for output in each.forced(['some text'])]
                                 for each in (pruned, zeroed)), rtol=1e-5)


def test_the_config_without_heads_names_no_removed_head():
    run = random_run('transformer', num_heads=4)
    run.config.train.update(guided_alignment=0.1, guided_head='cross:1:4')
    pruned = pruned_model(run._trained, REMOVED)
    assert pruned.config.train.guided_head == '' and run.config.train.guided_head == 'cross:1:4'
    check_config(pruned.config)


@pytest.mark.parametrize('options, removed, message', [
    ({'position': 'alibi'}, [], 'with config.model.position=alibi, each head may have a different bias'),
    ({'num_key_value_heads': 1}, [], 'heads share keys and values'),
    ({}, [('encoder/layers_0/self_attention/heads', 2)], 'there is no head 2 at encoder/layers_0/self_attention/heads'),
    ({}, [('encoder/layers_0/feed_forward', 0)], 'there is no head 0 at encoder/layers_0/feed_forward')])
def test_heads_that_cannot_be_removed_are_refused(options, removed, message):
    with pytest.raises(UserError, match=message):
        pruned_model(random_run('language_model', **options)._trained, removed)


def test_heads_with_an_unknown_position_scheme_are_not_removed():
    run = random_run('language_model')
    run.config.model.position = 'a new bias'
    with pytest.raises(UserError, match='position=a new bias, each head may have a different bias'):
        pruned_model(run._trained, [])


def test_recurrent_models_have_no_heads_to_remove():
    with pytest.raises(UserError, match='heads can be removed only from a single run with model.kind=transformer'):
        pruned_model(random_run('rnnsearch')._trained, [])
