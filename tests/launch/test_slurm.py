"""launch/slurm.sh with substitutes for srun, scontrol and train.py: the tasks decide whether the job is requeued."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT

# Replaces Python. The task's entry of $DO is STATUS@SECONDS, counted from when all tasks run; STATUS@TERM: ends
# 0.2 s after SIGTERM, as a process that saves; 143@TERM: SIGTERM ends it at once; @KILL: only SIGKILL ends it. A status
# above 128 is a signal.
TASK = '''
import os, signal, sys, time
status, _, when = os.environ['DO'].split()[int(os.environ['SLURM_PROCID'])].partition('@')

def note(name, text):
    with open(name, 'a') as file:
        file.write(f'{text}\\n')

def end(*_):
    if when == 'TERM':
        time.sleep(0.2)
    note('ended', status)
    if int(status) > 128:
        os.kill(os.getpid(), int(status) - 128)
    os._exit(int(status))

if when == 'KILL':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif status != '143':
    signal.signal(signal.SIGTERM, end)
note('running', 'yes')
while len(open('running').readlines()) < int(os.environ['TASKS']):
    time.sleep(0.01)
time.sleep(600 if when in ('TERM', 'KILL') else float(when))
end()
'''


def program(path, text):
    path.write_text(f'#!/bin/bash\n{text}\n')
    path.chmod(0o755)


def job(folder, do, restarts=0):
    """Runs the batch script; returns its status, the calls of scontrol and the statuses with which tasks ended."""
    program(folder / 'srun', f'exec "{sys.executable}" "{Path(__file__).with_name("srun.py")}" "$@"')
    program(folder / 'scontrol', f'echo "$@" >> "{folder}/requeued"')
    (folder / 'task.py').write_text(TASK)
    program(folder / 'python', f'[[ $* == "train.py --config=x --workdir=a b" ]] || exit 99\n'
                               f'exec "{sys.executable}" "{folder}/task.py"')
    done = subprocess.run(
        ['bash', ROOT / 'launch' / 'slurm.sh', '--config=x', '--workdir=a b'], capture_output=True, text=True,
        timeout=600, env={
            **os.environ, 'PATH': f'{folder}:{os.environ["PATH"]}', 'PYTHON': str(folder / 'python'), 'DO': do,
            'TASKS': str(len(do.split())), 'KILL_WAIT': '1' if '@KILL' in do else '60', 'SLURM_JOB_ID': '7',
            'SLURM_CPUS_PER_TASK': '8', 'SLURM_SUBMIT_DIR': str(folder), 'SLURM_RESTART_COUNT': str(restarts)})
    assert not list(folder.glob('*.errors')), done.stderr
    lines = {name: (folder / name).read_text().splitlines() if (folder / name).exists() else []
             for name in ('requeued', 'ended')}
    return done.returncode, lines['requeued'], lines['ended']


@pytest.mark.slow
@pytest.mark.parametrize('do, status, restarts, again', [
    ('0@0', 0, 0, False), ('2@0', 2, 0, False), ('1@0', 1, 0, False),
    ('75@0', 75, 0, True), ('75@0', 75, 19, True), ('75@0', 75, 20, False), ('137@0', 137, 1, True),
    ('0@0 0@0.1 0@0.2', 0, 0, False),
    # A typo: the first task ends with 2, and srun ends the remaining ones, which have read the flags 0.15 s later.
    ('2@0 143@TERM 143@TERM 143@TERM', 2, 0, False),
    ('143@TERM 2@0 @KILL 75@TERM', 2, 0, False),
    # A locked run directory: the leader ends with 2, the other process loses it, in either order.
    ('2@0 75@TERM', 2, 0, False), ('2@TERM 75@0', 2, 0, False), ('2@0 2@0', 2, 0, False),
    # A process is killed, and the survivors end with 75; or one of them hangs until SIGKILL.
    ('75@TERM 137@0 75@TERM', 137, 0, True), ('137@0 75@TERM @KILL', 137, 0, True),
    ('75@0 75@0.1', 75, 0, True),
])
def test_slurm_requeues_a_job_unless_a_task_ended_with_2(do, status, restarts, again, tmp_path):
    found, requeued, _ = job(tmp_path, do, restarts)
    assert (found, requeued) == (status, ['requeue 7'] if again else [])


@pytest.mark.parametrize('do, status, again', [('2@0 75@TERM', 2, []), ('75@0 75@TERM', 75, ['requeue 7'])])
def test_a_full_disk_does_not_hide_that_a_task_ended_with_2(do, status, again, tmp_path):
    (tmp_path / 'allyouneed-7.errors').symlink_to('/dev/full')
    assert job(tmp_path, do)[:2] == (status, again)


def test_a_signal_of_slurm_leaves_train_py_time_to_save(tmp_path):
    assert job(tmp_path, '75@0 75@TERM 75@TERM') == (75, ['requeue 7'], ['75'] * 3)
