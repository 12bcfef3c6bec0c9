"""Training with edits: the edits apply during and after the training, and a resumed run is equal bit for bit."""

import json
import shutil

import numpy as np
import pytest

import inference
from runtime.errors import UserError
from tests.tiny_run import outcome, start, tiny_config

WEIGHTS = 'encoder/layers_0/self_attention/weights'
FROZEN = json.dumps([{'edit': 'freeze', 'place': WEIGHTS, 'by': 'uniform', 'heads': [1]}])


@pytest.mark.slow
def test_a_model_learns_with_a_frozen_head_and_resumes_bit_for_bit(whole, cache, tmp_path):
    config = tiny_config(cache, train__edits=FROZEN)
    start(tmp_path / 'frozen', config)
    shutil.copytree(tmp_path / 'frozen', tmp_path / 'copy')
    shutil.rmtree(tmp_path / 'copy' / 'checkpoints' / '12')
    start(tmp_path / 'copy', config)
    assert outcome(tmp_path / 'copy') == outcome(tmp_path / 'frozen') != outcome(whole)
    run, plain = (inference.load(path, 'latest') for path in (tmp_path / 'frozen', whole))
    images = np.random.default_rng(0).integers(0, 256, size=(1, 8, 8, 1), dtype=np.uint8)
    weights, others = (each.inspect(images, WEIGHTS)[0][WEIGHTS].values for each in (run, plain))
    np.testing.assert_allclose(weights[1], 1 / weights.shape[-1], rtol=1e-6)
    assert np.ptp(weights[0]) > 1e-4 < np.ptp(others[1])


@pytest.mark.parametrize('edits, message', [
    ('[', 'config.train.edits is not JSON'),
    ('[{"edit": "zero", "place": "encoder/layers_7"}]',
     "config.train.edits: place 'encoder/layers_7': the model has no such place"),
    ('[{"edit": "scale", "place": "encoder/layers_7", "by": 2}]', "config.train.edits: place 'encoder/layers_7': the"),
    ('[{"edit": "zer", "place": "encoder"}]', "config.train.edits: there is no edit 'zer'"),
    ('[{"edit": "mean", "place": "encoder", "by": "validation"}]', 'needs values that the model computes from texts')])
def test_impossible_edits_are_refused_before_the_first_step(edits, message, cache, tmp_path):
    with pytest.raises(UserError, match=message):
        start(tmp_path / 'run', tiny_config(cache, train__edits=edits))
    assert not (tmp_path / 'run' / 'checkpoints').exists()
