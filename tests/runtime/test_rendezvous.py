"""Checks of processes before JAX connects them. In these tests, threads take the place of processes."""

import os
import re
import resource
import socket
import threading
import time
import types
from concurrent import futures

import pytest

from benchmarks.processes import free_port
from runtime import rendezvous
from runtime.errors import UserError
from runtime.rendezvous import Missing, meet


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rendezvous, 'LINGER', 0.5)
    monkeypatch.setattr(rendezvous, 'PORT_FREED', 0.5)
    monkeypatch.setattr(rendezvous, 'QUIET', 0.2)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the meeting, which is `late` seconds fast."""
    clock = types.SimpleNamespace(late=0, monotonic=lambda: time.monotonic() + clock.late, sleep=time.sleep)
    monkeypatch.setattr(rendezvous, 'time', clock)
    return clock


def end_after(clock, attempts):
    """Ends the patience of a process exactly after so many attempts. There are no pauses between them."""
    pauses = []
    clock.monotonic, clock.sleep = lambda: time.monotonic() + 1000 * (len(pauses) >= attempts), pauses.append


def gather(*processes, patience=120.0, port=None):
    """The error of each of these (count, number), or None."""
    port = port or free_port()

    def join(process):
        try:
            return meet('localhost', port, *process, patience)
        except (UserError, Missing) as error:
            return error

    with futures.ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(join, processes))


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_processes_of_a_job_meet():
    assert gather((4, 2), (4, 0), (4, 3), (4, 1)) == [None] * 4


def test_a_process_0_that_starts_late_is_waited_for(caplog):
    port = free_port()
    with futures.ThreadPoolExecutor(1) as pool, caplog.at_level('INFO', 'allyouneed.train'):
        early = pool.submit(gather, (2, 1), port=port)
        wait_until(lambda: 'waiting for process 0 (the start)' in caplog.text)
        assert gather((2, 0), port=port) == [None] and early.result() == [None]


def test_a_missing_process_is_named_and_is_no_error_of_the_user(caplog, monkeypatch, clock):
    monkeypatch.setattr(rendezvous, 'REPEAT', 0.2)
    with futures.ThreadPoolExecutor(1) as pool, caplog.at_level('INFO', 'allyouneed.train'):
        both = pool.submit(gather, (4, 0), (4, 2))
        wait_until(lambda: 'waiting for processes 1, 3 (the start)' in caplog.text)  # process 2 has arrived
        clock.late = 1000
        errors = both.result()
    assert all(isinstance(error, Missing) for error in errors)
    assert all('processes 1, 3 of 4 did not arrive' in str(error) and 'processes 0, 2 arrived' in str(error)
               for error in errors)


def test_a_process_that_starts_long_before_process_0_learns_which_process_is_missing(caplog, monkeypatch, clock):
    """It waits for the answer as long as process 0 may wait, not only for the rest of its own patience."""
    monkeypatch.setattr(rendezvous, 'REPEAT', 0.2)
    port, connections, connect = free_port(), [], socket.create_connection
    monkeypatch.setattr(socket, 'create_connection', lambda *arguments, **options: (
        connections.append(connect(*arguments, **options)) or connections[-1]))
    with futures.ThreadPoolExecutor(2) as pool, caplog.at_level('INFO', 'allyouneed.train'):
        early = pool.submit(gather, (3, 1), port=port)
        wait_until(lambda: 'waiting for process 0 (the start)' in caplog.text)
        clock.late = 60  # half of the patience
        first = pool.submit(gather, (3, 0), port=port)
        wait_until(lambda: any(connection.gettimeout() >= 120 for connection in connections))
        wait_until(lambda: 'waiting for process 2 (the start)' in caplog.text)
        clock.late = 1000
        errors = first.result() + early.result()
    assert all(isinstance(error, Missing) and 'process 2 of 3 did not arrive' in str(error) for error in errors), errors


def test_a_missing_process_0_is_no_error_of_the_user():
    [error] = gather((2, 1), patience=0.5)
    assert isinstance(error, Missing) and 'process 0 does not answer at this address' in str(error)


def test_an_ipv6_address_has_brackets_in_messages():
    port = free_port()
    with pytest.raises(Missing, match=rf'^--coordinator_address=\[::1\]:{port}: process 0 does not answer'):
        meet('::1', port, 2, 1, 0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('processes, message', [
    ([(3, 0), (3, 1), (3, 1)], 'two processes have --process_id=1: .* and .*processes 0, 1 arrived'),
    ([(3, 0), (2, 1)], 'process 1 .* has --num_processes=2, but process 0 .* has 3'),
    ([(2, 0), (3, 2)], 'has --num_processes=3, but process 0 .* has 2')])
def test_wrong_numbers_are_errors_of_the_user_in_every_process(processes, message):
    errors = gather(*processes)
    assert all(isinstance(error, UserError) for error in errors), errors
    assert any(re.search(message, str(error)) for error in errors), errors


@pytest.mark.slow
def test_a_second_process_0_is_an_error_of_the_user_in_both():
    port = free_port()
    errors = gather((2, 0), (2, 0), port=port, patience=5)
    assert any(isinstance(error, UserError) and 'cannot be used' in str(error) for error in errors)


def test_a_process_0_elsewhere_is_found_by_the_address_of_the_job(monkeypatch):
    """It listens at another port, as if on another machine, and meets the first one at the address."""
    port, elsewhere, listener = free_port(), free_port(), rendezvous._listener
    with futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(gather, (2, 0), port=port)
        while not pool._work_queue.empty() or socket.socket().connect_ex(('localhost', port)):
            threading.Event().wait(0.05)
        monkeypatch.setattr(rendezvous, '_listener', lambda _: listener(elsewhere))
        [second] = gather((2, 0), port=port)
        [first] = first.result()
    for error in (first, second):
        assert isinstance(error, UserError) and 'two processes have --process_id=0' in str(error)


def test_a_port_that_is_in_use_is_reported_in_one_line():
    with socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True) as other:
        [error] = gather((2, 0), port=other.getsockname()[1])
    assert isinstance(error, UserError) and 'Address already in use. Use a free port' in str(error)


def test_a_process_that_was_started_again_takes_the_place_of_the_dead_one():
    port = free_port()
    with futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(gather, (4, 0), (4, 2), port=port)
        while (dead := socket.socket()).connect_ex(('localhost', port)):
            threading.Event().wait(0.05)
        dead.sendall(b'{"count": 4, "number": 1, "where": "here", "key": "dead"}\n')
        threading.Event().wait(0.5)
        dead.close()
        last = pool.submit(gather, (4, 3), port=port)
        threading.Event().wait(0.5)  # now each number has arrived, but process 1 is dead
        assert gather((4, 1), port=port) == last.result() == [None] and first.result() == [None, None]


def test_an_ended_process_is_noticed_among_more_than_1024_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 2000:
        pytest.skip(f'this machine allows only {hard} open files')
    ours, theirs = socket.socketpair()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2001), hard))
    try:
        with socket.socket(fileno=os.dup2(ours.detach(), 2000)) as connection:
            assert not rendezvous._is_gone(connection)
            theirs.close()
            assert rendezvous._is_gone(connection)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_another_program_at_the_address_is_named(clock):
    end_after(clock, attempts=1)
    with socket.create_server(('localhost', 0)) as other:
        def answer():
            connection, _ = other.accept()
            connection.recv(1000)
            connection.sendall(b'\x00\x00\x18\x04\n')
            connection.close()
        threading.Thread(target=answer, daemon=True).start()
        [error] = gather((2, 1), port=other.getsockname()[1])
    assert isinstance(error, UserError) and 'another program answers at this address' in str(error)


def test_another_program_at_the_address_that_has_ended_is_no_error_of_the_user(clock):
    """JAX of the previous process 0 answers to a process that was started again. Then the previous process 0 ends."""
    def answer():
        connection, _ = other.accept()
        other.close()
        connection.sendall(b'\x00\x00\x18\x04\n')
        connection.close()

    other = socket.create_server(('localhost', 0))
    port = other.getsockname()[1]
    threading.Thread(target=answer, daemon=True).start()
    end_after(clock, attempts=2)
    [error] = gather((2, 1), port=port)
    assert isinstance(error, Missing) and 'process 0 does not answer at this address' in str(error)


def test_noise_at_the_port_does_not_disturb_the_meeting():
    port = free_port()
    with futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(gather, (2, 0), port=port)
        while (noise := socket.socket()).connect_ex(('localhost', port)):
            threading.Event().wait(0.05)
        noise.sendall(b'GET / HTTP/1.1\n')
        noise.settimeout(60)
        assert noise.recv(1) == b'', 'a process without a ticket must notice that it should connect again'
        assert gather((2, 1), port=port) == [None] and first.result() == [None]
