"""Post-norm and pre-norm over learning rates and warmup: why post-norm needs the warmup (Xiong et al. 2020).

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/norm_and_warmup.py --workdir=sweeps/norm

Learning rates: the recipe's peak, a third of it, and three times it. Warmup: the recipe's, and a single step.
"""

from configs.options import choices
from configs.sweeps import over, product


def get_sweep(config):
    rate = 'optimizer.factor' if config.optimizer.schedule == 'paper' else 'optimizer.peak'
    usual = config.optimizer[rate.partition('.')[2]]
    return product(over('model.norm', choices('model.norm')),
                   over(rate, [float(f'{usual * times:.3g}') for times in (1 / 3, 1, 3)]),
                   over('optimizer.warmup', sorted({1, config.optimizer.warmup})))
