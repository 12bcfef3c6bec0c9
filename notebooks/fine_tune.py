# %% [markdown]
# # Fine-tune a pretrained model
#
# In this notebook we import a pretrained model: a folder with `config.json`, `model.safetensors` and a tokenizer. We
# train it on other text, and look at what this changes, head by head.
#
# `PRETRAINED=FOLDER jupyter lab` uses your own GPT-2, Llama, Mistral or Qwen2. Otherwise we make a tiny Llama now: two
# layers, trained for a few minutes on Python's source code, and exported in the format of Hugging Face.
# `allyouneed.train` runs the loop of `train.py`. It draws the learning curve while it trains. After an interruption,
# the same call resumes.

# %%
import os
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import allyouneed
from analysis.pictures import chosen
from configs import fine_tune, llama_tiny
from model import parameter_count

# %matplotlib inline
plt.rcParams['figure.dpi'] = 70
steps = int(os.environ.get('STEPS', '300'))                         # steps of fine-tuning
folder = Path(tempfile.mkdtemp(prefix='fine_tune-'))


def tiny_llama():
    config = llama_tiny.get_config()
    config.model.update(num_layers=2, d_model=64, d_ff=176)
    config.data.tokenizer.vocab_size = 1000
    config.optimizer.warmup = steps // 8
    config.train.steps, config.eval.every, config.checkpoint.every = 6 * steps, steps, 3 * steps
    allyouneed.train(config, folder / 'python')
    allyouneed.export(folder / 'python', folder / 'llama', to='huggingface')
    return folder / 'llama'


pretrained = allyouneed.HOME / os.environ['PRETRAINED'] if os.environ.get('PRETRAINED') else tiny_llama()

# %% [markdown]
# ## Import the model
#
# `import_weights` makes a run directory from the folder, for `decode.py`, the explorer and `train.py`.
# (`allyouneed.load` also opens the folder itself, to inspect it and to generate text.)

# %%
allyouneed.import_weights(pretrained, folder / 'imported')
before = allyouneed.load(folder / 'imported')
model = before.config.model
print(sorted(path.name for path in pretrained.iterdir()))
print(f'{before.config.task}, {parameter_count(before.model.params):,} parameters')
print(', '.join(f'{name} {model[name]}' for name in (
    'num_layers', 'd_model', 'num_heads', 'num_key_value_heads', 'norm_function', 'feed_forward', 'position')))

# %% [markdown]
# ## Train it on other text
#
# The text is this project's documentation. It is English, while the tiny model was trained on code. The recipe
# `fine_tune` takes the model from the run, and has a learning rate that suits a trained model.

# %%
home = allyouneed.HOME
pages = sorted([*home.glob('docs/*.md'), home / 'README.md', home / 'CONTRIBUTING.md'])
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
# ## Before and after
#
# The next cell prints bits per character of the end of the documentation and of the beginning of a Python file, before
# and after: $-\frac{1}{n} \sum_i \log_2 p(\text{line}_i)$, where $n$ is the number of characters of the lines. `forced`
# returns $\log p$ of each line as a separate document. So each line also has an end token, and line breaks do not
# count.

# %%
samples = {'documentation': text[-1500:], 'Python': (allyouneed.HOME / 'inference/search.py').read_text()[:1500]}


def bits(run):
    result = {}
    for name, sample in samples.items():
        lines = [line for line in sample.splitlines() if line.strip()]
        log_probs = [output.hypotheses[0].log_prob for output in run.forced(lines)]
        result[name] = -sum(log_probs) / np.log(2) / sum(map(len, lines))
    return result


for name, run in ('before', before), ('after', after):
    print(f'{name:8}', '   '.join(f'{sample} {value:.2f}' for sample, value in bits(run).items()))

# %% [markdown]
# ## Which heads changed?
#
# The parameters of head $i$ are $W_q^i$ and $W_o^i$ (and $W_k^i$ and $W_v^i$, which heads of a group share). The
# picture shows how far training has moved $W_q^i$ and $W_o^i$, relative to their size. (A language model is one stack
# of layers; its name is `encoder`.)
#
# $$\frac{\lVert W' - W \rVert}{\lVert W \rVert}$$

# %%
def change_by_head(old, new):
    rows = []
    for layer in range(model.num_layers):
        start, end = (run.model.params['encoder'][f'layers_{layer}']['self_attention'] for run in (old, new))

        def per_head(name, axis, start=start, end=end):
            a, b = (np.moveaxis(np.asarray(params[name]['kernel']), axis, 0) for params in (start, end))
            return np.array([(np.sum((y - x) ** 2), np.sum(x ** 2)) for x, y in zip(a, b, strict=True)])

        moved, size = (per_head('query', 1) + per_head('output', 0)).T
        rows.append(np.sqrt(moved / size))
    return np.array(rows)


allyouneed.heads_figure({'encoder': 100 * change_by_head(before, after)}, 'how far heads moved, percent of their size')

# %% [markdown]
# ## Attention of the most changed head
#
# The attention for the same line before and after. Each row is a position that writes the next token (a query), and
# each column is a position that it attends to (a key).

# %%
line = 'The same command resumes the run.'
changes = change_by_head(before, after)
layer, head = np.unravel_index(changes.argmax(), changes.shape)
panels = []
for run in before, after:
    [output] = run.forced([line])
    _, weights, _ = chosen(run.model.attention(output), f'encoder:{layer + 1}:{head + 1}')
    panels.append(weights[0])
allyouneed.attention_figure(np.array(panels), *run.model.axes(output)['encoder'],
                            [f'{when}: layer {layer + 1}, head {head + 1}' for when in ('before', 'after')])

# %% [markdown]
# ## Fewer trained parameters: low-rank adapters
#
# LoRA ([Hu et al. 2021](https://arxiv.org/abs/2106.09685)) does not change the matrices, but trains low-rank
# differences, $W + \frac{\alpha}{r} A B$, here for $W_q$ and $W_v$. (The paper writes $B A$, because its matrices are
# transposed.) LoRA needs a higher learning rate. `allyouneed.load` returns the sums, so the run is used like any other
# run.

# %%
adapted = allyouneed.train(recipe(peak=1e-2, lora_rank=8), folder / 'adapted')
print('adapted ', '   '.join(f'{sample} {value:.2f}' for sample, value in bits(adapted).items()))
moved = jax.tree.leaves(jax.tree.map(lambda a, b: not np.array_equal(a, b), before.model.params, adapted.model.params))
print(f'{sum(moved)} of {len(moved)} matrices and vectors are other than before')
