"""Objectives: the functions that training minimises, including their forward passes.

    objective(apply, params, batch, key) -> Sums

`apply(params, inputs, key) -> (outputs, sown)` makes one forward pass of the module (`model.evaluation.forward`).
Dropout is drawn from `key`; if `key` is None, there is no dropout. Keywords override attributes of the module in this
pass: `apply(params, inputs, key, word_dropout=0.05)`. For a module over a vocabulary, `whole(outputs)` returns the
logits.

The result contains sums over targets. The train step adds the sums of the parts of a batch, and divides once by the
number of tokens. The train step uses no other property of an objective. If an objective needs arrays, such as a
teacher's parameters, make the objective a `jax.tree_util.Partial` with the arrays as arguments. Then the arrays are
placed on the devices and passed as arguments.

To add an objective, write a function here and add a line to `OBJECTIVES`. A variant such as R-Drop goes into the
function that makes the objective of its task.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from configs.rules import cross_head, cross_heads, default_cross_head
from configs.tasks import TASKS
from input_pipeline.data import Data
from model import Params
from model.evaluation import Apply, Measure, Objective, forward, supervised, whole, with_sown
from model.losses import cross_entropy, divergence, squared_error, symmetric_divergence
from model.places import observing
from run_directory.trained import read_teacher

Variant = Callable[[Measure], Objective]
SMALLEST = 1e-9  # guided alignment: smaller attention weights count as this number, because log 0 is infinite


def make_objective(config: ConfigDict, data: Data | None) -> Objective:
    """Returns the objective of the config's task, with the options of config.train.

    Without `data`, the objective assumes that every token of the vocabulary can occur, and cannot use a teacher.
    """
    return OBJECTIVES[TASKS[config.task].objective](config, data)


def make_cross_entropy(config: ConfigDict, data: Data | None) -> Objective:
    """Returns the cross-entropy objective, optionally with R-Drop, SimCut or a teacher, as config.train requests.

    Raises:
      UserError: if the teacher cannot be read, or has another vocabulary.
    """
    train = config.train
    absent = tuple(data.sizes.get('absent', ())) if data else ()
    measure = functools.partial(cross_entropy, label_smoothing=train.label_smoothing, absent=absent)
    if config.data.mixup:
        measure = of_mixed(measure)
    variant: Variant = supervised
    if train.r_drop:
        variant = functools.partial(r_drop, alpha=train.r_drop)
    if train.simcut:  # an embedding is set to zero by SimCut, or by the word dropout of the model
        kept = (1 - config.model.word_dropout) * (1 - train.cutoff)
        variant = functools.partial(simcut, alpha=train.simcut, word_dropout=1 - kept)
    if train.guided_alignment:
        variant = functools.partial(guided, variant=variant, head=guided_head(config), weight=train.guided_alignment)
    if not train.teacher:
        return variant(measure)
    assert data is not None, 'a teacher needs the vocabulary of the data'
    teacher = read_teacher(config, data)
    return distilled(variant, measure, train.teacher_weight, forward(teacher.module), teacher.params)


def of_mixed(measure: Measure) -> Measure:
    """Returns the loss for examples with several classes (mixup): targets and weights are [batch, classes_of_example].

    Batches with one class for each example, as in evaluations, are passed to `measure` unchanged.
    """
    def mixed(outputs, targets, weights):
        if targets.ndim == 1:
            return measure(outputs, targets, weights)
        return measure(jnp.broadcast_to(outputs[:, None], (*targets.shape, outputs.shape[-1])), targets, weights)
    return mixed


def make_squared_error(config: ConfigDict, data: Data | None) -> Objective:
    """Returns the squared-error objective. It has no options."""
    return supervised(squared_error)


# The name of a task's objective (configs/tasks.py) -> the function that makes it from a config and its data.
OBJECTIVES: Mapping[str, Callable[[ConfigDict, Data | None], Objective]] = {
    'cross_entropy': make_cross_entropy, 'squared_error': make_squared_error}


def r_drop(measure: Measure, alpha: float) -> Objective:
    """Returns the objective R-Drop (Wu et al. 2021, arXiv:2106.14448, equation 4).

    R-Drop makes the outputs of two forward passes with different dropout masks similar:

        CE_1 + CE_2 + alpha * (KL(p_1 || p_2) + KL(p_2 || p_1)) / 2

    CE_i is the cross-entropy of pass i, and p_i is the output distribution of pass i. The loss is summed over the
    targets. Each target counts once, not twice. The gradient flows through both passes. Metrics such as the accuracy
    are means over the two passes. An evaluation makes only one pass, because both passes would be equal without
    dropout.
    """
    single = supervised(measure)

    def objective(apply, params, batch, key):
        if key is None:
            return single(apply, params, batch, key)
        passes = [(whole(outputs), sown) for outputs, sown in (
            apply(params, batch['inputs'], pass_key) for pass_key in jax.random.split(key))]
        first, second = (with_sown(measure(outputs, batch['targets'], batch['weights']), sown)
                         for outputs, sown in passes)
        apart = jnp.sum(symmetric_divergence(passes[0][0], passes[1][0]) * batch['weights'])
        return first.replace(loss=first.loss + second.loss + alpha * apart,
                             others=jax.tree.map(lambda one, other: (one + other) / 2, first.others, second.others)
                             | {'divergence': apart})
    return objective


def simcut(measure: Measure, alpha: float, word_dropout: float) -> Objective:
    """Returns the objective SimCut (Gao et al. 2022, arXiv:2206.02368).

    SimCut makes two forward passes: the whole pass, and the cut pass without some input tokens. The objective makes the
    outputs of the two passes similar:

        CE(p) + alpha * KL(p || p_cut)

    p and p_cut are the output distributions of the whole pass and of the cut pass. CE is the cross-entropy. The cut
    pass has its own dropout masks. In the cut pass, the embedding of each input token is zero with probability
    `word_dropout`. In the whole pass, the probability is the word dropout of the model, usually 0. The loss is summed
    over the targets, and each target counts once. The gradient flows through both passes, as in the published code. The
    published code uses alpha=3 and a probability of 0.05. The published code never cuts the end token of the source or
    the start token of the target, but this function may cut any token. Metrics, and losses that modules sow, are taken
    from the whole pass. An evaluation makes only the whole pass.
    """
    single = supervised(measure)

    def objective(apply, params, batch, key):
        if key is None:
            return single(apply, params, batch, key)
        key, cut_key = jax.random.split(key)
        outputs, sown = apply(params, batch['inputs'], key)
        cut, _ = apply(params, batch['inputs'], cut_key, word_dropout=word_dropout)
        logits = whole(outputs)
        sums = with_sown(measure(logits, batch['targets'], batch['weights']), sown)
        apart = jnp.sum(divergence(logits, whole(cut)) * batch['weights'])
        return sums.replace(loss=sums.loss + alpha * apart, others=sums.others | {'divergence': apart})
    return objective


def guided_head(config: ConfigDict) -> tuple[int, int | None]:
    """Returns the layer and the head that config.train.guided_head selects, counted from 0.

    The head is None if the option selects the mean of all heads of the layer. See `default_cross_head` for the default.
    """
    layers, heads = cross_heads(config.model)
    return cross_head(config.train.guided_head, layers, heads) or default_cross_head(layers)


def guided(measure: Measure, variant: Variant, head: tuple[int, int | None], weight: float) -> Objective:
    """Returns the objective of guided alignment, which trains a head of cross-attention to align words.

    The sources are Chen et al. 2016 (arXiv:1607.01628) and Garg et al. 2019 (arXiv:1909.02074, section 3.2). The
    objective adds a cross-entropy to the loss L. This cross-entropy compares the attention weights A of the head with
    the correct alignment G of the data:

        L + weight * sum_t CE_t,    CE_t = -sum_s G_ts log A_ts

    If target token t is linked to n source tokens, G_ts is 1 / n for these source tokens s. Otherwise G_ts is 0. Row t
    of A has the weights of the step that predicts token t. Tokens without links, such as the end token, have CE_t = 0.
    If there are two forward passes, as in R-Drop and SimCut, CE_t is the mean over the passes. The metric
    'alignment_loss' is the mean of CE_t over the targets. An evaluation does not use the links. `variant` converts
    `measure` into the objective with the loss L.
    """
    objective, (layer, number) = variant(measure), head
    place = f'decoder/layers_{layer}/cross_attention/weights'

    def with_alignment(apply, params, batch, key):
        if key is None or 'links' not in batch:
            return objective(apply, params, batch, key)
        weights = []

        def observed(*args, **attributes):
            result, captured = observing(apply, read=(place,))(*args, **attributes)
            weights.append(captured[place].mean(axis=1) if number is None else captured[place][:, number])
            return result

        sums = objective(observed, params, batch, key)
        links = batch['links'].astype(jnp.float32)
        gold = links / jnp.maximum(links.sum(axis=-1, keepdims=True), 1)
        losses = [-jnp.sum(gold * jnp.log(jnp.maximum(one, SMALLEST))) for one in weights]
        loss = sum(losses) / len(losses)
        return sums.replace(loss=sums.loss + weight * loss, others=sums.others | {'alignment_loss': loss})
    return with_alignment


def distilled(variant: Variant, measure: Measure, weight: float, teacher: Apply, teacher_params: Params) -> Objective:
    """Returns the objective of word-level distillation (Kim and Rush 2016, arXiv:1606.07947, sections 2.2 and 3.1).

    The method extends the distillation of Hinton et al. (2015) to the distributions of the next token:

        (1 - weight) * measure + weight * CE(q),    CE(q) = -sum_c q_c log p_c

    p is the trained model's distribution of the next token. q is the teacher's distribution after the same tokens,
    without dropout and with temperature 1. `measure` is the usual loss. `variant` makes the objective of this
    sum: `supervised`, R-Drop or SimCut. The two passes of R-Drop and SimCut have the same q. The
    metric 'teacher_divergence' is KL(q || p). An evaluation does not use the teacher.
    """
    def objective(teacher_params, apply, params, batch, key):
        if key is None:
            return variant(measure)(apply, params, batch, key)
        expected = jax.nn.log_softmax(whole(teacher(teacher_params, batch['inputs'], None)[0]))

        def taught(outputs, targets, weights):
            logits = whole(outputs)
            sums = measure(logits, targets, weights)
            probabilities = jnp.exp(expected)
            cross = -jnp.sum(probabilities * jax.nn.log_softmax(logits), axis=-1)
            apart = cross + jnp.sum(probabilities * expected, axis=-1)
            return sums.replace(loss=(1 - weight) * sums.loss + weight * jnp.sum(cross * weights),
                                others=sums.others | {'teacher_divergence': jnp.sum(apart * weights)})

        return variant(taught)(apply, params, batch, key)

    # The parameters are an argument, because otherwise they would be constants of the compiled step.
    return jax.tree_util.Partial(objective, teacher_params)
