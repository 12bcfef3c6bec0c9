"""Reads the cost of a compiled program for a device from its HLO text: memory traffic and collectives.

XLA's own figure, `cost_analysis()['bytes accessed']`, is not a bound. XLA counts the body of a loop once, whatever the
number of iterations. On TPUs, XLA also counts operands that stay in the core's own memory (VMEM). This module counts
the body of a loop once per iteration if the number of iterations is known. It leaves out operands in VMEM, which are
marked by the memory space in the layout of an array. The result is still an upper limit: if a fusion reads a part of an
operand, the whole operand counts, unless the fusion reads this part by a slice or a gather.
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
PARTIAL = {'dynamic-slice', 'slice', 'gather'}  # these read only the part of their first operand that they return

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
          cores: whether operands and results that stay in the cores also count as traffic.
        """
        self._array_bytes = functools.partial(_array_bytes, device=not cores)
        self._computations, self._entry = computations_of(text)
        self._mesh = mesh
        self._users = {name: {operand: [one for one in each.values() if operand in one.operands] for operand in each}
                       for name, each in self._computations.items() if name.startswith('fused')}

    def ops(self) -> list[Op]:
        """Returns the operations of a step, in order of decreasing traffic.

        For a conditional, only the operations of the branch with the most traffic are returned.
        """
        return sorted(self._ops(self._entry, 1), key=lambda op: -op.bytes)

    def traffic(self) -> float:
        """Returns the bytes that a step moves between the device's memory and its cores."""
        return sum(op.bytes for op in self.ops())

    def collectives(self) -> list[Collective]:
        """Returns the collectives of a step. Collectives with the same kind, axes and size are added up."""
        total, count = collections.defaultdict[tuple[str, str, int], float](float), collections.Counter()
        seen = set()
        for one, times in self._everywhere(self._entry, 1):
            kind = one.opcode.removesuffix('-start')
            channel = one.attribute(r'channel_id=(\d+)')
            if kind not in COLLECTIVES or channel and channel in seen:
                continue  # XLA may split a collective into several pieces with the same channel
            seen.add(channel)
            group = group_of(one.attributes, math.prod(self._mesh.values()))
            if len(group) > 1:
                key = kind, axes_of(group, self._mesh), len(group)
                total[key] += times * self._payload(one, kind, len(group))
                count[key] += times
        return [Collective(*key, total[key], count[key]) for key in total]

    def _payload(self, one, kind, size):
        arrays = _array_bytes(one.shape)
        if one.opcode.endswith('-start') and kind != 'all-reduce' and len(arrays) > 1:
            return max(arrays)  # the shape contains operands and results
        return sum(arrays) * (size if kind == 'reduce-scatter' else 1)

    def _ops(self, name: str, times: int) -> Iterator[Op]:
        here = self._computations[name]
        for one in here.values():
            if one.opcode == 'while':
                yield from self._ops(one.called('body'), times * self._iterations(one))
            elif one.opcode == 'conditional':
                branches = [list(self._ops(branch, times)) for branch in _branches(one)]
                yield from max(branches, key=lambda ops: sum(op.bytes for op in ops))
            elif one.opcode == 'call':
                yield from self._ops(one.called('to_apply'), times)
            elif one.opcode not in FREE and not NOTHING.search(one.attributes):
                yield Op(one.name, one.opcode, one.place, times * self._bytes(one, here), times)

    def _everywhere(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        """Yields every instruction, including those inside fusions, with the number of its executions."""
        for one in self._computations.get(name, {}).values():
            yield one, times
            again = self._iterations(one) if one.opcode == 'while' else 1
            for called in dict.fromkeys([*CALLED.findall(one.attributes), *_branches(one)]):
                yield from self._everywhere(called, times * again)

    def _iterations(self, loop: Instruction) -> int:
        """Returns XLA's number of iterations of a loop.

        Without this number, returns the largest constant of the loop's condition, an upper limit.
        """
        if known := loop.attribute(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)'):
            return int(known)
        condition = self._computations.get(loop.called('condition'), {}).values()
        return max([int(one.arguments) for one in condition if one.opcode == 'constant' and one.arguments.isdigit()],
                   default=1)

    def _bytes(self, one: Instruction, here: Mapping[str, Instruction]) -> float:
        written = sum(self._array_bytes(one.shape))
        if one.opcode in ('copy-start', 'slice-start'):  # the shape contains the result, the operand and a flag
            moved, ends = min(_array_bytes(one.shape)[:2]), self._array_bytes(one.shape)[:2]
            return moved * sum(end > 0 for end in ends)
        if one.opcode in PARTIAL:
            return written + min(written, sum(self._array_bytes(here[one.operands[0]].shape)))
        if one.opcode == 'dynamic-update-slice':
            return 2 * sum(self._array_bytes(here[one.operands[1]].shape)) if written else 0.0
        inside = self._computations.get(one.called('calls'), {}) if one.opcode == 'fusion' else {}
        in_place = {}  # {parameter that is updated in place: bytes of the update}
        for update in (one for one in inside.values() if one.opcode == 'dynamic-update-slice'):
            into = inside[update.operands[0]]
            while into.opcode == 'bitcast':
                into = inside[into.operands[0]]
            if into.opcode == 'parameter':
                in_place[into.name] = sum(_array_bytes(inside[update.operands[1]].shape))
        parameters = {int(one.arguments): one.name for one in inside.values() if one.opcode == 'parameter'}
        users = self._users.get(one.called('calls'), {}) if inside else {}
        read = 0.0
        for index, operand in enumerate(one.operands):
            if operand not in here:
                continue
            whole = sum(self._array_bytes(here[operand].shape))
            if (name := parameters.get(index, '')) in in_place:
                written -= max(0, whole - in_place[name]) if written >= whole else 0
                continue
            reading = users.get(name, ())
            if whole and reading and all(user.opcode in PARTIAL for user in reading):
                whole = min(whole, sum(sum(_array_bytes(user.shape)) for user in reading))
            read += whole
        return written + read


def group_of(attributes: str, devices: int) -> list[int]:
    """Returns the first group of devices that communicate. Returns all devices if the text has no groups.

    Groups have three forms: a list, {{0,1},{2,3}}; a reshaped range, [2,2]<=[4], possibly with a transposition T(1,0);
    and axes of a mesh, mesh['x'=2,'y'=2] {'x'}. A mesh may have an order of devices, device_ids=([2,2]T(1,0)).
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
        ids, wanted = np.arange(math.prod(sizes.values())), re.findall(r"'(\w+)'", named[3])
        if ordered := re.search(r'device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)', named[2]):
            source, order = map(_numbers, ordered.groups())
            ids = ids.reshape(source).transpose(order or None)
        elif written := re.search(r'device_ids=\(([\d,]+)\)', named[2]):
            ids = np.array(_numbers(written[1]))
        ids = ids.reshape(list(sizes.values()))
        return ids[tuple(slice(None) if name in wanted else 0 for name in sizes)].reshape(-1).tolist()
    return list(range(devices))


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in (text or '').split(',') if number]


def axes_of(group: Sequence[int], mesh: Mapping[str, int]) -> str:
    """Returns the names of the mesh axes along which the devices of a group differ."""
    places = np.stack(np.unravel_index(np.asarray(group), list(mesh.values())))
    return '+'.join(axis for axis, row in zip(mesh, places, strict=True) if len(set(row.tolist())) > 1)


def _array_bytes(shape: str, device: bool = False) -> list[float]:
    """Returns the bytes of each array of a shape. With `device`, arrays in the core's memory ('S(1)', ...) count 0."""
    return [0 if device and re.search(r'S\([1-9]', layout) else
            SIZES[dtype] * math.prod(sizes) for dtype, sizes, layout in arrays_of(shape) if dtype in SIZES]


def _branches(one: Instruction) -> list[str]:
    if several := one.attribute(r'branch_computations=\{([^}]*)\}'):
        return re.findall(r'%?([\w.\-]+)', several)
    return re.findall(r'(?:true|false)_computation=%?([\w.\-]+)', one.attributes)
