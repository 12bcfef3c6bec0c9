"""What a step costs by formula: for devices that no compiler here knows, and to choose what is worth compiling.

The constants were read off compiled programs for TPUs (docs/planning.md has both side by side).
"""

import itertools
import math
from collections.abc import Iterator, Mapping

import flax.linen as nn
import jax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from kernels.cross_entropy import tiles
from tools.ahead import Figures, Recipe
from tools.chips import Bounds, Topology, link_seconds
from tools.program import Collective
from training.mesh import RULES

MOMENTS = 30   # bytes of traffic a parameter held: it and two moments read and written, its gradient, its norm
WEIGHTS = 10   # a parameter used: cast, read forward and backward, gradient written and read
STREAM = 24    # numbers of d_model that a layer writes and reads, a token, forward and backward
INNER = 6      # numbers of d_ff, likewise
KEPT_STREAM, KEPT_INNER = 20, 3  # of which stay in memory until the backward pass, without remat
KEPT_PRODUCTS = 7  # with remat of all but products: numbers of d_model, besides one of d_ff
REMAT = (False, 'nothing'), (True, 'products'), (True, 'nothing')  # model.remat, model.remat_keep
PARTS = 1, 2, 4, 8, 16, 32  # train.accumulate


def bounds(figures: Figures, topology: Topology, mesh: Mapping[str, int]) -> Bounds:
    """The least time of a step that costs so much, on such devices."""
    chip = topology.chip
    return Bounds(figures.flops / chip.flops, figures.traffic / chip.bandwidth,
                  link_seconds(figures.collectives, topology, dict(mesh)))


def estimate(recipe: Recipe, mesh: Mapping[str, int]) -> Figures:
    """The figures of a train step on a mesh, without compiling it."""
    config, batch = recipe.config, recipe.batch['targets'].shape
    model, devices = config.model, math.prod(mesh.values())
    used, held = (_count(recipe.boxed.params, mesh, axes) for axes in (('tensor',), ('fsdp', 'tensor')))
    state = _count(recipe.boxed, mesh, ('fsdp', 'tensor'))
    tensor, shares = mesh['tensor'], mesh['data'] * mesh['fsdp']
    tokens = recipe.tokens / shares / config.train.accumulate
    layers = model.num_layers * (2 if model.kind == 'transformer' else 1)
    width, inner = model.d_model, model.d_ff / tensor
    scores = model.num_heads / tensor * batch[1]
    vocabulary = config.data.tokenizer.vocab_size
    count, _ = tiles(batch[0] // config.train.accumulate, batch[1], vocabulary, devices)
    table = vocabulary * width / tensor
    per_layer = 2 * tokens * (STREAM * width + INNER * inner + 3 * scores)
    traffic = (MOMENTS * held + config.train.accumulate * (
        WEIGHTS * used + 4 * tokens * vocabulary / tensor + layers * per_layer))
    of_a_block = KEPT_STREAM * width + KEPT_INNER * inner + 4 * scores
    if not model.remat:
        kept = 2 * tokens * layers * of_a_block
    elif model.remat_keep == 'products':
        kept = 2 * tokens * (layers * (KEPT_PRODUCTS * width + inner) + of_a_block)
    else:
        kept = 2 * tokens * (layers * width + of_a_block)
    logits = 2 * tokens * vocabulary / tensor  # their gradient
    temporaries = kept + 2 * used + logits + 4 * tokens / count * vocabulary / tensor
    return Figures(recipe.flops / devices, traffic, 0.0, 4 * state, temporaries, 4 * state + temporaries,
                   tuple(_collectives(mesh, used, table, layers * tokens * width * config.train.accumulate)))


def _collectives(mesh: Mapping[str, int], used: float, table: float, activations: float) -> Iterator[Collective]:
    rows = '+'.join(axis for axis in ('data', 'fsdp') if mesh[axis] > 1)
    if rows:  # gradients: in bfloat16 but for the table of the embeddings
        yield Collective('all-reduce', rows, mesh['data'] * mesh['fsdp'], 2 * (used - table) + 8 * table, 1)
    if mesh['fsdp'] > 1:  # parameters
        yield Collective('all-gather', 'fsdp', mesh['fsdp'], 4 * used, 1)
    if mesh['tensor'] > 1:  # after each attention and feed-forward sublayer, forward and backward
        yield Collective('all-reduce', 'tensor', mesh['tensor'], 2 * 5 * activations, 1)


def candidates(topology: Topology, config: ConfigDict) -> Iterator[ConfigDict]:
    """The meshes, with each kind of remat and without, in parts, at the recipe's batch and larger ones."""
    batch = 'rows' if config.model.kind == 'language_model' else 'tokens'
    for data, fsdp, tensor in meshes(topology, config):
        for (remat, keep), accumulate, times in itertools.product(REMAT, PARTS, (1, 2, 4)):
            other = config.copy_and_resolve_references()
            other.parallel.update(mode='jit', data=data, fsdp=fsdp, tensor=tensor)
            other.model.update(remat=remat, remat_keep=keep)
            other.train.accumulate = accumulate
            other.batch[batch] = config.batch[batch] * times
            yield other


def meshes(topology: Topology, config: ConfigDict) -> Iterator[tuple[int, int, int]]:
    """(data, fsdp, tensor) that multiply to the devices: fsdp within a slice, tensor up to 8 and dividing the heads."""
    per_slice = math.prod(topology.shape)
    heads = config.model.num_key_value_heads or config.model.num_heads
    for tensor in (1, 2, 4, 8):
        for fsdp in range(1, per_slice // tensor + 1):
            if heads % tensor == 0 and per_slice % (fsdp * tensor) == 0 and config.model.d_model % fsdp == 0:
                yield topology.devices // (fsdp * tensor), fsdp, tensor


def _count(boxed: PyTree, mesh: Mapping[str, int], axes: tuple[str, ...]) -> float:
    """The numbers that a device has of a pytree whose leaves are sharded over these axes of the mesh."""
    rules, total = dict(RULES), 0.0
    for leaf in jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)):
        shape, names = nn.unbox(leaf).shape, getattr(leaf, 'names', ())
        share = 1
        for size, name in zip(shape, names, strict=False):
            along = rules.get(name)
            if along in axes and size % mesh[along] == 0:
                share *= mesh[along]
        total += math.prod(shape) / share
    return total
