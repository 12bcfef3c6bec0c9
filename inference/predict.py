"""Prediction of classes or values for images or series."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Float, Num, Shaped
from ml_collections import ConfigDict

from configs.options import SEARCH_NUMBERS
from inference.options import SearchOptions
from inference.predictions import Prediction, Predictions, value_cells
from inference.scores import Evaluation, classification_scores, regression_scores
from inference.text import attention_weights, not_finite
from input_pipeline.data import ExampleData
from input_pipeline.input_format import InputFormat
from model import Params
from model.losses import Sums
from runtime.errors import UserError

Table = list[tuple[str, ...]]


class Predictor:
    """A model of images or series, with its parameters.

    Attributes:
      module: the module, [batch, *space, channels] -> [batch, outputs].
      params: the parameters of the module.
      form: the format of the inputs, and the names of the outputs.
      classes: the names of the classes; None if the model predicts values.
      preprocessing: converts raw inputs to inputs of the module, and outputs of the module to raw values.
      shape: the shape of one input, [*space, channels].
      name: the name of the run, for messages.
    """

    name = 'this model'

    def __init__(self, module: nn.Module, params: Params, form: InputFormat):
        self.module, self.params, self.form = module, params, form
        self.classes, self.preprocessing, self.shape = form.classes, form.preprocessing, form.shape
        self._apply = jax.jit(lambda params, arguments: module.apply({'params': params}, **arguments))
        self._attention = jax.jit(
            lambda params, arguments: module.apply({'params': params}, **arguments, mutable=['attention'])[1])

    def example_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the module for one example. All numbers are 0."""
        return {'inputs': jnp.zeros((1, *self.shape))}

    def arguments(self, raw: Num[np.ndarray, 'examples *space channels']) -> dict[str, np.ndarray]:
        """Returns the arguments of the module, {name: array}. `raw` is a result of `InputFormat.prepare`."""
        return self.form.arguments(raw)

    def seen(self, prediction: Prediction) -> Num[np.ndarray, '*space channels']:
        """Returns the raw values that the model has read. Their patches are the tokens of the attention weights."""
        return prediction.example

    def predict(self, inputs: Shaped[np.ndarray, '...'] | Sequence, batch_size: int | np.integer = 64) -> Predictions:
        """Returns the predictions for raw inputs, with the names of classes or values.

        Args:
          inputs: raw inputs [n, *shape], finite numbers.
          batch_size: the maximum number of examples at a time.

        Raises:
          UserError: if the inputs have another shape or type, are not finite, or are too far from the training inputs.
            Also if `batch_size` is not allowed, or if images have another encoding than the training images and cannot
            be converted exactly (`InputFormat.prepare`).
        """
        return self.predict_raw(self.form.prepare(inputs, 'inputs'), batch_size)

    def predict_raw(self, inputs: Num[np.ndarray, 'examples *space channels'], batch_size: int | np.integer = 64,
                    names: Sequence[str] = ()) -> Predictions:
        """Returns the predictions for raw inputs from `InputFormat.prepare`, or from the data during the training.

        `names` are the names of the inputs.

        Raises:
          UserError: if `batch_size` is not allowed, or the outputs are NaN or infinite.
        """
        bounds = SEARCH_NUMBERS['batch_size']
        if not isinstance(batch_size, (int, np.integer)) or bounds.problem(int(batch_size)):
            raise UserError(f'batch_size={batch_size!r} must be a whole number from {bounds}')
        # The number of rows is the size of a full batch or a power of two, so that few shapes are compiled.
        count = max(1, len(inputs))  # without inputs, one batch of padding
        rows, outputs = min(batch_size, 1 << (count - 1).bit_length()), []
        for begin in range(0, count, rows):
            part = inputs[begin:begin + rows]
            padded = {name: np.pad(array, [(0, rows - len(part)), *[(0, 0)] * (array.ndim - 1)],
                                   constant_values=name == 'visible')  # a mean over no steps would be NaN
                      for name, array in self.arguments(part).items()}
            outputs.append(process_allgather(self._apply(self.params, padded), tiled=True)[:len(part)])
        outputs = np.concatenate(outputs)
        outputs = self.preprocessing.values(outputs) if self.classes is None else np.asarray(
            jax.nn.log_softmax(outputs))
        if not np.isfinite(outputs).all():
            raise not_finite('the inputs have no predictions', self.name, self.params)
        return Predictions(inputs, outputs, self.form, names)

    def attention(self, example: Prediction | Shaped[np.ndarray, '*space channels'] | Sequence
                  ) -> dict[str, Float[np.ndarray, 'layer head t s']]:
        """Returns {'encoder': attention weights between the patches of one raw input}.

        If the model has a class token, this token comes before the patches.

        Raises:
          UserError: if `example` is a raw input that `predict` would not accept.
        """
        inputs = example.example[None] if isinstance(example, Prediction) else self.form.prepare([example])
        weights = attention_weights(self._attention(self.params, self.arguments(inputs)))
        return {kind: array[:, 0] for kind, array in weights.items()}

    def validate(self, data: ExampleData, sums: Sums, config: ConfigDict) -> Evaluation:
        """Returns the prediction for the first example and its attention weights. The metrics are already in `sums`."""
        [answer] = self.predict_raw(data.arrays.inputs('validation')[:1], batch_size=1)
        return Evaluation({}, answer=answer, weights=self.attention(answer))

    def score(self, data: ExampleData, split: str, config: ConfigDict,
              options: SearchOptions) -> tuple[dict[str, Any], Table]:
        """Returns the scores of a split, and a table with the prediction for each example."""
        targets, predictions = data.arrays.targets(split), self.predict_raw(
            data.arrays.prepared(split, self.form), options.batch_size, data.arrays.names(split))
        outputs = predictions.outputs
        if self.classes is None:
            targets = targets.reshape(outputs.shape)
            header = tuple(f'{kind}_{name}' for kind in ('target', 'value') for name in self.form.targets)
            rows = [(*value_cells(target), *prediction.cells, prediction.name)
                    for target, prediction in zip(targets, predictions, strict=True)]
            return regression_scores(outputs, targets, self.form.targets), [(*header, 'name'), *rows]
        rows = [(self.named_target(target), *prediction.cells, prediction.name)
                for target, prediction in zip(targets, predictions, strict=True)]
        return classification_scores(outputs, targets, self.classes), [
            ('target', 'class', 'probability', 'name'), *rows]

    def named_target(self, target: Num[np.ndarray, '*values'] | np.integer) -> str:
        """Returns a target of the data as text: the name of the class, or the values."""
        if self.classes is None:
            return ' '.join(value_cells(np.ravel(target)))
        return self.classes[int(target)]
