"""The resident memory of a process."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime import memory

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='asks Linux')
def test_the_peak_of_a_process_is_not_that_of_the_process_that_started_it():
    held = b'x' * 2 ** 28
    code = 'from runtime.memory import peak_resident; print(peak_resident())'
    peak = subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert 2 ** 20 < int(peak) < len(held) / 2


@pytest.mark.parametrize('system, counted',
                         [('linux', 3 * 2 ** 20), ('darwin', 3 * 2 ** 30), ('freebsd14', 3 * 2 ** 20)])
def test_three_gigabytes_are_three_whatever_the_system_counts_in(system, counted, monkeypatch):
    """ru_maxrss is in bytes on macOS and in kilobytes elsewhere; without Linux's /proc, it stands for what is held."""
    monkeypatch.setattr(memory, 'sys', SimpleNamespace(platform=system))
    monkeypatch.setattr(memory.resource, 'getrusage', lambda _: SimpleNamespace(ru_maxrss=counted))
    monkeypatch.setattr(memory, 'Path', lambda _: Path('/no/such/file'))
    assert memory.peak_resident() == memory.resident() == 3 * 2 ** 30
