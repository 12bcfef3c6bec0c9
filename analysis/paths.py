"""Path patching: measures the effect that one part of a model has on other parts by some of the paths between them.

The method is path patching (Wang et al. 2022, arXiv:2211.00593, section 3; Goldowsky-Dill et al. 2023,
arXiv:2304.05969). Four kinds of rows of one batch are four versions of the forward pass, so one program computes all:

    clean     the clean sentence.
    corrupt   the corrupt sentence.
    mixed     the corrupt sentence, with the clean value at a sender, and the corrupt value at all held places.
    patched   the corrupt sentence, with the mixed value at the receivers.

In a mixed row, the change at the sender reaches a receiver only by paths without a held place.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from analysis.passes import check_same_lengths, text_of
from inference.edits import Sizes, check_selection, matching, selected
from inference.run import Run
from model.places import observing
from runtime.errors import UserError

HELD = '*/heads', '*/feed_forward/hidden'  # default: only the residual stream carries the change


class Node(NamedTuple):
    """A part of a model: a place, and the numbers of heads and tokens at this place, from 0. None selects all."""
    place: str
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class PathEffects:
    """The effect of each sender on the target, by the paths to the receivers.

    Attributes:
      senders: the senders.
      log_probs: the log-probability of the target when the change at one sender reaches the receivers.
      clean: the log-probability of the target for the clean sentence.
      corrupt: the log-probability of the target for the corrupt sentence.
    """
    senders: list[Node]
    log_probs: Float[np.ndarray, ' sender']
    clean: float
    corrupt: float

    @property
    def effects(self) -> Float[np.ndarray, ' sender']:
        """The effect of each sender: 0 is no effect, 1 restores the log-probability for the clean sentence."""
        return (self.log_probs - self.corrupt) / (self.clean - self.corrupt)


Nodes = str | Node | Sequence[str | Node]


def heads_at(run: Run, pattern: str) -> list[Node]:
    """Returns a node for each head at the places that match a pattern, such as '*/cross_attention/heads'."""
    listed = run.places()
    return [Node(name, [head]) for name in matching(pattern, listed) for head in range(listed[name].get('head') or 0)]


def path_patching(run: Run, clean: str, corrupt: str, target: str, senders: Nodes, receivers: Nodes,
                  held: str | Sequence[str] = HELD) -> PathEffects:
    """Returns the effect of each sender on `target` by the paths to the receivers.

    Args:
      run: a translator or a language model.
      clean: a sentence; for a language model, a prompt.
      corrupt: a sentence with the same number of tokens as `clean`.
      target: a translation, such as the translation of `clean`; for a language model, a continuation.
      senders: places, patterns or nodes. The effect of each place or node is measured alone.
      receivers: places, patterns or nodes. All receivers together get the changed values.
      held: names or patterns of places that keep the value of the corrupt sentence, so that no path leads through
        them. The module of the sender is not held. With [], all paths from the sender to the receivers count; then
        the effect by the receiver 'decoder' equals the effect of activation patching.

    Raises:
      UserError: if there is no such place or head, or the sentences differ in their numbers of tokens.
    """
    listed = run.places()
    sending, receiving = _nodes(senders, listed, 'senders'), _nodes(receivers, listed, 'receivers')
    holding = {name for pattern in ([held] if isinstance(held, str) else held) for name in _held(pattern, listed, held)}
    texts = [text_of(run, (sentence, target)) for sentence in (clean, corrupt)]
    check_same_lengths(texts[0], texts[1], (clean, corrupt))
    model, count = texts[0].model, len(sending)

    def edit_of(name):
        here = [(row, node) for row, node in enumerate(sending) if node.place == name]
        masks = [node for node in receiving if node.place == name]
        if not here and not masks and name not in holding:
            return None
        held_rows = np.array([name in holding and _module(node.place) != _module(name) for node in sending])

        def edited(value, at):
            clean, corrupt, mixed, patched = jnp.split(value, [1, 2, 2 + count])
            rows = jnp.asarray(held_rows).reshape(-1, *[1] * (value.ndim - 1))
            kept = jnp.where(rows, corrupt, mixed)
            for row, node in here:
                chosen = selected(node.heads, node.positions, value, at)
                mixed, kept = (each.at[row].set(jnp.where(chosen, clean, each[row:row + 1])[0])
                               for each in (mixed, kept))
            for node in masks:
                patched = jnp.where(selected(node.heads, node.positions, value, at), mixed, patched)
            return jnp.concatenate([clean, corrupt, kept, patched])
        return edited

    rows = 2 + 2 * count
    (first, _, _), (others, targets, weights) = texts[0].arrays(rows), texts[1].arrays(rows)
    inputs = {name: others[name].at[0].set(first[name][0]) for name in others}
    passes = jax.jit(lambda *args: observing(model._teacher_forced, edit_of)(*args)[0])
    totals = np.asarray((passes(model.params, inputs, targets) * weights).sum(axis=1))
    return PathEffects(sending, totals[2 + count:], float(totals[0]), float(totals[1]))


def _nodes(given: Nodes, listed: dict[str, Sizes], argument: str) -> list[Node]:
    """Returns the nodes that `given` describes: one for each place that matches a name or a pattern.

    Raises:
      UserError: if there is no such place, head or position.
    """
    nodes: list[Node] = []
    for each in [given] if isinstance(given, str | Node) else given:
        node: Any = Node(each) if isinstance(each, str) else Node(*each)
        for name in matching(node.place, listed):
            check_selection(f'{argument}: {name}', node.heads, node.positions, name, listed[name])
            nodes.append(node._replace(place=name))
    if not nodes:
        raise UserError(f'{argument}: the list is empty. Name at least one place')
    return nodes


def _held(pattern: str, listed: dict[str, Sizes], held: str | Sequence[str]) -> list[str]:
    """Returns the places that match a pattern of held places, or [] if a pattern of the default HELD has no match."""
    try:
        return matching(pattern, listed)
    except UserError:
        if held is HELD:
            return []
        raise


def _module(name: str) -> str:
    return name.rpartition('/')[0]
