"""Parses HLO, XLA's text form of a compiled program."""

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
    operands: tuple[str, ...]  # the names of the instructions in the arguments
    arguments: str
    attributes: str

    @property
    def place(self) -> str:
        """The path of the instruction in the model, from XLA's op_name; '' if the instruction has no op_name."""
        return self.attribute(r'op_name="([^"]*)"')

    def called(self, attribute: str) -> str:
        """Returns the name of the computation in an attribute such as 'calls' or 'body', or ''."""
        return self.attribute(rf'{attribute}=%?([\w.\-]+)')

    def attribute(self, pattern: str) -> str:
        """Searches the attributes for a regular expression. Returns the text of its first group, or ''."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ''


Computation = dict[str, Instruction]  # by name


def computations_of(text: str) -> tuple[dict[str, Computation], str]:
    """Parses the HLO of a program. Returns {name: computation}, and the name of the entry computation."""
    computations, entry, computation = {}, '', {}
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            computation = computations[begins[2]] = {}
            entry = begins[2] if begins[1] else entry
        elif read := INSTRUCTION.match(line):
            name, shape, opcode, remaining = read.groups()
            arguments, attributes = _closed(remaining)
            operands = tuple(re.findall(r'%([\w.\-]+)', arguments))
            computation[name] = Instruction(name, shape, opcode, operands, arguments, attributes)
    return computations, entry


def arrays_of(shape: str) -> list[tuple[str, list[int], str]]:
    """Returns the dtype, the sizes and the layout of each array of a shape: [('f32', [4096, 128], '{1,0}')]."""
    return [(dtype, [int(size) for size in sizes.split(',') if size], layout)
            for dtype, sizes, layout in ARRAY.findall(shape)]


def _closed(text: str) -> tuple[str, str]:
    """Splits the text after `opcode(` at its closing parenthesis. Returns the text before and after the parenthesis."""
    depth = 1
    for end, letter in enumerate(text):
        depth += (letter == '(') - (letter == ')')
        if not depth:
            return text[:end], text[end + 1:]
    return text, ''
