"""Gates of attention heads: 0 removes a head, importance is the gradient, and no score compiles a program."""

import copy
import types

import numpy as np
import pytest

from analysis import heads as module
from analysis import inside
from analysis.alignments import best_head
from analysis.heads import (
    GatedHeads,
    pruning_curve,
    pruning_curves,
    pruning_figure,
    ranked,
    scores_without_heads,
    shuffled,
    without_head,
)
from configs import demo
from inference.options import SearchOptions
from inference.translate import Translator
from runtime.errors import UserError
from tests.random_run import random_run

PAIRS = [('a source', 'its target'), ('b', 'c d'), ('one more', '')]
PLACE = 'decoder/layers_1/cross_attention/heads'
OPTIONS = SearchOptions(method='greedy', extra_length=1, batch_size=4)


@pytest.fixture(scope='module')
def heads():
    return GatedHeads(random_run('transformer', num_heads=4, activation='gelu'))  # has no kinks


def losses(model):
    return [-output.hypotheses[0].log_prob for output in model.forced_all(PAIRS, OPTIONS)]


@pytest.mark.slow
def test_gates_remove_heads_and_compile_nothing(heads):
    every = heads.ones()
    assert {kind: len(names) for kind, names in heads.kinds().items()} == {'encoder': 2, 'decoder': 2, 'cross': 2}
    whole, fewer = losses(heads.model(every)), losses(heads.model(without_head(every, PLACE, 2)))
    compiled = heads.run.model.target_log_probs._cache_size()
    none = losses(heads.model(without_head(without_head(every, PLACE, 1), PLACE, 2)))
    assert len({sum(each) for each in (whole, fewer, none)}) == 3
    assert heads.run.model.target_log_probs._cache_size() == compiled
    np.testing.assert_allclose(losses(heads.run.edited([{'edit': 'zero', 'place': PLACE, 'heads': [2]}]).model), fewer,
                               rtol=1e-5)


def test_the_heads_of_an_ensemble_have_kinds():
    heads = object.__new__(GatedHeads)
    heads.counts = {f'members_{member}/{layer}_attention/heads': 4 for member in (0, 1)
                    for layer in ('encoder/layers_0/self', 'decoder/layers_0/self', 'decoder/layers_0/cross')}
    assert {kind: len(names) for kind, names in heads.kinds().items()} == {'encoder': 2, 'decoder': 2, 'cross': 2}


@pytest.mark.slow
def test_importance_is_the_gradient_of_the_loss_by_each_gate(heads):
    every = heads.ones()

    def shifted(change):
        gates = np.array(every[PLACE])
        gates[1] += change
        return np.array(losses(heads.model({**every, PLACE: gates})))

    expected = np.abs(shifted(0.01) - shifted(-0.01)).mean() / 0.02
    importance = heads.importance(PAIRS)
    assert {name: len(values) for name, values in importance.items()} == heads.counts
    np.testing.assert_allclose(importance[PLACE][1], expected, rtol=0.02)


def test_gates_keep_the_edits_of_the_run(heads):
    gated = GatedHeads(heads.run.edited([{'edit': 'scale', 'place': PLACE, 'by': 0.25}]))

    def factors(gates):
        numbers = gated.model(gates).params['edits']
        return np.prod([np.broadcast_to(edit[PLACE], (4, 1)) for edit in numbers if PLACE in edit], axis=0).ravel()

    assert factors(gated.ones()).tolist() == [0.25] * 4
    assert factors({PLACE: np.array([1, 0, 2, 1])}).tolist() == [0.25, 0, 0.5, 0.25]


@pytest.mark.slow
def test_the_importance_reads_long_pairs_as_the_perplexity_does():
    run = random_run('transformer', num_layers=1, position='learned', max_length=16)
    heads, source, target = GatedHeads(run), 'a source of 33 tokens in 33 bytes', 'a target of 33 tokens in 33 bytes'
    heads.run.model.max_length = 16
    whole, begin = heads.importance([(source, target)]), heads.importance([(source[:15], target[:16])])
    for place, values in whole.items():
        np.testing.assert_array_equal(values, begin[place])


def test_scores_without_each_head_and_the_pruning_curve(heads, monkeypatch):
    def score(model, pairs, options, metric, language):
        """1 as long as head 1 of the second layer is there, and less for each other head that is missing."""
        gates = heads.ones() | {name: np.ravel(number) for numbers in model.params['edits']
                                for name, number in numbers.items()}
        return gates[PLACE][1] - 0.01 * sum((each == 0).sum() for each in gates.values())

    monkeypatch.setattr(module, 'translation_score', score)
    whole, without = scores_without_heads(heads, PAIRS, 'cross', OPTIONS)
    assert whole == 1
    np.testing.assert_allclose(without, [[0.99] * 4, [0.99, -0.01, 0.99, 0.99]], atol=1e-6)
    order = ranked({name: np.arange(4) + index for index, name in enumerate(heads.counts)})
    assert sorted(order) == sorted(shuffled(heads)) and order != shuffled(heads)
    curve = pruning_curve(heads, PAIRS, order, OPTIONS, steps=3)
    assert [count for count, _ in curve] == [0, 8, 16, 24] and curve[0][1] == 1
    monkeypatch.setattr(heads, 'importance', lambda pairs: {name: np.arange(4) for name in heads.counts})
    curves = pruning_curves(heads, PAIRS, OPTIONS, PAIRS, steps=2, seeds=1)
    assert {kind: list(orders) for kind, orders in curves.items()} == dict.fromkeys(
        ('encoder', 'decoder', 'cross'), ['by importance', 'at random, seed 0'])
    np.testing.assert_allclose(curves['encoder']['by importance'], [[0, 1], [4, 0.96], [8, 0.92]], atol=1e-6)
    lines = pruning_figure(curves).axes[2].lines  # of cross-attention
    np.testing.assert_allclose(lines[0].get_ydata(), [1, -0.04, -0.08], atol=1e-6)


def test_pruning_ranks_the_heads_by_the_first_half_of_the_pairs_and_scores_the_second_half_greedily(monkeypatch):
    pairs, calls = [(f'source {row}', f'target {row}') for row in range(5)], []

    def curves(heads, scored, options, by):
        calls.append((scored, options.method, by))
        return {'cross': {'by importance': [(0, 1.0)]}}

    monkeypatch.setattr(inside, 'examples', lambda *_: pairs)
    monkeypatch.setattr(inside, 'GatedHeads', lambda run: None)
    monkeypatch.setattr(inside, 'pruning_curves', curves)
    result = inside.pruning(types.SimpleNamespace(config=demo.get_config()), inside.AnalysisRequest())
    assert calls == [(pairs[2:], 'greedy', pairs[:2])]
    assert result.table.split() == ['cross', 'by', 'importance', '0:', '1.0']


def test_the_axis_of_a_pruning_figure_has_a_length_if_all_scores_are_0():
    figure = pruning_figure({'encoder': {'by importance': [(0, 0.0), (4, 0.0)]}})
    assert figure.axes[0].get_ylim() == (0, 1)


def test_a_metric_that_is_not_computed_is_refused_before_anything_is_translated(heads, monkeypatch):
    monkeypatch.setattr(Translator, 'translate', lambda *_: pytest.fail('translated'))
    allowed = 'exact_match, bleu, bleu_lowercased_tokenised, chrf'
    with pytest.raises(UserError, match=f"^metric='ter': .* Use one of {allowed}$"):
        pruning_curve(heads, PAIRS, shuffled(heads), OPTIONS, 'ter')


def test_the_analyses_need_pairs(heads):
    for analyse in (heads.importance, lambda pairs: pruning_curve(heads, pairs, shuffled(heads), OPTIONS)):
        with pytest.raises(UserError, match='at least one pair'):
            analyse([])


@pytest.mark.parametrize('kind, task', [('language_model', 'language_model'), ('patches', 'classification')])
def test_the_analyses_of_translations_refuse_other_models(kind, task):
    heads = GatedHeads(random_run(kind))
    for analyse in (heads.importance, lambda pairs: pruning_curve(heads, pairs, shuffled(heads), OPTIONS),
                    lambda pairs: scores_without_heads(heads, pairs, 'encoder', OPTIONS),
                    lambda pairs: best_head(heads.run)):
        with pytest.raises(UserError, match=f'needs translations, but the task is {task}. Use a run of task='):
            analyse(PAIRS)


def test_scores_without_heads_need_layers_of_equal_size(heads):
    uneven = copy.copy(heads)
    uneven.counts = {**heads.counts, PLACE: 2}
    with pytest.raises(UserError, match='the runs of this ensemble have different numbers of heads'):
        scores_without_heads(uneven, PAIRS, 'cross', OPTIONS)


def test_a_kind_of_attention_that_the_model_lacks_is_named(heads):
    with pytest.raises(UserError, match="kind='sideways': the model has no attention of this kind. Use encoder"):
        scores_without_heads(heads, PAIRS, 'sideways', OPTIONS)
    with pytest.raises(UserError, match='the model has no attention heads'):
        fixed = {'d_hidden': 6, 'd_align': 4, 'readout': 'linear', 'attention': False}
        GatedHeads(random_run('rnnsearch', recurrent=fixed))
