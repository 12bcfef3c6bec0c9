"""Detects damaged checkpoints: files that cannot be read, and arrays that differ from the arrays that were written."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from run_directory.checksums import checksums
from runtime.agreement import exchange
from runtime.errors import UserError, first_line
from runtime.processes import communication_error


class Damaged(Exception):
    """Raised if a checkpoint cannot be read, or if its values differ from the values that were written."""


def refuse_pipes(folder: Path) -> None:
    """Raises Damaged if a checkpoint's folder contains a pipe or a device, because reading a pipe might never end."""
    for path in [folder, *sorted(folder.rglob('*'))]:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise Damaged(f'{path.relative_to(folder)} is a pipe or a device, not a file')


@contextlib.contextmanager
def damage_agreed(folder: Path) -> Iterator[None]:
    """Runs the body, which reads a checkpoint. If the body fails in one process, raises an error in all processes.

    `folder` is the folder of the checkpoint.

    Raises:
      Damaged: if a process cannot read the files, or if their values differ from the values that were written.
      UserError: if the body raises a UserError in a process.
    """
    refused = damaged = cause = None
    try:
        yield
    except UserError as error:
        refused, cause = str(error), error
    except (jax.errors.JaxRuntimeError, MemoryError):  # not caused by the files
        raise
    except Exception as error:  # Orbax and TensorStore raise many types of exceptions
        if communication_error(error):
            raise
        damaged, cause = first_line(error), error
    for number, (refusal, damage) in enumerate(exchange(f'the check of {folder.name}', (refused, damaged))):
        where = f' for process {number}' if jax.process_count() > 1 else ''
        if refusal is not None:
            raise UserError(refusal) from cause
        if damage is not None:
            raise Damaged(f'{folder} is damaged{where}: {damage}') from cause


def read_progress(folder: Path) -> dict[str, Any]:
    """Reads the file `progress` of a checkpoint. It contains the checksums and the progress of the training loop."""
    refuse_pipes(folder)
    content = json.loads((folder / 'progress' / 'metadata').read_text('utf-8'))  # written by Orbax's JsonSave
    if content.pop('sha256') != digest(content):
        raise Damaged('progress/metadata does not match its checksum')
    return content


def compare_checksums(arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises Damaged if the checksums of the `arrays`, {path: array}, differ from the saved checksums `expected`."""
    actual = checksums(arrays)
    if changed := sorted(path for path in expected.keys() | actual.keys() if expected.get(path) != actual.get(path)):
        raise Damaged(f'{len(changed)} of {len(expected)} arrays do not match their checksums, such as {changed[0]}')


def digest(content: Any) -> str:
    """Returns the SHA-256 of a value that is valid JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
