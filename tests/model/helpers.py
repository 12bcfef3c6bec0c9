"""Random parameters for modules, and the same parameters for the reference."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def random_params(module, *args, seed=0, **kwargs):
    """Parameters of the module, every one random: biases are not 0, layer norm's scales not 1."""
    shapes = nn.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **kwargs)))['params']
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        values = rng.normal(scale=0.3, size=leaf.shape)
        return jnp.asarray(values + (path[-1].key == 'scale'), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def float64(tree):
    """The tree for the reference."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(actual, expected, atol=1e-5):
    """Equal to within float32's rounding."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=atol)
