"""Checks that all processes of a job are started correctly, before JAX connects them.

JAX aborts a process if two processes have the same id, or if a process is missing. JAX crashes if the port is in
use. So the processes connect to the coordinator's address before JAX does. Each process sends its ticket, a line of
JSON with the id of the process. Process 0 sends the same answer (the verdict) to all processes. Then process 0
frees the port for JAX's coordinator.
"""

import contextlib
import errno
import json
import logging
import os
import select
import socket
import time
import uuid
from collections.abc import Collection, Iterator
from typing import Any

from runtime.errors import UserError

PORT_FREED = 20  # seconds to wait until a process of the previous start frees the port
LINGER = 5       # seconds during which process 0 reports an error to processes that arrive later
QUIET, REPEAT = 10, 30  # seconds before the first log line about missing processes, and between two such lines

log = logging.getLogger('allyouneed.train')


class Missing(Exception):
    """Raised if a process of the job did not arrive in time."""


def listed(numbers: Collection[int]) -> str:
    """Returns the ids of processes as text, such as 'process 3' or 'processes 1, 3'."""
    return f'process{"es" if len(numbers) > 1 else ""} {", ".join(map(str, sorted(numbers)))}'


class Waiting:
    """A logger of the missing processes. It logs for the first time after QUIET seconds, then every REPEAT seconds."""

    def __init__(self, purpose: str):
        self._purpose, self._next = purpose, time.monotonic() + QUIET

    def log(self, missing: Collection[int]) -> None:
        """Logs the ids of the missing processes if the next log line is due."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPEAT
            log.warning('waiting for %s (%s)', listed(missing), self._purpose)


def meet(host: str, port: int, count: int, number: int, patience: float | int) -> None:
    """Waits until all `count` processes of the job have arrived at HOST:PORT, where process 0 listens.

    Args:
      host: an address of process 0. An IPv6 address has no brackets.
      port: the port at this address.
      count: the number of processes.
      number: the id of this process, from 0.
      patience: seconds to wait for the other processes.

    Raises:
      UserError: if the port is in use, two processes have the same id, or the processes disagree about `count`.
      Missing: if a process does not arrive.
    """
    ticket = {'count': count, 'number': number, 'where': f'{socket.gethostname()}, PID {os.getpid()}',
              'key': uuid.uuid4().hex}
    verdict = (_arrive if number else _receive)(host, port, ticket, patience)
    if error := verdict.get('error'):
        raise UserError(error)
    if missing := verdict.get('missing'):
        raise Missing(missing)


def _written(host: str, port: int) -> str:
    """Returns HOST:PORT, or [ADDRESS]:PORT for an IPv6 address, as in --coordinator_address."""
    return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def _arrive(host: str, port: int, ticket: dict[str, Any], patience: float | int) -> dict[str, str]:
    """Sends the ticket to process 0, and returns the verdict of process 0. Retries for `patience` seconds."""
    address, deadline = f'--coordinator_address={_written(host, port)}', time.monotonic() + patience
    waiting, reason, strangers = Waiting('the start'), None, False
    while time.monotonic() < deadline or reason is None:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(json.dumps(ticket).encode() + b'\n')
                connection.settimeout(patience + 2 * LINGER)  # process 0 may have started just before
                answer = connection.makefile('rb').readline(100_000)
            if verdict := _parsed(answer):
                return verdict
            strangers, reason = strangers or bool(answer), 'the connection was closed'
        except OSError as error:
            reason = error
            # The program that answered has ended, such as process 0 of the previous start, whose port JAX has used.
            strangers = strangers and not isinstance(error, ConnectionRefusedError | socket.gaierror)
        waiting.log([0])
        time.sleep(0.2)
    if strangers:
        raise UserError(f'{address}: another program answers at this address. Use a free port. If this job has already '
                        f'started, two processes may have --process_id={ticket["number"]}: give every process '
                        'its own --process_id')
    return {'missing': f'{address}: process 0 does not answer at this address ({reason}). Start process 0 at an '
                       'address that all processes can reach'}


def _receive(host: str, port: int, ticket: dict[str, Any], patience: float | int) -> dict[str, str]:
    """Waits for the tickets of all processes, sends the verdict to each process, and returns the verdict."""
    deadline = time.monotonic() + patience
    with _listener(port) as listener, contextlib.ExitStack() as open_sockets:
        def leave(connection):
            open_sockets.callback(connection.close)
            return connection

        # Process 0 also connects to the address of the job, because another process 0 may already listen there.
        watched = [listener]
        with contextlib.suppress(OSError):
            itself = leave(socket.create_connection((host, port), timeout=5))
            itself.sendall(json.dumps(ticket).encode() + b'\n')
            watched.append(itself)
        arrived, verdict, waiting = {0: (ticket, None)}, None, Waiting('the start')
        while verdict is None:
            missing = set(range(ticket['count'])) - arrived.keys()
            if not missing:
                # A process may have ended after it arrived. Then its id is missing again.
                ended = [number for number, (_, connection) in arrived.items() if _is_gone(connection)]
                for number in ended:
                    del arrived[number]
                verdict = None if ended else {'all': 'arrived'}
            elif time.monotonic() > deadline:
                verdict = {'missing': f'{listed(missing)} of {ticket["count"]} did not arrive at '
                                      f'{_written(host, port)}; {listed(arrived)} arrived'}
            else:
                waiting.log(missing)
                ready, _, _ = select.select(watched, [], [], 0.2)
                if len(watched) > 1 and watched[1] in ready:  # another process 0 has answered
                    verdict = _parsed(watched.pop().makefile('rb').readline(100_000)) or None
                elif listener in ready:
                    verdict = _take(leave(listener.accept()[0]), ticket, arrived)
        _send(verdict, [connection for _, connection in arrived.values()])
        end = time.monotonic() + LINGER
        while 'error' in verdict and (remaining := end - time.monotonic()) > 0:
            if select.select([listener], [], [], remaining)[0]:
                _send(verdict, [leave(listener.accept()[0])])
        return verdict


def _take(connection: socket.socket, own: dict[str, Any], arrived: dict[int, Any]) -> dict[str, str] | None:
    """Reads the ticket (the flags of a process) from a new connection, and adds the process to `arrived`.

    Returns None, or a verdict with an error if the flags of the processes do not match.
    """
    connection.settimeout(5)
    try:
        ticket = _parsed(connection.makefile('rb').readline(10_000))
    except OSError:
        ticket = None
    if not ticket:  # another program, or a process that was paused before it could send its ticket: it connects again
        connection.close()
        return None
    if ticket.get('key') == own['key']:  # this process
        return None
    number = ticket['number']
    error = None
    if ticket['count'] != own['count']:
        error = (f'process {number} ({ticket["where"]}) has --num_processes={ticket["count"]}, but process 0 '
                 f'({own["where"]}) has {own["count"]}')
    elif number in arrived and not _is_gone(arrived[number][1]):
        error = f'two processes have --process_id={number}: {arrived[number][0]["where"]} and {ticket["where"]}'
    if error is None:
        arrived[number] = ticket, connection
        return None
    verdict = {'error': f'{error}. Give all processes the same --num_processes, and every process its own '
                        f'--process_id ({listed(arrived)} arrived)'}
    _send(verdict, [connection])
    return verdict


def _is_gone(connection: socket.socket | None) -> bool:
    """Returns whether the process at the other end of a connection has ended."""
    if connection is None:
        return False
    poll = select.poll()  # select.select allows only 1,024 open files, and a job may have more processes
    poll.register(connection, select.POLLIN)
    if not poll.poll(0):
        return False
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _send(verdict: dict[str, str], connections: Collection[socket.socket | None]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            if connection:
                connection.sendall(json.dumps(verdict).encode() + b'\n')


def _parsed(line: bytes) -> dict[str, Any]:
    """Returns the JSON object in a line, or {} if the line contains no JSON object."""
    with contextlib.suppress(ValueError):
        content = json.loads(line)
        return content if isinstance(content, dict) else {}
    return {}


@contextlib.contextmanager
def _listener(port: int) -> Iterator[socket.socket]:
    """Yields a socket that listens on `port` at all addresses of this machine, as JAX's coordinator does."""
    dual = socket.has_dualstack_ipv6()
    deadline = time.monotonic() + PORT_FREED
    while True:
        try:
            listener = socket.create_server(('', port), backlog=4096, dualstack_ipv6=dual,
                                            family=socket.AF_INET6 if dual else socket.AF_INET)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise UserError(f'--coordinator_address: port {port} of {socket.gethostname()} cannot be used: '
                                f'{os.strerror(error.errno or 0)}. Use a free port, or end the program on this port'
                                ) from None
            time.sleep(0.2)
    with listener:
        yield listener
