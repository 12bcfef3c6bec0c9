"""Messages that are logged only once, although the code that logs them runs several times."""

import functools
import logging

log = logging.getLogger('allyouneed')


@functools.cache
def log_once(message: str) -> None:
    """Logs a message once per process. For example, data is opened twice: for the checks and for training.

    `allyouneed.train` clears the cache, so that each training in a notebook logs the message.
    """
    log.info('%s', message)


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning once per process. See `log_once`."""
    log.warning('%s', message)
