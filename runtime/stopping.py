"""The exit status of a stopped run, and the time during which several signals count as one request to stop.

sweep.py imports this module without JAX.
"""

import os

STOPPED = os.EX_TEMPFAIL  # exit status 75: the job has not failed, and a scheduler should start the job again

# Seconds. One request to stop may arrive as several signals: a terminal, systemd or Slurm may send a signal to all
# processes of a job, and launch/tpu_vm.sh or sweep.py then also sends SIGTERM to train.py. sweep.py may need one second
# for this.
SAME_REQUEST = 2.0
