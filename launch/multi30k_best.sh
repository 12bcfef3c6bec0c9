#!/bin/sh
# Runs all steps of configs/multi30k_best.py: trains two teachers, translates the training sources with them, and trains the
# student:
#
#   sh launch/multi30k_best.sh DIR RUNS [flags]
#
# DIR is the folder with the pairs that configs/multi30k.py describes. The script writes the runs `first`, `second` and
# `best` to RUNS, and the data of the student to RUNS/distilled. The flags apply to all three trainings, for example
# --config.data.source_lang=de --config.data.target_lang=en. After an interruption, the same command resumes. After SIGTERM or
# SIGINT to this script, the current step stops, and the script ends with its status (143 between two steps).
set -eu
pairs=${1:?DIR, the folder with the pairs, and RUNS are needed}
runs=${2:?RUNS, the folder for the runs, is needed}
shift 2
child=
# The step runs in the background, because the shell waits for a foreground command before it handles a signal.
run() { "${PYTHON:-python}" "$@" & child=$!; wait "$child"; child=; }
trap '[ "$child" ] || exit 143; kill "$child" && wait "$child"; exit $?' INT TERM

run train.py --config=configs/multi30k.py --config.data.dir="$pairs" --workdir="$runs/first" "$@"
run train.py --config=configs/multi30k.py --config.data.dir="$pairs" --config.model.dropout=0.2 \
    --config.train.steps=3600 --config.eval.every=1200 --workdir="$runs/second" "$@"
if [ ! -d "$runs/distilled" ]; then
  rm -rf "$runs/distilled.partial"
  run -m tools.distil --workdir="$runs/first,$runs/second" --checkpoint=average:10 --pairs \
      --output="$runs/distilled.partial"
  mv "$runs/distilled.partial" "$runs/distilled"
fi
run train.py --config=configs/multi30k_best.py --workdir="$runs/best" "$@" --config.data.dir="$runs/distilled" \
    --config.data.splits.train=train,distilled
run decode.py --workdir="$runs/best" --checkpoint=average:10 --split=test
