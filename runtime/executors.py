"""Executors, which run the jobs of a sweep: as processes on this machine, or as jobs on a Slurm cluster."""

import contextlib
import dataclasses
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError
from submitit.helpers import DelayedSubmission
from typing_extensions import override

from runtime.errors import FULL_DISK, UserError, first_line
from runtime.files import write_text
from runtime.process_setup import signals_delayed
from runtime.stopping import STOPPED

FULL = os.EX_IOERR  # `Job` returns this status if a command failed because the disk is full
# The exit statuses of a run that a signal stopped, with or without saving a checkpoint.
STOPPED_BY_SIGNAL = {STOPPED, *(status for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                                for status in (-number, 128 + number))}
LAST_LINES = 5  # the number of lines at the end of a log that may contain the reason for a failure
SMALLEST_SPACE = 2 ** 16  # bytes: a disk with less free space is full
TIME_LIMITS = 10_000  # how often submitit queues a job again after a time limit; submitit's default is 3
# States of Slurm jobs that may start again or still run. After PREEMPTED, the state is PENDING if Slurm queues the job
# again. With PreemptMode=CANCEL, PREEMPTED is the last state of the job.
UNFINISHED = {'PENDING', 'REQUEUED', 'RUNNING', 'COMPLETING', 'PREEMPTED'}
QUEUED_AGAIN = 300  # maximum number of seconds in which Slurm queues a preempted job again

log = logging.getLogger('allyouneed.sweep')


@dataclasses.dataclass(eq=False)
class Job:
    """The commands of one run of a sweep. Calling the job runs the commands one after the other, until a command fails.

    A full disk does not count as a failure, because the run did not cause the error. The next sweep resumes the run.

    A job may be sent to another machine, so the object contains all data that the commands need.

    Attributes:
      name: the name of the run.
      commands: the commands with their arguments.
      log: the file to which the commands' output is appended.
      process: the process of the current command.
      stop_signal: the signal of the last call of `stop` or `kill`, or None. If it is set, no further command starts.
    """
    name: str
    commands: list[list[str]]
    log: Path
    process: subprocess.Popen | None = None
    stop_signal: signal.Signals | None = None

    @property
    def failure(self) -> Path:
        """The path of the file with the reason for a failure. The job writes this file if a command fails."""
        return self.log.with_suffix('.failed')

    def __call__(self, environment: dict[str, str] | None = None) -> int:
        """Runs the commands until one fails, and returns an exit status.

        Returns 0 if all commands succeed, FULL if a command or the writing of the log fails because the disk is full,
        and STOPPED if `stop` or `kill` was called before a command, or if SIGKILL ended the process after such a
        call. Otherwise, returns the exit status of the failed command.
        """
        try:
            return self._run_commands(environment)
        except OSError as error:  # from writing the log or the reason for a failure
            if error.errno in FULL_DISK:
                self.failure.unlink(missing_ok=True)  # it may be empty
                return FULL
            raise

    def _run_commands(self, environment: dict[str, str] | None) -> int:
        """Does the work of `__call__`. Raises OSError if the log cannot be written."""
        self.failure.unlink(missing_ok=True)
        begin = self.log.stat().st_size if self.log.exists() else 0
        for command in self.commands:
            with open(self.log, 'a', encoding='utf-8', errors='backslashreplace') as output:
                output.write(f'$ {shlex.join(command)}\n')
                output.flush()
                if self.stop_signal:
                    return STOPPED
                # The process has its own session, so Ctrl-C in the terminal does not reach the process directly.
                # `stop` sends it a signal instead. With close_fds=False, the process inherits the lock of the sweep's
                # directory, and holds the lock until the process ends.
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                                env=environment, start_new_session=True, close_fds=False)
                if self.stop_signal:  # `stop` or `kill` was called while the process was starting
                    self.process.send_signal(self.stop_signal)
                status = self.process.wait()
            if status:
                if self.stop_signal and status == -signal.SIGKILL:
                    return STOPPED  # `kill` has ended the process, so the run has not failed
                if status not in STOPPED_BY_SIGNAL and self._is_disk_full(begin):
                    return FULL
                if status not in STOPPED_BY_SIGNAL:
                    self.write_failure(status)
                return status
        return 0

    def write_failure(self, status: int) -> None:
        """Writes the reason for a failure: the exit status of the failed command, or the signal that ended it."""
        self.failure.write_text(f'exit status {status}' if status > 0 else f'killed by signal {-status}')

    def _is_disk_full(self, begin: int) -> bool:
        """Returns whether the log's disk is full, or the last lines of the log, after byte `begin`, report a full disk.

        If the log is on the full disk, it may lack the message.
        """
        end = self.log.read_bytes()[begin:].decode(errors='replace').splitlines()[-LAST_LINES:]
        reasons = [os.strerror(number) for number in FULL_DISK]
        return (any(reason in line for line in end for reason in reasons)
                or shutil.disk_usage(self.log.parent).free < SMALLEST_SPACE)

    def stop(self) -> None:
        """Asks the process of the current command to save a checkpoint and to exit."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process of the current command at once. The run can resume from its last checkpoint."""
        self._send(signal.SIGKILL)

    def _send(self, stop_signal: signal.Signals) -> None:
        """Sends a signal to the process, or, if the process is just starting, has `_run_commands` send it."""
        self.stop_signal = stop_signal
        if self.process is not None:
            self.process.send_signal(stop_signal)  # does nothing if the process has ended

    def checkpoint(self, *arguments: Any) -> DelayedSubmission:
        """Stops the run and queues the job again.

        submitit calls this method before a time limit or, with Slurm's PreemptParameters=send_user_signal, before a
        preemption.
        """
        self.stop()
        if self.process is not None:
            # process.wait() cannot be used here, because the signal has interrupted a call of process.wait().
            with contextlib.suppress(ChildProcessError):  # the process has ended, and its status has been read
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(dataclasses.replace(self, process=None, stop_signal=None), *arguments)


class Executor(Protocol):
    """The interface of executors, which run jobs."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, int]]:
        """Runs all jobs. Yields each job with its exit status when the job ends."""
        ...

    def stop(self) -> None:
        """Stops all runs after the sweep was interrupted or has failed. The runs can resume later."""


class Local(Executor):
    """An executor that runs jobs on this machine, at most `at_a_time` jobs at the same time.

    The devices in CUDA_VISIBLE_DEVICES are divided between the jobs that run at the same time.
    """

    def __init__(self, at_a_time: int):
        self._pool, self._jobs = futures.ThreadPoolExecutor(at_a_time), ()
        devices = [name for name in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if name]
        self._shares = queue.SimpleQueue()
        for index in range(at_a_time):
            share = {'CUDA_VISIBLE_DEVICES': ','.join(devices[index::at_a_time])} if len(devices) >= at_a_time else {}
            self._shares.put(share)

    @override
    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, int]]:
        self._jobs = jobs
        running = {self._pool.submit(self._run_on_share, job): job for job in jobs}
        while running:  # the timeout is short, because a signal to another thread does not wake this thread
            for future in futures.wait(running, timeout=1, return_when=futures.FIRST_COMPLETED).done:
                yield running.pop(future), future.result()

    @override
    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            job.stop()
        try:
            self._pool.shutdown()
        except KeyboardInterrupt:  # a second Ctrl-C: kill without saving
            for job in self._jobs:
                job.kill()
            raise

    def _run_on_share(self, job: Job) -> int:
        share = self._shares.get()
        try:
            return job({**os.environ, **share})
        finally:
            self._shares.put(share)


class Slurm(Executor):
    """An executor that runs jobs on a Slurm cluster through submitit.

    The jobs continue if sweep.py is stopped. A later sweep.py finds the jobs by their ids.

    Raises:
      UserError: if Slurm is not available.
    """

    def __init__(self, folder: Path, **parameters: Any):
        """Makes an executor.

        Args:
          folder: the folder for submitit's files and the ids of the jobs: logs/slurm in the directory of the sweep.
          parameters: submitit's parameters for every job.
        """
        # Sends the class with the job, so that a node does not need this module.
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            self._executor = submitit.AutoExecutor(folder, cluster='slurm', slurm_max_num_timeout=TIME_LIMITS)
        except RuntimeError as error:
            raise UserError(f'--executor=slurm: {error}. Use --executor=local, or a machine with Slurm') from None
        self._folder, self._jobs = folder, ()
        self._preempted: dict[str, float] = {}  # {id of a preempted job: the time at which this state was first seen}
        self._executor.update_parameters(name=folder.absolute().parents[1].name, **parameters)

    @override
    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, int]]:
        self._jobs = jobs
        waiting = {job: queued for job in jobs if (queued := self._queued(job)) is not None}
        new = [job for job in jobs if job not in waiting]
        # Before a time limit, Slurm sends the signal USR2 to all processes. The commands ignore the signal. submitit
        # handles it, and calls Job.checkpoint.
        wrapper = ['sh', '-c', 'trap "" USR2; exec "$@"', 'sh']
        sent = [dataclasses.replace(job, commands=[[*wrapper, *command] for command in job.commands]) for job in new]
        with signals_delayed():  # the next sweep.py would submit a job without a ticket again
            if new:  # submitit warns about an empty batch
                try:
                    with self._executor.batch():
                        waiting |= {job: self._executor.submit(copy) for job, copy in zip(new, sent, strict=True)}
                except FailedJobError as error:
                    raise UserError(f'--executor=slurm: sbatch has refused the jobs: {first_line(error)}. Check '
                                    '--partition, --hours, --gpus, --cpus and --memory_gb') from None
            for job in new:
                write_text(self._ticket(job), waiting[job].job_id)
        while waiting:
            for job in [job for job, submitted in waiting.items() if self._ended(submitted)]:
                self._ticket(job).unlink()
                yield job, self._status(job, waiting.pop(job))
            time.sleep(1)

    @override
    def stop(self) -> None:
        if ids := [ticket.read_text() for job in self._jobs if (ticket := self._ticket(job)).exists()]:
            log.info('the jobs stay in the queue. To end the jobs, run scancel %s', ' '.join(ids))

    def _ticket(self, job: Job) -> Path:
        return self._folder / f'{job.name}.id'

    def _queued(self, job: Job) -> submitit.Job[int] | None:
        """Returns the Slurm job that an earlier sweep.py has submitted for `job`, if it is still queued or running."""
        ticket = self._ticket(job)
        if not ticket.exists() or not (job_id := ticket.read_text()):  # a killed sweep.py may have left an empty ticket
            return None
        queued = submitit.SlurmJob(self._folder, job_id)
        return None if self._ended(queued) else queued

    def _ended(self, submitted: submitit.Job[int]) -> bool:
        """Returns whether a Slurm job has ended and will not start again.

        If Slurm preempts a job, the run saves and stops, and the job returns a status of STOPPED_BY_SIGNAL. For
        submitit, the job is then done. But Slurm may queue the same job again, so its state must also show the end.
        """
        if not submitted.done():
            return False
        try:
            if submitted.state not in UNFINISHED or submitted.result() not in STOPPED_BY_SIGNAL:
                return True
        except UncompletedJobError:  # also FailedJobError
            return True
        if submitted.state != 'PREEMPTED':
            self._preempted.pop(submitted.job_id, None)
            return False
        return time.monotonic() - self._preempted.setdefault(submitted.job_id, time.monotonic()) > QUEUED_AGAIN

    def _status(self, job: Job, submitted: submitit.Job[int]) -> int:
        try:
            status = submitted.result()
        except (UncompletedJobError, FailedJobError) as error:
            if (submitted.state.startswith(('CANCELLED', 'PREEMPTED', 'TIMEOUT', 'NODE_FAIL'))
                    or 'timed-out too many times' in str(error)):  # a message of submitit
                return STOPPED
            job.failure.write_text(f'Slurm job {submitted.job_id} ended in the state {submitted.state}')
            return 1
        if status not in {0, FULL, *STOPPED_BY_SIGNAL} and not job.failure.exists():
            job.write_failure(status)  # NFS may show the file of the node up to a minute later
        return status
