"""Post-norm and pre-norm with several learning rates, with and without warm-up, to show that post-norm needs warm-up.

    python sweep.py --config=configs/demo.py --sweep=configs/sweeps/norm_and_warmup.py --workdir=sweeps/norm

This is an experiment of Xiong et al. 2020. The learning rates are the recipe's peak, a third of the peak, and three
times the peak. The warm-ups are the recipe's warm-up and a single step. If the recipe's warm-up is not shorter than the
training, it is a tenth of the training instead.
"""

from configs.options import choices
from configs.rules import warmup_steps
from configs.sweeps import over, product


def get_sweep(config):
    rate = 'optimizer.factor' if config.optimizer.schedule == 'paper' else 'optimizer.peak'
    usual = config.optimizer[rate.partition('.')[2]]
    return product(over('model.norm', choices('model.norm')),
                   over(rate, [float(f'{usual * times:.3g}') for times in (1 / 3, 1, 3)]),
                   over('optimizer.warmup', sorted({1, warmup_steps(config.optimizer, config.train.steps)})))
