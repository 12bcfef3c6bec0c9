"""A run directory that another run uses, or that was begun with another config or other data."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inference
from configs import base
from configs.options import flatten
from input_pipeline.data import Data, open_data
from run_directory import workdir as run_directory
from run_directory.fingerprints import changed_data
from run_directory.records import read_config
from run_directory.workdir import RunDirectory, check_same_inputs
from runtime import agreement
from runtime.agreement import Greatest
from runtime.errors import UserError
from runtime.stopping import STOPPED
from tests.tiny_run import log, start, steps, tiny_config  # noqa: F401 (fixture)
from training import loop
from training.objective import make_objective


def test_a_second_run_on_one_directory_is_refused(copy, cache):
    holder = (copy / 'owner').read_text().strip()
    assert re.match('process [0-9]+ on .*, started 20', holder)
    with open(copy / 'lock') as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=rf'in use by another training \({re.escape(holder)}\)'):
            start(copy, tiny_config(cache))
    start(copy, tiny_config(cache))  # and afterwards it is free


def test_an_error_while_a_run_is_opened_unlocks_its_directory(copy, cache):
    changed = tiny_config(cache)
    changed.model.d_model *= 2
    with pytest.raises(UserError, match='model.d_model') as error:  # keeps the traceback, as a notebook does
        RunDirectory(str(copy), changed, asked=['model.d_model'])
    with RunDirectory(str(copy), tiny_config(cache)) as directory:
        assert directory.resumed and error.tb is not None


def test_a_folder_of_another_program_gets_no_lock(tmp_path):
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match='not a run'):
        RunDirectory(str(tmp_path), base.get_config())
    assert [path.name for path in tmp_path.iterdir()] == ['config.json']


class Delayed(Greatest):
    """Returns the values of the previous call, as with several processes."""

    def __call__(self, *values):
        previous, self._pending = self._pending, values
        return [0.0] * len(values) if previous is None else previous


@pytest.mark.slow
def test_a_signal_stops_several_processes_that_save_every_step(copy, cache, monkeypatch):
    made = []

    def make_step(*arguments, make_step=loop.make_step):
        made.append(1)
        if len(made) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return make_step(*arguments)

    monkeypatch.setattr(loop, 'Greatest', Delayed)
    monkeypatch.setattr(loop, 'make_step', make_step)
    with pytest.raises(SystemExit) as stopped:
        start(copy, tiny_config(cache, checkpoint__every=1))
    assert stopped.value.code == STOPPED and steps(copy)[-1] == 11  # resumed from step 9


def test_a_teacher_cannot_be_added_to_a_run(copy, cache):
    with RunDirectory(str(copy), tiny_config(cache)) as directory:
        directory.check_objective(lambda *_: None)
        with pytest.raises(UserError, match='config.train.teacher: the run in .* began without a teacher'):
            directory.check_objective(jax.tree_util.Partial(lambda *_: None, {'w': jnp.ones(3)}))


def test_an_imported_run_keeps_the_fingerprints_of_its_first_data_and_its_teacher(copy, cache, monkeypatch):
    path, config = copy / 'data' / 'fingerprints.json', tiny_config(cache)
    before = json.loads(path.read_text())
    path.write_text('{}')  # as an import writes it
    data, objective = open_data(config, copy), jax.tree_util.Partial(lambda *_: None, {'w': jnp.ones(3)})
    with RunDirectory(str(copy), config) as directory:
        directory.check_objective(objective)
        directory.claim(config, data, objective)
    assert json.loads(path.read_text()) == before
    with RunDirectory(str(copy), config) as directory:
        directory.check_objective(objective)
        with pytest.raises(UserError, match='parameters of the teacher have changed since'):
            directory.check_objective(jax.tree_util.Partial(lambda *_: None, {'w': jnp.zeros(3)}))
        recorded = tiny_config(cache, train__teacher='runs/big')  # an option of runs that read text
        monkeypatch.setattr(run_directory, 'read_saved_config', lambda _: (recorded, set()))
        with pytest.raises(UserError, match='run in .* began with a teacher. Set config.train.teacher=runs/big, or'):
            directory.check_objective(lambda *_: None)


def test_an_imported_run_keeps_the_precision_that_its_first_training_has_chosen(copy, cache):
    config = tiny_config(cache, train__matmul_precision='auto')
    (copy / 'config.json').write_text(config.to_json())  # as an import writes it
    with RunDirectory(str(copy), config) as directory:
        config.train.matmul_precision = 'bfloat16'
        directory.claim(config, open_data(config, copy), lambda *_: None)
    again = tiny_config(cache, train__matmul_precision='auto')
    with RunDirectory(str(copy), again):
        assert again.train.matmul_precision == 'bfloat16'


def test_where_files_cannot_be_locked_a_warning_is_logged(copy, cache, monkeypatch, log):
    def flock(*_):
        raise OSError(95, 'Operation not supported')
    monkeypatch.setattr(fcntl, 'flock', flock)
    with RunDirectory(str(copy), tiny_config(cache)) as directory:
        assert directory.resumed
    assert 'cannot be locked (Operation not supported)' in log.text


@pytest.mark.slow
def test_safe_changes_of_the_config_are_logged_and_kept(copy, cache, log):
    config = tiny_config(cache, eval__every=5, train__steps=10, checkpoint__keep_last=2)
    start(copy, config)
    for line in ('eval.every 4 -> 5', 'train.steps 12 -> 10', 'checkpoint.keep_last 3 -> 2'):
        assert f'changed since the run began: {line}' in log.text
    assert read_config(copy).to_dict() == config.to_dict()
    [change] = map(json.loads, (copy / 'changes.jsonl').read_text().splitlines())
    assert change['changed']['eval.every'] == [4, 5]
    start(copy, config)
    assert len((copy / 'changes.jsonl').read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_run_that_is_shorter_than_its_warmup_resumes_with_more_steps(tmp_path, cache, log):
    short = {'optimizer__schedule': 'cosine', 'optimizer__warmup': 8}
    start(tmp_path / 'run', tiny_config(cache, train__steps=2, **short))
    assert 'the warm-up has 1 steps instead of config.optimizer.warmup=8' in log.text
    with RunDirectory(str(tmp_path / 'run'), tiny_config(cache, train__steps=12, **short)) as directory:
        assert directory.resumed and directory.finished_at is None


def test_a_change_of_the_mesh_promises_nothing_about_dropout_by_pmap():
    for option in ('mode', 'data', 'fsdp', 'tensor'):
        assert 'with pmap and dropout, results differ more' in run_directory.may_change(f'parallel.{option}')


@pytest.mark.parametrize('option', ['beam', 'alpha', 'patience', 'extra_length', 'temperature', 'top_k', 'top_p'])
def test_the_note_on_a_changed_search_mentions_the_scores_of_evaluations(option):
    assert 'not comparable with earlier scores' in run_directory.may_change(f'decode.{option}')


def test_the_lease_is_checked_where_there_are_no_locks(copy, cache):
    with RunDirectory(str(copy), tiny_config(cache)) as directory:
        directory.check_lease()
        (copy / 'owner').write_text('process 7 on elsewhere')
        with pytest.raises(UserError, match='now in use by another training .process 7 on elsewhere.. This train'):
            directory.check_lease()


def test_a_lease_that_cannot_be_read_is_not_another_training(copy, cache, monkeypatch):
    errors = []

    def read_bytes(path, read=run_directory.read_bytes):
        if errors:
            raise errors.pop(0)
        return read(path)

    with RunDirectory(str(copy), tiny_config(cache)) as directory:
        monkeypatch.setattr(run_directory, 'read_bytes', read_bytes)
        errors.append(OSError(errno.ESTALE, 'Stale file handle'))
        directory.check_lease()
        assert not errors
        monkeypatch.setattr(run_directory, 'READABLE', 0)
        errors.extend(OSError(errno.EIO, 'Input/output error') for _ in range(5))
        with pytest.raises(UserError, match=f'{copy}/owner cannot be read: Input/output error'):
            directory.check_lease()
        errors.clear()
        before = (copy / 'owner').read_text()
        (copy / 'owner').unlink()
        directory.check_lease()
        assert (copy / 'owner').read_text() == before
        for name in ('owner', 'config.json'):
            (copy / name).unlink()
        with pytest.raises(UserError, match=f'{copy}: the files of the run have been deleted. This training stops'):
            directory.check_lease()
        assert not (copy / 'owner').exists()


def test_of_two_new_runs_the_first_continues_if_there_are_no_locks(tmp_path, cache, monkeypatch):
    def flock(*_):
        raise OSError(95, 'Operation not supported')

    monkeypatch.setattr(fcntl, 'flock', flock)
    config = tiny_config(cache)
    data, run = open_data(config), str(tmp_path / 'run')
    with RunDirectory(run, config) as first, RunDirectory(run, config) as second:
        first.claim(config, data, lambda *_: None)
        with pytest.raises(UserError, match='another training has just started in this directory'):
            second.claim(config, data, lambda *_: None)
        first.check_lease()


def test_a_host_name_may_contain_spaces_and_bytes_that_are_not_utf_8(copy, cache, monkeypatch):
    monkeypatch.setattr(socket, 'gethostname', lambda: 'a\udcff  host ')
    monkeypatch.setattr(run_directory, 'VISIBLE', 0)
    with RunDirectory(str(copy), tiny_config(cache)) as directory:
        directory.check_lease()


def test_other_changes_are_refused_and_listed(copy, cache):
    before = (copy / 'config.json').read_text()
    with pytest.raises(UserError) as error:
        start(copy, tiny_config(cache, model__d_ff=64, eval__metric='loss', eval__every=5))
    assert 'model.d_ff: 32 in the run, 64 now' in str(error.value) and 'eval.metric' in str(error.value)
    assert 'eval.every' not in str(error.value) and (copy / 'config.json').read_text() == before


def test_a_longer_cosine_is_logged(copy, cache, log):
    config = tiny_config(cache, optimizer__schedule='cosine')
    (copy / 'config.json').write_text(config.to_json())
    config.train.steps = 14
    with RunDirectory(str(copy), config) as directory:
        data = open_data(config)
        directory.claim(config, data, make_objective(config, data))
    assert 'train.steps 12 -> 14 (the cosine schedule ends at the new value' in log.text


@pytest.mark.slow
def test_a_start_that_was_killed_early_leaves_nothing_in_the_way(tmp_path, cache):
    workdir = tmp_path / 'run'
    (workdir / 'data').mkdir(parents=True)
    for name in 'config.json.tmp', 'owner.0a1b2c3d.tmp':  # of an earlier version, and unique
        (workdir / name).write_text('{"half')
    (workdir / 'lock').write_text('process 1 on elsewhere')
    start(workdir, tiny_config(cache, train__steps=1))
    assert steps(workdir) == [1]


@pytest.mark.parametrize('missing', ['', '/new/..'])
def test_a_folder_data_that_is_not_from_a_killed_start_is_not_used(tmp_path, cache, missing):
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'source.model').write_text('precious')
    with pytest.raises(UserError, match=f'workdir={tmp_path} is not empty and has no config.json'):
        RunDirectory(f'{tmp_path}{missing}', tiny_config(cache))


def test_a_killed_start_leaves_no_teacher_and_no_lowered_options_to_the_next_start(tmp_path, cache):
    config, teacher = tiny_config(cache), jax.tree_util.Partial(lambda *_: None, {'w': jnp.ones(3)})
    data, kept = open_data(config), tmp_path / 'data'
    for objective in teacher, lambda *_: None:
        (tmp_path / 'config.json').unlink(missing_ok=True)
        with RunDirectory(str(tmp_path), config) as directory:
            directory.claim(config, data, objective)
        assert (kept / 'teacher.json').exists() == (objective is teacher) and not (kept / 'lowered.json').exists()
        (kept / 'lowered.json').write_text('{"train.steps": 99}')


@pytest.mark.slow
def test_changed_data_is_refused_with_the_name_of_the_file(tmp_path, cache):
    folder = tmp_path / 'data'
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ('train', 'validation', 'test'):
        np.savez(folder / f'{split}.npz', inputs=rng.integers(0, 255, (24, 8, 8, 1)).astype(np.uint8),
                 targets=np.arange(24) % 10)
    config = tiny_config(cache, data__source='files', data__name='', data__dir=str(folder), train__steps=2)
    start(tmp_path / 'run', config)
    shutil.move(folder, tmp_path / 'moved')  # the same data elsewhere
    config.data.dir = str(tmp_path / 'moved')
    config.train.steps = 3
    start(tmp_path / 'run', config)
    config.train.steps = 4  # more than a finished run, whose data is not read
    np.savez(tmp_path / 'moved' / 'validation.npz', inputs=np.zeros((24, 8, 8, 1), np.uint8),
             targets=np.arange(24) % 10)
    with pytest.raises(UserError, match='the data has changed since .*run began: validation: validation.npz'):
        start(tmp_path / 'run', config)
    data = inference.load(tmp_path / 'run').data()
    changed = changed_data(tmp_path / 'run', data, ['validation', 'test'])
    assert changed == ['validation: validation.npz']


def test_other_data_is_refused_before_a_run_is_resumed(copy, cache):
    config = tiny_config(cache)
    data = open_data(config, copy)
    changed = mock.Mock(Data, fingerprint=lambda split: data.fingerprint(split) | {'files': [['new.npz', '0']]})
    with RunDirectory(str(copy), config) as directory:
        directory.check_data(data)
        with pytest.raises(UserError, match='the data has changed since .* train: new.npz, .*validation: new.npz'):
            directory.check_data(changed)


def test_processes_have_the_same_config_and_data(monkeypatch):
    config, second = base.get_config(), {}  # the values of process 1 that differ
    for module in run_directory, agreement:
        monkeypatch.setattr(module, 'exchange', lambda purpose, value: [value, second.get(purpose, value)])
    data = mock.Mock(Data, fingerprint=lambda split: {'split': split})
    second['the config'] = flatten(config) | {'data.dir': 'elsewhere'}
    check_same_inputs(config, data)
    second['the data'] = [{'split': 'train'}, {'split': 'other'}]
    with pytest.raises(UserError, match='process 1 and process 0 read different data'):
        check_same_inputs(config, data)
    second['the config'] = flatten(config) | {'seed': 7}
    with pytest.raises(UserError, match=r'process 1 has another config than process 0 \(seed: 7, in process 0 0\)'):
        check_same_inputs(config, data)


def test_test_sets_can_be_added_only_if_held_out_test_data_stays_held_out(tmp_path, cache):
    (tmp_path / 'train.tsv').write_text(''.join(f'number {number}\tnombre {number}\n' for number in range(60)))
    (tmp_path / 'more').mkdir()
    for name in 'a', 'b', 'more/c':
        (tmp_path / f'{name}.tsv').write_text('one\tun\n')

    def opened(names):
        config = base.get_config()
        config.update_from_flattened_dict({
            'cache_dir': str(cache), 'data.source': 'files', 'data.dir': str(tmp_path), 'data.tokenizer.kind': 'char',
            'data.splits.test': names})
        with RunDirectory(str(tmp_path / 'run'), config) as directory:
            data = open_data(config)
            directory.check_data(data)
            if not directory.resumed:
                directory.claim(config, data, lambda *_: None)
        return data

    before = opened('test').pairs('test')
    with pytest.raises(UserError, match=r'splits\.test=a,b: the test data that was held out .* Use test,a,b$'):
        opened('a,b')
    for name in 'more/c', 'train':  # test,more/c and test,train are not allowed
        with pytest.raises(UserError, match=f'link the files of {name} into config.data.dir under .* use test,NAME$'):
            opened(name)
    after = opened('test,a,b')
    assert after.pairs('test') == before and len(before) == 6 and after.pairs('b') == [('one', 'un')]
    (tmp_path / 'test.tsv').write_text('one\tun\n')
    for names in 'test', 'test,a':
        with pytest.raises(UserError, match=f'dir={tmp_path} now has files of the test .*splits.test={names},NAME$'):
            opened(names)
