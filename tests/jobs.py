"""Trainings on several processes of this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from benchmarks.processes import free_port
from run_directory.records import saved_steps
from tests.scripts import ROOT


class Job:
    """A training on several processes, each the leader of its own group.

    Args:
      count: the number of processes.
      arguments: the command line after `python`: one list for all processes, or one list for each process.
      folder: the folder for the logs.
      inside: the words before `python` in the command of each process.
      host: the host of the coordinator address.
      devices: the number of devices of each process.
      numbers: the process numbers, by default 0, 1 and so on.
      total: the value of --num_processes, by default `count`.
      more: additional environment variables.
    """

    def __init__(self, count, arguments, folder, inside=None, host='localhost', devices=1, numbers=None, total=None,
                 **more):
        folder.mkdir(exist_ok=True, parents=True)
        self.port = free_port()
        job = [f'--coordinator_address={host}:{self.port}', f'--num_processes={total or count}']
        arguments = arguments if isinstance(arguments[0], list) else [arguments] * count
        self.logs, self.processes = [folder / f'{number}.log' for number in range(count)], []
        for number, log in enumerate(self.logs):
            with log.open('w') as file:
                self.processes.append(subprocess.Popen(
                    [*(inside[number] if inside else ()), sys.executable, *arguments[number], *job,
                     f'--process_id={numbers[number] if numbers else number}'],
                    cwd=ROOT, stderr=file, start_new_session=True,
                    env=os.environ | {'JAX_NUM_CPU_DEVICES': str(devices)} | more))

    def send(self, number, what):
        os.killpg(self.processes[number].pid, what)

    def wait(self, numbers, seconds):
        """Waits until these processes have ended, and returns the seconds."""
        began = time.monotonic()
        for number in numbers:
            self.processes[number].wait(max(0.1, began + seconds - time.monotonic()))
        return time.monotonic() - began

    def until_saved(self, workdir, step):
        """Waits until the run has saved this step or a later one. It may have deleted older checkpoints."""
        deadline = time.monotonic() + 600
        while not any(saved >= step for saved in saved_steps(workdir)):
            assert time.monotonic() < deadline and all(process.poll() is None for process in self.processes), (
                self.output(0))
            time.sleep(0.01)

    def end(self, seconds=600):
        """Waits for all processes and returns their exit statuses."""
        self.wait(range(len(self.processes)), seconds)
        return [process.returncode for process in self.processes]

    def output(self, number):
        """Returns what a process has written to stderr."""
        return self.logs[number].read_text(errors='replace')

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for number, process in enumerate(self.processes):
            with contextlib.suppress(ProcessLookupError):
                self.send(number, signal.SIGKILL)
            process.wait()
