"""Parses HLO, the text of a compiled program."""

import dataclasses
import re

ARRAY = re.compile(r'(\w+)\[([\d,]*)\](\{[^{}]*\})?')
COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO: name = shape opcode(arguments), attributes."""
    name: str
    shape: str  # the shape of the result: 'f32[4096,128]{1,0}'
    opcode: str
    operands: tuple[str, ...]  # the instructions that the arguments name
    arguments: str
    attributes: str

    @property
    def place(self) -> str:
        """The place in the model that the instruction comes from, as a path; '' if XLA does not give it."""
        return self.attribute(r'op_name="([^"]*)"')

    def called(self, how: str) -> str:
        """Returns the name of the computation that the attribute `how` ('calls', 'body', ...) names, or ''."""
        return self.attribute(rf'{how}=%?([\w.\-]+)')

    def attribute(self, pattern: str) -> str:
        """Returns the part of the attributes that the group of a regular expression matches, or ''."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ''


Computation = dict[str, Instruction]  # by name


def computations_of(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of a program by name, and the name of the one that it begins with."""
    computations, entry, here = {}, '', {}
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            here = computations[begins[2]] = {}
            entry = begins[2] if begins[1] else entry
        elif read := INSTRUCTION.match(line):
            name, shape, opcode, rest = read.groups()
            arguments, attributes = _closed(rest)
            operands = tuple(re.findall(r'%([\w.\-]+)', arguments))
            here[name] = Instruction(name, shape, opcode, operands, arguments, attributes)
    return computations, entry


def arrays_of(shape: str) -> list[tuple[str, list[int], str]]:
    """Returns the dtype, the sizes and the layout of each array of a shape: [('f32', [4096, 128], '{1,0}')]."""
    return [(dtype, [int(size) for size in sizes.split(',') if size], layout)
            for dtype, sizes, layout in ARRAY.findall(shape)]


def _closed(text: str) -> tuple[str, str]:
    """Returns the text before the parenthesis that closes the opcode's, and the text after it."""
    depth = 1
    for end, letter in enumerate(text):
        depth += (letter == '(') - (letter == ')')
        if not depth:
            return text[:end], text[end + 1:]
    return text, ''
