# %% [markdown]
# # Additive against dot-product attention
#
# Attention began as a cure. A recurrent encoder-decoder had to press a sentence into one vector;
# [Bahdanau, Cho and Bengio](https://arxiv.org/abs/1409.0473) let its decoder look at all encoder states instead, and
# learn where. Three years later *Attention Is All You Need* dropped the recurrence and kept the attention. Here are
# both, trained on the same sentences with the same vocabulary, side by side.
#
# | | RNNsearch (2015) | Transformer (2017) |
# | --- | --- | --- |
# | looks | the decoder's state $s_{i-1}$ | the decoder's vector $x_i$, times $W_q$ |
# | is looked at | $h_j = [\overrightarrow{h}_j; \overleftarrow{h}_j]$ of a bidirectional GRU | the encoder's output at $j$, times $W_k$ |
# | score | $v^\top \tanh(W_s s_{i-1} + W_h h_j)$ | $q_i \cdot k_j / \sqrt{d_k}$ |
# | weights | $\alpha_{ij} = \mathrm{softmax}_j$ of the score | the same |
# | is found | $c_i = \sum_j \alpha_{ij} h_j$ | $\sum_j \alpha_{ij} v_j$ |
# | how often | once a step | in each layer, in each of $h$ heads |
#
# The runs are `runs/demo` and `runs/rnnsearch_demo`, or those that `RUN` and `RNN_RUN` name; short ones are trained now
# where these are missing, in a few minutes. The outputs below are those of the whole recipes.

# %%
import os

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import inference
from inference.examples import example_run
from inference.parameters import parameter_table
from inference.pictures import attention_figure
from inference.scores import corpus_scores
from inference.text import search_options
from model.attention import additive_scores, dot_scores, scaled_dot_scores

# %matplotlib inline
plt.rcParams['figure.dpi'] = 60
runs = {'RNNsearch': inference.load(os.environ.get('RNN_RUN') or example_run('rnnsearch_demo')),
        'Transformer': inference.load(os.environ.get('RUN') or example_run('demo'))}
for name, run in runs.items():
    print(f'{name:12} {parameter_table(run.model.params).rpartition(" ")[2]:>10} parameters')

# %% [markdown]
# ## The same sentences
#
# All three are of kinds that both were trained on. Below them, how many of 200 test sentences are right to the byte.

# %%
sentences = ['Friday, August 25, 1922', 'Dec 28, 2046 and 17 Egyptian pounds', '8 months ago']
for sentence in sentences:
    print(sentence)
    for name, run in runs.items():
        print(f'    {name:12} {run.translate([sentence])[0].text}')

pairs = runs['Transformer'].data().pairs('test')[:200]
sources, references = zip(*pairs, strict=True)
for name, run in runs.items():
    outputs = run.translate(sources, search_options(run.config, method='greedy'))
    scores = corpus_scores([output.text for output in outputs], references, chrf=False)
    print(f'{name:12} exact match {100 * scores["exact_match"]:.1f} %, BLEU {scores["bleu"]:.1f}')

# %% [markdown]
# ## Their alignments
#
# Both are made to write the same translation (`forced`), so that the matrices have the same rows and columns. Of the
# Transformer it is the last layer: the mean of its heads, then each head.

# %%
def alignments(source, target):
    """[panel, target, source], titles and axes: RNNsearch, and the last layer of the Transformer."""
    forced = {name: run.model.forced(source, target) for name, run in runs.items()}
    cross = {name: run.model.attention(forced[name])['cross'] for name, run in runs.items()}
    last = cross['Transformer'][-1]
    panels = np.concatenate([cross['RNNsearch'][0], last.mean(axis=0)[None], last])
    titles = ['RNNsearch', 'Transformer, mean', *(f'Transformer, head {1 + h}' for h in range(len(last)))]
    return panels, titles, runs['RNNsearch'].model.axes(forced['RNNsearch'])['cross']


panels, titles, tokens = alignments('Friday, August 25, 1922', 'vendredi 25 août 1922')
attention_figure(panels, *tokens, titles)

# %%
panels, titles, tokens = alignments('Dec 28, 2046 and 17 Egyptian pounds', '28 déc. 2046 et 17 livres égyptiennes')
attention_figure(panels, *tokens, titles)
