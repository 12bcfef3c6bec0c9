"""Connects this process with the other processes of a job, and ends all processes of a job together.

The leader makes the decisions that all processes must share, and sends them to the other processes
(`runtime/agreement.py`). No other process makes such a decision from local information, such as a clock or the list of
files in a folder.
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
from runtime.errors import LITTLE_MEMORY, AgreedError, UserError, first_line, little_memory_explained
from runtime.rendezvous import Missing, meet
from runtime.stopping import STOPPED

HEARTBEAT = 60  # seconds without a heartbeat after which a process counts as lost
SHUTDOWN = 20  # seconds that the shutdown of a process may take after an error
RESUME = 'All checkpoints are safe. Run the same command again in all processes to resume from the newest checkpoint'
# XLA's messages contain one of these words if a connection to another process (Gloo on CPUs, NCCL on GPUs) or to JAX's
# coordinator breaks.
LOST = re.compile('gloo|nccl|connection|socket|peer|heartbeat|unavailable|deadline_exceeded|barrier', re.IGNORECASE)
# NCCL's messages contain this text if the processes are set up wrongly. Starting the job again would not help.
PERMANENT = re.compile('nccl.*failed: invalid (usage|argument)|duplicate gpu', re.IGNORECASE | re.DOTALL)
READING = re.compile('[A-Z_]+: (gloo|nccl)', re.IGNORECASE)  # message of a ValueError when a result is read

log = logging.getLogger('allyouneed.train')


def connect(address: str | None = None, count: int | None = None, number: int | None = None,
            patience: int = agreement.PATIENCE) -> None:
    """Connects this process with the other processes of its job, if there are any. Call this before using a device.

    Without arguments, JAX detects the job: several tasks of one `srun` (Slurm), or a TPU pod (also in GKE). JAX detects
    any other indexed Kubernetes Job only if the package `kubernetes` is installed (jax[k8s]). Otherwise, set `address`,
    `count` and `number` in a Kubernetes job. Any other process runs alone, including a process in an interactive Slurm
    allocation. If a process of the job does not arrive, this process ends with the status STOPPED.

    Args:
      address: HOST:PORT of process 0, reachable from all processes; [ADDRESS]:PORT for an IPv6 address.
      count: the number of processes.
      number: the id of this process, from 0.
      patience: seconds to wait for a missing or slow process, at the start and during the job.

    Raises:
      UserError: if only some of the arguments are given, a value is not allowed, two processes have the same id,
        the port is in use, or the processes have different numbers of devices.
    """
    agreement.PATIENCE = patience
    flags = {'--coordinator_address': address, '--num_processes': count, '--process_id': number}
    missing = [flag for flag, value in flags.items() if value is None]
    if len(missing) == len(flags):
        options = detected(os.environ)
        if options is None:
            return check_devices()
    elif address is None or count is None or number is None:
        raise UserError(f'{", ".join(missing)} is missing. Set all of the three flags {", ".join(flags)}, or none of '
                        'them. Every process needs its own --process_id')
    else:
        host, port = _checked_address(address, count, number)
        options = {'coordinator_address': address, 'num_processes': count, 'process_id': number,
                   'cluster_detection_method': 'deactivate'}
        log.info('process %d of %d joins the job at %s', number, count, address)
    _explain_abort()
    # JAX's preemption service would replace the handler of SIGTERM. This service only records the signal, for a
    # function of JAX that train.py does not use. So a signal that arrives before StopSignals takes effect would be
    # lost.
    jax.config.update('jax_enable_preemption_service', False)
    try:
        if address and count and number is not None:
            meet(host, port, count, number, patience)
        jax.distributed.initialize(**options, initialization_timeout=patience, heartbeat_timeout_seconds=HEARTBEAT)
    except (Missing, RuntimeError) as error:
        _leave(f'a process of this job is missing: {first_line(error)}. {RESUME}', STOPPED)
    except ValueError as error:
        raise UserError(f'the processes of this job cannot connect: {first_line(error)}. Check '
                        '--coordinator_address, --num_processes and --process_id') from None
    with ending_together():
        check_devices()
        if not is_leader():  # only the leader logs progress
            project = logging.getLogger('allyouneed')
            project.setLevel(logging.WARNING)
            for handler in project.handlers:
                handler.setFormatter(logging.Formatter(f'process {jax.process_index()}: %(message)s'))
        refuse_unequal_devices()
        agreement.exchange('the start', None)
        # Gloo fails if the processes begin their first collective operation more than 30 s apart. Later operations have
        # no such limit.
        sync_global_devices('the start')


def _checked_address(address: str, count: int, number: int) -> tuple[str, int]:
    """Returns (host, port) of the address HOST:PORT. Raises UserError if an argument of `connect` is not allowed."""
    parts = re.fullmatch(r'(\[[^\[\]]+\]|[^\[\]:]+):([0-9]{1,5})', address)
    if not parts or not 0 < int(parts[2]) < 65536:
        raise UserError(f'--coordinator_address={address} must be HOST:PORT of process 0, such as node1:1234. Write an '
                        'IPv6 address as [ADDRESS]:PORT')
    if count < 1:
        raise UserError(f'--num_processes={count} must be at least 1')
    if not 0 <= number < count:
        raise UserError(f'--process_id={number} must be from 0 to {count - 1}, because --num_processes={count}')
    return parts[1].strip('[]'), int(parts[2])


def refuse_unequal_devices() -> None:
    """Raises UserError if the processes of this job have different numbers of devices."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise UserError('the processes of this job have different numbers of devices ('
                        + ', '.join(f'process {number}: {count}' for number, count in sorted(counts.items()))
                        + '). Give all processes the same number: set CUDA_VISIBLE_DEVICES or, on CPUs, '
                        'JAX_NUM_CPU_DEVICES')


def lost(error: BaseException | None) -> bool:
    """Returns whether `error` occurred because another process of the job has ended or does not respond."""
    text = communication_error(error)
    return bool(text) and not PERMANENT.search(text) and not LITTLE_MEMORY.match(text)


def communication_error(error: BaseException | None) -> str:
    """Returns XLA's message if `error` occurred because the processes of the job cannot communicate, or ''."""
    while error is not None and global_state.client is not None:
        text = str(error)
        if (isinstance(error, jax.errors.JaxRuntimeError) and LOST.search(text)
                or isinstance(error, ValueError) and READING.match(text)):
            return text
        error = error.__cause__ or error.__context__
    return ''


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Runs the body. After an error, ends this process without waiting forever for other processes of the job.

    If the connection to another process breaks, this process exits at once with the status STOPPED, so that a scheduler
    starts the job again. Any other error is raised. The shutdown after such an error may wait for the other processes
    forever. So if this process is still running after SHUTDOWN seconds, it exits with status 2. After an AgreedError,
    all processes end, so this process may finish a background save without a time limit. Has no effect on a process
    that runs alone.

    Raises:
      UserError: if NCCL reports that the job is set up wrongly, or if a device has too little memory.
    """
    if global_state.client is None:  # this process runs alone
        yield
        return
    try:
        with little_memory_explained(), _setup_explained():
            yield
    except Exception as error:
        if isinstance(error, Missing) or lost(error):
            _leave(f'another process of this job is lost ({first_line(error)}). {RESUME}', STOPPED)
        if not isinstance(error, AgreedError):
            text = str(error) if isinstance(error, UserError) else first_line(error)
            timer = threading.Timer(SHUTDOWN, _leave, [
                f'the other processes have not ended {SHUTDOWN} s after this error: {text}', 2])
            timer.daemon = True
            timer.start()
        raise


@contextlib.contextmanager
def _setup_explained() -> Iterator[None]:
    """Runs the body. Raises UserError if NCCL reports that the job is set up wrongly."""
    try:
        yield
    except UserError:
        raise  # an outer `ending_together` receives the error that an inner `ending_together` has explained
    except Exception as error:
        text = communication_error(error)
        if not PERMANENT.search(text):
            raise
        raise UserError(f'the processes of this job cannot communicate ({text.splitlines()[0]}). Give every process '
                        'its own GPUs (CUDA_VISIBLE_DEVICES), and run with NCCL_DEBUG=WARN for details') from error


def _explain_abort() -> None:
    """Makes abort() print a message and exit with the status STOPPED.

    JAX calls abort() in its own thread if another process is lost. JAX has no callback for this event. A signal handler
    in Python would run too late: Python runs handlers between two instructions of the main thread, but the process ends
    as soon as the handler in C returns. So this function installs a handler in C.
    """
    global _on_abort
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _leave(
        f'JAX has ended this process (see the lines above), probably because another process is lost. {RESUME}',
        STOPPED))
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


def _leave(reason: str, status: int) -> None:
    """Prints `reason` and ends this process at once, because a normal shutdown would wait for lost processes."""
    try:
        sys.stderr.flush()
        os.write(2, f'\nprocess {os.getpid()} on {socket.gethostname()}: {reason}\n'.encode(errors='backslashreplace'))
    finally:
        os._exit(status)  # even if stderr cannot be written


def check_devices() -> None:
    """Raises UserError if JAX finds no device of the platform in JAX_PLATFORMS."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # AssertionError, without a message, if a plugin is missing
        if re.search('coordination|heartbeat|keyvalue', str(error), re.IGNORECASE):  # another process is lost
            raise
        reason = first_line(error) if str(error) else 'JAX cannot use this platform'
        raise UserError(f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")}: {reason}. Set it to cpu, '
                        'or unset it') from None


def detected(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the arguments of jax.distributed.initialize for the job of this process, or None if the process is alone.

    JAX's own detection is not used directly, for two reasons. On Slurm, JAX counts the tasks of the allocation instead
    of the tasks that were started. In a Kubernetes pod, JAX requires that the pod belongs to a Job.
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
    indexed = {'JOB_COMPLETION_INDEX', 'KUBERNETES_SERVICE_HOST'} <= environment.keys()
    if indexed and importlib.util.find_spec('kubernetes'):
        return {}  # JAX's detection of Kubernetes has no name
    on_tpu_machine = importlib.util.find_spec('libtpu') and (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'))
    if on_tpu_machine and not hosts and 'TPU_SKIP_MDS_QUERY' not in environment:
        return {'cluster_detection_method': 'gcetpu'}  # reads the addresses from the machine's metadata
    return None


@contextlib.contextmanager
def leader_first(purpose: str) -> Iterator[None]:
    """Runs the body in the leader first. The other processes run the body after the leader has finished or failed.

    So the other processes can read a result that the leader has stored in a shared cache.
    """
    def wait():
        if jax.process_count() > 1:
            from orbax.checkpoint import multihost  # slow to import, so only where it is used

            multihost.sync_global_processes(purpose, processes=set(range(jax.process_count())), timeout=24 * 3600)

    if not is_leader():
        wait()
    try:
        yield
    finally:
        if is_leader():
            wait()
