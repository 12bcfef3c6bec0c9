import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.random_masks import keep_mask, threefry
from model.dropout import Dropout, drop


def test_threefry_is_that_of_jax():
    rng = np.random.default_rng(0)
    key, counters = (jnp.uint32(rng.integers(0, 2 ** 32, size)) for size in (2, 10))
    np.testing.assert_array_equal(threefry(key, counters[:5], counters[5:]), threefry_2x32(key, counters)[:5])


@pytest.mark.parametrize('rate', [0.01, 0.1, 0.5, 0.9])
def test_it_drops_at_its_rate_independently_and_keeps_the_mean(rate):
    mask = np.asarray(jax.jit(keep_mask, static_argnums=(1, 2))(jax.random.key(1), rate, (64, 33, 50)))
    deviation = (rate * (1 - rate) / mask.size) ** 0.5
    assert abs(1 - mask.mean() - rate) < 4 * deviation
    for axis in range(3):  # neighbours are independent
        one, other = np.split(np.moveaxis(mask, axis, 0)[:2 * (mask.shape[axis] // 2)], 2)
        assert abs((one & other).mean() - (1 - rate) ** 2) < 8 * deviation
    inputs = jnp.full((64, 33, 50), 2.0)
    dropped = np.asarray(drop(inputs, rate, jax.random.key(1)))
    np.testing.assert_allclose(dropped[mask], 2 / (1 - rate), rtol=1e-4)
    assert not dropped[~mask].any()


@pytest.mark.parametrize('rate', [0.05, 0.1, 0.15, 0.3])
def test_dropout_in_bfloat16_keeps_the_mean(rate):
    inputs = jnp.bfloat16(np.random.default_rng(0).uniform(1, 2, 10_000))
    kept, mask = (function(jax.random.key(1), rate) for function in (
        lambda key, rate: drop(inputs, rate, key), lambda key, rate: keep_mask(key, rate, inputs.shape)))
    scale = np.float64(kept)[mask].sum() / np.float64(inputs)[mask].sum()
    assert abs(scale * (1 - rate) - 1) < 3e-4, scale


@pytest.mark.parametrize('shape', [(), (7,), (3, 5), (2, 3, 5, 7), (0, 4)], ids=str)
def test_any_shape(shape):
    assert keep_mask(jax.random.key(0), 0.5, shape).shape == shape


def test_the_bits_depend_only_on_the_key_and_the_place():
    key, shape = jax.random.key(2), (8, 6, 4)
    mask = np.asarray(keep_mask(key, 0.3, shape))
    np.testing.assert_array_equal(keep_mask(key, 0.3, (5, 6, 4)), mask[:5])  # also for fewer rows
    by_rows = NamedSharding(Mesh(np.array(jax.devices()), ('data',)), PartitionSpec('data'))
    sharded = jax.jit(keep_mask, static_argnums=(1, 2), out_shardings=by_rows)(key, 0.3, (8 * jax.device_count(), 6, 4))
    np.testing.assert_array_equal(np.asarray(sharded)[:8], mask)
    assert (np.asarray(keep_mask(jax.random.key(3), 0.3, shape)) != mask).any()
    np.testing.assert_array_equal(jax.vmap(keep_mask, (0, None, None))(jax.random.split(key), 0.3, shape)[1],
                                  keep_mask(jax.random.split(key)[1], 0.3, shape))


@pytest.mark.parametrize('implementation', ['threefry2x32', 'rbg', 'unsafe_rbg'])
def test_keys_of_every_generator(implementation):
    masks = [keep_mask(key, 0.5, (100, 100)) for key in jax.random.split(jax.random.key(0, impl=implementation))]
    assert abs(float((masks[0] == masks[1]).mean()) - 0.5) < 0.03


def test_the_gradient_passes_where_the_inputs_did():
    inputs = jnp.float32(np.random.default_rng(1).normal(size=(16, 32)))
    module = Dropout(0.25)

    def outputs(inputs):
        return module.apply({}, inputs, deterministic=False, rngs={'dropout': jax.random.key(4)})

    gradient = jax.jit(jax.grad(lambda inputs: outputs(inputs).sum()))(inputs)
    np.testing.assert_allclose(gradient, outputs(inputs) / inputs, rtol=1e-5)
    np.testing.assert_array_equal(module.apply({}, inputs, deterministic=True), inputs)
