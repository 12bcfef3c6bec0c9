"""python -m tools.inside: each analysis prints its table, and writes its numbers and its picture."""

import json

import numpy as np
import pytest

import inference
from analysis.attribution import attribute
from analysis.heads import GatedHeads
from analysis.inside import AnalysisRequest, head_roles
from analysis.logit_lens import logit_lens
from analysis.patching import patching_map
from tests.scripts import script

pytestmark = pytest.mark.slow
PAIR = 'one two three', 'three two one'


@pytest.fixture
def inside(run, tmp_path):
    """A function that runs an analysis with flags, and returns its numbers."""
    def analyse(what, *flags):
        done = script('-m', 'tools.inside', f'--workdir={run[0]}', f'--what={what}', f'--output={tmp_path}/new', *flags)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.strip()
        assert (tmp_path / 'new' / f'{what}.png').read_bytes().startswith(b'\x89PNG')
        return json.loads((tmp_path / 'new' / f'{what}.json').read_text())

    return analyse


def test_importance(run, inside):
    trained = inference.load(run[0], '18')
    expected = GatedHeads(trained).importance(trained.data().pairs('test')[:3])
    numbers = inside('importance', '--checkpoint=18', '--split=test', '--count=3')
    assert numbers.keys() == expected.keys()
    for place, values in expected.items():
        np.testing.assert_allclose(numbers[place], values, rtol=1e-3)


def test_pruning(inside):
    numbers = inside('pruning', '--count=4')
    assert numbers.keys() == {'encoder', 'decoder', 'cross'}
    for curves in numbers.values():
        assert [removed for removed, _ in curves['by importance']] == [0, 1, 2]


def test_roles(run, inside):
    expected = head_roles(inference.load(run[0]), AnalysisRequest('test', 3)).numbers
    numbers = inside('roles', '--split=test', '--count=3')
    assert numbers and json.dumps(numbers) == json.dumps(expected)


def test_logit_lens(run, inside):
    numbers = inside('logit_lens', '--text=' + '\t'.join(PAIR))
    np.testing.assert_allclose(numbers['log_probs'], logit_lens(inference.load(run[0]), PAIR).log_probs, rtol=1e-3)


def test_attribution(run, inside):
    numbers = inside('attribution', '--text=' + '\t'.join(PAIR), '--method=gradient', '--instead=ten')
    expected = attribute(inference.load(run[0]), PAIR, 'gradient', 'ten')
    assert numbers['alternative'] == expected.alternative
    np.testing.assert_allclose(numbers['values'], expected.values, rtol=1e-3, atol=1e-5)


def test_patching(run, inside):
    other, places = 'two one three', ['encoder/input', 'encoder']  # the tokens of PAIR[0], in another order
    numbers = inside('patching', '--text=' + '\t'.join(PAIR), f'--other={other}', f'--place={", ".join(places)}')
    expected = patching_map(inference.load(run[0]), PAIR[0], other, PAIR[1], places)
    np.testing.assert_allclose(numbers['effects'], expected.effects, rtol=1e-3, atol=1e-5)
