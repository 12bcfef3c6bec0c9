"""The mesh of devices, and the sharding of each array of a training.

The mesh has three axes. The rows of a batch are sharded over 'data' and 'fsdp'. Parameters and optimizer state are
sharded over 'fsdp' and 'tensor'. Along 'fsdp', each device stores a shard, and gathers the parameters for the duration
of a step (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054). Along 'tensor', each device computes a share of every
matrix product (Shoeybi et al. 2019, arXiv:1909.08053). XLA inserts the communication. The results are the same on every
mesh, up to rounding.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.linen.spmd import logical_to_mesh_sharding
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from ml_collections import ConfigDict

from configs.options import AXES
from runtime.errors import UserError

ROWS = PartitionSpec(('data', 'fsdp'))  # of a batch
RULES = (  # the names that modules give to the axes of their matrices -> the axis of the mesh; earlier ones first
    ('vocab', 'tensor'),     # pieces of a vocabulary, classes
    ('heads', 'tensor'),     # attention heads
    ('mlp', 'tensor'),       # width inside a feed-forward or alignment network
    ('gates', 'tensor'),     # gates and candidates of a recurrent cell
    ('embed', 'fsdp'),       # width of the stream between blocks
    ('state', 'fsdp'),       # width of a recurrent state
    ('kv', None),            # width of a head
    ('position', None),      # rows of a table of positions
    ('patch', None),         # numbers in a patch
)

Devices = Sequence[Any]  # of jax.Device, which type checkers do not know as a type

log = logging.getLogger('allyouneed.train')


def make_mesh(config: ConfigDict | Mapping[str, Any], devices: Devices | None = None) -> Mesh:
    """Returns the mesh of `config.parallel` on all devices of all processes, or on the given ones.

    Raises:
      UserError: if the sizes do not multiply to the number of devices.
    """
    devices = devices or jax.devices()
    sizes = [config[axis] for axis in AXES]
    known = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        asked = ', '.join(f'{axis}={config[axis]}' for axis in AXES)
        raise UserError(f'config.parallel: {asked} do not multiply to the {len(devices)} devices that there are '
                        f'({devices[0].device_kind} x {len(devices)}): -1 fills up what the others leave')
    # jax.make_mesh makes Explicit axes by default, and nn.Embed fails on those.
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def shardings_of(boxed: PyTree, mesh: Mesh) -> PyTree[NamedSharding]:
    """Returns the sharding of each leaf of a state by RULES; `boxed` has the shapes, boxed with the names of the axes.

    Leaves without names, such as biases, are replicated. Where an axis of the mesh does not divide the axis of a matrix
    that it is for (a vocabulary of 8,001 over tensor=2, two heads of keys over tensor=4), it shards the largest other
    one that it divides: the matrix is stored in shares all the same, and without padding. Such axes are logged.
    """
    moved = set()

    def fitting(leaf):
        shape = nn.unbox(leaf)
        if not hasattr(shape, 'shape'):
            return shape  # what optax has in the place of a frozen parameter
        sharding = logical_to_mesh_sharding(nn.get_partition_spec(leaf), mesh, RULES)
        axes = [_axes(entry) for entry in sharding.spec]  # none of what has no names
        for place, size in enumerate(shape.shape[:len(axes)]):
            if axes[place] and size % mesh.shape[axes[place][0]]:
                axis, axes[place] = axes[place], ()
                moved.add(f'{size} over {axis[0]}={mesh.shape[axis[0]]}')
                fits = [other for other, length in enumerate(shape.shape) if other != place
                        and length % math.prod(mesh.shape[each] for each in axes[other] + axis) == 0]
                if fits:
                    axes[max(fits, key=lambda other: shape.shape[other])] += axis
        return NamedSharding(mesh, PartitionSpec(*(_entry(each) for each in axes)))

    fitted = jax.tree.map(fitting, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))
    if moved:
        log.info('not divided, hence shared by another axis of the matrix or whole on each device: axes of %s',
                 ', '.join(sorted(moved)))
    return fitted


def computing_shardings_of(boxed: PyTree, stored: PyTree[NamedSharding], mesh: Mesh) -> PyTree[NamedSharding]:
    """Returns the sharding of each parameter during a step: as it is stored, but gathered along 'fsdp'.

    A vocabulary that 'tensor' does not divide is divided then nevertheless: XLA pads it, within the program only. Other
    axes that it does not divide, such as heads of keys fewer than devices, are gathered, and computed on each.
    """
    def computing(leaf, sharding):
        spec = list(without_fsdp(sharding).spec)
        for place, name in enumerate(getattr(leaf, 'names', ())):
            axis = dict(RULES).get(name)
            if axis == 'tensor' and mesh.shape[axis] > 1 and axis not in _axes(spec[place]):
                spec = [_entry(tuple(each for each in _axes(entry) if each != axis)) for entry in spec]
                if name == 'vocab':
                    spec[place] = axis
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(computing, boxed, stored, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))


def without_fsdp(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of what is gathered along 'fsdp'."""
    return NamedSharding(sharding.mesh, PartitionSpec(*(
        _entry(tuple(axis for axis in _axes(entry) if axis != 'fsdp')) for entry in sharding.spec)))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes[0] if len(axes) == 1 else axes or None


def check_memory(state: PyTree, devices: Devices) -> None:
    """Raises UserError if a state of these shapes alone exceeds the memory of all devices."""
    mine = [device for device in devices if device in jax.local_devices()]  # only these report their memory
    if not mine:
        return
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    limits = [(device.memory_stats() or {}).get('bytes_limit') for device in mine]
    # Devices that do not report a limit are CPUs, which share the machine's memory. The devices of other processes are
    # assumed to have as much each.
    known = [limit for limit in limits if limit is not None]
    here = sum(known) if len(known) == len(mine) else os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    there = here * len(devices) / len(mine)
    if needed > there:
        raise UserError(f'the parameters of this model and the state of its optimizer take {needed / 2 ** 30:,.0f} GB, '
                        f'but there are {there / 2 ** 30:,.0f} GB of memory: lower config.model.d_model, num_layers, '
                        'd_ff or data.tokenizer.vocab_size')
