"""From `config` to what is trained on: each kind of data, its batches, and what a run must keep of it."""

import dataclasses
import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from ml_collections import ConfigDict

from configs.tasks import TASKS
from errors import UserError
from files import read_json, write_text
from input_pipeline.arrays import LARGEST_SCALE, SMALLEST_STD, ArrayPlan, Preprocessing, open_arrays
from input_pipeline.batches import Batch, BatchPlan, Plan
from input_pipeline.documents import open_documents
from input_pipeline.sources import Pair, open_corpus
from input_pipeline.token_store import (
    TokenStore,
    cache_folder,
    document_tokenizers,
    open_document_store,
    open_store,
    tokenizers_for,
)
from input_pipeline.tokenizer import Tokenizer, load_tokenizer
from input_pipeline.windows import WindowPlan

KEPT = 'data'  # the folder of a run directory for what decoding needs to know of the data
SIZES = 'sizes.json'
AS_WRITTEN = 'Give a run directory as training wrote it'


@runtime_checkable
class Data(Protocol):
    """What a task is trained on."""
    needed: ClassVar[frozenset[str]]  # names of `sizes`
    sizes: dict[str, Any]  # what a model must know of the data, as JSON
    tokenizers: dict[str, Tokenizer]  # by the side of the text that they are for

    def plan(self, split: str) -> Plan:
        """Batches of 'train', shuffled by config.seed; of 'validation' or 'test', each example once, in order."""
        ...

    def fingerprint(self, split: str) -> dict[str, Any]:
        """What the split's content depends on, as JSON; 'files' are [name, digest] where it comes from files."""
        ...

    def show(self, batch: Batch) -> Iterator[str]:
        """A batch as text, a line for each row."""
        ...

    def keep(self, folder: Path) -> None:
        """Writes what decoding needs, so that a run directory needs nothing else."""
        ...


def open_data(config: ConfigDict, run: Path | None = None) -> Data:
    """The data of `config`. With the directory of a run, its tokenizers instead of newly learned ones.

    Raises:
      UserError: if they are not there, or damaged.
    """
    if run:
        read_sizes(run, config.task)
    return DATA[TASKS[config.task].data](config, run / KEPT if run else None)


def read_sizes(run: Path, task: str) -> dict[str, Any]:
    """What the model of a run must know of its data.

    Raises:
      UserError: if that is not there, or damaged.
    """
    sizes, data = _read_sizes(run / KEPT), DATA[TASKS[task].data]
    if missing := data.needed - sizes.keys():
        raise UserError(f'{run / KEPT / SIZES} has no {min(missing)}. {AS_WRITTEN}')
    if issubclass(data, ExampleData) and (wrong := _contradiction(sizes, data.labelled, task)):
        raise UserError(f'{run / KEPT / SIZES}: {wrong}. {AS_WRITTEN}')
    return sizes


class PairData:
    """Sentence pairs: translation."""

    needed: ClassVar[frozenset[str]] = frozenset({'source_vocab_size', 'target_vocab_size'})

    def __init__(self, config: ConfigDict, kept: Path | None):
        self._config, self._corpus, self._cache = config, open_corpus(config.data), cache_folder(config.cache_dir)
        self.tokenizers = load_tokenizers(kept) if kept else tokenizers_for(
            self._corpus, config.data.tokenizer, self._cache)
        self.sizes = {f'{side}_vocab_size': len(tokenizer) for side, tokenizer in self.tokenizers.items()}

    def pairs(self, split: str) -> list[Pair]:
        """The sentences of a split as they are written.

        Raises:
          UserError: if there are none.
        """
        pairs = list(self._corpus.pairs(split))
        if not any(source.strip() and target.strip() for source, target in pairs):
            raise UserError(f'the {split} split has no text. Looked at: {self._corpus.fingerprint(split)}')
        return pairs

    def plan(self, split: str) -> BatchPlan:
        """Batches of pairs of like lengths."""
        store = open_store(self._corpus, split, self.tokenizers, self._config.data.max_length, self._cache)
        model = self._config.model
        return BatchPlan(store, tokens=self._config.batch.tokens, num_buckets=self._config.batch.buckets,
                         seed=_seed(self._config, split),
                         longest=model.max_length if model.position == 'learned' else None)

    def fingerprint(self, split: str) -> dict[str, Any]:
        """What the split's content depends on, of the corpus."""
        return self._corpus.fingerprint(split)

    def show(self, batch: Batch) -> Iterator[str]:
        """Source TAB target, as their pieces."""
        for source, target in zip(batch['inputs']['source'], batch['targets'], strict=True):
            yield '\t'.join(_pieces(self.tokenizers[side], tokens)
                            for side, tokens in (('source', source), ('target', target)))

    def keep(self, folder: Path) -> None:
        """Writes the tokenizers and the sizes."""
        save_tokenizers(folder, self.tokenizers)
        _keep_sizes(folder, self.sizes)


class DocumentData:
    """Documents: language models."""

    needed: ClassVar[frozenset[str]] = frozenset({'vocab_size'})

    def __init__(self, config: ConfigDict, kept: Path | None):
        self._config, self._documents, self._cache = config, open_documents(config.data), cache_folder(config.cache_dir)
        self.tokenizers = load_tokenizers(kept) if kept else document_tokenizers(
            self._documents, config.data.tokenizer, self._cache)
        self.sizes = {'vocab_size': len(self.tokenizers['text'])}

    def store(self, split: str) -> TokenStore:
        """The split's tokens."""
        return open_document_store(self._documents, split, self.tokenizers, self._cache)

    def characters(self, split: str) -> int:
        """Characters of the split's documents."""
        return self.store(split).stats['characters']

    def plan(self, split: str) -> WindowPlan:
        """Batches of windows of `config.data.context` tokens."""
        return WindowPlan(self.store(split), rows=self._config.batch.rows, context=self._config.data.context,
                          packing=self._config.data.packing, seed=_seed(self._config, split))

    def fingerprint(self, split: str) -> dict[str, Any]:
        """What the split's content depends on, of the documents."""
        return self._documents.fingerprint(split)

    def show(self, batch: Batch) -> Iterator[str]:
        """A row's pieces."""
        for tokens in batch['inputs']['tokens']:
            yield _pieces(self.tokenizers['text'], tokens)

    def keep(self, folder: Path) -> None:
        """Writes the tokenizers and the sizes."""
        save_tokenizers(folder, self.tokenizers)
        _keep_sizes(folder, self.sizes)


class ExampleData:
    """Images and time series, to be sorted into classes (`labelled`) or measured."""

    needed: ClassVar[frozenset[str]] = frozenset({'outputs', 'shape', 'classes', 'preprocessing'})
    labelled: ClassVar[bool]

    def __init__(self, config: ConfigDict, kept: Path | None):
        self._config, self.arrays = config, open_arrays(config.data, self.labelled)
        self.sizes = self.arrays.sizes | {'classes': self.arrays.classes,
                                          'preprocessing': dataclasses.asdict(self.arrays.preprocessing)}
        self.tokenizers = {}

    def plan(self, split: str) -> ArrayPlan:
        """Batches of examples, those of 'train' shifted and mirrored as `config.data` asks."""
        data = self._config.data
        training = {'crop': data.crop, 'flip': data.flip} if split == 'train' else {}
        return ArrayPlan(self.arrays, split, rows=self._config.batch.rows, seed=_seed(self._config, split), **training)

    def fingerprint(self, split: str) -> dict[str, Any]:
        """What the split's content depends on, of the arrays."""
        return self.arrays.fingerprint(split)

    def show(self, batch: Batch) -> Iterator[str]:
        """The target of a row, and the mean and the spread of its inputs."""
        for inputs, target, weight in zip(batch['inputs']['inputs'], batch['targets'], batch['weights'], strict=True):
            if weight:
                shape = ' x '.join(map(str, inputs.shape))
                yield f'{target}\t{shape}, mean {inputs.mean():.3f}, standard deviation {inputs.std():.3f}'

    def keep(self, folder: Path) -> None:
        """Writes the sizes."""
        _keep_sizes(folder, self.sizes)


class LabelledData(ExampleData):
    """Examples with a class each."""

    labelled = True


class MeasuredData(ExampleData):
    """Examples with values."""

    labelled = False


# The name of a task's data (configs/tasks.py) -> its class.
DATA: Mapping[str, type[PairData | DocumentData | LabelledData | MeasuredData]] = {
    'pairs': PairData, 'documents': DocumentData, 'classes': LabelledData, 'values': MeasuredData}


def load_tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """The tokenizers of a run by their sides: 'source' and 'target', or 'text'.

    Raises:
      UserError: if one is not there, is damaged, or has another size than its model was made for.
    """
    sizes = {key.removesuffix('vocab_size').rstrip('_') or 'text': size for key, size in _read_sizes(folder).items()
             if key.endswith('vocab_size')}
    tokenizers = {side: load_tokenizer(folder / f'{side}.model') for side in sizes}
    for side, tokenizer in tokenizers.items():
        if len(tokenizer) != sizes[side]:
            raise UserError(f'{folder / side}.model has {len(tokenizer)} tokens, but {folder / SIZES} says '
                            f'{sizes[side]}: they are not of the same run')
    return tokenizers


def save_tokenizers(folder: Path, tokenizers: dict[str, Tokenizer]) -> None:
    """Writes what `load_tokenizers` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for side, tokenizer in tokenizers.items():
        tokenizer.save(folder / f'{side}.model')


def _keep_sizes(folder: Path, sizes: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / SIZES, json.dumps(sizes, indent=2) + '\n')


def _read_sizes(folder: Path) -> dict[str, Any]:
    path = folder / SIZES
    sizes = read_json(path, AS_WRITTEN)
    for name, value in sizes.items():
        if not _is_size(name, value):
            raise UserError(f'{path} is damaged: {name}={str(value)[:200]} is impossible. {AS_WRITTEN}')
    return sizes


def _is_size(name: str, value: Any) -> bool:
    """Whether sizes.json may hold this."""
    def count(number) -> bool:
        return type(number) is int and 1 <= number < 2 ** 31

    def numbers(values) -> bool:
        return isinstance(values, list) and bool(values) and all(
            type(each) in (int, float) and abs(each) <= LARGEST_SCALE for each in values)

    if name.endswith('vocab_size') or name == 'outputs':
        return count(value)
    if name == 'shape':
        return isinstance(value, list) and len(value) in (2, 3) and all(map(count, value))
    if name == 'classes':
        return value is None or isinstance(value, list) and all(map(_is_name, value)) and len(set(value)) == len(value)
    if name == 'preprocessing':
        parts = {field.name for field in dataclasses.fields(Preprocessing)}
        return isinstance(value, dict) and value.keys() == parts and all(
            numbers(each) and (part.endswith('mean') or min(each) >= SMALLEST_STD)
            or each is None and part.startswith('target') for part, each in value.items())
    return True  # of a later version


def _is_name(value: Any) -> bool:
    """Whether it is text for a cell of a table: no control characters, line ends or halves of a character."""
    return isinstance(value, str) and not any(unicodedata.category(each) in ('Cc', 'Cs', 'Zl', 'Zp') for each in value)


def _contradiction(sizes: dict[str, Any], labelled: bool, task: str) -> str | None:
    """What does not belong together in the sizes of images or series."""
    classes, outputs, channels = sizes['classes'], sizes['outputs'], sizes['shape'][-1]
    if (classes is None) == labelled:
        return f'classes={str(classes)[:200]}, but config.json says task={task}'
    if classes is not None and len(classes) != outputs:
        return f'{len(classes)} classes, but outputs={outputs}'
    for part, numbers in sizes['preprocessing'].items():
        wanted = channels if part.startswith('input') else outputs if classes is None else None
        if (numbers and len(numbers)) != wanted:
            return f'preprocessing: {part}={str(numbers)[:200]}, but {wanted or "no"} numbers are wanted'
    return None


def _seed(config: ConfigDict, split: str) -> int | None:
    return config.seed if split == 'train' else None


def _pieces(tokenizer: Tokenizer, tokens) -> str:
    return ' '.join(tokenizer.pieces(token for token in tokens if token > 2))
