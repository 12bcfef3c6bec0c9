"""The time during which several signals count as one request to stop. sweep.py imports this module without JAX."""

# Seconds. One request to stop may arrive as several signals: a terminal, systemd or Slurm may send a signal to all
# processes of a job, and launch/tpu_vm.sh or sweep.py then also sends SIGTERM to train.py. sweep.py may need one second
# for this.
SAME_REQUEST = 2.0
