import errno
import hashlib
import json
import os
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import run_directory.damage
from configs import base
from run_directory import checkpoints as checkpoints_module
from run_directory.checkpoints import Checkpoints, checkpoint_options, described, open_checkpoints
from run_directory.checksums import PART, SEEDS, checksum, numpy_checksum
from run_directory.records import evaluations
from runtime.errors import UserError
from training.imported import RECIPE_TEXT
from training.metrics import MetricsWriter
from training.optimizer import AverageState
from training.step import TrainState


def state(value):
    return TrainState(step=jnp.int32(value), params={'w': jnp.full((2, 3), float(value))},
                      opt_state=(jnp.float32(value),))


def evaluated(workdir, checkpoints, step, metric, value):
    """Does the same as the loop after an evaluation."""
    with open(workdir / 'metrics.jsonl', 'a') as file:
        file.write(json.dumps({'step': step, f'validation_{metric}': value}) + '\n')
    checkpoints.values[step] = value


@pytest.fixture
def saved(tmp_path):
    """Steps 1 to 6; step 2 is the best, steps 5 and 6 the last, odd ones were not evaluated."""
    with open_checkpoints(tmp_path, metric='loss', keep_last=2) as checkpoints:
        for step in range(1, 7):
            checkpoints.save(step, state(step), {'seen': step})
            if step % 2 == 0:
                evaluated(tmp_path, checkpoints, step, 'loss', float(step))
    return tmp_path


def test_the_last_and_the_best_are_kept(saved):
    with open_checkpoints(saved, metric='loss', keep_last=2) as checkpoints:
        assert checkpoints.steps() == [2, 5, 6]
        assert checkpoints.resolve('best') == [2]
        assert checkpoints.resolve('latest') == [6]
        assert checkpoints.resolve('5') == [5]
        assert checkpoints.resolve('average:2') == [5, 6]
        assert checkpoints.resolve('best:1') == [2]
        for choice, message in (('average:3', 'only 2 of the last checkpoints, at steps 5, 6.*checkpoint.keep_last'),
                                ('best:2', 'only 1 of the best checkpoints, at steps 2.*checkpoint.keep_best')):
            with pytest.raises(UserError, match=message):  # step 4 is lost
                checkpoints.resolve(choice)


def test_an_old_best_checkpoint_is_not_one_of_the_last_after_keep_last_is_raised(saved):
    with open_checkpoints(saved, metric='loss', keep_last=3) as checkpoints:
        with pytest.raises(UserError, match='only 2 of the last checkpoints, at steps 5, 6'):
            checkpoints.resolve('average:3')
        checkpoints.restore(state(0))
        checkpoints.save(7, state(7), {})
        checkpoints.wait()
        assert checkpoints.resolve('average:3') == [5, 6, 7]


def test_an_evaluation_of_a_step_that_is_repeated_does_not_decide_which_checkpoints_are_kept(tmp_path):
    with open_checkpoints(tmp_path, metric='loss', keep_last=1) as checkpoints:
        for step, loss in ((1, 2.0), (2, 1.0)):
            checkpoints.save(step, state(step), {})
            evaluated(tmp_path, checkpoints, step, 'loss', loss)
    shutil.rmtree(tmp_path / 'checkpoints' / '2')
    with open_checkpoints(tmp_path, metric='loss', keep_last=1) as checkpoints:
        checkpoints.restore(state(0))
        checkpoints.save(2, state(2), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize('saves', [5, 1], ids=['one process', 'resumed before every save'])
def test_a_checkpoint_of_a_signal_is_not_one_of_the_last(tmp_path, saves):
    expected = [([1], [1]), ([2], [2]), ([2, 4], [2, 4]), ([2, 4, 5], [2, 4]), ([4, 6], [4, 6])]
    for first in range(0, 5, saves):
        with open_checkpoints(tmp_path, keep_last=2) as checkpoints:
            checkpoints.restore(state(0))
            for kept, averaged in expected[first:first + saves]:
                checkpoints.save(kept[-1], state(kept[-1]), {}, scheduled=kept[-1] % 2 == 0)
                checkpoints.wait()
                assert checkpoints.steps() == kept
                assert checkpoints.resolve(f'average:{len(averaged)}') == averaged
                assert checkpoints.resolve('latest') == kept[-1:]


def test_a_checkpoint_of_a_signal_counts_after_it_was_evaluated(tmp_path):
    with open_checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (3, 6, 7):
            checkpoints.save(step, state(step), {}, scheduled=step < 7)
        checkpoints.wait()
        assert checkpoints.resolve('average:2') == [3, 6]
        evaluated(tmp_path, checkpoints, 7, 'loss', 1.0)
        assert checkpoints.resolve('average:2') == [6, 7]
    with open_checkpoints(tmp_path, keep_last=2) as checkpoints:
        checkpoints.save(9, state(9), {})
        checkpoints.wait()
        assert checkpoints.resolve('average:2') == [7, 9]


def test_checkpoints_of_smaller_intervals_and_of_an_earlier_last_step_count(tmp_path):
    config = base.get_config()
    config.update_from_flattened_dict({
        'train.steps': 950, 'checkpoint.every': 100, 'eval.every': 100, 'checkpoint.keep_last': 4})
    with open_checkpoints(tmp_path, **checkpoint_options(config)) as checkpoints:
        for step in (700, 800, 900, 950):
            checkpoints.save(step, state(step), {})
    config.update_from_flattened_dict({'train.steps': 6000, 'checkpoint.every': 500, 'eval.every': 500})
    with open_checkpoints(tmp_path, **checkpoint_options(config)) as checkpoints:
        assert checkpoints.resolve('average:4') == [700, 800, 900, 950]
        checkpoints.restore(state(0))
        checkpoints.save(1000, state(1000), {})
        checkpoints.wait()
        assert checkpoints.steps() == checkpoints.resolve('average:4') == [800, 900, 950, 1000]


@pytest.mark.parametrize('change, last', [
    ('damage', [2, 3]), ('earlier version', [2, 3]), ('earlier version with the reason', [1, 2])])
def test_a_checkpoint_without_the_last_scheduled_steps_counts_unless_a_signal_is_its_reason(tmp_path, change, last):
    with open_checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {}, scheduled=step < 3)
    if change == 'damage':
        (tmp_path / 'checkpoints' / '3' / 'progress' / 'metadata').write_text('[]')
    else:
        without('last_scheduled', tmp_path / 'checkpoints' / '3',
                **({'scheduled': False} if change == 'earlier version with the reason' else {}))
    with open_checkpoints(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.resolve('average:2') == last
        checkpoints.save(4, state(4), {})
        checkpoints.wait()
        assert checkpoints.steps() == [last[-1], 4]


def test_a_higher_bleu_is_better(tmp_path):
    with open_checkpoints(tmp_path, metric='bleu', keep_last=1) as checkpoints:
        for step, bleu in ((1, 3.0), (2, 9.0), (3, 5.0)):
            checkpoints.save(step, state(step), {})
            evaluated(tmp_path, checkpoints, step, 'bleu', bleu)
    with open_checkpoints(tmp_path, metric='bleu') as checkpoints:
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.resolve('best') == [2]


def test_restored_state_is_the_saved_one(saved):
    with open_checkpoints(saved, metric='loss') as checkpoints:
        restored, progress = checkpoints.restore(state(0))
    jax.tree.map(np.testing.assert_array_equal, restored, state(6))
    assert progress == {'seen': 6}


def test_averaged_parameters_are_the_mean(saved):
    with open_checkpoints(saved, metric='loss', keep_last=2) as checkpoints:
        params, steps = checkpoints.parameters('average:2')
        assert steps == [5, 6]
        np.testing.assert_allclose(params['w'], np.full((2, 3), (5 + 6) / 2), rtol=1e-6)
        assert checkpoints.parameters('latest')[0]['w'][0, 0] == 6


@pytest.mark.parametrize('choice, deleted, step', [('latest', '6', 7), ('best', '2', 6)])
def test_a_checkpoint_that_a_training_deletes_while_it_is_read_is_chosen_again(
        choice, deleted, step, saved, monkeypatch, caplog):
    read = checkpoints_module.read_arrays

    def delete(*arguments):
        monkeypatch.undo()
        (saved / 'checkpoints' / deleted).rename(saved / 'checkpoints' / '7')
        return read(*arguments)

    monkeypatch.setattr(checkpoints_module, 'read_arrays', delete)
    with open_checkpoints(saved, metric='loss') as checkpoints:
        params, steps = checkpoints.parameters(choice)
    assert steps == [step] and params['w'][0, 0] == 6 and 'damaged' not in caplog.text


@pytest.mark.parametrize('name', ['c#', '50%', 'a%20b', 'what?', 'sub/../run', 'link/../run'])
def test_the_path_of_a_run_is_not_a_url(tmp_path, name):
    (tmp_path / 'sub' / 'folder').mkdir(parents=True)
    (tmp_path / 'link').symlink_to(tmp_path / 'sub' / 'folder')
    (tmp_path / name).mkdir()
    with open_checkpoints(tmp_path / name) as checkpoints:
        checkpoints.save(1, state(1), {})
    with open_checkpoints(tmp_path / name) as checkpoints:
        np.testing.assert_array_equal(checkpoints.parameters('latest')[0]['w'], state(1).params['w'])
    assert described(tmp_path / name / 'checkpoints' / '1' / 'state')['params']['w'].shape == (2, 3)


def test_for_the_parameters_nothing_else_is_read(tmp_path, monkeypatch):
    made = state(1)
    made = made.replace(opt_state=(optax.adam(0.1).init(made.params), AverageState(jnp.int32(1), made.params)))
    with open_checkpoints(tmp_path, keep_last=2) as checkpoints:
        checkpoints.save(1, made, {})
        checkpoints.save(2, made.replace(opt_state=made.opt_state[:1]), {})
    read = []
    checked = run_directory.damage.checksums
    monkeypatch.setattr(run_directory.damage, 'checksums', lambda tree: read.append(set(tree)) or checked(tree))
    with open_checkpoints(tmp_path) as checkpoints:
        for step in ('1', '2'):
            jax.tree.map(np.testing.assert_array_equal, checkpoints.parameters(step)[0], made.params)
    assert read == [{'opt_state/1/average/w'}, {'params/w'}]


@pytest.mark.parametrize('choice', ['average:0', '4', 'bset', 'best:0', 'best:', 'raw:4', 'raw:'])
def test_a_checkpoint_that_is_not_there_is_an_error(saved, choice):
    with (open_checkpoints(saved, metric='loss', keep_last=3) as checkpoints,
          pytest.raises(UserError, match='2, 5, 6')):
        checkpoints.resolve(choice)


def test_no_checkpoint_is_an_error(tmp_path):
    with open_checkpoints(tmp_path, metric='loss') as checkpoints, pytest.raises(UserError, match='no checkpoint'):
        checkpoints.resolve('latest')


@pytest.mark.parametrize('name', ['2', 'state'])
def test_a_folder_that_cannot_be_created_ends_the_run_without_waiting(name, tmp_path, monkeypatch):
    create, before = os.mkdir, threading.enumerate()

    def full(path, *args, **kwargs):
        if os.path.basename(path).partition('.')[0] == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        create(path, *args, **kwargs)

    with pytest.raises(UserError, match='checkpoints/2 cannot be written: No space left.* of step 1 is still valid'), \
            open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
        monkeypatch.setattr(os, 'mkdir', full)
        checkpoints.save(2, state(2), {})
    # The threads of asyncio's pool wait for work, and end when the process exits.
    assert not [thread for thread in threading.enumerate() if not (
        thread.daemon or thread in before or thread.name.startswith('asyncio_'))]


def test_a_checkpoint_that_is_a_link_is_not_deleted(saved):
    (saved / 'checkpoints/5').rename(saved / 'elsewhere')
    (saved / 'checkpoints/5').symlink_to(saved / 'elsewhere')
    with open_checkpoints(saved, metric='loss', keep_last=1) as checkpoints:
        checkpoints.restore(state(0))
        checkpoints.save(7, state(7), {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5, 7]
        assert checkpoints.parameters('5')[1] == [5]


def test_a_checkpoint_that_cannot_be_deleted_ends_the_run_with_the_name_of_the_folder(saved, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), '_CHECKPOINT_METADATA')

    monkeypatch.setattr(shutil, 'rmtree', refuse)
    with pytest.raises(UserError, match=rf'{saved}/checkpoints: .* cannot be deleted: Permission denied\. The '
                                        'checkpoint of step 7 is still valid'), \
            open_checkpoints(saved, metric='loss', keep_last=2) as checkpoints:
        checkpoints.restore(state(0))
        checkpoints.save(7, state(7), {})
        checkpoints.wait()


def test_a_folder_of_checkpoints_that_has_lost_its_permissions_is_named(saved, monkeypatch):
    def refuse(self, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(saved / 'checkpoints'))

    with pytest.raises(UserError, match=rf'{saved}/checkpoints: .* cannot be deleted: Permission denied\. Remove'), \
            open_checkpoints(saved, metric='loss', keep_last=2) as checkpoints:
        checkpoints.restore(state(0))
        monkeypatch.setattr(Checkpoints, 'steps', refuse)
        with checkpoints._explained():
            refuse(checkpoints)


def test_as_many_of_the_best_are_kept_as_asked_for(tmp_path):
    """The first of equals is the better one, and no number is worse than any."""
    with open_checkpoints(tmp_path, metric='loss', keep_last=1, keep_best=2) as checkpoints:
        for step, loss in enumerate((4.0, float('nan'), 3.0, 5.0, 3.0, 9.0), 1):
            checkpoints.save(step, state(step), {})
            evaluated(tmp_path, checkpoints, step, 'loss', loss)
        checkpoints.save(7, state(7), {})
        checkpoints.wait()
        assert checkpoints.steps() == [3, 5, 7] and checkpoints.resolve('best') == [3]
        assert checkpoints.resolve('best:2') == [3, 5]
        np.testing.assert_allclose(checkpoints.parameters('best:2')[0]['w'], np.full((2, 3), 4.0))
        with pytest.raises(UserError, match='kept only 2 of the best checkpoints, at steps 3, 5.*keep_best'):
            checkpoints.resolve('best:3')
        with pytest.raises(UserError, match='raw: does not apply to the checkpoint of step 7'):
            checkpoints.parameters('raw:latest')


PARAMS = {'w': jnp.ones((4, 3)), 'b': jnp.ones(3)}
ADAM, CLIPPED = optax.adam(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
OTHERS = {
    'clip added': (ADAM, CLIPPED, PARAMS, [
        '5 missing in the checkpoint: opt_state/1/0/count, opt_state/1/0/mu/b, ',
        '5 only in the checkpoint: opt_state/0/count, opt_state/0/mu/b, .*, ...']),
    'one part more': (ADAM, optax.chain(*[ADAM, optax.trace(0.9)]), PARAMS, [
        '7 missing in the checkpoint: opt_state/0/0/count']),
    'a larger shape': (ADAM, ADAM, PARAMS | {'w': jnp.ones((5, 3))}, [
        r'arrays \(8\) than this training \(8\): 3 with another shape or dtype: opt_state/0/mu/w '
        r'float32\[4,3\] instead of float32\[5,3\], .*, params/w float32\[4,3\] instead of float32\[5,3\]\.']),
    'the same numbers in another shape': (ADAM, ADAM, PARAMS | {'w': jnp.ones((3, 4))}, [r'of float32\[3,4\]']),
    'another type': (ADAM, optax.adam(0.1, mu_dtype=jnp.bfloat16), PARAMS, [
        r'2 with another shape or dtype: opt_state/0/mu/b float32\[3\] instead of bfloat16\[3\]']),
    'a parameter more': (ADAM, ADAM, PARAMS | {'bias': jnp.ones(2)}, ['3 missing in the checkpoint: .*params/bias']),
}


@pytest.mark.parametrize('earlier', [False, True], ids=['', 'of an earlier version'])
@pytest.mark.parametrize('other', OTHERS)
def test_other_arrays_are_refused_and_are_no_damage(other, earlier, tmp_path, caplog):
    optimizer, new, params, messages = OTHERS[other]
    like = TrainState(step=jnp.int32(0), params=params, opt_state=new.init(params))
    with open_checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, TrainState(jnp.int32(step), PARAMS, optimizer.init(PARAMS)), {})
    if earlier:
        without('shapes', tmp_path / 'checkpoints' / '2')
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError, match='checkpoints/2 has other arrays') as error:
            checkpoints.restore(like)
        for message in messages:
            assert re.search(message, str(error.value)), str(error.value)
        assert 'not damaged' in str(error.value) and 'another --workdir' in str(error.value)
        assert 'is damaged' not in caplog.text and 'older checkpoint' not in caplog.text
        again, _ = checkpoints.restore(TrainState(jnp.int32(0), PARAMS, optimizer.init(PARAMS)))
        assert again.step == 2  # and it was marked as nothing


def without(name, checkpoint, **replacement):
    """Removes an entry of `progress` that earlier versions did not write, and updates the checksum of `progress`.

    `replacement` is an entry that earlier versions wrote instead.
    """
    path = checkpoint / 'progress' / 'metadata'
    content = json.loads(path.read_text()) | replacement
    del content[name], content['sha256']
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {'sha256': digest}))


def test_parts_of_an_optimizer_without_arrays_may_come_and_go(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(jnp.int32(1), PARAMS, (*ADAM.init(PARAMS), optax.EmptyState())), {})
    wanted = TrainState(jnp.int32(0), PARAMS, ADAM.init(PARAMS))
    with open_checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(wanted)
    assert restored.step == 1 and jax.tree.structure(restored) == jax.tree.structure(wanted)


def test_a_newer_checkpoint_that_is_damaged_does_not_hide_that_an_older_one_is_of_other_arrays(tmp_path):
    with open_checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), {})
    (tmp_path / 'checkpoints' / '2' / 'progress' / 'metadata').write_text('{}')
    other = state(0).replace(params={'w': jnp.zeros((2, 4))})
    with open_checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match='checkpoints/1 has other arrays'):
        checkpoints.restore(other)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int32', 'uint8', 'bool'])
def test_a_checksum_follows_every_bit_and_place_but_not_the_layout(dtype):
    values = (jnp.arange(48) % 5).reshape(6, 8).astype(dtype)
    words = {tuple(checksum(array).tolist()) for array in (
        values, values.at[3, 4].set(jnp.zeros((), dtype)), values.T.reshape(6, 8), values[::-1],
        jnp.zeros_like(values), values[:5])}
    assert len(words) == 6
    host, on_device = np.asarray(values), checksum(values).tolist()
    assert numpy_checksum(host).tolist() == checksum(host).tolist() == on_device
    assert on_device != checksum(values.reshape(-1)[:47]).tolist()


def test_numpy_sums_many_values_as_the_compiled_checksum_does():
    values = np.random.default_rng(0).normal(size=(3, PART)).astype(np.float32)[:, 1:]
    assert numpy_checksum(values).tolist() == checksum(values).tolist()


def test_a_checksum_needs_no_memory_beside_the_array():
    values = jnp.ones((256, 1024))
    assert checksum.lower(values).compile().memory_analysis().temp_size_in_bytes < values.nbytes / 100


def test_a_checksum_agrees_with_its_definition():
    def mixed(x):
        for shift, factor in ((16, 0x85ebca6b), (13, 0xc2b2ae35)):
            x = (x ^ x >> shift) * factor % 2 ** 32
        return x ^ x >> 16

    values = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    words = values.view(np.uint32).ravel().tolist()
    assert numpy_checksum(values).tolist() == checksum(values).tolist() == [
        sum(mixed(word ^ mixed((place + seed) % 2 ** 32)) for place, word in enumerate(words)) % 2 ** 32
        for seed in SEEDS]


@pytest.mark.parametrize('content', [
    '', '{"half', '[]', *(f'{{"step": {step}, "validation_loss": 1}}\n' for step in (2 ** 63, -1))])
def test_metrics_that_were_damaged_are_left_out(tmp_path, content):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 2, "validation_loss": 1.5}\n' + content)
    assert evaluations(tmp_path, 'loss') == {2: 1.5}


def test_resumed_metrics_hold_every_step_once(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (10, 20, 30):
        writer.write(step, {'train_loss': step / 10})
    writer.close()
    with open(tmp_path / 'metrics.jsonl', 'a') as file:
        file.write('{"step": 40, "lo')  # killed in the middle of a line
    writer = MetricsWriter(tmp_path, 20)
    writer.write(30, {'train_loss': 7.0})
    writer.close()
    events = b''.join(path.read_bytes() for path in (tmp_path / 'tensorboard').iterdir())
    assert b'train/loss' in events and b'train_loss' not in events
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert lines == [f'{{"step": {step}, "train_loss": {loss}}}' for step, loss in ((10, 1.0), (20, 2.0), (30, 7.0))]


def test_checkpoints_that_are_lost_are_missed_but_not_those_that_never_were(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 3, "train_loss": 2.5}\n')
    with open_checkpoints(tmp_path, metric='loss') as checkpoints:
        assert checkpoints.restore(state(0)) is None
    (tmp_path / 'metrics.jsonl').write_text('{"step": 3, "train_loss": 2.5}\n{"step": 4, "validation_loss": 2.5}\n')
    with open_checkpoints(tmp_path, metric='loss') as checkpoints, pytest.raises(UserError, match='to step 4'):
        checkpoints.restore(state(0))


def test_an_imported_run_without_its_weights_does_not_begin_with_random_parameters(tmp_path):
    (tmp_path / 'recipe.py').write_text('def get_config(): ...')  # of a run that was not imported
    with open_checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state(0)) is None
    (tmp_path / 'recipe.py').write_text(RECIPE_TEXT)
    with open_checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match='checkpoints/0 .* is missing'):
        checkpoints.restore(state(0))
