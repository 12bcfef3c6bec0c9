"""Datasets of TensorFlow Datasets, read as array records without TensorFlow."""

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from input_pipeline.splits import naming_option
from runtime.errors import UserError, first_line
from runtime.files import sha256


class Dataset:
    """The splits of a TFDS dataset.

    The preparation of a dataset needs TensorFlow, because TFDS unpacks archives with TensorFlow. Reading a prepared
    dataset does not need TensorFlow.

    Attributes:
      info: TFDS's description of the dataset.
    """

    def __init__(self, name: str, folder: str, names: Mapping[str, str], features: Collection[str], asked: str):
        """Opens a dataset.

        Args:
          name: the name of the dataset, such as wmt14_translate/de-en or wmt14_translate/de-en:1.0.0.
          folder: TFDS's data_dir; '' for its default.
          names: {split: name of the split in TFDS}.
          features: the features that the dataset must have.
          asked: the options that set the features, for error messages.

        Raises:
          UserError: if the dataset does not exist, lacks a feature, or cannot be prepared.
        """
        self._names, self._features, self._builder = names, features, _open(name, folder, features, asked)
        self.info = self._builder.info

    def records(self, split: str) -> Iterator[dict[str, Any]]:
        """Yields the records of a split in order.

        Raises:
          UserError: if the records cannot be read.
        """
        with self._reading(split):
            yield from self._builder.as_data_source(self._names[split])

    def texts(self, split: str) -> Iterator[list[str]]:
        """Yields a list for each record, in order: the text of each feature.

        Raises:
          UserError: if the records cannot be read, or a feature is not text.
        """
        with self._reading(split):
            for record in self._builder.as_data_source(self._names[split]):
                yield [_text(record[feature]) for feature in self._features]

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Returns the name of a split, and the name and the digest of each file of the split, as JSON."""
        with self._reading(split):
            files = [Path(part.filename) for part in self.info.splits[self._names[split]].file_instructions]
            return {'split': self._names[split], 'files': [[file.name, sha256(file)] for file in files]}

    def _reading(self, split: str) -> contextlib.AbstractContextManager:
        return _errors(f'config.data.{naming_option(split)}={self._names[split]!r} cannot be read from '
                       f'{self._builder.data_dir}')


def _open(name: str, folder: str, features: Collection[str], asked: str) -> Any:
    """Returns the TFDS builder of a dataset. Prepares the dataset if necessary. `Dataset` has the same arguments."""
    if re.match(r'[\w-]+:[a-zA-Z]', name):  # a namespace; a version begins with a digit or *
        raise UserError(f'config.data.name={name!r}: TFDS would download the code of this dataset and run it. Prepare '
                        'the dataset yourself, and use its name without the part before the colon')
    import tensorflow_datasets as tfds  # slow to import, so only where it is used
    from tensorflow_datasets.core.constants import DATA_DIR
    folder = os.path.expanduser(folder) or DATA_DIR  # not a Path, because gs://BUCKET is allowed
    with _errors(f'config.data.name={name!r} cannot be opened in {folder}'):
        builder: Any = tfds.builder(name, data_dir=folder, file_format='array_record')
        present = set(builder.info.features)
    if not set(features) <= present:
        raise UserError(f'config.data.name={name}: the dataset has the features {", ".join(sorted(present))}, but it '
                        f'must have {" and ".join(features)} (see {asked})')
    if not builder.is_prepared():
        if not importlib.util.find_spec('tensorflow'):
            raise UserError(
                f'{name} is not in {folder}. TFDS needs TensorFlow to prepare it, but TensorFlow is not installed. '
                'Prepare the dataset once, on any machine: pip install tensorflow; '
                f'tfds build {name} --file_format=array_record --data_dir={folder}. '
                'Training does not need TensorFlow')
        # TFDS prints its progress to stdout, but stdout is for results.
        with _errors(f'{name} cannot be prepared'), contextlib.redirect_stdout(sys.stderr):
            builder.download_and_prepare()
    return builder


def _text(value: Any) -> str:
    """Returns the text of a feature. The value is bytes in TFDS, and str in the mocks of TFDS."""
    if not isinstance(value, bytes | str):
        raise ValueError(f'a record has {type(value).__name__} instead of text')
    return value.decode() if isinstance(value, bytes) else value


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """Converts errors of TFDS and its libraries into a UserError. The message begins with `what`."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # The remaining lines of the message may be a list of all datasets.
        raise UserError(f'{what}: {first_line(error)}') from error
