"""Sweeps whose runs are jobs of Slurm."""

import contextlib
import os
import re
import signal
import subprocess
import types
import warnings

import pytest
from submitit.core.utils import FailedJobError

from runtime.errors import UserError
from runtime.executors import Job, Slurm
from runtime.stopping import STOPPED
from tests.sweep_bench import ENVIRONMENT, command, start, sweep, sweep_bench, times_begun  # noqa: F401 (a fixture)

SLURM = {
    'srun': 'shift 6; exec "$@"',  # --unbuffered --output X --error Y --cpus-per-task=4
    'env': '[[ $1 != --* ]] && exec /usr/bin/env "$@"; exit 125',  # before coreutils 8.31, --ignore-signal is unknown
    'sbatch': '''
id=4; submitted=$(eval echo '$'$#); script=$(dirname $0)/submitted.sh; cp $submitted $script  # as Slurm does
for task in $(seq 0 $(sed -n 's/.*--array=0-\\([0-9]*\\).*/\\1/p' $script)); do
  (export SLURM_JOB_ID=$id$task SLURM_ARRAY_JOB_ID=$id SLURM_ARRAY_TASK_ID=$task SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1
   export SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
   bash $script > $script.$task.out 2>&1 &)
done
echo "Submitted batch job $id"''',
    'sacct': 'echo "JobID|State|NodeList"',
}


@pytest.fixture
def cluster(bench, monkeypatch):
    """Slurm as far as submitit sees of it: each job of an array runs at once."""
    for name, body in SLURM.items():
        (bench / 'bin' / name).parent.mkdir(exist_ok=True)
        (bench / 'bin' / name).write_text(f'#!/bin/bash\n{body}\n')
        (bench / 'bin' / name).chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, 'PATH', f'{bench}/bin:{os.environ["PATH"]}')


@pytest.mark.slow
def test_jobs_of_a_cluster(bench, cluster):
    train = bench / 'train.py'
    train.write_text(f'import os, signal\nos.kill(os.getpid(), signal.SIGUSR2)\n{train.read_text()}')  # it is ignored
    done = sweep(bench, '--executor=slurm', '--partition=short', '--hours=0.5', '--gpus=2', '--cpus=3', '--memory_gb=5',
                 '--jobs=2', heads=[1, 2], seeds=1)
    assert done.returncode == 1, done.stderr
    script = bench / 'out/logs/slurm/4_submission.sh'
    assert all(f'#SBATCH --{line}\n' in script.read_text() for line in
               ('partition=short', 'time=30', 'array=0-1%2', 'gpus-per-node=2', 'cpus-per-task=3', 'mem=5GB',
                'job-name=out'))
    assert ' --cpus-per-task=3 ' in script.read_text().splitlines()[-1]  # the command with srun
    assert 'num_heads=1,seed=0 finished' in done.stderr and 'two heads are bad luck' in done.stderr
    assert '| failed: exit status 1 |' in done.stdout


def test_a_run_that_needs_longer_than_the_time_limit_has_not_failed(bench, cluster, monkeypatch):
    def result():
        raise FailedJobError('UncompletedJobError: Job not requeued because: timed-out too many times.')

    monkeypatch.setenv('PATH', ENVIRONMENT['PATH'])  # with srun
    executor, job = Slurm(bench / 'out/logs/slurm'), Job('one', [], bench / 'one.log')
    assert executor._executor._executor.max_num_timeout == 10_000
    timed_out = types.SimpleNamespace(result=result, state='COMPLETED', job_id='4_0')
    assert executor._status(job, timed_out) == STOPPED and not job.failure.exists()


def test_a_job_is_queued_again_if_the_signal_arrives_between_two_commands(tmp_path):
    job = Job('one', [], tmp_path / 'one.log', process=subprocess.Popen(['true']))
    assert job.process is not None
    job.process.wait()
    again = job.checkpoint().function
    assert isinstance(again, Job) and (again.name, again.process, again.stop_signal) == ('one', None, None)


def test_submitit_does_not_warn_if_all_jobs_are_in_the_queue(bench, cluster, monkeypatch):
    monkeypatch.setenv('PATH', ENVIRONMENT['PATH'])  # with srun
    monkeypatch.setattr('runtime.executors.time.sleep', lambda seconds: None)
    executor, job = Slurm(bench / 'out/logs/slurm'), Job('one', [], bench / 'one.log')
    executor._ticket(job).parent.mkdir(parents=True)
    executor._ticket(job).write_text('4_0')
    monkeypatch.setattr(executor, '_queued', lambda job: types.SimpleNamespace(
        done=lambda: True, state='COMPLETED', result=lambda: 0))
    with warnings.catch_warnings(action='error'):
        assert list(executor.run([job])) == [(job, 0)]


def test_a_signal_during_the_submission_takes_effect_after_the_ids_of_the_jobs_are_written(bench, cluster, monkeypatch):
    def submit(_):
        signal.raise_signal(signal.SIGHUP)
        return types.SimpleNamespace(job_id='4_0')

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setenv('PATH', ENVIRONMENT['PATH'])  # with srun
    executor, job = Slurm(bench / 'out/logs/slurm'), Job('one', [], bench / 'one.log')
    monkeypatch.setattr(executor, '_executor', types.SimpleNamespace(batch=contextlib.nullcontext, submit=submit))
    executor._ticket(job).parent.mkdir(parents=True)
    handler = signal.signal(signal.SIGHUP, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(executor.run([job]))
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert executor._ticket(job).read_text() == '4_0'


@pytest.mark.parametrize('state, status, ended', [
    ('PENDING', STOPPED, False), ('PREEMPTED', STOPPED, False), ('RUNNING', -signal.SIGTERM, False),
    ('RUNNING', 0, True), ('RUNNING', 2, True), ('RUNNING', FailedJobError(), True),
    ('CANCELLED by 0', STOPPED, True), ('COMPLETED', STOPPED, True)])
def test_a_job_that_slurm_queues_again_has_not_ended(bench, cluster, monkeypatch, state, status, ended):
    def result():
        if isinstance(status, Exception):
            raise status
        return status

    monkeypatch.setenv('PATH', ENVIRONMENT['PATH'])  # with srun
    submitted = types.SimpleNamespace(done=lambda: True, state=state, result=result, job_id='4_0')
    executor = Slurm(bench / 'out/logs/slurm')
    assert executor._ended(submitted) == ended
    monkeypatch.setattr('runtime.executors.QUEUED_AGAIN', -1)
    assert executor._ended(submitted) == (ended or state == 'PREEMPTED')  # as with PreemptMode=CANCEL


def test_jobs_that_slurm_refuses_are_an_error_with_the_reason(bench, cluster, monkeypatch):
    (bench / 'bin/sbatch').write_text('#!/bin/sh\necho "sbatch: error: invalid partition" >&2\nexit 1\n')
    monkeypatch.setenv('PATH', ENVIRONMENT['PATH'])
    executor, job = Slurm(bench / 'out/logs/slurm'), Job('one', [], bench / 'one.log')
    with pytest.raises(UserError, match='refused the jobs: sbatch: error: invalid partition. Check --partition'):
        next(executor.run([job]))


def test_an_empty_id_of_a_job_is_no_job(bench, cluster, monkeypatch):
    monkeypatch.setenv('PATH', ENVIRONMENT['PATH'])  # with srun
    executor, job = Slurm(bench / 'out/logs/slurm'), Job('one', [], bench / 'one.log')
    executor._ticket(job).parent.mkdir(parents=True)
    executor._ticket(job).touch()
    assert executor._queued(job) is None


def test_a_failure_whose_reason_the_node_has_just_written_has_a_reason_here(bench, cluster, monkeypatch):
    monkeypatch.setenv('PATH', ENVIRONMENT['PATH'])  # with srun
    executor, job = Slurm(bench / 'out/logs/slurm'), Job('one', [], bench / 'one.log')
    assert executor._status(job, types.SimpleNamespace(result=lambda: 3)) == 3  # NFS does not show the file yet
    assert job.failure.read_text() == 'exit status 3'


@pytest.mark.slow
def test_jobs_outlive_the_sweep_and_are_found_again(bench, cluster):
    process = start(bench, '--executor=slurm')
    process.send_signal(signal.SIGINT)
    assert re.search(r'run scancel (4_0 )?(4_1 )?4_2 4_3\n', process.communicate(timeout=600)[1])
    again = subprocess.Popen(command(bench, '--executor=slurm'), cwd=bench, env=ENVIRONMENT, text=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while 'runs ended' not in again.stderr.readline():  # the first line of the progress, 30 s later
        assert again.poll() is None
    (bench / 'slow').unlink()
    again.communicate(timeout=600)
    assert again.returncode == 0
    assert set(times_begun(bench).values()) == {1} and len(times_begun(bench)) == 4


@pytest.mark.slow
def test_a_cluster_that_is_not_there(bench):
    refused = sweep(bench, '--executor=slurm')
    assert refused.returncode == 2 and '--executor=slurm: Could not detect "srun"' in refused.stderr
    assert not (bench / 'out').exists()
