"""The names and files of the splits of a data set. Splits without files are made from a part of the training data."""

import abc
import bisect
import dataclasses
import hashlib
import os
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from runtime.errors import UserError, did_you_mean
from runtime.files import named_files
from runtime.once import log_once, warn_once

SPLITS = ('train', 'validation', 'test')
LIKE_VALIDATION = ('val', 'valid', 'dev', 'eval')  # names in the layouts of other libraries


def sets_to_test(data: ConfigDict) -> list[str]:
    """Returns the names of the test sets: ['test'], or several names in config.data.splits.test."""
    names = data['splits']['test'].split(',')
    return names if len(names) > 1 else ['test']


def split_names(data: ConfigDict) -> dict[str, str]:
    """Returns {split: file name of the split}.

    If there are several test sets, each test set is a split, and the file name is the name of the split.
    """
    names, sets = dict(data['splits']), sets_to_test(data)
    return names | dict(zip(sets, sets, strict=True)) if len(sets) > 1 else names


def naming_option(split: str) -> str:
    """Returns the option of config.data that sets the file name of a split."""
    return f'splits.{split if split in ("train", "validation") else "test"}'


def asked_splits(split: str, data: ConfigDict, option: str = '--split') -> list[str]:
    """Returns the splits that the flag --split=`split` selects. 'test' selects all test sets.

    Raises:
      UserError: if there is no such split. The message begins with `option`.
    """
    sets = sets_to_test(data)
    if split == 'test':
        return sets
    known = dict.fromkeys((*SPLITS, *sets))
    if split not in known:
        raise UserError(f'{option}={split} must be one of {", ".join(known)}{did_you_mean(split, list(known))}')
    return [split]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The splits without files. Each of them is a part of the training data, and this part is not used for training."""
    names: tuple[str, ...] = ()  # the held-out splits: 'validation', 'test', or both
    share: float = 0.0  # the share of the training data that each held-out split gets
    last: bool = False  # whether the last examples are held out; otherwise a hash of the examples decides

    def is_part(self, split: str) -> bool:
        """Returns whether a split has no files of its own and is made from a part of the training files."""
        return bool(self.names) and split in ('train', *self.names)

    def origin(self, split: str) -> str:
        """Returns the split whose files contain `split`: 'train' if `split` is held out, otherwise `split`."""
        return 'train' if self.is_part(split) else split

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Returns the part of a fingerprint that describes how the split is held out, as JSON."""
        if not self.is_part(split):
            return {}
        return {'part': split, 'cut_off': list(self.names), 'validation_share': self.share}

    def rows(self, count: int, split: str, where: str) -> slice:
        """Returns the rows of a split. The last rows of the training data are held out for one other split.

        Raises:
          UserError: if a split would be empty. `where` is the name of the training data in the message.
        """
        first = count - round(count * self.share)
        if not 0 < first < count:
            raise UserError(f'config.data.validation_share={self.share}: {where} has only {count} examples, so '
                            'a split would be empty. Change the share, or add examples')
        return slice(first) if split == 'train' else slice(first, None)

    def characters(self, text: str, split: str, where: str) -> str:
        """Returns the part of a single training text that belongs to a split. The last characters are held out.

        Raises:
          UserError: if the text is empty, or nothing would remain for training. `where` is the name of the text in
            the message.
        """
        if not text.strip():
            raise UserError(f'{where} is empty, or has only white space. Use a file with text')
        count, together = len(self.names), ' and '.join(self.names)
        ends = [int(len(text) * (1 - self.share * (count - number))) for number in range(count + 1)]
        if ends[0] <= 0:
            raise UserError(f'config.data.validation_share={self.share}: too large, because nothing of {where} would '
                            f'remain for training after {together} are held out. Use a smaller share or a longer text')
        number = ('train', *self.names).index(split)
        begin, end = [0, *ends][number], ends[number]
        log_once(f'{split}: characters {begin:,} to {end:,} of {where}, because there are no files for {together} '
                 f'(config.data.validation_share={self.share})')
        return text[begin:end]


def without_files(names: Mapping[str, str], has_files: Callable[[str], bool], share: float) -> Parts:
    """Returns the splits to hold out from the training data: 'validation' and 'test', if they have no files.

    Nothing is held out if `share` is 0, or if there are validation files. In the second case, the author of the data
    has chosen the splits. A split whose name was set (config.data.splits) is never held out, because its files are
    expected to exist.
    """
    if not share or has_files('validation') or names['validation'] != 'validation':
        return Parts()
    has_test = names['test'] != 'test' or has_files('test')
    return Parts(('validation',) if has_test else ('validation', 'test'), share)


def warn_of_unread(folder: Path, names: Mapping[str, str], parts: Parts, endings: Iterable[str]) -> None:
    """Logs a warning if validation data is held out, although there is a file or folder of a similar name, like val.

    Args:
      folder: config.data.dir.
      names: {split: name of the split on disk}.
      parts: the splits without files.
      endings: the possible ends of the names of the files; '' for a folder.
    """
    others = {name: folder / f'{name}{ending}' for ending in endings for name in LIKE_VALIDATION
              if name not in names.values() and os.path.exists(folder / f'{name}{ending}')}
    if 'validation' in parts.names and others:
        name, path = next(iter(others.items()))
        warn_once(f'{path} would not be read, because validation data is held out from the training data. If it is '
                  f'the validation data, set --config.data.splits.validation={name}')


def check_only_form(path: Path, other: Path | None) -> None:
    """Checks that a split has no second form, because the files of this form would not be read.

    Args:
      path: the file or folder that the split is read from.
      other: a file or folder of the second form, or None.

    Raises:
      UserError: if there is a second form.
    """
    if other:
        raise UserError(f'{other} would not be read, because the data is read from {path}. Convert, rename or remove '
                        'one of the two')


class SplitFiles(abc.ABC):
    """The text files of the splits in a folder. Files may be compressed (.gz).

    The name of a split may be a pattern, such as 'train-*', or several names or patterns separated by commas. Then the
    split is the concatenation of all these files. The files of a pattern are sorted by name.

    Attributes:
      parts: the splits that are held out from the training files.
    """

    def __init__(self, folder: Path, names: Mapping[str, str], validation_share: float, endings: Sequence[str]):
        """Finds the splits without files.

        Args:
          folder: config.data.dir.
          names: {split: name of the split on disk}.
          validation_share: config.data.validation_share.
          endings: the possible ends of the names of files, such as '.txt', without '.gz'.

        Raises:
          UserError: if the folder does not exist, or a split is a broken symbolic link.
        """
        if not os.path.isdir(folder):
            raise UserError(f'config.data.dir={str(folder)!r} is not a folder. Set it to the folder of the text files')
        self._folder, self._names, self._endings = folder, names, endings
        self._endings_of_files = [ending + gz for ending in endings for gz in ('', '.gz')]
        self.parts = without_files(names, self.has_files, validation_share)
        warn_of_unread(folder, names, self.parts, self._endings_of_files)

    @abc.abstractmethod
    def has_files(self, split: str) -> bool:
        """Returns whether the split has at least one file. If other files are missing, `files` raises an error.

        Raises:
          UserError: if a file is a broken symbolic link.
        """

    @abc.abstractmethod
    def _files_of(self, base: Path, split: str) -> list[Path]:
        """Returns the files with the path `base`, which has no ending.

        Raises:
          UserError: if a file is missing or is a broken symbolic link, or there are files in two forms.
        """

    def files(self, split: str) -> list[Path]:
        """Returns the files that a split is read from.

        Raises:
          UserError: if a file is missing or is a broken symbolic link, or there are files in two forms.
        """
        split = self.parts.origin(split)
        return [file for base in self._bases(split) for file in self._files_of(base, split)]

    def _bases(self, split: str) -> list[Path]:
        """Returns the paths of a split without their endings."""
        return named_files(self._folder, self._names[split], self._endings_of_files)


class HeldOut:
    """Divides the training data among the splits.

    The hash of an example decides its split. So the splits depend on the content of the examples, but not on the order
    of the examples and not on the machine. Equal examples are in the same split. The examples with the smallest hashes
    are held out. Each held-out split gets the share `share` of all distinct examples, but at least one example.
    """

    def __init__(self, parts: Parts, keys: Iterable[int], what: str, kept: Collection[int] = ()):
        """Chooses the held-out examples.

        Args:
          parts: the held-out splits.
          keys: the `key` of each example.
          what: the name of the examples in messages: 'sentences of FILE'.
          kept: the keys of examples that are never held out.

        Raises:
          UserError: if there are no examples, or no examples would remain for training.
        """
        self._splits, self._kept = parts.names, frozenset(kept)
        different = np.unique(np.fromiter(keys, np.uint64))
        if not len(different):
            raise UserError(f'there are no {what}. Use files with more data')
        candidates = different[~np.isin(different, np.fromiter(self._kept, np.uint64))]
        count, together = max(1, round(parts.share * len(different))), ' and '.join(parts.names)
        most = min(len(different) - 1, len(candidates))
        if count * len(parts.names) > most:
            advice = 'Use a smaller share, add data,' if len(parts.names) <= most else 'Add data,'
            raise UserError(
                f'config.data.validation_share={parts.share}: too few of {len(different)} distinct {what} would remain '
                f'for training if {count} are held out for each of {together}. {advice} or provide files for '
                f'{together}')
        self._held_out = candidates[:count * len(parts.names)]
        self._last = self._held_out[count - 1::count].tolist()  # the largest key of each held-out split
        log_once(f'{together}: held out from the training data, because there are no files. {count} of '
                 f'{len(different)} distinct {what} are chosen by a hash for each split '
                 f'(config.data.validation_share={parts.share})')

    def split(self, key: int) -> str:
        """Returns the split of the example whose hash is `key`: a held-out split or 'train'."""
        return 'train' if key in self._kept else (*self._splits, 'train')[bisect.bisect_left(self._last, key)]

    def has(self, key: int) -> bool:
        """Returns whether an example with this key is held out."""
        place = np.searchsorted(self._held_out, np.uint64(key))
        return bool((self._held_out[place:place + 1] == np.uint64(key)).any())


def key(content: bytes) -> int:
    """Returns the 64-bit hash of the bytes of an example."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


def text_key(text: str) -> int:
    """Returns a hash of a text that does not depend on case and Unicode forms (NFC, NFD, full width).

    White space of any length and kind counts as one space, and white space at the ends does not count. So texts
    that differ only in these properties are in the same split.
    """
    return key(' '.join(unicodedata.normalize('NFKC', text).casefold().split()).encode(errors='surrogatepass'))
