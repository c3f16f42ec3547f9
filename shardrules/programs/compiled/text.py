"""The words of a compiled program's text: array types, instructions with their attributes, computations.

XLA prints an instruction on one line:

    %dot.3 = f32[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot_general"}
     name      type         op  operands           attributes

The attributes are most of the bytes, and few readers look at them. So they are kept as text, and split on first use.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import attrs

from shardrules.core.errors import ProgramTextError

# An array type: dtype, sizes, layout. Tuple types are read array by array: (f32[8]{0}, s32[])
_TYPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](\{[^{}]*\})?")
# The memory that an array is in: 0, or none, is the main memory of the device. bf16[8,128]{1,0:T(8,128)S(1)}
_SPACE = re.compile(r"S\((\d+)\)")
# The tiles that an array is kept in, after the order of its dims in memory, the last one first: {1,0:T(8,128)(2,1)}
_TILE = re.compile(r"T\((\d+(?:,\d+)*)\)")
_ORDER = re.compile(r"\{([\d,]+)")
# A layout says how many bits an element is stored in where XLA packs them: s4[5,3]{1,0:E(4)}
_STORED_BITS = re.compile(r"E\((\d+)\)")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Dtypes whose size is not in their name."""

HOST_MEMORY = 5
"""The memory space of the host, as XLA numbers them."""

_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\(")
_REFERENCE = re.compile(r"%([^\s,()]+)")
_BRACKETED = re.compile(r"\[.*?\]|\{.*?\}|\(.*?\)|/\*.*?\*/")
# Brackets and commas inside quoted text do not count: op_name="f(x, y)"
_BRACKET_OR_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}()\[\],]')
_ESCAPE = re.compile(rb"\\([0-7]{3}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_CONTROL = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_FIELD = re.compile(r'(\w+)=("[^"\\]*(?:\\.[^"\\]*)*"|[^\s}]+)')


@final
@attrs.frozen
class ArrayType:
    """The type of one array, as one device holds it."""

    dtype: str  # as XLA writes it: "f32", "bf16", "pred"
    shape: tuple[int, ...]
    bits: int
    """The bits of an element in memory. Dtypes of fewer than 8 bits take 8, unless XLA packs them."""
    memory_space: int = attrs.field(default=0, eq=False, repr=False)
    """The memory that it is in: 0 is the main memory of the device, 1 a memory beside its cores, 5 the host's."""
    layout: str = attrs.field(default="", eq=False, repr=False)
    """Its order in memory, as XLA prints it."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes in memory, without the padding of a layout."""
        return -(-self.size * self.bits // 8)

    @functools.cached_property
    def tile(self) -> tuple[tuple[int, int], ...]:
        """The tiles in which a TPU keeps it: of its last dims in memory each with its size there, the last one first.

        Those of `bf16[30,64]{1,0:T(8,128)(2,1)}` are 128 elements of dim 1 by 8 of dim 0. See
        https://openxla.org/xla/tiled_layout.
        """
        tile, order = _TILE.search(self.layout), _ORDER.match(self.layout)
        if tile is None or order is None:
            return ()
        sizes = [int(size) for size in reversed(tile[1].split(","))]
        dims = [int(dim) for dim in order[1].split(",") if dim]
        return tuple(zip(dims, sizes, strict=False)) if len(sizes) <= len(dims) else ()

    @functools.cached_property
    def stored_bytes(self) -> int:
        """The bytes in memory: tiles at the ends are as large as all others."""
        padded = {dim: -(-self.shape[dim] // size) * size for dim, size in self.tile}
        return -(-math.prod(padded.get(dim, size) for dim, size in enumerate(self.shape)) * self.bits // 8)

    def piece_bytes(self, sizes: Sequence[int]) -> int:
        """The bytes of a part of these sizes that are together in memory.

        A row is in as many pieces as tiles, since a tile holds parts of several rows.
        """
        if len(self.tile) > 1:
            (last, width), (dim, height) = self.tile[:2]
            if sizes[dim] < min(height, self.shape[dim]):
                return min(sizes[last], width) * max(self.bits, _WORD_BITS) // 8
        return -(-math.prod(sizes) * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


_WORD_BITS = 32
"""Narrower elements share words with those of the rows beside them."""

LOOP = "while"
"""The operation of a loop."""


@final
@attrs.frozen
class Instruction:
    """One instruction of a computation."""

    name: str  # unique in the program
    op: str  # as XLA writes it: "dot", "all-gather-start"
    types: tuple[ArrayType, ...]  # of the results, tuples flattened
    operands: tuple[str, ...]  # names of instructions
    literal: str = ""  # what a constant or a parameter has in its brackets: "12"
    text: str = attrs.field(default="", repr=False)  # the attributes, as printed

    @functools.cached_property
    def attributes(self) -> Mapping[str, str]:
        """Its attributes by name, each as it is printed."""
        return read_attributes(self.text)

    @functools.cached_property
    def backend_config(self) -> Mapping[str, Any]:
        """The compiler's own notes on the instruction; empty without any."""
        text = self.attributes.get("backend_config", "")
        try:
            config = json.loads(_unquoted(text) if text.startswith('"') else text or "{}")
        except ValueError:  # some backends do not write JSON
            return {}
        return config if isinstance(config, dict) else {}

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """The origin of the instruction: any of `op_name`, `source_file`, `source_line`, `stack_frame_id`."""
        fields = _FIELD.findall(self.attributes.get("metadata", ""))
        return {name: _unquoted(value) if value.startswith('"') else value for name, value in fields}

    @property
    def op_name(self) -> str:
        """The path of its JAX operation, `"jit(step)/mlp/dot_general"`; for a parameter, the path of its argument."""
        return self.metadata.get("op_name", "")

    @property
    def custom_call_target(self) -> str:
        """The function that a custom call calls; empty for other operations."""
        return self.attributes.get("custom_call_target", "").strip('"') if self.op.startswith("custom-call") else ""

    @property
    def nbytes(self) -> int:
        """The bytes of all results together."""
        return sum(result.nbytes for result in self.types)

    def dims(self, attribute: str) -> tuple[int, ...]:
        """Returns the integers of an attribute, such as `lhs_contracting_dims={1}`; none where it is missing."""
        return tuple(map(int, re.findall(r"\d+", self.attributes.get(attribute, ""))))

    def references(self, attribute: str) -> tuple[str, ...]:
        """Returns the computations that an attribute names, such as `calls=%fused`; none where it is missing."""
        names = self.attributes.get(attribute, "").strip("{}").split(",")
        return tuple(name.strip().removeprefix("%") for name in names if name.strip())


@final
@attrs.frozen
class Computation:
    """A computation: instructions, each after its operands. The result of the instruction `root` is its result."""

    name: str
    instructions: tuple[Instruction, ...] = attrs.field(repr=False)
    root: str

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For the name of each instruction that is used, its users."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(instructions) for name, instructions in users.items()}

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, in order."""
        parameters = [instruction for instruction in self.instructions if instruction.op == "parameter"]
        return tuple(sorted(parameters, key=lambda parameter: int(parameter.literal)))

    def operand_types(self, instruction: Instruction) -> tuple[ArrayType, ...]:
        """Returns the types of an instruction's operands, tuples flattened."""
        return tuple(operand for name in instruction.operands for operand in self.by_name[name].types)

    @classmethod
    def read(cls, name: str, lines: list[str], types_by_text: dict[str, tuple[ArrayType, ...]]) -> Self:
        """Reads the lines between the braces of a computation. `types_by_text` is as in `read_instruction`."""
        pairs = [read_instruction(line, types_by_text) for line in lines]
        if not pairs:
            raise ProgramTextError(f"computation {name!r} is empty")
        roots = [instruction.name for instruction, is_root in pairs if is_root]
        # A computation without a marked root returns its last instruction.
        return cls(name, tuple(instruction for instruction, _ in pairs), roots[0] if roots else pairs[-1][0].name)


def read_types(text: str) -> tuple[ArrayType, ...]:
    """Reads the arrays of a type such as `"(f32[8]{0}, s32[])"`, which may contain layouts and comments."""
    return tuple(
        # A dynamic dimension is printed with its bound: f32[<=8]
        ArrayType(
            dtype,
            tuple(int(size.strip("<=? ")) for size in sizes.split(",") if size),
            _bits(dtype, layout),
            _space(layout),
            layout,
        )
        for dtype, sizes, layout in _TYPE.findall(text)
    )


def _space(layout: str) -> int:
    space = _SPACE.search(layout) if layout else None
    return int(space[1]) if space else 0


def _bits(dtype: str, layout: str) -> int:
    packed = _STORED_BITS.search(layout) if layout else None
    if packed:
        return int(packed[1])
    if dtype in _BITS:
        return _BITS[dtype]
    return max(8, int("".join(re.findall(r"\d+", dtype)[:1]) or 0))  # the first number: f8e4m3fn has 8 bits


def begins_instruction(line: str) -> bool:
    """A line of a computation is an instruction, or the first line of one."""
    return _INSTRUCTION.match(line) is not None


def read_instruction(line: str, types_by_text: dict[str, tuple[ArrayType, ...]]) -> tuple[Instruction, bool]:
    """Reads one line of a computation, and whether it is the root.

    Programs repeat few types on thousands of lines: `types_by_text` keeps those that have been read.
    """
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ProgramTextError(f"not an instruction as XLA prints them: {line[:200]!r}")
    root, name, type_text, op = match.groups()
    types = types_by_text.get(type_text)
    if types is None:
        types = types_by_text[type_text] = read_types(type_text)
    end = _closing_bracket(line, match.end())
    inside, rest = line[match.end() : end], line[end + 1 :].removeprefix(", ")
    # %c = s32[] constant(12) and %p = f32[8] parameter(0) have no operands in their brackets.
    if op in ("constant", "parameter"):
        return Instruction(name, op, types, (), inside, rest), bool(root)
    operands = _REFERENCE.findall(inside)
    if not operands and inside:  # printed without percent signs: dot(f32[8,4]{1,0} x, f32[4,4]{1,0} w)
        operands = [operand.split()[-1] for operand in _BRACKETED.sub("", inside).split(",") if operand.strip()]
    return Instruction(name, op, types, tuple(operands), "", rest), bool(root)


def _closing_bracket(line: str, start: int) -> int:
    """The position of the bracket that closes the one just before `start`."""
    end = line.find(")", start)
    # Nearly every line has no bracket in between: two searches of the string are much faster than the loop below.
    if end < 0 or line.find("(", start, end) < 0:
        return end if end >= 0 else len(line)
    depth = 0
    for match in _BRACKET_OR_TEXT.finditer(line, start):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            if not depth:
                return match.start()
            depth -= 1
    return len(line)


def read_attributes(text: str) -> dict[str, str]:
    """Splits `name=value, name=value`, where values may contain brackets, commas and quoted text."""
    # Cut at commas outside of brackets: values may be {[0:4], [1:2]}.
    cuts, depth = [-1], 0
    for match in _BRACKET_OR_TEXT.finditer(text):
        mark = match[0]
        if mark in "{([":
            depth += 1
        elif mark in "})]":
            depth -= 1
        elif mark == "," and not depth:
            cuts.append(match.start())
    cuts.append(len(text))
    parts = (text[start + 1 : end].strip().partition("=") for start, end in itertools.pairwise(cuts))
    return {name: value for name, equals, value in parts if equals}


def _unquoted(quoted: str) -> str:
    """The text between quotes, without escapes: XLA may escape every byte that is not ASCII, `\\303\\244` for an ä."""
    inner = quoted[1:-1]
    return _ESCAPE.sub(_unescaped, inner.encode()).decode(errors="replace") if "\\" in inner else inner


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if code.isdigit():
        return bytes([int(code, 8) & 255])
    return bytes([int(code[1:], 16)]) if len(code) > 1 else _CONTROL.get(code, code)
