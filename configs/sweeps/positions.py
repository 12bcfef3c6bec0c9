"""Trains the recipe with every encoding of positions (config.model.position).

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/positions.py --workdir=sweeps/positions
"""

from configs.options import choices
from configs.sweeps import over


def get_sweep(config):
    return over('model.position', choices('model.position'))
