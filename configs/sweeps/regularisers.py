r"""Each regulariser by itself, and all compatible regularisers together, with three seeds.

    python sweep.py --config=configs/multi30k.py --config.data.dir=DIR --sweep=configs/sweeps/regularisers.py \
                    --workdir=sweeps/regularisers

The first setting has no regulariser. A regulariser that the recipe uses has the recipe's strength. The strengths of the
other regularisers are from papers about small data. All settings make the same total number of forward passes. R-Drop
and SimCut make two forward passes in each step, so a run with R-Drop or SimCut has half as many steps. If a run keeps a
moving average of the parameters, the average is evaluated. `decode.py --checkpoint=raw:best` scores the parameters
themselves. If the recipe has no dropout, no setting has only R-Drop, because R-Drop needs dropout. Without
train.cutoff, SimCut also needs dropout.
"""

from configs.options import DEFAULTS, DROPOUTS, flatten, is_used
from configs.sweeps import product, seeds

STRENGTHS = {
    'train.r_drop': 5.0,  # Wu et al. 2021
    'train.simcut': 3.0,  # Gao et al. 2022, with train.cutoff=0.05
    'model.word_dropout': 0.1,  # Sennrich et al. 2016
    'model.layer_dropout': 0.1,  # Fan et al. 2020 use 0.2 for models with many layers
    'data.tokenizer.dropout': 0.1,  # Provilkov et al. 2020
    'optimizer.ema': 0.999,
}
TWO_PASSES = {'train.r_drop', 'train.simcut'}


def get_sweep(config):
    values = flatten(config)
    used = {option: values[option] or strength for option, strength in STRENGTHS.items() if is_used(option, values)}
    passes = config.train.steps * (2 if any(values[option] for option in TWO_PASSES) else 1)

    def only(*options):
        """Returns the overrides of a run that uses only the regularisers `options`."""
        overrides = {option: strength if option in options else 0.0 for option, strength in used.items()}
        overrides['train.steps'] = passes // 2 if TWO_PASSES & {*options} else passes
        if 'train.simcut' not in options:
            overrides['train.cutoff'] = DEFAULTS['train.cutoff']
        return {option: value for option, value in overrides.items() if value != values[option]}

    dropout = any(values[option] for option in DROPOUTS if option not in STRENGTHS)
    needs_dropout = {'train.r_drop'} if values['train.cutoff'] else TWO_PASSES
    alone = [option for option in used if dropout or option not in needs_dropout]
    together = [option for option in used if option != 'train.simcut']  # SimCut cannot be combined with R-Drop
    # The runs are ordered by seed, so that an interrupted sweep still compares all settings, but with fewer seeds.
    return product(seeds(3), [only(), *map(only, alone), only(*together)])
