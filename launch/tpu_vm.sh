#!/bin/bash
# Trains on the chips of one TPU VM, or of all the VMs of a slice:
#
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command='cd allyouneed && launch/tpu_vm.sh --config=configs/wmt14_base.py --workdir=RUN'
#
# The VMs of a slice find each other; RUN and config.cache_dir must then be on a file system that all of them share.
# Where train.py ends with 75 or is killed, it is started again, and goes on from the newest checkpoint, up to RESTARTS
# times (100). SIGTERM and SIGINT to this script stop it for good, after a checkpoint.
cd "$(dirname "$0")/.." || exit 2

child= stopped=
trap 'stopped+=yes; [[ $child ]] && kill -TERM "$child"' TERM INT

for ((start = 0; start <= ${RESTARTS:-100}; start++)); do
  "${PYTHON:-python}" train.py "$@" &
  child=$!
  before=none
  while [[ $before != "$stopped" ]]; do  # a signal has ended the wait before: it says nothing of how the training ended
    before=$stopped
    wait "$child"
    status=$?
  done
  ((status == 75 || status > 128)) && [[ ! $stopped ]] || break
  echo "train.py ended with $status: starting it again" >&2
  sleep "${PAUSE:-10}"
done
exit "$status"
