"""Decisions that two processes make together: when they start, which checkpoint they use, and how they end.

Each test has a fault in only one process. `make test-slow` runs the tests that take more than a few seconds.
"""

import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import inference
from runtime.files import write_text
from runtime.stopping import STOPPED
from tests.jobs import Job
from tests.scripts import ROOT
from tests.test_faults import script_arguments
from tests.tiny_run import outcome, steps, tiny_config

TWO = {'parallel__data': 1, 'parallel__fsdp': 2}
# Starts train.py after `%s`, which one of the processes runs.
SABOTAGE = '''
import os, signal, sys, runpy, time
sys.argv = sys.argv[1:]
%s
runpy.run_path('train.py', run_name='__main__')
'''


@pytest.fixture(autouse=True)
def without_a_restart(monkeypatch):
    monkeypatch.setenv('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=0')  # train.py would start again, without the sabotage


def arguments(workdir, cache, **changes):
    return script_arguments(workdir, tiny_config(cache, **changes))[1:]


def sabotaged(code, workdir, cache, **changes):
    """The command lines of two processes; process 1 runs `code` before train.py."""
    plain = arguments(workdir, cache, **changes)
    return [plain, ['-c', SABOTAGE % code, *plain]]


def params(workdir):
    return jax.tree.leaves(inference.load(workdir, 'latest').model.params)


def assert_same(workdir, other):
    for one, two in zip(params(workdir), params(other), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.fixture(scope='module', autouse=True)
def programs_in_a_cache_of_their_own(cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('JAX_COMPILATION_CACHE_DIR', str(cache / 'xla'))
        yield


@pytest.fixture(scope='module')
def whole(tmp_path_factory, cache):
    """An uninterrupted run of two processes with fsdp. Afterwards, the programs are in the cache."""
    folder = tmp_path_factory.mktemp('whole')
    with Job(2, arguments(folder / 'run', cache, **TWO), folder / 'logs') as job:
        assert job.end() == [0, 0], job.output(0) + job.output(1)
    return folder / 'run'


# The start

@pytest.mark.slow
@pytest.mark.parametrize('count, numbers, patience, status, message', [
    (3, [0, 1, 1], 60, 2, 'two processes have --process_id=1'),
    (2, [0], 2, STOPPED, 'process 1 of 2 did not arrive at localhost:.*; process 0 arrived'),
    (2, [1], 2, STOPPED, 'process 0 does not answer at this address')])
def test_a_duplicate_number_ends_with_2_and_a_missing_process_with_75(count, numbers, patience, status, message,
                                                                       cache, tmp_path):
    with Job(len(numbers), [[*arguments(tmp_path / 'run', cache), f'--patience={patience}']] * len(numbers),
             tmp_path / 'logs', numbers=numbers, total=count) as job:
        assert job.end() == [status] * len(numbers)
        assert any(re.search(message, job.output(each)) for each in range(len(numbers))), job.output(0)
        assert 'Traceback' not in job.output(0)
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_unequal_devices_and_unequal_flags_are_reported_in_every_process(cache, tmp_path):
    both = sabotaged("os.environ['JAX_NUM_CPU_DEVICES'] = '2'", tmp_path / 'run', cache)
    with Job(2, both, tmp_path / 'logs') as job:
        assert job.end() == [2, 2]
        for number in (0, 1):
            assert 'different numbers of devices (process 0: 1, process 1: 2)' in job.output(number)
            assert 'Traceback' not in job.output(number)
    both = [arguments(tmp_path / 'run', cache, seed=seed) for seed in (1, 2)]
    with Job(2, both, tmp_path / 'logs') as job:
        assert job.end() == [2, 2]
        for number in (0, 1):
            assert 'process 1 has another config than process 0 (seed: 2, in process 0 1)' in job.output(number)


@pytest.mark.slow
def test_run_directories_that_are_not_shared_are_an_error(cache, tmp_path):
    both = [arguments(tmp_path / f'run{number}', cache) for number in (0, 1)]
    with Job(2, both, tmp_path / 'logs') as job:
        assert job.end() == [2, 2]
        for number in (0, 1):
            assert re.search(r'--workdir=\S+: process 1 on \S+ cannot see the file \S+/owner, which process 0 has '
                             'written',
                             job.output(number)), job.output(number)


@pytest.mark.slow
def test_a_process_may_start_late_and_compile_longer_than_gloo_waits(whole, cache, tmp_path):
    late = '''
time.sleep(40)
from runtime import agreement
exchange = agreement.exchange
def slow(what, value):
    if what == 'compiling' and not slow.done:
        slow.done = True
        time.sleep(33)
    return exchange(what, value)
slow.done = False
agreement.exchange = slow
'''
    before = programs(cache)
    with Job(2, sabotaged(late, tmp_path / 'run', cache, **TWO), tmp_path / 'logs') as job:
        assert job.end() == [0, 0], job.output(0)
        for what in ('the start', 'compiling'):
            assert f'waiting for process 1 ({what})' in job.output(0)
    assert outcome(tmp_path / 'run') == outcome(whole)
    assert programs(cache) == before  # each process found all its programs in the cache


def programs(cache):
    return {path.name for path in (cache / 'xla').iterdir() if path.name.endswith('-cache')}


# The checkpoint from which a job resumes

def without_steps(source, copy, *removed):
    subprocess.run(['cp', '-r', source, copy], check=True)
    for step in removed:
        subprocess.run(['rm', '-r', copy / 'checkpoints' / str(step)], check=True)
    return copy


@pytest.mark.slow
def test_a_checkpoint_that_is_damaged_for_one_process_is_used_by_none(whole, cache, tmp_path):
    run = without_steps(whole, tmp_path / 'run', 12)
    for path in (run / 'checkpoints' / '9' / 'state' / 'ocdbt.process_1' / 'd').iterdir():
        path.unlink()  # a flipped byte may be in a part that the merged checkpoint does not use
    with Job(2, arguments(run, cache, **TWO), tmp_path / 'logs') as job:
        assert job.end() == [0, 0], job.output(0)
        assert re.search(r'checkpoints/9 is damaged for process \d: .*\. The damaged .* is left unchanged',
                         job.output(0))
        assert 'resuming from step 8' in job.output(0)
    assert outcome(run) == outcome(whole)
    assert (run / 'checkpoints' / '9.damaged').exists()


@pytest.mark.slow
def test_what_one_process_sees_of_the_run_directory_decides_nothing(whole, cache, tmp_path):
    """Process 1 sees neither the newest checkpoint nor the metrics, as where a file system lags."""
    run = without_steps(whole, tmp_path / 'run', 12)
    lags = '''
import logging
from run_directory import checkpoints
checkpoints.evaluations = lambda *_: {}
checkpoints.Checkpoints.steps = lambda self: [8]
from runtime.processes import connect
import runtime.processes
def connected(*arguments):
    connect(*arguments)
    logging.getLogger('allyouneed.train').warning('this process lags')
runtime.processes.connect = connected
'''
    with Job(2, sabotaged(lags, run, cache, **TWO), tmp_path / 'logs') as job:
        assert job.end() == [0, 0], job.output(0) + job.output(1)
        assert 'resuming from step 9' in job.output(0)
        assert 'process 1: this process lags' in job.output(1)  # and its warnings are logged, with its number
    assert outcome(run) == outcome(whole)


@pytest.mark.slow
def test_a_checkpoint_that_the_leader_does_not_see_is_renamed_before_the_first_save(whole, cache, tmp_path):
    run = without_steps(whole, tmp_path / 'run')
    lags = '''
from run_directory import records
saved_steps = records.saved_steps
records.saved_steps = lambda workdir: [step for step in saved_steps(workdir) if step != 12]
'''
    with Job(2, sabotaged(lags, run, cache, **TWO)[::-1], tmp_path / 'logs') as job:
        assert job.end() == [0, 0], job.output(0) + job.output(1)
        assert 'resuming from step 9' in job.output(0)
    assert (run / 'checkpoints' / '12.damaged').is_dir()
    assert outcome(run) == outcome(whole)


@pytest.mark.slow
def test_processes_whose_parameters_differ_save_nothing(cache, tmp_path):
    diverges = '''
import jax, numpy as np
from training import compiled
train = compiled.Compiled.train
def other(self, state, batch):
    state, sums = train(self, state, batch)
    if int(state.step) == 5:
        def changed(leaf):
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [
                jax.device_put(np.asarray(shard.data) + 1, shard.device) for shard in leaf.addressable_shards])
        state = state.replace(params=jax.tree.map(changed, state.params))
    return state, sums
compiled.Compiled.train = other
'''
    run = tmp_path / 'run'
    with Job(2, sabotaged(diverges, run, cache), tmp_path / 'logs') as job:
        assert job.end() == [2, 2], job.output(0)
        for number in (0, 1):
            assert ('process 1 and process 0 have different parameters or optimizer states at step 6. This step is not '
                    'saved. The checkpoint of step 4 is still valid') in job.output(number)
    assert steps(run) == [3, 4]


# The end

@pytest.mark.slow
def test_a_process_that_is_lost_during_the_restore_leaves_no_checkpoint_damaged(whole, cache, tmp_path):
    run = without_steps(whole, tmp_path / 'run', 12)
    dies = '''
from run_directory import damage
damage.checksums = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
'''
    with Job(2, sabotaged(dies, run, cache, **TWO), tmp_path / 'logs') as job:
        assert job.end() == [STOPPED, -signal.SIGKILL]
        assert 'another process of this job is lost' in job.output(0) and 'damaged' not in job.output(0), job.output(0)
    assert steps(run) == steps(whole)[:-1]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_all_processes_after_the_background_save(cache, tmp_path):
    slow = '''
from input_pipeline.array_batches import ArrayPlan
from run_directory.checkpoints import Checkpoints
from runtime import processes
processes.SHUTDOWN = 1
batch, close = ArrayPlan.batch, Checkpoints.close
def poisoned(self, step, *part):
    made = batch(self, step, *part)
    if step == 7 and self._split == 'train':
        made['weights'][0] = float('nan')
    return made
ArrayPlan.batch = poisoned
Checkpoints.close = lambda self: (time.sleep(3), close(self))
'''
    with Job(2, sabotaged(slow, tmp_path / 'run', cache), tmp_path / 'logs') as job:
        assert job.end() == [2, 2], job.output(0) + job.output(1)
        for number in (0, 1):
            assert 'step 8: the loss or the gradient is not finite' in job.output(number)
            assert 'tools.show_batch' in job.output(number) and 'have not ended' not in job.output(number)
    assert steps(tmp_path / 'run')[-1] == 6


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_one_step_or_one_batch_later(whole, cache, tmp_path):
    at_step_7 = '''
from training import compiled
train = compiled.Compiled.train
def signalled(self, state, batch):
    if int(state.step) == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    return train(self, state, batch)
compiled.Compiled.train = signalled
'''
    in_the_evaluation = '''
from training import compiled
evaluate = compiled.Compiled.eval
def signalled(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    compiled.Compiled.eval = evaluate
    return evaluate(*arguments)
compiled.Compiled.eval = signalled
'''
    run, changes = tmp_path / 'run', TWO | {'checkpoint__every': 1000, 'eval__every': 8}
    with Job(2, sabotaged(at_step_7, run, cache, **changes), tmp_path / 'logs') as job:
        assert job.end() == [STOPPED] * 2, job.output(0)
        assert 'stopped by a signal to another process: at step 8, which is saved' in job.output(0)
    assert 'validation_loss' not in (run / 'metrics.jsonl').read_text()
    with Job(2, sabotaged(in_the_evaluation, run, cache, **changes), tmp_path / 'logs') as job:
        assert job.end() == [STOPPED] * 2, job.output(0)
        assert ('stopped by a signal to another process: during the evaluation of step 8, which is saved'
                in job.output(0))
    assert steps(run) == [8]


@pytest.mark.slow
def test_a_run_directory_that_another_training_takes_over_is_left_to_it(cache, tmp_path):
    run = tmp_path / 'run'
    with Job(2, arguments(run, cache, train__steps=5000, checkpoint__every=100), tmp_path / 'logs') as job:
        job.until_saved(run, 4)
        write_text(run / 'owner', 'process 7 on elsewhere\n')  # as if there were no locks between machines
        assert job.end() == [2, 2]
        for number in (0, 1):
            assert ('is now in use by another training (process 7 on elsewhere). This training stops'
                    in job.output(number))
    lines = (run / 'metrics.jsonl').read_text()
    assert json.loads(lines.splitlines()[-1])['step'] <= steps(run)[-1] + 5


@pytest.mark.slow
def test_pmap_saves_stops_at_once_and_resumes_with_pmap_and_with_jit(cache, tmp_path):
    run, changes = tmp_path / 'run', {'eval__every': 1000, 'checkpoint__every': 40, 'checkpoint__keep_last': 9}
    by_pmap = arguments(run, cache, parallel__mode='pmap', train__steps=100_000, **changes)
    with Job(2, by_pmap, tmp_path / 'logs') as job:
        job.until_saved(run, 40)
        job.send(1, signal.SIGTERM)  # by pmap as by jit, the run stops two steps later
        assert job.end() == [STOPPED] * 2, job.output(0)
        stopped = steps(run)[-1]
        assert f'stopped by a signal to another process: at step {stopped}, which is saved' in job.output(0)
    goal = stopped + 20
    by_pmap = arguments(run, cache, parallel__mode='pmap', train__steps=goal, **changes)
    with Job(2, by_pmap, tmp_path / 'logs') as job:
        assert job.end() == [0, 0] and f'resuming from step {stopped}' in job.output(0), job.output(0)
    alone = arguments(tmp_path / 'alone', cache, parallel__mode='pmap', train__steps=goal, **changes)
    done = subprocess.run([sys.executable, *alone], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {'JAX_NUM_CPU_DEVICES': '2'})
    assert done.returncode == 0, done.stderr
    assert_same(run, tmp_path / 'alone')
    by_jit = arguments(run, cache, train__steps=goal + 5, **changes)
    with Job(2, by_jit, tmp_path / 'logs') as job:
        assert job.end() == [0, 0] and f'resuming from step {goal}' in job.output(0), job.output(0)


@pytest.mark.slow
def test_tensor_parallel_over_processes_that_share_no_rows(whole, cache, tmp_path):
    with Job(2, arguments(tmp_path / 'run', cache, parallel__data=1, parallel__tensor=2), tmp_path / 'logs') as job:
        assert job.end() == [0, 0], job.output(1)
    assert_same(tmp_path / 'run', whole)
