"""A run directory, opened."""

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_is_opened_without_a_word(tmp_path):
    """As in a notebook, where nothing has set up what libraries may log."""
    with tarfile.open(ROOT / 'tests/runs/first.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    opened = subprocess.run(
        [sys.executable, '-c', 'import sys, inference\nfor choice in ("best", "latest", "average:1"):\n'
         '    print(inference.load(sys.argv[1], choice).checkpoint)', tmp_path / 'run'],
        cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (opened.returncode, opened.stdout, opened.stderr) == (0, '[6]\n' * 3, '')
