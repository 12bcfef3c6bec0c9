r"""Each regulariser by itself, and all compatible regularisers together, with three seeds.

    python sweep.py --config=configs/multi30k.py --config.data.dir=DIR --sweep=configs/sweeps/regularisers.py \
                    --workdir=sweeps/regularisers

The first setting has no regulariser. A regulariser that the recipe uses has the recipe's strength. The strengths of the
other regularisers are from papers about small data. All settings have the same budget of passes through the model.
R-Drop and SimCut make two passes in each step, so training with one of these two has half as many steps. If a run
averages its parameters, the average is evaluated. `decode.py --checkpoint=raw:best` scores the parameters without
averaging.
"""

from configs.options import DEFAULTS, flatten, is_used
from configs.sweeps import product, seeds

STRENGTHS = {
    'train.r_drop': 5.0,  # Wu et al. 2021
    'train.simcut': 3.0,  # Gao et al. 2022, with train.cutoff=0.05
    'model.word_dropout': 0.1,  # Sennrich et al. 2016
    'model.layer_dropout': 0.1,  # Fan et al. 2020 have 0.2 for models of many layers
    'data.tokenizer.dropout': 0.1,  # Provilkov et al. 2020
    'optimizer.ema': 0.999,
}
TWO_PASSES = {'train.r_drop', 'train.simcut'}


def get_sweep(config):
    here = flatten(config)
    used = {option: here[option] or strength for option, strength in STRENGTHS.items() if is_used(option, here)}
    passes = config.train.steps * (2 if any(here[option] for option in TWO_PASSES) else 1)

    def only(*options):
        """Returns the overrides that turn on only these regularisers."""
        wanted = {option: strength if option in options else 0.0 for option, strength in used.items()}
        wanted['train.steps'] = passes // 2 if TWO_PASSES & {*options} else passes
        if 'train.simcut' not in options:
            wanted['train.cutoff'] = DEFAULTS['train.cutoff']
        return {option: value for option, value in wanted.items() if value != here[option]}

    together = [option for option in used if option != 'train.simcut']  # SimCut cannot be combined with R-Drop
    # The runs are ordered by seed, so that an interrupted sweep has compared all settings, with fewer seeds.
    return product(seeds(3), [only(), *map(only, used), only(*together)])
