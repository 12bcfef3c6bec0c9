import logging

import pytest

from runtime import once


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    caplog.set_level(logging.INFO, 'allyouneed')
    once.log_once.cache_clear()  # an earlier test may have logged the same message
    once.warn_once.cache_clear()
    return caplog
