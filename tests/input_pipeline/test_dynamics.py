"""Simulated series: the integrator compared with exact solutions, and properties that must not reveal the class."""

import numpy as np
import pytest

from input_pipeline import dynamics
from tests.input_pipeline.helpers import open_arrays, options


def test_integration_against_the_exact_solution():
    damping, interval = np.array([0.05, 0.1, 0.15]), np.array([0.1, 0.2, 0.4])
    start = np.array([[1.0] * 3, [0.0] * 3])
    path = dynamics.integrate(dynamics.damped_oscillator, start, damping[None], interval, 100)
    time = np.arange(100)[:, None] * interval
    omega = np.sqrt(1 - damping ** 2)
    exact = np.exp(-damping * time) * (np.cos(omega * time) + damping / omega * np.sin(omega * time))
    np.testing.assert_allclose(path[:, 0], exact, atol=1e-5)


def test_derivatives_may_depend_on_time():
    interval = np.array([0.1, 0.5])
    path = dynamics.integrate(lambda state, parameters, time: [np.cos(time)], np.zeros((1, 2)), np.zeros((1, 2)),
                              interval, 30)
    np.testing.assert_allclose(path[:, 0], np.sin(np.arange(30)[:, None] * interval), atol=1e-6)


def test_pendulum_swings_at_its_frequency():
    frequency = np.array([0.5, 1.0, 1.5])
    path = dynamics.integrate(dynamics.pendulum, np.array([[0.01] * 3, [0.0] * 3]),
                              np.stack([frequency, np.zeros(3)]), np.full(3, 0.05), 100)
    np.testing.assert_allclose(path[:, 0], 0.01 * np.cos(2 * np.pi * frequency * np.arange(100)[:, None] * 0.05),
                               atol=1e-5)
    data = open_arrays(options(source='builtin', name='pendulum'), labelled=False)
    assert data.targets('train').std(axis=0).min() > 0.1
    angle, targets = data.inputs('train')[:, :, 0], data.targets('train')
    peak = np.abs(np.fft.rfft(angle - angle.mean(axis=1, keepdims=True))).argmax(axis=1)
    correlation = np.corrcoef(peak, targets, rowvar=False)[0, 1:]
    assert correlation[0] > 0.7 and abs(correlation[1]) < 0.3


@pytest.mark.slow
def test_level_and_scale_of_dynamics_do_not_reveal_the_system():
    data = open_arrays(options(source='builtin', name='dynamics'), labelled=True)
    np.testing.assert_allclose(data.inputs('train').mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(data.inputs('train').std(axis=1), 1, atol=1e-5)
    assert np.bincount(data.targets('train')).min() > 600
