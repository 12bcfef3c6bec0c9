# %% [markdown]
# # Compare runs
#
# A result alone says little. Here several runs are laid side by side: what was varied, what came of it, and the way
# there. The functions are those by which `sweep.py` writes its report, and they read files only.
#
# The sweep below is over the score functions of attention, in a small model on the built-in corpus. The command:
#
# ```
# python sweep.py --config=configs/demo.py --sweep=configs/sweeps/scores.py --workdir=sweeps/scores
# ```
#
# Any other: `SWEEP=sweeps/mine jupyter lab`; it may also be a folder of run directories, such as `runs`. Without
# `sweeps/scores` a short sweep of small models (one layer, $d = 64$) is made now, in a minute or two. The outputs below
# are of such small models, after 600 steps.

# %%
import os

import matplotlib.pyplot as plt

from inference.compare import load_runs, plot_curves, plot_varied, results_table
from inference.examples import example_sweep

# %matplotlib inline
plt.rcParams['figure.dpi'] = 60
where = os.environ.get('SWEEP') or example_sweep('scores')
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
# ## The way there
#
# The end of a run is one point of a curve. Have they come to rest, or would more steps change the order? By default
# it is the metric by which the best checkpoint is chosen; any that was validated will do.

# %%
plot_curves(runs)

# %%
plot_curves(runs, 'loss')

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
