"""Every score function: scaled and plain dot product, general, additive.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/scores.py --workdir=sweeps/scores
"""

from configs.sweeps import over
from model.attention import SCORES


def get_sweep(config):
    return over('model.score', SCORES)
