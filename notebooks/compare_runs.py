# %% [markdown]
# # Compare runs
#
# A result alone says little. Here several runs are laid side by side: what was varied, what came of it, and the way
# there. The functions are those by which `sweep.py` writes its report, and they read files only.
#
# Below, the score functions of attention in the demo's model, each trained once, for 500 steps only, so that they
# differ ([`attention_by_hand`](attention_by_hand.ipynb) has their equations). One command makes such a sweep:
#
# ```
# python sweep.py --config=configs/demo.py --sweep=configs/sweeps/scores.py --workdir=sweeps/scores \
#                 --config.train.steps=500
# ```
#
# To open another: `SWEEP=sweeps/mine jupyter lab`; a folder of run directories will do too, such as `runs`. Where
# there is no `sweeps/scores`, a short sweep of small models (one layer, $d = 64$, 200 steps) is made now, in a few
# minutes. It looks alike, but what it shows is how such models begin.

# %%
import matplotlib.pyplot as plt

from analysis.compare import load_runs, results_table
from analysis.examples import example_sweep
from analysis.plots import plot_curves, plot_varied

# %matplotlib inline
plt.rcParams['figure.dpi'] = 60
where = example_sweep('scores', 'SWEEP')
runs = load_runs(where)
for run in runs:
    print(f'{run.name:24} {run.state}')

# %% [markdown]
# ## What was varied, and what came of it
#
# A row for each setting; runs that differ in the seed alone share one, with their mean and standard deviation. The
# best of each metric is bold. `.csv()` instead of `.markdown()` for other programs.

# %%
results_table(runs)

# %% [markdown]
# What to see: without the scaling (`dot`) hardly anything is learned in 500 steps, and additive scores take their time
# (tokens a second). The other three are close: BLEU prefers another one than perplexity does, and each was trained from
# one seed only. Before saying that one of them is better, train each from a few: in a sweep file,
# `product(over('model.score', SCORES), seeds(3))`, and the table has a ± for what is luck.
#
# ## The way there
#
# The end of a run is one point of a curve. Have they come to rest, or would more steps change the order? Without a name
# it is the metric of the validation by which the best checkpoint is chosen; any other curve will do, by its name.

# %%
plot_curves(runs, 'train_loss')

# %% [markdown]
# ## The metric against what was varied

# %%
plot_varied(runs, 'perplexity')

# %% [markdown]
# ## One run more closely
#
# A record holds all that the run has told of, by name: curves as (step, value), results by split, every option of its
# config.

# %%
run = runs[0]
print('curves: ', ', '.join(run.curves))
print('results:', {split: sorted(results) for split, results in run.results.items()})
print('options that set it apart:', run.settings)
print('train loss:', ', '.join(f'{step}: {value:.2f}' for step, value in run.curves['train_loss']))
