"""The roles of attention heads: which keys a head attends to, such as the previous token or punctuation.

Voita et al. 2019 (arXiv:1905.09418, section 5) find heads that attend to neighbours. Clark et al. 2019
(arXiv:1906.04341, section 3) find heads that attend to the end token and to punctuation.
"""

import dataclasses
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from analysis.passes import text_model
from inference.generate import Generator
from inference.inspection import Values
from inference.run import Run
from input_pipeline.tokenizer import EOS, SPACE, SPECIAL
from runtime.errors import UserError, nearest


def _at(offset: int) -> Callable[..., Bool[np.ndarray, 'query key']]:
    return lambda queries, pieces: np.arange(len(pieces)) == np.arange(queries)[:, None] + offset


def _of(test: Callable[[str], bool]) -> Callable[..., Bool[np.ndarray, 'query key']]:
    return lambda queries, pieces: np.tile([test(piece) for piece in pieces], (queries, 1))


def _is_digit(piece: str) -> bool:
    return piece.strip(SPACE).isdecimal()


def _is_punctuation(piece: str) -> bool:
    text = piece.strip(SPACE)
    return piece not in SPECIAL and bool(text) and all(unicodedata.category(character)[0] in 'PS' for character in text)


# {role: function (number of queries, pieces of the keys) -> the keys with this role, for each query}
ROLES: dict[str, Callable[..., Bool[np.ndarray, 'query key']]] = {
    'previous': _at(-1), 'same': _at(0), 'next': _at(1), 'first': lambda queries, pieces: np.tile(
        np.arange(len(pieces)) == 0, (queries, 1)),
    'end': _of(SPECIAL[EOS].__eq__), 'digit': _of(_is_digit), 'punctuation': _of(_is_punctuation)}


@dataclasses.dataclass(frozen=True)
class Roles:
    """The share of the attention that each head gives to keys with each role, over a corpus.

    Attributes:
      heads: (place of the weights, index of the head) for each row.
      tokens: the number of query tokens of each row.
      seen: the share of the query tokens that can attend to a key with the role. In cross-attention, the roles
        'previous', 'same' and 'next' compare the position in the target with the position in the source.
      shares: the mean weight on keys with the role, over the query tokens that can attend to such a key. NaN if there
        is no such query token.
      entropy: the mean entropy of the weights of a query, in nats.
      distance: the mean number of tokens between query and key, weighted by the attention.
    """
    heads: list[tuple[str, int]]
    tokens: list[int]
    seen: Float[np.ndarray, 'row role']
    shares: Float[np.ndarray, 'row role']
    entropy: Float[np.ndarray, ' row']
    distance: Float[np.ndarray, ' row']

    def ranked(self, by: str) -> list[tuple[str, int, float]]:
        """Returns (place, head, value), highest first. `by` is a role, 'entropy' or 'distance'.

        Raises:
          UserError: if `by` is none of these names.
        """
        columns = {role: self.shares[:, index] for index, role in enumerate(ROLES)} | {
            'entropy': self.entropy, 'distance': self.distance}
        if by not in columns:
            raise UserError(f'there is no role {by!r}. {nearest(by, list(columns))}')
        order = np.argsort(-np.nan_to_num(columns[by], nan=-1), kind='stable')
        return [(*self.heads[row], float(columns[by][row])) for row in order]

    def __str__(self) -> str:
        """Returns a text table with a line for each head, and a column for the share of each role, in percent."""
        names = [f'{place.removesuffix("/weights")}, head {head}' for place, head in self.heads]
        width = max(map(len, names))
        lines = [' ' * width + ''.join(f'{role:>13}' for role in (*ROLES, 'entropy', 'distance'))]
        for row, name in enumerate(names):
            cells = ['-' if np.isnan(share) else f'{100 * share:.1f} %' for share in self.shares[row]]
            cells += [f'{self.entropy[row]:.2f}', f'{self.distance[row]:.2f}']
            lines.append(f'{name:{width}}' + ''.join(f'{cell:>13}' for cell in cells))
        return '\n'.join(lines)


def roles(run: Run, texts: Iterable[Any], places: str | Sequence[str] = '*/weights') -> Roles:
    """Returns how much attention the heads at the places give to keys with each role.

    Args:
      run: a translator or a language model with attention.
      texts: sources, pairs, texts or outputs, as in `Run.inspect`.
      places: names or patterns of places of attention weights.

    Raises:
      UserError: if the run does not write text, the list of texts is empty, no place matches, or a place has no
        attention weights.
    """
    text_model(run)  # raises an error for a model of images or series
    sums: dict[str, _Sums] = {}
    for values in run.inspect_each(texts, places):
        for name, value in values.items():
            own = 'self_attention' in name
            causal = own and (isinstance(run.model, Generator) or 'decoder' in name)
            sums[name] = sums.get(name, _Sums()) + _sums(value, causal, _window(run.model.module, name) if own else 0)
    if not sums:
        raise UserError('roles need at least one text. Use a list with texts')
    heads = [(name, head) for name, place_sums in sums.items() for head in range(len(place_sums.entropy))]

    def rows(field):
        return np.concatenate([field(place_sums) for place_sums in sums.values()])

    with np.errstate(invalid='ignore'):
        shares = rows(lambda sums: sums.weights / sums.seen)
    return Roles(heads, [sums[name].tokens for name, _ in heads],
                 rows(lambda sums: np.tile(sums.seen / sums.tokens, (len(sums.entropy), 1))), shares,
                 rows(lambda sums: sums.entropy / sums.tokens), rows(lambda sums: sums.distance / sums.tokens))


def _window(module: Any, place: str) -> int:
    """Returns the window of self-attention in a module, or in the member of an ensemble to which a place belongs."""
    part = place.partition('/')[0]
    if part.startswith('members_'):
        module = module.members[int(part.removeprefix('members_'))]
    return module.config.window


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Sums over query tokens. `Roles` is computed from these sums.

    The shapes are: weights [head, role], seen [role], entropy [head], distance [head].
    """
    tokens: int = 0
    weights: Any = 0.0
    seen: Any = 0.0
    entropy: Any = 0.0
    distance: Any = 0.0

    def __add__(self, other: '_Sums') -> '_Sums':
        return _Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)))


def _sums(value: Values, causal: bool, window: int) -> _Sums:
    """Returns the sums for one text. `window` is config.model.window, or 0 if the distance of keys is not limited."""
    if not value.name.endswith('/weights'):
        raise UserError(f'{value.name}: roles are computed from attention weights. Use places that end in /weights')
    weights, pieces = np.asarray(value.values, np.float64), value.labels['key']
    heads, queries, keys = weights.shape
    offset = np.arange(keys) - np.arange(queries)[:, None]
    distance = np.abs(offset)
    visible = (distance < (window or np.inf)) & (offset <= (0 if causal else np.inf))
    masks = [mask(queries, pieces) & visible for mask in ROLES.values()]
    positive = np.where(weights > 0, weights, 1)
    return _Sums(queries, np.stack([(weights * mask).sum(axis=(1, 2)) for mask in masks], axis=1),
                 np.array([mask.any(axis=1).sum() for mask in masks], np.float64),
                 -(weights * np.log(positive)).sum(axis=(1, 2)), (weights * distance).sum(axis=(1, 2)))
