"""Predictions of classes or values, with names, probabilities and formats for output."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from jaxtyping import Float, Num

from input_pipeline.input_format import InputFormat
from runtime.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The prediction for one image or series. `Predictor.attention` and `answer_figure` accept it.

    Attributes:
      example: the raw input.
      output: log-probabilities of the classes, or values in the units of the targets.
      form: the input format of the run. It contains the names of classes and values.
      name: the name of the file or of the series, or ''.
    """
    example: Num[np.ndarray, '*space channels']
    output: Float[np.ndarray, ' outputs']
    form: InputFormat
    name: str = ''

    def __repr__(self) -> str:
        return f'<{" ".join(filter(None, [self.name, *self.cells]))}>'

    @property
    def label(self) -> str:
        """The name of the most probable class."""
        return self.best(1)[0][0]

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return self.best(1)[0][1]

    @property
    def values(self) -> dict[str, float]:
        """The predicted values by name.

        Raises:
          UserError: if the model predicts a class.
        """
        if self.form.classes is not None:
            raise UserError('this model predicts classes, not values. Use .label, .probability or .best')
        return dict(zip(self.form.targets, self.output.tolist(), strict=True))

    def best(self, count: int) -> list[tuple[str, float]]:
        """Returns the `count` most probable classes with their probabilities, best first.

        Raises:
          UserError: if the model predicts values.
        """
        classes = _classes(self.form)
        order = np.argsort(-self.output, kind='stable')[:count]
        return [(classes[index], float(np.exp(self.output[index]))) for index in order]

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of this prediction in a table: the class and its probability, or the predicted values."""
        if self.form.classes is None:
            return value_cells(self.output)
        return self.label, f'{self.probability:.4f}'

    def as_json(self, n_best: int) -> dict[str, Any]:
        """Returns the prediction as the JSON object that --format=jsonl writes, with the `n_best` best classes."""
        if self.form.classes is None:
            return {'name': self.name, 'values': self.values}
        return {'name': self.name, 'class': self.label, 'probability': self.probability,
                'n_best': [{'class': label, 'probability': probability} for label, probability in self.best(n_best)]}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Predictions(Sequence[Prediction]):
    """The predictions for several images or series, in the order of the inputs.

    Attributes:
      inputs: the raw inputs, in the encoding of the training inputs.
      outputs: log-probabilities of the classes, or values in the units of the targets.
      form: the input format of the run. It contains the names of classes and values.
      names: the names of the files or series; '' for inputs without names.
    """
    inputs: Num[np.ndarray, 'examples *space channels']
    outputs: Float[np.ndarray, 'examples outputs']
    form: InputFormat
    names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.outputs)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...

    @overload
    def __getitem__(self, index: slice) -> 'Predictions': ...

    def __getitem__(self, index: int | slice) -> 'Prediction | Predictions':
        if isinstance(index, slice):
            return Predictions(self.inputs[index], self.outputs[index], self.form, self.names[index])
        name = self.names[index] if self.names else ''
        return Prediction(self.inputs[index], self.outputs[index], self.form, name)

    def __repr__(self) -> str:
        shown = [' '.join(prediction.cells) for prediction in self[:4]]
        return f'<{len(self)} predictions: {", ".join([*shown, *["..."] * (len(self) > 4)])}>'

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the columns of `probabilities`.

        Raises:
          UserError: if the model predicts values. This also applies to `labels` and `probabilities`.
        """
        return _classes(self.form)

    @property
    def labels(self) -> list[str]:
        """The most probable class of each input."""
        return [self.classes[index] for index in self.outputs.argmax(axis=-1)]

    @functools.cached_property
    def probabilities(self) -> Float[np.ndarray, 'examples classes']:
        """The probability of each class for each input."""
        _classes(self.form)
        return np.exp(self.outputs)

    @property
    def values(self) -> Float[np.ndarray, 'examples values']:
        """The predicted values, in the units of the targets.

        Raises:
          UserError: if the model predicts classes.
        """
        if self.form.classes is not None:
            raise UserError('this run predicts classes, not values. Use .labels or .probabilities')
        return self.outputs


def value_cells(values: Num[np.ndarray, ' values']) -> tuple[str, ...]:
    """Returns the cells of values in a table. Fewer digits would round values such as times in seconds since 1970."""
    return tuple(f'{value:.10g}' for value in values)


def _classes(form: InputFormat) -> tuple[str, ...]:
    if form.classes is None:
        raise UserError('this run predicts values, not classes. Use .values')
    return form.classes
