"""Summaries for the log: a table of a model's parameters, the operations of a program, a duration in words."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax.extend import core

from model import parameter_count

LAYER = re.compile(r'layers_\d+')


def parameter_table(params: Any) -> str:
    """Returns a table of the parts of a model, with the number and the shapes of the parameters of each part.

    The table has only one entry for all layers of a stack.

    `params` is the nested dict of a module's parameters, or of their shapes.
    """
    lines = [('part', 'parameters', 'shapes')]

    def add(name: str, part: Any, depth: int) -> None:
        lines.append(('  ' * depth + name, f'{parameter_count(part):,}', shapes(part)))

    for name, part in params.items():
        layers = [layer for layer in part if LAYER.fullmatch(layer)] if isinstance(part, Mapping) else []
        if not layers:
            add(name, part, 0)
            continue
        lines.append((name, f'{parameter_count(part):,}', ''))
        lines.append((f'  each of {len(layers)} layers' if len(layers) > 1 else '  its layer',
                      f'{parameter_count(part[layers[0]]):,}', ''))
        for name, sublayer in part[layers[0]].items():
            add(name, sublayer, 2)
        for other in part:
            if other not in layers:
                add(other, part[other], 1)
    lines.append(('all', f'{parameter_count(params):,}', ''))
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return '\n'.join(f'{name:{widths[0]}}  {count:>{widths[1]}}  {shape}'.rstrip() for name, count, shape in lines)


def shapes(part: Any) -> str:
    """Returns the shapes of a part of a model: 'query.kernel 128x4x32, ...', or '128x4x32' if it is one array."""
    def sizes(leaf: Any) -> str:
        return 'x'.join(map(str, leaf.shape)) or 'scalar'

    leaves = flatten_dict(part, sep='.') if isinstance(part, Mapping) else {'': part}
    return ', '.join(f'{name} {sizes(leaf)}'.strip() for name, leaf in leaves.items())


def matmul_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """Returns the number of floating-point operations of the matrix products in `function(*arguments)`.

    A product of [m, k] and [k, n] counts 2 m k n, once for each iteration of a loop. Arguments may be shapes.
    Nothing is computed or compiled.
    """
    return _flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def _flops(jaxpr: core.Jaxpr) -> int:
    total, equations = 0, list[Any](jaxpr.eqns)
    for equation in equations:
        if equation.primitive.name == 'ragged_dot_general':  # [m, k]; each row has one of several matrices [k, n]
            total += 2 * math.prod(equation.invars[0].aval.shape) * equation.outvars[0].aval.shape[-1]
        if equation.primitive.name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            left, product = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(product) * math.prod(left[axis] for axis in contracted)
        values = equation.params.values()
        if equation.primitive.name == 'cond':  # only one branch runs, so the largest branch is counted
            total += max(_flops(branch.jaxpr) for branch in equation.params['branches'])
            continue
        inner = [item for value in values for item in (value if isinstance(value, tuple) else [value])]
        inner = [item.jaxpr if isinstance(item, core.ClosedJaxpr) else item for item in inner]
        total += equation.params.get('length', 1) * sum(  # the number of iterations of a scan
            _flops(item) for item in inner if isinstance(item, core.Jaxpr))
    return total


def duration(seconds: float) -> str:
    """Returns a duration as text, such as '40 s', '12 min', '3.5 h' or '2.1 days'."""
    for most, length, unit in (90, 1, 's'), (5400, 60, 'min'):
        if seconds < most:
            return f'{seconds / length:.0f} {unit}'
    return f'{seconds / 3600:.1f} h' if seconds < 48 * 3600 else f'{seconds / 86_400:.1f} days'
