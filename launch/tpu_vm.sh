#!/bin/bash
# Trains on the chips of one TPU VM, or of all VMs of a slice:
#
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command='cd allyouneed && launch/tpu_vm.sh --config=configs/wmt14_base.py --workdir=RUN'
#
# First, run `pip install -e . 'jax[tpu]'` on every VM. Without libtpu, every VM would start its own training on CPUs, in the
# same RUN.
#
# JAX detects all VMs of a slice. For several VMs, RUN and config.cache_dir must be on a shared file system. If train.py
# ends with status 75 or is killed, this script starts it again, at most RESTARTS times (100), and training resumes from the
# newest checkpoint. After SIGTERM or SIGINT to this script, train.py saves a checkpoint and ends, and the script ends, too.
#
# When a script stops starting train.py, it writes the last status and the name of the VM to the file .RUN.ended beside RUN.
# On all other VMs, train.py has then lost a process and ends. The scripts on these VMs read the file and end with the same
# status, because the first VM does not start train.py again. If the disk is full, the file is empty, which means status 2.
cd "$(dirname "$0")/.." || exit 2

run='' previous=''
for argument; do
  [[ $previous =~ ^--?workdir$ ]] && run=$argument
  [[ $argument =~ ^--?workdir=(.+)$ ]] && run=${BASH_REMATCH[1]}
  previous=$argument
done
if [[ ! $run ]]; then
  echo 'launch/tpu_vm.sh: --workdir is missing. Add --workdir=RUN to the arguments of the script' >&2
  exit 2
fi
[[ $run =~ ^'~'(/.*)?$ ]] && run=$HOME${BASH_REMATCH[1]}  # train.py expands ~, but the shell does not after an = sign
if [[ $run =~ ^('~'[A-Za-z0-9._-]+)(/.*)?$ ]]; then  # ~NAME, the home folder of another user
  home=''
  eval "home=${BASH_REMATCH[1]}"
  run=$home${BASH_REMATCH[2]}
fi
ended=$(dirname "$run")/.$(basename "$run").ended
# Removes the file if it is from an earlier start: if this VM has written it, or if it is older than two minutes. Keeps the file
# if another VM has failed in this start. Without the file, this script would start train.py again and again, and train.py would
# wait for that VM each time.
vm=''
{ read -r _ vm < "$ended"; } 2> /dev/null
if [[ $vm == "$HOSTNAME" || $(find "$ended" -mmin +2 2> /dev/null) ]]; then
  rm -f "$ended"
fi

child='' stopped=''
trap 'stopped+=yes; [[ $child ]] && kill -TERM "$child" 2> /dev/null' TERM INT

# Starts a command in the background. The trap stops the command.
start_child() {
  "$@" &
  child=$!
  [[ ! $stopped ]] || kill -TERM "$child" 2> /dev/null  # if a signal arrived before the assignment
}

for ((start = 0; start <= ${RESTARTS:-100}; start++)); do
  ((start == 0)) || echo "train.py ended with $status: starting it again" >&2
  start_child "${PYTHON:-python}" train.py "$@"
  before=none
  while [[ $before != "$stopped" ]]; do  # a signal ends `wait` early; the status of wait is then not the status of train.py
    before=$stopped
    wait "$child"
    status=$?
  done
  ((status == 75 || status > 128)) && [[ ! $stopped ]] || break
  start_child sleep "${PAUSE:-10}"  # in this time, another VM may write its last status
  wait "$child"
  if [[ -e $ended ]]; then
    read -r last vm < "$ended" || last=2 vm='(unknown, because the disk is full)'
    echo "train.py ended with $status, and on the VM $vm for good with $last" >&2
    exit "$last"
  fi
  [[ ! $stopped ]] || break
done
if mkdir -p "$(dirname "$ended")" && new=$(mktemp "$ended.XXXXXX"); then
  echo "$status $HOSTNAME" > "$new"
  mv "$new" "$ended"  # so that other scripts never see a file that is still empty
fi
exit "$status"
