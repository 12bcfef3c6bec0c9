"""The recipe from five seeds: how much of a difference is luck.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/seeds.py --workdir=sweeps/seeds
"""

from configs.sweeps import seeds


def get_sweep(config):
    return seeds(5)
