"""The fingerprints of the data on which a run was trained, and the comparison of other data with them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from input_pipeline.data import Data
from input_pipeline.kept_data import KEPT
from runtime.errors import UserError, first_names
from runtime.files import RESTORE, read_json

FINGERPRINTS = 'fingerprints.json'  # {split: fingerprint of its data}
TRAINING_SPLITS = ('train', 'validation')  # the splits that training reads
MOST_NAMES = 12  # maximum number of files in a message


def has_fingerprints(workdir: Path) -> bool:
    """Returns whether a folder has the fingerprints of the data on which its model was trained.

    The folder of an imported model has none before the model is trained further.
    """
    path = workdir / KEPT / FINGERPRINTS
    return path.is_file() and read_json(path, RESTORE).keys() >= {*TRAINING_SPLITS}


def changed_data(workdir: Path, data: Data, splits: Iterable[str]) -> list[str]:
    """Returns one message for each split with changed data, such as 'train: train.en, train.de' (the changed files).

    The messages also name files that are no longer read: they are missing, or they are hidden files, which earlier
    versions read. The data of a file or a folder is unchanged if only its name has changed. Gold links are compared
    only if `data` reads them, for guided alignment.
    """
    path = workdir / KEPT / FINGERPRINTS
    saved = read_json(path, RESTORE)
    changed = []
    for split in splits:
        if not isinstance(saved.get(split, {}), dict):
            raise UserError(f'{path} is damaged: {split} is not a JSON object. {RESTORE}')
        current = json.loads(json.dumps(data.fingerprint(split)))  # tuples become lists, as in the file
        if 'links' not in current:
            saved.get(split, {}).pop('links', None)
        if split in saved and _without_names(current) != _without_names(saved[split]):
            before, now = _files(saved[split]), _files(current)
            digests, kept = [digest for _, digest in before], [value for file in now for value in file]
            names = [name for name, digest in now if digest not in digests]
            names += [f'{name} (no longer read)' for name, digest in before if name not in kept and digest not in kept]
            changed.append(f'{split}: {first_names(names, MOST_NAMES) or "its text"}')
    return changed


def is_unchanged(workdir: Path, data: Data, split: str) -> bool:
    """Returns whether a run has the fingerprint of a split, and the data of the split is unchanged."""
    return split in read_json(workdir / KEPT / FINGERPRINTS, RESTORE) and not changed_data(workdir, data, [split])


def _without_names(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fingerprint of a split with the digests of its files, in order, but without their names.

    A held-out validation split consists of the examples with the smallest hashes. So it does not change if a test split
    is also held out, and the entry `cut_off` (the held-out splits) is replaced by None. An exception is a split that
    consists of the last characters of a single document.
    """
    digests = [digest for _, digest in _files(fingerprint)]
    single = fingerprint.get('documents') == 'file' and len(digests) == 1
    independent = {'cut_off': None} if fingerprint.get('part') == 'validation' and not single else {}
    return {**fingerprint, 'file': None, 'files': digests, **independent}


def _files(fingerprint: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the name and the digest of each file in the fingerprint of a split."""
    files = fingerprint.get('files', [fingerprint.get('file')])
    return [(str(file[0]), file[1]) for file in files if isinstance(file, list) and len(file) == 2
            ] if isinstance(files, list) else []
