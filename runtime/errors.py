"""Errors that the user can correct, and their messages."""

import contextlib
import difflib
import errno
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

FULL_DISK = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
# The beginning of XLA's message if a device has too little memory, for a program or for NCCL.
LITTLE_MEMORY = re.compile('RESOURCE_EXHAUSTED|[A-Z_]+: NCCL .*out of memory', re.DOTALL)


class UserError(Exception):
    """An error in the user's input. The message states where the error is, what is wrong and how to fix it."""


class AgreedError(UserError):
    """A UserError that all processes of a job raise at the same point of the program."""


def messages_of(check: Callable[[], object]) -> list[str]:
    """Calls `check`. Returns a list with the message of the UserError that `check` raised, or an empty list."""
    try:
        check()
    except UserError as error:
        return [str(error)]
    return []


@contextlib.contextmanager
def prefixed(where: str) -> Iterator[None]:
    """Runs the body. If the body raises a UserError, adds 'WHERE: ' to the beginning of its message."""
    try:
        yield
    except UserError as error:
        raise UserError(f'{where}: {error}') from None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, truncated to 300 characters.

    If the error has no message, returns the name of its type.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def full_disk(error: BaseException | None) -> str | None:
    """Returns the operating system's message if the cause of `error` is a full disk, a quota or a file size limit.

    Returns None for other errors. Libraries wrap the system's error in their own errors. TensorStore keeps only the
    text of the system's error, so this function also searches the texts of all errors in the chain.
    """
    while error is not None:
        for number in FULL_DISK:
            if getattr(error, 'errno', None) == number or os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def full_disk_explained(explain: Callable[[BaseException, str], str]) -> Iterator[None]:
    """Runs the body. If the body fails because a disk is full, raises a UserError instead of the original error.

    `explain` makes the message of the UserError from the original error and the operating system's message.
    """
    try:
        yield
    except UserError:
        raise  # even if a full disk caused the error, because the message of the UserError is more specific
    except Exception as error:
        if not (reason := full_disk(error)):
            raise
        raise UserError(explain(error, reason)) from error


@contextlib.contextmanager
def little_memory_explained() -> Iterator[None]:
    """Runs the body. If the body fails because the host or a device has too little memory, raises a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:  # JAX raises RuntimeError, and for NCCL also ValueError
        # TensorStore also begins its message with RESOURCE_EXHAUSTED if too many files are open.
        if not isinstance(error, MemoryError) and (
                not LITTLE_MEMORY.match(str(error)) or 'os_error_code' in str(error) or full_disk(error)):
            raise
        advice = ('NCCL needs memory that JAX does not reserve. End other programs on this GPU, or set '
                  'XLA_CLIENT_MEM_FRACTION to less than 0.75') if 'NCCL' in str(error) else (
                  'Reduce the size of the batch (batch.tokens, batch.rows, --batch_size), the model (model.d_model, '
                  'model.num_layers) or the search (--beam, --extra_length)')
        raise UserError(f'not enough memory ({first_line(error)}). {advice}') from error


@contextlib.contextmanager
def faults_in(path: str, *, only: bool = False) -> Iterator[None]:
    """Runs the body, which executes the user's Python file at `path`. Turns exceptions of the file into a UserError.

    The message has the form 'PATH:LINE: NameError: ...'. If `only` is True, only exceptions that were raised in the
    file become a UserError. Other exceptions are raised unchanged.
    """
    try:
        yield
    except KeyboardInterrupt:  # Ctrl-C, not an error of the file
        raise
    except BaseException as error:
        place, cause = _place_in(path, error)
        if only and not place:
            raise
        raise UserError(f'{place or path}: {_words(cause)}') from error


def _words(error: BaseException) -> str:
    """Returns the type and the message of an exception of the user's code, even if its method __str__ fails."""
    try:
        return str(error) if isinstance(error, UserError) else f'{type(error).__name__}: {getattr(error, "msg", error)}'
    except BaseException:
        return f'{type(error).__name__}, which has no readable message'


def _place_in(path: str, error: BaseException) -> tuple[str, BaseException]:
    """Finds the line of the file at `path` that raised `error` or a cause of `error`.

    Returns 'PATH:LINE' and the exception that this line raised. If no line of the file raised one of these exceptions,
    returns '' and `error`.
    """
    def is_path(name: str | None) -> bool:
        return name is not None and os.path.abspath(name) == os.path.abspath(path)

    cause = error
    while cause is not None:
        # A SyntaxError has no filename if the file is not text.
        if isinstance(cause, SyntaxError) and (cause.filename is None or is_path(cause.filename)):
            return f'{path}:{cause.lineno}' if cause.lineno else path, cause
        lines = [line for frame, line in traceback.walk_tb(cause.__traceback__) if is_path(frame.f_code.co_filename)]
        if lines:
            return f'{path}:{lines[-1]}', cause
        cause = cause.__cause__ or cause.__context__
    return '', error


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns ': did you mean X?', where X is the choice most similar to `word`, or '' if no choice is similar."""
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f': did you mean {near[0]}?' if near else ''


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns the last sentence of an error message, with up to 3 names that are similar to `name`.

    If no name is similar, the sentence lists the first 8 names.
    """
    close = difflib.get_close_matches(name, names, 3, 0.4)
    return f'Did you mean {", ".join(close)}?' if close else f'Use one of {", ".join(list(names)[:8])}'


def first_names(names: Sequence[str], most: int) -> str:
    """Returns the first `most` names, and the number of the remaining names, such as 'a, b and 3 more'."""
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(names[:most]) + more


def option_like(option: str, options: Iterable[str]) -> str:
    """Returns ': did you mean X?' for a misspelled option such as 'modle.num_layers', or '' if no option is similar.

    Compares the last part of the option's name first (num_layers), and then the section (modle).
    """
    names = {}
    for candidate in options:
        names.setdefault(candidate.rpartition('.')[2], []).append(candidate)
    near = difflib.get_close_matches(option.rpartition('.')[2], names, n=1)
    if not near:
        return did_you_mean(option, options)
    best = max(names[near[0]], key=lambda candidate: difflib.SequenceMatcher(None, option, candidate).ratio())
    return f': did you mean {best}?'
