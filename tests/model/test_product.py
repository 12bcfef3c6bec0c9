import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.product import dot_general


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('shape', [(5,), (3, 5), (2, 3, 5)], ids=str)
def test_values_and_gradients_are_those_of_jax(shape, dtype):
    inputs = jnp.float32(np.random.default_rng(0).normal(size=shape))
    ours, plain = (nn.Dense(4, dtype=dtype, dot_general=each) for each in (dot_general, jax.lax.dot_general))
    params = plain.init(jax.random.key(0), inputs)

    def of(layer):
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(layer.apply(*args))), argnums=(0, 1))(params, inputs)

    tolerance = 1e-6 if dtype == jnp.float32 else 0.05
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), of(ours), of(plain))
