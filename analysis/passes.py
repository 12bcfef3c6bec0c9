"""Forward passes over given texts (teacher forcing), for analyses that edit or differentiate the forward passes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from inference.forced import TOKENS
from inference.generate import Generator
from inference.inputs import checked_texts
from inference.outputs import Hypothesis, Output
from inference.run import Run
from inference.text import TextModel
from inference.translate import Translator
from input_pipeline.tokenizer import BOS, Tokenizer
from model.embedding import Projection
from model.places import ChangeOf, observing
from runtime.errors import UserError

PROGRAMS = 32  # maximum number of functions that `compiled` keeps


@dataclasses.dataclass(frozen=True)
class Text:
    """A text as tokens: the tokens that a module reads, and the tokens that it predicts.

    Attributes:
      model: the model that reads the text.
      inputs: the arguments of the module by name, each a list of tokens.
      written: the tokens that the outputs of the module predict.
      first: the index of the first output that predicts a token of the target. Earlier outputs predict tokens of a
        prompt.
    """
    model: TextModel
    inputs: Mapping[str, list[int]]
    written: list[int]
    first: int

    @property
    def source(self) -> list[str]:
        """The pieces of the source; [] for a language model."""
        return self.model.tokenizers['source'].pieces(self.inputs.get('source', []))

    @property
    def prefix(self) -> list[str]:
        """The pieces that the decoder reads; for a language model, the pieces of the prompt and the continuation."""
        return self.model.tokenizers['target'].pieces(self.inputs['target' if 'source' in self.inputs else 'tokens'])

    @property
    def target(self) -> list[str]:
        """The pieces of the target, which the model predicts."""
        return self.model.tokenizers['target'].pieces(self.written[self.first:])

    @property
    def width(self) -> int:
        """The number of tokens of a row of the longest argument, with padding."""
        return max(self.model.padded([tokens]).shape[1] for tokens in self.inputs.values())

    def arrays(self, rows: int = 1) -> tuple[dict[str, Int[Array, 'rows _']], Int[Array, 'rows length'],
                                             Float[Array, 'rows length']]:
        """Returns the arguments of the module, the tokens to predict, and a weight for each of these tokens.

        The weight is 1 for a token of the target, and 0 for prompt and padding. All `rows` rows are equal.
        """
        targets = jnp.asarray(self.model.padded([self.written] * rows))
        number = jnp.arange(targets.shape[1])
        weights = ((number >= self.first) & (number < len(self.written))).astype(jnp.float32)
        inputs = {name: jnp.asarray(self.model.padded([tokens] * rows)) for name, tokens in self.inputs.items()}
        return inputs, targets, jnp.broadcast_to(weights, targets.shape)

    def log_prob(self) -> float:
        """Returns the log-probability of the target under the model."""
        inputs, targets, weights = self.arrays()
        return float((self.model.target_log_probs(self.model.params, inputs, targets) * weights).sum())


class Node(NamedTuple):
    """A part of a model: a place, the indices of heads, and the indices of tokens, from 0. None selects all indices."""
    place: str
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Effects:
    """The effects of changes inside a model on the log-probability of a target. Each change is made separately.

    Attributes:
      nodes: the changed part of the model, for each row.
      pieces: the piece of text of each column. If each row is a single change, the arrays have no columns, and this
        list is [].
      log_probs: the log-probability of the target after each change.
      clean: the log-probability of the target for the clean sentence.
      corrupt: the log-probability of the target for the corrupt sentence, without a change.
    """
    nodes: list[Node]
    pieces: list[str]
    log_probs: Float[np.ndarray, 'node *position']
    clean: float
    corrupt: float

    @property
    def effects(self) -> Float[np.ndarray, 'node *position']:
        """The effect of each change: 0 is no effect, 1 restores the log-probability for the clean sentence.

        Raises:
          UserError: if the target has the same log-probability for both sentences.
        """
        if self.clean == self.corrupt:
            raise UserError(f'the target has the same log-probability for both sentences, {self.clean:.6g}, so the '
                            'effects of patches are not defined. Use two sentences with different log-probabilities')
        return (self.log_probs - self.corrupt) / (self.clean - self.corrupt)


@functools.lru_cache(maxsize=PROGRAMS)
def compiled(function: Callable[..., Any], module: Any, *static: Any) -> Callable[..., Any]:
    """Binds `module` and `static` to the first parameters of `function`, and returns jax.jit of the result.

    All arguments must be hashable. Calls with equal arguments return the same function. So a program is compiled once
    for each shape of its inputs.
    """
    return jax.jit(functools.partial(function, module, *static))


def teacher_forced(module: Any, params: Any, inputs: Mapping[str, Array], edit: ChangeOf | None = None,
                   read: Callable[[str], bool] | None = None) -> tuple[Any, dict[str, Array]]:
    """Runs a forward pass with edits. Returns the outputs, in the form that `from_logits` takes, and
    {place: captured value}.

    `edit` maps the name of a place to an edit or None. `read` selects the places whose values are captured. See
    model/places.py.
    """
    # `read` is always a function, because then no block is rematerialised (model.places.reading). So an edit inside a
    # block may store a value for an edit outside, as in the logit lens. A rematerialised block would leak the value.
    apply = observing(module.apply, edit or (lambda name: None), read or (lambda name: False))
    return apply({'params': params}, **inputs, method='projection' if hasattr(module, 'projection') else None)


def from_logits(function: Callable[..., Any], outputs: Any, targets: Int[Array, 'rows length']) -> Any:
    """Returns function(logits, targets), computed for at most TOKENS positions at a time.

    With a large vocabulary, the logits of all positions need too much memory.

    Args:
      function: a function of the logits and targets of some rows. Row i of its results depends only on row i of its
        arguments.
      outputs: a Projection [rows, length]; for an ensemble, which has no Projection, the logits.
      targets: the target tokens.
    """
    if not isinstance(outputs, Projection):
        return function(outputs, targets)
    return jax.lax.map(lambda row: function(outputs.replace(states=row[0]).logits(), row[1]),
                       (outputs.states, targets), batch_size=most_rows(targets.shape[1]))


def at_targets(logits: Float[Array, '*rows length vocab'],
               targets: Int[Array, '*rows length']) -> Float[Array, '*rows length']:
    """Returns the log-probability of each target token."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def most_rows(length: int) -> int:
    """Returns the maximum number of rows of a pass over rows of `length` tokens, with padding."""
    return max(1, TOKENS // length)


def as_output(run: Run, example: Any) -> Output:
    """Returns a text as an output of the run.

    Args:
      run: a translator or a language model.
      example: an output. For a translator: a source, which is translated first, or a tuple (source, target). For a
        language model: a text, or a tuple (prompt, continuation). Tokens after the first window are left out, with a
        warning.

    Raises:
      UserError: if the run does not write text, `example` has another form, the continuation is empty, or the prompt
        is too long.
    """
    model = text_model(run)
    # A list is not a pair, because it may be a list of two sources.
    if not (isinstance(example, str | Output) or isinstance(example, tuple) and len(example) == 2):
        kinds = ('a source, a tuple (source, target)' if isinstance(model, Translator) else
                 'a text, a tuple (prompt, continuation)')
        raise UserError(f'example={example!r:.80}: must be {kinds} or an output of the model')
    if isinstance(model, Translator):
        if isinstance(example, Output):
            return example
        if isinstance(example, str):
            return model.translate([example], run.options)[0]
        source, target = checked_texts(example)
        return model.unscored(source, target, run.options)
    output = example if isinstance(example, Output) else _continued(
        model.tokenizers['target'], *checked_texts(('', example) if isinstance(example, str) else example))
    if len(output.source_tokens) >= model.context or not output.hypotheses[0].tokens:
        raise UserError(f'{output.text[:40]!r} after {output.source[:40]!r}: there is no token to predict. The '
                        'continuation must not be empty, and the prompt must have fewer than '
                        f'{model.context - 1} tokens')
    return model.in_one_window([output])[0]


def text_model(run: Run) -> Any:
    """Returns the model of a run. Raises UserError if the model does not write text."""
    if not isinstance(run.model, Translator | Generator):
        raise UserError(f'{run.workdir}: task={run.config.task} has no texts. Use a translator or a language model')
    return run.model


def translation_model(run: Run, analysis: str) -> Translator:
    """Returns the model of a run.

    Raises:
      UserError: if the model does not translate. `analysis` names the analysis in the message.
    """
    if not isinstance(run.model, Translator):
        raise UserError(f'{run.workdir}: the {analysis} needs translations, but the task is {run.config.task}. Use a '
                        'run of task=translation')
    return run.model


def _continued(tokenizer: Tokenizer, prompt: str, text: str) -> Output:
    """Returns a prompt and its continuation as an output of a language model."""
    before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    # A token may contain the end of the prompt and the beginning of the text. Such a token belongs to the continuation.
    shared = next((number for number, (old, new) in enumerate(zip(before, whole, strict=False)) if old != new),
                  min(len(before), len(whole)))
    return Output(prompt, [BOS, *whole[:shared]], [Hypothesis(text, whole[shared:], 0.0, 0.0, ended=False)])


def text_of(run: Run, example: Any) -> Text:
    """Returns a text as arguments of the model of the run; `as_output` explains `example`."""
    output, model = as_output(run, example), run.model
    assert isinstance(model, TextModel), 'as_output has checked the model'
    inputs, written = model.read_and_written(output)
    return Text(model, inputs, written, 0 if 'source' in inputs else max(0, len(output.source_tokens) - 1))


def check_comparable(clean: Text, corrupt: Text, sentences: Sequence[str]) -> None:
    """Raises UserError if two texts that are compared token by token differ in their lengths or in their targets."""
    both = f'{sentences[0][:40]!r} and {sentences[1][:40]!r}'
    targets = clean.written[clean.first:], corrupt.written[corrupt.first:]
    lengths = [(len(tokens), len(corrupt.inputs[name])) for name, tokens in clean.inputs.items()]
    common = min(map(len, targets))
    if targets[0][:common] == targets[1][:common]:  # a language model truncates text and target to one window
        lengths.append((clean.first + 1, corrupt.first + 1))  # the tokens of the prompts
    for count, other in lengths:
        if count != other:
            raise UserError(f'{both}: the sentences have {count} and {other} tokens. Use sentences with the same '
                            'number of tokens')
    if targets[0] != targets[1]:
        raise UserError(f'{both}: the target has different tokens for the two sentences, because it begins inside a '
                        'token of the sentence. Begin the target with a space')
