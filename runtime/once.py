"""Logs a message only once per process."""

import functools
import logging

log = logging.getLogger('allyouneed')


@functools.cache
def log_once(message: str) -> None:
    """Logs a message only once per process. For example, data is opened twice: for the checks and for training."""
    log.info('%s', message)


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning only once per process."""
    log.warning('%s', message)
