#!/bin/bash
# Trains on the chips of one TPU VM, or of all the VMs of a slice:
#
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command='cd allyouneed && launch/tpu_vm.sh --config=configs/wmt14_base.py --workdir=RUN'
#
# The VMs of a slice find each other. RUN and config.cache_dir must then be on a file system that all of them share. If
# train.py ends with 75 or is killed, this script starts it again, at most RESTARTS times (100), and training continues from
# the newest checkpoint. SIGTERM or SIGINT to this script stops it after a checkpoint, without another start.
#
# A script that does not start train.py again writes its status to the file .RUN.ended beside RUN. The scripts of the other
# VMs, whose train.py has lost a process, then end with this status, too, instead of waiting for that VM again and again.
cd "$(dirname "$0")/.." || exit 2

run=
for argument; do
  [[ $argument =~ ^--?workdir=(.+)$ ]] && run=${BASH_REMATCH[1]}
done
ended=${run:+$(dirname "$run")/.$(basename "$run").ended}
[[ ! $ended ]] || rm -f "$ended"  # that of an earlier start

child='' stopped=''
trap 'stopped+=yes; [[ $child ]] && kill -TERM "$child"' TERM INT

for ((start = 0; start <= ${RESTARTS:-100}; start++)); do
  "${PYTHON:-python}" train.py "$@" &
  child=$!
  before=none
  while [[ $before != "$stopped" ]]; do  # a signal ends `wait` early; its status is then not that of train.py
    before=$stopped
    wait "$child"
    status=$?
  done
  ((status == 75 || status > 128)) && [[ ! $stopped ]] || break
  sleep "${PAUSE:-10}"
  if [[ -s $ended ]]; then
    echo "train.py ended with $status, and on another VM for good with $(<"$ended")" >&2
    exit "$(<"$ended")"
  fi
  echo "train.py ended with $status: starting it again" >&2
done
if [[ $ended ]] && mkdir -p "$(dirname "$ended")" && new=$(mktemp "$ended.XXXXXX"); then
  echo "$status" > "$new" && mv "$new" "$ended"  # the other scripts find a complete file or none
fi
exit "$status"
