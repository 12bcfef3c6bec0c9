"""Parameters as a table: which there are, of what shape, how many."""

from collections.abc import Mapping
from typing import Any

import jax


def parameter_table(params: Mapping[str, Any]) -> str:
    """A line for each array, 'path  shape  count', grouped by the outermost names, each group with its sum; at the
    end the total. Paths are those of the modules in model/: decoder/layers_0/cross_attention/query/kernel."""
    rows, total = [], 0
    for part, tree in params.items():
        leaves = jax.tree_util.tree_leaves_with_path({part: tree})
        count = sum(leaf.size for _, leaf in leaves)
        rows += [('/'.join(step.key for step in path), ' x '.join(map(str, leaf.shape)), f'{leaf.size:,}')
                 for path, leaf in leaves]
        rows += [(f'= {part}', '', f'{count:,}'), ('', '', '')]
        total += count
    rows.append(('= all', '', f'{total:,}'))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return '\n'.join(f'{path:<{widths[0]}}  {shape:>{widths[1]}}  {count:>{widths[2]}}'.rstrip()
                     for path, shape, count in rows)
