"""Fine-tuning: frozen parameters and low-rank adapters.

Patterns such as 'encoder,*/norm' select parts of a model. A pattern matches the name of a parameter, such as
'encoder/layers_0/self_attention/query/kernel', or the name of any part that contains the parameter. * matches any text.

If a model has adapters (model/adapters.py), only the adapters are trained.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key, PyTree
from ml_collections import ConfigDict

from configs.options import DEFAULTS
from model import Params, parameter_count
from model.adapters import ADAPTERS, merged
from run_directory.initial import InitialValues
from runtime.errors import UserError, did_you_mean, first_names

TRAINED, FROZEN = 'trained', 'frozen'
MAX_NAMES = 12  # maximum number of names in a message


class Tuning(NamedTuple):
    """A selection of the parameters to train. By default, all parameters are trained.

    Attributes:
      frozen: patterns that select the frozen parameters, which keep their initial values.
      rank: the rank of the adapters, or 0 for no adapters.
      alpha: the output of an adapter is multiplied by alpha / rank.
      adapted: patterns that select the matrices with an adapter.
    """
    frozen: Sequence[str] = ()
    rank: int = 0
    alpha: float = 1.0
    adapted: Sequence[str] = ()

    def prepare(self, boxed: Params, key: Key[Array, '']) -> Params:
        """Returns a model's fresh parameters with adapters added. The parameters are in Flax metadata boxes.

        Raises:
          UserError: if a pattern matches no parameter, or if all parameters are frozen. Of the patterns in the default
            of config.train.lora_parts, only one must match.
        """
        leaves = flatten_dict(boxed, sep='/')
        _check(self.frozen, 'config.train.frozen', leaves)
        if self.frozen and all(matches(name, self.frozen) for name in leaves):
            raise UserError(f'config.train.frozen={",".join(self.frozen)!r} freezes all parameters. Freeze fewer '
                            'parts')
        if not self.rank:
            return boxed
        matrices = _matrices(leaves)
        adapters = {name: _adapter(matrix, self.rank, jax.random.fold_in(key, zlib.crc32(name.encode())))
                    for name, matrix in matrices.items() if matches(name, self.adapted)}
        # The default is for all models, and some models have no matrix with one of the names.
        if not adapters or self.adapted != _patterns(str(DEFAULTS['train.lora_parts'])):
            _check(self.adapted, 'config.train.lora_parts', matrices)
        if not adapters:
            raise UserError('config.train.lora_parts is empty, so there is no adapter to train. Set the option to '
                            '*attention/query, for example')
        return {**boxed, ADAPTERS: {'scale': jnp.float32(self.alpha / self.rank),
                                    'of': unflatten_dict(adapters, sep='/')}}

    def check_initial(self, boxed: Params, initial: Mapping[str, InitialValues]) -> None:
        """Raises UserError if a matrix that starts with random values, or some rows of a matrix, would not be trained.

        Args:
          boxed: the shapes of a model's parameters, in Flax metadata boxes.
          initial: {name: initial values} of the parameters that are taken from another run; {} if there is no such run.
        """
        untrained = [name for name in _matrices(flatten_dict(boxed, sep='/'))
                     if not (name in initial and initial[name].rows.all())
                     and (not matches(name, self.adapted) if self.rank else matches(name, self.frozen))]
        if not untrained:
            return
        names = first_names(untrained, MAX_NAMES)
        advice = '' if initial else 'Set config.train.init_from to a trained run'
        if self.rank:
            raise UserError(f'config.train.lora_rank={self.rank}: these matrices start with random values and have no '
                            f'adapter, so they would not be trained: {names}. '
                            + (advice or 'Add them to config.train.lora_parts'))
        raise UserError(f'config.train.frozen={",".join(self.frozen)!r}: these matrices start with random values, so '
                        f'they must be trained: {names}. ' + (advice or 'Use patterns that do not match them'))

    def labels(self, params: Params) -> PyTree[str]:
        """Returns a tree like `params` in which each parameter is replaced by the label TRAINED or FROZEN."""
        def label(path, _):
            name = parameter_name(path)
            changes = name.startswith(f'{ADAPTERS}/of/') if self.rank else not matches(name, self.frozen)
            return TRAINED if changes else FROZEN

        return jax.tree_util.tree_map_with_path(label, params)

    def used(self, params: Params) -> Params:
        """Returns the parameters of the model for a forward pass, without gradients for the frozen parameters."""
        if not (self.frozen or self.rank):
            return params
        return merged(jax.tree.map(lambda leaf, label: leaf if label == TRAINED else jax.lax.stop_gradient(leaf),
                                   params, self.labels(params)))

    def describe(self, params: Params) -> str:
        """Returns a log line with the numbers of trained and frozen parameters, or '' if all parameters are trained."""
        labels, leaves = jax.tree.leaves(self.labels(params)), jax.tree.leaves(params)
        trained = sum(math.prod(leaf.shape) for label, leaf in zip(labels, leaves, strict=True) if label == TRAINED)
        frozen = parameter_count(params) - trained
        return f'{trained:,} parameters are trained, {frozen:,} are frozen' if frozen else ''

    def restrict(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns `optimizer`, restricted to trained parameters. Frozen parameters have no update, decay or state."""
        if not (self.frozen or self.rank):
            return optimizer
        return optax.partition({TRAINED: optimizer, FROZEN: optax.set_to_zero()}, self.labels)


EVERYTHING = Tuning()


def make_tuning(config: ConfigDict | Mapping[str, Any]) -> Tuning:
    """Returns the selection of trained parameters. `config` is the section config.train."""
    return Tuning(_patterns(config['frozen']), config['lora_rank'], config['lora_alpha'],
                  _patterns(config['lora_parts']))


def parameter_name(path: Sequence[Any]) -> str:
    """Returns the name of a parameter, such as 'encoder/norm/scale', from its path in a JAX tree.

    A Flax metadata box around the parameter adds an attribute to the path. This attribute is not part of the name.
    """
    return '/'.join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern matches a parameter's name or the name of a part that contains the parameter."""
    parts = name.split('/')
    return any(fnmatchcase('/'.join(parts[:count]), pattern) for count in range(1, len(parts) + 1)
               for pattern in patterns)


def _patterns(text: str) -> tuple[str, ...]:
    """Returns the patterns in the value of an option, which are separated by commas."""
    return tuple(part.strip() for part in text.split(',') if part.strip())


def _matrices(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the matrices among `leaves`, {name: parameter}. They may have more than two axes."""
    return {name: leaf for name, leaf in leaves.items() if nn.unbox(leaf).ndim > 1 and not name.endswith('bias')}


def _adapter(matrix: Any, rank: int, key: Key[Array, '']) -> dict[str, Any]:
    """Returns the two factors of a matrix's adapter, in Flax metadata boxes.

    The inputs and the outputs of the matrix may have several axes. If a parameter has one matrix for each head, as in
    general scores, the heads are an axis of the inputs. So the update of each head has at most the rank `rank`.
    """
    shape = nn.unbox(matrix).shape
    names = matrix.names if isinstance(matrix, nn.LogicallyPartitioned) else (None,) * len(shape)
    inputs = 1 if names[0] == 'embed' else len(shape) - 1  # (embed, heads, kv) has one axis of inputs
    a = jax.random.normal(key, (*shape[:inputs], rank), jnp.float32) * math.prod(shape[:inputs]) ** -0.5
    b = jnp.zeros((rank, *shape[inputs:]), jnp.float32)
    return {'a': nn.LogicallyPartitioned(a, (*names[:inputs], None)),
            'b': nn.LogicallyPartitioned(b, (None, *names[inputs:]))}


def _check(patterns: Sequence[str], option: str, leaves: Mapping[str, Any]) -> None:
    """Raises UserError if a pattern of `option` matches no name in `leaves`, {name: parameter}."""
    for pattern in patterns:
        if any(matches(name, [pattern]) for name in leaves):
            continue
        parts = {'/'.join(name.split('/')[:count]) for name in leaves for count in range(1, name.count('/') + 2)}
        parts = sorted(parts, key=lambda part: (part.count('/'), part))
        near = did_you_mean(pattern, parts)
        raise UserError(f'{option}: {pattern!r} matches no {"matrix" if "lora" in option else "parameter"} of this '
                        f'model{near or ". Use names of its parts, such as " + ", ".join(parts[:MAX_NAMES])}')
