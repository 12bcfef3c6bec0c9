"""Errors that the user can correct, and the messages that say how."""

import contextlib
import difflib
import errno
import os
import traceback
from collections.abc import Callable, Iterable, Iterator


class UserError(Exception):
    """An error in the user's input. The message says what is wrong, where, and what to do."""


def told(check: Callable[[], object]) -> list[str]:
    """Returns the message of the UserError that `check` raises, or nothing: to report several mistakes at once."""
    try:
        check()
    except UserError as error:
        return [str(error)]
    return []


def full_disk(error: BaseException | None) -> str | None:
    """Returns the system's message if a full disk, quota or file caused `error`, directly or indirectly; else None.

    Libraries wrap the system's error in their own (TensorStore only as text), so the message is searched too.
    """
    while error is not None:
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if getattr(error, 'errno', None) == number or os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def full_disk_explained(explain: Callable[[BaseException, str], str]) -> Iterator[None]:
    """Turns a full disk into a UserError. `explain` makes its message from the error and the system's message."""
    try:
        yield
    except UserError:
        raise  # a full disk may have caused it, and then its message is better than ours
    except Exception as error:
        if not (reason := full_disk(error)):
            raise
        raise UserError(explain(error, reason)) from error


@contextlib.contextmanager
def little_memory_explained() -> Iterator[None]:
    """Turns a lack of memory, on the host or on a device, into a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # JAX raises the second
        if isinstance(error, RuntimeError) and not str(error).startswith('RESOURCE_EXHAUSTED'):
            raise
        reason = str(error).partition('\n')[0] or 'no more can be had'
        raise UserError(f'there is not enough memory ({reason}). Lower the sizes: of the batch (batch.tokens, '
                        'batch.rows, --batch_size), of the model (model.d_model, model.num_layers) or of the search '
                        '(--beam, --extra_length)') from error


@contextlib.contextmanager
def faults_in(path: str, *, only: bool = False) -> Iterator[None]:
    """Turns exceptions of the user's Python file at `path` into a UserError: 'PATH:LINE: NameError: ...'.

    With `only`, exceptions that do not come from a line of that file pass unchanged.
    """
    try:
        yield
    except KeyboardInterrupt:  # from the keyboard, not from the file
        raise
    except BaseException as error:
        place, cause = _place_in(path, error)
        if only and not place:
            raise
        raise UserError(f'{place or path}: {_words(cause)}') from error


def _words(error: BaseException) -> str:
    """The message of an exception that the user's code raised; its class may fail to produce one."""
    try:
        return str(error) if isinstance(error, UserError) else f'{type(error).__name__}: {getattr(error, "msg", error)}'
    except BaseException:
        return f'{type(error).__name__}, whose message cannot be had'


def _place_in(path: str, error: BaseException) -> tuple[str, BaseException]:
    """Returns 'PATH:LINE' where `error` or one of its causes was raised, and that exception; or '' and the error."""
    def is_it(name: str | None) -> bool:
        return name is not None and os.path.abspath(name) == os.path.abspath(path)

    each = error
    while each is not None:
        if isinstance(each, SyntaxError) and (each.filename is None or is_it(each.filename)):  # None: not text
            return f'{path}:{each.lineno}' if each.lineno else path, each
        lines = [line for frame, line in traceback.walk_tb(each.__traceback__) if is_it(frame.f_code.co_filename)]
        if lines:
            return f'{path}:{lines[-1]}', each
        each = each.__cause__ or each.__context__
    return '', error


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns ': did you mean X?' with the choice most similar to `word`, or '' if none is similar."""
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f': did you mean {near[0]}?' if near else ''


def option_like(option: str, options: Iterable[str]) -> str:
    """Like `did_you_mean`, for an option such as 'modle.num_layers': compares the last part before the section."""
    ends = {}
    for each in options:
        ends.setdefault(each.rpartition('.')[2], []).append(each)
    near = difflib.get_close_matches(option.rpartition('.')[2], ends, n=1)
    if not near:
        return did_you_mean(option, options)
    return f': did you mean {max(ends[near[0]], key=lambda each: difflib.SequenceMatcher(None, option, each).ratio())}?'
