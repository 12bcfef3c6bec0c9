import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.largest import row_maximum


@pytest.mark.parametrize('devices', [1, 8])  # with several devices, a row is not cut into parts
@pytest.mark.parametrize('shape', [(1,), (3, 5), (2, 3, 16), (4, 17), (2, 100), (3, 2, 4003)])
def test_the_maximum_of_a_row_is_numpys(shape, devices, monkeypatch):
    monkeypatch.setattr(jax, 'device_count', lambda: devices)
    rng = np.random.default_rng(len(shape))
    values = rng.normal(size=shape).astype(np.float32) - 3  # below the zeros of a wrong padding
    values[..., -1] -= np.float32(np.inf)
    before = rng.integers(0, shape[-1] + 1, shape[:-1])
    expected = np.where(np.arange(shape[-1]) < before[..., None], values, -np.inf).max(axis=-1)
    # New functions, because JAX would reuse the program of the other number of devices.
    np.testing.assert_array_equal(jax.jit(lambda values: row_maximum(values))(values), values.max(axis=-1))
    np.testing.assert_array_equal(jax.jit(lambda *arrays: row_maximum(*arrays))(values, jnp.asarray(before)), expected)


def test_the_maximum_of_a_row_with_nan_is_nan(monkeypatch):
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    values = jnp.zeros((3, 40)).at[1, 7].set(jnp.nan)
    np.testing.assert_array_equal(row_maximum(values), [0, np.nan, 0])
