#!/bin/bash
# Trains on several GPUs or nodes of a Slurm cluster, with one process per GPU:
#
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 launch/slurm.sh --config=configs/wmt14_base.py --workdir=RUN
#
# Submit the script from the root of this repository, in a folder that all nodes share. RUN and config.cache_dir must be on
# a shared file system, too. Set the partition, the account and the time as your cluster requires, on the command line or
# below. Start one task per GPU of a node, or one task per node, which then uses all GPUs of the node. To resume the run,
# submit the same command again, with any number of nodes. The results then differ only by rounding, because the mesh
# changes.
#
# If any task ends with status 2, the job ends with 2: this is an error that the log explains. Otherwise, if a task ends with
# 75 or is killed, the job is requeued, at most RESTARTS times (20). A task ends with 75 if it was asked to stop or has lost
# another process. A requeued job appends to its log.
#
#SBATCH --job-name=allyouneed
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --requeue

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

# srun returns one status for all tasks: 128 + signal if a signal ended a task, otherwise the highest exit status.
# After a task has failed, --kill-on-bad-exit ends the remaining tasks by signals, because they might wait for the failed
# task. So the status of srun does not show whether a task ended with 2. Such a task writes a line to this file instead.
# If the disk is full, the task removes the file instead.
errors=allyouneed-$SLURM_JOB_ID.errors
: > "$errors" || exit 2
trap 'rm -f "$errors"' EXIT

# Slurm gives each task its number and the address of the first task, and train.py reads both values. Slurm also sends
# signals to bash. The trap makes bash wait until train.py has ended. Since Slurm 22.05, srun does not use the
# --cpus-per-task of sbatch.
# shellcheck disable=SC2016  # the inner bash expands these variables
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c '
  trap : TERM
  "$@"
  status=$?
  ((status == 2)) && { echo "task $SLURM_PROCID" >> "$0" || rm -f "$0"; }
  exit "$status"' "$errors" "${PYTHON:-python}" train.py "$@"
status=$?
if [[ -s $errors || ! -e $errors ]]; then
  status=2
elif ((status == 75 || status > 128)) && ((${SLURM_RESTART_COUNT:-0} < ${RESTARTS:-20})); then
  echo "train.py ended with $status: requeued" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
