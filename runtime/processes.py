"""Several processes: joining a job, choosing a leader, and waiting for each other."""

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
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from orbax.checkpoint import multihost

from runtime.errors import UserError
from runtime.preemption import STOPPED

PATIENCE = 300  # seconds that processes wait for each other at the start; JAX's own
HEARTBEAT = 60  # seconds without a sign of life after which a process counts as lost
FAREWELL = 20  # seconds that a process with an error waits for the others to end, too
GO_ON = 'What is saved is safe: run the same command again, in all processes, to go on from the newest checkpoint'
# What XLA says when the connection to another process breaks, on CPUs (Gloo), GPUs (NCCL) and to JAX's coordinator.
LOST = re.compile('gloo|nccl|connection|socket|peer|heartbeat|unavailable|deadline_exceeded|barrier', re.IGNORECASE)

log = logging.getLogger('allyouneed.train')


def connect(address: str | None = None, count: int | None = None, number: int | None = None) -> None:
    """Joins this process to the others of its job, if there are any. Call it before anything touches a device.

    Without arguments, JAX detects the job: several tasks of one `srun` (Slurm), TPU pods and GKE, and an indexed
    Kubernetes Job if the package `kubernetes` is installed (jax[k8s]). Any other process runs alone, also one in an
    interactive allocation.

    Args:
      address: HOST:PORT of process 0, reachable from all others.
      count: the number of processes.
      number: the number of this process, from 0.

    Raises:
      UserError: if some but not all arguments are given, one is impossible, or the others cannot be reached.
    """
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
        if number:
            wait_for(host, int(port))
    _explain_abort()
    try:
        jax.distributed.initialize(**options, initialization_timeout=PATIENCE, heartbeat_timeout_seconds=HEARTBEAT)
    except (RuntimeError, ValueError) as error:
        raise UserError(f'the processes of this job cannot find each other: {str(error).splitlines()[0]}') from None
    check_devices()
    if not is_leader():
        logging.getLogger('allyouneed').setLevel(logging.ERROR)  # only the leader logs progress


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
        if jax.process_count() > 1:
            if isinstance(error, jax.errors.JaxRuntimeError) and LOST.search(str(error)):
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
        reason = str(error).partition('\n')[0] or 'JAX cannot use it here'
        raise UserError(f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")}: {reason}. Set it to cpu, '
                        'or leave it out') from None


def wait_for(host: str, port: int) -> None:
    """Waits until process 0 listens at the address. JAX itself would end this process without a helpful message.

    Raises:
      UserError: if it does not listen within PATIENCE seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f'--coordinator_address={host}:{port}: process 0 does not answer there ({error}). '
                                'Start it, at an address that it has and the others can reach') from None
            time.sleep(0.5)


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


def is_leader() -> bool:
    """Whether this process is the one that writes the metrics and the log."""
    return jax.process_index() == 0


def greatest(values: Sequence[float | bool], step: int) -> Sequence[float | bool]:
    """Returns, for each of `values`, the maximum over all processes.

    Several processes compare their values only after every tenth step; after other steps the result is zeros.
    """
    if jax.process_count() == 1:
        return values
    if step % 10:
        return [0.0] * len(values)
    return process_allgather(np.array(values, np.float32)).max(axis=0).tolist()


@contextlib.contextmanager
def leader_first(what: str) -> Iterator[None]:
    """Runs the body in the leader first; the other processes run it when the leader has finished or failed.

    So results that the leader stores in a shared cache are computed once.
    """
    def wait():
        if jax.process_count() > 1:
            multihost.sync_global_processes(what, processes=set(range(jax.process_count())), timeout=24 * 3600)

    if not is_leader():
        wait()
    try:
        yield
    finally:
        if is_leader():
            wait()
