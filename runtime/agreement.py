"""Communication between the processes of a job: sends the leader's decisions to all processes, and compares values.

Values are sent through JAX's coordination service, not through the devices. So the other processes can wait for a late
process, and the log names the missing processes. If there is only one process, every function returns at once.
"""

import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src.distributed import global_state  # JAX has no public interface to its key-value store
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime.errors import AgreedError, UserError
from runtime.rendezvous import Missing, Waiting, listed

PATIENCE = 300  # seconds that a process waits for missing or slow processes; the flag --patience sets this value
T = TypeVar('T')

log = logging.getLogger('allyouneed.train')
_rounds = itertools.count()


def is_leader() -> bool:
    """Returns whether this process is the leader (process 0), which makes all decisions and writes metrics and logs."""
    return jax.process_index() == 0


def exchange(purpose: str, value: Any) -> list[Any]:
    """Sends a value to all processes, and returns the values of all processes, in the order of the process ids.

    Every process of the job must call this function.

    Args:
      purpose: the purpose of the exchange, for the log.
      value: a value that can be written as JSON.

    Raises:
      Missing: if a process does not call this function within PATIENCE seconds.
    """
    if jax.process_count() == 1:
        return [value]
    number, client = next(_rounds), global_state.client
    assert client is not None, 'JAX creates a client if there are several processes'
    prefix, mine = f'allyouneed/{number}', jax.process_index()
    client.key_value_set(f'{prefix}/from/{mine}', json.dumps(value))
    if is_leader():
        values = _collect(client, f'{prefix}/from/', purpose)
        client.key_value_set(f'{prefix}/all', json.dumps(values))
        if number:
            client.key_value_delete(f'allyouneed/{number - 1}/')  # every process has read that value
        return values
    # A leader that arrived together with this process gives up first, and names the missing processes.
    deadline = time.monotonic() + PATIENCE + 10
    while True:
        try:  # waits 1 s at a time, because Python can handle signals only between two waits
            return json.loads(client.blocking_key_value_get(f'{prefix}/all', 1000))
        except jax.errors.JaxRuntimeError as error:
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise
            if time.monotonic() > deadline:
                raise Missing(f'process 0 did not answer within {PATIENCE + 10} s ({purpose}): process 0 is missing, '
                              'or waits for another process') from None


def _collect(client: Any, prefix: str, purpose: str) -> list[Any]:
    """Waits for the values of all processes, and returns them in the order of the process ids."""
    deadline, waiting, pause = time.monotonic() + PATIENCE, Waiting(purpose), 0.0005
    while True:
        values = {int(key.rpartition('/')[2]): text for key, text in client.key_value_dir_get(prefix)}
        missing = set(range(jax.process_count())) - values.keys()
        if not missing:
            return [json.loads(values[number]) for number in sorted(values)]
        if time.monotonic() > deadline:
            raise Missing(f'{listed(missing)} did not arrive within {PATIENCE} s ({purpose})')
        waiting.log(missing)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def from_leader(purpose: str, decide: Callable[[], T]) -> T:
    """Calls `decide` only in the leader, and returns the result in every process. The result must be valid JSON.

    If `decide` raises a UserError in the leader, every process raises an AgreedError with the same message.
    """
    if jax.process_count() == 1:
        return decide()
    answer = {}
    if is_leader():
        try:
            answer = {'value': decide()}
        except UserError as error:
            answer = {'error': str(error)}
    answer = exchange(purpose, answer)[0]
    if 'error' in answer:
        raise AgreedError(answer['error'])
    return answer['value']


def different(purpose: str, value: Any) -> list[int]:
    """Returns the ids of the processes whose `value` differs from the value of the leader."""
    values = exchange(purpose, value)
    return [number for number, other in enumerate(values) if other != values[0]]


class Greatest:
    """A function that returns the maxima of numbers over all processes, without waiting for the devices.

    With several processes, a call returns the maxima of the numbers in the previous call. The devices compute the
    maxima after the current train step, and the next call reads the result. So the host stays one step ahead of the
    devices.
    """

    def __init__(self):
        self._pending = None

    def __call__(self, *values: float) -> Sequence[float]:
        """Returns the maxima of the values in the previous call. With a single process, returns `values` themselves."""
        if jax.process_count() == 1:
            return values
        previous, (maxima, rows) = self._pending, _maxima()
        own = np.array([values] * jax.local_device_count(), np.float32)
        self._pending = maxima(jax.make_array_from_process_local_data(rows, own))
        return [0.0] * len(values) if previous is None else np.asarray(previous).tolist()


@functools.cache
def _maxima() -> tuple[Callable[[jax.Array], jax.Array], NamedSharding]:
    """Returns two objects: a compiled function, and the sharding of its argument.

    The argument has one row per device. The function returns the maximum of each column.
    """
    mesh = Mesh(np.array(jax.devices()), 'devices')
    maxima = jax.jit(lambda values: values.max(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    return maxima, NamedSharding(mesh, PartitionSpec('devices'))
