import jax
import jax.numpy as jnp
import numpy as np
import pytest

from errors import UserError
from training.checkpoints import open_checkpoints
from training.metrics import MetricsWriter
from training.step import TrainState


def state(value):
    return TrainState(step=jnp.int32(value), params={'w': jnp.full((2, 3), float(value))},
                      opt_state=(jnp.float32(value),))


@pytest.fixture
def saved(tmp_path):
    """Steps 1 to 6; step 2 is the best, steps 5 and 6 the last, odd ones were not evaluated."""
    with open_checkpoints(tmp_path, metric='loss', keep_last=2) as checkpoints:
        for step in range(1, 7):
            metrics = {'validation_loss': float(step)} if step % 2 == 0 else None
            checkpoints.save(step, state(step), {'seen': step}, metrics)
    return tmp_path


def test_the_last_and_the_best_are_kept(saved):
    with open_checkpoints(saved, metric='loss', keep_last=2) as checkpoints:
        assert checkpoints.steps() == [2, 5, 6]
        assert checkpoints.resolve('best') == [2]
        assert checkpoints.resolve('latest') == [6]
        assert checkpoints.resolve('5') == [5]
        assert checkpoints.resolve('average:2') == [5, 6]


def test_a_higher_bleu_is_better(tmp_path):
    with open_checkpoints(tmp_path, metric='bleu', keep_last=1) as checkpoints:
        for step, bleu in ((1, 3.0), (2, 9.0), (3, 5.0)):
            checkpoints.save(step, state(step), {}, {'validation_bleu': bleu})
    with open_checkpoints(tmp_path, metric='bleu') as checkpoints:
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.resolve('best') == [2]


def test_restored_state_is_the_saved_one(saved):
    with open_checkpoints(saved, metric='loss') as checkpoints:
        restored, progress = checkpoints.restore(6, state(0))
    jax.tree.map(np.testing.assert_array_equal, restored, state(6))
    assert progress == {'seen': 6}


def test_averaged_parameters_are_the_mean(saved):
    with open_checkpoints(saved, metric='loss') as checkpoints:
        params = checkpoints.parameters('average:3')
        np.testing.assert_allclose(params['w'], np.full((2, 3), (2 + 5 + 6) / 3), rtol=1e-6)
        assert checkpoints.parameters('latest')['w'][0, 0] == 6


@pytest.mark.parametrize('choice', ['average:9', 'average:0', '4', 'bset'])
def test_a_checkpoint_that_is_not_there_is_an_error(saved, choice):
    with open_checkpoints(saved, metric='loss') as checkpoints, pytest.raises(UserError, match='2, 5, 6'):
        checkpoints.resolve(choice)


def test_no_checkpoint_is_an_error(tmp_path):
    with open_checkpoints(tmp_path, metric='loss') as checkpoints, pytest.raises(UserError, match='no checkpoint'):
        checkpoints.resolve('latest')


def test_resumed_metrics_hold_every_step_once(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (10, 20, 30):
        writer.write(step, {'loss': step / 10})
    writer.close()
    with open(tmp_path / 'metrics.jsonl', 'a') as file:
        file.write('{"step": 40, "lo')  # killed in the middle of a line
    writer = MetricsWriter(tmp_path, 20)
    writer.write(30, {'loss': 7.0})
    writer.close()
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert lines == ['{"step": 10, "loss": 1.0}', '{"step": 20, "loss": 2.0}', '{"step": 30, "loss": 7.0}']
