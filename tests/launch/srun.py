"""A replacement for Slurm's srun: python srun.py [--OPTION ...] COMMAND ... runs the command in $TASKS tasks.

The semantics are those of `man srun` and of Slurm's src/plugins/launch/slurm/launch_slurm.c, with the options
--kill-on-bad-exit=1 and --cpus-per-task=8: when the first task fails, all processes of the remaining tasks get SIGTERM,
and SIGKILL after $KILL_WAIT seconds (slurm.conf: KillWait). The exit status is 128 + the highest signal if a signal
ended a task, otherwise the highest status of a task.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

command = sys.argv[1:]
options = [command.pop(0) for _ in list(command) if command[0].startswith('--')]
assert options == ['--kill-on-bad-exit=1', '--cpus-per-task=8'], options
count = os.environ['TASKS']
step = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_STEP_NUM_NODES': '1', 'SLURM_NTASKS': count,
        'SLURM_STEP_NUM_TASKS': count}
tasks = [subprocess.Popen(command, start_new_session=True,
                          env=os.environ | step | {'SLURM_PROCID': str(number), 'SLURM_LOCALID': str(number)})
         for number in range(int(count))]


def send(number):
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, number)


def wait(seconds):
    """Waits until a task has failed, all tasks have ended, or `seconds` seconds have passed."""
    deadline = time.monotonic() + seconds
    while any([task.poll() is None for task in tasks]) and time.monotonic() < deadline:
        yield any(task.returncode for task in tasks)
        time.sleep(0.01)


if any(wait(3600)):
    send(signal.SIGTERM)
    list(wait(float(os.environ.get('KILL_WAIT', '30'))))
    send(signal.SIGKILL)
statuses = [task.wait() for task in tasks]
sys.exit(128 - min(statuses) if min(statuses) < 0 else max(statuses))
