"""What a user did wrong, said so that they can mend it."""

import contextlib
import difflib
import errno
import os
import traceback
from collections.abc import Callable, Iterable, Iterator


class UserError(Exception):
    """Something in the input: the message says what is wrong, where, and what to do."""


def told(check: Callable[[], object]) -> list[str]:
    """What `check` raises UserError with, if it does: for telling several mistakes at once."""
    try:
        check()
    except UserError as error:
        return [str(error)]
    return []


def full_disk(error: BaseException | None) -> str | None:
    """The system's words, if `error` or what led to it is that a disk, a quota or a file can take no more.

    Libraries wrap the system's error in one of their own (TensorStore in text alone), so its words are looked for too.
    """
    while error is not None:
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if getattr(error, 'errno', None) == number or os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def full_disk_explained(explain: Callable[[BaseException, str], str]) -> Iterator[None]:
    """Within this, a full disk is a UserError. `explain` makes its message from the error and the system's words."""
    try:
        yield
    except UserError:
        raise  # it may come of a full disk, and says so better than we could
    except Exception as error:
        if not (reason := full_disk(error)):
            raise
        raise UserError(explain(error, reason)) from error


@contextlib.contextmanager
def little_memory_explained() -> Iterator[None]:
    """Within this, that memory does not suffice, the machine's or a device's, is a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # the second is JAX's
        if isinstance(error, RuntimeError) and not str(error).startswith('RESOURCE_EXHAUSTED'):
            raise
        reason = str(error).partition('\n')[0] or 'no more can be had'
        raise UserError(f'there is not enough memory ({reason}). Lower the sizes: of the batch (batch.tokens, '
                        'batch.rows, --batch_size), of the model (model.d_model, model.num_layers) or of the search '
                        '(--beam, --extra_length)') from error


@contextlib.contextmanager
def faults_in(path: str, *, only: bool = False) -> Iterator[None]:
    """Within this, what the user's own Python file at `path` raises is a UserError: 'PATH:LINE: NameError: ...'.

    With `only`, what does not come from a line of that file is not touched.
    """
    try:
        yield
    except KeyboardInterrupt:  # the user's own, too, but from the keyboard
        raise
    except BaseException as error:
        place, cause = _place_in(path, error)
        if only and not place:
            raise
        raise UserError(f'{place or path}: {_words(cause)}') from error


def _words(error: BaseException) -> str:
    """What an exception of the user's says, whatever its class makes of that."""
    try:
        return str(error) if isinstance(error, UserError) else f'{type(error).__name__}: {getattr(error, "msg", error)}'
    except BaseException:
        return f'{type(error).__name__}, whose message cannot be had'


def _place_in(path: str, error: BaseException) -> tuple[str, BaseException]:
    """'PATH:LINE' that `error`, or what led to it, came from, and that exception; or '' and the error."""
    def is_it(name: str | None) -> bool:
        return name is not None and os.path.abspath(name) == os.path.abspath(path)

    each = error
    while each is not None:
        if isinstance(each, SyntaxError) and (each.filename is None or is_it(each.filename)):  # None: it is no text
            return f'{path}:{each.lineno}' if each.lineno else path, each
        lines = [line for frame, line in traceback.walk_tb(each.__traceback__) if is_it(frame.f_code.co_filename)]
        if lines:
            return f'{path}:{lines[-1]}', each
        each = each.__cause__ or each.__context__
    return '', error


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """': did you mean X?' for the choice that is written most alike, or '' if none is near."""
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f': did you mean {near[0]}?' if near else ''


def option_like(option: str, options: Iterable[str]) -> str:
    """The same for an option of the config, 'modle.num_layers': its last part tells more than its section."""
    ends = {}
    for each in options:
        ends.setdefault(each.rpartition('.')[2], []).append(each)
    near = difflib.get_close_matches(option.rpartition('.')[2], ends, n=1)
    if not near:
        return did_you_mean(option, options)
    return f': did you mean {max(ends[near[0]], key=lambda each: difflib.SequenceMatcher(None, option, each).ratio())}?'
