"""Every position scheme.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/positions.py --workdir=sweeps/positions
"""

from configs.sweeps import over
from model.positional import SCHEMES


def get_sweep(config):
    return over('model.position', SCHEMES)
