"""The loss of other processes, tested in a single process. tests/launch/test_processes.py tests real processes."""

import os
import signal
import subprocess
import sys
import types

import jax
import pytest

from benchmarks.processes import free_port
from run_directory import checkpoints
from run_directory.damage import Damaged, damage_agreed
from runtime import agreement, processes
from runtime.agreement import different, exchange, from_leader
from runtime.errors import AgreedError, UserError
from tests.scripts import ROOT


@pytest.fixture
def several(monkeypatch):
    """As if this process had a peer."""
    jax.devices()  # made without the peer
    monkeypatch.setattr(processes.global_state, 'client', object())


GLOO = ('UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer '
        '[127.0.0.1]:32805')


def test_a_broken_connection_during_a_restore_is_a_lost_process_and_no_damage(several, tmp_path):
    with pytest.raises(ValueError, match='Gloo'), damage_agreed(tmp_path / '30'):
        raise ValueError(GLOO)  # JAX raises this type where a result is read
    with pytest.raises(RuntimeError, match='an array'), damage_agreed(tmp_path / '30'):
        try:
            raise ValueError(GLOO)
        except ValueError as error:
            raise RuntimeError('an array cannot be read') from error


def test_other_errors_of_a_restore_are_damage(several, tmp_path):
    with pytest.raises(Damaged, match='30 is damaged: NOT_FOUND'), damage_agreed(tmp_path / '30'):
        raise ValueError('NOT_FOUND: Error opening "zarr" driver: /runs/gloo/socket/peer is missing')


def test_a_lost_process_ends_this_one_with_75(several, monkeypatch):
    left = []
    monkeypatch.setattr(processes, '_leave', lambda reason, status: left.append((reason, status)))
    for error in (ValueError(GLOO), agreement.Missing('process 1 did not arrive within 300 s (compiling)')):
        with pytest.raises(type(error)), processes.ending_together():
            raise error
    assert [status for _, status in left] == [75, 75]
    assert all('another process of this job is lost' in why for why, _ in left)


@pytest.mark.parametrize('kind', [jax.errors.JaxRuntimeError, ValueError])
def test_too_little_memory_in_a_collective_is_no_lost_process(several, monkeypatch, kind):
    """Status 75 would start the job again, up to 100 times."""
    left = []
    monkeypatch.setattr(processes, '_leave', lambda reason, status: pytest.fail(reason))
    monkeypatch.setattr(processes.threading.Timer, 'start', lambda timer: left.append(timer.args))
    with pytest.raises(UserError, match='not enough memory .*ncclCommInitRankConfig.*XLA_CLIENT_MEM_FRACTION'), \
            processes.ending_together(), processes.ending_together():  # train.py and the loop
        raise kind(NCCL.format('unhandled cuda error', "Cuda failure 2 'out of memory'"))
    assert [status for _, status in left] == [2, 2] and 'XLA_CLIENT_MEM_FRACTION' in left[0][0]
    assert not processes.lost(jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 9 GB for the peer'))


def test_an_error_of_all_processes_does_not_limit_the_time_of_a_background_save(several, monkeypatch):
    left = []
    monkeypatch.setattr(processes.threading.Timer, 'start', lambda timer: left.append(timer.args))
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(agreement, 'exchange', lambda _, value: [value, value])
    with pytest.raises(AgreedError, match='wrong'), processes.ending_together():
        from_leader('', fail)
    assert not left
    with pytest.raises(UserError, match='wrong'), processes.ending_together():
        fail()
    assert [(text.partition(': ')[2], status) for text, status in left] == [('wrong\nTo fix it, run:', 2)]


def test_sigterm_takes_effect_between_the_connection_and_the_handlers_of_the_training():
    code = ('import os, signal; from runtime.processes import connect\n'
            f'connect("localhost:{free_port()}", 1, 0)\n'
            'os.kill(os.getpid(), signal.SIGTERM)')
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, timeout=600).returncode == -signal.SIGTERM


def test_a_process_is_left_with_its_status_even_if_stderr_cannot_be_written(monkeypatch):
    with open('/dev/full', 'w') as full:
        monkeypatch.setattr(processes.os, '_exit', sys.exit)
        monkeypatch.setattr(processes.os, 'write', lambda _, text: os.writev(full.fileno(), [text]))
        with pytest.raises(SystemExit, match='75'):
            processes._leave('another process is lost', 75)


NCCL = ('INTERNAL: NCCL operation ncclCommInitRankConfig(&comm, size, id, rank, &config) failed: {} (run with '
        "NCCL_DEBUG=WARN for details). Last NCCL warning(error) log entry (may be unrelated) '{}'.")


DUPLICATE = 'Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000'


@pytest.mark.parametrize('kind', [jax.errors.JaxRuntimeError, ValueError])
@pytest.mark.parametrize('reason, entry', [('invalid usage', DUPLICATE), ('invalid argument', '')])
def test_a_wrong_setup_of_nccl_is_no_lost_process_and_no_damage(several, monkeypatch, tmp_path, kind, reason, entry):
    """Status 75 would start the job again, up to 100 times."""
    monkeypatch.setattr(processes, '_leave', lambda reason, status: pytest.fail(reason))
    monkeypatch.setattr(processes.threading.Timer, 'start', lambda timer: None)
    with pytest.raises(UserError, match=f'processes .* cannot communicate .*{reason}.*own GPUs') as raised, \
            processes.ending_together(), processes.ending_together():  # train.py and the loop
        raise kind(NCCL.format(reason, entry))
    assert str(raised.value).count('own GPUs') == 1
    with pytest.raises(kind, match=reason), damage_agreed(tmp_path / '30'):
        raise kind(NCCL.format(reason, entry))


def test_a_broken_connection_of_nccl_is_a_lost_process(several):
    assert processes.lost(jax.errors.JaxRuntimeError(NCCL.format(
        'remote process exited or there was a network error', 'socket: Connection closed by remote peer')))


def test_one_process_agrees_with_itself_without_waiting():
    assert exchange('', {'a': 1}) == [{'a': 1}] and different('', 3) == []
    assert from_leader('', lambda: (1, 2)) == (1, 2)
    with pytest.raises(UserError, match='wrong'):
        from_leader('', lambda: checkpoints._still_valid(fail()))


def test_the_error_without_an_answer_mentions_that_process_0_may_wait_for_another_process(several, monkeypatch):
    def timeout(*_):
        raise jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED')

    client = types.SimpleNamespace(key_value_set=lambda *_: None, blocking_key_value_get=timeout)
    for module, name, value in ((jax, 'process_count', lambda: 3), (jax, 'process_index', lambda: 1),
                                (agreement.global_state, 'client', client), (agreement, 'PATIENCE', -11)):
        monkeypatch.setattr(module, name, value)
    with pytest.raises(agreement.Missing, match='did not answer .*: process 0 is missing, or waits for another'):
        exchange('compiling', 1)


def fail():
    raise UserError('wrong\nTo fix it, run:')
