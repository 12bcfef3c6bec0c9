"""The importance of attention heads (Michel et al. 2019, arXiv:1905.10650).

Every head of every kind of attention has a gate. The output of the head is multiplied by the gate: a gate of 1 keeps
the head, and a gate of 0 removes the head. Gates are edits (inference/edits.py). New values of gates need no new
compilation.
"""

import copy
import fnmatch
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from analysis.passes import translation_model
from inference.edits import ATTENTION, Edit
from inference.options import SearchOptions
from inference.run import Run
from inference.scores import corpus_scores, translation_metrics
from inference.translate import Translator
from input_pipeline.tokenizer import BOS, PAD
from model.places import EDITS
from runtime.errors import UserError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger('allyouneed.heads')

Gates = Mapping[str, Float[np.ndarray, ' head']]  # {place of attention heads: gate of each head}


class GatedHeads:
    """A run in which each attention head has a gate.

    Attributes:
      run: the run with all gates set to 1, which has the same outputs as the run without gates.
      counts: {place: number of heads}.

    Raises:
      UserError: if the model has no attention.
    """

    def __init__(self, run: Run):
        self.counts = {name: sizes['head'] or 0 for name, sizes in run.places().items() if name.endswith('/heads')}
        if not self.counts:
            raise UserError(f'{run.workdir}: the model has no attention heads. Use a model with attention')
        self._gradients = None
        gates = [Edit('scale', name, np.ones((count, 1))) for name, count in self.counts.items()]
        self.run = run.edited(gates)
        module: Any = self.run.model.module
        # {index of a gate in params[EDITS]: its place}. The run may have other edits with numbers at the same places.
        self._places = {index: edit.place for index, edit in enumerate(module.editor.edits)
                        if any(edit is gate for gate in gates)}

    def ones(self) -> dict[str, Float[np.ndarray, ' head']]:
        """Returns gates of 1 for all heads. These gates remove no head."""
        return {name: np.ones(count, np.float32) for name, count in self.counts.items()}

    def check_equal_sizes(self) -> None:
        """Raises UserError if the run is an ensemble whose members have different numbers of heads."""
        if any(len({self.counts[place] for place in places}) > 1 for places in self.kinds().values()):
            raise UserError(f'{self.run.workdir}: the runs of this ensemble have different numbers of heads. Use one '
                            'run')

    def kinds(self) -> dict[str, list[str]]:
        """Returns {kind: places}, with a place for each layer. The kinds are 'encoder', 'decoder' and 'cross'."""
        places = {kind: [name for name in self.counts if fnmatch.fnmatch(name, f'*{path.format("*")}/heads')]
                  for kind, path in ATTENTION.items()}
        return {kind: names for kind, names in places.items() if names}

    def model(self, gates: Gates) -> Any:
        """Returns the model with the given gates. If a place has no gates in `gates`, all its heads are kept."""
        model = copy.copy(self.run.model)
        model.params = self._with_gates(gates)
        return model

    def importance(self, pairs: Sequence[tuple[str, str]]) -> dict[str, Float[np.ndarray, ' head']]:
        """Returns the importance of each head: the mean of |dL/dg| over the sentences (section 4.1 of the paper).

        L is the cross-entropy of all tokens of a reference, given the source. g is the gate of the head. Long pairs are
        truncated as for the perplexity, with a warning.

        The paper divides the values of each layer by their l2 norm (Molchanov et al. 2017, arXiv:1611.06440). Here, the
        values are not normalised. So the order of the heads of one layer is as in the paper, but the order of heads of
        different layers may differ.

        Args:
          pairs: sources and references.

        Raises:
          UserError: if the run is not a translation run, or there are no pairs.
        """
        model = translation_model(self.run, 'importance of heads')

        def loss(gates, source, read, written):
            inputs = {'source': source[None], 'target': read[None]}
            log_probs = model.teacher_forced_log_probs(self._with_gates(gates), inputs, written[None])
            return -jnp.where(written != PAD, log_probs[0], 0.0).sum()

        total = jax.tree.map(np.zeros_like, self.ones())
        if self._gradients is None:  # compiled by the first call
            self._gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0, 0)))
        encoded = model.encoded(_checked(pairs))
        for begin in range(0, len(pairs), 64):
            part = encoded[begin:begin + 64]
            source = model.padded([tokens for tokens, _ in part], 64)
            read = model.padded([[BOS, *tokens[:-1]] for _, tokens in part], 64)
            written = model.padded([tokens for _, tokens in part], 64)
            grads = self._gradients(self.ones(), source, read, written)
            total = {name: total[name] + np.abs(grads[name][:len(part)]).sum(axis=0) for name in total}
        return {name: values / len(pairs) for name, values in total.items()}

    def _with_gates(self, gates: Mapping[str, Any]) -> dict[str, Any]:
        numbers = list(self.run.model.params[EDITS])
        for index, place in self._places.items():
            if place in gates:
                numbers[index] = {place: gates[place][:, None]}
        return {**self.run.model.params, EDITS: numbers}


def without_head(gates: Gates, place: str, head: int) -> dict[str, Float[np.ndarray, ' head']]:
    """Returns a copy of the gates in which the gate of one head is 0. `head` is the index of the head at `place`."""
    changed = np.array(gates[place])
    changed[head] = 0
    return {**gates, place: changed}


def _checked(pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    if not pairs:
        raise UserError('pairs=[]: the analysis of heads needs at least one pair of a source and a reference')
    return pairs


def translation_score(model: Translator, pairs: Sequence[tuple[str, str]], options: SearchOptions, metric: str,
                      language: str) -> float:
    """Translates the sources of `pairs` (source, reference) into `language`. Returns a score of the translations.

    `metric` is 'exact_match' (from 0 to 1), 'bleu', 'bleu_lowercased_tokenised' or 'chrf'.

    Raises:
      UserError: if `metric` is another metric, or there are no pairs.
    """
    if metric not in (names := ['exact_match', *translation_metrics(language)]):
        raise UserError(f'metric={metric!r}: the analysis of heads has no such metric. {nearest(metric, names)}')
    sources, references = zip(*_checked(pairs), strict=True)
    return corpus_scores([output.text for output in model.translate(sources, options)], references, language)[metric]


def scores_without_heads(heads: GatedHeads, pairs: Sequence[tuple[str, str]], kind: str, options: SearchOptions,
                         metric: str = 'exact_match') -> tuple[float, Float[np.ndarray, 'layer head']]:
    """Returns the score of the whole model, and an array. Each element is the score without one head of `kind`.

    `metric` is 'exact_match' (from 0 to 1), 'bleu', 'bleu_lowercased_tokenised' or 'chrf'.

    Raises:
      UserError: if the run is not a translation run, the model has no attention of this kind, the runs of an ensemble
        have different numbers of heads, there is no such metric, or there are no pairs.
    """
    translation_model(heads.run, 'score without heads')
    kinds, gates = heads.kinds(), heads.ones()
    if kind not in kinds:
        raise UserError(f'kind={kind!r}: the model has no attention of this kind. Use {", ".join(kinds)}')
    heads.check_equal_sizes()

    def score(gates):
        return translation_score(heads.model(gates), pairs, options, metric, heads.run.config.data.target_lang)

    return score(gates), np.array([[score(without_head(gates, place, head)) for head in range(heads.counts[place])]
                                   for place in kinds[kind]], dtype=float)


def pruning_curve(heads: GatedHeads, pairs: Sequence[tuple[str, str]], order: Sequence[tuple[str, int]],
                  options: SearchOptions, metric: str = 'bleu', steps: int = 8) -> list[tuple[int, float]]:
    """Scores the model while more and more heads are removed. Returns [(number of removed heads, score), ...].

    After the last step, all heads are removed.

    Args:
      heads: the run with gates.
      pairs: sources and references.
      order: all heads as (place, head), in the order of their removal; see `ranked` and `shuffled`.
      options: the search options.
      metric: 'exact_match' (from 0 to 1), 'bleu', 'bleu_lowercased_tokenised' or 'chrf'.
      steps: the number of steps. Each step removes about the same number of heads, and then computes a score. The score
        before the first step is also returned.

    Raises:
      UserError: if the run is not a translation run, there is no such metric, or there are no pairs.
    """
    translation_model(heads.run, 'score without heads')
    gates, curve, removed = heads.ones(), [], 0
    for count in np.unique(np.linspace(0, len(order), steps + 1).round().astype(int)).tolist():
        for place, head in order[removed:count]:
            gates = without_head(gates, place, head)
        removed = count
        score = translation_score(heads.model(gates), pairs, options, metric, heads.run.config.data.target_lang)
        curve.append((count, score))
        log.info('%d of %d heads removed: %s %.4g', count, len(order), metric, score)
    return curve


def pruning_curves(heads: GatedHeads, pairs: Sequence[tuple[str, str]], options: SearchOptions,
                   by: Sequence[tuple[str, str]], metric: str = 'bleu', steps: int = 4,
                   seeds: int = 3) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Returns {kind of attention: {order: curve}}. For each curve, only heads of this kind are removed.

    One order is by importance, and `seeds` orders are random. The importance is computed from `by`, the sources and
    references. `pruning_curve` explains the other arguments.
    """
    orders = {'by importance': ranked(heads.importance(by))}
    orders |= {f'at random, seed {seed}': shuffled(heads, seed) for seed in range(seeds)}
    curves = {}
    for kind, places in heads.kinds().items():
        curves[kind] = {name: pruning_curve(heads, pairs, [head for head in order if head[0] in places], options,
                                            metric, steps) for name, order in orders.items()}
    return curves


def pruning_figure(curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], metric: str = 'BLEU') -> 'Figure':
    """Draws the result of `pruning_curves`: a panel for each kind of attention, and a line for each order."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(3.2 * len(curves), 3), layout='constrained')
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (kind, orders) in zip(panels, curves.items(), strict=True):
        for name, curve in orders.items():
            control = 'random' in name
            axes.plot(*zip(*curve, strict=True), marker='o', markersize=4, label=name, color='0.6' if control else None,
                      linewidth=1 if control else 2, zorder=1 if control else 2)
        axes.set(title=kind, xlabel='removed heads')
    panels[0].set_ylabel(metric)
    panels[0].set_ylim(0, 1.05 * max(score for orders in curves.values() for curve in orders.values()
                                     for _, score in curve) or 1)  # if all scores are 0, the limit is 1
    panels[0].legend()
    return figure


def ranked(importance: Mapping[str, Float[np.ndarray, ' head'] | Float[Array, ' head']]) -> list[tuple[str, int]]:
    """Returns all heads as (place, head), with the least important head first.

    The values are compared across layers without the normalisation of the paper (`GatedHeads.importance`). If all
    gradients of a layer are small, its heads come first.
    """
    heads = [(float(value), name, head) for name, values in importance.items() for head, value in enumerate(values)]
    return [(name, head) for _, name, head in sorted(heads)]


def shuffled(heads: GatedHeads, seed: int = 0) -> list[tuple[str, int]]:
    """Returns all heads as (place, head) in random order. This is the control experiment for `ranked`."""
    order = ranked(heads.ones())
    return [order[index] for index in np.random.default_rng(seed).permutation(len(order))]
