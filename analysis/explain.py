"""Explains the answers of a model for sentences or images, as plain data and as one self-contained web page.

An `Explanation` holds the tokens, the attention of every layer and head, the probability of each token that the model
wrote, and the hypotheses of the answer. `Page` writes many explanations into one HTML page. The script of the page (in
explorer/) shows the explanations.
"""

import base64
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import re
import unicodedata
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Num

from analysis.pictures import axis_label, chosen_kind, plot_series, visible_tokens
from inference.outputs import Output, TokenProbability
from inference.predict import Predictor
from inference.predictions import Prediction
from inference.text import TextModel
from input_pipeline.tokenizer import BOS, EOS, PAD, SPACE, SPECIAL, UNK
from model.patches import patch_grid
from runtime.errors import UserError
from runtime.files import write_text

PARTS = Path(__file__).with_name('explorer')  # the parts of the page: text, style, and a script in two files
STEPS = 2000  # weights are rounded to multiples of 1 / STEPS, so the error is at most 1 / 4000
LARGEST = 2 ** 16 // STEPS  # the largest weight on the page, because multiples of 1 / STEPS are stored in 16 bits
MOST_TOKENS = 256  # maximum number of tokens of a row that are shown
MOST_BYTES = 64_000_000  # a page of this size is full, because browsers are slow with larger pages
ALTERNATIVES = 5
ENDS = {SPECIAL[token] for token in (PAD, BOS, EOS)}  # an unknown token may be inside a word
# How tokenizers write a byte, and how they write an invisible character.
ENCODED = re.compile(rb'<0x([0-9A-F]{2})>|<U\+([0-9A-F]{4,5}|10[0-9A-F]{4})>')
# Scripts without spaces between words: Thai to Burmese, Khmer, Chinese, Japanese. There, each piece is a word.
UNSPACED = re.compile('[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]')


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention weights of one kind of attention, and the pieces of text of the rows and columns.

    Attributes:
      kind: 'cross', 'encoder' or 'decoder'.
      weights: the weights of every layer and head.
      queries: a piece for each row.
      keys: a piece for each column.
      titles: the title of the rows and the title of the columns.
      written: if true, row t belongs to the same token as Explanation.predictions[t].
    """
    kind: str
    weights: Float[np.ndarray, 'layer head t s']
    queries: list[str]
    keys: list[str]
    titles: tuple[str, str]
    written: bool = False


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The data that the page shows for a sentence, an image or a series.

    Attributes:
      number: the position of the sentence, image or series in the input, from 1.
      texts: pairs (name, text). The input is first.
      attention: the attention of each kind. The page first shows the first kind.
      predictions: the prediction of each token that the model wrote; None for a token that is not predicted.
      answers: a header and rows: hypotheses with scores, or classes with probabilities.
      picture: a PNG of an image or a series.
      grid: the numbers of rows and columns of patches in the picture. The last tokens are the patches.
      hidden: the indices of the tokens that are hidden from the model: patches of padding and of missing values. They
        are not queries.
    """
    number: int
    texts: list[tuple[str, str]]
    attention: list[Attention]
    predictions: list[TokenProbability | None] = dataclasses.field(default_factory=list)
    answers: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    picture: bytes | None = None
    grid: tuple[int, int] | None = None
    hidden: list[int] = dataclasses.field(default_factory=list)


def explain_text(model: TextModel, output: Output, weights: dict[str, Float[np.ndarray, 'layer head t s']],
                 number: int = 1, reference: str = '') -> Explanation:
    """Returns the explanation of an output of a model that writes text.

    It has only the first MOST_TOKENS queries and keys, and for a language model only the tokens of the first window. If
    tokens are left out, the titles also give the number of all tokens.

    Args:
      model: the model that wrote the output.
      output: the output.
      weights: model.attention(output).
      number: the position of the text in the input, from 1.
      reference: the expected text, or ''.

    Raises:
      UserError: if the model has no attention.
    """
    first = chosen_kind(weights, '')
    titles, (read, written) = model.titles, model.text_names(output)
    left_out = model.left_out(output)

    def title(name, pieces):
        return axis_label(name, len(pieces) + left_out, min(len(pieces), MOST_TOKENS))

    attention = [
        Attention(kind, weights[kind][:, :, :MOST_TOKENS, :MOST_TOKENS], queries[:MOST_TOKENS], keys[:MOST_TOKENS],
                  (title(titles[kind][0], queries), title(titles[kind][1], keys)),
                  written=titles[kind][0] != 'source')
        for kind, (queries, keys) in model.axes(output).items() if kind in weights]
    attention.sort(key=lambda shown: shown.kind != first)
    predictions = [*[None] * model.unpredicted, *model.token_probabilities(output, ALTERNATIVES)]
    texts = [(read, output.source), (written, output.text), ('reference', reference)]
    answers = [(f'{hypothesis.score:.3f}', f'{hypothesis.log_prob:.3f}', hypothesis.text)
               for hypothesis in output.hypotheses]
    return Explanation(
        number, [(name, text) for name, text in texts if text or name and name == written],
        attention, predictions[:MOST_TOKENS], [('score', 'log-probability', written), *answers] if written else [])


def explain_example(model: Predictor, prediction: Prediction, number: int = 1, target: str = '') -> Explanation:
    """Returns the explanation of a prediction of the model for an image or a series.

    Raises:
      UserError: if the example is neither a series nor an image.
    """
    example = model.seen(prediction)
    if example.ndim > 3:
        raise UserError(f'--explain supports only images [height, width, channels] and series [time, channels], but an '
                        f'example has the shape {example.shape}. Remove --explain')
    (*rows, columns), _ = patch_grid(example.shape[:-1], model.module.patch)
    grid = math.prod(rows), columns
    patches = [f'row {1 + row}, column {1 + column}' if rows else f'window {1 + column}'
               for row in range(grid[0]) for column in range(columns)]
    unit = 'patches' if rows else 'windows'
    attention, hidden = [], []
    for kind, weights in model.attention(prediction).items():
        tokens = [*['class token'] * (weights.shape[-1] - len(patches)), *patches]
        visible = visible_tokens(model, example, len(tokens))
        hidden = np.flatnonzero(~visible).tolist()
        tokens = [token if seen else f'{token} (hidden)' for token, seen in zip(tokens, visible, strict=True)]
        attention.append(Attention(kind, weights, tokens, tokens, (unit, unit)))
    if model.classes is None:
        answers = [('output', 'value'), *zip(prediction.values, prediction.cells, strict=True)]
    else:
        answers = [('probability', 'class'),
                   *((f'{probability:.4f}', label) for label, probability in prediction.best(ALTERNATIVES))]
    best = prediction.cells
    texts = [('value', ' '.join(best)) if model.classes is None else ('class', best[0]),
             *([('expected', target)] if target else [])]
    return Explanation(number, texts, attention, [], answers, picture_of(example), grid, hidden)


class Page:
    """A collection of compressed explanations, which is written as one HTML file.

    Raises:
      UserError: if `most`, the maximum number of explanations, is below 1, or the file cannot be written. This is
        checked before any explanation is computed.
    """

    def __init__(self, path: str | Path, about: str, most: int):
        if most < 1:
            raise UserError(f'--explain_count={most} must be at least 1')
        self.path, self._about, self._most = Path(path), about, most
        self._items: list[str] = []
        self._bytes = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
                raise PermissionError('it is a folder' if self.path.is_dir() else 'its folder is write-protected')
        except OSError as error:
            raise UserError(f'--explain={path} cannot be written: {error}') from None

    @property
    def count(self) -> int:
        """The number of explanations on the page."""
        return len(self._items)

    @property
    def full(self) -> bool:
        """Whether the page has reached its maximum size or number of explanations."""
        return len(self._items) >= self._most or self._bytes >= MOST_BYTES

    def add(self, explanation: Explanation) -> None:
        """Adds an explanation to the page, even if the page is full."""
        self._items.append(_json(_packed(explanation)))
        self._bytes += len(self._items[-1])

    def write(self) -> None:
        """Writes the file, under a temporary name until the file is complete."""
        data = f'{{"about":{_json(self._about)},"steps":{STEPS},"items":[{",".join(self._items)}]}}'
        write_text(self.path, _html(data))


def words(pieces: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns the words of `pieces` as tuples.

    A tuple is (text without white space at both ends, index of the first piece, index after the last piece). The spaces
    before a word belong to the word. Each start or end token is a word. In a script without spaces, every piece is a
    word.
    """
    begins = [place for place, piece in enumerate(pieces) if not place or _begins_word(pieces[place - 1], piece)]
    return [(_decoded(pieces[begin:end]).strip(), begin, end)
            for begin, end in itertools.pairwise([*begins, len(pieces)])]


def _begins_word(previous: str, piece: str) -> bool:
    if _apart(previous, piece):
        return True
    if set(previous) == {SPACE} or not _decoded([piece]).strip():
        return False
    if piece == SPECIAL[UNK]:
        return bool(UNSPACED.match(previous[-1:]))
    if byte := re.match('<0x([0-9A-F]{2})>', piece):
        return 0xE3 <= int(byte[1], 16) <= 0xE9  # the first byte of a Chinese or Japanese character
    # After a piece that is a word, a number or a word of another script also begins a word, as in 年8 or 喜欢Python.
    begins = UNSPACED.match(piece) or (UNSPACED.match(previous[-1:]) and piece[0].isalnum())
    return bool(begins) and not unicodedata.category(piece[0]).startswith('M')


def _apart(previous: str, piece: str) -> bool:
    """Returns whether there is white space between two pieces, or one of them is a start or end token."""
    if piece in ENDS or previous in ENDS:
        return True
    if set(previous) == {SPACE}:  # the spaces belong to this word
        return False
    if piece.startswith(SPACE):
        return True
    text = _decoded([piece])
    if not text.strip():  # a line break or a no-break space belongs to the previous word
        return False
    return text[0].isspace() or _decoded([previous])[-1:].isspace()


def _decoded(pieces: Sequence[str]) -> str:
    """Returns pieces as text. Bytes are decoded together."""
    def content(encoded):
        byte, code = encoded.groups()
        return bytes.fromhex(byte.decode()) if byte else chr(int(code, 16)).encode(errors='surrogatepass')

    text = b''.join(ENCODED.sub(content, piece.replace(SPACE, ' ').encode()) for piece in pieces)
    return text.decode(errors='replace')


def _packed(explanation: Explanation) -> dict[str, Any]:
    """Returns an explanation as dicts, lists, numbers and strings that JSON can represent."""
    packed = {field.name: getattr(explanation, field.name) for field in dataclasses.fields(explanation)}
    packed['predictions'] = [
        prediction and (prediction.piece, _rounded(prediction.probability),
                        [(piece, _rounded(probability)) for piece, probability in prediction.alternatives])
        for prediction in explanation.predictions]
    packed['picture'] = explanation.picture and _base64(explanation.picture)
    packed['attention'] = [
        {'kind': attention.kind, 'titles': attention.titles, 'written': attention.written,
         'shape': attention.weights.shape, 'queries': _row(attention.queries), 'keys': _row(attention.keys),
         'weights': _deflated(attention.weights)}
        for attention in explanation.attention]
    return packed


def _deflated(weights: Float[np.ndarray, 'layer head t s']) -> str:
    """Returns weights as multiples of 1 / STEPS, deflated and in base 64.

    All low bytes come first, then all high bytes. Nearly all high bytes are 0, so they compress well.

    Raises:
      UserError: if a weight is negative, larger than LARGEST or NaN. Softmax weights are from 0 to 1, but the weights
        of a model with edits can have any values.
    """
    if not ((weights >= 0) & (weights <= LARGEST)).all():
        raise UserError(f'--explain shows weights from 0 to {LARGEST}, but this model has weights from '
                        f'{weights.min():.3g} to {weights.max():.3g}. Remove the edit of the weights, use another '
                        '--checkpoint if they are NaN, or remove --explain')
    steps = np.rint(weights.astype(np.float32) * STEPS).astype(np.uint16).ravel()
    return _base64(zlib.compress(np.concatenate([steps & 255, steps >> 8]).astype(np.uint8).tobytes()))


def _row(pieces: list[str]) -> dict[str, Any]:
    return {'pieces': pieces, 'words': words(pieces), 'special': [piece in SPECIAL for piece in pieces],
            'apart': [_apart(previous, piece) for previous, piece in itertools.pairwise(['', *pieces])]}


def _rounded(probability: float) -> float:
    """Returns a probability with four digits.

    Raises:
      UserError: if the probability is NaN.
    """
    if math.isnan(probability):  # JSON has no NaN
        raise UserError('--explain shows probabilities, but the probabilities of this model are NaN. Remove the edit '
                        'of the model, use another --checkpoint, or remove --explain')
    return float(f'{probability:.4g}')


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _json(value: Any) -> str:
    """Returns a value as JSON for a script element of HTML.

    No string in the JSON can end the element, or begin a tag or a comment.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(',', ':'))
    return re.sub('[<>&\u2028\u2029]', lambda match: f'\\u{ord(match[0]):04x}', text)


def _html(data: str) -> str:
    """Returns the HTML page with the data. The page allows only its own script and style (content security policy)."""
    page, style, *script = ((PARTS / name).read_text('utf-8') for name in (
        'page.html', 'style.css', 'state.js', 'drawing.js'))
    template = page.replace('STYLE\n', style).replace('SCRIPT\n', '\n'.join(script))

    def policy(tag):
        content = template.partition(f'<{tag}>')[2].partition(f'</{tag}>')[0]
        return f"'sha256-{_base64(hashlib.sha256(content.encode()).digest())}'"

    head, tail = template.replace('STYLE_HASH', policy('style')).replace('SCRIPT_HASH', policy('script')).split('DATA')
    return head + data + tail


def picture_of(example: Num[np.ndarray, '*space channels']) -> bytes:
    """Returns a PNG file as bytes: the pixels of an image without scaling, or a series drawn as lines."""
    import matplotlib.image
    from matplotlib.figure import Figure
    file = io.BytesIO()
    if example.ndim == 3:
        pixels = example.astype(np.float32)
        pixels = (pixels - pixels.min()) / max(float(np.ptp(pixels)), 1e-9)
        matplotlib.image.imsave(file, pixels if pixels.shape[-1] == 3 else pixels.mean(axis=-1), cmap='gray',
                                format='png')
        return file.getvalue()
    figure = Figure(figsize=(8, 2))
    axes = figure.add_axes((0, 0.02, 1, 0.96), frame_on=False)
    plot_series(axes, example, linewidth=1.5)
    axes.set(xticks=[], yticks=[])
    figure.savefig(file, dpi=120, transparent=True, format='png')
    return file.getvalue()
