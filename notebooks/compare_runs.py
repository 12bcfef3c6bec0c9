# %% [markdown]
# # Compare runs
#
# This notebook compares several runs: their varied options, their results and their learning curves. It uses the
# functions with which `sweep.py` writes its report. They only read files.
#
# The example compares the score functions of attention in the demo's model. One model was trained with each score
# function, for only 500 steps, so that the results differ. ([`attention_by_hand`](attention_by_hand.ipynb) has the
# equations.) The command of this sweep:
#
# ```
# python sweep.py --config=configs/demo.py --sweep=configs/sweeps/scores.py --workdir=sweeps/scores \
#                 --config.train.steps=500
# ```
#
# To open another sweep: `SWEEP=sweeps/mine jupyter lab`. A folder of run directories, such as `runs`, is possible, too.
# If `sweeps/scores` does not exist, a short sweep of small models (one layer, $d = 64$, 200 steps) is made now, in a
# few minutes. Its results differ, because such models are only at the beginning of their training.

# %%
import matplotlib.pyplot as plt

import allyouneed
from analysis.examples import example_sweep
from analysis.plots import plot_curves, plot_varied

# %matplotlib inline
plt.rcParams['figure.dpi'] = 60
runs = allyouneed.load_runs(example_sweep('scores', 'SWEEP'))
for run in runs:
    print(f'{run.name:24} {run.state}')

# %% [markdown]
# ## The results
#
# The table has one row per setting. Runs that differ only in the seed are one setting, with mean and standard
# deviation. The best value of each metric is bold. `.csv()` returns the table for other programs.

# %%
allyouneed.results_table(runs)

# %% [markdown]
# Each setting was trained with one seed only. To find out whether a small difference is more than chance, train with
# several seeds: with `product(over('model.score', choices('model.score')), seeds(3))` in a sweep file, the table has
# the standard deviations. The sweep file imports `choices` from `configs.options`, and the other functions from
# `configs.sweeps`.
#
# ## Learning curves
#
# A result is one point of a learning curve. Would more steps change the order of the runs? `plot_curves` draws any
# curve by its name. The default is the validation metric that chooses the best checkpoint.

# %%
plot_curves(runs, 'train_loss')

# %% [markdown]
# ## A metric over the varied option

# %%
plot_varied(runs, 'perplexity')

# %% [markdown]
# ## The record of a run
#
# A record contains everything that was logged about a run: curves as (step, value), results by split, and every option
# of its config.

# %%
run = runs[0]
print('curves: ', ', '.join(run.curves))
print('results:', {split: sorted(results) for split, results in run.results.items()})
print('varied options:', run.settings)
print('train loss:', ', '.join(f'{step}: {value:.2f}' for step, value in run.curves['train_loss']))
