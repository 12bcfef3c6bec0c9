"""Embeddings of tokens, and the gradient of their table."""

import jax
import jax.numpy as jnp
import numpy as np

from model.embedding import Embedding
from tests.model.helpers import random_params


def test_rows_have_the_dtype_of_the_model_and_their_gradients_are_sums_in_float32():
    """A sum of 3,000 ones in bfloat16 would be 256."""
    module, tokens = Embedding(5, 2, jnp.bfloat16), jnp.full((10, 300), 3)
    params = random_params(module, tokens)

    def total(params):
        rows = module.apply({'params': params}, tokens)
        return rows.astype(jnp.float32).sum(), rows

    gradient, rows = jax.grad(total, has_aux=True)(params)
    assert rows.dtype == jnp.bfloat16
    assert (rows == params['embedding'][3].astype(jnp.bfloat16)).all()
    np.testing.assert_array_equal(gradient['embedding'], np.eye(5)[3][:, None] * [3000, 3000])
