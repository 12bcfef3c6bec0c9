"""The recipe with five seeds, which shows how large random differences are.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/seeds.py --workdir=sweeps/seeds
"""

from configs.sweeps import seeds


def get_sweep(config):
    return seeds(5)
