import logging

import pytest

from input_pipeline import splits


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    caplog.set_level(logging.INFO, 'allyouneed')
    splits.log_once.cache_clear()  # an earlier test may have logged the same message
    splits.warn_once.cache_clear()
    return caplog
