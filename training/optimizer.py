"""Learning-rate schedules and the optimizer, from optax."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from errors import UserError

SCHEDULES = ('paper', 'inverse_sqrt', 'cosine')


def make_schedule(config: ConfigDict | Mapping[str, Any], *, d_model: int, steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of steps made so far (the first step has 0). Steps whose update
    was left out count, so that a cosine ends with the training.

    'paper': factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), steps from 1 (section 5.3).
    'inverse_sqrt': the same shape by its peak: peak * min(step / warmup, sqrt(warmup / step)).
    'cosine': linear to the peak over `warmup`, then half a cosine to peak * final at `steps`.
    """
    peak, warmup = config['peak'], config['warmup']
    if config['schedule'] == 'paper':
        peak = config['factor'] * (d_model * warmup) ** -0.5
    if config['schedule'] in ('paper', 'inverse_sqrt'):
        def schedule(count):
            step = jnp.asarray(count, jnp.float32) + 1
            return peak * jnp.minimum(step / warmup, jnp.sqrt(warmup / step))
        return schedule
    if config['schedule'] == 'cosine':
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak * config['final'])
    raise UserError(f'config.optimizer.schedule={config["schedule"]!r} is not one of {", ".join(SCHEDULES)}')


def make_optimizer(config: ConfigDict | Mapping[str, Any], schedule: optax.Schedule) -> optax.GradientTransformation:
    """Adam (section 5.3: beta 0.9, 0.98, eps 1e-9), after clipping the gradient's norm where config.clip > 0.

    With config.weight_decay, AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): matrices shrink by learning
    rate * weight_decay a step; biases and layer norms, which are vectors, do not.
    """
    adam = optax.adamw(schedule, b1=config['beta1'], b2=config['beta2'], eps=config['eps'],
                       weight_decay=config['weight_decay'],
                       mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    if not config['weight_decay']:
        adam = optax.adam(schedule, b1=config['beta1'], b2=config['beta2'], eps=config['eps'])
    return optax.chain(optax.clip_by_global_norm(config['clip']), adam) if config['clip'] else adam
