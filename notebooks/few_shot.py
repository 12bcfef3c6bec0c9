# %% [markdown]
# # Few-shot prompts
#
# A language model can be asked to do a task by examples in its prompt, without any training (Brown et al. 2020,
# arXiv:2005.14165). The prompt consists of a few solved examples and a question, and the model continues it. There is
# no chat and no instruction: only text that looks like the training text.
#
# The models here are small, so do not expect much. This notebook shows how to measure whether the examples help. The
# model is a run of the recipe `configs/stdlib_lm.py`. It was trained on the source code of Python's standard library.
# To open another language model: `LM_RUN=runs/mine jupyter lab`. If there is no run in `runs/stdlib_lm`, a short one is
# trained now, in some minutes. The outputs below are from a run of 250 steps, which is far too short.

# %%
import numpy as np

import allyouneed
from analysis.examples import example_run

run = allyouneed.load(example_run('stdlib_lm', 'LM_RUN', steps=250))
print(f'{run.parameters:,} parameters, context of {run.config.data.context} tokens, step {run.checkpoint}')

# %% [markdown]
# ## A task
#
# The task is to close brackets in the right order. `prompt` writes a number of solved examples and a question, each on
# a line.

# %%
QUESTIONS = [('([', '])'), ('((', '))'), ('{(', ')}'), ('[{', '}]'), ('{{', '}}'), ('({', '})'), ('[(', ')]'),
             ('[[', ']]')]
ANSWERS = [answer for _, answer in QUESTIONS]


def prompt(question: str, count: int, rng: np.random.Generator, *, solved: bool = True) -> str:
    """Returns `count` examples and a question. If `solved` is False, the answers of the examples are exchanged."""
    others = [pair for pair in QUESTIONS if pair[0] != question]
    examples = [others[index] for index in rng.permutation(len(others))[:count]]
    answers = [answer for _, answer in examples]
    if not solved:
        answers = answers[1:] + answers[:1]
    lines = [f'{example}x{answer}' for (example, _), answer in zip(examples, answers, strict=True)]
    return '\n'.join([*lines, f'{question}x'])


print(prompt('[(', 3, np.random.default_rng(0)))

# %% [markdown]
# ## A continuation
#
# Greedy search writes the most probable continuation.

# %%
for count in 0, 3:
    text = prompt('[(', count, np.random.default_rng(0))
    [output] = run.generate([text], allyouneed.search_options(run.config, method='greedy', extra_length=4))
    print(f'{count} examples: {output.text!r}')

# %% [markdown]
# ## The score of each answer
#
# A continuation that starts with a space or a comment counts as wrong, even if the model prefers the right answer to
# all other answers. So we score every possible answer as a whole text, and count how often the right answer has the
# largest probability. With eight answers, guessing is right in 1 of 8 cases. The control has the same prompts, but the
# answers of the examples are exchanged. If the score of the control is as good, the model only uses the form of the
# examples.

# %%
def accuracy(count: int, *, solved: bool, seeds: int = 3) -> float:
    """Returns how often the right answer is the most probable answer."""
    prompts = [(prompt(question, count, np.random.default_rng(seed), solved=solved), answer)
               for seed in range(seeds) for question, answer in QUESTIONS]
    outputs = run.forced([text + answer for text, _ in prompts for answer in ANSWERS])
    log_probs = np.array([output.hypotheses[0].log_prob for output in outputs]).reshape(len(prompts), len(ANSWERS))
    right = [ANSWERS[row.argmax()] == answer for row, (_, answer) in zip(log_probs, prompts, strict=True)]
    return float(np.mean(right))


print('examples  right answers  exchanged answers')
for count in 0, 2, 4:
    print(f'{count:8}  {accuracy(count, solved=True):13.2f}  {accuracy(count, solved=False):17.2f}')

# %% [markdown]
# In the outputs above, examples do not help: this model does not learn the task from them. Without examples, it is
# right twice as often as guessing. With four examples, it is right as often as guessing. A possible reason is that the
# model repeats the answers of the examples. These answers are always wrong, because the examples never contain the
# question. 24 prompts are few: a difference of 0.1 may be chance. Brown et al. report that few-shot accuracy grows with
# the size of the model. The models of that paper have 125 million to 175 billion parameters.
