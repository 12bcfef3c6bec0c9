"""Path patching: measures the effect of one part of a model on other parts, through selected paths between the parts.

The method is path patching (Wang et al. 2022, arXiv:2211.00593, section 3; Goldowsky-Dill et al. 2023,
arXiv:2304.05969). A batch has four kinds of rows, one for each version of the forward pass. So one program computes
all versions:

    clean     the clean sentence.
    corrupt   the corrupt sentence.
    mixed     the corrupt sentence, with the clean value at a sender, and the corrupt value at all held places.
    patched   the corrupt sentence, with the mixed value at the receivers.

In a mixed row, the change at the sender reaches a receiver only by paths without a held place.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from analysis.passes import (
    Effects,
    Node,
    at_targets,
    check_comparable,
    compiled,
    from_logits,
    teacher_forced,
    text_of,
)
from inference.editor import check_selection, selected
from inference.edits import Sizes, indices, matching
from inference.run import Run
from model.places import AXES, argument_of
from runtime.errors import UserError

HELD = '*/heads', '*/feed_forward/hidden'  # default: only the residual stream carries the change
INSIDE = {*AXES, 'input', 'hidden'}  # last parts of the names of values inside a module

Nodes = str | Node | Sequence[str | Node]


def heads_at(run: Run, pattern: str) -> list[Node]:
    """Returns a node for each head at the places that match a pattern, such as '*/cross_attention/heads'.

    Raises:
      UserError: if no place matches, or the values at the matching places are not split into heads.
    """
    listed = run.places()
    nodes = [Node(name, [head]) for name in matching(pattern, listed) for head in range(listed[name].get('head') or 0)]
    if not nodes:
        raise UserError(f'place {pattern!r}: the values at this place are not split into heads. Use places such as '
                        '*/self_attention/heads')
    return nodes


def path_patching(run: Run, clean: str, corrupt: str, target: str, senders: Nodes, receivers: Nodes,
                  held: str | Sequence[str] = HELD) -> Effects:
    """Returns the effect of each sender on the log-probability of `target`, through the paths to the receivers.

    Args:
      run: a translator or a language model.
      clean: a sentence; for a language model, a prompt.
      corrupt: a sentence with the same number of tokens as `clean`.
      target: a translation, such as the translation of `clean`; for a language model, a continuation.
      senders: places, patterns or nodes. The effect of each place or node is measured separately.
      receivers: places, patterns or nodes. All receivers get the changed values at the same time.
      held: names or patterns of places that keep the value of the corrupt sentence, so that no path leads through
        these places. Places in the module of the sender are not held. With [], all paths from the sender to the
        receivers count. Then, with the receiver 'decoder', the effect equals the effect of activation patching.

    Raises:
      UserError: if there is no such place, head or token, the sentences differ in the number of tokens, or the
        tokens of the target differ.
    """
    clean_text, text = (text_of(run, (sentence, target)) for sentence in (clean, corrupt))
    check_comparable(clean_text, text, (clean, corrupt))
    listed: dict[str, Sizes] = {
        name: {axis: len(text.inputs[argument_of(name, axis, list(text.inputs))])
               if axis in ('position', 'query', 'key') else size for axis, size in sizes.items()}
        for name, sizes in run.places().items()}
    sending, receiving = _nodes(senders, listed, 'senders'), _nodes(receivers, listed, 'receivers')
    holding = {name for pattern in ([held] if isinstance(held, str) else held) for name in _held(pattern, listed, held)}
    inputs, targets, weights = text.arrays(2 + 2 * len(sending))
    first, _, _ = clean_text.arrays()
    inputs = {name: tokens.at[0].set(first[name][0]) for name, tokens in inputs.items()}
    patched = compiled(_patched, text.model.module, *(tuple(map(_hashable, nodes)) for nodes in (sending, receiving)),
                       frozenset(holding))
    log_probs = np.asarray(patched(text.model.params, inputs, targets, weights))
    return Effects(sending, [], log_probs[2 + len(sending):], float(log_probs[0]), float(log_probs[1]))


def _patched(module, sending, receiving, holding, params, inputs, targets, weights):
    """Returns the log-probability of the target in each row.

    The rows are the clean sentence, the corrupt sentence, a mixed row for each sender, and a patched row for each
    sender.
    """
    count = len(sending)

    def edit_of(name):
        senders = [(row, node) for row, node in enumerate(sending) if node.place == name]
        receivers = [node for node in receiving if node.place == name]
        if not senders and not receivers and name not in holding:
            return None
        held_rows = np.array([name in holding and _module(node.place) != _module(name) for node in sending])

        def edited(value, at):
            clean, corrupt, mixed, patched = jnp.split(value, [1, 2, 2 + count])
            rows = jnp.asarray(held_rows).reshape(-1, *[1] * (value.ndim - 1))
            kept = jnp.where(rows, corrupt, mixed)
            for row, node in senders:
                chosen = selected(node.heads, node.positions, value, at)
                mixed, kept = (values.at[row].set(jnp.where(chosen, clean, values[row:row + 1])[0])
                               for values in (mixed, kept))
            for node in receivers:
                patched = jnp.where(selected(node.heads, node.positions, value, at), mixed, patched)
            return jnp.concatenate([clean, corrupt, kept, patched])
        return edited

    outputs, _ = teacher_forced(module, params, inputs, edit_of)
    return (from_logits(at_targets, outputs, targets) * weights).sum(axis=1)


def _hashable(node: Node) -> Node:
    return Node(node.place, *(numbers if numbers is None else tuple(numbers) for numbers in node[1:]))


def _nodes(described: Nodes, listed: dict[str, Sizes], argument: str) -> list[Node]:
    """Returns a node for each place that matches a name or a pattern in `described`.

    Raises:
      UserError: if there is no such place, head or position, or a tuple is not a node.
    """
    nodes: list[Node] = []
    for part in [described] if isinstance(described, str | Node) else described:
        if not isinstance(part, str) and not 1 <= len(part) <= len(Node._fields):
            raise UserError(f'{argument}: {str(part)[:80]} has {len(part)} entries. Use Node(place, heads, positions)')
        node = Node(part) if isinstance(part, str) else Node(*part)
        node = node._replace(**{name: indices(getattr(node, name), f'{argument}: {node.place}: {name}')
                                for name in ('heads', 'positions')})
        for name in matching(node.place, listed):
            check_selection(f'{argument}: {name}', node.heads, node.positions, name, listed[name])
            nodes.append(node._replace(place=name))
    if not nodes:
        raise UserError(f'{argument}: the list is empty. Name at least one place')
    return nodes


def _held(pattern: str, listed: dict[str, Sizes], held: str | Sequence[str]) -> list[str]:
    """Returns the places that match a pattern of `held`. With the default HELD, returns [] if no place matches."""
    try:
        return matching(pattern, listed)
    except UserError:
        if held is HELD:
            return []
        raise


def _module(name: str) -> str:
    """Returns the module of a place. The place of a module's output has the name of the module."""
    module, _, last = name.rpartition('/')
    return module if last in INSIDE else name
