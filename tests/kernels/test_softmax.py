import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.softmax import softmax


@pytest.fixture(params=[1, 8], autouse=True)
def devices(request, monkeypatch):
    """One device, where the comparisons are vectorised, and several devices."""
    monkeypatch.setattr(jax, 'device_count', lambda: request.param)


@pytest.mark.parametrize('shape', [(1,), (3, 5), (2, 3, 16), (4, 17), (2, 4, 5, 320)])
def test_a_softmax_is_numpys(shape):
    scores = np.random.default_rng(len(shape)).normal(scale=30, size=shape)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(softmax(jnp.asarray(scores, jnp.float32)), powers / powers.sum(axis=-1, keepdims=True),
                               rtol=3e-5, atol=1e-30)


def test_the_derivatives_of_a_softmax_are_jaxs():
    scores, tangent = np.random.default_rng(0).normal(size=(2, 3, 4, 40)).astype(np.float32)
    for derivative in (lambda function: jax.jvp(function, (scores,), (tangent,))[1],
                       lambda function: jax.vjp(function, scores)[1](tangent)[0],
                       lambda function: jax.vmap(jax.hessian(lambda row: function(row)[0]))(scores[0])):
        np.testing.assert_allclose(derivative(lambda scores: softmax(scores)), derivative(jax.nn.softmax), atol=1e-7)


def test_a_row_with_nan_or_infinity_is_nan():
    rows = jnp.zeros((5, 40)).at[1, 7].set(jnp.nan).at[2, 0].set(jnp.nan).at[3, 39].set(jnp.inf).at[4].set(-jnp.inf)
    for found in softmax(rows), jax.nn.softmax(rows):
        assert np.isfinite(found[0]).all() and np.isnan(found[1:]).all()
    hidden = rows[0].at[3:].set(-jnp.inf)  # some scores of -inf are no error
    np.testing.assert_allclose(softmax(hidden), [1 / 3] * 3 + [0] * 37, rtol=1e-6)
