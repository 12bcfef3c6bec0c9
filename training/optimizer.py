"""Learning-rate schedules, the optimizer and a moving average of the parameters, made with optax."""

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from configs.rules import warmup_steps
from runtime.errors import UserError
from training.tuning import EVERYTHING, Tuning, parameter_name

log = logging.getLogger('allyouneed.train')

SCHEDULES = ('paper', 'inverse_sqrt', 'cosine')


def make_schedule(config: ConfigDict | Mapping[str, Any], *, d_model: int, steps: int) -> optax.Schedule:
    """Returns a learning-rate schedule: a function of the number of steps made so far (0 at the first step).

    Steps whose update was skipped also count, so that a cosine schedule ends at the last step of the training.

    'paper': factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), with steps counted from 1 (Vaswani et al. 2017,
      section 5.3).
    'inverse_sqrt': the same curve, defined by its peak: peak * min(step / warmup, sqrt(warmup / step)).
    'cosine': rises linearly to the peak over `warmup` steps. Then falls like half a period of a cosine to peak * final
      at `steps`. If the warm-up is not shorter than `steps`, it is shortened (`warmup_steps`) with a warning.

    Raises:
      UserError: if config['schedule'] is not one of SCHEDULES.
    """
    peak, warmup = config['peak'], warmup_steps(config, steps)
    if warmup != config['warmup']:
        log.warning('the warm-up has %d steps instead of config.optimizer.warmup=%d, because the training has only '
                    'train.steps=%d. To choose another value, set config.optimizer.warmup in a new run', warmup,
                    config['warmup'], steps)
    if config['schedule'] == 'paper':
        peak = config['factor'] * (d_model * warmup) ** -0.5
    if config['schedule'] in ('paper', 'inverse_sqrt'):
        def schedule(count):
            step = jnp.asarray(count, jnp.float32) + 1
            return peak * jnp.minimum(step / warmup, jnp.sqrt(warmup / step))
        return schedule
    if config['schedule'] == 'cosine':
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak * config['final'])
    raise UserError(f'config.optimizer.schedule={config["schedule"]!r} does not exist. Use {", ".join(SCHEDULES)}')


def make_optimizer(config: ConfigDict | Mapping[str, Any], schedule: optax.Schedule,
                   tuning: Tuning = EVERYTHING) -> optax.GradientTransformation:
    """Returns the optimizer, Adam or AdamW, with the options in `config`, the section config.optimizer.

    If `clip` is set, the norm of the gradient is clipped first. Parameters that `tuning` freezes have no update and no
    state. If `ema` is set, the state also has a moving average of the parameters (`average_parameters`).
    """
    optimizer = adam(config, schedule)
    if config['clip']:
        optimizer = optax.chain(optax.clip_by_global_norm(config['clip']), optimizer)
    optimizer = tuning.restrict(optimizer)
    return optax.chain(optimizer, average_parameters(config['ema'])) if config['ema'] else optimizer


def adam(config: ConfigDict | Mapping[str, Any], schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns Adam (Vaswani et al. 2017, section 5.3: beta 0.9, 0.98, eps 1e-9), or AdamW if weight_decay is not 0.

    With AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), a parameter decays by learning rate * weight_decay per
    step if it has two axes or more and is not a bias. Such parameters are the matrices, the tables of embeddings and
    positions, the class token and the vectors of the alignment networks (one row per head). Parameters with one axis,
    such as the scales of layer norms, do not decay.
    """
    moments = {'b1': config['beta1'], 'b2': config['beta2'], 'eps': config['eps']}
    if not config['weight_decay']:
        return optax.adam(schedule, **moments)
    return optax.adamw(schedule, **moments, weight_decay=config['weight_decay'],
                       mask=lambda params: jax.tree_util.tree_map_with_path(_decays, params))


def _decays(path: tuple[Any, ...], parameter: Any) -> bool:
    """Returns whether weight decay applies. It applies to parameters with at least two axes, except biases."""
    return parameter.ndim > 1 and not parameter_name(path).endswith('bias')


class AverageState(NamedTuple):
    """The state of `average_parameters`. The leaves may also be shapes or shardings."""
    updates: Any     # int [], the number of updates made
    average: PyTree  # a tree like the parameters; before the first update, a copy of the parameters


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Returns an optax transformation that keeps an exponential moving average of the parameters in its state.

    It must be the last transformation of an optax chain. Let p_t be the parameters after update t. The average is

        a_t = (1 - decay) / (1 - decay^t) * sum_{s=1..t} decay^(t-s) p_s,

    with the bias correction of Adam's moments (Kingma and Ba 2015, arXiv:1412.6980, section 3), so that the initial
    parameters do not contribute. The equivalent form

        a_t = a_{t-1} + (1 - decay) / (1 - decay^t) * (p_t - a_{t-1})

    is used, because it needs no correction when the average is read. The updates are not changed.
    """
    def init(params):
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates, state, params=None):
        assert params is not None, 'the moving average needs the parameters'
        count = state.updates + 1
        weight = (1 - decay) / -jnp.expm1(count * math.log(decay))
        average = jax.tree.map(lambda mean, new: mean + weight * (new - mean), state.average,
                               optax.apply_updates(params, updates))
        return updates, AverageState(count, average)

    return optax.GradientTransformation(init, update)
