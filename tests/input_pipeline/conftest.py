import logging

import pytest


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    caplog.set_level(logging.INFO, 'allyouneed')
    return caplog
