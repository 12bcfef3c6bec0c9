"""Word alignments from attention, in the Pharaoh format.

In this format, '0-0 1-2' links source word 0 to target word 0, and source word 1 to target word 2.
A target token is linked to the source token with the largest weight. Two words are linked if their tokens are linked.
Words are separated by white space, as in the gold links of a corpus.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from analysis.passes import translation_model
from configs.rules import cross_head, default_cross_head
from inference.outputs import Output
from inference.run import Run
from inference.translate import Translator
from input_pipeline.links import Links
from input_pipeline.stores import SIDES
from input_pipeline.token_links import words_of_tokens
from run_directory.fingerprints import has_fingerprints
from runtime.errors import UserError

SENTENCES = 200  # number of validation sentences on which the best head is chosen
SHIFTS = 'output', 'input'

log = logging.getLogger('allyouneed.decode')


@dataclasses.dataclass(frozen=True)
class Head:
    """A cross-attention head from which alignments are read.

    Attributes:
      layer: the index of the layer.
      head: the index of the head; None: the mean of all heads.
      shift: 'output' uses the weights of the step that predicts a target token. 'input' uses the weights of the next
        step, which reads this token (Chen et al. 2020, arXiv:2004.14837).
    """
    layer: int
    head: int | None = None
    shift: str = 'output'

    def __str__(self) -> str:
        return f'cross:{self.layer + 1}:{"mean" if self.head is None else self.head + 1}, {self.shift}'


def align(model: Translator, output: Output, head: Head) -> Links:
    """Returns the links between the words of a source and the words of its best translation.

    Raises:
      UserError: if the model has no attention from the target to the source.
    """
    return _links(model, output, _cross(model, output), head) if output.source_tokens else []


def as_pharaoh(links: Links) -> str:
    """Returns the links of a sentence pair as one line in the Pharaoh format, such as '0-0 1-2'."""
    return ' '.join(f'{source}-{target}' for source, target in links)


def error_rate(alignments: Sequence[Links], gold: Sequence[Links]) -> float:
    """Returns the alignment error rate (Och and Ney 2003) of the links in `alignments`.

    The rate is 1 - 2 |A and G| / (|A| + |G|). A is the set of links in `alignments`, and G is the set of gold links.
    All gold links count as 'sure' links.
    """
    both = sum(len({*links} & {*gold_links}) for links, gold_links in zip(alignments, gold, strict=True))
    return 1 - 2 * both / max(1, sum(len({*links}) for links in (*alignments, *gold)))


def error_rates(model: Translator, outputs: Sequence[Output], gold: Sequence[Links]) -> dict[Head, float]:
    """Returns {head: alignment error rate}, for every head and for the mean of the heads of each layer.

    Both values of `Head.shift` are evaluated.

    Raises:
      UserError: if there are no outputs.
    """
    if not outputs:
        raise UserError('outputs=[]: error rates need at least one translation with gold links')
    weights = [_cross(model, output) for output in outputs]
    layers, heads = weights[0].shape[:2]
    choices = [Head(layer, head, shift) for layer in range(layers) for head in (*range(heads), None)
               for shift in SHIFTS]
    return {choice: error_rate([_links(model, output, matrix, choice)
                                for output, matrix in zip(outputs, weights, strict=True)], gold) for choice in choices}


def best_head(run: Run, sentences: int = SENTENCES) -> Head:
    """Returns the head with the least alignment error rate on the first references of the validation split.

    Pairs that are too long for the model and the search options of the run are skipped. If there are no gold links
    (`_gold_pairs`), or no pair remains, returns `default_cross_head`, with shift 'output'.

    Raises:
      UserError: if the run is not a translation run, or the model has no attention from the target to the source.
    """
    model = translation_model(run, 'best head for alignments')
    fitting = [(pair, links) for pair, links in _gold_pairs(run, sentences)
               if model.reads_whole(pair[0]) and model.scores_whole(pair[1], run.options)]
    if not fitting:
        return Head(*default_cross_head(_cross_shape(model)[0]))
    pairs, links = zip(*fitting, strict=True)
    rates = error_rates(model, model.forced_all(pairs, run.options), links)
    return min(rates, key=lambda choice: rates[choice])


def _gold_pairs(run: Run, count: int) -> list[tuple[tuple[str, str], Links]]:
    """Returns the first validation pairs, each with its gold links.

    Returns [] if the run was not trained on the data of its config, because this data may have other languages. Also
    returns [] if the data has no gold links, or cannot be read. In the last case, logs a warning.
    """
    if not has_fingerprints(run.workdir):
        return []
    try:
        data: Any = run.data()
        if not data.has_links('validation'):
            return []
        return list(zip(data.pairs('validation'), data.links('validation')[:count], strict=False))
    except UserError as error:
        log.warning('the best head for alignments cannot be chosen, because the validation split cannot be read: %s. '
                    'The mean of the heads of the second-to-last layer is used instead. Use --look=cross:LAYER:HEAD to '
                    'choose a head', error)
        return []


def chosen_head(look: str, model: Translator) -> Head:
    """Returns the head that --look=cross:LAYER[:HEAD] names. LAYER and HEAD are counted from 1; HEAD may be 'mean'.

    Raises:
      UserError: if the head does not exist.
    """
    shape = _cross_shape(model)
    numbers = cross_head(look, *shape)
    if numbers is None:
        raise UserError(f'--look={look}: not allowed for an alignment. Use cross:LAYER:HEAD or mean. LAYER is from 1 '
                        f'to {shape[0]}, and HEAD is from 1 to {shape[1]}')
    return Head(*numbers)


def _cross_shape(model: Translator) -> tuple[int, int]:
    """Returns the number of layers with cross-attention, and the number of heads per layer."""
    layers, heads, *_ = _cross(model, model.forced_all([('a', 'a')])[0]).shape
    return layers, heads


def _cross(model: Translator, output: Output) -> Float[np.ndarray, 'layer head t s']:
    weights = model.attention(output)
    if 'cross' not in weights:
        raise UserError('alignments need attention from the target to the source, but this model has none. Use a model '
                        'with attention')
    return weights['cross']


def _links(model: Translator, output: Output, weights: Float[np.ndarray, 'layer head t s'], head: Head) -> Links:
    source, target = output.source_tokens, output.hypotheses[0].tokens
    if not source or not target:
        return []
    layer = weights[head.layer]
    matrix = layer.mean(axis=0) if head.head is None else layer[head.head]
    first = SHIFTS.index(head.shift)
    best = matrix[first:first + len(target), :len(source)].argmax(axis=-1)
    (source_words, source_count), (target_words, target_count) = (
        words_of_tokens(model.tokenizers[side], tokens, text)
        for side, tokens, text in zip(SIDES, (source, target), (output.source, output.text), strict=True))
    pairs = {(int(source_words[token]), int(word)) for token, word in zip(best, target_words, strict=True)}
    # White space at the end of a text belongs to no word.
    return sorted(pair for pair in pairs if pair[0] < source_count and pair[1] < target_count)
