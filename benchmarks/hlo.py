"""What the operations of a compiled program are: read off its HLO text."""

import dataclasses
import math
import re
from collections.abc import Iterator

COPIES = {'bitcast', 'broadcast', 'concatenate', 'constant', 'convert', 'copy', 'get-tuple-element', 'iota', 'pad',
          'parameter', 'reshape', 'reverse', 'slice', 'transpose', 'tuple', 'dynamic-slice', 'dynamic-update-slice'}
CONTROL = {'while', 'conditional', 'call'}
RANDOM = re.compile(r'_uniform|_bernoulli|random_bits|threefry|rng_bit_generator|_randint')
INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)')
COMPUTATION = re.compile(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$')


@dataclasses.dataclass
class Instruction:
    """A line of HLO."""
    name: str
    shape: str     # 'f32[4096,128]{1,0}'
    opcode: str
    operands: list[str]
    text: str      # all that follows the opcode
    op_name: str   # the place in the model, JAX's path


@dataclasses.dataclass
class Op:
    """What XLA runs as one: an instruction, or several fused.

    Attributes:
      name: as in the program.
      kind: one of those that `kind_of` tells apart.
      place: where in the model, the numbers of layers left out; with what it computes there.
      shape: of its result.
      flops: of its matrix products; 0 where it has none.
      fused: it runs as a part of another one.
    """
    name: str
    kind: str
    place: str
    shape: str
    flops: int
    fused: bool = False


def ops_of(text: str, vocab_size: int) -> dict[str, Op]:
    """The operations of a compiled program by name, those inside loops too."""
    computations = dict(_computations(text))
    fused = {called[1] for called in re.finditer(r' fusion\(.*calls=%?([\w.\-]+)', text)}
    return {each.name: _op(each, computations, vocab_size, name in fused)
            for name, instructions in computations.items() for each in instructions.values()}


def _computations(text: str) -> Iterator[tuple[str, dict[str, Instruction]]]:
    name, found = '', {}
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            name, found = begins[1], {}
        elif line.startswith('}'):
            yield name, found
        elif read := INSTRUCTION.match(line):
            operands, _, attributes = read[4].partition(')')
            op_name = re.search(r'op_name="([^"]*)"', attributes)
            found[read[1]] = Instruction(read[1], read[2], read[3], re.findall(r'%([\w.\-]+)', operands), read[4],
                                         op_name[1] if op_name else '')


def _op(one: Instruction, computations: dict[str, dict[str, Instruction]], vocab_size: int, fused: bool) -> Op:
    called = re.search(r'calls=%?([\w.\-]+)', one.text)  # of a fusion
    inside = computations.get(called[1], {}) if called else {}
    parts = list(inside.values()) or [one]
    among = inside or next(each for each in computations.values() if one.name in each)
    products = [each for each in parts if each.opcode == 'dot']
    told = [each for each in (*products, one, *reversed(parts)) if each.op_name]
    op_name = told[0].op_name if told else _nearest_place(one, computations)
    return Op(one.name, kind_of(one, parts, op_name, vocab_size), place_of(op_name), one.shape.partition('{')[0],
              sum(flops(each, among) for each in products), fused)


def _nearest_place(one: Instruction, computations: dict[str, dict[str, Instruction]]) -> str:
    """Where what `one` copies comes from, or else where it goes: XLA's own copies tell no place."""
    siblings = next(each for each in computations.values() if each.get(one.name) is one)
    for step in (lambda each: [siblings[name] for name in each.operands if name in siblings],
                 lambda each: [other for other in siblings.values() if each.name in other.operands]):
        near = [one]
        for _ in range(4):
            near = [other for each in near for other in step(each)]
            if told := [each.op_name for each in near if '/' in each.op_name]:
                return told[0]
    return ''


def flops(dot: Instruction, among: dict[str, Instruction]) -> int:
    """2 m k n of a product of [m, k] and [k, n]."""
    left = dimensions(among[dot.operands[0]].shape)
    contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', dot.text)
    axes = [int(axis) for axis in contracted[1].split(',') if axis] if contracted else []
    return 2 * math.prod(dimensions(dot.shape)) * math.prod(left[axis] for axis in axes)


def dimensions(shape: str) -> list[int]:
    """The sizes in 'f32[4096,128]{1,0}'; of a tuple, those of its first array."""
    sizes = re.search(r'\[([\d,]*)\]', shape)
    return [int(size) for size in sizes[1].split(',') if size] if sizes else []


def kind_of(one: Instruction, parts: list[Instruction], op_name: str, vocab_size: int) -> str:
    """The kind that an operation of `parts` is counted under; of several that would do, the first."""
    opcodes, paths = {each.opcode for each in parts}, [each.op_name for each in parts if each.op_name] or [op_name]
    wide = any(vocab_size in (sizes := dimensions(each.shape)) and len(sizes) > 1 for each in parts)
    update = 'jvp(' not in op_name and op_name.startswith('jit(train_step)/')
    if one.opcode in CONTROL:
        return 'loops'
    if 'dot' in opcodes:
        wide |= any(vocab_size in dimensions(each.shape) for each in parts)
        batched = any('lhs_batch_dims={' in each.text and 'lhs_batch_dims={}' not in each.text for each in parts)
        return 'products, vocabulary' if wide else 'products, batched' if batched else 'products'
    if any(map(RANDOM.search, paths)) and not update:
        return 'random bits'
    if update:
        return 'optimizer'
    if opcodes & {'sort'} or 'top_k' in op_name or 'TopK' in one.text:
        return 'top-k'
    if opcodes & {'scatter', 'gather'} or re.search('gather|scatter', op_name):
        return 'gather, scatter'
    if wide:
        return 'passes, vocabulary'
    if opcodes <= COPIES:
        return 'copies'
    if any('softmax' in path for path in paths):
        return 'softmax'
    if any('norm' in path for path in paths):
        return 'norm'
    if any('ropout' in path for path in paths):
        return 'dropout'
    return 'other passes'


def place_of(op_name: str) -> str:
    """'jit(train_step)/jvp(Transformer)/encoder/layers_0/norm/add' -> 'encoder/layers/norm/add'.

    Transformations and methods are left out, and the numbers of layers, so that the same place of all has one name.
    """
    parts = [re.sub(r'_\d+$', '', part) for part in op_name.split('/')
             if not re.match(r'(jit|jvp|transpose|vmap|checkpoint)\(|\w+\.\w+$|(while|body|closed_call)$', part)]
    return '/'.join(parts) + (' (backward)' if 'transpose(' in op_name else '')
