"""Estimates the cost of a step by formula, without compiling.

Plans for GPUs use only this formula. A search uses the formula to select the plans that are then compiled.
The constants were fitted to compiled programs for TPUs. docs/planning.md compares the formula with compiled programs.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from ml_collections import ConfigDict

from configs.options import flatten, is_used
from kernels.cross_entropy import tiles
from runtime.errors import UserError
from tools.ahead import Figures, Recipe, vocabulary_size
from tools.chips import Bounds, Topology, link_seconds
from tools.program import Collective
from training.mesh import RULES
from training.tuning import TRAINED, Tuning

KINDS = 'transformer', 'language_model'  # the values of model.kind that the formula describes
# Bytes of traffic per stored parameter that is trained: the parameter and two moments are read and written, and the
# gradient is read for the update and for the gradient norm.
MOMENTS = 30
# Bytes of traffic per used parameter: the cast, the forward and backward read, and the gradient written and read.
WEIGHTS = 10
STREAM = 24    # vectors of width d_model that a layer writes and reads per token, forward and backward
INNER = 6      # vectors of width d_ff that a layer writes and reads per token, forward and backward
# Vectors of width d_model and d_ff that a layer keeps per token until the backward pass, without remat.
KEPT_STREAM, KEPT_INNER = 20, 3
KEPT_PRODUCTS = 7  # vectors of width d_model that remat_keep=products keeps, in addition to one vector of width d_ff
REMAT = (False, 'nothing'), (True, 'products'), (True, 'nothing')  # values of (model.remat, model.remat_keep)
PARTS = 1, 2, 4, 8, 16, 32  # values of train.accumulate


def bounds(figures: Figures, topology: Topology, mesh: Mapping[str, int], rate: float) -> Bounds:
    """Returns lower bounds of a step's time on the devices of `topology`.

    `figures` are the costs of the step. `rate` is the peak rate of its matrix products (`Chip.rate`).
    """
    return Bounds(figures.flops / rate, figures.traffic / topology.chip.bandwidth,
                  link_seconds(figures.collectives, topology, dict(mesh)))


def estimate(recipe: Recipe, mesh: Mapping[str, int]) -> Figures:
    """Returns the estimated cost of a train step on a mesh, without compiling the step.

    Raises:
      UserError: if the model is not one of `KINDS`.
    """
    config, batch = recipe.config, recipe.batch['targets'].shape
    model, devices = config.model, math.prod(mesh.values())
    if model.kind not in KINDS:
        raise UserError(f'config.model.kind={model.kind}: the formula supports only {" and ".join(KINDS)}. Compile a '
                        'plan for TPUs, such as --topology=v5e:4x4 without --formula and --search')
    used = _count(recipe.boxed.params, mesh, ('tensor',))
    trained = _trained(recipe.boxed.params, recipe.parts['tuning'])
    learned, updated = (_count(trained, mesh, axes) for axes in (('tensor',), ('fsdp', 'tensor')))
    tables = [leaf for leaf in jax.tree.leaves(trained, is_leaf=_is_box) if 'vocab' in getattr(leaf, 'names', ())]
    state = _count(recipe.boxed, mesh, ('fsdp', 'tensor'))
    tensor, shares = mesh['tensor'], mesh['data'] * mesh['fsdp']
    passes = 2 if config.train.r_drop or config.train.simcut else 1
    tokens = passes * batch[0] * batch[1] / shares / config.train.accumulate  # in all passes of a part
    layers = model.num_layers
    if model.kind == 'transformer':
        layers += model.num_decoder_layers or model.num_layers
    width, inner = model.d_model, model.d_ff / tensor
    scores = model.num_heads / tensor * batch[1]
    vocabulary = vocabulary_size(recipe.sizes)
    # Losses of two passes compute all logits at a time.
    count = 1 if passes > 1 else tiles(batch[0] // config.train.accumulate, batch[1], vocabulary, devices)[0]
    table = vocabulary * width / tensor
    size = jnp.dtype(model.dtype).itemsize  # of an activation, in bytes
    per_layer = size * tokens * (STREAM * width + INNER * inner + 3 * scores)
    traffic = (MOMENTS * updated + config.train.accumulate * (
        WEIGHTS * used + 2 * size * tokens * vocabulary / tensor + layers * per_layer))
    per_block = KEPT_STREAM * width + KEPT_INNER * inner + 4 * scores
    if not model.remat:
        kept = size * tokens * layers * per_block
    elif model.remat_keep == 'products':
        kept = size * tokens * (layers * (KEPT_PRODUCTS * width + inner) + per_block)
    else:
        kept = size * tokens * (layers * width + per_block)
    logits = size * tokens * vocabulary / tensor  # the gradient of the logits
    cast = size * used if size < 4 else 0
    temporaries = kept + cast + logits + 4 * tokens / count * vocabulary / tensor
    return Figures(recipe.flops / devices, traffic, 0.0, 4 * state, temporaries, 4 * state + temporaries,
                   tuple(_collectives(mesh, used, learned, min(table, _count(tables, mesh, ('tensor',))),
                                      layers * tokens * width * config.train.accumulate, size)))


def _trained(params: PyTree, tuning: Tuning) -> PyTree:
    """Returns a copy of the shapes of parameters, in which frozen parameters have the size 0."""
    return jax.tree.map(lambda leaf, label: leaf if label == TRAINED else jax.ShapeDtypeStruct((0,), leaf.dtype),
                        params, tuning.labels(params))


def _collectives(mesh: Mapping[str, int], used: float, learned: float, table: float, activations: float,
                 size: int) -> Iterator[Collective]:
    rows = '+'.join(axis for axis in ('data', 'fsdp') if mesh[axis] > 1)
    if rows:  # gradients, in the dtype of the activations, and in float32 for the table of the embeddings
        yield Collective('all-reduce', rows, mesh['data'] * mesh['fsdp'], size * (learned - table) + 8 * table, 1)
    if mesh['fsdp'] > 1:  # parameters
        yield Collective('all-gather', 'fsdp', mesh['fsdp'], 4 * used, 1)
    if mesh['tensor'] > 1:  # after each attention and feed-forward sublayer, forward and backward
        yield Collective('all-reduce', 'tensor', mesh['tensor'], size * 5 * activations, 1)


def candidates(topology: Topology, config: ConfigDict) -> Iterator[ConfigDict]:
    """Yields configs for a search: one for each combination of mesh, remat, train.accumulate and batch size.

    The batch sizes are 1, 2 and 4 times the batch size of the recipe. train.accumulate is at most batch.rows.
    """
    batch = 'rows' if config.model.kind == 'language_model' else 'tokens'
    remats = REMAT if is_used('model.remat', flatten(config)) else REMAT[:1]
    for data, fsdp, tensor in meshes(topology, config):
        for (remat, keep), times in itertools.product(remats, (1, 2, 4)):
            size = config.batch[batch] * times
            for accumulate in sorted({min(parts, size) for parts in PARTS}):
                candidate = config.copy_and_resolve_references()
                candidate.parallel.update(mode='jit', data=data, fsdp=fsdp, tensor=tensor)
                candidate.model.update(remat=remat, remat_keep=keep)
                candidate.train.accumulate = accumulate
                candidate.batch[batch] = size
                yield candidate


def meshes(topology: Topology, config: ConfigDict) -> Iterator[tuple[int, int, int]]:
    """Yields the possible sizes (data, fsdp, tensor) of a mesh.

    The axes fsdp and tensor stay within a slice. The size of tensor is at most 8 and divides the number of heads.
    """
    per_slice = math.prod(topology.shape)
    heads = config.model.num_key_value_heads or config.model.num_heads
    for tensor in (1, 2, 4, 8):
        for fsdp in range(1, per_slice // tensor + 1):
            if heads % tensor == 0 and per_slice % (fsdp * tensor) == 0 and config.model.d_model % fsdp == 0:
                yield topology.devices // (fsdp * tensor), fsdp, tensor


def _count(boxed: PyTree, mesh: Mapping[str, int], axes: tuple[str, ...]) -> float:
    """Returns the number of array elements per device, if the pytree is sharded over the given `axes` of the mesh."""
    rules, total = dict(RULES), 0.0
    for leaf in jax.tree.leaves(boxed, is_leaf=_is_box):
        if not (arrays := jax.tree.leaves(nn.unbox(leaf))):  # a box of the optimizer's state, of a frozen parameter
            continue
        shape, names = arrays[0].shape, getattr(leaf, 'names', ())
        share = 1
        for size, name in zip(shape, names, strict=False):
            along = rules.get(name)
            if along in axes and size % mesh[along] == 0:
                share *= mesh[along]
        total += math.prod(shape) / share
    return total


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)
