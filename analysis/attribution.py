"""Attribution: the contribution of each source token and each earlier target token to each prediction.

METHODS lists the methods. All methods return an `Attribution`, and `agreement` compares the results of methods.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from analysis.passes import Text, as_output, at_targets, compiled, from_logits, most_rows, teacher_forced, text_of
from inference.generate import Generator
from inference.inspection import list_places
from inference.run import Run
from inference.translate import Translator
from input_pipeline.tokenizer import PAD, SPACE, UNK
from model.places import argument_of
from runtime.errors import UserError, nearest

INTERVALS = 100  # number of quadrature intervals of integrated gradients; each interval needs two gradients
SCALES = 1024  # number of outputs from which the intervals are chosen
FLOW_UNIT = 2 ** 24  # scipy needs integer capacities, so capacities are in units of 1 / FLOW_UNIT
BATCH = 64  # maximum number of rows of a pass that computes outputs

Matrix = Float[np.ndarray, 'token target']


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The contribution of each token that the model reads to each token that it predicts.

    Attributes:
      method: a key of METHODS.
      source: the pieces of the source; [] for a language model.
      prefix: the pieces that the decoder reads. The first piece is the start token, except in an output of a language
        model that has read its prompt without a start token (data.packing=contiguous, or a truncated prompt).
      target: the pieces that are predicted. Piece t is predicted from the source and from the prefix before it.
      values: the contributions. The first rows belong to `source`, the remaining rows to `prefix`.
      outputs: the numbers that are explained, one for each target piece: its log-probability, or its log-probability
        minus the log-probability of an alternative token. None for methods that use only attention weights.
      baseline: for integrated gradients, the value of `outputs` when all embeddings are 0. None for other methods.
      alternative: the piece of the alternative token, or '' without an alternative.
    """
    method: str
    source: list[str]
    prefix: list[str]
    target: list[str]
    values: Matrix
    outputs: Float[np.ndarray, ' target'] | None = None
    baseline: Float[np.ndarray, ' target'] | None = None
    alternative: str = ''

    @property
    def gap(self) -> Float[np.ndarray, ' target']:
        """The sum of the contributions minus (outputs - baseline): the numerical error of integrated gradients.

        Raises:
          UserError: if the method is not 'integrated', because other methods have no baseline.
        """
        if self.outputs is None or self.baseline is None:
            raise UserError(f"method={self.method!r} has no baseline. Use method='integrated'")
        return self.values.sum(axis=0) - (self.outputs - self.baseline)

    def __str__(self) -> str:
        """Returns a line for each target piece, with the three tokens that contribute most.

        If there is an alternative, the line before these lines names it.
        """
        tokens, width = [*self.source, *self.prefix], 2 + max(map(len, self.target))
        lines = [f'each token instead of {self.alternative}'] if self.alternative else []
        for number, piece in enumerate(self.target):
            best = np.argsort(-np.abs(self.values[:, number]), kind='stable')[:3]
            shares = ', '.join(f'{tokens[row]} {self.values[row, number]:.3g}' for row in best)
            lines.append(f'{piece:{width}}{shares}')
        return '\n'.join(lines)


def attribute(run: Run, example: Any, method: str = 'integrated', instead: str = '') -> Attribution:
    """Returns the contributions to each predicted token.

    Args:
      run: a translator or a language model.
      example: a source (the run translates it), a tuple (source, target) or an output. For a language model: a text, a
        tuple (prompt, continuation) or an output.
      method: a key of METHODS.
      instead: a text. Its first token is the alternative: the contributions explain the log-probability of each target
        token minus the log-probability of this token (Yin and Neubig 2022, arXiv:2202.10419). Tokens that are only
        spaces are skipped, unless the text has no other tokens.

    Raises:
      UserError: if the method does not exist or does not support `instead`, or the model has no attention.
    """
    if method not in METHODS:
        raise UserError(f'there is no method {method!r}. {nearest(method, list(METHODS))}')
    output = as_output(run, example)
    text = text_of(run, output)
    if method not in ATTENTION_METHODS:
        measure = Measure(text, instead)
        fields = METHODS[method](text, measure) | {'alternative': measure.piece}
    elif instead:
        usable = [name for name in METHODS if name not in ATTENTION_METHODS]
        raise UserError(f'instead={instead!r}: method={method!r} uses only attention weights, which do not depend on '
                        f'the predicted token. Use {", ".join(usable)}')
    else:
        fields = {'values': METHODS[method](Weights(run, output, text)).T[:, text.first:]}
    return Attribution(method, text.source, text.prefix, text.target, **fields)


def agreement(attributions: Sequence[Attribution]) -> Float[np.ndarray, 'method method']:
    """Returns Kendall's tau for each pair of methods, as the mean over the target tokens.

    For each target token, tau compares the order of the absolute contributions of all tokens that the model has read.
    Target tokens for which the model has read only one token have no tau, so they are left out.

    Raises:
      UserError: if the attributions belong to different texts, or no target token has a tau.
    """
    from scipy.stats import kendalltau  # imported here, because the import is slow
    if not attributions:
        raise UserError('attributions=[]: there is nothing to compare. Use at least one attribution')
    first = attributions[0]
    if any((result.source, result.prefix, result.target) != (first.source, first.prefix, first.target)
           for result in attributions):
        raise UserError('the attributions belong to different texts. Compare methods on the same output')
    before = len(first.source) + len(first.prefix) - len(first.target)
    read = {column: before + 1 + column for column in range(len(first.target)) if before + column > 0}
    if not read:
        raise UserError('the attributions have no order of tokens, because the model has read only one token. Use a '
                        'longer text')

    def tau(left, right):
        statistics: list[Any] = [kendalltau(*(np.abs(result.values[:count, column]) for result in (left, right)))
                                 for column, count in read.items()]
        return np.nanmean([statistic.statistic for statistic in statistics])

    return np.array([[tau(left, right) for right in attributions] for left in attributions])


class Measure:
    """The numbers that are explained, and the passes that compute them.

    Attributes:
      text: the text.
      names: {name of the place of the embeddings: name of the argument with the embedded tokens}.
      inputs: the arguments of the module for one row.
      targets: the tokens that the outputs of the module predict, for one row.
      batch: the number of rows of a pass that computes outputs. It is at least 2.
      alternative: the token whose log-probability is subtracted, or -1.
      piece: the piece of this token, or ''.

    Raises:
      UserError: if the first token of `instead` is not in the vocabulary, or the model has no place with embeddings. An
        ensemble has no such place, because each of its runs has separate embeddings.
    """

    def __init__(self, text: Text, instead: str):
        self.text, model = text, cast(Translator | Generator, text.model)
        self.names = {'source_embedding': 'source', 'target_embedding': 'target'} if text.source else {
            'embedding': 'tokens'}
        if not {*self.names} <= {*list_places(model)}:
            raise UserError(f'{text.model.name}: this method needs one model with embeddings. Use one run')
        self.inputs, self.targets, _ = text.arrays()
        self._most_rows = most_rows(text.width)
        self.batch = max(2, min(BATCH, self._most_rows))
        self.alternative, self.piece = -1, ''
        if instead:
            tokenizer = text.model.tokenizers['target']
            tokens = tokenizer.encode(instead) or [UNK]
            # The space before a word may be a separate token: '6' may be the tokens '▁' and '6'.
            self.alternative = next((token for token, piece in zip(tokens, tokenizer.pieces(tokens), strict=True)
                                     if piece.strip(SPACE)), tokens[0])
            self.piece, = tokenizer.pieces([self.alternative])
        if self.alternative == UNK:
            raise UserError(f'instead={instead!r}: the first token is not in the vocabulary of the target. Use another '
                            'text')

    def repeated(self, rows: int) -> dict[str, Array]:
        """Returns the arguments of the module for `rows` equal rows."""
        return {name: jnp.repeat(tokens, rows, axis=0) for name, tokens in self.inputs.items()}

    def outputs(self, inputs: dict[str, Array], scales: Sequence[float] | Float[np.ndarray, ' rows']
                ) -> Float[np.ndarray, 'rows target']:
        """Returns the numbers that are explained. Row i is computed with all embeddings multiplied by `scales[i]`."""
        explained = compiled(_explained, self.text.model.module, tuple(self.names))
        targets = jnp.repeat(self.targets, len(scales), axis=0)
        values = explained(self.text.model.params, inputs, targets, self.alternative, jnp.asarray(scales, jnp.float32))
        return np.asarray(values)[:, self.text.first:len(self.text.written)]

    def gradients(self, nodes: Sequence[float] | Float[np.ndarray, ' node'],
                  weights: Sequence[float] | Float[np.ndarray, ' node']) -> Matrix:
        """Returns sum_i w_i grad(a_i x) * x for each token and each target token.

        x is the embedding of the token, a_i are the numbers in `nodes`, and w_i are the numbers in `weights`. grad(a x)
        is the gradient of the explained number with respect to the embedding, when all embeddings are multiplied by a.
        """
        count = len(self.text.target)
        rows = min(1 << (count - 1).bit_length(), self._most_rows)
        # Row t has the gradient of target token t. The rows after the last target token are not used.
        positions = self.text.first + np.minimum(np.arange(count + rows), count - 1)
        gradients, inputs = compiled(_along_path, self.text.model.module, tuple(self.names)), self.repeated(rows)
        parts = []
        for begin in range(0, count, rows):
            part = positions[begin:begin + rows, None]
            sums = gradients(self.text.model.params, inputs, jnp.asarray(self.targets)[0, part], self.alternative, part,
                             *(jnp.asarray(values, jnp.float32) for values in (nodes, weights)))
            parts.append(np.concatenate([np.asarray(sums[name])[:, :len(self.text.inputs[argument])]
                                         for name, argument in self.names.items()], axis=1))
        return np.concatenate(parts)[:count].T


def _explained(module, names, params, inputs, targets, alternative, scales, shifts=None, positions=None):
    """Returns the log-probability of each target token minus the log-probability of the alternative token.

    The embeddings are multiplied by `scales`, and then `shifts` are added to them. The embeddings of padding are
    replaced by 0 first, because they are not trained. Without an alternative token, nothing is subtracted. `positions`
    [rows, n] are the positions of the outputs that predict `targets`; None: all positions.
    """
    def edit_of(name):
        def edited(value, at):
            tokens = inputs[argument_of(name, 'position', tuple(inputs))]
            value = jnp.where((tokens == PAD)[..., None], 0, value)
            return scales[:, None, None] * value + (0 if shifts is None else shifts[name])
        return edited if name in names else None

    def contrast(logits, targets):
        subtracted = at_targets(logits, jnp.broadcast_to(jnp.maximum(alternative, 0), targets.shape))
        return at_targets(logits, targets) - jnp.where(alternative < 0, 0, subtracted)

    outputs, _ = teacher_forced(module, params, inputs, edit_of)
    if positions is not None:  # the logits at other positions would need most of the memory
        outputs = outputs.replace(states=jnp.take_along_axis(outputs.states, positions[..., None], axis=1))
    return from_logits(contrast, outputs, targets)


def _along_path(module, names, params, inputs, targets, alternative, positions, nodes, weights):
    """Returns {place: sum over the nodes of weight * gradient * embedding}. The sums have the shape [row, position]."""
    _, values = teacher_forced(module, params, inputs, read=names.__contains__)

    def total(shifts, node):
        scales = jnp.broadcast_to(node, len(targets))
        return _explained(module, names, params, inputs, targets, alternative, scales, shifts, positions).sum()

    def add(sums, node_weight):
        node, weight = node_weight
        grads = jax.grad(total)(jax.tree.map(jnp.zeros_like, values), node)
        return {name: sums[name] + weight * (grads[name] * values[name]).sum(axis=-1) for name in names}, None

    return jax.lax.scan(add, {name: jnp.zeros(values[name].shape[:2]) for name in names}, (nodes, weights))[0]


def gradient_times_input(text: Text, measure: Measure) -> dict[str, Any]:
    """Returns the gradient with respect to the embedding of each token, times the embedding."""
    outputs, = measure.outputs(measure.inputs, [1.0])
    return {'values': measure.gradients([1.0], [1.0]), 'outputs': outputs}


def integrated_gradients(text: Text, measure: Measure) -> dict[str, Any]:
    """Returns the embedding of each token, times the integral of the gradient from zero embeddings to the embeddings.

    At each point of the path, all embeddings of source and prefix are multiplied by the same number, from 0 to 1. The
    contributions to a prediction add up to the difference of the outputs at the ends of the path (Sundararajan et al.
    2017, arXiv:1703.01365, equation 1 and proposition 1).
    """
    # Layer norms remove the length of the embeddings, unless the embeddings are near 0. So if a model does not add
    # positions to the embeddings, the outputs change only at small scales: below 0.001 in the demo run. Therefore the
    # nodes are placed where the outputs change. Half of the density of the INTERVALS intervals follows the change, and
    # the other half is uniform over `scales`. Each interval has the two nodes of the Gauss-Legendre rule. The largest
    # gap (`Attribution.gap`) was measured for a sentence of the demo run, whose differences (outputs - baseline) are
    # from 2 to 8. The gap is 0.11 with these nodes, 0.17 with one node in the middle of each of 200 intervals, and 1
    # with a single rule of 200 nodes.
    scales = np.linspace(0, 1, SCALES) ** 3
    inputs, padded = measure.repeated(measure.batch), np.pad(scales, (0, -SCALES % measure.batch))
    outputs = np.concatenate([measure.outputs(inputs, part) for part in padded.reshape(-1, measure.batch)])[:SCALES]
    change = np.abs(np.diff(outputs, axis=0)).sum(axis=1)
    share = np.cumsum([0, *(change + change.mean())])
    ends = np.interp(np.linspace(0, share[-1], INTERVALS + 1), share, scales)
    middles, halves = (ends[1:] + ends[:-1]) / 2, np.diff(ends) / 2
    nodes = np.concatenate([middles - halves / np.sqrt(3), middles + halves / np.sqrt(3)])
    return {'values': measure.gradients(nodes, np.concatenate([halves, halves])), 'outputs': outputs[-1],
            'baseline': outputs[0]}


def leave_one_out(text: Text, measure: Measure) -> dict[str, Any]:
    """Returns how much the explained numbers decrease when a token is replaced by padding with an embedding of 0.

    No query attends to padding. The query at the place of a replaced prefix token still predicts the next token, from
    the embedding 0 instead of the embedding of the token. The positions of the remaining tokens are unchanged. The
    encoder of RNNsearch skips padding, and its decoder reads the embedding 0.
    """
    tokens = [(name, place) for name in measure.names.values() for place in range(len(text.inputs[name]))]
    rows = []
    for begin in range(0, len(tokens), measure.batch - 1):  # the last row of a batch has the whole text
        part = tokens[begin:begin + measure.batch - 1]
        inputs = measure.repeated(measure.batch)
        for row, (name, place) in enumerate(part):
            inputs[name] = inputs[name].at[row, place].set(PAD)
        outputs = measure.outputs(inputs, np.ones(measure.batch))
        rows.append(outputs[-1] - outputs[:len(part)])
    return {'values': np.concatenate(rows), 'outputs': outputs[-1]}


class Weights:
    """The attention weights of a text, as means over the heads.

    Attributes:
      encoder: the weights of each layer of the encoder, [source, source]; [] for a language model.
      decoder: pairs (is_cross, weights), in the order of the sublayers. is_cross is True for cross-attention, and False
        for self-attention.

    Raises:
      UserError: if the run is an ensemble, or the model has no attention.
    """

    def __init__(self, run: Run, output: Any, text: Text):
        names = [name for name in run.places() if name.endswith('/weights') and not name.startswith('members_')]
        if not names:
            raise UserError(f'{run.workdir}: this method needs one model with attention. Use one run with attention, '
                            'or another method')
        values, = run.inspect([output], names)
        mean = {name: np.asarray(value.values, np.float64).mean(axis=0) for name, value in values.items()}
        order = sorted(names, key=lambda name: (int(name.split('layers_')[1].split('/')[0]), 'cross' in name))
        self.source, self.prefix = len(text.source), len(text.prefix)
        self.encoder = [mean[name] for name in order if text.source and name.startswith('encoder')]
        self.decoder = [('cross' in name, mean[name]) for name in order
                        if not text.source or name.startswith('decoder')]


def mean_weights(weights: Weights) -> Float[np.ndarray, 'prefix token']:
    """Returns the mean of the attention weights over layers and heads.

    The columns of source tokens have the mean of cross-attention, and the columns of prefix tokens have the mean of
    self-attention.
    """
    def mean(cross, keys):
        parts = [part for to_source, part in weights.decoder if to_source == cross]
        return np.mean(parts, axis=0) if parts else np.zeros((weights.prefix, keys))
    return np.concatenate([mean(True, weights.source), mean(False, weights.prefix)], axis=1)


def rollout(weights: Weights) -> Float[np.ndarray, 'prefix token']:
    """Returns attention rollout: the product of the weights of all layers (Abnar and Zuidema 2020, arXiv:2005.00928).

    Half of each output of a sublayer comes from the residual connection (section 3 of the paper). The paper describes
    encoders. In a decoder, cross-attention adds half of the rollout of the encoder.
    """
    memory = np.eye(weights.source)
    for part in weights.encoder:
        memory = (part @ memory + memory) / 2
    memory = np.pad(memory, ((0, 0), (0, weights.prefix)))
    stream = np.eye(weights.prefix, weights.source + weights.prefix, k=weights.source)
    for to_source, part in weights.decoder:
        stream = (part @ (memory if to_source else stream) + stream) / 2
    return stream


def flow(weights: Weights) -> Float[np.ndarray, 'prefix token']:
    """Returns attention flow: the maximum flow from an output to a token (Abnar and Zuidema 2020, arXiv:2005.00928).

    As in `rollout`, the capacity of an edge is half of its attention weight, or 0.5 for a residual connection.
    """
    from scipy.sparse import csr_array  # imported here, because the import is slow
    from scipy.sparse.csgraph import maximum_flow
    tokens, edges = weights.source + weights.prefix, []

    def add(queries, keys, part):
        """Adds the nodes of a sublayer. The nodes `queries` are the inputs of the sublayer, and attend to `keys`."""
        begin = count[0]
        nodes = np.arange(begin, begin + len(queries))
        count[0] += len(queries)
        edges.append((np.repeat(nodes, len(keys)), np.tile(keys, len(nodes)), part.ravel() / 2))
        edges.append((nodes, queries, np.full(len(nodes), 0.5)))
        return nodes

    count = [tokens]
    memory, stream = np.arange(weights.source), np.arange(weights.source, tokens)
    for part in weights.encoder:
        memory = add(memory, memory, part)
    for to_source, part in weights.decoder:
        stream = add(stream, memory if to_source else stream, part)
    begins, ends, capacities = (np.concatenate(column) for column in zip(*edges, strict=True))
    # The capacities of parallel edges are added: the attention of a token to itself, and its residual connection.
    graph = csr_array((np.rint(capacities * FLOW_UNIT).astype(np.int32), (begins, ends)), shape=(count[0], count[0]))
    graph.sum_duplicates()
    return np.array([[maximum_flow(graph, node, token).flow_value / FLOW_UNIT for token in range(tokens)]
                     for node in stream.tolist()])


METHODS: dict[str, Callable[..., Any]] = {
    'gradient': gradient_times_input, 'integrated': integrated_gradients, 'leave_one_out': leave_one_out,
    'weights': mean_weights, 'rollout': rollout, 'flow': flow}
ATTENTION_METHODS = 'weights', 'rollout', 'flow'
