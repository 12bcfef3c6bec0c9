# %% [markdown]
# # Open a run
#
# A run directory contains everything that is needed to use a model. `allyouneed.load` reads the config, the tokenizer
# and the parameters, and returns them with the functions that `decode.py` uses. In this notebook we translate, print
# the model's probabilities, draw its attention, and remove heads to see what changes.
#
# The model is the one of `make demo`. It translates dates, amounts, quantities and lists from English to French. To
# open another run: `RUN=runs/mine jupyter lab`. If there is no run in `runs/demo`, a short one is trained now, in a
# minute or two; its translations are worse. The outputs below are from the complete demo.

# %%
import matplotlib.pyplot as plt
import numpy as np

import allyouneed
from analysis.examples import example_run
from analysis.heads import GatedHeads, scores_without_heads, without_head
from analysis.pictures import chosen
from inference.scores import corpus_scores
from inference.search import length_penalty
from training.summary import parameter_table

# %matplotlib inline
plt.rcParams['figure.dpi'] = 70
run = allyouneed.load(example_run('demo', 'RUN'))
print(f'parameters of step {run.checkpoint}, vocabulary of {run.config.data.tokenizer.vocab_size}')
print(', '.join(f'{name} {run.config.model[name]}' for name in (
    'kind', 'num_layers', 'd_model', 'd_ff', 'num_heads', 'norm', 'score', 'position')))

# %% [markdown]
# ## Parameters
#
# The table lists the parameters by part, with their shapes; all layers of a stack have the same shapes. In
# `cross_attention`, `query.kernel` has the matrices $W_q^i$ of all heads as one array $[d, h, d_k]$, and
# `output.kernel` is $W_o$ as $[h, d_v, d]$. Source, target and output share one embedding, as in the paper.

# %%
print(parameter_table(run.model.params))

# %% [markdown]
# ## Translate
#
# The first line is similar to the training data. The second one combines two phrases in a new way. The third one is
# unlike the training data, which has only dates, times, amounts, quantities, percentages, names of languages and
# territories, and lists of these. The model answers anyway, but with a much lower score.

# %%
lines = ['Friday, August 25, 1922', '1,717 Swiss francs and 3 hours ago', 'I love you']
for output in run.translate(lines):
    print(f'{output.source:36} {output.text:44} {output.hypotheses[0].score:6.2f}')

# %% [markdown]
# ## The best hypotheses
#
# Beam search keeps several hypotheses. It ranks them by their log-probability, divided by a length penalty. Without the
# penalty, short hypotheses would win, because every further token reduces the probability:
#
# $$s(Y) = \frac{\log p(Y \mid X)}{\left((5 + |Y|) / 6\right)^{\alpha}}$$

# %%
options = allyouneed.search_options(run.config, method='beam', beam=4, n_best=4)
[date] = run.translate(['Friday, August 25, 1922'], options)
for hypothesis in date.hypotheses:
    length = len(hypothesis.tokens) + 1                              # including the end token
    assert np.isclose(hypothesis.score, hypothesis.log_prob / length_penalty(length, options.alpha), atol=1e-4)
    print(f'score {hypothesis.score:7.3f}   log p {hypothesis.log_prob:7.3f}   p {np.exp(hypothesis.log_prob):7.4f}   '
          f'{hypothesis.text}')

# %% [markdown]
# ## The probability of each token
#
# $p(Y \mid X) = \prod_t p(y_t \mid y_{<t}, X)$ has a factor for each token, and one for the end token. The last column
# has the most probable alternatives. Label smoothing in training keeps all probabilities below 1.

# %%
def show_probabilities(output):
    print(output.text)
    for token in run.model.token_probabilities(output, top=3):
        alternatives = ', '.join(f'{piece!r} {probability:.3f}' for piece, probability in token.alternatives)
        print(f'  {token.piece!r:14} {token.probability:6.3f} {"#" * round(20 * token.probability):20}  {alternatives}')


show_probabilities(date)

# %% [markdown]
# `forced` computes the same for a translation that we choose, here one with a mistake. The wrong digit has a very low
# probability, and the correct digit is the most probable alternative.

# %%
wrong = run.model.forced('Friday, August 25, 1922', 'vendredi 26 août 1922')
show_probabilities(wrong)

# %% [markdown]
# ## Attention
#
# `attention` returns the weights of every layer and head, `[layer, head, target, source]`, of three kinds. `encoder`
# and `decoder` are self-attention, and `cross` is from the translation to the source. Rows are queries and columns are
# keys. In `cross` and `decoder`, the label of a row is the token that is written at this position. This is the
# cross-attention of the last layer:

# %%
weights, axes = run.model.attention(date), run.model.axes(date)
print({kind: array.shape for kind, array in weights.items()})


def look(which):
    kind, panels, titles = chosen(weights, which)                    # KIND[:LAYER[:HEAD]], as in decode.py --look
    return allyouneed.attention_figure(panels, *axes[kind], titles)


look('cross')

# %% [markdown]
# Any layer and head can be drawn, for example the first layer of the encoder, and one head of the decoder's
# self-attention. The decoder's weights form a triangle, because no position attends to later ones.

# %%
look('encoder:1')

# %%
assert np.allclose(np.triu(weights['decoder'], k=1), 0)
look('decoder:1:1')

# %% [markdown]
# ## Remove a head
#
# The output of attention is $\sum_i g_i\, \mathrm{head}_i W_o^i$ with a gate $g_i = 1$ for each head. A gate of 0
# removes head $i$, without changing the run itself. The next cell removes each head in turn, and counts how many of 100
# test sentences are still translated exactly.

# %%
pairs, greedy = run.data().pairs('test')[:100], allyouneed.search_options(run.config, method='greedy')
heads, scores = GatedHeads(run), {}
for kind in heads.kinds():
    whole, scores[kind] = scores_without_heads(heads, pairs, kind, greedy)
allyouneed.heads_figure({kind: 100 * values for kind, values in scores.items()},
                        f'exact matches of 100 without one head (all heads: {100 * whole:.0f})')

# %% [markdown]
# Without a single head of the first layer, most translations are still exact; the heads of the second layer matter
# more. [Michel et al. 2019](https://arxiv.org/abs/1905.10650) found that most heads of large models can be removed. The
# next cell removes the heads of the last layer's cross-attention one after the other, beginning with the most important
# one:

# %%
last, gates = heads.kinds()['cross'][-1], heads.ones()
order = np.argsort(scores['cross'][-1])
sources, references = zip(*pairs, strict=True)
for head in [None, *order]:
    if head is not None:
        gates = without_head(gates, last, int(head))
    outputs = [output.text for output in heads.model(gates).translate([*sources, *lines[:2]], greedy)]
    exact = corpus_scores(outputs[:len(pairs)], references)['exact_match']
    print(f'{"all heads" if head is None else f"and without head {1 + head}":20} {100 * exact:3.0f} exact   ',
          ' | '.join(outputs[len(pairs):]))
