"""Several processes: joining a job, choosing a leader, and ending together.

What all processes must do alike is decided by the leader and sent to the other processes (`runtime/agreement.py`):
nothing local, such as the listing of a folder or a clock, decides alone.
"""

import contextlib
import ctypes
import glob
import importlib.util
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src.distributed import global_state
from jax.experimental.multihost_utils import sync_global_devices

from runtime import agreement
from runtime.agreement import is_leader
from runtime.errors import UserError
from runtime.preemption import STOPPED
from runtime.rendezvous import Missing, meet

HEARTBEAT = 60  # seconds without a sign of life after which a process counts as lost
FAREWELL = 20  # seconds that a process with an error waits for the others to end, too
GO_ON = 'What is saved is safe: run the same command again, in all processes, to go on from the newest checkpoint'
# What XLA says when the connection to another process breaks, on CPUs (Gloo), GPUs (NCCL) and to JAX's coordinator.
LOST = re.compile('gloo|nccl|connection|socket|peer|heartbeat|unavailable|deadline_exceeded|barrier', re.IGNORECASE)
READING = re.compile('[A-Z_]+: (gloo|nccl)', re.IGNORECASE)  # the same of a ValueError, where a result is read

log = logging.getLogger('allyouneed.train')


def connect(address: str | None = None, count: int | None = None, number: int | None = None,
            patience: int = agreement.PATIENCE) -> None:
    """Joins this process to the others of its job, if there are any. Call it before anything touches a device.

    Without arguments, JAX detects the job: several tasks of one `srun` (Slurm), TPU pods and GKE, and an indexed
    Kubernetes Job if the package `kubernetes` is installed (jax[k8s]). Any other process runs alone, also one in an
    interactive allocation.

    Args:
      address: HOST:PORT of process 0, reachable from all others.
      count: the number of processes.
      number: the number of this process, from 0.
      patience: seconds to wait for a missing or slow process, now and later.

    Raises:
      UserError: if some but not all arguments are given, one is impossible, two processes have the same number, the
        port is taken, or the processes have different numbers of devices. If a process does not arrive, this process
        ends with the status STOPPED.
    """
    agreement.PATIENCE = patience
    given = {'--coordinator_address': address, '--num_processes': count, '--process_id': number}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        options = detected(os.environ)
        if options is None:
            return check_devices()
    elif address is None or count is None or number is None:
        raise UserError(f'{", ".join(missing)} is missing: of {", ".join(given)} give all, to each process its own id, '
                        'or none')
    else:
        host, _, port = address.rpartition(':')
        if not host or not re.fullmatch(r'[0-9]{1,5}', port) or not 0 < int(port) < 65536:
            raise UserError(f'--coordinator_address={address} must be HOST:PORT of process 0')
        if not 0 <= number < count:
            raise UserError(f'--process_id={number} must be from 0 to {count - 1}, as --num_processes={count}')
        options = {'coordinator_address': address, 'num_processes': count, 'process_id': number,
                   'cluster_detection_method': 'deactivate'}
        log.info('process %d of %d: all meet at %s', number, count, address)
    _explain_abort()
    try:
        if address and count and number is not None:
            meet(host, int(port), count, number, patience)
        jax.distributed.initialize(**options, initialization_timeout=patience, heartbeat_timeout_seconds=HEARTBEAT)
    except (Missing, RuntimeError) as error:
        _leave(f'a process of this job is missing: {_first_line(error)}. {GO_ON}', STOPPED)
    except ValueError as error:
        raise UserError(f'the processes of this job cannot find each other: {_first_line(error)}') from None
    with ending_together():
        check_devices()
        if not is_leader():  # only the leader logs progress
            project = logging.getLogger('allyouneed')
            project.setLevel(logging.WARNING)
            for handler in project.handlers:
                handler.setFormatter(logging.Formatter(f'process {jax.process_index()}: %(message)s'))
        refuse_unequal_devices()
        agreement.exchange('the start', None)
        # Gloo gives up if the processes begin their first collective more than 30 s apart; later ones may be slow.
        sync_global_devices('the start')


def refuse_unequal_devices() -> None:
    """Raises UserError if the processes of this job have different numbers of devices."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise UserError('the processes of this job have different numbers of devices ('
                        + ', '.join(f'process {number}: {count}' for number, count in sorted(counts.items()))
                        + '). Give all the same number: CUDA_VISIBLE_DEVICES or, on CPUs, JAX_NUM_CPU_DEVICES')


def lost(error: BaseException | None) -> bool:
    """Whether the loss of another process caused `error`, directly or indirectly."""
    while error is not None:
        text = str(error)
        if (isinstance(error, jax.errors.JaxRuntimeError) and LOST.search(text)
                or isinstance(error, ValueError) and READING.match(text)):
            return global_state.client is not None
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """In the body, a process that loses another one, or fails alone, says so and ends; it does not wait for the others.

    If the connection to another process breaks, this process leaves at once with the status STOPPED, which tells a
    scheduler to start the job again. Any other error is raised as ever; but a process that cleans up and says goodbye
    to the others may wait for them in vain, so after FAREWELL seconds it leaves with status 2. Of a process that is
    alone, nothing changes.
    """
    try:
        yield
    except Exception as error:
        if global_state.client is not None:  # there are several processes
            if isinstance(error, Missing) or lost(error):
                _leave(f'another process of this job is lost ({_first_line(error)}). {GO_ON}', STOPPED)
            farewell = threading.Timer(FAREWELL, _leave, [
                f'the others have not ended {FAREWELL} s after the error here ({_first_line(error)}): left without '
                'them', 2])
            farewell.daemon = True
            farewell.start()
        raise


def _explain_abort() -> None:
    """From here on abort(), by which JAX ends a process that has lost another one, is explained, with status STOPPED.

    JAX calls it in a thread of its own, and offers no way to be told instead. A handler of Python's would come too
    late: it runs between two instructions of the main thread, but the process ends when the C handler returns.
    """
    global _on_abort
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _leave(
        f'JAX has ended this process, as the lines above say: most often, another process of this job is lost. {GO_ON}',
        STOPPED))
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


def _leave(why: str, status: int) -> None:
    """Ends this process at once: cleaning up would wait for processes that are gone."""
    sys.stderr.flush()
    os.write(2, f'\nprocess {os.getpid()} on {socket.gethostname()}: {why}\n'.encode())
    os._exit(status)


def _first_line(error: BaseException) -> str:
    return str(error).partition('\n')[0] or type(error).__name__


def check_devices() -> None:
    """Raises UserError if JAX finds no device of the platform that JAX_PLATFORMS asks for."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the first, without a message, if a platform's plugin is missing
        if re.search('coordination|heartbeat|keyvalue', str(error), re.IGNORECASE):  # another process is lost
            raise
        reason = str(error).partition('\n')[0] or 'JAX cannot use it here'
        raise UserError(f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")}: {reason}. Set it to cpu, '
                        'or leave it out') from None


def detected(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns jax.distributed.initialize's arguments for the job of this process, or None if the process is alone.

    JAX's own detection is not used directly: it counts the tasks of an allocation instead of the tasks that were
    started, and in a Kubernetes pod it requires a Job.
    """
    tasks = int(environment.get('SLURM_STEP_NUM_TASKS', 0))
    if tasks:
        # JAX gives each task the one GPU with the task's number on the node. That is wrong for a task that is alone on
        # its node and has all GPUs, and for a task to which Slurm has already assigned its own GPU.
        visible = environment.get('CUDA_VISIBLE_DEVICES', '')
        alone = tasks == int(environment.get('SLURM_STEP_NUM_NODES', 0))
        all_mine = visible and (alone or ',' not in visible)
        devices = {'local_device_ids': list(range(visible.count(',') + 1))} if all_mine else {}
        return {'cluster_detection_method': 'slurm', 'num_processes': tasks, **devices} if tasks > 1 else None
    hosts = environment.get('TPU_PROCESS_ADDRESSES', environment.get('TPU_WORKER_HOSTNAMES', ''))
    if ',' in hosts or int(environment.get('MEGASCALE_NUM_SLICES', 1)) > 1:
        return {}
    if 'JOB_COMPLETION_INDEX' in environment and importlib.util.find_spec('kubernetes'):
        return {'cluster_detection_method': 'k8s'}
    on_tpu_machine = importlib.util.find_spec('libtpu') and (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'))
    if on_tpu_machine and not hosts and 'TPU_SKIP_MDS_QUERY' not in environment:
        return {'cluster_detection_method': 'gcetpu'}  # asks the machine's metadata for the others
    return None


@contextlib.contextmanager
def leader_first(what: str) -> Iterator[None]:
    """Runs the body in the leader first; the other processes run it when the leader has finished or failed.

    So results that the leader stores in a shared cache are computed once.
    """
    def wait():
        if jax.process_count() > 1:
            from orbax.checkpoint import multihost  # slow to import, so only where it is used

            multihost.sync_global_processes(what, processes=set(range(jax.process_count())), timeout=24 * 3600)

    if not is_leader():
        wait()
    try:
        yield
    finally:
        if is_leader():
            wait()
