"""Sinusoids and learned tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.positional import PositionalEncoding, sinusoids
from tests.model import reference
from tests.model.helpers import close

WORKED = [[0, 1, 0, 1], [0.84, 0.54, 0.01, 1.00], [0.91, -0.42, 0.02, 1.00], [0.14, -0.99, 0.03, 1.00]]


def angles(d_model):
    """1 / 10000^(2j/d): by how much pair j turns from one position to the next."""
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
    # The last pair is one ratio short of the end, to which it comes closer as d_model grows.
    np.testing.assert_allclose(wavelengths[0], 2 * np.pi, rtol=1e-5)
    np.testing.assert_allclose(wavelengths[-1] * ratio, 10000 * 2 * np.pi, rtol=1e-5)


def test_odd_width_is_an_error():
    with pytest.raises(ValueError, match='even d_model, not 5'):
        sinusoids(jnp.arange(3), 5)


def test_learned_positions_are_rows_of_the_table():
    module, positions = PositionalEncoding('learned', 6, max_length=5), jnp.array([[4, 0, 4]])
    variables = module.init(jax.random.key(0), positions, 5)
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
    with pytest.raises(ValueError, match='end at max_length=4, but 5 are needed'):
        PositionalEncoding('learned', 6, max_length=4).init(jax.random.key(0), jnp.arange(5), 5)


def test_unknown_scheme_is_an_error():
    with pytest.raises(ValueError, match="position='rotation' is not one of sinusoidal, learned, rotary, relative, alibi, none"):
        PositionalEncoding('rotation', 6, max_length=4).init(jax.random.key(0), jnp.arange(3), 3)
