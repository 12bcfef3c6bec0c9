"""The analyses of tools/inside.py: each returns a text table, the numbers as JSON, and a picture."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from analysis.attribution import attribute
from analysis.heads import GatedHeads, pruning_curves, pruning_figure, ranked
from analysis.logit_lens import logit_lens
from analysis.passes import as_output, text_model
from analysis.patching import patching_map
from analysis.pictures import heads_figure, matrix_figure
from analysis.roles import ROLES, roles
from inference.options import search_options
from inference.run import Run
from inference.translate import Translator
from input_pipeline.splits import asked_splits
from runtime.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AnalysisRequest(NamedTuple):
    """The arguments of an analysis; each analysis uses some of them.

    Attributes:
      split: the split of the data.
      count: the number of examples of the split.
      text: a source or a pair (source, target), as in `analysis.passes.as_output`.
      other: for patching, the sentence that is patched.
      places: names or patterns of places; None: the default of the analysis.
      method: for attribution, a key of METHODS in `analysis.attribution`.
      instead: for attribution, the text of the alternative, as in `attribute`.
    """
    split: str = 'validation'
    count: int = 100
    text: str | tuple[str, str] = ''
    other: str | None = None
    places: Sequence[str] | None = None
    method: str = 'integrated'
    instead: str = ''


class Result(NamedTuple):
    """The result of an analysis: a text table, an object that JSON can write, and a picture."""
    table: str
    numbers: Any
    figure: 'Figure'


def examples(run: Run, request: AnalysisRequest) -> list[Any]:
    """Returns the first examples of a split: pairs, or outputs of a language model. 'test' stands for all test sets.

    Raises:
      UserError: if the run does not write text, or the split does not exist.
    """
    splits = asked_splits(request.split, run.config.data)
    model, data = text_model(run), run.data()
    if isinstance(model, Translator):
        pairs = [pair for name in splits for pair in data.pairs(name)]  # pyright: ignore[reportAttributeAccessIssue]
        return pairs[:request.count]
    outputs = [output for name in splits
               for output, _ in model.examples(data, name, request.count, run.options)]
    return outputs[:request.count]


def importance(run: Run, request: AnalysisRequest) -> Result:
    """Returns the importance of each attention head. The importance is measured on the references of a split."""
    heads = GatedHeads(run)
    heads.check_equal_sizes()  # the picture has a row of heads for each layer
    values = heads.importance(examples(run, request))
    width = max(map(len, values))
    table = '\n'.join(f'{place:{width}}{head:4}{values[place][head]:12.4g}' for place, head in reversed(ranked(values)))
    by_kind = {kind: np.array([values[place] for place in places]) for kind, places in heads.kinds().items()}
    return Result(table, {place: row.tolist() for place, row in values.items()},
                  heads_figure(by_kind, 'importance of each head'))


def pruning(run: Run, request: AnalysisRequest) -> Result:
    """Returns BLEU while more and more heads are removed, in the order of their importance and in random orders.

    The importance is computed on the first half of the examples, and BLEU on the second half, with greedy search.

    Raises:
      UserError: if there are fewer than two examples, the run is not a translation run, or the model has no attention.
    """
    pairs = examples(run, request)
    if len(pairs) < 2:
        raise UserError(f'--count={request.count}: pruning needs at least 2 pairs. Use a larger --count')
    half = len(pairs) // 2
    curves = pruning_curves(GatedHeads(run), pairs[half:], search_options(run.config, method='greedy'), pairs[:half])
    table = '\n'.join(f'{kind:9}{order:18}' + ''.join(f'{count:5}: {score:5.1f}' for count, score in curve)
                      for kind, orders in curves.items() for order, curve in orders.items())
    return Result(table, curves, pruning_figure(curves))


def head_roles(run: Run, request: AnalysisRequest) -> Result:
    """Returns the roles of the attention heads on the examples of a split. Long pairs are truncated."""
    texts = examples(run, request)
    if isinstance(run.model, Translator):
        texts = run.model.references(texts)
    table = roles(run, texts, request.places or '*/weights')
    names = [f'{place.removesuffix("/weights")}, {head}' for place, head in table.heads]
    shares = [[None if np.isnan(share) else share for share in row] for row in table.shares.tolist()]  # JSON has no NaN
    numbers = {name: dict(zip(ROLES, row, strict=True)) | {'entropy': float(entropy), 'distance': float(distance)}
               for name, row, entropy, distance in zip(names, shares, table.entropy, table.distance, strict=True)}
    return Result(str(table), numbers, matrix_figure(table.shares, names, list(ROLES), 'mean weight',
                                                     ('keys', 'place, head')))


def lens(run: Run, request: AnalysisRequest) -> Result:
    """Returns the predictions that the model would make after each of its layers (analysis/logit_lens.py)."""
    predictions = logit_lens(run, request.text)
    figure = matrix_figure(np.exp(predictions.log_probs), predictions.places, predictions.target,
                           'probability of the target token', ('target token', 'place'))
    return Result(str(predictions), _as_json(predictions), figure)


def attribution(run: Run, request: AnalysisRequest) -> Result:
    """Returns the contributions of source and prefix to each target token."""
    contributions = attribute(run, request.text, request.method, request.instead)
    contrast = f' (instead of {contributions.alternative})' if contributions.alternative else ''
    figure = matrix_figure(contributions.values.T, contributions.target,
                           [*contributions.source, *contributions.prefix], f'contribution{contrast}',
                           ('tokens of the source, then earlier tokens of the target', 'predicted token'))
    return Result(str(contributions), _as_json(contributions), figure)


def patching(run: Run, request: AnalysisRequest) -> Result:
    """Returns the effect of each patch on the log-probability of the target, as a matrix of places and tokens.

    The model reads the sentence `request.other`. A patch replaces the value at one place and token by the value for the
    source of `request.text`. The target is the target of `request.text`. For a language model, the sentences are
    prompts, and the target is a continuation.

    Raises:
      UserError: if the text for a language model has no prompt, or as in `patching_map`.
    """
    output = as_output(run, request.text)
    if not output.source and not isinstance(run.model, Translator):
        raise UserError('--text: patching a language model needs PROMPT<tab>CONTINUATION')
    places = request.places or 'encoder/layers_*[0-9]'
    effects = patching_map(run, output.source, request.other or '', output.text, places)
    names, width = [node.place for node in effects.nodes], max(8, *map(len, effects.pieces)) + 2
    first = max(map(len, names))
    lines = [' ' * first + ''.join(f'{piece:>{width}}' for piece in effects.pieces)]
    lines += [f'{name:{first}}' + ''.join(f'{effect:{width}.2f}' for effect in row)
              for name, row in zip(names, effects.effects, strict=True)]
    return Result('\n'.join(lines), _as_json(effects) | {'effects': effects.effects.tolist()},
                  matrix_figure(effects.effects, names, effects.pieces, 'effect', ('token', 'place')))


ANALYSES: dict[str, Callable[[Run, AnalysisRequest], Result]] = {
    'importance': importance, 'pruning': pruning, 'roles': head_roles, 'logit_lens': lens, 'attribution': attribution,
    'patching': patching}


def _as_json(result: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, with arrays as lists."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(result).items()}
