"""Built-in time series with known targets, made by integrating equations of motion. Nothing is downloaded.

    make_dynamics(seed)  # two noisy channels -> class, one of six systems
    make_pendulum(seed)  # a noisy angle -> two values, frequency and damping

Both functions return {'train': (inputs, targets), 'validation': ..., 'test': ...}. The result depends only on the seed.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Num

COUNTS = {'train': 4000, 'validation': 500, 'test': 500}
LENGTH = 128   # number of samples in a series
SUBSTEPS = 8   # integration steps from one sample to the next

State = Float[np.ndarray, 'variables series']
Derivative = Callable[[State, Float[np.ndarray, 'parameters series'], Float[np.ndarray, ' series']], list[np.ndarray]]
Ranges = tuple[tuple[int | float, int | float], ...]  # (low, high) of uniform distributions
Splits = dict[str, tuple[Float[np.ndarray, 'series time channels'], Num[np.ndarray, 'series *values']]]


class System(NamedTuple):
    """A differential equation, with ranges for random parameters and initial states.

    `seen` has the indices of the two variables that are recorded.
    """
    derivative: Derivative  # (state, parameters, time) -> the state's rate of change
    parameters: Ranges
    start: Ranges
    period: float           # approximate duration of a cycle; random time scales are relative to it
    seen: tuple[int, int] = (0, 1)
    settles: bool = True    # True: recording starts near the attractor; False: it starts at time 0


def lorenz(state, parameters, time):
    """Returns the derivative of Lorenz's model of convection; the parameter is the Rayleigh number."""
    x, y, z = state
    return [10 * (y - x), x * (parameters[0] - z) - y, x * y - 8 / 3 * z]


def roessler(state, parameters, time):
    """Returns the derivative of Roessler's system; the parameters are a and c."""
    x, y, z = state
    a, c = parameters
    return [-y - z, x + a * y, 0.2 + z * (x - c)]


def van_der_pol(state, parameters, time):
    """Returns the derivative of van der Pol's oscillator; the parameter is the strength of its damping."""
    x, v = state
    return [v, parameters[0] * (1 - x ** 2) * v - x]


def duffing(state, parameters, time):
    """Returns the derivative of Duffing's driven oscillator; the parameters are strength and phase of the drive."""
    x, v = state
    strength, phase = parameters
    return [v, x - x ** 3 - 0.3 * v + strength * np.cos(1.2 * time + phase)]


def predator_prey(state, parameters, time):
    """Returns the derivative of the Lotka-Volterra model; the parameters are the birth rate and the death rate."""
    prey, predators = state
    birth, death = parameters
    return [prey * (birth - predators), predators * (prey - death)]


def damped_oscillator(state, parameters, time):
    """Returns the derivative of a linear oscillator; the parameter is its damping ratio."""
    x, v = state
    return [v, -x - 2 * parameters[0] * v]


def pendulum(state, parameters, time):
    """Returns the derivative of a pendulum; the parameters are the frequency of small swings (Hz) and damping (1/s)."""
    angle, speed = state
    frequency, damping = parameters
    return [speed, -(2 * np.pi * frequency) ** 2 * np.sin(angle) - 2 * damping * speed]


SYSTEMS = {
    'lorenz': System(lorenz, ((26, 34),), ((-10, 10), (-10, 10), (15, 35)), period=0.75, seen=(0, 2)),
    'roessler': System(roessler, ((0.15, 0.25), (5, 7)), ((-4, 4), (-4, 4), (0, 1)), period=6.0),
    'van der pol': System(van_der_pol, ((1, 3),), ((-2, 2), (-2, 2)), period=7.5),
    'duffing': System(duffing, ((0.3, 0.5), (0, 2 * np.pi)), ((-1.5, 1.5), (-1, 1)), period=5.2),
    'predator-prey': System(predator_prey, ((0.8, 1.2), (0.8, 1.2)), ((0.4, 2), (0.4, 2)), period=6.5),
    'damped oscillator': System(damped_oscillator, ((0.03, 0.15),), ((-1, 1), (-1, 1)), period=6.3, settles=False),
}


def make_dynamics(seed: int) -> Splits:
    """Makes series [n, 128, 2]. The target of a series is the index of its system in SYSTEMS.

    Initial states and parameters are random. A series has 2 to 8 cycles. The standard deviation of the noise is 10 to
    100 % of the standard deviation of the channel. The channels are standardised, so that level and scale do not reveal
    the system.
    """
    rng = np.random.default_rng(seed)
    total = sum(COUNTS.values())
    targets = rng.permutation(np.arange(total, dtype=np.int32) % len(SYSTEMS))
    inputs = np.empty((total, LENGTH, 2), np.float32)
    for number, system in enumerate(SYSTEMS.values()):
        members = np.flatnonzero(targets == number)
        count = len(members)
        interval = system.period * rng.uniform(2, 8, count) / LENGTH
        start, parameters = draw(rng, system.start, count), draw(rng, system.parameters, count)
        before = LENGTH // 2 if system.settles else 0
        path = integrate(system.derivative, start, parameters, interval, before + LENGTH)[before:, list(system.seen)]
        clean = standardised(path.transpose(2, 0, 1))
        noise = rng.normal(size=clean.shape) * rng.uniform(0.1, 1, (count, 1, 1))
        inputs[members] = standardised(clean + noise)
    return split(inputs, targets)


def make_pendulum(seed: int) -> Splits:
    """Makes series of the angle of a pendulum [n, 128, 1], in rad, with one sample every 0.05 s.

    The targets [n, 2] are the frequency of small swings (Hz) and the damping (1/s). Swings reach 2 rad. The frequency
    of large swings depends on the amplitude, so the target is not simply the largest peak of the spectrum.
    """
    rng = np.random.default_rng(seed)
    total = sum(COUNTS.values())
    parameters = draw(rng, ((0.5, 1.5), (0.02, 0.5)), total)
    angle = rng.uniform(0.3, 2, total) * rng.choice([-1, 1], total)
    speed = rng.uniform(-0.5, 0.5, total) * 2 * np.pi * parameters[0]  # too slow for a full turn
    path = integrate(pendulum, np.stack([angle, speed]), parameters, np.full(total, 0.05), LENGTH)[:, :1]
    clean = path.transpose(2, 0, 1)
    noise = rng.normal(size=clean.shape) * rng.uniform(0.02, 0.2, (total, 1, 1))
    return split((clean + noise).astype(np.float32), parameters.T.astype(np.float32))


def integrate(derivative: Derivative, start: State, parameters: Float[np.ndarray, 'parameters series'],
              interval: Float[np.ndarray, ' series'], samples: int) -> Float[np.ndarray, 'samples variables series']:
    """Integrates all series at once by the classical Runge-Kutta method. The first sample is the initial state."""
    state, time, step = start, np.zeros_like(interval), interval / SUBSTEPS

    def slope(state, time):
        return np.stack(derivative(state, parameters, time))

    path = [state]
    for number in range(1, (samples - 1) * SUBSTEPS + 1):
        k1 = slope(state, time)
        k2 = slope(state + step / 2 * k1, time + step / 2)
        k3 = slope(state + step / 2 * k2, time + step / 2)
        k4 = slope(state + step * k3, time + step)
        state, time = state + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4), time + step
        if number % SUBSTEPS == 0:
            path.append(state)
    return np.stack(path)


def draw(rng: np.random.Generator, ranges: Ranges, count: int) -> Float[np.ndarray, 'ranges count']:
    """Draws `count` uniformly distributed numbers from each range."""
    return np.stack([rng.uniform(low, high, count) for low, high in ranges])


def standardised(series: Float[np.ndarray, 'series time channels']) -> Float[np.ndarray, 'series time channels']:
    """Returns the series, shifted and scaled to mean 0 and standard deviation 1 in every channel."""
    return (series - series.mean(axis=1, keepdims=True)) / series.std(axis=1, keepdims=True)


def split(inputs: np.ndarray, targets: np.ndarray) -> Splits:
    """Divides the examples into splits, in order. COUNTS has the sizes of the splits."""
    ends = np.cumsum(list(COUNTS.values()))
    return {name: (inputs[end - count:end], targets[end - count:end])
            for (name, count), end in zip(COUNTS.items(), ends, strict=True)}
