"""Jobs of several processes in which one process is lost: how the job ends, and how the next start resumes.

Each drill prints its line (DRILL ...) of the table in docs/distributed.md:

    python -m pytest -n 0 -m slow -s tests/launch/test_drills.py
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from runtime.processes import HEARTBEAT
from runtime.stopping import STOPPED
from tests.jobs import Job
from tests.scripts import parameters, train_arguments

STEPS, EVERY = 225, 15  # steps of the run, which must not end before the fault; steps between checkpoints
SOON = 90  # seconds in which a broken connection is detected, also on a busy machine
LATE = HEARTBEAT + 120  # seconds in which a missing heartbeat is detected

pytestmark = pytest.mark.slow


def arguments(workdir, data, cache):
    return train_arguments(workdir, data, cache, parallel__data=1, parallel__fsdp=-1, train__steps=STEPS,
                           train__log_every=15, eval__every=STEPS, checkpoint__every=EVERY)


def outcome(workdir):
    lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
    return [leaf.tobytes() for leaf in parameters(workdir)], [
        {name: value for name, value in line.items() if not re.search('second|_gb$', name)} for line in lines]


@pytest.fixture(scope='module')
def whole(data, cache, tmp_path_factory):
    """Returns a function: number of processes -> outcome of a run without a fault."""
    known = {}

    def find(count):
        if count not in known:
            folder = tmp_path_factory.mktemp('whole')
            with Job(count, arguments(folder / 'run', data, cache), folder / 'logs') as job:
                job.wait(range(count), 900)
                assert all(process.returncode == 0 for process in job.processes), job.output(0)
            known[count] = outcome(folder / 'run')
        return known[count]

    return find


def reason(output):
    """Returns the message with which a process ended: its last line. Threads of Orbax and JAX may log before it."""
    found = re.fullmatch(r'process \d+ on \S+: (.*)', output.strip().splitlines()[-1])
    assert found, output
    return found[1]


def restart(count, workdir, data, cache, folder, expected):
    """Starts the same command again, and returns its log line about the start. The outcome must be bit-identical."""
    with Job(count, arguments(workdir, data, cache), folder) as again:
        again.wait(range(count), 900)
        assert [process.returncode for process in again.processes] == [0] * count, again.output(0)
        resumed = re.search('resuming from step [0-9]+', again.output(0))[0]
    assert outcome(workdir) == expected
    return resumed


@pytest.mark.parametrize('count, victim, fault, within', [
    (2, 0, signal.SIGKILL, SOON), (2, 1, signal.SIGSTOP, LATE), (4, 2, signal.SIGKILL, SOON)])
def test_a_process_that_is_killed_or_stopped(count, victim, fault, within, data, cache, whole, tmp_path):
    workdir, others = tmp_path / 'run', [number for number in range(count) if number != victim]
    with Job(count, arguments(workdir, data, cache), tmp_path / 'logs') as job:
        job.until_saved(workdir, EVERY)
        job.send(victim, fault)
        seconds = job.wait(others, within)
        for number in others:
            assert job.processes[number].returncode == STOPPED
            assert 'Run the same command again' in reason(job.output(number))
        message = reason(job.output(others[0]))
    resumed = restart(count, workdir, data, cache, tmp_path / 'again', whole(count))
    print(f'DRILL {count} processes, {fault.name} to process {victim} -> '
          f'{message} -> {seconds:.1f} s -> {resumed}', flush=True)


def test_a_stopped_process_that_wakes_up_leaves_too(data, cache, tmp_path):
    workdir = tmp_path / 'run'
    with Job(2, arguments(workdir, data, cache), tmp_path / 'logs') as job:
        job.until_saved(workdir, EVERY)
        job.send(0, signal.SIGSTOP)
        job.wait([1], LATE)
        job.send(0, signal.SIGCONT)
        seconds = job.wait([0], LATE)
        assert job.processes[0].returncode == STOPPED, job.output(0)
        print(f'DRILL 2 processes, SIGCONT to process 0 after that -> '
          f'{reason(job.output(0))} -> {seconds:.1f} s', flush=True)


def test_a_slow_process_is_waited_for(data, cache, whole, tmp_path):
    workdir, done = tmp_path / 'run', threading.Event()
    with Job(2, arguments(workdir, data, cache), tmp_path / 'logs') as job:
        job.until_saved(workdir, EVERY)

        def hinder():  # four fifths of its time
            while not done.is_set():
                job.send(1, signal.SIGSTOP)
                time.sleep(0.4)
                job.send(1, signal.SIGCONT)
                time.sleep(0.1)

        thread = threading.Thread(target=hinder)
        thread.start()
        try:
            job.until_saved(workdir, 3 * EVERY)
        finally:
            done.set()
            thread.join()
        job.wait([0, 1], 900)
        assert [process.returncode for process in job.processes] == [0, 0]
    assert outcome(workdir) == whole(2)


class Network:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, and a cable between them."""

    def __enter__(self):
        holder = ['sleep', '3600']
        first = self._start('unshare', '--user', '--map-root-user', '--net', '--uts', *holder)
        second = self._start('nsenter', '-t', str(first), '-U', '--preserve-credentials', 'unshare', '--net', '--uts',
                             *holder)
        self.inside = [['nsenter', '-t', str(holder), '-U', '-n', '-u', '--preserve-credentials']
                       for holder in (first, second)]
        # Gloo listens at the address of the host's name.
        self.run(0, 'hostname 10.77.0.1 && ip link set lo up && ip link add cable0 type veth peer name cable1 && '
                    f'ip link set cable1 netns {second} && ip addr add 10.77.0.1/24 dev cable0 && '
                    'ip link set cable0 up')
        self.run(1, 'hostname 10.77.0.2 && ip link set lo up && ip addr add 10.77.0.2/24 dev cable1 && '
                    'ip link set cable1 up')
        return self

    def __init__(self):
        self._holders = []

    def _start(self, *command):
        self._holders.append(subprocess.Popen(command))
        own, deadline = os.readlink('/proc/self/ns/net'), time.monotonic() + 60
        known = {own, *(os.readlink(f'/proc/{each.pid}/ns/net') for each in self._holders[:-1])}
        while os.readlink(f'/proc/{self._holders[-1].pid}/ns/net') in known:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self._holders[-1].pid

    def run(self, side, command):
        subprocess.run([*self.inside[side], 'sh', '-c', command], check=True)

    def __exit__(self, *exception):
        for holder in self._holders:
            holder.kill()
            holder.wait()


def namespaces():
    try:
        return sys.platform == 'linux' and bool(shutil.which('ip')) and subprocess.run(
            ['unshare', '--user', '--map-root-user', '--net', '--uts', 'true'], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not namespaces(), reason='no network namespaces here')
def test_a_network_that_is_cut(data, cache, whole, tmp_path):
    """No packet arrives any more, but no connection is closed."""
    workdir = tmp_path / 'run'
    with Network() as network, Job(2, arguments(workdir, data, cache), tmp_path / 'logs', network.inside,
                                   '10.77.0.1') as job:
        job.until_saved(workdir, EVERY)
        network.run(0, 'ip link set cable0 down')
        seconds = job.wait([0, 1], LATE)
        messages = [reason(job.output(number)) for number in (0, 1)]
        assert [process.returncode for process in job.processes] == [STOPPED] * 2
    resumed = restart(2, workdir, data, cache, tmp_path / 'again', whole(2))
    print(f'DRILL 2 processes, the network between them cut -> '
          f'{messages[0]} / {messages[1]} -> {seconds:.1f} s -> {resumed}', flush=True)


# One of two processes fails before the first step, and the other process continues.
ALONE = '''
import sys, runpy
import run_directory.checkpoints as checkpoints
from runtime.errors import UserError
restore = checkpoints.Checkpoints.restore
def fails(*_):
    raise UserError('this disk is on fire')
if sys.argv[-1] == '--process_id=1':
    checkpoints.Checkpoints.restore = fails
sys.argv = sys.argv[0:1] + sys.argv[2:]
sys.argv[0] = 'train.py'
runpy.run_path('train.py', run_name='__main__')
'''


def test_an_error_in_one_process_ends_both(data, cache, tmp_path, monkeypatch):
    monkeypatch.setenv('GLIBC_TUNABLES', os.environ.get('GLIBC_TUNABLES', ''))  # no start anew without the lines above
    began = time.monotonic()
    with Job(2, ['-c', ALONE, *arguments(tmp_path / 'run', data, cache)], tmp_path / 'logs') as job:
        job.wait([1], 300)
        assert job.processes[1].returncode == 2 and 'this disk is on fire' in job.output(1), job.output(1)
        job.wait([0], LATE)
        assert job.processes[0].returncode == STOPPED
        print(f'DRILL an error in process 1 -> '
          f'{reason(job.output(0))} -> '
              f'{time.monotonic() - began:.1f} s from the start', flush=True)
