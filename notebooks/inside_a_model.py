# %% [markdown]
# # Inside a model
#
# Which parts of a model compute what? This notebook reads the values inside the demo model, replaces values, and
# removes the heads that the model does not need. [Reading and editing activations](../docs/inside.md) describes all
# functions.
#
# The model is the one of `make demo`, which translates dates, amounts, quantities and lists from English to French.
# To open another run: `RUN=runs/mine jupyter lab`. If there is no run in `runs/demo`, a short one is trained now. The
# outputs below, and the explanations of the outputs, are from the complete demo.

# %%
import matplotlib.pyplot as plt
import numpy as np

import allyouneed
from analysis.alignments import align, as_pharaoh, best_head
from analysis.examples import example_run
from analysis.heads import GatedHeads, pruning_curve, ranked, shuffled
from analysis.logit_lens import logit_lens
from analysis.patching import attribution_map, estimate_error, patching_map
from analysis.roles import roles

# %matplotlib inline
plt.rcParams['figure.dpi'] = 70
run = allyouneed.load(example_run('demo', 'RUN'))
pairs = run.data().pairs('test')[:50]

# %% [markdown]
# ## Every value has a name
#
# The name of a value is its *place*. A size `None` depends on the text. The next cell prints the places of the first
# layer of the decoder.

# %%
for name, sizes in run.places().items():
    if name.startswith('decoder/layers_0'):
        print(f'{name:45}', ', '.join(f'{axis} {size}' for axis, size in sizes.items() if axis != 'batch'))

# %% [markdown]
# ## Read values
#
# `inspect` returns an array with named axes for each place, without padding. Here the model reads a source and a given
# translation. This model has post-norm: after each sublayer, the residual stream is the layer norm of the sum of the
# sublayer's input and output. The figure shows the length (norm) of the feed-forward layers' outputs at each token of
# the translation.

# %%
source, target = 'Friday, August 25, 1922', 'vendredi 25 août 1922'
[values] = run.inspect([(source, target)], ['decoder/layers_*/feed_forward', '*/cross_attention/weights'])
outputs = values.stacked('decoder/layers_*/feed_forward')
print(outputs.axes, outputs.values.shape)

figure, axes = plt.subplots(figsize=(7, 3), layout='constrained')
for layer, norms in enumerate(np.linalg.norm(outputs.values, axis=-1), 1):
    axes.plot(norms, marker='.', label=f'layer {layer}')
axes.set_xticks(range(outputs.values.shape[1]), outputs.labels['position'])
axes.set(xlabel='input token of the decoder', ylabel='norm of the output', ylim=(0, None))
axes.legend()
plt.show()

# %% [markdown]
# ## Word alignments
#
# A decoder attends to the source words that it translates. `best_head` reads word alignments from each head of
# cross-attention, compares them with the known alignments of the built-in corpus, and returns the head with the
# fewest errors. The figure shows the weights of this head. Row $t$ are the weights of the step that predicts token
# $t$.

# %%
head = best_head(run)
[output] = run.forced([(source, target)])
panel = values.stacked('*/cross_attention/weights').values[head.layer]
panel = panel.mean(axis=0) if head.head is None else panel[head.head]
print(f'{head}: {as_pharaoh(align(run.model, output, head))}')
allyouneed.attention_figure(panel[None], *run.model.axes(output)['cross'], [str(head)])

# %% [markdown]
# ## What does the model predict after each layer?
#
# The logit lens applies the output projection to the residual stream after each layer. Each row is a token of the
# translation. The columns have the most probable token after each layer, and the probability of the correct token.
# `input` is the embedding of the previous token, so its prediction is the previous token. The first layer does not
# predict the next token either. The second layer does most of the work.

# %%
print(logit_lens(run, (source, target)))

# %% [markdown]
# ## Where is the information?
#
# Reading values does not show which values the model uses. *Activation patching* shows it. We take two sentences that
# differ in one digit. The model scores the translation of the first sentence while it reads the second one. Then we
# replace one value at a time by the value of the first sentence. If this value carries the digit, the log-probability
# recovers. An effect of 1 is complete recovery.

# %%
other = 'Friday, August 26, 1922'
places = ['encoder/input', 'encoder/layers_*[0-9]']
measured = patching_map(run, source, other, target, places)


def show_map(found, title):
    effects = np.round(found.effects, 2) + 0.0                       # + 0.0 turns -0.0 into 0.0
    figure, axes = plt.subplots(figsize=(8, 2.2), layout='constrained')
    picture = axes.imshow(effects, cmap='RdBu', vmin=-1, vmax=1, aspect='auto')
    axes.set_xticks(range(len(found.pieces)), found.pieces)
    axes.set_yticks(range(len(found.nodes)), [node.place for node in found.nodes])
    axes.set(xlabel=f'token of {other!r}', ylabel='place', title=title)
    for (row, column), effect in np.ndenumerate(effects):
        axes.text(column, row, f'{effect:.2f}', ha='center', va='center', color='white' if effect > 0.6 else 'black')
    figure.colorbar(picture, label='effect')


show_map(measured, 'effect of each patch')

# %% [markdown]
# At the input, only the token of the digit matters. The other columns stay near 0 in all layers: the encoder moves
# little of this information to other tokens, and the decoder reads the digit where it stands.
#
# The map needs a forward pass for each patch. The gradient estimates all patches at once. The estimate is exact only
# for a linear function. Here it finds the correct token, but it is too small, most of all at the input:

# %%
estimated = attribution_map(run, source, other, target, places)
show_map(estimated, 'the same, estimated by the gradient')
print(estimate_error(estimated, measured))

# %% [markdown]
# ## What do the heads attend to?
#
# `roles` measures the mean weight of each head on some kinds of keys over a corpus. These are the heads with the
# largest weights on the previous token, on digits, and on the end token:

# %%
found = roles(run, pairs)
for role in 'previous', 'digit', 'end':
    for place, number, weight in found.ranked(role)[:2]:
        print(f'{role:9} {place:42} head {number}   {100 * weight:5.1f} %')

# %% [markdown]
# ## Change the model
#
# An edit changes the values at a place, in teacher forcing and in every search. `edited` returns another run, and the
# first run does not change. Edits with fixed weights show what the attention of a layer is used for:

# %%
edits = {
    'no edit': [],
    'layer 1: uniform cross-attention': [{'edit': 'freeze', 'place': 'decoder/layers_0/cross_attention/weights',
                                          'by': 'uniform'}],
    'no self-attention in the decoder': [{'edit': 'zero', 'place': 'decoder/*/self_attention/heads'}],
    'the encoder of another sentence': [{'edit': 'replace', 'place': 'encoder', 'by': 'Monday, March 17, 1980'}],
}
for name, listed in edits.items():
    print(f'{name:34}', run.edited(listed).translate([source])[0].text)

# %% [markdown]
# ## Remove heads
#
# How many heads does the model need? The importance of a head is the mean absolute gradient of the loss with respect to
# a gate that multiplies the output of the head ([Michel et al. 2019](https://arxiv.org/abs/1905.10650)). We remove the
# heads from the least important one to the most important one, and, as a control, in two random orders. Each point is
# the BLEU of 50 test sentences.

# %%
heads, greedy = GatedHeads(run), allyouneed.search_options(run.config, method='greedy')
importance = heads.importance(run.data().pairs('validation')[:100])
orders = {'by importance': ranked(importance)} | {f'at random, seed {seed}': shuffled(heads, seed) for seed in (0, 1)}
figure, axes = plt.subplots(figsize=(6, 3.5), layout='constrained')
for name, order in orders.items():
    curve = pruning_curve(heads, pairs, order, greedy)
    axes.plot(*zip(*curve, strict=True), marker='.', label=name, linestyle='-' if name == 'by importance' else '--')
axes.set(xlabel='removed heads', ylabel='BLEU', ylim=(-3, 103))
axes.legend()
plt.show()

# %% [markdown]
# Without the three least important of 24 heads, the BLEU is almost the same. Without three random heads, it is lower
# by a quarter.
#
# The figure is a property of one model and of one corpus: the model was trained with all heads. `train.edits` removes
# or freezes a head from the start of a training. The model then learns without this head, which shows whether a task
# needs it. `track.places` logs how the attention changes during a training.
