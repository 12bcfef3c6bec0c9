"""Pictures of attention, with the tokens on both axes."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure


def attention_figure(weights: Float[np.ndarray, 'panel target source'], target: Sequence[str], source: Sequence[str],
                     titles: Sequence[str]) -> Figure:
    """One matrix a panel: rows are what looks, columns what is looked at, dark is much."""
    columns = math.ceil(math.sqrt(len(weights)))
    rows = -(-len(weights) // columns)
    size = max(2.6, 0.24 * len(source)), max(2.4, 0.24 * len(target))
    figure = Figure(figsize=(columns * (size[0] + 0.9), rows * (size[1] + 1.1)), layout='constrained')
    for index, (matrix, title) in enumerate(zip(weights, titles, strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.imshow(matrix, cmap='Blues', vmin=0, vmax=1, aspect='auto')
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(source)), [_printable(token) for token in source], rotation=90, fontsize=7)
        axes.set_yticks(range(len(target)), [_printable(token) for token in target], fontsize=7)
        axes.tick_params(length=0)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({'text.usetex': False, 'text.parse_math': False}):
        figure.savefig(path, dpi=100)


def _printable(token: str) -> str:
    # A dollar would begin mathematics; a piece may hold a character that no font has.
    token = token.replace('$', r'\$')
    return ''.join(character if character.isprintable() else f'U+{ord(character):04X}' for character in token)
