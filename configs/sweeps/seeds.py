"""The recipe with five seeds: how large a difference is chance.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/seeds.py --workdir=sweeps/seeds
"""

from configs.sweeps import seeds


def get_sweep(config):
    return seeds(5)
