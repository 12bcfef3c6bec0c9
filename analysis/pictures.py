"""Pictures of attention (matrices of tokens, or shades over an image or a series) and of positional encodings."""

import contextlib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Num

from inference.outputs import Output
from inference.predict import Predictor
from inference.predictions import Prediction
from inference.text import TextModel
from input_pipeline.input_format import visible_steps
from model.patches import grid_sinusoids, patch_grid, visible_patches
from runtime.errors import UserError
from runtime.files import expanded, naming, replaced
from runtime.once import warn_once

if TYPE_CHECKING:  # imported in the functions that draw, because the import is slow
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BOX = '\u25a1'  # is drawn for a character that no font has
MOST_CLASSES = 40  # maximum number of classes of a confusion matrix
MOST_INCHES = 12  # maximum width of several panels in one row
MOST_TOKENS = 128  # maximum number of tokens on an axis; more names would not be readable
MOST_VALUES = 4  # maximum number of predicted values in the title of a picture


def chosen(weights: Mapping[str, Float[np.ndarray, '_ _ _ _']],
           look: str) -> tuple[str, Float[np.ndarray, 'panel t s'], list[str]]:
    """Returns the kind of attention that `look` chooses, its matrices, and a title for each matrix.

    `look` is KIND[:LAYER[:HEAD]]. KIND is 'cross', 'encoder' or 'decoder'. An empty KIND selects 'cross' if the model
    has it, otherwise the first kind of the model. LAYER is a number from 1, or 'last' (the default). HEAD is a number
    from 1, 'mean', or 'all' (the default), which selects the mean and each head. 'encoder:rollout' is the attention
    rollout over all layers.

    Raises:
      UserError: if the model has no such attention. The message lists the choices.
    """
    kind, layer, head, *rest = [*look.split(':'), '', ''] if look.count(':') < 2 else look.split(':')
    if any(rest):
        raise UserError(f'look={look!r} must be KIND[:LAYER[:HEAD]]')
    kind = chosen_kind(weights, kind)
    if layer == 'rollout':
        if kind != 'encoder' or head:
            raise UserError(f'look={look!r}: attention rollout combines all heads of the encoder. Use '
                            'look=encoder:rollout')
        return kind, attention_rollout(weights[kind])[None], ['attention rollout']
    layers, heads = weights[kind].shape[:2]
    number = _number(layer if layer not in ('', 'last') else str(layers), layers, 'layer', look)
    if head not in ('', 'all', 'mean'):
        index = _number(head, heads, 'head', look)
        return kind, weights[kind][number - 1, index - 1][None], [f'layer {number}, head {index}']
    of_layer = weights[kind][number - 1]
    mean = of_layer.mean(axis=0)[None]
    if head == 'mean' or heads == 1:
        return kind, mean, [f'layer {number}, mean of the heads' if heads > 1 else f'layer {number}']
    return kind, np.concatenate([mean, of_layer]), [f'layer {number}, mean', *(f'head {1 + h}' for h in range(heads))]


def attention_rollout(weights: Float[np.ndarray, 'layer head t t']) -> Float[np.ndarray, 't t']:
    r"""Returns the attention rollout: how much of each input token reaches each output token through all layers.

    The rollout is $\prod_l (A_l + I) / 2$, with the last layer on the left. A_l is the mean of the attention weights
    over the heads of layer l. The identity matrix I stands for the residual connection. Abnar and Zuidema 2020,
    arXiv:2005.00928, section 3.
    """
    identity = np.eye(weights.shape[-1])
    mixed = (weights.mean(axis=1, dtype=np.float64) + identity) / 2
    return functools.reduce(lambda below, layer: layer @ below, mixed, identity).astype(weights.dtype)


def chosen_kind(weights: Mapping[str, Float[np.ndarray, '_ _ _ _']], kind: str) -> str:
    """Returns `kind`. For an empty `kind`, returns 'cross' if the model has it, otherwise the first kind of the model.

    Raises:
      UserError: if the model has no attention of this kind. The message lists the kinds.
    """
    if not weights:
        raise UserError('this model has no attention weights to draw. Use a model with attention')
    kind = kind or ('cross' if 'cross' in weights else next(iter(weights)))
    if kind not in weights:
        raise UserError(f'look: the model has no attention of kind {kind!r}. Use {", ".join(weights)}')
    return kind


def answer_figure(model: TextModel | Predictor, answer: Output | Prediction, look: str = '',
                  weights: Mapping[str, Float[np.ndarray, '_ _ _ _']] | None = None) -> 'Figure':
    """Draws the attention that `look` chooses, with `attention_figure` for text or `example_figure` for an example.

    Patches of series that are hidden from the model are not queries.

    `weights` is the result of `model.attention` for the answer. By default, this function computes it.
    """
    if isinstance(answer, Prediction):
        assert isinstance(model, Predictor), 'only a Predictor returns a Prediction'
        example = model.seen(answer)
        grid, _ = patch_grid(example.shape[:-1], model.module.patch)
        _, panels, titles = chosen(weights or model.attention(answer), look)
        panels = panels[:, visible_tokens(model, example, panels.shape[1])]
        return example_figure(panels, example, grid, titles, _shortened(answer.cells))
    assert isinstance(model, TextModel), 'only a TextModel returns an Output'
    kind, panels, titles = chosen(weights or model.attention(answer), look)
    queries, keys = model.axes(answer)[kind]
    return attention_figure(panels, queries, keys, titles, model.left_out(answer))


def visible_tokens(model: Predictor, example: Num[np.ndarray, '*space channels'], count: int) -> Bool[np.ndarray, ' t']:
    """Returns which of the `count` tokens of an image or a series the model sees: a class token, and then the patches.

    A patch of a series is hidden from the model if all its steps are padding or missing.
    """
    if not model.form.masked:
        return np.ones(count, bool)
    return np.asarray(visible_patches(visible_steps(example[None]), model.module.patch, count)[0])


def axis_label(name: str, count: int, most: int) -> str:
    """Returns the label of an axis with `count` tokens, of which at most `most` are shown."""
    return f'{name} (first {most} of {count:,})'.lstrip() if count > most else name


def _shortened(cells: Sequence[str]) -> str:
    """Returns the class or the values of a prediction for a title, with at most MOST_VALUES values."""
    return ' '.join(cells[:MOST_VALUES]) + (' ...' if len(cells) > MOST_VALUES else '')


def attention_figure(weights: Float[np.ndarray, 'panel target source'], target: Sequence[str], source: Sequence[str],
                     titles: Sequence[str], left_out: int = 0) -> 'Figure':
    """Draws one matrix per panel, with a row for each query and a column for each key. Weight 1 is dark, 0 is white.

    Draws only the first MOST_TOKENS queries and keys. `left_out` is the number of tokens after the last query and key,
    which have no weights. The labels of the axes give the number of all tokens.
    """
    labels = [axis_label(name, len(tokens) + left_out, min(len(tokens), MOST_TOKENS))
              for name, tokens in (('keys', source), ('queries', target))]
    weights, target, source = weights[:, :MOST_TOKENS, :MOST_TOKENS], target[:MOST_TOKENS], source[:MOST_TOKENS]
    size = max(2.6, 0.24 * len(source)), max(2.4, 0.24 * len(target))
    figure, panels = _panels(len(weights), (size[0] + 1.1, size[1] + 1.3), beside=0.8)
    for axes, matrix, title in zip(panels, weights, titles, strict=True):
        image = axes.imshow(matrix, cmap='Blues', vmin=0, vmax=1, aspect='auto')
        axes.set_title(_printable(title), fontsize=9)
        axes.set_xlabel(labels[0], fontsize=8)
        axes.set_ylabel(labels[1], fontsize=8)
        axes.set_xticks(range(len(source)), [_printable(token) for token in source], rotation=90, fontsize=7)
        axes.set_yticks(range(len(target)), [_printable(token) for token in target], fontsize=7)
        axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=panels, fraction=0.4 / figure.get_figwidth(), pad=0.01, aspect=30)
    bar.set_label('weight', fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return _with_fonts(figure)


def example_figure(weights: Float[np.ndarray, 'panel t s'], example: Num[np.ndarray, '*space channels'],
                   grid: tuple[int, ...], titles: Sequence[str], title: str) -> 'Figure':
    """Draws an image or a series, and the attention weights of the patches on top.

    The query is the class token. Without a class token, the weights are the mean over all queries.
    Patches with large weights are bright over an image and dark over a series. Each panel has its own scale, from 0 to
    its largest weight.
    """
    from matplotlib.ticker import MaxNLocator
    patches = math.prod(grid)
    looked_at = weights[:, 0, -patches:] if weights.shape[-1] > patches else weights.mean(axis=1)
    image = example.ndim == 3
    figure, panels = _panels(1 + len(weights), (3.0, 2.8) if image else (5.2, 2.4))
    for index, axes in enumerate(panels):
        shade = None if index == 0 else looked_at[index - 1].reshape(grid)
        axes.set_title(_printable(title if index == 0 else titles[index - 1]), fontsize=9)
        shaded = (_over_image if image else _over_series)(axes, example, shade)
        axes.tick_params(labelsize=7, length=0)
        if shaded:
            bar = figure.colorbar(shaded, cax=axes.inset_axes((1.03, 0, 0.04, 1)), label='weight',
                                  ticks=MaxNLocator(4))
            if bar.solids is not None:
                bar.solids.set_alpha(1)
            bar.ax.tick_params(labelsize=7)
            bar.ax.yaxis.label.set_fontsize(8)
    return _with_fonts(figure)


def heads_figure(scores: Mapping[str, Float[np.ndarray, 'layer head']], title: str) -> 'Figure':
    """Draws a panel for each kind of attention, with a number for each head. Dark cells have high numbers.

    Raises:
      UserError: if `scores` is empty.
    """
    if not scores:
        raise UserError("scores={} is empty. Use the scores of at least one kind of attention, as {'cross': scores}")
    lowest, highest = (float(end([end(values) for values in scores.values()])) for end in (np.min, np.max))
    layers, heads = np.max([values.shape for values in scores.values()], axis=0)
    longest = max(len(f'{value:.3g}') for values in scores.values() for value in values.flat)
    width, height = max(2.8, 0.7 + heads * max(0.5, 0.09 * longest)), max(2.2, 0.8 + 0.22 * layers)
    columns = max(1, min(len(scores), int(MOST_INCHES / width)))
    figure, panels = _panels(len(scores), (max(width, 0.09 * len(title) / columns), height), columns)
    for axes, (kind, values) in zip(panels, scores.items(), strict=True):
        axes.imshow(values, cmap='Blues', vmin=lowest, vmax=highest, aspect='auto')
        for layer, head in np.ndindex(values.shape):
            value = values[layer, head]
            axes.text(head, layer, f'{value:.3g}', ha='center', va='center', fontsize=9,
                      color='white' if value > (lowest + highest) / 2 else 'black')
        axes.set_title(_printable(kind), fontsize=9)
        axes.set_xticks(range(values.shape[1]), [f'head {1 + head}' for head in range(values.shape[1])], fontsize=7)
        axes.set_yticks(range(values.shape[0]), [f'layer {1 + layer}' for layer in range(values.shape[0])], fontsize=7)
        axes.tick_params(length=0)
    figure.suptitle(_printable(title), fontsize=10)
    return _with_fonts(figure)


def matrix_figure(values: Float[np.ndarray, 'row column'], rows: Sequence[str], columns: Sequence[str],
                  label: str, axis_labels: tuple[str, str] = ('', '')) -> 'Figure':
    """Draws a matrix with names for its rows and columns. Negative numbers are red, and positive numbers are blue.

    `axis_labels` are the labels of the columns and of the rows. Draws only the first MOST_TOKENS rows and columns. The
    labels of the axes then also give the number of all rows or columns.
    """
    across, down = (axis_label(name, len(names), MOST_TOKENS)
                    for name, names in zip(axis_labels, (columns, rows), strict=True))
    rows, columns = ([_printable(name) for name in names[:MOST_TOKENS]] for names in (rows, columns))
    values, label = values[:len(rows), :len(columns)], _printable(label)
    # A row or column needs a minimum size. The names shrink the matrix, and a label must not be longer than its side.
    size = (max(3.0, 0.32 * len(columns), 0.1 * len(across)) + 0.09 * max(map(len, rows)),
            max(2.0, 0.26 * len(rows), 0.1 * len(down), 0.1 * len(label)) + 0.09 * max(map(len, columns)) + 0.5)
    figure, (axes,) = _panels(1, size)
    highest = max(float(np.nanmax(np.abs(values), initial=0)), 1e-9)
    signed = bool(np.nanmin(values, initial=0) < 0)
    image = axes.imshow(values, cmap='RdBu' if signed else 'Blues', vmin=-highest if signed else 0, vmax=highest,
                        aspect='auto')
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(length=0)
    axes.set(xlabel=across, ylabel=down)
    figure.colorbar(image, label=label)
    return _with_fonts(figure)


def confusion_figure(confusion: Mapping[str, Mapping[str, int]], classes: Sequence[str]) -> 'Figure':
    """Draws a confusion matrix. Row i, column j is the share of the examples of class i that are predicted as class j.

    If there are more than MOST_CLASSES classes, only the classes with the most errors are drawn.

    Args:
      confusion: {true class: {predicted class: number of examples}}.
      classes: the names of the classes, in the order of the rows.
    """
    errors = dict.fromkeys(classes, 0)
    for true, row in confusion.items():
        for predicted, count in row.items():
            if predicted != true:
                errors[true] += count
                errors[predicted] += count
    drawn = set(sorted(classes, key=lambda name: -errors[name])[:MOST_CLASSES])
    names = [name for name in classes if name in drawn]
    counts = np.array([[confusion.get(true, {}).get(predicted, 0) for predicted in names] for true in names])
    totals = np.array([sum(confusion.get(true, {}).values()) for true in names])
    side = 2 + 0.3 * len(names)
    figure, (axes,) = _panels(1, (side, side))
    axes.imshow(counts / np.maximum(totals, 1)[:, None], cmap='Blues', vmin=0, vmax=1)
    labels = [_printable(name[:20]) for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=90)
    axes.set_yticks(range(len(names)), labels)
    axes.set(xlabel='predicted class', ylabel='true class')
    if len(names) < len(classes):
        axes.set_title(f'the {len(names)} of {len(classes)} classes with the most errors')
    for row, column in np.argwhere(counts):
        dark = counts[row, column] > totals[row] / 2
        axes.text(column, row, str(counts[row, column]), ha='center', va='center', fontsize=7,
                  color='white' if dark else 'black')
    return _with_fonts(figure)


def positions_figure(length: int | tuple[int, ...] = 100, d_model: int = 100) -> 'Figure':
    """Draws the sinusoidal encoding (Vaswani et al. 2017, section 3.5).

    A row is a position, and a column is a dimension. If `length` is a tuple, the positions are the patches of a grid of
    this shape, row by row.
    """
    encoding = grid_sinusoids((length,) if isinstance(length, int) else length, d_model)
    figure, (axes,) = _panels(1, (6, 5))
    image = axes.imshow(np.asarray(encoding), cmap='RdBu', vmin=-1, vmax=1, aspect='auto',
                        interpolation='nearest')  # each number is one rectangle, and the file is small
    axes.set(xlabel='dimension', ylabel='position', title='sinusoidal positional encoding')
    figure.colorbar(image, label='value')
    return figure


def plot_series(axes: 'Axes', series: Num[np.ndarray, 'time channels'], **style: Any) -> None:
    """Draws each channel of a series as a line, and each value between two missing values (NaN) as a dot.

    `style` contains properties of the lines. Without the dots, values without a neighbouring value are invisible.
    """
    missing = np.pad(np.isnan(series), ((1, 1), (0, 0)), constant_values=True)
    lines = axes.plot(np.arange(len(series)) + 0.5, series, **style)
    for line, isolated in zip(lines, (missing[:-2] & missing[2:]).T, strict=True):
        line.set(marker='o', markersize=4, markevery=isolated)
    axes.set_xlim(0, len(series))


def save_figure(figure: 'Figure', path: str | Path) -> None:
    """Writes a figure to a file. The ending of `path` is the format, such as .png (the default), .pdf or .svg.

    An old file is replaced only when the new file is complete, except with the formats .eps, .pgf and .ps.

    Raises:
      UserError: if the file cannot be written, or its ending is not a format of matplotlib.
    """
    import matplotlib
    path = expanded(path)
    ending = path.suffix[1:].lower()
    if ending and ending not in figure.canvas.get_supported_filetypes():
        raise UserError(f'the picture {path} cannot be written: there is no format .{ending}. Use .png, .pdf or .svg')
    path = path if ending else path.with_name(f'{path.name}.png')
    # The content of these formats depends on the name of the file, so they are written directly.
    output = contextlib.nullcontext(path) if ending in ('eps', 'pgf', 'ps') else replaced(path)
    with naming(path), output as partial, matplotlib.rc_context({'text.usetex': False}):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(partial, format=ending or 'png', dpi=100)


def _panels(count: int, size: tuple[float, float], columns: int = 0, beside: float = 0.0):
    """Returns a figure and its `count` panels.

    Args:
      count: the number of panels.
      size: the width and height of a panel in inches.
      columns: the number of columns of panels. 0 arranges the panels approximately in a square.
      beside: the width in inches of a color bar to the right of all panels.
    """
    from matplotlib.figure import Figure
    columns = columns or math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * size[0] + beside, rows * size[1]), layout='constrained')
    return figure, [figure.add_subplot(rows, columns, 1 + index) for index in range(count)]


def _over_image(axes, image, shade):
    pixels = image.astype(np.float32)
    pixels = (pixels - pixels.min()) / max(float(np.ptp(pixels)), 1e-9)
    axes.imshow(pixels if image.shape[-1] == 3 else pixels.mean(axis=-1), cmap='gray')
    axes.set_axis_off()
    if shade is None:
        return None
    height, width = image.shape[:2]
    return axes.imshow(shade, cmap='inferno', vmin=0, alpha=0.6, extent=(-0.5, width - 0.5, height - 0.5, -0.5))


def _over_series(axes, series, shade):
    from matplotlib.colors import LinearSegmentedColormap
    plot_series(axes, series, linewidth=0.8, zorder=2)
    axes.set_xlabel('step of the series', fontsize=8)
    axes.set_ylabel('value', fontsize=8)
    if shade is None:
        return None
    # Only light shades of grey are used, so that the line of each channel is visible everywhere.
    greys = LinearSegmentedColormap.from_list('greys', ['white', '0.65'])
    return axes.imshow(shade.reshape(1, -1), cmap=greys, vmin=0, aspect='auto',
                       extent=(*axes.get_xlim(), *axes.get_ylim()))


def _number(text: str, most: int, what: str, look: str) -> int:
    if not re.fullmatch('[0-9]{1,9}', text) or not 1 <= int(text) <= most:
        raise UserError(f'look={look!r}: there is no {what} {text!r}. Use a number from 1 to {most}')
    return int(text)


def _printable(text: str) -> str:
    """Returns a text without the characters that matplotlib cannot draw."""
    shown = ''.join(character if character.isprintable() else f'U+{ord(character):04X}' for character in text)
    for character in set(shown):
        if not _family(character):
            warn_once(f'pictures show a box ({BOX}) in place of each character that no installed font has. Install '
                      'fonts for the language, such as Noto, or use decode.py --explain: its page uses the fonts of '
                      'the browser')
            shown = shown.replace(character, BOX)
    return shown.replace('$', r'\$')  # a dollar would be the start of a formula


def _with_fonts(figure: 'Figure') -> 'Figure':
    """Adds to each text of a figure the fonts of the characters that matplotlib's configured fonts do not have."""
    from matplotlib.text import Text
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        families = text.get_fontfamily()
        text.set_fontfamily([*families, *sorted({*map(_family, text.get_text())} - {'', *families})])
    return figure


@functools.cache
def _family(character: str) -> str:
    """Returns a font family that has a character, or '' if no font has it. The configured families have priority."""
    import matplotlib
    from matplotlib.font_manager import FontProperties, findfont, get_font
    for family in matplotlib.rcParams['font.family']:
        if get_font(findfont(FontProperties(family=[family]))).get_char_index(ord(character)):
            return family
    return _installed_families().get(ord(character), '')


@functools.cache
def _installed_families() -> dict[int, str]:
    """Returns {code point: family} for the characters of all installed fonts. Sans serif families have priority."""
    from matplotlib.font_manager import findSystemFonts, fontManager
    from matplotlib.ft2font import FT2Font
    # matplotlib keeps its list of fonts in a file. Fonts that were installed later are not in the list.
    for path in sorted({*findSystemFonts()} - {entry.fname for entry in fontManager.ttflist}):
        with contextlib.suppress(Exception):  # matplotlib skips unusable fonts in the same way
            fontManager.addfont(path)
    files = {}
    for entry in sorted(fontManager.ttflist, key=lambda entry: (entry.style != 'normal', entry.weight != 400)):
        # The first kind has a box for every character. matplotlib cannot draw the second kind.
        if not re.search('Last ?Resort|Color Emoji', entry.name):
            files.setdefault(entry.name, entry.fname)
    families = {}
    # Later families replace earlier families.
    for family in sorted(files, key=lambda name: ('Sans' not in name, name), reverse=True):
        with contextlib.suppress(OSError, RuntimeError):  # a file that was removed or is damaged
            families.update(dict.fromkeys(FT2Font(files[family]).get_charmap(), family))
    return families
