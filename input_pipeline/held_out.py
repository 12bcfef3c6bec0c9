"""Holds out validation and test data from the training data if they have no files of their own."""

import bisect
import functools
import hashlib
import logging
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from runtime.errors import UserError

log = logging.getLogger('allyouneed.data')


def without_files(names: Mapping[str, str], has_files: Callable[[str], bool], share: float) -> tuple[str, ...]:
    """Returns the splits to hold out from the training data: those of 'validation' and 'test' that have no files.

    Nothing is held out if there are validation files, because then the author of the data has made the split, or if
    `share` is 0. A split whose name was set (config.data.splits) is never held out: its files are expected to exist.
    """
    if not share or has_files('validation'):
        return ()
    missing = [split for split in ('validation', 'test') if names[split] == split and not has_files(split)]
    return tuple(missing) if 'validation' in missing else ()


class HeldOut:
    """Divides the training data among the splits.

    The hash of an example decides its split. So the splits depend on the content of the examples, not on their order or
    the machine, and equal examples are in the same split. The examples with the smallest hashes are held out. Each
    held-out split gets `share` of all different examples, but at least one.
    """

    def __init__(self, splits: tuple[str, ...], share: float, keys: Iterable[int], what: str,
                 kept: Collection[int] = ()):
        """Decides for all examples of the training data.

        Args:
          splits: the held-out splits, of 'validation' and 'test'.
          share: the share of the examples for each of these splits.
          keys: the `key` of each example.
          what: the name of the examples in messages: 'sentences of FILE'.
          kept: the keys of examples that stay in training, whatever their hash.

        Raises:
          UserError: if there are too few examples, or nothing would be left.
        """
        self.splits, self._kept = splits, frozenset(kept)
        different = np.unique(np.fromiter(keys, np.uint64))
        candidates = different[~np.isin(different, np.fromiter(self._kept, np.uint64))]
        count = max(1, round(share * len(different)))
        if count * len(splits) > min(len(different) - 1, len(candidates)):
            raise UserError(
                f'config.data.validation_share={share}: of {len(different)} different {what}, {count} for each of '
                f'{" and ".join(splits)} leave nothing to train on: lower it, add data, or give '
                f'{" and ".join(splits)} files of their own')
        self._held_out = candidates[:count * len(splits)]
        self._last = self._held_out[count - 1::count].tolist()  # key of each split
        say(f'{" and ".join(splits)}: cut off the training data, since there are no files: of {len(different)} '
            f'different {what}, {count} for each (the share config.data.validation_share={share}), chosen by a hash '
            'and not trained on')

    def split(self, key: int) -> str:
        """Returns the split of the example with this key: one of `splits`, or 'train'."""
        return 'train' if key in self._kept else (*self.splits, 'train')[bisect.bisect_left(self._last, key)]


    def has(self, key: int) -> bool:
        """Returns whether an example with this key is held out."""
        place = np.searchsorted(self._held_out, np.uint64(key))
        return bool((self._held_out[place:place + 1] == np.uint64(key)).any())


@functools.cache
def say(message: str) -> None:
    """Logs a message once per process: data is opened twice, for the checks and for use."""
    log.info('%s', message)


def key(content: bytes) -> int:
    """Returns the 64-bit hash of an example."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


def text_key(text: str) -> int:
    """Returns the hash of a text without regard to case, spaces and Unicode forms (NFC, NFD, full width).

    So texts that differ only in these are in the same split.
    """
    return key(' '.join(unicodedata.normalize('NFKC', text).casefold().split()).encode(errors='surrogatepass'))
