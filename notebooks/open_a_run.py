# %% [markdown]
# # Open a run
#
# A run directory is all that is needed to work with a model: `allyouneed.load` reads the config, the tokenizer and the
# parameters from it, and returns them with the functions that `decode.py` uses. Here we translate, ask how sure the
# model is, look where it looks, and take heads away to see what breaks.
#
# The model is that of `make demo`, English to French: dates, amounts, quantities, lists. Another run:
# `RUN=runs/mine jupyter lab`. Without a run in `runs/demo`, a short one is trained now, in a minute or two; its
# translations are worse, and more interesting for that. The outputs below are those of the whole demo.

# %%
import matplotlib.pyplot as plt
import numpy as np

import allyouneed
from analysis.examples import example_run
from analysis.heads import GatedHeads, scores_without_heads, without_head
from analysis.pictures import attention_figure, chosen, heads_figure
from inference.scores import corpus_scores
from inference.search import length_penalty
from inference.text import search_options
from training.summary import parameter_table

# %matplotlib inline
plt.rcParams['figure.dpi'] = 70
run = allyouneed.load(example_run('demo', 'RUN'))
print(f'the parameters of step {run.checkpoint}')
print(', '.join(f'{name} {run.config.model[name]}' for name in (
    'kind', 'num_layers', 'd_model', 'd_ff', 'num_heads', 'norm', 'score', 'position')))

# %% [markdown]
# ## Parameters
#
# By part, with their shapes; the layers of a stack are alike. `cross_attention` has `query.kernel`, the matrices
# $W_q^i$ of all heads, as one array $[d, h, d_k]$, and `output.kernel`, $W_o$, as $[h, d_v, d]$. One embedding serves
# source, target and output, as in the paper.

# %%
print(parameter_table(run.model.params))

# %% [markdown]
# ## Translate
#
# The first line is like the training data, the second puts together two parts that were not together there. The third
# is none of its business: a model of dates and amounts knows no love, answers all the same, and its score gives it
# away.

# %%
sentences = ['Friday, August 25, 1922', '1,717 Swiss francs and 3 hours ago', 'I love you']
for output in run.translate(sentences):
    print(f'{output.source:36} {output.text:44} {output.hypotheses[0].score:6.2f}')

# %% [markdown]
# ## The n best
#
# Beam search keeps several hypotheses. It ranks them by their log-probability divided by a length penalty, without
# which short ones would win, for each further token costs probability:
#
# $$s(Y) = \frac{\log p(Y \mid X)}{\left((5 + |Y|) / 6\right)^{\alpha}}$$

# %%
options = search_options(run.config, method='beam', beam=4, n_best=4)
[date] = run.translate(['Friday, August 25, 1922'], options)
for hypothesis in date.hypotheses:
    length = len(hypothesis.tokens) + 1                              # and the end token
    assert np.isclose(hypothesis.score, hypothesis.log_prob / length_penalty(length, options.alpha), atol=1e-4)
    print(f'score {hypothesis.score:7.3f}   log p {hypothesis.log_prob:7.3f}   p {np.exp(hypothesis.log_prob):7.4f}   '
          f'{hypothesis.text}')

# %% [markdown]
# ## How sure is it of each token?
#
# $p(Y \mid X) = \prod_t p(y_t \mid y_{<t}, X)$, a factor for each token and one for the end. Beside each token are the
# ones that the model held for the next best. (Trained with label smoothing 0.1, it is told never to be quite sure.)

# %%
def show_probabilities(output):
    print(output.text)
    for token in run.model.token_probabilities(output, top=3):
        others = ', '.join(f'{piece!r} {probability:.3f}' for piece, probability in token.alternatives)
        print(f'  {token.piece!r:14} {token.probability:6.3f} {"#" * round(20 * token.probability):20}  {others}')


show_probabilities(date)

# %% [markdown]
# The same for a translation that we make up, with a mistake in it: `forced` makes the model write it. The wrong digit
# gets next to nothing, and the right one is what the model would rather have written.

# %%
wrong = run.model.forced('Friday, August 25, 1922', 'vendredi 26 août 1922')
show_probabilities(wrong)

# %% [markdown]
# ## Where does it look?
#
# `attention` has the weights of every layer and head, `[layer, head, target, source]`, of three kinds: `encoder` and
# `decoder` are self-attention, `cross` is from the translation to the source. Rows are what looks, columns what is
# looked at; a row of `cross` and `decoder` is named by the token that is written there. The last layer's
# cross-attention:

# %%
weights, axes = run.model.attention(date), run.model.axes(date)
print({kind: each.shape for kind, each in weights.items()})


def look(which):
    kind, panels, titles = chosen(weights, which)                    # KIND[:LAYER[:HEAD]], as in decode.py --look
    return attention_figure(panels, *axes[kind], titles)


look('cross')

# %% [markdown]
# Any layer and head: the encoder's first layer, and one head of the decoder's self-attention. The decoder's is a
# triangle: no position looks ahead.

# %%
look('encoder:1')

# %%
assert np.allclose(np.triu(weights['decoder'], k=1), 0)
look('decoder:1:1')

# %% [markdown]
# ## Take a head away
#
# The output of attention is $\sum_i g_i\, \mathrm{head}_i W_o^i$ with a gate $g_i = 1$ for each head. A gate of 0
# removes head $i$. The run itself does not change. How many of 100 test sentences are still right, to the byte, without
# each head in turn?

# %%
pairs, greedy = run.data().pairs('test')[:100], search_options(run.config, method='greedy')
heads, scores = GatedHeads(run), {}
for kind in heads.kinds():
    whole, scores[kind] = scores_without_heads(heads, pairs, kind, greedy)
heads_figure({kind: 100 * values for kind, values in scores.items()},
             f'exact matches of 100 without one head (all heads: {100 * whole:.0f})')

# %% [markdown]
# In the demo no single head is indispensable: what one does, others can do too ([Michel et al.
# 2019](https://arxiv.org/abs/1905.10650) found the same in large models). The ones that are missed most are in the
# last layer's cross-attention. Silence these one after the other, the most missed first, and see what breaks:

# %%
last, gates = heads.kinds()['cross'][-1], heads.ones()
order = np.argsort(scores['cross'][-1])
sources, references = zip(*pairs, strict=True)
for head in [None, *order]:
    if head is not None:
        gates = without_head(gates, last, int(head))
    outputs = [output.text for output in heads.model(gates).translate([*sources, *sentences[:2]], greedy)]
    right = corpus_scores(outputs[:len(pairs)], references)['exact_match']
    print(f'{"all heads" if head is None else f"and without head {1 + head}":20} {100 * right:3.0f} right   ',
          ' | '.join(outputs[len(pairs):]))
