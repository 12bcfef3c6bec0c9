"""The train step as a pure function. `training/compiled.py` compiles it."""

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from input_pipeline.batches import Batch
from model import Params
from model.evaluation import Apply, Objective
from model.losses import Sums
from run_directory.initial import InitialValues, with_initial
from training.tuning import EVERYTHING, Tuning


class TrainState(flax.struct.PyTreeNode):
    """The state of a training. The state and the config together determine all later steps of the training.

    The leaves of this pytree may also be shapes or shardings, so the fields are not annotated as arrays.
    """
    step: Any                 # int [], the number of steps made, including steps with a skipped update
    params: Params
    opt_state: optax.OptState


def key_for(use: str, seed: int) -> Key[Array, '']:
    """Returns the random key of a run for one purpose, such as 'params' or 'dropout'."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(use.encode()))


def init_state(module: nn.Module, optimizer: optax.GradientTransformation, example: Batch, seed: int) -> TrainState:
    """Returns the initial train state. `example` can be any batch, because only its shapes are used."""
    return nn.unbox(boxed_state(module, optimizer, example, seed))


def boxed_state(module: nn.Module, optimizer: optax.GradientTransformation, example: Batch, seed: int,
                tuning: Tuning = EVERYTHING, initial: Mapping[str, InitialValues] = MappingProxyType({})) -> TrainState:
    """Returns the initial train state. Its arrays are in Flax metadata boxes, which contain the names of the axes.

    `initial` contains the initial values of some parameters. All other parameters are initialised randomly.
    """
    params = jax.jit(module.init)(key_for('params', seed), **example['inputs'])['params']
    params = tuning.prepare(with_initial(initial, params), key_for('adapters', seed))
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


# Arguments that change from step to step are positional. Arguments that are constants of the program are keywords.
def train_step(state: TrainState, batch: Batch, *, objective: Objective, apply: Apply,
               optimizer: optax.GradientTransformation, dropout_key: Key[Array, ''], accumulate: int = 1,
               precision: str = 'default', tuning: Tuning = EVERYTHING, axis_name: str | None = None,
               place: Callable[[Params], Params] = lambda params: params) -> tuple[TrainState, Sums]:
    """Makes one update. The loss is the mean of an objective over the tokens of the global batch, without padding.

    Losses, token counts and gradients are *summed* over the parts of a batch: `accumulate` sequential parts, and the
    devices along `axis_name`. The totals are divided once. A mean of the means of the parts would give more weight to
    the tokens of a part with much padding. `precision` is the precision of matrix products
    (config.train.matmul_precision). `place` sets the shardings of parameters and gradients for the computation.

    If the sum of the losses or the norm of the gradient is not finite, the update is skipped. Then only the step number
    changes, the returned `skipped` is 1, and all other sums are 0. A skipped step also changes the learning rate, which
    depends on the step number. Adam's bias correction does not change, because it depends on the number of updates.
    """
    key = jax.random.fold_in(dropout_key, state.step)
    if axis_name is not None:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))

    def loss_sum(params, part, key):
        sums = objective(apply, tuning.used(params), part, key)
        return sums.loss, sums

    params, gradient = place(state.params), at_precision(precision, jax.grad(loss_sum, has_aux=True))
    if accumulate == 1:
        total = gradient(params, batch, key)
    else:
        def add(total, part):
            index, part = part
            new = gradient(params, part, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, new), None

        # Each part takes every accumulate-th row, so batches stay sharded by rows.
        parts = jax.tree.map(
            lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)
        first = gradient(params, jax.tree.map(lambda x: x[0], parts), jax.random.fold_in(key, 0))
        total, _ = jax.lax.scan(add, first, (jnp.arange(1, accumulate), jax.tree.map(lambda x: x[1:], parts)))
    if axis_name is not None:
        total = jax.lax.psum(total, axis_name)
    gradients, sums = total
    # A batch may have no targets: for example, the last window of a text, if it reads only an end token.
    targets = jnp.where(sums.tokens > 0, sums.tokens, 1)
    gradients = jax.tree.map(lambda g: g / targets, place(gradients))
    finite = jnp.isfinite(sums.loss) & jnp.isfinite(optax.tree.norm(gradients))

    def update(params, opt_state):
        updates, opt_state = optimizer.update(gradients, schedule_at(opt_state, state.step), params)
        return optax.apply_updates(params, updates), opt_state

    # This is `cond` and not `where`, because `where` would read the old state after the new state is computed, so XLA
    # would copy the old state.
    params, opt_state = jax.lax.cond(finite, update, lambda *old: old, state.params, state.opt_state)
    sums = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), sums)
    return (state.replace(step=state.step + 1, params=params, opt_state=opt_state),
            sums.replace(skipped=jnp.where(finite, 0, 1)))


def at_precision(precision: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `function` with this matmul precision. 'default' keeps the setting of JAX."""
    def traced(*args):
        with jax.default_matmul_precision(precision):
            return function(*args)

    return function if precision == 'default' else traced


def schedule_at(opt_state: optax.OptState, step: Int[Array, '']) -> optax.OptState:
    """Returns an optimizer state whose learning-rate schedules are at `step`. Optax does not count skipped steps."""
    def is_schedule(part):
        return isinstance(part, optax.ScaleByScheduleState)

    return jax.tree.map(lambda part: part._replace(count=step) if is_schedule(part) else part, opt_state,
                        is_leaf=is_schedule)
