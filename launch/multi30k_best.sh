#!/bin/sh
# All steps of configs/multi30k_best.py: two teachers, their translations of the training sources, and the student:
#
#   sh launch/multi30k_best.sh DIR RUNS [flags]
#
# DIR is the folder with the pairs, as configs/multi30k.py wants it. RUNS gets the runs `first`, `second` and `best`, and
# `distilled`, the data of the student. The flags go to all three trainings, such as --config.data.source_lang=de
# --config.data.target_lang=en. After a stop the same command goes on where it was.
set -eu
pairs=${1:?DIR, the folder with the pairs, and RUNS are needed}
runs=${2:?RUNS, the folder for the runs, is needed}
shift 2
python=${PYTHON:-python}

"$python" train.py --config=configs/multi30k.py --config.data.dir="$pairs" --workdir="$runs/first" "$@"
"$python" train.py --config=configs/multi30k.py --config.data.dir="$pairs" --config.model.dropout=0.2 \
                   --config.train.steps=3600 --config.eval.every=1200 --workdir="$runs/second" "$@"
if [ ! -d "$runs/distilled" ]; then
  rm -rf "$runs/distilled.partial"
  "$python" -m tools.distil --workdir="$runs/first,$runs/second" --checkpoint=average:10 --pairs \
                            --output="$runs/distilled.partial"
  mv "$runs/distilled.partial" "$runs/distilled"
fi
"$python" train.py --config=configs/multi30k_best.py --workdir="$runs/best" "$@" --config.data.dir="$runs/distilled" \
                   --config.data.splits.train=train,distilled
"$python" decode.py --workdir="$runs/best" --checkpoint=average:10 --split=test
