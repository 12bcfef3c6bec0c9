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
    """An instruction, or several instructions that XLA has fused.

    Attributes:
      name: the name in the program.
      kind: a result of `kind_of`.
      place: the result of `place_of`.
      shape: the shape of the result.
      flops: the number of floating-point operations in matrix products.
      fused: whether the operation is a part of another operation.
    """
    name: str
    kind: str
    place: str
    shape: str
    flops: int
    fused: bool = False


def ops_of(text: str, vocab_size: int) -> dict[str, Op]:
    """Returns {name: operation} of a compiled program, including the operations inside loops."""
    computations, _ = computations_of(text)
    fused = {one.called('calls') for here in computations.values() for one in here.values() if one.opcode == 'fusion'}
    return {one.name: _op(one, here, computations.get(one.called('calls'), {}), vocab_size, name in fused)
            for name, here in computations.items() for one in here.values()}


def _op(one: Instruction, here: Computation, inside: Computation, vocab_size: int, fused: bool) -> Op:
    """Returns the operation of an instruction in the computation `here`. `inside` contains the parts of a fusion."""
    parts = list(inside.values()) or [one]
    products = [part for part in parts if part.opcode == 'dot']
    place = next((part.place for part in (*products, one, *reversed(parts)) if part.place), '') or _nearby(one, here)
    return Op(one.name, kind_of(one, parts, place, vocab_size), place_of(place), one.shape.partition('{')[0],
              sum(flops(product, inside or here) for product in products), fused)


def _nearby(one: Instruction, here: Computation) -> str:
    """Returns the place of an operand or a user of `one`. Copies that XLA has added have no place themselves."""
    for step in (lambda each: [here[name] for name in each.operands if name in here],
                 lambda each: [user for user in here.values() if each.name in user.operands]):
        near = [one]
        for _ in range(4):
            near = [other for each in near for other in step(each)]
            if places := [each.place for each in near if '/' in each.place]:
                return places[0]
    return ''


def flops(dot: Instruction, among: Mapping[str, Instruction]) -> int:
    """Returns the floating-point operations of a matrix product: 2 m k n, for arrays [m, k] and [k, n]."""
    left = dimensions(among[dot.operands[0]].shape)
    contracted = re.findall(r'\d+', dot.attribute(r'lhs_contracting_dims=\{([\d,]*)\}'))
    return 2 * math.prod(dimensions(dot.shape)) * math.prod(left[int(axis)] for axis in contracted)


def dimensions(shape: str) -> list[int]:
    """Returns the sizes of the first array in a shape: [4096, 128] for 'f32[4096,128]{1,0}'."""
    return next((sizes for _, sizes, _ in arrays_of(shape)), [])


def kind_of(one: Instruction, parts: list[Instruction], op_name: str, vocab_size: int) -> str:
    """Returns the kind of an operation that consists of `parts`. The first rule that applies gives the kind."""
    opcodes, paths = {each.opcode for each in parts}, [each.place for each in parts if each.place] or [op_name]
    wide = any(vocab_size in (sizes := dimensions(each.shape)) and len(sizes) > 1 for each in parts)
    update = 'jvp(' not in op_name and op_name.startswith('jit(train_step)/')
    if one.opcode in CONTROL:
        return 'loops'
    if 'dot' in opcodes:
        wide |= any(vocab_size in dimensions(each.shape) for each in parts)
        batched = any(each.attribute(r'lhs_batch_dims=\{(\d)') for each in parts)
        return 'products, vocabulary' if wide else 'products, batched' if batched else 'products'
    if any(map(RANDOM.search, paths)) and not update:
        return 'random bits'
    if update:
        return 'optimizer'
    if opcodes & {'sort'} or 'top_k' in op_name or 'TopK' in one.attributes:
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
    """Returns the place in the model of an operation, from XLA's op_name.

    The place of 'jit(train_step)/jvp(Transformer)/encoder/layers_0/norm/add' is 'encoder/layers/norm/add'. The names of
    transformations, methods and the numbers of layers are left out, so that a place has the same name in all layers.
    """
    parts = [re.sub(r'_\d+$', '', part) for part in op_name.split('/')
             if not re.match(r'(jit|jvp|transpose|vmap|checkpoint)\(|\w+\.\w+$|(while|body|closed_call)$', part)]
    return '/'.join(parts) + (' (backward)' if 'transpose(' in op_name else '')
