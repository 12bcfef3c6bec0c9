"""Validation and test data cut off the training data, where they have no files of their own."""

import bisect
import functools
import hashlib
import logging
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from errors import UserError

log = logging.getLogger('allyouneed.data')


def without_files(names: Mapping[str, str], has_files: Callable[[str], bool], share: float) -> tuple[str, ...]:
    """The splits that are to be cut off the training data: those of 'validation' and 'test' that have no files.

    Nothing is cut off if there are validation files, since their maker has decided what is trained on, or if `share`
    is 0. A split with a name of its own (config.data.splits) is never cut off: its files are meant to be there.
    """
    if not share or has_files('validation'):
        return ()
    missing = [split for split in ('validation', 'test') if not has_files(split) and names[split] == split]
    return tuple(missing) if 'validation' in missing else ()


class HeldOut:
    """The part of the training data that each split has.

    The hash of an example decides. So the parts depend on what the examples are, not on their order or the machine,
    and equal examples are in one part. The examples with the least hashes are held out: of all different examples each
    split gets `share`, but at least one.
    """

    def __init__(self, splits: tuple[str, ...], share: float, keys: Iterable[int], what: str,
                 kept: Collection[int] = ()):
        """Decides for all examples of the training data.

        Args:
          splits: the splits that are cut off, of 'validation' and 'test'.
          share: of the examples, for each of these splits.
          keys: what `key` gives for each example.
          what: names the examples in messages: 'sentences of FILE'.
          kept: keys of examples that are for training, whatever their hash.

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
        self._last = candidates[count - 1:count * len(splits):count].tolist()  # key of each split
        say(f'{" and ".join(splits)}: cut off the training data, since there are no files: of {len(different)} '
            f'different {what}, {count} for each (the share config.data.validation_share={share}), chosen by a hash '
            'and not trained on')

    def split(self, key: int) -> str:
        """The split of the example with this key: one of `splits`, or 'train'."""
        return 'train' if key in self._kept else (*self.splits, 'train')[bisect.bisect_left(self._last, key)]


@functools.cache
def say(message: str) -> None:
    """Logs a message once in a process: data is opened twice, to be checked and to be used."""
    log.info('%s', message)


def key(content: bytes) -> int:
    """The hash of an example, 64 bits."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


def text_key(text: str) -> int:
    """The hash of a text, whatever its case, its spaces and its characters' forms (NFC, NFD, full width).

    So texts that differ in these alone are in one part.
    """
    return key(' '.join(unicodedata.normalize('NFKC', text).casefold().split()).encode(errors='surrogatepass'))
