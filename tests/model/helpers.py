"""Random parameters for modules, and the same parameters for the reference."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def random_params(module, *args, seed=0, **kwargs):
    """Returns random parameters of the module: biases are not 0, and scales of layer norms are not 1."""
    shapes = nn.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **kwargs)))['params']
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        values = rng.normal(scale=0.3, size=leaf.shape)
        return jnp.asarray(values + (path[-1].key == 'scale'), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def float64(tree):
    """Returns the tree in float64, for the reference."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(actual, expected, atol=1e-5):
    """Asserts that the arrays are equal up to the rounding of float32."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=atol)
