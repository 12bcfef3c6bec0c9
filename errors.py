"""What a user did wrong, said so that they can mend it; and the way that every script starts.

Scripts exit with 0 when they did what was asked and with 2, after one message on stderr, when they were
asked for something that cannot be done. Any other exception is our own fault and keeps its traceback.
"""

import errno
import logging
import os
import re
import sys
from collections.abc import Callable

from absl import app, flags
from absl import logging as absl_logging


class UserError(Exception):
    """Something in the input: the message says what is wrong, where, and what to do."""


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


def run_script(main: Callable[[], None]) -> None:
    """Parses absl flags and calls `main`; a UserError becomes a message and exit status 2.

    What the project logs (the logger 'allyouneed') goes to stderr; stdout carries results only.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter('%(message)s'))
    log = logging.getLogger('allyouneed')
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # not once more through absl's handler, which libraries log to

    def parse(argv):
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:  # a flag that does not exist, or a value of another type
            _fail(str(error).removeprefix('flag '))
        except (AttributeError, KeyError) as error:
            _fail(_unknown_key(error))
        except BrokenPipeError:
            raise
        except OSError as error:  # ml_collections: 'Failed loading config file ...' and below it the reason
            _fail(f'--config cannot be read: {str(error).splitlines()[-1].strip()}')
        if len(rest) > 1:
            _fail(f'unexpected argument {rest[1]!r}: every option is a flag, --name=value')
        return rest

    def guarded(_):
        if not flags.FLAGS['verbosity'].present:
            absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax tells much
        try:
            main()
        except UserError as error:
            _fail(str(error))
        except Exception as error:
            if not (reason := full_disk(error)):
                raise
            _fail(f'{getattr(error, "filename", None) or "a file"} cannot be written: {reason}. Free space where the '
                  'output and config.cache_dir lie, then run the same command again')

    try:
        app.run(guarded, flags_parser=parse)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _fail(message: str):
    print(f'error: {message}', file=sys.stderr)
    sys.exit(2)


def _unknown_key(error: Exception) -> str:
    """How ml_collections reports --config.X=... for a key X that the config does not have, made readable."""
    while isinstance(error.args[0], Exception):  # AttributeError(KeyError("'num_lyers'\nDid you mean ..."))
        error = error.args[0]
    message = re.fullmatch(r'(\'.*\')(?:\nDid you mean ("\w+").*)?', error.args[0])
    if not message:
        return f'--config or an override of it is wrong: {error.args[0]}'
    key, near = message.groups()
    return f'the config has no key {key}' + (f': did you mean {near}?' if near else '; configs/base.py has them all')


def use_huge_pages() -> None:
    """Starts the script anew with glibc's malloc asking for huge pages, unless the user set tunables.

    XLA on CPU allocates its buffers at every step, and Linux hands them out as zeroed 4 KB pages: without
    this, touching fresh memory takes about a quarter of a training step (benchmarks/train_step.py).
    glibc reads the setting only when a process starts, so call this before the heavy imports.
    """
    if sys.platform == 'linux' and 'GLIBC_TUNABLES' not in os.environ:
        tunables = {'hugetlb': 1, 'mmap_max': 0, 'trim_threshold': 20_000_000_000, 'top_pad': 268_435_456}
        os.environ['GLIBC_TUNABLES'] = ':'.join(f'glibc.malloc.{name}={value}' for name, value in tunables.items())
        os.execv(sys.executable, sys.orig_argv)
