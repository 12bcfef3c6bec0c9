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
# | is looked at | $h_j$, both directions of a GRU at word $j$ | the encoder's output at $j$, times $W_k$ |
# | score | $v^\top \tanh(W_s s_{i-1} + W_h h_j)$ | $q_i \cdot k_j / \sqrt{d_k}$ |
# | weights | $\alpha_{ij} = \mathrm{softmax}_j$ of the score | the same |
# | is found | $c_i = \sum_j \alpha_{ij} h_j$ | $\sum_j \alpha_{ij} v_j$ |
# | how often | once a step | in each layer, in each of $h$ heads |
#
# The runs are `runs/demo` and `runs/rnnsearch_demo`, or those that `RUN` and `RNN_RUN` name; short ones are trained now
# where these are missing, in a few minutes. The outputs below are those of the whole recipes.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import allyouneed
from analysis.examples import example_run
from analysis.pictures import attention_figure
from inference.scores import corpus_scores
from inference.text import search_options
from model import parameter_count
from model.attention import additive_scores, dot_scores, scaled_dot_scores

# %matplotlib inline
plt.rcParams['figure.dpi'] = 60
runs = {'RNNsearch': allyouneed.load(example_run('rnnsearch_demo', 'RNN_RUN')),
        'Transformer': allyouneed.load(example_run('demo', 'RUN'))}
for name, run in runs.items():
    print(f'{name:12} {parameter_count(run.model.params):10,} parameters')

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
    scores = corpus_scores([output.text for output in outputs], references)
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

# %% [markdown]
# What to see, first in RNNsearch, then in the Transformer:
#
# - *vendredi* looks at *Friday*, each digit at its own copy, the end at the end: dark squares down a diagonal.
# - *août* crosses over: English has the month before the day, French after it. Nobody told either model; order comes
#   from the sentences alone. In the Transformer three heads cross over clearly, the fourth is undecided.
# - RNNsearch's rows of the spaces, `▁`, are pale: there is little to look up, and weights must sum to 1 all the same.
#
# And a sentence of two parts:

# %%
panels, titles, tokens = alignments('Dec 28, 2046 and 17 Egyptian pounds', '28 déc. 2046 et 17 livres égyptiennes')
attention_figure(panels, *tokens, titles)

# %% [markdown]
# The date is as before. Look at the end: English says *Egyptian pounds*, French *livres égyptiennes*. All heads of
# the Transformer let *ég* look at *Egypt*. RNNsearch seems to have it the wrong way round: *livres* looks at *Egypt*,
# and *ég* at *pounds*. It is right nevertheless, for $h_j$ is no word but a summary of the sentence around word $j$,
# written by two networks that came past: both nouns are to be had at either place. The Transformer's encoder mixes
# its positions too. An alignment shows *where* a decoder fetched something, and not *what* was there.
#
# ## Counted, not only seen
#
# Over 60 test sentences and their references: of the digits that are written, how many look most at the same digit? And
# how widely is attention spread: the mean entropy of its rows, in nats, 0 for a single key? One figure for each head:

# %%
for name, run in runs.items():
    same, digits, entropy, rows = 0, 0, 0, 0
    for source, target in pairs[:60]:
        forced = run.model.forced(source, target)
        last = run.model.attention(forced)['cross'][-1]                            # [head, target, source]
        writes, reads = (np.array(names) for names in run.model.axes(forced)['cross'])
        is_digit = np.char.isdigit(writes)
        same += (reads[last.argmax(axis=-1)] == writes)[:, is_digit].sum(axis=-1)
        digits += is_digit.sum()
        entropy -= (last * np.log(np.maximum(last, 1e-12))).sum(axis=(-1, -2))
        rows += len(writes)
    print(f'{name:12} same digit, % of {digits}: {np.round(100 * same / max(digits, 1))}   '
          f'entropy: {np.round(entropy / rows, 2)}')

# %% [markdown]
# Not all digits can be copied (1 PM is 13 in French), and a digit can also be read off a neighbour's state. The two
# models, of two families and with two score functions, do this alike.
#
# ## Why the Transformer took the dot product
#
# Section 3.2.1 of the paper: the two are similar in cost on paper, but the dot product is one matrix multiplication,
# and additive scores need a hidden layer for every *pair* of a query and a key: $n \times m \times d$ numbers instead
# of $n \times m$. For wide vectors plain dot products did worse than additive scores, which is why there is a
# $\sqrt{d_k}$. With queries and keys of variance 1, the scores of all three over the width:

# %%
widths, rng = (4, 16, 64, 256, 1024), np.random.default_rng(0)
spread = {'q.k': [], 'v tanh(q + k)': [], 'q.k / sqrt(d_k)': []}
for d_k in widths:
    query, key, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (
        (1, 64, 1, d_k), (1, 64, 1, d_k), (1, d_k)))
    for name, scores in zip(spread, (dot_scores(query, key), additive_scores(query, key, v / np.sqrt(d_k)),
                                     scaled_dot_scores(query, key)), strict=True):
        spread[name].append(float(scores.std()))

figure, axes = plt.subplots(figsize=(4.5, 3), layout='constrained')
for (name, values), style in zip(spread.items(), ('s--', '^:', 'o-'), strict=True):
    axes.loglog(widths, values, style, base=2, label=name)
axes.set(xlabel='d_k', ylabel='standard deviation of the scores')
axes.legend()
print({name: [f'{value:.1f}' for value in values] for name, values in spread.items()})

# %% [markdown]
# Plain dot products grow with $\sqrt{d_k}$ and make the softmax one-hot ([`attention_by_hand`](attention_by_hand.ipynb)
# shows what that does to the gradient). The additive ones do not, for the tanh is bounded. Scaled, the dot
# product does not either, and is the cheaper one.
#
# Additive scores inside a Transformer are one flag away: `--config.model.score=additive`.
# [`compare_runs`](compare_runs.ipynb) puts all score functions side by side.
