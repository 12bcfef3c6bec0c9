"""Built-in time series with a known answer, made by integrating equations of motion. Nothing is downloaded.

    make_dynamics(seed)  # which of six systems moved like this? Two noisy channels -> class
    make_pendulum(seed)  # how fast does it swing, and how fast does that die out? A noisy angle -> two values

Both return {'train': (inputs, targets), 'validation': ..., 'test': ...} and depend on the seed alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Num

COUNTS = {'train': 4000, 'validation': 500, 'test': 500}
LENGTH = 128   # samples of a series
SUBSTEPS = 8   # integration steps from one sample to the next

State = Float[np.ndarray, 'variables series']
Derivative = Callable[[State, Float[np.ndarray, 'parameters series'], Float[np.ndarray, ' series']], list[np.ndarray]]
Ranges = tuple[tuple[int | float, int | float], ...]  # uniform on each
Splits = dict[str, tuple[Float[np.ndarray, 'series time channels'], Num[np.ndarray, 'series *values']]]


class System(NamedTuple):
    """A differential equation, what varies from series to series, and which two of its variables are seen."""
    derivative: Derivative  # (state, parameters, time) -> the state's rate of change
    parameters: Ranges
    start: Ranges
    period: float           # about one cycle: what a random time scale is relative to
    seen: tuple[int, int] = (0, 1)
    settles: bool = True    # onto an attractor, before anyone looks; otherwise it is watched from the start


def lorenz(state, parameters, time):
    x, y, z = state
    return [10 * (y - x), x * (parameters[0] - z) - y, x * y - 8 / 3 * z]


def roessler(state, parameters, time):
    x, y, z = state
    a, c = parameters
    return [-y - z, x + a * y, 0.2 + z * (x - c)]


def van_der_pol(state, parameters, time):
    x, v = state
    return [v, parameters[0] * (1 - x ** 2) * v - x]


def duffing(state, parameters, time):
    """Driven between two wells."""
    x, v = state
    strength, phase = parameters
    return [v, x - x ** 3 - 0.3 * v + strength * np.cos(1.2 * time + phase)]


def predator_prey(state, parameters, time):
    """Lotka and Volterra's."""
    prey, predators = state
    birth, death = parameters
    return [prey * (birth - predators), predators * (prey - death)]


def damped_oscillator(state, parameters, time):
    x, v = state
    return [v, -x - 2 * parameters[0] * v]


def pendulum(state, parameters, time):
    """At any amplitude; `parameters` are the frequency of small swings (Hz) and the damping (1/s)."""
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
    """Series [n, 128, 2] and the number of the system, in the order of SYSTEMS, that made each.

    Starts and parameters are random, 2 to 8 cycles are seen, with noise of 10 to 100 % of a channel's deviation;
    then every channel of every series is standardised: level and scale give nothing away.
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
    """Angles [n, 128, 1] (rad, every 0.05 s) and [n, 2] values: frequency of small swings (Hz) and damping (1/s).

    Swings of up to 2 rad, whose frequency depends on the amplitude: the largest peak of a spectrum is no answer.
    """
    rng = np.random.default_rng(seed)
    total = sum(COUNTS.values())
    parameters = draw(rng, ((0.5, 1.5), (0.02, 0.5)), total)
    angle = rng.uniform(0.3, 2, total) * rng.choice([-1, 1], total)
    speed = rng.uniform(-0.5, 0.5, total) * 2 * np.pi * parameters[0]  # too slow to go over the top
    path = integrate(pendulum, np.stack([angle, speed]), parameters, np.full(total, 0.05), LENGTH)[:, :1]
    clean = path.transpose(2, 0, 1)
    noise = rng.normal(size=clean.shape) * rng.uniform(0.02, 0.2, (total, 1, 1))
    return split((clean + noise).astype(np.float32), parameters.T.astype(np.float32))


def integrate(derivative: Derivative, start: State, parameters: Float[np.ndarray, 'parameters series'],
              interval: Float[np.ndarray, ' series'], samples: int) -> Float[np.ndarray, 'samples variables series']:
    """All series at once, by the classical Runge-Kutta method; the first sample is the start."""
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
    """`count` draws from each range."""
    return np.stack([rng.uniform(low, high, count) for low, high in ranges])


def standardised(series: Float[np.ndarray, 'series time channels']) -> Float[np.ndarray, 'series time channels']:
    """Mean 0 and deviation 1 of every channel of every series."""
    return (series - series.mean(axis=1, keepdims=True)) / series.std(axis=1, keepdims=True)


def split(inputs: np.ndarray, targets: np.ndarray) -> Splits:
    """In the order that they come in."""
    ends = np.cumsum(list(COUNTS.values()))
    return {name: (inputs[end - count:end], targets[end - count:end])
            for (name, count), end in zip(COUNTS.items(), ends, strict=True)}
