"""Opens the data of a config: sentence pairs, documents or examples. Provides batches, tokenizers and data sizes."""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from ml_collections import ConfigDict
from typing_extensions import override

from configs.tasks import TASKS
from input_pipeline.array_batches import ArrayPlan
from input_pipeline.arrays import ArrayData, open_arrays
from input_pipeline.batches import Batch, BatchPlan, Plan
from input_pipeline.bpe_dropout import BpeDropout
from input_pipeline.documents import LibraryDocuments, open_documents
from input_pipeline.forecasting import SeriesWindows, open_series
from input_pipeline.input_format import InputFormat
from input_pipeline.kept_data import KEPT, SIZES, contradiction, load_sizes, load_tokenizers, save_kept_data
from input_pipeline.links import Links
from input_pipeline.preprocessing import Preprocessing
from input_pipeline.resegmented import ResegmentedPlan
from input_pipeline.sources import BuiltinCorpus, LinkedCorpus, Pair, no_text, open_corpus
from input_pipeline.splits import Parts
from input_pipeline.token_links import TokenLinks, rows_of_store
from input_pipeline.token_store import TokenStore, document_tokenizers, open_document_store, open_store, tokenizers_for
from input_pipeline.tokenizer import Tokenizer, VocabularyTooLarge
from input_pipeline.windows import WindowPlan
from runtime.cache import cache_folder
from runtime.errors import UserError
from runtime.files import RESTORE

VOCAB_SIZE = 'data.tokenizer.vocab_size'

log = logging.getLogger('allyouneed.data')


@runtime_checkable
class Data(Protocol):
    """The interface of the data of a task."""
    needed: ClassVar[frozenset[str]]  # the names of the required entries of `sizes`
    sizes: dict[str, Any]  # the sizes that a model needs, as JSON
    tokenizers: dict[str, Tokenizer]  # {side: tokenizer}; the sides are 'source' and 'target', or 'text'

    def plan(self, split: str) -> Plan:
        """Returns the batches of a split. 'train' is shuffled with config.seed; other splits keep their order."""
        ...

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Returns a description of the split's content, as JSON.

        If the split has files, 'files' is a list of [name, digest].
        """
        ...

    def held_out(self, split: str) -> bool:
        """Returns whether a split is a held-out part of the training data, so that it may change with this data."""
        ...

    def show(self, batch: Batch) -> Iterator[str]:
        """Yields a batch as text, one line for each row."""
        ...

    def keep(self, folder: Path) -> None:
        """Writes the files that decoding needs, so that the run directory is self-contained."""
        ...


def open_data(config: ConfigDict, run: Path | None = None, *, asked: Collection[str] = ()) -> Data:
    """Opens the data of `config`.

    Args:
      config: the config. `learned_tokenizers` may lower the option config.data.tokenizer.vocab_size in `config`.
      run: a run directory with tokenizers or preprocessing. If it is None, the tokenizers or the preprocessing are
        made from the training split.
      asked: the options that the user set. Their values are not changed.

    Raises:
      UserError: if the data or the run's tokenizers are missing or damaged.
    """
    if run:
        read_sizes(run, config.task)
    return DATA[TASKS[config.task].data](config, run / KEPT if run else None, asked)


def learned_tokenizers(learn: Callable[..., dict[str, Tokenizer]], text: Any, config: ConfigDict,
                       asked: Collection[str]) -> dict[str, Tokenizer]:
    """Learns the tokenizers of a training text by calling learn(text, config.data.tokenizer, cache folder).

    If the text is too small for config.data.tokenizer.vocab_size, sets this option to the largest possible value.

    Raises:
      UserError: if the text is too small and the option is in `asked`, or the tokenizers cannot be learned.
    """
    settings, cache = config.data.tokenizer, cache_folder(config.cache_dir)
    try:
        return learn(text, settings, cache)
    except VocabularyTooLarge as error:
        if VOCAB_SIZE in asked:
            raise
        log.info('config.%s=%d instead of %d, because the text does not allow a larger vocabulary', VOCAB_SIZE,
                 error.most, settings.vocab_size)
        settings.vocab_size = error.most
    return learn(text, settings, cache)


def read_sizes(run: Path, task: str) -> dict[str, Any]:
    """Reads sizes.json of a run: the vocabulary sizes or the shapes of the data, from which the model is built.

    Raises:
      UserError: if sizes.json is missing, is damaged or does not fit the task.
    """
    sizes, data = load_sizes(run / KEPT), DATA[TASKS[task].data]
    if missing := data.needed - sizes.keys():
        raise UserError(f'{run / KEPT / SIZES} has no entry {min(missing)}. {RESTORE}')
    if issubclass(data, ExampleData) and (wrong := contradiction(sizes, data.labelled, task)):
        raise UserError(f'{run / KEPT / SIZES}: {wrong}. {RESTORE}')
    return sizes


class SourceData(Data):
    """The methods that the data of all tasks share. `_source` is the corpus, the documents or the arrays."""

    _source: Any

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        return self._source.fingerprint(split)

    @override
    def held_out(self, split: str) -> bool:
        if isinstance(self._source, BuiltinCorpus | LibraryDocuments):
            return split != 'train'
        return split in getattr(self._source, 'parts', Parts()).names  # only sources of files have `parts`

    @override
    def keep(self, folder: Path) -> None:
        """Writes the tokenizers, if any, and sizes.json to `folder`. Decoding needs these files."""
        save_kept_data(folder, self.tokenizers, self.sizes)


class PairData(SourceData):
    """The data of translation: sentence pairs."""

    needed: ClassVar[frozenset[str]] = frozenset({'source_vocab_size', 'target_vocab_size'})

    def __init__(self, config: ConfigDict, kept: Path | None, asked: Collection[str]):
        self._config, self._source, self._cache = config, open_corpus(config.data), cache_folder(config.cache_dir)
        self.tokenizers = load_tokenizers(kept) if kept else learned_tokenizers(
            tokenizers_for, self._source, config, asked)
        self.sizes = {f'{side}_vocab_size': len(tokenizer) for side, tokenizer in self.tokenizers.items()
                      } | _absent(self.tokenizers['target'])
        self._pairs: dict[str, list[Pair]] = {}  # {split: pairs}, without 'train', which may be large

    def pairs(self, split: str) -> list[Pair]:
        """Returns the sentence pairs of a split as text.

        Raises:
          UserError: if the split has no text.
        """
        if split in self._pairs:
            return self._pairs[split]
        pairs = list(self._source.pairs(split))
        if not any(source.strip() and target.strip() for source, target in pairs):
            raise no_text(split, self._source)
        if split != 'train':  # every evaluation needs the pairs; to find held-out pairs, all training files are read
            self._pairs[split] = pairs
        return pairs

    @override
    def plan(self, split: str) -> BatchPlan | ResegmentedPlan:
        """Returns batches of pairs of similar length. With BPE-dropout, 'train' is segmented again in every epoch."""
        config, model = self._config, self._config.model
        store = open_store(self._source, split, self.tokenizers, config.data.max_length, self._cache)
        shapes = {'tokens': config.batch.tokens, 'num_buckets': config.batch.buckets,
                  'links': self._token_links(store) if split == 'train' and config.train.guided_alignment else None}
        if split == 'train' and (rate := config.data.tokenizer.dropout):
            dropouts = {side: BpeDropout(tokenizer, rate) for side, tokenizer in self.tokenizers.items()}
            return ResegmentedPlan(store, dropouts, seed=config.seed, longest=config.data.max_length, **shapes)
        limit = model.max_length if model.position == 'learned' else None
        if config.train.teacher:  # the teacher supports sentences of data.max_length, but not always more padding
            limit = config.data.max_length
        return BatchPlan(store, seed=_seed(config, split), longest=limit, **shapes)

    def has_links(self, split: str) -> bool:
        """Returns whether a split has gold links, which are known word alignments."""
        return isinstance(self._source, LinkedCorpus) and self._source.has_links(split)

    def links(self, split: str) -> list[Links]:
        """Returns the gold links of each pair of a split.

        Raises:
          UserError: if the corpus has no gold links, or their file is wrong.
        """
        if not isinstance(self._source, LinkedCorpus):
            raise UserError(f'config.data.source={self._config.data.source} has no gold alignments. Use builtin or '
                            'files')
        return self._source.links(split)

    def _token_links(self, store: TokenStore) -> TokenLinks:
        pairs, links = self.pairs('train'), self.links('train')
        rows = rows_of_store(pairs, store, self.tokenizers, self._config.data.max_length)
        return TokenLinks([pairs[row] for row in rows], [links[row] for row in rows], self.tokenizers)

    @override
    def fingerprint(self, split: str) -> dict[str, Any]:
        """Returns the fingerprint of a split of the corpus. With guided alignment, it also covers the gold links."""
        guided = split == 'train' and self._config.train.guided_alignment
        return super().fingerprint(split) | (
            {'links': hashlib.sha256(repr(self.links(split)).encode()).hexdigest()} if guided else {})

    @override
    def show(self, batch: Batch) -> Iterator[str]:
        """Yields a line for each row: the pieces of the source, a tab, and the pieces of the target."""
        for source, target in zip(batch['inputs']['source'], batch['targets'], strict=True):
            yield '\t'.join(_pieces(self.tokenizers[side], tokens)
                            for side, tokens in (('source', source), ('target', target)))


class DocumentData(SourceData):
    """The data of language models: documents."""

    needed: ClassVar[frozenset[str]] = frozenset({'vocab_size'})

    def __init__(self, config: ConfigDict, kept: Path | None, asked: Collection[str]):
        self._config, self._source, self._cache = config, open_documents(config.data), cache_folder(config.cache_dir)
        self.tokenizers = load_tokenizers(kept) if kept else learned_tokenizers(
            document_tokenizers, self._source, config, asked)
        self.sizes = {'vocab_size': len(self.tokenizers['text'])} | _absent(self.tokenizers['text'])
        self._stores: dict[str, TokenStore] = {}

    def store(self, split: str) -> TokenStore:
        """Returns the token store of a split. Builds the store first if it is not cached."""
        if split not in self._stores:  # every evaluation needs the store; to open it, all files of the split are read
            self._stores[split] = open_document_store(self._source, split, self.tokenizers, self._cache)
        return self._stores[split]

    def documents(self, split: str) -> Iterator[str]:
        """Yields the documents of a split as text, without empty documents."""
        return (text for text in self._source.documents(split) if text.strip())

    def characters(self, split: str) -> int:
        """Returns the number of characters in the documents of a split."""
        return self.store(split).stats['characters']

    @override
    def plan(self, split: str, rows: int | None = None) -> WindowPlan:
        """Returns the batches of a split. A row is a window of config.data.context tokens.

        A batch has config.batch.rows rows, but at most `rows`.
        """
        batch = self._config.batch
        return WindowPlan(self.store(split), rows=min(batch.rows, rows or batch.rows),
                          context=self._config.data.context, packing=self._config.data.packing,
                          seed=_seed(self._config, split))

    @override
    def show(self, batch: Batch) -> Iterator[str]:
        """Yields a line for each row: the pieces of the window."""
        for tokens in batch['inputs']['tokens']:
            yield _pieces(self.tokenizers['text'], tokens)


class ExampleData(SourceData):
    """Images or time series. The targets are classes if `labelled` is True, and values otherwise."""

    needed: ClassVar[frozenset[str]] = frozenset({'outputs', 'shape', 'classes', 'preprocessing'})
    labelled: ClassVar[bool]

    def __init__(self, config: ConfigDict, kept: Path | None, asked: Collection[str]):
        self._config, self.arrays = config, self._open(config)
        self._source = self.arrays
        if kept:
            sizes = load_sizes(kept)
            if {name: sizes[name] for name in self.arrays.sizes} != self.arrays.sizes:
                raise UserError(f'config.data has {_described(self.arrays.sizes)}, but the run in {kept.parent} was '
                                f'trained on {_described(sizes)}. Use the data of that run, or a new run directory')
            if changed := _changed_name(InputFormat.of(sizes), self.arrays.form):
                raise UserError(f'config.data: {changed} in the run in {kept.parent}. Use the data of that run, or a '
                                'new run directory')
            kept_sizes = {name: sizes[name] for name in self.arrays.described if name in sizes}
        else:
            kept_sizes = self.arrays.described
        self.sizes: dict[str, Any] = self.arrays.sizes | kept_sizes
        self._preprocessing = Preprocessing(**self.sizes['preprocessing'])
        self.tokenizers = {}

    def _open(self, config: ConfigDict) -> ArrayData:
        return open_arrays(config.data, self.labelled, config.model.patches.patch)

    @override
    def plan(self, split: str) -> ArrayPlan:
        """Returns batches of examples. Examples of 'train' are augmented according to `config.data`."""
        data = self._config.data
        training = {'crop': data.crop, 'flip': data.flip, 'mixup': data.mixup} if split == 'train' else {}
        return ArrayPlan(self.arrays, split, rows=self._config.batch.rows, seed=_seed(self._config, split),
                         preprocessing=self._preprocessing, **training)

    @override
    def show(self, batch: Batch) -> Iterator[str]:
        """Yields a line for each row: the target, and the mean and the standard deviation of the inputs."""
        for inputs, target, weight in zip(batch['inputs']['inputs'], batch['targets'], batch['weights'], strict=True):
            if np.any(weight):
                shape = ' x '.join(map(str, inputs.shape))
                values = ' '.join(map(str, np.ravel(target)))
                yield f'{values}\t{shape}, mean {inputs.mean():.3f}, standard deviation {inputs.std():.3f}'


class LabelledData(ExampleData):
    """The data of classification: images or series with classes as targets."""

    labelled = True


class MeasuredData(ExampleData):
    """The data of regression: images or series with values as targets."""

    labelled = False


class SeriesData(MeasuredData):
    """The data of forecasting: windows of series, whose targets are the next steps."""

    arrays: SeriesWindows

    @override
    def _open(self, config: ConfigDict) -> SeriesWindows:
        return open_series(config.data, config.eval.metric)

    @override
    def plan(self, split: str) -> ArrayPlan:
        """Returns batches of windows. The inputs also contain the targets, for teacher forcing."""
        return ArrayPlan(self.arrays, split, rows=self._config.batch.rows, seed=_seed(self._config, split),
                         preprocessing=self._preprocessing, following=True)

    @override
    def held_out(self, split: str) -> bool:
        """Returns True for validation and test: all splits are steps of the same series."""
        return split != 'train'


# The name of a task's data (configs/tasks.py) -> the class of the data.
DATA: Mapping[str, type[PairData | DocumentData | LabelledData | MeasuredData]] = {
    'pairs': PairData, 'documents': DocumentData, 'classes': LabelledData, 'values': MeasuredData,
    'series': SeriesData}


def _absent(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns {'absent': the special tokens that are missing in a vocabulary}, or {} if no token is missing."""
    return {'absent': list(tokenizer.absent)} if tokenizer.absent else {}


def _described(sizes: Mapping[str, Any]) -> str:
    """Returns a description of the images or series in words. `sizes` is the content of sizes.json."""
    return f'examples of {" x ".join(map(str, sizes["shape"]))} with {sizes["outputs"]} classes or values'


def _changed_name(before: InputFormat, now: InputFormat) -> str | None:
    """Returns the first class, channel or target whose name differs between a run and the data, for a message.

    A name is compared only if both the run and the data have one. Arrays and runs of earlier versions have no names of
    channels.
    """
    for kind, old_names, new_names in (('class', before.classes or (), now.classes or ()),
                                       ('channel', before.channels, now.channels),
                                       ('target', before.target_names, now.target_names)):
        for index, (old, new) in enumerate(zip(old_names, new_names, strict=False)):
            if old != new:
                return f'{kind} {index} is {new!r}, but it is {old!r}'
    return None


def _seed(config: ConfigDict, split: str) -> int | None:
    return config.seed if split == 'train' else None


def _pieces(tokenizer: Tokenizer, tokens) -> str:
    """Returns the pieces of tokens in one line. Control characters, such as tabs and line separators, are escaped."""
    pieces = tokenizer.pieces(token for token in tokens if token > 2)
    return ' '.join(piece if piece.isprintable() else repr(piece)[1:-1] for piece in pieces)
