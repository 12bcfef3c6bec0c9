"""Published figures of accelerators, and the lower bounds of a step's time that follow from these figures.

Sources: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e: peak, memory, interconnect), jax-ml.github.io/scaling-book
("How to think about TPUs": bytes/s of a link and of the data-centre network), NVIDIA's data sheets of A100 SXM 80 GB
and H100 SXM (without sparsity).
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping

from runtime.errors import UserError
from tools.program import Collective

MOST_DEVICES = 1_000_000  # more than any machine has, to catch typing mistakes
# A TPU has only products of bfloat16. XLA computes a product in float32 ('highest') as the sum of six of them.
FLOAT32_PASSES = 6
# The environment variables that set the share of a GPU's memory that JAX uses: the present name and the old name.
GPU_SHARE = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'


def gpu_share(environment: Mapping[str, str]) -> float:
    """Returns the share of a GPU's memory that JAX uses: the value of the environment variable, or 0.75.

    The default is that of JAX 0.10 (docs.jax.dev, "GPU memory allocation").

    Raises:
      UserError: if the value is not a number above 0 and up to 1.
    """
    for name in GPU_SHARE:
        if text := environment.get(name):
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise UserError(f'{name}={text}: must be a number above 0 and up to 1. Use 0.9, or unset it')
            return share
    return 0.75


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
      name: the name in a topology, 'v5e' in 'v5e:4x4'.
      flops: the peak rate of bfloat16 matrix products, in operations per second.
      memory: the size of the device's memory in bytes.
      bandwidth: bytes per second between the device's memory and its cores.
      link: bytes per second of one link of the torus, summed over both directions. A chip has two links along an
        axis, and sends this number of bytes per second over both links together. For a GPU, the bytes per second that
        NVLink sends.
      network: bytes per second of a chip's share of the network between slices, or between machines with GPUs.
      axes: the number of axes of the torus. A collective over several axes uses the links of all these axes. 0 means
        GPUs that are connected by a switch.
      island: the largest number of chips that `link` connects; 0 means the whole slice.
      libtpu: the name of the chip in libtpu; '' means that plans use only the formula.
      tensorfloat32: the peak rate of a GPU's matrix products in tensorfloat32.
      float32: the peak rate of a GPU's matrix products in float32.
    """
    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    axes: int
    island: int = 0
    libtpu: str = ''
    tensorfloat32: float = 0.0
    float32: float = 0.0

    def rate(self, dtype: str, precision: str) -> float:
        """Returns the peak rate of matrix products, in operations per second.

        Args:
          dtype: config.model.dtype.
          precision: config.train.matmul_precision, except 'auto'.
        """
        if dtype == 'bfloat16' or precision == 'bfloat16':
            return self.flops
        if precision == 'float32':
            return self.float32 or self.flops / FLOAT32_PASSES
        return self.tensorfloat32 or self.flops  # JAX's default for float32 activations: bfloat16 on TPUs

    @property
    def available(self) -> float:
        """The bytes of the device's memory that a program can use. On a GPU, JAX uses only a share of the memory."""
        return self.memory if self.axes else self.memory * gpu_share(os.environ)


# The memory of GPUs is the total that CUDA reports, which is a little less than 80 GiB.
CHIPS = {chip.name: chip for chip in (
    Chip('v4', 275e12, 32 * 2 ** 30, 1.228e12, 9e10, 6.25e9, 3, libtpu='v4'),
    Chip('v5e', 197e12, 16 * 2 ** 30, 8.19e11, 9e10, 3.125e9, 2, libtpu='v5e'),
    Chip('v5p', 459e12, 95 * 2 ** 30, 2.765e12, 1.8e11, 6.25e9, 3, libtpu='v5'),
    Chip('v6e', 918e12, 32 * 2 ** 30, 1.64e12, 1.8e11, 1.25e10, 2, libtpu='v6e'),
    Chip('a100', 312e12, 79 * 2 ** 30, 2.039e12, 3e11, 2.5e10, 0, island=8, tensorfloat32=156e12, float32=19.5e12),
    Chip('h100', 989e12, 79 * 2 ** 30, 3.35e12, 4.5e11, 5e10, 0, island=8, tensorfloat32=494.5e12, float32=67e12),
)}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips of one kind and their connections: slices of a torus, or GPUs.

    Attributes:
      chip: the kind of the chips.
      shape: the shape of a slice.
      slices: the number of slices. The network connects the slices.
    """
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def devices(self) -> int:
        """The number of chips in all slices."""
        return math.prod(self.shape) * self.slices

    def __str__(self) -> str:
        shape = 'x'.join(map(str, self.shape))
        return f'{self.chip.name}:{shape}' + (f' x {self.slices} slices' if self.slices > 1 else '')


def parse_topology(text: str, slices: int = 1) -> Topology:
    """Parses a topology such as 'v5e:4x4', 'v5p:2x2x4' or 'h100:16'.

    Raises:
      UserError: if the chip is unknown, or the shape has the wrong number of sizes for the chip.
    """
    name, _, shape = text.partition(':')
    if name not in CHIPS:
        raise UserError(f'--topology={text}: unknown chip. Use one of {", ".join(CHIPS)}, as in v5e:4x4 or h100:8')
    chip = CHIPS[name]
    if not re.fullmatch(r'[1-9]\d{0,4}(x[1-9]\d{0,4})*', shape) or len(shape.split('x')) != (chip.axes or 1):
        example = 'x'.join(['4', '4', '4'][:chip.axes or 1])
        wanted = f'a shape of {chip.axes} sizes' if chip.axes else 'a number of devices'
        raise UserError(f'--topology={text}: {name} needs {wanted} up to 99,999, as in {name}:{example}')
    topology = Topology(chip, tuple(map(int, shape.split('x'))), slices)
    if topology.devices > MOST_DEVICES:
        raise UserError(f'--topology={text} --slices={slices}: {topology.devices:,} devices are more than a plan '
                        f'supports. Use at most {MOST_DEVICES:,}')
    return topology


def link_seconds(collectives: Iterable[Collective], topology: Topology, mesh: dict[str, int]) -> float:
    """Returns a lower bound of the time of a step's collectives in seconds.

    The bound assumes that the collectives run one after the other, and that all links run at full speed. For an array
    of B bytes and n devices, an all-gather, a reduce-scatter or an all-to-all moves B (n - 1) / n bytes into and out of
    each device. An all-reduce moves twice as many bytes. On a torus, n devices span some of the axes. The speed is
    the sum of the speeds of these axes, if there is no contention. Each slice, or each machine with GPUs, is a group,
    and m is the number of groups. First, each group reduces the array over its own devices. Then each device exchanges
    a share of m / n of the array over the network.
    """
    chip, per_slice, seconds = topology.chip, math.prod(topology.shape), 0.0
    if chip.island:
        per_slice = min(per_slice, chip.island)
    stride = {axis: math.prod(list(mesh.values())[place + 1:]) for place, axis in enumerate(mesh)}
    for collective in collectives:
        axes = collective.axes.split('+')
        reach = max((stride[axis] * mesh[axis] for axis in axes if axis in mesh), default=collective.size)
        groups = min(collective.size, max(1, -(-reach // per_slice)))
        within = max(1, collective.size // groups)
        ways = 2 if collective.kind == 'all-reduce' else 1
        if collective.kind == 'collective-permute':
            seconds += collective.bytes / (chip.link / 2)
            continue
        # A group of 2^k devices spans at most k axes of the torus.
        axes = sum(size > 1 for size in topology.shape) if chip.axes else 1
        axes_spanned = max(1, min(axes, within.bit_length() - 1))
        within_time = collective.bytes * (within - 1) / within / (chip.link * axes_spanned)
        between_time = collective.bytes / within * (groups - 1) / groups / chip.network
        seconds += ways * (within_time + between_time)
    return seconds


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds of a step's time in seconds, for arithmetic, for memory traffic and for links between devices."""
    arithmetic: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """A lower bound of the step's time. It assumes that arithmetic, memory traffic and links overlap completely."""
        return max(self.arithmetic, self.memory, self.links)

    @property
    def limit(self) -> str:
        """The name of the largest bound: 'arithmetic', 'memory' or 'links'."""
        return max(('arithmetic', 'memory', 'links'), key=lambda name: getattr(self, name))

    @property
    def share(self) -> float:
        """An upper bound of the utilisation: the FLOP/s of a step, divided by the peak rate (`Chip.rate`)."""
        return self.arithmetic / self.seconds
