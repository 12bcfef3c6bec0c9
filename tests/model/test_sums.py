"""Sums that XLA fuses with earlier operations, against float64. A version of jaxlib computes some of them wrongly."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.xla import WITHOUT_REDUCTIONS, WRONG

ROOT = Path(__file__).parents[2]
# Sums that jaxlib 0.10.2 computes wrongly without the flag, at the numbers of rows and widths where that may happen.
PROBE = """
import {imported}
import jax, jax.numpy as jnp, numpy as np
rng = np.random.default_rng(0)
worst = 0.0
for rows in (1400, 32_768, 32_769, 40_000):
    for width in (3, 31):
        matrix, x = rng.normal(size=(width, width)), rng.normal(size=(rows, width))
        of_row = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.float32(matrix) @ row) ** 2)))
        expected = ((x @ matrix.T) ** 2).sum(axis=1)
        worst = max(worst, float(np.max(np.abs(of_row(np.float32(x)) - expected) / expected)))
print(worst)
"""


def worst(imported, flags=''):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('XLA_', 'JAX_'))}
    done = subprocess.run([sys.executable, '-c', PROBE.format(imported=imported)], cwd=ROOT, capture_output=True,
                          text=True,
                          env=environment | {'JAX_PLATFORMS': 'cpu', **({'XLA_FLAGS': flags} if flags else {})})
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize('imported', ['allyouneed, inference', 'command_line, inference'])
def test_fused_sums_are_right_whatever_is_imported(imported):
    assert worst(imported) < 1e-3


@pytest.mark.slow
def test_flags_of_the_user_are_kept_beside():
    assert worst('allyouneed, inference', '--xla_force_host_platform_device_count=2') < 1e-3


NEEDED = pytest.mark.skipif(importlib.metadata.version('jaxlib') != WRONG, reason=f'only jaxlib {WRONG} needs the flag')


def run(program, flags=''):
    """Runs Python on a CPU without the flags of these tests, and returns its exit status and stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('XLA_', 'JAX_'))}
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True,
                          env=environment | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags})
    return done.returncode, done.stderr


@NEEDED
def test_flags_in_a_file_are_kept_beside(tmp_path):
    (tmp_path / 'flags').write_text('--xla_a=1\n--xla_b=2\n# comment\n')
    program = ("import allyouneed, os; assert os.environ['XLA_FLAGS'].split()[:3] == "
               f"[{WITHOUT_REDUCTIONS!r}, '--xla_a=1', '--xla_b=2']")
    assert run(program, str(tmp_path / 'flags')) == (0, '')


@NEEDED
@pytest.mark.slow
def test_an_import_that_is_too_late_for_the_flag_warns():
    status, stderr = run('import jax; jax.devices(); import allyouneed, inference')
    assert status == 0 and stderr.count('RuntimeWarning: jaxlib 0.10.2 computes some sums wrongly') == 1
    assert 'Import allyouneed before you use JAX, start Python with XLA_FLAGS=' + WITHOUT_REDUCTIONS in stderr
    assert run('import jax; import allyouneed, inference; jax.devices()') == (0, '')
    assert run('import jax; jax.devices(); import inference', WITHOUT_REDUCTIONS) == (0, '')


@pytest.mark.slow
@NEEDED
def test_a_package_sets_no_flag_and_warns_if_it_is_missing():
    status, stderr = run('import inference, os; assert not os.environ["XLA_FLAGS"]')
    assert status == 0 and stderr.count('RuntimeWarning: jaxlib 0.10.2 computes some sums wrongly') == 1
    assert 'Import allyouneed first, because it sets the flag' in stderr


@pytest.mark.slow
@NEEDED
def test_a_command_that_would_compute_wrong_sums_ends_with_a_message():
    command = 'from command_line import run_script; import inference; run_script(lambda: print("ran"))'
    status, stderr = run(f'import jax; jax.devices(); {command}')
    assert status == 2 and 'error: jaxlib 0.10.2 computes some sums wrongly on CPUs' in stderr
    assert run(command)[0] == 0
