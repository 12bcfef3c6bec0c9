"""Statistics of intermediate values of a model. Evaluations log the statistics as metrics (config.track.places).

A place is the name of an intermediate value (model/places.py). Places of attention weights have the statistics
'entropy' and 'first_token' of each head. All other places have the statistic 'norm'. A statistic is the mean over all
tokens of the validation split, without padding and without hidden patches of series. The name of a metric is
STATISTIC/PLACE or STATISTIC/PLACE/HEAD, for example 'entropy/encoder/layers_0/self_attention/weights/1'.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from input_pipeline.batches import Batch
from input_pipeline.tokenizer import PAD
from model.evaluation import Objective
from model.losses import Sums
from model.patches import visible_patches
from model.places import PAIRS, argument_of, axes_of, observing

PLACES = 'places'  # the entry of Sums.others with the sums of the statistics


def tracked(objective: Objective, names: Sequence[str], module: Any) -> Objective:
    """Returns an objective that adds the statistics of the places in `names` of `module` to the sums of `objective`.

    Evaluations use this objective.
    """
    read = set(names).__contains__

    def observed(apply, params, batch, key):
        sums, captured = observing(objective, read=read)(apply, params, batch, key)
        return sums.replace(others=sums.others | {PLACES: {name: place_sums(name, captured[name], batch, module)
                                                           for name in names}})
    return observed


def place_sums(name: str, value: Float[Array, 'batch ...'], batch: Batch,
               module: Any) -> dict[str, Float[Array, '...']]:
    """Returns {statistic: sum over the tokens of a batch} of a place. The entry 'count' is the number of tokens.

    'entropy' is the entropy of the attention weights of a query, in nats. 'first_token' is the weight on the first key
    or, in rows of several documents, on the first key of the document. 'norm' is the Euclidean norm of a vector. If the
    place has an axis of heads, the sums are [head].
    """
    axes, value = axes_of(name), value.astype(jnp.float32)
    if axes == PAIRS:
        positions = batch['inputs'].get('positions', jnp.arange(value.shape[-1])[None])
        first = jnp.where((positions == 0)[:, None, None], value, 0).sum(axis=-1)  # other documents have the weight 0
        statistics = {'entropy': jax.scipy.special.entr(value).sum(axis=-1), 'first_token': first}
        axes = axes[:-1]
    else:
        statistics, axes = {'norm': jnp.linalg.norm(value, axis=-1)}, axes[:-1]
    axis = 'query' if 'query' in axes else 'position'
    real = _real(name, axis, batch, module, value.shape[axes.index(axis)] if axis in axes else None)
    if axis not in axes:
        real = real.any(axis=1)
    elif 'head' in axes:
        real = jnp.expand_dims(real, axes.index('head'))
    over = tuple(index for index, axis in enumerate(axes) if axis != 'head')
    shape = next(iter(statistics.values())).shape
    counted = jnp.broadcast_to(real, shape)
    sums = {statistic: jnp.where(counted, numbers, 0).sum(axis=over) for statistic, numbers in statistics.items()}
    return sums | {'count': counted.sum(axis=over, dtype=jnp.float32)}


def _real(name: str, axis: str, batch: Batch, module: Any, tokens: int | None) -> Bool[Array, 'batch #tokens']:
    """Returns a mask that is False for padding tokens of texts, padding rows, and hidden patches of series.

    `tokens` is the number of tokens along `axis` of the place, or None if the place has no such axis.
    """
    inputs = batch['inputs'][argument_of(name, axis, list(batch['inputs']))]
    if jnp.issubdtype(inputs.dtype, jnp.integer):
        return inputs != PAD
    real, visible = (batch['weights'] > 0)[:, None], batch['inputs'].get('visible')
    return real if visible is None or tokens is None else real & visible_patches(visible, module.patch, tokens)


def separated(sums: Sums) -> tuple[Sums, dict[str, float]]:
    """Returns the sums without the statistics of places, and these statistics as {name of the metric: mean}."""
    others = dict(sums.others)
    metrics = {}
    for name, numbers in others.pop(PLACES, {}).items():
        metrics |= _means(name, jax.device_get(numbers))
    return sums.replace(others=others), metrics


def _means(name: str, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    means = {}
    for statistic, total in sums.items():
        if statistic != 'count':
            mean = total / np.maximum(sums['count'], 1)
            means |= {f'{statistic}/{name}': float(mean)} if mean.ndim == 0 else {
                f'{statistic}/{name}/{head}': float(number) for head, number in enumerate(mean)}
    return means
