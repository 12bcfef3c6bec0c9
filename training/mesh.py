"""The mesh of devices, and the sharding of each array of a training.

The mesh has three axes. The rows of a batch are sharded over 'data' and 'fsdp'. Parameters and optimizer state are
sharded over 'fsdp' and 'tensor'. Along 'fsdp', each device stores a shard, and gathers the parameters for the duration
of a step (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054). Along 'tensor', each device computes a share of every
matrix product (Shoeybi et al. 2019, arXiv:1909.08053). XLA inserts the communication. The results are the same on every
mesh, up to rounding.
"""

import collections
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.linen.spmd import logical_to_mesh_sharding
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from ml_collections import ConfigDict

from configs.options import AXES
from runtime.errors import UserError

ROWS = PartitionSpec(('data', 'fsdp'))  # the sharding of a batch
RULES = (  # name that a module gives to an axis of a parameter -> axis of the mesh; earlier rules take precedence
    ('vocab', 'tensor'),     # tokens of a vocabulary, or classes
    ('heads', 'tensor'),     # attention heads
    ('mlp', 'tensor'),       # width inside a feed-forward or alignment network
    ('gates', 'tensor'),     # gates and candidates of a recurrent cell
    ('embed', 'fsdp'),       # width of the model (d_model)
    ('state', 'fsdp'),       # width of a recurrent state
    ('kv', None),            # width of a head
    ('position', None),      # rows of a table of positions
    ('patch', None),         # values in a patch
)

Devices = Sequence[Any]  # a sequence of jax.Device, which type checkers do not accept as a type

log = logging.getLogger('allyouneed.train')


def make_mesh(config: ConfigDict | Mapping[str, Any], devices: Devices | None = None) -> Mesh:
    """Returns the mesh of `config.parallel` on the given devices, by default all devices of all processes.

    Raises:
      UserError: if the product of the sizes is not the number of devices.
    """
    devices = devices or jax.devices()
    sizes = mesh_sizes(config, len(devices), f'there are {len(devices)} devices ({devices[0].device_kind})')
    shape = tuple(sizes.values())
    # JAX makes Explicit axes by default, and look-ups in a table of embeddings fail on Explicit axes.
    types = (AxisType.Auto,) * len(AXES)
    if config.get('mode') == 'pmap':  # pmap needs the devices of a process to be neighbours
        by_process = sorted(devices, key=lambda device: (device.process_index, device.id))
        return Mesh(np.reshape(by_process, shape), AXES, axis_types=types)
    if len({getattr(device, 'slice_index', 0) for device in devices}) == 1:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    return Mesh(_over_slices(devices, shape), AXES, axis_types=types)


def _over_slices(devices: Devices, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the devices of several TPU slices, or of several machines with GPUs, in the shape of the mesh.

    The network between slices is slower than the network within a slice. So the first axes of the mesh connect the
    slices, and as many as possible of the last axes stay within a slice.
    """
    sizes = collections.Counter(device.slice_index for device in devices)
    if len({*sizes.values()}) > 1:
        return np.reshape(sorted(devices, key=lambda device: (device.slice_index, device.id)), shape)
    between, left = [], len(sizes)  # the number of slices along each axis; the remaining factor of this number
    for size in shape:
        between.append(math.gcd(size, left))
        left //= between[-1]
    within = tuple(size // count for size, count in zip(shape, between, strict=True))
    return mesh_utils.create_hybrid_device_mesh(within, tuple(between), devices, allow_split_physical_axes=True)


def mesh_sizes(config: ConfigDict | Mapping[str, Any], count: int, available: str) -> dict[str, int]:
    """Returns the sizes of `config.parallel`, with -1 replaced by the remaining number of devices.

    Args:
      config: config.parallel.
      count: the number of devices.
      available: the devices in words, for the message: 'there are 8 devices'.

    Raises:
      UserError: if the product of the sizes is not the number of devices.
    """
    fixed = math.prod(config[axis] for axis in AXES if config[axis] != -1)
    sizes = {axis: count // fixed if config[axis] == -1 else config[axis] for axis in AXES}
    if math.prod(sizes.values()) != count:
        requested = ', '.join(f'{axis}={config[axis]}' for axis in AXES)
        others = [axis for axis in AXES if config[axis] != -1]
        advice = (f'Set {" and ".join(others)} to sizes whose product divides {count}' if len(others) < len(AXES) else
                  f'Use other sizes, or set one axis to -1 if the product of the others divides {count}')
        raise UserError(f'config.parallel: the product of {requested} must be the number of devices, but {available}. '
                        f'{advice}')
    return sizes


def check_kernel(model: ConfigDict, mesh: Mesh) -> None:
    """Raises UserError if cuDNN's attention kernel does not support the mesh.

    If `tensor` does not divide the heads of keys and values, these heads are on all devices. Then queries and keys have
    different shardings, which JAX's call of cuDNN refuses. `model` is config.model.
    """
    groups, tensor = model.num_key_value_heads or model.num_heads, mesh.shape['tensor']
    if (model.attention_kernel == 'fused' and model.dtype == 'bfloat16' and jax.default_backend() == 'gpu'
            and groups != model.num_heads and groups % tensor):
        raise UserError(f'config.model.attention_kernel=fused: parallel.tensor={tensor} must divide '
                        f'num_key_value_heads={groups}. Use attention_kernel=auto')


def shardings_of(boxed: PyTree, mesh: Mesh) -> PyTree[NamedSharding]:
    """Returns the sharding of each leaf of a state, according to RULES.

    `boxed` contains the shapes, in Flax metadata boxes with the names of the axes. Leaves without names, such
    as biases, are replicated. Sometimes the size of a mesh axis does not divide the size of the matrix axis: for
    example, a vocabulary of 8,001 over tensor=2, or two key heads over tensor=4. Then another axis of the matrix is
    sharded instead: the largest axis whose size is a multiple of the size of the mesh axis. So the matrix is still
    stored in shards, without padding. Such axes are logged.
    """
    moved = set()

    def fitting(leaf):
        shape = nn.unbox(leaf)
        if not hasattr(shape, 'shape'):
            return shape  # optax's placeholder for a frozen parameter
        sharding = logical_to_mesh_sharding(nn.get_partition_spec(leaf), mesh, RULES)
        axes = [_axes(entry) for entry in sharding.spec]  # empty for a leaf without names
        for place, size in enumerate(shape.shape[:len(axes)]):
            if axes[place] and size % mesh.shape[axes[place][0]]:
                axis, axes[place] = axes[place], ()
                moved.add(f'{size} over {axis[0]}={mesh.shape[axis[0]]}')
                fits = [other for other, length in enumerate(shape.shape) if other != place
                        and length % math.prod(mesh.shape[name] for name in axes[other] + axis) == 0]
                if fits:
                    axes[max(fits, key=lambda other: shape.shape[other])] += axis
        return NamedSharding(mesh, PartitionSpec(*map(_entry, axes)))

    fitted = jax.tree.map(fitting, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))
    if moved:
        log.info('the mesh does not divide these axes: %s. For each array, another axis is sharded, or the array is '
                 'replicated', ', '.join(sorted(moved)))
    return fitted


def computing_shardings_of(boxed: PyTree, stored: PyTree[NamedSharding], mesh: Mesh) -> PyTree[NamedSharding]:
    """Returns the sharding of each parameter during a step: the `stored` sharding, but gathered along 'fsdp'.

    Sometimes the size of the mesh axis 'tensor' does not divide the size of an axis. If the axis is a vocabulary, the
    axis is still sharded along 'tensor', and XLA pads it within the program. Any other axis, such as two key heads over
    four devices, is gathered, and each device computes the whole axis.
    """
    def computing(leaf, sharding):
        spec = list(without_fsdp(sharding).spec)
        for place, name in enumerate(getattr(leaf, 'names', ())):
            axis = dict(RULES).get(name)
            if axis == 'tensor' and mesh.shape[axis] > 1 and axis not in _axes(spec[place]):
                spec = [_entry(tuple(other for other in _axes(entry) if other != axis)) for entry in spec]
                if name == 'vocab':
                    spec[place] = axis
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(computing, boxed, stored, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))


def without_fsdp(sharding: NamedSharding) -> NamedSharding:
    """Returns `sharding` without the mesh axis 'fsdp'."""
    return NamedSharding(sharding.mesh, PartitionSpec(*(
        _entry(tuple(axis for axis in _axes(entry) if axis != 'fsdp')) for entry in sharding.spec)))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes[0] if len(axes) == 1 else axes or None


def check_memory(state: PyTree, devices: Devices) -> None:
    """Raises UserError if `state`, a tree of arrays or shapes, is larger than the memory of all devices together."""
    local = [device for device in devices if device in jax.local_devices()]  # only these report their memory
    if not local:
        return
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    limits = [limit for device in local if (limit := (device.memory_stats() or {}).get('bytes_limit'))]
    # Devices that do not report a limit are CPUs, which share the memory of the machine. We assume that the devices of
    # other processes have as much memory.
    machine = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    available = (sum(limits) if len(limits) == len(local) else machine) * len(devices) / len(local)
    if needed > available:
        raise UserError(f'the parameters of this model and the state of its optimizer take {needed / 2 ** 30:,.0f} '
                        f'GiB, but the devices have {available / 2 ** 30:,.0f} GiB. Lower config.model.d_model, '
                        'num_layers, d_ff or data.tokenizer.vocab_size')
