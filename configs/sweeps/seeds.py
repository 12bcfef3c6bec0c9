"""Trains the recipe with five seeds, to show how much the results depend on the seed.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/seeds.py --workdir=sweeps/seeds
"""

from configs.sweeps import seeds


def get_sweep(config):
    return seeds(5)
