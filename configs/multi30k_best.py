r"""Multi30k, English to German: a student model that learns from the training pairs and from two teacher models.

This is sequence-level distillation (Kim and Rush 2016, arXiv:1606.07947, section 3.2). Two teachers are trained. The
ensemble of the teachers translates the training sources. The student has the size of one teacher, and is trained on
these translations and on the original pairs.

    sh launch/multi30k_best.sh DIR RUNS

DIR is the same folder as for configs/multi30k.py. RUNS is a folder for the runs, such as runs/multi30k_best. The script
runs these steps:

    python train.py --config=configs/multi30k.py --config.data.dir=DIR --workdir=RUNS/first
    python train.py --config=configs/multi30k.py --config.data.dir=DIR --config.model.dropout=0.2 \
                    --config.train.steps=3600 --config.eval.every=1200 --workdir=RUNS/second
    python -m tools.distil --workdir=RUNS/first,RUNS/second --checkpoint=average:10 --pairs --output=RUNS/distilled
    python train.py --config=configs/multi30k_best.py --config.data.dir=RUNS/distilled --workdir=RUNS/best
    python decode.py --workdir=RUNS/best --checkpoint=average:10 --split=test

All steps together take about two and a half hours on 2 cores (an estimate). Results of our runs (float32, seed 0) on
test 2016 with beam 5: 41.4 BLEU (sacreBLEU, cased, detokenised, 13a), and 41.9 BLEU on lowercased Moses tokens. With
seed 1, the student has 41.5 and 41.9. The first teacher, with 8,000 steps, has 40.9 and 41.3. The ensemble of the two
teachers has 41.2 and 41.6. docs/results.md also has the results of a student of half the size, and of an ensemble.
"""

from ml_collections import ConfigDict

from configs import multi30k


def get_config() -> ConfigDict:
    config = multi30k.get_config()
    config.data.splits.train = 'train,distilled'  # the pairs and the translations that tools.distil --pairs writes
    config.train.steps, config.eval.every = 8000, 2000  # 13.4 epochs
    return config
