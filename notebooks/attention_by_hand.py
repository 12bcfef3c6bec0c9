# %% [markdown]
# # Attention by hand
#
# From one dot product to multi-head attention, in the order of the equations of
# [*Attention Is All You Need*](https://arxiv.org/abs/1706.03762). Everything is computed twice: by the functions of
# `model/`, which the trained models use, and by a few lines of NumPy. Each cell asserts that the two results agree.
# Nothing is trained, and the whole notebook runs in seconds. Change a number and see what happens.
#
# Shapes: $n$ queries, $m$ keys, width $d_k$ of queries and keys, width $d_v$ of values.
#
# The next cell installs the project where it is missing, for example on Colab. Otherwise it does nothing.

# %%
import importlib.util
import os
import subprocess
import sys

if not importlib.util.find_spec('analysis'):
    address = os.environ.get('REPOSITORY') or input('clone the project from: ')
    subprocess.run(['git', 'clone', '--quiet', address, 'allyouneed'], check=True)
    subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--editable', './allyouneed'], check=True)
    sys.path.insert(0, os.path.abspath('allyouneed'))
    os.chdir('allyouneed')

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import allyouneed
from analysis.pictures import positions_figure
from model.attention import (
    MultiHeadAttention,
    additive_scores,
    attention,
    attention_pooling,
    basic_self_attention,
    dot_scores,
    general_scores,
    masked_softmax,
    scaled_dot_product_attention,
    scaled_dot_scores,
)
from model.positional import sinusoids
from model.relation import combine_masks, look_ahead_mask, padding_mask

# %matplotlib inline
plt.rcParams['figure.dpi'] = 70
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def agree(ours, by_hand):
    np.testing.assert_allclose(ours, by_hand, atol=1e-5)


# %% [markdown]
# The functions of `model/` process many sentences and many heads at a time: queries are `[batch, target, heads, d_k]`,
# scores and weights are `[batch, heads, target, source]`. For one sentence and one head we add axes of length 1 and
# remove them again.

# %%
def one_head(x):                        # [length, width] -> [batch 1, length, heads 1, width]
    return jnp.asarray(x)[None, :, None]


# %% [markdown]
# ## 1. A score measures how well a query matches a key
#
# The simplest score is the dot product. It is large if two vectors point in the same direction, 0 if they are at right
# angles, and negative if they point in opposite directions.
#
# $$\mathrm{score}(q, k) = q \cdot k$$

# %%
compass = {'east': (1, 0), 'north-east': (0.7, 0.7), 'north': (0, 1), 'west': (-1, 0)}
keys = np.array([*compass.values()], np.float32)
query = np.array([[1, 0.2]], np.float32)            # mostly east, a little north

scores = dot_scores(one_head(query), one_head(keys))[0, 0]
agree(scores, query @ keys.T)
{name: f'{score:.2f}' for name, score in zip(compass, scores[0], strict=True)}

# %% [markdown]
# ## 2. A softmax turns scores into weights, and pooling is a weighted mean
#
# $$\alpha_i = \frac{\exp(\mathrm{score}(q, k_i))}{\sum_j \exp(\mathrm{score}(q, k_j))}
# \qquad A(q, D) = \sum_i \alpha_i\, v_i \qquad D = \{(k_1, v_1), \dots, (k_m, v_m)\}$$
#
# The weights are positive and sum to 1, so the result is the *expectation* of the value under $\alpha$. It is like
# looking up a word that a dictionary does not contain exactly, and getting a mixture of similar entries.

# %%
def softmax(x):
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


values = np.array([[10], [20], [30], [40]], np.float32)
weights = masked_softmax(dot_scores(one_head(query), one_head(keys)))
output = attention_pooling(weights, one_head(values))[0, :, 0]

agree(weights[0, 0], softmax(query @ keys.T))
agree(output, softmax(query @ keys.T) @ values)
print('weights', np.round(np.asarray(weights[0, 0, 0]), 2), ' output', np.round(output[0], 1))

# %% [markdown]
# If we multiply the query by a large number, the mixture becomes sharper. In the limit the weights are *one-hot*, and
# attention is a table look-up: the query is nearest to `east`, and the output is the value of `east`. If we multiply
# the query by 0, all keys have the same weight, and the output is the plain mean, 25.

# %%
sizes = 0, 1, 5, 100
output, weights = attention(one_head(np.concatenate([query * size for size in sizes])), one_head(keys),
                            one_head(values), score=dot_scores)
print('outputs:', {size: f'{value:.1f}' for size, value in zip(sizes, output[0, :, 0, 0], strict=True)})
np.testing.assert_allclose(output[0, 0, 0, 0], 25)
np.testing.assert_allclose(output[0, -1, 0, 0], 10, atol=1e-3)
allyouneed.attention_figure(np.asarray(weights[0]), [f'query x {size}' for size in sizes], [*compass], ['weights'])

# %% [markdown]
# ## 3. Self-attention without parameters
#
# In self-attention, a sentence attends to itself: the vector of each word is query, key and value at once.
#
# $$w_{ij} = x_i \cdot x_j \qquad W = \mathrm{softmax}_j(w) \qquad y_i = \sum_j W_{ij}\, x_j$$
#
# Our vectors are random, one for each word of the vocabulary. The picture shows two things. First, every word here
# attends most to itself (*the* equally to both of its positions). The product of a vector with itself is its squared
# length, and the products of different random vectors are usually smaller. But a longer vector could get more weight.
# Second, the two rows of *the* are equal although their positions differ: **attention does not depend on the position
# of a word**. Section 8 adds positions.

# %%
sentence = ['the', 'cat', 'sat', 'on', 'the', 'mat']
vocabulary = {word: normal(8) for word in dict.fromkeys(sentence)}
x = np.stack([vocabulary[word] for word in sentence])      # [n, d]

y = basic_self_attention(jnp.asarray(x)[None])[0]
weights = softmax(x @ x.T)
agree(y, weights @ x)
agree(y[0], y[4])                                          # both positions of 'the'
allyouneed.attention_figure(weights[None], sentence, sentence, ['self-attention of x'])

# %% [markdown]
# ## 4. Queries, keys and values
#
# Three matrices compute three vectors for each word. The query of a word is compared with the keys of all words, and
# the output is a weighted mean of the values:
#
# $$Q = X W_q \qquad K = X' W_k \qquad V = X' W_v$$
#
# In self-attention $X = X'$. In cross-attention $X$ comes from the decoder and $X'$ from the encoder. Only the widths
# of queries and keys must be equal, because we multiply them. The paper scales this product (equation 1):
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$
#
# In three lines of NumPy, for sequences of different lengths:

# %%
def attention_by_hand(query, key, value):
    weights = softmax(query @ key.T / np.sqrt(query.shape[-1]))
    return weights @ value, weights


inputs, memory = normal(3, 12), normal(5, 20)              # X [n, 12] and X' [m, 20]
query, key, value = inputs @ normal(12, 4), memory @ normal(20, 4), memory @ normal(20, 7)

output = scaled_dot_product_attention(one_head(query), one_head(key), one_head(value))[0, :, 0]
agree(output, attention_by_hand(query, key, value)[0])
print(f'{query.shape=} {key.shape=} {value.shape=} -> {output.shape}')

# %% [markdown]
# Two examples to compute with a pencil, with $d_k = 16$ and so $\sqrt{d_k} = 4$: the raw scores $(6, 4)$ become
# $(1.5, 1)$ after scaling, and the weights are $(0.62, 0.38)$. The raw scores $(3, 8)$ become $(0.75, 2)$, and the
# weights are $(0.22, 0.78)$.

# %%
for raw, scaled, expected in [((6, 4), (1.5, 1.0), (0.62, 0.38)), ((3, 8), (0.75, 2.0), (0.22, 0.78))]:
    query, key = np.ones((1, 16), np.float32), np.zeros((2, 16), np.float32)
    key[:, 0] = raw                                        # so that q . k is the raw score
    scores = scaled_dot_scores(one_head(query), one_head(key))
    weights = np.round(np.asarray(masked_softmax(scores)[0, 0, 0]), 2)
    agree(scores[0, 0, 0], scaled)
    agree(weights, expected)
    print(raw, '->', scaled, '->', weights)

# %% [markdown]
# There are other score functions. `config.model.score` chooses one of them:
#
# $$\text{dot } q \cdot k \qquad \text{general } q^\top W k \qquad
# \text{additive } v^\top \tanh(W_s s + W_h h)$$
#
# For the additive score, the projections of queries and keys are $W_s$ and $W_h$, so `q` and `k` below are $W_s s$ and
# $W_h h$.

# %%
q, k, W, v = normal(3, 4), normal(5, 4), normal(4, 4), normal(4)

agree(dot_scores(one_head(q), one_head(k))[0, 0], q @ k.T)
agree(general_scores(one_head(q), one_head(k), jnp.asarray(W)[None])[0, 0], q @ W @ k.T)
agree(additive_scores(one_head(q), one_head(k), jnp.asarray(v)[None])[0, 0],
      np.tanh(q[:, None] + k[None]) @ v)

# %% [markdown]
# ## 5. Without the scaling
#
# If the components of $q$ and $k$ have mean 0 and variance 1, then $q \cdot k$ has variance $d_k$. So scores grow with
# the width of a head. With large scores, the softmax is nearly one-hot, its gradient is nearly zero, and the model does
# not learn. Divided by $\sqrt{d_k}$, the scores have variance 1 at any width. Each row below is one query with eight
# random keys.

# %%
widths = 4, 32, 256, 2048
with_scaling, without = np.zeros((2, len(widths), 8))
for row, d_k in enumerate(widths):
    query, key = one_head(normal(1, d_k)), one_head(normal(8, d_k))
    with_scaling[row] = masked_softmax(scaled_dot_scores(query, key))[0, 0, 0]
    without[row] = masked_softmax(dot_scores(query, key))[0, 0, 0]
allyouneed.attention_figure(np.stack([with_scaling, without]), [f'd_k = {d_k}' for d_k in widths],
                            [f'key {1 + key}' for key in range(8)], ['q.k / sqrt(d_k)', 'q.k'])

# %% [markdown]
# The next cell takes the mean over 500 queries of the largest of the eight weights, and of the softmax's gradient,
# $\partial \alpha_i / \partial \mathrm{score}_i = \alpha_i (1 - \alpha_i)$.

# %%
largest, gradient = np.zeros((2, len(widths))), np.zeros((2, len(widths)))
for column, d_k in enumerate(widths):
    query, key = normal(500, d_k), normal(500, 8, d_k)
    scores = np.einsum('nk,nmk->nm', query, key)
    np.testing.assert_allclose(scores.var() / d_k, 1, atol=0.2)
    for row, divisor in enumerate((np.sqrt(d_k), 1)):
        weights = softmax(scores / divisor)
        largest[row, column], gradient[row, column] = weights.max(-1).mean(), (weights * (1 - weights)).mean()

figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), layout='constrained')
for axes, curves, label in zip(panels, (largest, gradient), ('largest weight', 'mean gradient'), strict=True):
    axes.semilogx(widths, curves[0], 'o-', base=2, label='q.k / sqrt(d_k)')
    axes.semilogx(widths, curves[1], 's--', base=2, label='q.k')
    axes.set(xlabel='d_k', ylabel=label, ylim=(0, None))
panels[0].legend()
plt.show()

# %% [markdown]
# ## 6. Masks
#
# $$\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V
# \qquad M_{ij} = \begin{cases} 0 & \text{query } i \text{ may attend to key } j \\ -\infty & \text{otherwise}
# \end{cases}$$
#
# The decoder must not look ahead. In training, all target positions are computed at once, and a position that sees the
# next word would copy it. Position $i$ sees the positions $j \le i$, including itself: its input is the word *before*
# the one that it predicts. The second mask hides padding, which fills up the shorter sentences of a batch.

# %%
visible = jnp.array([[True] * 5 + [False]])                # the last token is padding
positions = jnp.arange(6)[None]
masks = {'no mask': None, 'look-ahead': look_ahead_mask(positions, positions)}
masks['look-ahead and padding'] = combine_masks(masks['look-ahead'], padding_mask(visible))
query, key, value = normal(6, 8), normal(6, 8), normal(6, 8)
scores = scaled_dot_scores(one_head(query), one_head(key))
weights = {name: np.asarray(masked_softmax(scores, mask)[0, 0]) for name, mask in masks.items()}

by_hand = query @ key.T / np.sqrt(8) + np.where(np.tri(6), 0, -np.inf)
agree(weights['look-ahead'], softmax(by_hand))
allyouneed.attention_figure(np.stack([*weights.values()]), sentence, sentence, [*weights])

# %% [markdown]
# Without the mask, information about later words leaks. We change the last word and print which outputs change. With
# the mask, only the last output changes. Without the mask, all outputs change.

# %%
changed_key, changed_value = key.copy(), value.copy()
changed_key[-1], changed_value[-1] = normal(8), normal(8)


def outputs(key, value, mask):
    return np.asarray(scaled_dot_product_attention(one_head(query), one_head(key), one_head(value), mask))[0, :, 0]


for name in 'look-ahead', 'no mask':
    change = np.abs(outputs(changed_key, changed_value, masks[name]) - outputs(key, value, masks[name])).max(-1)
    print(f'{name}: outputs that change', np.flatnonzero(change > 1e-6).tolist())
    assert (change[:-1] > 1e-6).all() == (name == 'no mask') and change[-1] > 1e-6

# %% [markdown]
# If a query may not attend to any key, its output is zero. The formula would give $0 / 0$.

# %%
nowhere = jnp.zeros((1, 1, 6, 6), bool)
assert (outputs(key, value, nowhere) == 0).all()

# %% [markdown]
# ## 7. Many heads
#
# One softmax gives one mixture. Several heads attend to several positions at once, with separate projections:
#
# $$\mathrm{MultiHead}(X, X') = \mathrm{Concat}(\mathrm{head}_1, \dots, \mathrm{head}_h)\, W_o \qquad
# \mathrm{head}_i = \mathrm{Attention}(X W_q^i,\; X' W_k^i,\; X' W_v^i)$$
#
# With $d_k = d_v = d / h$, all heads together have as many parameters as a single head of full width: $4 d^2$.

# %%
heads, d = 4, 16
module = MultiHeadAttention(num_heads=heads, d_model=d, d_k=d // heads, d_v=d // heads)
x = normal(6, d)
params = nn.unbox(module.init(jax.random.key(0), x[None], x[None]))['params']  # without the names of the axes
output, collections = module.apply({'params': params}, x[None], x[None], mutable=['attention'])
weights = np.asarray(collections['attention']['weights'][0][0])        # [heads, target, source]

W_q, W_k, W_v, W_o = (np.asarray(params[name]['kernel']) for name in ('query', 'key', 'value', 'output'))
by_hand = [attention_by_hand(x @ W_q[:, h], x @ W_k[:, h], x @ W_v[:, h]) for h in range(heads)]
agree(output[0], np.concatenate([head for head, _ in by_hand], axis=-1) @ W_o.reshape(d, d))
agree(weights, [head_weights for _, head_weights in by_hand])
assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 4 * d * d
allyouneed.attention_figure(weights, sentence, sentence, [f'head {1 + h}' for h in range(heads)])

# %% [markdown]
# ## 8. Positions
#
# Attention is a sum over keys, and a sum does not depend on the order of its terms. If we shuffle the words, the
# outputs are shuffled in the same way and are otherwise unchanged: self-attention is *equivariant* to permutations. (It
# is often called invariant, but only the mean of its outputs is invariant.) A language model needs the order of the
# words.

# %%
def attend(x):
    return np.asarray(module.apply({'params': params}, x[None], x[None]))[0]


order = rng.permutation(6)
agree(attend(x[order]), attend(x)[order])

# %% [markdown]
# So we add the position to the vector. The paper adds sines and cosines whose wavelengths grow geometrically, from
# $2\pi$ to nearly $10000 \cdot 2\pi$:
#
# $$PE_{i, 2j} = \sin\!\left(\frac{i}{10000^{2j/d}}\right) \qquad
# PE_{i, 2j+1} = \cos\!\left(\frac{i}{10000^{2j/d}}\right)$$
#
# The angles are in radians. (Tables with $\sin 1 = 0.02$ use degrees by mistake.) For $d = 4$ and the positions 0 to 3:

# %%
encoding = np.asarray(sinusoids(jnp.arange(4), 4))
by_hand = [[f(i / 10000 ** (2 * j / 4)) for j in range(2) for f in (np.sin, np.cos)] for i in range(4)]
agree(encoding, by_hand)
agree(np.round(encoding, 2), [[0, 1, 0, 1], [0.84, 0.54, 0.01, 1.00], [0.91, -0.42, 0.02, 1.00],
                              [0.14, -0.99, 0.03, 1.00]])
embedded = np.array([0.41, 0.08, 0.51, 0.87]) + encoding[3]            # a word at position 3
agree(np.round(embedded, 2), [0.55, -0.91, 0.54, 1.87])
np.round(encoding, 2)

# %%
positions_figure(length=100, d_model=100)

# %% [markdown]
# With positions, equal words at different positions have different vectors. The matrices below are attention weights of
# *the cat sat on the mat* as in section 3, but scaled, without and with positions. Without positions, the rows of both
# *the* are equal; with positions they differ, and a shuffled sentence is a different sentence.

# %%
x = np.stack([vocabulary[word] for word in sentence])
placed = x + np.asarray(sinusoids(jnp.arange(6), 8))
without, with_positions = softmax(x @ x.T / np.sqrt(8)), softmax(placed @ placed.T / np.sqrt(8))
agree(without[0], without[4])
assert np.abs(with_positions[0] - with_positions[4]).max() > 0.05

module = MultiHeadAttention(num_heads=2, d_model=8, d_k=4, d_v=4)
params = nn.unbox(module.init(jax.random.key(0), x[None], x[None]))['params']  # without the names of the axes
reordered = x[order] + np.asarray(sinusoids(jnp.arange(6), 8))         # the same words at other positions
assert np.abs(attend(reordered) - attend(placed)[order]).max() > 0.05
allyouneed.attention_figure(np.stack([without, with_positions]), sentence, sentence,
                            ['without positions', 'with positions'])

# %% [markdown]
# Why sines? A shift by $k$ positions rotates each pair of numbers by an angle that does not depend on the position:
#
# $$PE_{i+k} = M_k\, PE_i \qquad M_k = \text{blocks} \begin{pmatrix} \cos \omega k & \sin \omega k \\
# -\sin \omega k & \cos \omega k \end{pmatrix} \qquad \omega = 10000^{-2j/d}$$
#
# So a matrix $W_q$ can learn to attend "three words back" from any position. It follows that $PE_i \cdot PE_j$ depends
# only on $i - j$: the values in the picture are equal along each diagonal. They first decrease with the distance.

# %%
d, k = 64, 3
PE = np.asarray(sinusoids(jnp.arange(40), d))
omega = 10000.0 ** (-np.arange(0, d, 2) / d)
M = np.zeros((d, d))
for j, angle in enumerate(omega * k):
    M[2 * j:2 * j + 2, 2 * j:2 * j + 2] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
agree(PE[k:], PE[:-k] @ M.T)

products = PE @ PE.T
for offset in range(40):
    assert np.ptp(np.diagonal(products, offset)) < 1e-4
figure, axes = plt.subplots(figsize=(3.6, 3))
figure.colorbar(axes.imshow(products, cmap='Blues'), label='PE_i . PE_j')
axes.set(xlabel='position j', ylabel='position i')
plt.show()

# %% [markdown]
# ## Next steps
#
# The Transformer of `model/transformer.py` combines all these parts, adds a feed-forward network after each attention,
# and stacks several layers. [`open_a_run`](open_a_run.ipynb) shows what the heads of a trained model attend to.
# [`additive_vs_dot_product`](additive_vs_dot_product.ipynb) compares the Transformer with RNNsearch, the attention
# model of 2015.
