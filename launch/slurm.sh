#!/bin/bash
# Trains on several GPUs or nodes of a Slurm cluster, a process for each GPU:
#
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 launch/slurm.sh --config=configs/wmt14_base.py --workdir=RUN
#
# RUN and config.cache_dir must be on a file system that all nodes share. Give the partition, the account and the time
# as your cluster wants them, on the command line or below; as many tasks a node as it has GPUs (or one task, which
# then uses all of them). Sent again, the same command goes on where the run stopped, on any number of nodes: the mesh
# follows, and with it nothing but rounding. Where train.py ends with 75 (it was told to stop, or has lost a process) or is
# killed, the job is queued again, up to RESTARTS times (20).
#
#SBATCH --job-name=allyouneed
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@120
#SBATCH --requeue

cd "${SLURM_SUBMIT_DIR:-.}"

# Slurm tells each task which one it is and where the first one runs; train.py finds that out by itself.
# --kill-on-bad-exit: where one task fails, the others would wait for it.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" train.py "$@"
status=$?
# The status is the highest of all tasks: 75 or, of a task that was killed, more than 128; and 2 for what you must mend.
if ((status == 75 || status > 128)) && ((${SLURM_RESTART_COUNT:-0} < ${RESTARTS:-20})); then
  echo "train.py ended with $status: queued again" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
