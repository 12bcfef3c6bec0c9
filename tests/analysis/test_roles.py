"""Roles of heads, from weights that are built by hand."""

import json
import types

import numpy as np
import pytest

from analysis.inside import AnalysisRequest, examples, head_roles
from analysis.roles import ROLES, roles
from configs import recipe
from inference.inspection import Values
from inference.translate import Translator
from runtime.errors import UserError
from tests.random_run import random_run

PIECES = ['▁on', '▁2', ',', '5', '</s>']
EYE = np.eye(5)


def run_with(weights, name='encoder/layers_0/self_attention/weights', *windows):
    """A run whose attention weights are `weights`, for every text. Several windows are an ensemble's."""
    value = Values(name, ('head', 'query', 'key'), np.array(weights), {'key': PIECES})
    model = object.__new__(Translator)
    members = [types.SimpleNamespace(config=types.SimpleNamespace(window=window)) for window in windows or (0,)]
    model.module = types.SimpleNamespace(members=members) if len(members) > 1 else members[0]
    return types.SimpleNamespace(inspect_each=lambda texts, places: [{name: value}] * len(texts), model=model)


def share(found, role, head=0):
    return found.shares[head, list(ROLES).index(role)]


def test_each_role_is_the_mean_weight_on_its_keys():
    backward, forward, first = np.roll(EYE, -1, axis=1), np.roll(EYE, 1, axis=1), np.zeros((5, 5))
    backward[0], forward[-1], first[:, 0] = EYE[3], EYE[2], 1
    found = roles(run_with([backward, forward, EYE, np.full((5, 5), 0.2), first]), ['a'] * 70)
    assert found.tokens == [350] * 5 and found.heads[2] == ('encoder/layers_0/self_attention/weights', 2)
    assert [share(found, role, head) for head, role in enumerate(('previous', 'next', 'same'))] == [1, 1, 1]
    assert [share(found, role, 4) for role in ('first', 'previous', 'next', 'same')] == [1, 0.25, 0, 0.2]
    for role, expected in {'previous': 0.2, 'end': 0.2, 'digit': 0.4, 'punctuation': 0.2}.items():
        np.testing.assert_allclose(share(found, role, 3), expected)
    np.testing.assert_allclose(share(found, 'digit', 0), 3 / 5)  # queries 0, 2 and 4 attend to digits
    np.testing.assert_allclose(found.entropy, [0, 0, 0, np.log(5), 0], atol=1e-9)
    np.testing.assert_allclose(found.distance, [(3 + 4) / 5, (4 + 2) / 5, 0, 1.6, 2])
    np.testing.assert_allclose(found.seen[0][:3], [0.8, 1, 0.8])
    assert found.ranked('entropy')[0][1] == 3 and found.ranked('end')[0][1:] == (1, 0.2)
    assert '100.0 %' in str(found) and len(str(found).splitlines()) == 6
    with pytest.raises(UserError, match="there is no role 'endd'. Did you mean end"):
        found.ranked('endd')


def test_only_visible_keys_count():
    found = roles(run_with([EYE], 'decoder/layers_0/self_attention/weights'), ['a'])
    assert np.isnan(share(found, 'next')) and '-' in str(found)
    np.testing.assert_allclose(found.seen[0][list(ROLES).index('digit')], 4 / 5)


@pytest.mark.parametrize('name, windows, share_of_end', [
    ('encoder/layers_0/self_attention/weights', [2], 1 / 2), ('decoder/layers_0/cross_attention/weights', [2], 1 / 5),
    ('members_1/encoder/layers_0/self_attention/weights', [0, 2], 1 / 2),
    ('members_1/encoder/layers_0/self_attention/weights', [2, 0], 1 / 5)])
def test_keys_outside_of_the_window_of_self_attention_do_not_count(name, windows, share_of_end):
    found = roles(run_with([EYE], name, *windows), ['a'])
    assert share(found, 'end') == share_of_end
    assert found.seen[0][list(ROLES).index('end')] == (2 / 5 if share_of_end == 1 / 2 else 1)


def test_roles_of_a_split_include_long_references_and_are_null_where_no_query_sees_the_role():
    run = random_run('transformer', num_layers=1)
    run.data = lambda: types.SimpleNamespace(pairs=lambda split: [('ab, 1', 'c'), ('d', 'x' * 150)])
    found = head_roles(run, AnalysisRequest()).numbers
    assert found['decoder/layers_0/self_attention, 0']['next'] is None
    assert found['decoder/layers_0/self_attention, 0']['previous'] > 0
    json.dumps(found, allow_nan=False)


def test_the_examples_of_test_are_the_first_pairs_of_all_test_sets():
    config, sets = recipe('demo'), {'one': [('a', 'b')], 'two': [('c', 'd'), ('e', 'f')]}
    config.data.splits.test = 'one,two'
    run = types.SimpleNamespace(config=config, model=object.__new__(Translator),
                                data=lambda: types.SimpleNamespace(pairs=sets.__getitem__))
    assert examples(run, AnalysisRequest('test', count=2)) == [('a', 'b'), ('c', 'd')]


def test_roles_of_a_model():
    run = random_run('transformer')
    found = roles(run, [('ab, 1', 'c 2'), ('d', 'e')])
    assert len(found.heads) == 12 and found.tokens[0] == 4 + 2 and found.tokens[-1] == 6 + 2
    assert np.nanmin(found.shares) > 0 and np.nanmax(found.shares) <= 1
    for place in 'decoder', 'decoder/layers_0/cross_attention/scores':
        with pytest.raises(UserError, match=f'^{place}: roles are computed from attention weights'):
            roles(run, [('a', 'b')], place)
    with pytest.raises(UserError, match='^random: task=classification has no texts. Use a translator or a language'):
        roles(random_run('patches'), np.zeros((1, 8, 8, 1)))
