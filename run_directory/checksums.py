"""Computes checksums and shapes of the arrays of a state, by path, and compares them with a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

from runtime.errors import UserError

SEEDS = (0x9e3779b9, 0x7f4a7c15)
# NumPy computes the checksums of small arrays, because that needs no compilation. The limits are numbers of values.
SMALL_ON_HOST = 2 ** 22
SMALL_ON_DEVICE = 2 ** 12
PART = 2 ** 16  # number of values that are hashed at a time; they fit into the cache of a core


@jax.jit
def checksum(array: Array) -> UInt32[Array, '2']:
    """Returns a checksum of an array. The checksum does not depend on the sharding of the array.

    The checksum consists of two sums of hashes of (value, index), mod 2^32. The hash is the finaliser of MurmurHash3
    (Appleby, public domain), applied to the bits of the value. The finaliser is a bijection of 32-bit numbers. So a
    change of one value always changes the checksum. A change of several values leaves the checksum unchanged with
    probability 2^-64.
    """
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2 ** 32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    hashes = tuple(_mixed(words ^ _mixed(place + jnp.uint32(seed))) for seed in SEEDS)
    # One reduction computes both sums. With two calls of jnp.sum, XLA on CPUs would write the hashes to memory. This
    # would take twice the memory of the array and five times as long.
    sums = jax.lax.reduce(hashes, (jnp.uint32(0), jnp.uint32(0)), lambda x, y: (x[0] + y[0], x[1] + y[1]),
                          tuple(range(words.ndim)))
    return jnp.stack(sums)


def numpy_checksum(array: Shaped[np.ndarray, '...']) -> UInt32[np.ndarray, '2']:
    """Returns the same checksum as `checksum`, computed by NumPy without compilation."""
    words = np.ascontiguousarray(array).reshape(-1)
    words, total = words.view({1: np.uint8, 2: np.uint16}.get(array.itemsize, np.uint32)), np.zeros(2, np.uint32)
    for begin in range(0, len(words), PART):
        part = words[begin:begin + PART].astype(np.uint32)
        place = np.arange(begin, begin + len(part)).astype(np.uint32)
        total += np.array([_mixed(part ^ _mixed(place + np.uint32(seed))).sum(dtype=np.uint32) for seed in SEEDS])
    return total


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> 16)) * np.uint32(0x85ebca6b)
    x = (x ^ (x >> 13)) * np.uint32(0xc2b2ae35)
    return x ^ (x >> 16)


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree as {path: leaf}, with paths such as 'params/Dense_0/kernel'.

    A state has the same paths in memory and in Orbax's checkpoint.
    """
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def path_tree(tree: Any) -> Any:
    """Returns a copy of a tree in which each leaf is replaced by its path, such as 'params/Dense_0/kernel'."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path), tree)


def checksums(tree: Any) -> dict[str, list[int]]:
    """Returns the checksums of the arrays in a tree, as {path: checksum}."""
    # The checksums are computed one after the other, because concurrent programs on several devices may deadlock.
    return {path: np.asarray(numpy_checksum(np.asarray(leaf)) if _is_small(leaf) else checksum(leaf)).tolist()
            for path, leaf in by_path(tree).items()}


def _is_small(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.size < SMALL_ON_HOST
    return leaf.is_fully_addressable and leaf.size < SMALL_ON_DEVICE


def shapes(tree: Any) -> dict[str, str]:
    """Returns the dtypes and shapes of the arrays in a tree, as {path: text}, with texts such as 'float32[4,3]'."""
    return {path: f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]' for path, leaf in by_path(tree).items()}


def refuse_other_arrays(folder: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raises UserError if the arrays of a checkpoint differ in name, shape or dtype from the required arrays.

    `saved` describes the arrays of the checkpoint in `folder`, and `wanted` describes the required arrays. Both are
    results of `shapes`. The message names a few arrays.
    """
    differences = {
        'missing in the checkpoint': sorted(wanted.keys() - saved.keys()),
        'only in the checkpoint': sorted(saved.keys() - wanted.keys()),
        'with another shape or dtype': [f'{path} {saved[path]} instead of {wanted[path]}' for path in sorted(saved)
                                        if saved[path] != wanted.get(path, saved[path])]}
    if any(differences.values()):
        listed = '; '.join(f'{len(paths)} {kind}: {", ".join(paths[:3])}{", ..." if len(paths) > 3 else ""}'
                           for kind, paths in differences.items() if paths)
        raise UserError(f'{folder} has other arrays ({len(saved)}) than this training ({len(wanted)}): {listed}. The '
                        'checkpoint is not damaged: the model, the optimizer or a library has changed since the '
                        'checkpoint was written. Use the version and the config that wrote the checkpoint, or start '
                        'again in another --workdir')


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/')
