"""Patching maps: each entry is the score after one patch."""

import numpy as np
import pytest

from analysis.patching import patching_map
from inference.edits import Edit
from runtime.errors import UserError
from tests.random_run import random_run


def test_an_entry_is_the_log_probability_after_one_patch_and_all_patches_restore_the_clean_sentence():
    run = random_run('transformer')
    found = patching_map(run, 'ab', 'xy', 'target')
    assert found.places == ['encoder/layers_0', 'encoder/layers_1'] and found.pieces[-1] == '</s>'
    assert found.log_probs.shape == found.effects.shape == (2, 3)

    def log_prob(*edits):
        return run.edited(edits).forced([('xy', 'target')])[0].hypotheses[0].log_prob

    np.testing.assert_allclose(found.log_probs[1, 1], log_prob(Edit('replace', 'encoder/layers_1', 'ab', None, [1])),
                               rtol=1e-5)
    np.testing.assert_allclose(log_prob(Edit('replace', 'encoder/layers_1', 'ab')), found.clean, rtol=1e-5)
    with pytest.raises(UserError, match='the sentences have 3 and 4 tokens'):
        patching_map(run, 'ab', 'xyz', 'target')
