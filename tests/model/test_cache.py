"""The past of a cache, against plain NumPy arrays with the axes of attention."""

import jax.numpy as jnp
import numpy as np

from model.cache import Cache, Past


def test_a_past_is_written_resized_and_read_like_plain_arrays():
    rng = np.random.default_rng(0)
    steps = [(rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 4, 6))) for _ in range(4)]  # batch, beam, groups, d
    past = Past.empty(2, 4, (5, 6), 6, jnp.float32)
    for number, step in enumerate(steps):
        if past.length() == 3 * number:  # full: doubled, as in a search
            [past] = Cache(memory=(), state=(), position=jnp.int32(number), past=[past]).resized(6).past
        past = past.write(*map(jnp.float32, step), jnp.int32(3 * number))
    assert past.length() == 12
    for found, expected in zip(past.keys_values(), zip(*steps, strict=True), strict=True):
        np.testing.assert_array_equal(found, np.concatenate(expected, axis=1).astype(np.float32))
    for found, whole in zip(past.resized(-5).keys_values(), past.keys_values(), strict=True):
        np.testing.assert_array_equal(found, whole[:, :7])
    again = Past.of(*past.keys_values()).in_rows()
    np.testing.assert_array_equal(again.key, past.key)
    np.testing.assert_array_equal(again.value, past.value)
