"""Reads arrays of a checkpoint with TensorStore, the library that Orbax uses to store arrays.

Training uses Orbax to write and to restore checkpoints. Decoding does not use Orbax: for a small model, importing and
setting up Orbax takes ten times as long as reading the parameters.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
from jaxtyping import Shaped

METADATA = '_METADATA'  # Orbax's file with the names of all arrays
SEQUENCE = 1  # Orbax's key type of an index into a sequence


def stored_paths(folder: Path) -> Any:
    """Returns the train state of a checkpoint as a tree whose leaves are the paths of the arrays.

    `folder` is STEP/state. The tree has the same structure as the result of `checkpoints.described`.
    """
    root: dict[Any, Any] = {}
    for entry in _metadata(folder)['tree_metadata'].values():
        # A key is the name of a field, or an index into a sequence, such as the states of an optimizer chain.
        keys = [int(part['key']) if part['key_type'] == SEQUENCE else part['key'] for part in entry['key_metadata']]
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = '/'.join(map(str, keys))

    def with_sequences(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        values = {key: with_sequences(node[key]) for key in sorted(node)}
        return list(values.values()) if all(isinstance(key, int) for key in values) else values

    return with_sequences(root)


def read_arrays(folder: Path, paths: Iterable[str]) -> dict[str, Shaped[np.ndarray, '...']]:
    """Reads the arrays with the given paths, such as 'params/Dense_0/kernel'. `folder` is STEP/state, a real path."""
    driver, paths = 'zarr3' if _metadata(folder).get('use_zarr3') else 'zarr', list(paths)
    # Not a URL, where '#', '?' and '%' have a meaning. This driver refuses '..'.
    base = {'driver': 'file', 'path': f'{folder}/'}
    opened = [tensorstore.open({'driver': driver, 'kvstore': {
        'driver': 'ocdbt', 'base': base, 'path': f'{path.replace("/", ".")}/'}}, open=True, read=True)
        for path in paths]
    read = [store.result().read() for store in opened]  # all arrays are read at the same time
    return {path: np.asarray(array.result()) for path, array in zip(paths, read, strict=True)}


def _metadata(folder: Path) -> Any:
    return json.loads((folder / METADATA).read_text('utf-8'))
