"""Trains the recipe with every encoding of positions (config.model.position).

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/positions.py --workdir=sweeps/positions
"""

from configs.options import choices, flatten
from configs.tasks import TASKS


def get_sweep(config):
    return [learned(config) if scheme == 'learned' else {'model.position': scheme}
            for scheme in choices('model.position')]


def learned(config):
    """Returns the run with learned positions. The table has at least one row for each position."""
    longest = flatten(config)[TASKS[config.task].longest or 'model.max_length']
    larger = {'model.max_length': longest} if longest > config.model.max_length else {}
    return {'model.position': 'learned', **larger}
