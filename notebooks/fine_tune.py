# %% [markdown]
# # Fine-tune a pretrained model
#
# A model as others hand it out, a folder with `config.json`, `model.safetensors` and a tokenizer, becomes a run; the
# run learns from other text; and we look at what that changed, head by head.
#
# `PRETRAINED=FOLDER jupyter lab` takes a GPT-2, Llama, Mistral or Qwen2 of yours. Without one we make a tiny Llama now:
# two layers that have read the source code of Python for minutes, written in the form that Hugging Face gives models.
# `allyouneed.train` is the loop of `train.py`: it draws the curve while it trains, and after an interrupt the same call
# continues.

# %%
import os
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import allyouneed
from analysis.pictures import attention_figure, chosen, heads_figure
from configs import fine_tune, llama_tiny
from interchange.export import export
from model import parameter_count
from training.imported import import_weights

# %matplotlib inline
plt.rcParams['figure.dpi'] = 70
steps = int(os.environ.get('STEPS', '300'))                         # of fine-tuning
folder = Path(tempfile.mkdtemp(prefix='fine_tune-'))


def tiny_llama():
    config = llama_tiny.get_config()
    config.model.update(num_layers=2, d_model=64, d_ff=176)
    config.data.tokenizer.vocab_size = 1000
    config.optimizer.warmup = steps // 8
    config.train.steps, config.eval.every, config.checkpoint.every = 6 * steps, steps, 3 * steps
    allyouneed.train(config, folder / 'python')
    export(folder / 'python', folder / 'llama', to='huggingface')
    return folder / 'llama'


pretrained = Path(os.environ['PRETRAINED']) if os.environ.get('PRETRAINED') else tiny_llama()

# %% [markdown]
# ## What is in the folder
#
# `import_weights` makes a run directory of it, on which everything works that works on a run: `decode.py`, the
# explorer, `train.py`. (`allyouneed.load` opens the folder as it is, to look at it and to let it write.)

# %%
import_weights(pretrained, folder / 'imported')
before = allyouneed.load(folder / 'imported')
model = before.config.model
print(sorted(path.name for path in pretrained.iterdir()))
print(f'{before.config.task}, {parameter_count(before.model.params):,} parameters')
print(', '.join(f'{name} {model[name]}' for name in (
    'num_layers', 'd_model', 'num_heads', 'num_key_value_heads', 'norm_function', 'feed_forward', 'position')))

# %% [markdown]
# ## Train it on other text
#
# The text is this project's documentation: plain English, where the tiny model has seen code. The recipe `fine_tune`
# takes the model from the run, and a learning rate that suits a trained model.

# %%
pages = sorted([*Path('docs').glob('*.md'), Path('README.md'), Path('CONTRIBUTING.md')])
text = '\n'.join(page.read_text(encoding='utf-8') for page in pages)
(folder / 'documentation.txt').write_text(text, encoding='utf-8')


def recipe(peak, **train):
    config = fine_tune.get_config(str(folder / 'imported'))
    config.data.update(source='files', file=str(folder / 'documentation.txt'), documents='file', packing='contiguous',
                       context=128)
    config.batch.rows = 16
    config.optimizer.update(peak=peak, warmup=steps // 8)
    config.train.update(steps=steps, log_every=max(1, steps // 20), **train)
    config.eval.update(every=max(1, steps // 5), metric='loss')
    return config


after = allyouneed.train(recipe(peak=1e-3), folder / 'tuned')

# %% [markdown]
# ## What it knows now
#
# Bits a character of a piece of documentation that was held out of the training, and of a piece of Python, before and
# after. $-\frac{1}{n} \log_2 p(\text{text})$, where $n$ is its number of characters: `forced` gives $\log p$.

# %%
samples = {'documentation': text[-1500:], 'Python': (allyouneed.HOME / 'inference/search.py').read_text()[:1500]}


def bits(run):
    found = {}
    for name, sample in samples.items():
        lines = [line for line in sample.splitlines() if line.strip()]
        log_probs = [output.hypotheses[0].log_prob for output in run.forced(lines)]
        found[name] = -sum(log_probs) / np.log(2) / sum(map(len, lines))
    return found


for name, run in ('before', before), ('after', after):
    print(f'{name:8}', '   '.join(f'{what} {value:.2f}' for what, value in bits(run).items()))

# %% [markdown]
# ## Which heads changed?
#
# A head $i$ of attention is its $W_q^i$ and $W_o^i$ (and its $W_k^i$, $W_v^i$, which heads of a group share). How far
# has training moved them, relative to their size? (A language model is one stack of layers, by the name of encoder.)
#
# $$\frac{\lVert W' - W \rVert}{\lVert W \rVert}$$

# %%
def change_by_head(old, new):
    rows = []
    for layer in range(model.num_layers):
        was, now = (run.model.params['encoder'][f'layers_{layer}']['self_attention'] for run in (old, new))

        def per_head(name, axis, was=was, now=now):
            old, new = (np.moveaxis(np.asarray(each[name]['kernel']), axis, 0) for each in (was, now))
            return np.array([(np.sum((b - a) ** 2), np.sum(a ** 2)) for a, b in zip(old, new, strict=True)])

        moved, size = (per_head('query', 1) + per_head('output', 0)).T
        rows.append(np.sqrt(moved / size))
    return np.array(rows)


heads_figure({'encoder': 100 * change_by_head(before, after)}, 'how far heads moved, percent of their size')

# %% [markdown]
# ## Where the most changed head looks
#
# The same line before and after. Each row is a position that writes the next token, each column one that it looks at.

# %%
line = 'The same command resumes the run.'
changes = change_by_head(before, after)
layer, head = np.unravel_index(changes.argmax(), changes.shape)
panels = []
for run in before, after:
    [output] = run.forced([line])
    _, weights, _ = chosen(run.model.attention(output), f'encoder:{layer + 1}:{head + 1}')
    panels.append(weights[0])
attention_figure(np.array(panels), *run.model.axes(output)['encoder'],
                 [f'{when}: layer {layer + 1}, head {head + 1}' for when in ('before', 'after')])

# %% [markdown]
# ## With less: adapters of low rank
#
# LoRA ([Hu et al. 2021](https://arxiv.org/abs/2106.09685)) leaves every matrix as it is and trains a difference of low
# rank, $W + \frac{\alpha}{r} B A$: here of $W_q$ and $W_v$. It needs a higher learning rate. Whoever opens the run gets
# the sum, so that it is used as any other.

# %%
adapted = allyouneed.train(recipe(peak=1e-2, lora_rank=8), folder / 'adapted')
print('adapted ', '   '.join(f'{what} {value:.2f}' for what, value in bits(adapted).items()))
moved = jax.tree.leaves(jax.tree.map(lambda a, b: not np.array_equal(a, b), before.model.params, adapted.model.params))
print(f'{sum(moved)} of {len(moved)} matrices and vectors are other than before')
