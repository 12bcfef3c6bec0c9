"""Lists the operations of a compiled program with their kinds, their places in the model and their flops."""

import dataclasses
import math
import re
from collections.abc import Mapping

from tools.hlo import Computation, Instruction, arrays_of, computations_of

COPIES = {'bitcast', 'broadcast', 'concatenate', 'constant', 'convert', 'copy', 'get-tuple-element', 'iota', 'pad',
          'parameter', 'reshape', 'reverse', 'slice', 'transpose', 'tuple', 'dynamic-slice', 'dynamic-update-slice'}
CONTROL = {'while', 'conditional', 'call'}
RANDOM = re.compile(r'_uniform|_bernoulli|random_bits|threefry|rng_bit_generator|_randint')


@dataclasses.dataclass
class Op:
    """An operation of a compiled program: an instruction, or several instructions that XLA has fused.

    Attributes:
      name: the name in the program.
      kind: the kind of the operation (see `kind_of`).
      place: the place in the model (see `place_of`).
      shape: the shape of the result.
      flops: the number of floating-point operations in matrix products; NaN if it is unknown.
      fused: whether the operation is a part of another operation.
    """
    name: str
    kind: str
    place: str
    shape: str
    flops: float
    fused: bool = False


def ops_of(text: str, vocab_size: int) -> dict[str, Op]:
    """Returns {name: operation} of a compiled program, including the operations inside loops."""
    computations, _ = computations_of(text)
    fused = {line.called('calls') for computation in computations.values() for line in computation.values()
             if line.opcode == 'fusion'}
    return {line.name: _op(line, computation, computations.get(line.called('calls'), {}), vocab_size, name in fused)
            for name, computation in computations.items() for line in computation.values()}


def _op(line: Instruction, computation: Computation, inside: Computation, vocab_size: int, fused: bool) -> Op:
    """Returns the operation of an instruction of `computation`. `inside` contains the instructions of a fusion."""
    parts = list(inside.values()) or [line]
    products = [part for part in parts if part.opcode == 'dot']
    places = (part.place for part in (*products, line, *reversed(parts)) if part.place)
    place = next(places, '') or _nearby(line, computation)
    return Op(line.name, kind_of(line, parts, place, vocab_size), place_of(place), line.shape.partition('{')[0],
              sum(flops(product, inside or computation) for product in products), fused)


def _nearby(line: Instruction, computation: Computation) -> str:
    """Returns the place of a neighbour, for an instruction without a place, such as a copy that XLA has added.

    A neighbour computes an operand of the instruction, or uses its result. Returns '' if no near instruction has a
    place.
    """
    for step in (lambda user: [computation[name] for name in user.operands if name in computation],
                 lambda operand: [user for user in computation.values() if operand.name in user.operands]):
        near = [line]
        for _ in range(4):
            near = [neighbour for start in near for neighbour in step(start)]
            if places := [neighbour.place for neighbour in near if '/' in neighbour.place]:
                return places[0]
    return ''


def flops(dot: Instruction, among: Mapping[str, Instruction]) -> int:
    """Returns the number of floating-point operations of a matrix product: 2 m k n for arrays [m, k] and [k, n]."""
    left = dimensions(among[dot.operands[0]].shape)
    contracted = re.findall(r'\d+', dot.attribute(r'lhs_contracting_dims=\{([\d,]*)\}'))
    return 2 * math.prod(dimensions(dot.shape)) * math.prod(left[int(axis)] for axis in contracted)


def dimensions(shape: str) -> list[int]:
    """Returns the sizes of the first array in a shape: [4096, 128] for 'f32[4096,128]{1,0}'."""
    return next((sizes for _, sizes, _ in arrays_of(shape)), [])


def kind_of(line: Instruction, parts: list[Instruction], op_name: str, vocab_size: int) -> str:
    """Returns the kind of an operation. `parts` are the instructions of a fusion, or only `line`.

    The first rule that matches determines the kind.
    """
    opcodes, paths = {part.opcode for part in parts}, [part.place for part in parts if part.place] or [op_name]
    wide = any(vocab_size in (sizes := dimensions(part.shape)) and len(sizes) > 1 for part in parts)
    update = 'jvp(' not in op_name and op_name.startswith('jit(train_step)/')
    if line.opcode in CONTROL:
        return 'loops'
    if 'dot' in opcodes:
        wide |= any(vocab_size in dimensions(part.shape) for part in parts)
        batched = any(part.attribute(r'lhs_batch_dims=\{(\d)') for part in parts)
        return 'products, vocabulary' if wide else 'products, batched' if batched else 'products'
    if any(map(RANDOM.search, paths)) and not update:
        return 'random bits'
    if update:
        return 'optimizer'
    if opcodes & {'sort'} or 'top_k' in op_name or 'TopK' in line.attributes:
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
    """Returns the place of an operation in the model, derived from XLA's op_name.

    The place of 'jit(train_step)/jvp(Transformer)/encoder/layers_0/norm/add' is 'encoder/layers/norm/add'. The place
    has no names of transformations, no names of methods and no indices of layers. So it is the same in all layers.
    """
    parts = [re.sub(r'_\d+$', '', part) for part in op_name.split('/')
             if not re.match(r'(jit|jvp|transpose|vmap|checkpoint)\(|\w+\.\w+$|(while|body|closed_call)$', part)]
    return '/'.join(parts) + (' (backward)' if 'transpose(' in op_name else '')
