# %% [markdown]
# # Additive and dot-product attention
#
# A recurrent encoder-decoder without attention has to represent a sentence by one vector. [Bahdanau, Cho and
# Bengio](https://arxiv.org/abs/1409.0473) gave the decoder access to all encoder states. The decoder learns to which
# states it attends. Two years later, *Attention Is All You Need* dropped the recurrence and kept the attention. This
# notebook compares the two models, trained on the same sentences with the same vocabulary.
#
# | | RNNsearch (2015) | Transformer (2017) |
# | --- | --- | --- |
# | query | the decoder's state $s_{i-1}$ | the decoder's vector $x_i$, times $W_q$ |
# | key | $h_j$, both directions of a GRU at word $j$ | the encoder's output at $j$, times $W_k$ |
# | score | $v^\top \tanh(W_s s_{i-1} + W_h h_j)$ | $q_i \cdot k_j / \sqrt{d_k}$ |
# | weights | $\alpha_{ij} = \mathrm{softmax}_j$ of the score | the same |
# | output | $c_i = \sum_j \alpha_{ij} h_j$ | $\sum_j \alpha_{ij} v_j$ |
# | where | once per step | in each layer, in each of $h$ heads |
#
# The runs are `runs/demo` and `runs/rnnsearch_demo`, or the runs that `RUN` and `RNN_RUN` name. If a variable is
# not set and its default run is missing, a short run is trained now, in a few minutes. The outputs below are from the
# complete recipes.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import allyouneed
from analysis.examples import example_run
from inference.scores import corpus_scores
from model import parameter_count
from model.attention import additive_scores, dot_scores, scaled_dot_scores

# %matplotlib inline
plt.rcParams['figure.dpi'] = 60
runs = {'RNNsearch': allyouneed.load(example_run('rnnsearch_demo', 'RNN_RUN')),
        'Transformer': allyouneed.load(example_run('demo', 'RUN'))}
for name, run in runs.items():
    print(f'{name:12} {parameter_count(run.model.params):10,} parameters, step {run.checkpoint}')

# %% [markdown]
# ## Translations
#
# Both models were trained on sentences like these three. The last lines are the scores of 200 test sentences; "exact
# match" is the share of sentences that equal the reference.

# %%
sentences = ['Friday, August 25, 1922', 'Dec 28, 2046 and 17 Egyptian pounds', '8 months ago']
for sentence in sentences:
    print(sentence)
    for name, run in runs.items():
        print(f'    {name:12} {run.translate([sentence])[0].text}')

pairs = runs['Transformer'].data().pairs('test')[:200]
sources, references = zip(*pairs, strict=True)
for name, run in runs.items():
    outputs = run.translate(sources, allyouneed.search_options(run.config, method='greedy'))
    scores = corpus_scores([output.text for output in outputs], references)
    print(f'{name:12} exact match {100 * scores["exact_match"]:.1f} %, BLEU {scores["bleu"]:.1f}')

# %% [markdown]
# ## Alignments
#
# With `forced`, both models compute the attention of the same translation, so the matrices have the same rows and
# columns. For the Transformer, the panels show the last layer: the mean over its heads, then each head.

# %%
def alignments(source, target):
    """Returns panels [panel, target, source], titles and axes for RNNsearch and the Transformer's last layer."""
    forced = {name: run.model.forced(source, target) for name, run in runs.items()}
    cross = {name: run.model.attention(forced[name])['cross'] for name, run in runs.items()}
    last = cross['Transformer'][-1]
    panels = np.concatenate([cross['RNNsearch'][0], last.mean(axis=0)[None], last])
    titles = ['RNNsearch', 'Transformer, mean', *(f'Transformer, head {1 + h}' for h in range(len(last)))]
    return panels, titles, runs['RNNsearch'].model.axes(forced['RNNsearch'])['cross']


panels, titles, tokens = alignments('Friday, August 25, 1922', 'vendredi 25 août 1922')
allyouneed.attention_figure(panels, *tokens, titles)

# %% [markdown]
# In both models:
#
# - *vendredi* attends to *Friday*, and most digits attend to the same digit: dark squares on a diagonal.
# - *août* leaves the diagonal: in English the month comes before the day, in French after it. The models have learned
#   this order from the sentences only.
#
# A sentence with two parts:

# %%
panels, titles, tokens = alignments('Dec 28, 2046 and 17 Egyptian pounds', '28 déc. 2046 et 17 livres égyptiennes')
allyouneed.attention_figure(panels, *tokens, titles)

# %% [markdown]
# English has *Egyptian pounds*, French *livres égyptiennes*, so the order of the two words changes. An alignment shows
# *where* a decoder attends, but not *which* information it takes from there. In RNNsearch, $h_j$ is not a word but a
# summary of the sentence around word $j$, made by two recurrent networks. The Transformer's encoder mixes positions,
# too. So a word can be translated correctly although its row is darkest at a neighbouring word.
#
# ## Statistics
#
# The next cell measures 60 test sentences and their references, for each head. The first figure is the share of written
# digits whose largest weight is on the same digit. The second one is how widely attention is spread: the mean entropy
# of the rows, in nats, which is 0 if all weight is on one key.

# %%
for name, run in runs.items():
    same, digits, entropy, rows = 0, 0, 0, 0
    for source, target in pairs[:60]:
        forced = run.model.forced(source, target)
        last = run.model.attention(forced)['cross'][-1]                            # [head, target, source]
        target_tokens, source_tokens = (np.array(names) for names in run.model.axes(forced)['cross'])
        is_digit = np.char.isdigit(target_tokens)
        same += (source_tokens[last.argmax(axis=-1)] == target_tokens)[:, is_digit].sum(axis=-1)
        digits += is_digit.sum()
        entropy -= (last * np.log(np.maximum(last, 1e-12))).sum(axis=(-1, -2))
        rows += len(target_tokens)
    print(f'{name:12} same digit, in % of {digits}: {np.round(100 * same / max(digits, 1))}   '
          f'entropy: {np.round(entropy / rows, 2)}')

# %% [markdown]
# Not all digits can be copied (1 PM is 13 in French), and the state of a neighbouring token also has information about
# a digit.
#
# ## Why the Transformer uses the dot product
#
# Section 3.2.1 of the paper gives the reason. In theory, both scores have similar cost. But dot products are one matrix
# multiplication, while additive scores need a hidden layer for every *pair* of a query and a key: $n \times m \times d$
# numbers instead of $n \times m$. For wide vectors, unscaled dot products were worse than additive scores, so the paper
# divides by $\sqrt{d_k}$. The figure shows the standard deviation of the three scores over the width, for queries and
# keys of variance 1, and for weights $v$ of variance $1 / d_k$, as in a new model:

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
# Unscaled dot products grow with $\sqrt{d_k}$, and then the softmax is nearly one-hot.
# [`attention_by_hand`](attention_by_hand.ipynb) shows how small its gradient is then. Additive scores do not grow,
# because each tanh is bounded and $v$ has variance $1 / d_k$. Scaled dot products do not grow either, and cost less.
#
# `--config.model.score=additive` uses additive scores in a Transformer.
# [`compare_runs`](compare_runs.ipynb) compares all score functions.
