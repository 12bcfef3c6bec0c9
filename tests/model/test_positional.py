"""Sinusoids, learned tables, and the relative schemes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.positional import (
    RELATIVE,
    SCHEMES,
    AlibiBias,
    BucketedBias,
    PositionalEncoding,
    alibi_slopes,
    relative_buckets,
    rotate,
    sinusoids,
)
from tests.model import reference
from tests.model.helpers import close, normal

WORKED = [[0, 1, 0, 1], [0.84, 0.54, 0.01, 1.00], [0.91, -0.42, 0.02, 1.00], [0.14, -0.99, 0.03, 1.00]]


def angles(d_model):
    """Returns 1 / 10000^(2j/d), the angle between two positions of pair j."""
    return 10000.0 ** (-np.arange(0, d_model, 2) / d_model)


def test_worked_values():
    close(np.round(sinusoids(jnp.arange(4), 4), 2), WORKED)


def test_adding_the_worked_values():
    embedding = jnp.array([0.41, 0.08, 0.51, 0.87])
    close(np.round(embedding + sinusoids(jnp.array(3), 4), 2), [0.55, -0.91, 0.54, 1.87])


@pytest.mark.parametrize('length, d_model', [(1, 2), (10, 6), (100, 100), (300, 64)])
def test_sinusoids_are_the_reference(length, d_model):
    # The angle itself, up to `length`, is rounded to float32.
    close(sinusoids(jnp.arange(length), d_model), reference.sinusoids(length, d_model), atol=1e-4)


def test_sinusoids_of_any_positions():
    positions = jnp.array([[3, 0], [7, 7]])
    close(sinusoids(positions, 8), sinusoids(jnp.arange(8), 8)[positions], atol=1e-6)


def test_values_are_between_minus_one_and_one():
    encoding = sinusoids(jnp.arange(2000), 32)
    assert encoding.min() >= -1 and encoding.max() <= 1


@pytest.mark.parametrize('d_model', [4, 32])
@pytest.mark.parametrize('offset', [1, 5, 30])
def test_an_offset_is_a_rotation_that_does_not_depend_on_the_position(d_model, offset):
    rotation = np.zeros((d_model, d_model))
    for j, angle in enumerate(angles(d_model) * offset):
        cos, sin, pair = np.cos(angle), np.sin(angle), slice(2 * j, 2 * j + 2)
        rotation[pair, pair] = [[cos, sin], [-sin, cos]]
    encoding = np.asarray(sinusoids(jnp.arange(100), d_model), np.float64)
    close(encoding[offset:], encoding[:-offset] @ rotation.T, atol=1e-4)


def test_wavelengths_are_a_geometric_progression_from_2_pi_to_10000_times_2_pi():
    d_model = 64
    sine, cosine = np.asarray(sinusoids(jnp.array(1), d_model), np.float64).reshape(-1, 2).T
    wavelengths = 2 * np.pi / np.arctan2(sine, cosine)
    ratio = 10000 ** (2 / d_model)
    np.testing.assert_allclose(wavelengths[1:] / wavelengths[:-1], ratio, rtol=1e-5)
    # The wavelength of the last pair is the end of the range, divided by the ratio.
    np.testing.assert_allclose(wavelengths[0], 2 * np.pi, rtol=1e-5)
    np.testing.assert_allclose(wavelengths[-1] * ratio, 10000 * 2 * np.pi, rtol=1e-5)


def test_odd_width_is_an_error():
    with pytest.raises(ValueError, match='even d_model, not d_model=5'):
        sinusoids(jnp.arange(3), 5)


def test_learned_positions_are_rows_of_the_table():
    module, positions = PositionalEncoding('learned', 6, max_length=5), jnp.array([[4, 0, 4]])
    variables = nn.unbox(module.init(jax.random.key(0), positions, 5))
    table = variables['params']['table']
    assert table.shape == (5, 6)
    close(module.apply(variables, positions, 5), table[positions], atol=0)


def test_other_schemes_have_no_parameters():
    for scheme, expected in ('sinusoidal', reference.sinusoids(7, 4)), ('none', np.zeros((7, 4))):
        output, variables = PositionalEncoding(scheme, 4, max_length=3).init_with_output(
            jax.random.key(0), jnp.arange(7), 7)
        assert not variables
        close(output, expected)


def test_learned_positions_that_are_too_short_are_an_error():
    with pytest.raises(ValueError, match='only max_length=4 positions, but 5 are needed'):
        PositionalEncoding('learned', 6, max_length=4).init(jax.random.key(0), jnp.arange(5), 5)


def test_unknown_scheme_is_an_error():
    with pytest.raises(ValueError, match=f"position='rotation' must be one of {', '.join(SCHEMES)}"):
        PositionalEncoding('rotation', 6, max_length=4).init(jax.random.key(0), jnp.arange(3), 3)


def test_rotated_scores_depend_on_the_offset_only():
    query, key = normal(0, 1, 1, 2, 6), normal(1, 1, 1, 2, 6)

    def score(i, j):
        return np.asarray((rotate(query, jnp.array([[i]])) * rotate(key, jnp.array([[j]]))).sum(-1))

    for offset in (0, 1, 5):
        close(score(3 + offset, 3), score(40 + offset, 40))
    assert not np.allclose(score(4, 3), score(8, 3))
    close(rotate(query, jnp.array([[0]])), query)


def test_rotation_is_that_of_its_definition():
    x, position = np.asarray(normal(2, 1, 1, 1, 4), np.float64), 7
    expected = np.empty(4)
    for j in range(2):
        angle = position / 10000 ** (2 * j / 4)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        expected[2 * j:2 * j + 2] = turn @ x[0, 0, 0, 2 * j:2 * j + 2]
    close(rotate(jnp.float32(x), jnp.array([[position]]))[0, 0, 0], expected)
    with pytest.raises(ValueError, match='rotary positions need an even d_k, not d_k=3'):
        rotate(jnp.zeros((1, 1, 1, 3)), jnp.array([[0]]))


@pytest.mark.parametrize('encode', [lambda x, positions: rotate(x, positions[None]),
                                    lambda x, positions: x + sinusoids(positions, 8)[:, None]], ids=['rotary', 'added'])
def test_positions_that_are_known_leave_no_sines_to_the_program(encode):
    x = normal(3, 2, 40, 3, 8)
    known, traced = jax.jit(lambda x: encode(x, np.arange(40))), jax.jit(encode)
    close(known(x), traced(x, jnp.arange(40)), atol=1e-5)
    assert 'sine' in traced.lower(x, jnp.arange(40)).as_text() and 'sine' not in known.lower(x).as_text()


def test_alibi_falls_with_the_distance():
    np.testing.assert_allclose(alibi_slopes(8), [2.0 ** -i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(3), [2.0 ** -4, 2.0 ** -8, 2.0 ** -2])
    np.testing.assert_allclose(alibi_slopes(6), [2.0 ** -i for i in (2, 4, 6, 8, 1, 3)])
    bias = AlibiBias(jnp.array([0.5]))(jnp.array([[0, 1, 2]]), jnp.array([[0, 1, 2]]), False)
    close(bias[0, 0], [[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]])


def t5_bucket(offset, bidirectional):
    """Computes the published definition for one offset (Raffel et al. 2020; offset is key minus query)."""
    buckets, bucket, distance = 32, 0, -offset
    if bidirectional:
        buckets, bucket = 16, 16 if offset > 0 else 0
        distance = abs(distance)
    distance = max(distance, 0)
    if distance < buckets // 2:
        return bucket + distance
    scaled = np.log(distance / (buckets // 2)) / np.log(128 / (buckets // 2)) * (buckets - buckets // 2)
    return bucket + min(buckets // 2 + int(scaled), buckets - 1)


@pytest.mark.parametrize('bidirectional', [True, False])
def test_relative_buckets_are_those_of_t5(bidirectional):
    # Without powers of 2, where the rounding of a float32 logarithm decides.
    offsets = [offset for offset in range(-300, 300) if abs(offset) not in (16, 32, 64, 128)]
    expected = [t5_bucket(offset, bidirectional) for offset in offsets]
    np.testing.assert_array_equal(relative_buckets(jnp.array(offsets), bidirectional), expected)


def test_a_learned_bias_is_an_entry_of_the_table():
    table = normal(0, 32, 2)
    bias = BucketedBias(table)(jnp.array([[5]]), jnp.array([[5, 4, 9]]), True)
    close(bias[0, :, 0], np.stack([table[0], table[1], table[16 + 4]], axis=1))


def test_the_relative_schemes_add_nothing_to_the_embeddings():
    for scheme in RELATIVE:
        module = PositionalEncoding(scheme, 4, 8)
        assert not np.any(module.apply({}, jnp.arange(3), 3))


def test_sines_of_traced_positions_are_computed_once_per_position(monkeypatch):
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    x = np.zeros((32, 5, 4, 64), np.float32)
    text = jax.jit(lambda x, position: rotate(x, jnp.full((1, 5), position))).lower(x, np.int32(3)).compile().as_text()
    blocks = [block for block in text.split('\n\n') if ' sine(' in block or ' cosine(' in block]
    assert blocks and not any('32,5,4,' in block for block in blocks), 'the sines are in the loop of the rotation'
