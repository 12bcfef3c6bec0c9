"""Computes the memory traffic and the collectives of a compiled program from its HLO text, for one device.

XLA's own figure, `cost_analysis()['bytes accessed']`, is neither an upper nor a lower bound. XLA counts the body of a
loop only once, for any number of iterations. On TPUs, XLA also counts operands that stay in the core's own memory
(VMEM). This module counts the body of a loop once per iteration if the number of iterations is known. It does not count
operands in VMEM, which it recognises by the memory space in the layout of an array. The result is an upper limit: all
bytes of an operand count, even if a fusion reads only some of them. For slices and gathers, only the bytes that they
read count.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tools.hlo import Instruction, arrays_of, computations_of

SIZES = {'pred': 1, 's8': 1, 'u8': 1, 'f8e4m3fn': 1, 'f8e5m2': 1, 'bf16': 2, 'f16': 2, 's16': 2, 'u16': 2, 'f32': 4,
         's32': 4, 'u32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8}
# Instructions without traffic. The ends of asynchronous operations are included, because the starts are counted.
FREE = {'parameter', 'get-tuple-element', 'tuple', 'bitcast', 'constant', 'after-all', 'partition-id', 'replica-id',
        'opt-barrier', 'async-update', 'async-done', 'copy-done', 'slice-done', 'all-reduce-done', 'all-gather-done',
        'collective-permute-done', 'reduce-scatter-done', 'all-to-all-done', 'get-dimension-size', 'domain'}
COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
PARTIAL = {'dynamic-slice', 'slice', 'gather'}  # instructions that read only the returned part of their first operand

NOTHING = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound|Sharding)"')
CALLED = re.compile(r'(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)')


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation of a compiled program.

    Attributes:
      name: the name in the program.
      opcode: the kind of the instruction.
      place: the path of the operation in the model.
      bytes: the bytes that the operation moves between device memory and cores in a step.
      times: the number of executions in a step.
    """
    name: str
    opcode: str
    place: str
    bytes: float
    times: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """All communication of one kind in a step.

    Attributes:
      kind: one of COLLECTIVES.
      axes: the axes of the mesh along which the devices communicate, joined by '+'.
      size: the number of devices in a group.
      bytes: the bytes of the whole arrays per step: after an all-gather, or before a reduce-scatter.
      times: the number of executions per step.
    """
    kind: str
    axes: str
    size: int
    bytes: float
    times: int


class Program:
    """A compiled program for one device of a mesh, from its HLO text."""

    def __init__(self, text: str, mesh: Mapping[str, int], cores: bool = False):
        """Parses the text.

        Args:
          text: the HLO of the program.
          mesh: {axis: size} of the mesh, in the order of the devices.
          cores: whether operands and results in the cores' own memory also count as traffic.
        """
        self._array_bytes = functools.partial(_array_bytes, device=not cores)
        self._computations, self._entry = computations_of(text)
        self._mesh = mesh
        fusions = {name: fusion for name, fusion in self._computations.items() if name.startswith('fused')}
        self._users = {name: {part: [user for user in fusion.values() if part in user.operands] for part in fusion}
                       for name, fusion in fusions.items()}

    def ops(self) -> list[Op]:
        """Returns the operations of a step, in order of decreasing traffic.

        For a conditional, only the operations of the branch with the most traffic are returned.
        """
        return sorted(self._ops(self._entry, 1), key=lambda op: -op.bytes)

    def traffic(self) -> float:
        """Returns the bytes that a step moves between the device's memory and its cores."""
        return sum(op.bytes for op in self.ops())

    def collectives(self) -> list[Collective]:
        """Returns the communication of a step. Collectives with the same kind, axes and size form one `Collective`."""
        total, count = collections.defaultdict[tuple[str, str, int], float](float), collections.Counter()
        seen = set()
        for line, times in self._everywhere(self._entry, 1):
            kind = line.opcode.removesuffix('-start')
            channel = line.attribute(r'channel_id=(\d+)')
            if kind not in COLLECTIVES or channel and channel in seen:
                continue  # XLA may split a collective into several pieces with the same channel
            seen.add(channel)
            group = group_of(line.attributes, math.prod(self._mesh.values()))
            if len(group) > 1:
                key = kind, axes_of(group, self._mesh), len(group)
                total[key] += times * self._payload(line, kind, len(group))
                count[key] += times
        return [Collective(*key, total[key], count[key]) for key in total]

    def _payload(self, line, kind, size):
        arrays = _array_bytes(line.shape)
        if line.opcode.endswith('-start') and kind != 'all-reduce' and len(arrays) > 1:
            # The shape contains the operands, then the results. An all-gather may have several of each. The shape of a
            # collective-permute may end with two numbers.
            return sum(arrays[len(arrays) // 2:]) if kind == 'all-gather' else max(arrays)
        return sum(arrays) * (size if kind == 'reduce-scatter' else 1)

    def _ops(self, name: str, times: int) -> Iterator[Op]:
        computation = self._computations[name]
        for line in computation.values():
            if line.opcode == 'while':
                yield from self._ops(line.called('body'), times * self._iterations(line))
            elif line.opcode == 'conditional':
                branches = [list(self._ops(branch, times)) for branch in _branches(line)]
                yield from max(branches, key=lambda ops: sum(op.bytes for op in ops))
            elif line.opcode == 'call':
                yield from self._ops(line.called('to_apply'), times)
            elif line.opcode not in FREE and not NOTHING.search(line.attributes):
                yield Op(line.name, line.opcode, line.place, times * self._bytes(line, computation), times)

    def _everywhere(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        """Yields every instruction, including the instructions inside fusions, with its number of executions."""
        for line in self._computations.get(name, {}).values():
            yield line, times
            iterations = self._iterations(line) if line.opcode == 'while' else 1
            for called in dict.fromkeys([*CALLED.findall(line.attributes), *_branches(line)]):
                yield from self._everywhere(called, times * iterations)

    def _iterations(self, loop: Instruction) -> int:
        """Returns the number of iterations of a loop.

        If the HLO text does not contain this number, returns the largest constant in the loop's condition. This is an
        upper limit.
        """
        if count := loop.attribute(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)'):
            return int(count)
        condition = self._computations.get(loop.called('condition'), {}).values()
        constants = [line.arguments for line in condition if line.opcode == 'constant' and line.arguments.isdigit()]
        return max(map(int, constants), default=1)

    def _bytes(self, line: Instruction, computation: Mapping[str, Instruction]) -> float:
        written = sum(self._array_bytes(line.shape))
        if line.opcode in ('copy-start', 'slice-start'):  # the shape contains the result, the operand and a flag
            moved, ends = min(_array_bytes(line.shape)[:2]), self._array_bytes(line.shape)[:2]
            return moved * sum(end > 0 for end in ends)
        if line.opcode in PARTIAL:
            return written + min(written, sum(self._array_bytes(computation[line.operands[0]].shape)))
        if line.opcode == 'dynamic-update-slice':
            return 2 * sum(self._array_bytes(computation[line.operands[1]].shape)) if written else 0.0
        inside = self._computations.get(line.called('calls'), {}) if line.opcode == 'fusion' else {}
        in_place = {}  # {parameter that is updated in place: bytes of the update}
        for update in (line for line in inside.values() if line.opcode == 'dynamic-update-slice'):
            into = inside[update.operands[0]]
            while into.opcode == 'bitcast':
                into = inside[into.operands[0]]
            if into.opcode == 'parameter':
                in_place[into.name] = sum(_array_bytes(inside[update.operands[1]].shape))
        parameters = {int(line.arguments): line.name for line in inside.values() if line.opcode == 'parameter'}
        users = self._users.get(line.called('calls'), {}) if inside else {}
        read = 0.0
        for index, operand in enumerate(line.operands):
            if operand not in computation:
                continue
            whole = sum(self._array_bytes(computation[operand].shape))
            if (name := parameters.get(index, '')) in in_place:
                written -= max(0, whole - in_place[name]) if written >= whole else 0
                continue
            reading = users.get(name, ())
            if whole and reading and all(user.opcode in PARTIAL for user in reading):
                whole = min(whole, sum(sum(_array_bytes(user.shape)) for user in reading))
            read += whole
        return written + read


def group_of(attributes: str, devices: int) -> list[int]:
    """Returns the first group of communicating devices in a collective's attributes.

    If the attributes contain no groups, returns all devices.

    HLO writes groups in three forms: as a list, {{0,1},{2,3}}; as a reshaped range, [2,2]<=[4], possibly with a
    transposition T(1,0); and as axes of a mesh, mesh['x'=2,'y'=2] {'x'}. A mesh may have an order of devices,
    device_ids=([2,2]T(1,0)).
    """
    if pairs := re.search(r'source_target_pairs=\{\{(\d+),(\d+)\}', attributes):
        return [int(pairs[1]), int(pairs[2])]
    if written := re.search(r'replica_groups=\{\{([\d,]+)\}', attributes):
        return _numbers(written[1])
    if ranged := re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes):
        shape, source, order = map(_numbers, ranged.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        return ids.transpose(order or None).reshape(shape)[0].tolist()
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](.*?)\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        ids, communicating = np.arange(math.prod(sizes.values())), re.findall(r"'(\w+)'", named[3])
        if ordered := re.search(r'device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)', named[2]):
            source, order = map(_numbers, ordered.groups())
            ids = ids.reshape(source).transpose(order or None)
        elif written := re.search(r'device_ids=\(([\d,]+)\)', named[2]):
            ids = np.array(_numbers(written[1]))
        ids = ids.reshape(list(sizes.values()))
        return ids[tuple(slice(None) if name in communicating else 0 for name in sizes)].reshape(-1).tolist()
    return list(range(devices))


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in (text or '').split(',') if number]


def axes_of(group: Sequence[int], mesh: Mapping[str, int]) -> str:
    """Returns the names of the mesh axes along which the devices of a group differ."""
    places = np.stack(np.unravel_index(np.asarray(group), list(mesh.values())))
    return '+'.join(axis for axis, row in zip(mesh, places, strict=True) if len(set(row.tolist())) > 1)


def _array_bytes(shape: str, device: bool = False) -> list[float]:
    """Returns the bytes of each array of a shape. If `device`, returns 0 for arrays in the core's memory ('S(1)')."""
    return [0 if device and re.search(r'S\([1-9]', layout) else
            SIZES[dtype] * math.prod(sizes) for dtype, sizes, layout in arrays_of(shape) if dtype in SIZES]


def _branches(line: Instruction) -> list[str]:
    if several := line.attribute(r'branch_computations=\{([^}]*)\}'):
        return re.findall(r'%?([\w.\-]+)', several)
    return re.findall(r'(?:true|false)_computation=%?([\w.\-]+)', line.attributes)
