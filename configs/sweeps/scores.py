"""Trains the recipe with every score function of attention: scaled and plain dot product, general, additive.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/scores.py --workdir=sweeps/scores
"""

from configs.options import choices
from configs.sweeps import over


def get_sweep(config):
    return over('model.score', choices('model.score'))
