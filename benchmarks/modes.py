"""Compares training on many devices, in every mode, with training on one device.

    python -m benchmarks.modes [--dtype=bfloat16]

Trains the same small model in each mode on the same batches. The rows of a batch differ in length. After a few steps,
the script prints a table with the largest differences from training on one device, in the loss and in the parameters.
On a machine without accelerators, the CPU acts as 8 devices.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from absl import flags

from command_line import run_script
from input_pipeline.batches import ALL, Batch, Part
from model.blocks import BlockConfig
from model.evaluation import Objective, supervised
from model.losses import cross_entropy
from model.transformer import Transformer
from runtime.errors import UserError
from training.compiled import Compiled
from training.step import TrainState

STEPS, ROWS, LENGTH, VOCABULARY = 4, 16, 10, 32

CROSS_ENTROPY = supervised(functools.partial(cross_entropy, label_smoothing=0.1))
ADAM = optax.adam(1e-3, b2=0.98)
# The largest difference of parameters that rounding explains. Adam enlarges the rounding of small gradients: we saw a
# difference of 1.03e-5, with accumulate=2.
ROUNDING = 2e-5


@dataclasses.dataclass(frozen=True)
class Mode:
    """A case of the comparison.

    `data`, `fsdp` and `tensor` are the sizes of the mesh of devices. `mode` is config.parallel.mode. `accumulate` and
    `dropout` are options of the training that are tested in this mode.
    """
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    mode: str = 'jit'
    accumulate: int = 1
    dropout: float = 0.0

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        axes = [f'{axis}={getattr(self, axis)}' for axis in ('data', 'fsdp', 'tensor') if getattr(self, axis) > 1]
        options = [f'{name} {getattr(self, name):g}' for name, default in (('accumulate', 1), ('dropout', 0))
                   if getattr(self, name) > default]
        return ', '.join([' '.join([self.mode, *axes]), *options])


def modes(devices: int) -> list[Mode]:
    """Returns the cases to compare on a machine with `devices` devices, a power of two."""
    modes = [Mode(data=devices), Mode(fsdp=devices), Mode(tensor=devices), Mode(data=devices // 2, fsdp=2),
             Mode(data=devices, mode='pmap'), Mode(data=devices // 2, accumulate=2), Mode(data=devices, dropout=0.2)]
    return modes + ([Mode(data=devices // 4, fsdp=2, tensor=2)] if devices >= 8 else [])


def ragged_batch(seed: int, part: Part = ALL) -> Batch:
    """Returns the rows of a batch that `part` selects.

    The batch has ROWS pairs with 1 to LENGTH random tokens, and padding rows. The lengths of the rows differ much. The
    correct loss is the mean over all tokens. The wrong loss would be very different: each device computes a mean, and
    the loss is the mean of these means.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, (2, ROWS, 1))
    lengths[:, :ROWS // 2] = 1 + lengths[:, :ROWS // 2] // 4  # the rows of the first devices are mostly padding
    tokens = rng.integers(4, VOCABULARY, (2, ROWS, LENGTH)) * (np.arange(LENGTH) < lengths)
    source, target = np.pad(tokens, ((0, 0), (0, part.filled(ROWS) - ROWS), (0, 0)))[:, part.rows(ROWS)]
    return {'inputs': {'source': source.astype(np.int32), 'target': target.astype(np.int32)},
            'targets': target.astype(np.int32), 'weights': (target != 0).astype(np.float32)}


def compiled(mode: Mode, dtype: str = 'float32', objective: Objective = CROSS_ENTROPY,
             optimizer: optax.GradientTransformation = ADAM, **block: Any) -> Compiled:
    """Returns the compiled steps of a small model, for as many devices as `mode` needs.

    `block` contains further options of the model's BlockConfig.
    """
    config = BlockConfig(d_model=16, d_ff=32, num_heads=8, d_k=4, d_v=4, dropout=mode.dropout,
                         attention_dropout=mode.dropout, dtype=dtype, **block)
    return Compiled(Transformer(config, 1, VOCABULARY, VOCABULARY), optimizer, ragged_batch(0),
                    parallel=dataclasses.asdict(mode), objective=objective,
                    dropout_key=jax.random.key(1), accumulate=mode.accumulate, devices=jax.devices()[:mode.devices])


def train(steps: Compiled, count: int = STEPS) -> tuple[TrainState, list[float]]:
    """Trains for `count` steps. Returns the final state, and the losses per token of all steps and of an evaluation."""
    state, losses = steps.init(seed=0), []
    for step in range(count):
        state, sums = steps.train(state, ragged_batch(step, steps.part))
        losses.append(float(sums.loss / sums.tokens))
    sums = steps.eval(steps.gather(state.params), ragged_batch(count, steps.part))
    return state, [*losses, float(sums.loss / sums.tokens)]


def compare(compared: list[Mode], dtype: str = 'float32') -> Iterator[tuple[Mode, float, float]]:
    """Compares training in each case with training on one device.

    Yields (case, largest difference in the losses, largest difference in the parameters).
    """
    references = {}
    for mode in compared:
        # With dropout, each part of a batch has different random masks, so the reference must have the same parts.
        one = Mode(dropout=mode.dropout, accumulate=mode.accumulate if mode.dropout else 1)
        if one not in references:
            references[one] = train(compiled(one, dtype))
        (expected, expected_losses), (state, losses) = references[one], train(compiled(mode, dtype))
        pairs = zip(*(map(np.asarray, jax.tree.leaves(each.params)) for each in (state, expected)), strict=True)
        yield mode, np.abs(np.subtract(losses, expected_losses)).max(), np.max([np.abs(a - b).max() for a, b in pairs])


def main() -> None:
    jax.config.update('jax_num_cpu_devices', 8)  # has no effect on other devices
    devices = 2 ** (jax.device_count().bit_length() - 1)
    if devices < 2:
        raise UserError('there is only one device, so no mode can be compared. Set JAX_PLATFORMS=cpu to use the CPU as '
                        '8 devices')
    print(f'{STEPS} steps on {jax.devices()[0].device_kind}, {DTYPE.value}, compared with one device\n')
    print('| mode | devices | largest difference in loss | in parameters |\n| --- | --- | --- | --- |')
    for mode, loss, parameters in compare(modes(devices), DTYPE.value):
        print(f'| {mode} | {mode.devices} | {loss:.1e} | {parameters:.1e} |', flush=True)


if __name__ == '__main__':
    DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'The type of the computation.')
    run_script(main)
