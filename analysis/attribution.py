"""Attribution: the contribution of each source token and each earlier target token to each prediction.

METHODS lists the methods. Their results have the same form, so they can be compared (`agreement`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from analysis.passes import Text, as_output, text_of
from inference.edits import nearest
from inference.run import Run
from input_pipeline.tokenizer import PAD
from model.places import observing
from runtime.errors import UserError

STEPS = 200  # number of gradients of integrated gradients
SCALES = 1001  # number of outputs from which the steps are chosen
FLOW_UNIT = 2 ** 24  # capacities are integers, multiples of 1 / FLOW_UNIT
BATCH = 64  # rows of a pass

Matrix = Float[np.ndarray, 'token target']


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The contribution of each token that the model reads to each token that it predicts.

    Attributes:
      method: a key of METHODS.
      source: the pieces of the source; [] for a language model.
      prefix: the pieces that the decoder reads; the first piece is the start token.
      target: the pieces that are predicted. Piece t is predicted from the source and from the prefix before it.
      values: the contributions. The first rows belong to `source`, the remaining rows to `prefix`.
      outputs: the explained numbers: the log-probability of each piece, or its difference to an alternative; None for
        methods that only use attention weights.
      baseline: for integrated gradients, `outputs` if all embeddings are 0.
    """
    method: str
    source: list[str]
    prefix: list[str]
    target: list[str]
    values: Matrix
    outputs: Float[np.ndarray, ' target'] | None = None
    baseline: Float[np.ndarray, ' target'] | None = None

    @property
    def gap(self) -> Float[np.ndarray, ' target']:
        """The sum of the contributions minus (outputs - baseline): the numerical error of integrated gradients."""
        if self.outputs is None or self.baseline is None:
            raise UserError(f"method={self.method!r} has no baseline. Use method='integrated'")
        return self.values.sum(axis=0) - (self.outputs - self.baseline)

    def __str__(self) -> str:
        """Returns a line for each target piece, with the three tokens that contribute most."""
        tokens, lines = [*self.source, *self.prefix], []
        for number, piece in enumerate(self.target):
            best = np.argsort(-np.abs(self.values[:, number]), kind='stable')[:3]
            lines.append(f'{piece:12}' + ', '.join(f'{tokens[row]} {self.values[row, number]:.3g}' for row in best))
        return '\n'.join(lines)


def attribute(run: Run, given: Any, method: str = 'integrated', instead: str = '') -> Attribution:
    """Returns the contributions to each predicted token.

    Args:
      run: a translator or a language model.
      given: a source (the run translates it), a pair (source, target) or an output. For a language model: a text, a
        pair (prompt, continuation) or an output.
      method: a key of METHODS.
      instead: a text. Its first token is the alternative: the contributions explain the log-probability of each target
        token minus the log-probability of this token (Yin and Neubig 2022, arXiv:2202.10419).

    Raises:
      UserError: if the method does not exist or does not support `instead`, or the model has no attention.
    """
    if method not in METHODS:
        raise UserError(f'there is no method {method!r}. {nearest(method, list(METHODS))}')
    output = as_output(run, given)
    text = text_of(run, output)
    if method in ATTENTION_METHODS:
        if instead:
            others = [name for name in METHODS if name not in ATTENTION_METHODS]
            raise UserError(f'instead={instead!r}: method={method!r} uses only attention weights, which do not depend '
                            f'on the predicted token. Use {", ".join(others)}')
        found = {'values': METHODS[method](Weights(run, output, text)).T[:, text.first:]}
    else:
        found = METHODS[method](text, Measure(text, instead))
    return Attribution(method, text.source, text.prefix, text.target, **found)


def agreement(attributions: Sequence[Attribution]) -> Float[np.ndarray, 'method method']:
    """Returns Kendall's tau between the methods: the mean over the target tokens.

    For each target token, tau compares the order of the absolute contributions of all tokens that the model has read.

    Raises:
      UserError: if the attributions belong to different texts.
    """
    from scipy.stats import kendalltau  # imported here, because the import is slow
    first = attributions[0]
    if any((each.source, each.prefix, each.target) != (first.source, first.prefix, first.target)
           for each in attributions):
        raise UserError('the attributions belong to different texts. Compare methods on the same output')
    columns = range(len(first.target))
    read = [len(first.source) + len(first.prefix) - len(first.target) + 1 + column for column in columns]

    def tau(one, other):
        results: list[Any] = [kendalltau(*(np.abs(each.values[:read[column], column]) for each in (one, other)))
                              for column in columns]
        return np.nanmean([result.statistic for result in results])

    return np.array([[tau(one, other) for other in attributions] for one in attributions])


class Measure:
    """The numbers that are explained, and the passes that compute them.

    Attributes:
      text: the text.
      names: {place of the embedded tokens: argument of the module}.
    """

    def __init__(self, text: Text, instead: str):
        self.text, self._other = text, None
        self.names = {'source_embedding': 'source', 'target_embedding': 'target'} if text.source else {
            'embedding': 'tokens'}
        if instead:
            self._other = text.model.tokenizers['target'].encode(instead)[0]

    def __call__(self, params: Any, inputs: dict[str, Array], edit: Any = None) -> Float[Array, 'rows target']:
        """Returns the log-probability of each target token minus the log-probability of the alternative token."""
        logits, _ = observing(self.text.model._apply, edit or (lambda name: None), lambda name: False)(params, **inputs)
        log_probs = jax.nn.log_softmax(logits)[:, self.text.first:len(self.text.written)]
        written = jnp.asarray(self.text.written[self.text.first:])[None, :, None]
        found = jnp.take_along_axis(log_probs, written, axis=-1)[..., 0]
        return found if self._other is None else found - log_probs[..., self._other]

    def embedded(self, params: Any, inputs: dict[str, Array]) -> dict[str, Float[Array, 'rows position width']]:
        """Returns the embedded tokens at each place.

        Raises:
          UserError: if the model has no embeddings of its own, like an ensemble.
        """
        found = observing(self.text.model._apply, read=self.names.__contains__)(params, **inputs)[1]
        if len(found) < len(self.names):
            raise UserError(f'{self.text.model.name}: this method needs one model with embeddings. Use one run')
        return found

    def joined(self, parts: dict[str, Float[np.ndarray, 'target position']]) -> Matrix:
        """Returns the contributions at the places as one matrix, without padding."""
        return np.concatenate([np.asarray(parts[name]).T[:len(self.text.inputs[argument])]
                               for name, argument in self.names.items()])


def _along_path(text: Text, measure: Measure, nodes: Any, node_weights: Any) -> dict[str, Any]:
    """Returns sum_i w_i grad(a_i x) * x for the embeddings x, with the nodes a_i and their weights w_i."""
    count, params = len(text.target), text.model.params
    inputs = text.arrays(count)[0]  # row t has the gradient of target token t

    def gradient(shifts, params, scale):
        def edit(name):
            return (lambda value, at: scale * value + shifts[name]) if name in shifts else None
        return jnp.trace(measure(params, inputs, edit))

    @jax.jit
    def total(params):
        values = measure.embedded(params, inputs)
        zeros = jax.tree.map(jnp.zeros_like, values)

        def add(sums, node):
            grads = jax.grad(gradient)(zeros, params, node[0])
            return jax.tree.map(lambda total, grad, x: total + node[1] * (grad * x).sum(axis=-1), sums, grads,
                                values), None

        sums, _ = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape[:2]), values), (nodes, node_weights))
        nothing = measure(params, inputs, lambda name: (lambda value, at: 0 * value) if name in values else None)
        return sums, measure(params, inputs)[0], nothing[0]

    sums, outputs, baseline = jax.tree.map(np.asarray, total(params))
    return {'values': measure.joined(sums), 'outputs': outputs, 'baseline': baseline}


def gradient_times_input(text: Text, measure: Measure) -> dict[str, Any]:
    """Returns the gradient with respect to the embedding of each token, times the embedding."""
    return _along_path(text, measure, np.ones(1, np.float32), np.ones(1, np.float32)) | {'baseline': None}


def integrated_gradients(text: Text, measure: Measure) -> dict[str, Any]:
    """Returns the integral of gradient times input from embeddings 0 to the embeddings of the text.

    The contributions to a prediction add up to the difference of the outputs (Sundararajan et al. 2017,
    arXiv:1703.01365, equation 1 and proposition 1). The embeddings of source and prefix grow together.
    """
    inputs, _, _ = text.arrays()

    def output(scale):
        return measure(text.model.params, inputs, lambda name: (
            lambda value, at: scale * value) if name in measure.names else None)[0]

    # The outputs of a trained model change in a few short intervals of the scale, often near 0, because layer norms
    # enlarge small values. So the integral needs most of its nodes in these intervals. For two sentences of the demo
    # run, the largest gap is 0.2, and the differences are 2 to 9. A Gauss-Legendre rule with 200 nodes has a gap of 1.
    scales = np.linspace(0, 1, SCALES, dtype=np.float32) ** 3
    change = np.abs(np.diff(np.asarray(jax.jit(lambda scales: jax.lax.map(output, scales, batch_size=BATCH))(scales)),
                            axis=0)).sum(axis=1)
    share = np.cumsum([0, *(change + change.mean())])
    ends = np.interp(np.linspace(0, share[-1], STEPS + 1), share, scales)
    return _along_path(text, measure, (ends[1:] + ends[:-1]).astype(np.float32) / 2, np.diff(ends).astype(np.float32))


def leave_one_out(text: Text, measure: Measure) -> dict[str, Any]:
    """Returns the decrease of the outputs when a token is replaced by padding, which no query sees.

    The positions of the remaining tokens are unchanged.
    """
    passes, rows = jax.jit(measure.__call__), []
    arrays, _, _ = text.arrays(BATCH)
    places = [(name, place) for name in measure.names.values() for place in range(len(text.inputs[name]))]
    for begin in range(0, len(places), BATCH):
        part, inputs = places[begin:begin + BATCH], dict(arrays)
        for row, (name, place) in enumerate(part):
            inputs[name] = inputs[name].at[row, place].set(PAD)
        rows.append(np.asarray(passes(text.model.params, inputs))[:len(part)])
    whole = np.asarray(passes(text.model.params, arrays))[0]
    return {'values': whole - np.concatenate(rows), 'outputs': whole}


class Weights:
    """The attention weights of a text, as means over the heads.

    Attributes:
      encoder: the weights of each layer of the encoder, [source, source]; [] for a language model.
      decoder: pairs (whether the attention reads the source, weights), in the order of the sublayers.
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
    """Returns the mean of the attention weights over layers and heads: of cross-attention, and of self-attention."""
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

    The edges of the network are the weights of `rollout`.
    """
    from scipy.sparse import csr_array  # imported here, because the import is slow
    from scipy.sparse.csgraph import maximum_flow
    tokens, edges = weights.source + weights.prefix, []

    def add(queries, keys, part):
        """Adds the nodes of a sublayer with inputs `queries`, which attend to the nodes `keys`."""
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
    # Equal edges (a token that attends to itself, and its residual connection) are added.
    graph = csr_array((np.rint(capacities * FLOW_UNIT).astype(np.int32), (begins, ends)), shape=(count[0], count[0]))
    graph.sum_duplicates()
    return np.array([[maximum_flow(graph, node, token).flow_value / FLOW_UNIT for token in range(tokens)]
                     for node in stream.tolist()])


METHODS: dict[str, Callable[..., Any]] = {
    'gradient': gradient_times_input, 'integrated': integrated_gradients, 'leave_one_out': leave_one_out,
    'weights': mean_weights, 'rollout': rollout, 'flow': flow}
ATTENTION_METHODS = 'weights', 'rollout', 'flow'
