"""Attributions: each method against its definition, computed in another way."""

import functools
import itertools
import types
import warnings

import jax
import numpy as np
import pytest

from analysis import attribution, inside, passes
from analysis.attribution import METHODS, Attribution, agreement, attribute
from analysis.passes import Effects, Node, text_of
from inference.edits import Edit
from input_pipeline.tokenizer import PAD, UNK
from model.places import EDITS
from runtime.errors import UserError
from runtime.resources import compile_time
from tests.random_run import random_run

PAIR = 'abc', 'xy'


@pytest.fixture(scope='module')
def run():
    return random_run('transformer', activation='gelu')


@pytest.fixture(scope='module')
def by(run):
    """Returns a function: the name of a method -> its attribution of PAIR."""
    return functools.cache(lambda method: attribute(run, PAIR, method))


def log_probs(run):
    inputs, targets, _ = text_of(run, PAIR).arrays()
    return np.asarray(run.model.target_log_probs(run.model.params, inputs, targets))[0, :3]


@pytest.mark.slow
def test_all_methods_attribute_to_source_and_prefix(run, by):
    for method in METHODS:
        each = by(method)
        assert each.source == ['a', 'b', 'c', '</s>'] and each.prefix == ['<s>', 'x', 'y'], method
        assert each.target == ['x', 'y', '</s>'] and each.values.shape == (7, 3)
        np.testing.assert_allclose(each.values[5:, 0], 0, atol=1e-6)  # no prediction depends on later tokens
        assert each.values[6, 1] == pytest.approx(0, abs=1e-6) and np.abs(each.values[:4]).min() > 0
        # The first prediction depends on the start token, but layer norms remove the length of its embedding.
        assert np.abs(each.values[4, 1:]).min() > 0 and (method == 'gradient' or abs(each.values[4, 0]) > 0)
        assert len(str(each).splitlines()) == 3
    for method in ('gradient', 'integrated', 'leave_one_out'):
        np.testing.assert_allclose(by(method).outputs, log_probs(run), rtol=1e-4)
    assert agreement(list(map(by, METHODS))).shape == (6, 6)


@pytest.mark.slow
def test_gradient_times_input_is_the_change_by_a_longer_embedding(run, by):
    names = {'source_embedding': 1, 'target_embedding': 5}
    edited = run.edited([Edit('scale', name, 1.0, None, [1]) for name in names])

    def scaled(wanted, scale):
        edited.model.params = {**edited.model.params, EDITS: [
            {name: np.float32(scale if name == wanted else 1) for name in numbers}
            for numbers in edited.model.params[EDITS]]}
        return log_probs(edited)

    for name, row in names.items():
        change = (scaled(name, 1.01) - scaled(name, 0.99)) / 0.02
        np.testing.assert_allclose(by('gradient').values[row], change, rtol=0.02, atol=0.01)


@pytest.mark.slow
def test_integrated_gradients_add_up_to_the_difference_of_the_outputs(run, by):
    nothing = run.edited([Edit('zero', name) for name in ('source_embedding', 'target_embedding')])
    np.testing.assert_allclose(by('integrated').values.sum(axis=0), log_probs(run) - log_probs(nothing), atol=0.01)
    np.testing.assert_allclose(by('integrated').gap, 0, atol=0.01)
    with pytest.raises(UserError, match="method='flow' has no baseline"):
        _ = by('flow').gap


@pytest.mark.slow
def test_a_second_text_of_the_same_shape_compiles_nothing(run, by):
    methods = 'gradient', 'integrated', 'leave_one_out'
    for method in methods:
        by(method)
    before = compile_time.seconds
    for method in methods:
        attribute(run, ('bcd', 'yz'), method, instead='q')
    assert compile_time.seconds == before


@pytest.mark.slow
def test_the_rows_of_a_long_text_are_computed_in_parts(run, by, monkeypatch):
    methods, shapes, from_logits = ('gradient', 'integrated', 'leave_one_out'), set(), attribution.from_logits
    whole = list(map(by, methods))

    def recorded(function, outputs, targets):
        shapes.add(targets.shape)
        return from_logits(function, outputs, targets)

    monkeypatch.setattr(passes, 'TOKENS', 3 * 32)  # a pass has at most 3 rows, and the gradient of 3 tokens needs 4
    monkeypatch.setattr(attribution, 'from_logits', recorded)
    for method, expected in zip(methods, whole, strict=True):
        parts = attribute(run, PAIR, method)
        np.testing.assert_allclose(parts.values, expected.values, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(parts.outputs, expected.outputs, rtol=1e-5)
    assert shapes == {(3, 32), (3, 1)}  # new programs for outputs, and for gradients: only one position for each row


@pytest.mark.slow
def test_leave_one_out_hides_a_token(run, by):
    encode = run.model.tokenizers['source'].encode
    for name, row in (('source', 1), ('target', 5)):
        model = run.edited([Edit('zero', f'{name}_embedding', positions=[1])]).model
        tokens = {'source': np.array([[*encode('abc'), 2]]), 'target': np.array([[1, *encode('xy')]])}
        tokens[name][0, 1] = PAD
        logits = jax.jit(model.module.apply)({'params': model.params}, **tokens)
        without = np.asarray(jax.nn.log_softmax(logits))[0, range(3), [*encode('xy'), 2]]
        np.testing.assert_allclose(by('leave_one_out').values[row], log_probs(run) - without, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('kind, separate', [
    ('transformer', {'share_embeddings': 'none'}), ('language_model', {'tie_embeddings': False}),
    ('rnnsearch', {'share_embeddings': 'none'})])
def test_leave_one_out_does_not_depend_on_the_embedding_of_padding(kind, separate):
    run = random_run(kind, **separate)  # with a separate output layer, the logit of padding is unchanged
    first = attribute(run, PAIR, 'leave_one_out')
    flipped = {name: {'embedding': part['embedding'].at[PAD].multiply(-1)}
               for name, part in run.model.params.items() if 'embedding' in part}
    run.model.params = run.model.params | flipped
    assert flipped and np.abs(first.values[-3:].diagonal()).min() > 0
    np.testing.assert_allclose(attribute(run, PAIR, 'leave_one_out').values, first.values, atol=1e-5)


def paths(weights):
    """The network of a sentence: {(layer, node): {(earlier layer, node): weight}}, with half of it residual."""
    edges = {}

    def add(level, before, keys, part):
        for query, row in enumerate(part):
            out = edges.setdefault((level, query), {})
            out[before, query] = 0.5
            for key, weight in enumerate(row):
                out[keys, key] = out.get((keys, key), 0) + weight / 2
        return level

    mean = {name: np.asarray(each).mean(axis=0) for name, each in weights.items()}
    encoder, decoder = ('e', 0), ('d', 0)
    for layer in range(2):
        encoder = add(('e', layer + 1), encoder, encoder, mean[f'encoder/layers_{layer}/self_attention/weights'])
    for layer in range(2):
        for kind in ('self', 'cross'):
            keys = encoder if kind == 'cross' else decoder
            decoder = add(('d', layer + 1, kind), decoder, keys,
                          mean[f'decoder/layers_{layer}/{kind}_attention/weights'])
    return edges, decoder


def test_rollout_sums_the_products_along_all_paths(run, by):
    edges, top = paths(run.inspect([PAIR], '*/weights')[0])

    def reach(node, token):
        return float(node == token) if node not in edges else sum(
            weight * reach(each, token) for each, weight in edges[node].items())

    tokens = [*((('e', 0), row) for row in range(4)), *((('d', 0), row) for row in range(3))]
    expected = [[reach((top, query), token) for query in range(3)] for token in tokens]
    np.testing.assert_allclose(by('rollout').values, expected, atol=1e-5)
    np.testing.assert_allclose(by('rollout').values.sum(axis=0), 1, rtol=1e-5)


@pytest.mark.slow
def test_flow_is_the_smallest_cut(run, by):
    edges, top = paths(run.inspect([PAIR], '*/weights')[0])
    # The linear program of the maximum flow, solved by another algorithm.
    from scipy.optimize import linprog
    listed = [(begin, end, weight) for begin, ends in edges.items() for end, weight in ends.items()]
    for query, token in itertools.product([0, 2], [(('e', 0), 1), (('d', 0), 0)]):
        begin = top, query
        nodes = ({each for pair in listed for each in pair[:2]}) - {begin, token}
        balance = np.array([[float(edge[1] == node) - float(edge[0] == node) for edge in listed] for node in nodes])
        into = np.array([float(edge[1] == token) - float(edge[0] == token) for edge in listed])
        best = linprog(-into, A_eq=balance, b_eq=np.zeros(len(nodes)), bounds=[(0, edge[2]) for edge in listed])
        row = token[1] + (4 if token[0] == ('d', 0) else 0)
        np.testing.assert_allclose(by('flow').values[row, query], -best.fun, atol=1e-5)


@pytest.mark.slow
def test_a_contrast_explains_the_difference_of_two_tokens(run, by):
    other = attribute(run, PAIR, 'gradient', instead='q')
    alone = attribute(run, ('abc', 'q'), 'gradient')
    np.testing.assert_allclose(other.values[:5, 0], by('gradient').values[:5, 0] - alone.values[:5, 0], atol=1e-3)
    with pytest.raises(UserError, match="instead='q': method='rollout' uses only attention weights"):
        attribute(run, PAIR, 'rollout', instead='q')


def test_the_alternative_is_the_first_token_that_is_not_only_a_space_and_the_result_names_it(run, monkeypatch):
    monkeypatch.setitem(METHODS, 'gradient', lambda text, measure: {
        'values': np.ones((7, 3)), 'outputs': np.array([measure.alternative])})
    found = [attribute(run, PAIR, 'gradient', instead=instead) for instead in ('6', ' 6', '  ', '')]
    assert [each.alternative for each in found] == ['6', '6', '▁', '']
    tokens = [token for text in ('6', '6', ' ') for token in run.model.tokenizers['target'].encode(text)]
    assert [each.outputs[0] for each in found] == [*tokens, -1]
    assert str(found[1]).splitlines()[0] == 'each token instead of 6' and len(str(found[3]).splitlines()) == 3


@pytest.mark.slow  # it compiles about 15 programs
def test_language_models_and_recurrent_models():
    model = random_run('language_model')
    for method in METHODS:
        found = attribute(model, ('ab', 'cde'), method)
        assert (found.source, found.prefix, found.target) == ([], ['<s>', 'a', 'b', 'c', 'd'], ['c', 'd', 'e'])
        assert found.values.shape == (5, 3) and np.allclose(found.values[3:, 0], 0, atol=1e-6)
    recurrent = random_run('rnnsearch')
    for method in ('integrated', 'rollout'):
        assert attribute(recurrent, PAIR, method).values.shape == (7, 3)


def test_agreement_is_the_tau_of_kendall(by):
    one = Attribution('one', ['a', 'b', 'c'], ['<s>'], ['x'], np.array([[1.0], [-2], [3], [4]]))
    other = Attribution('other', ['a', 'b', 'c'], ['<s>'], ['x'], np.array([[1.0], [2], [4], [-3]]))
    np.testing.assert_allclose(agreement([one, other]), [[1, 4 / 6], [4 / 6, 1]])  # 5 pairs agree, and 1 does not
    with pytest.raises(UserError, match='the attributions belong to different texts'):
        agreement([one, by('rollout')])


def test_agreement_leaves_out_a_token_before_which_the_model_has_read_one_token():
    def contributions(*target):
        values = np.array([[1.0, 1.0], [0.0, 2.0]])[:len(target), :len(target)]
        return Attribution('one', [], ['<s>', 'a'][:len(target)], [*target], values)

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert agreement([contributions('a', 'b')]) == [[1]]
        with pytest.raises(UserError, match='^the attributions have no order of tokens, because the model has'):
            agreement([contributions('a')])


def test_columns_of_tables_are_as_wide_as_the_longest_name(monkeypatch):
    contributions = Attribution('one', [], ['<s>'], ['a', 'international'], np.ones((1, 2)))
    assert str(contributions).splitlines() == ['a              <s> 1', 'international  <s> 1']
    effects = Effects([Node('encoder'), Node('decoder/layers_1/cross_attention_residual')], ['a'], np.ones((2, 1)), 1.0,
                      0.0)
    monkeypatch.setattr(inside, 'as_output', lambda *_: types.SimpleNamespace(source='a', text='b'))
    monkeypatch.setattr(inside, 'patching_map', lambda *_: effects)
    table = inside.patching(types.SimpleNamespace(model=None), inside.AnalysisRequest()).table
    assert len({len(line) for line in table.splitlines()}) == 1


def test_the_picture_of_an_attribution_has_a_row_for_each_predicted_token(monkeypatch):
    contributions = Attribution('one', ['a', 'b'], ['<s>', 'x'], ['x', 'y'], np.arange(8.0).reshape(4, 2))
    monkeypatch.setattr(inside, 'attribute', lambda *_: contributions)
    axes = inside.attribution(None, inside.AnalysisRequest()).figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ['x', 'y']
    assert [label.get_text() for label in axes.get_xticklabels()] == ['a', 'b', '<s>', 'x']


def test_an_unknown_method_names_the_nearest(run):
    with pytest.raises(UserError, match="there is no method 'integrate'. Did you mean integrated"):
        attribute(run, PAIR, 'integrate')


@pytest.mark.parametrize('tokens', [[], [UNK, 7]])
def test_an_alternative_without_a_known_token_is_refused(tokens, run, monkeypatch):
    output = run.forced([('ab', 'xy')])[0]
    monkeypatch.setattr(run.model.tokenizers['target'], 'encode', lambda text: tokens)
    with pytest.raises(UserError, match='^instead=.☃.: the first token is not in the vocabulary of the target'):
        attribute(run, output, 'gradient', instead='☃')
