"""The words of a compiled program's text: array types, instructions with their attributes, computations.

XLA prints an instruction on one line, `%name = type op(operands), attribute=value, ...`. What most readers of a program
never look at, the attributes, is kept as text and taken apart when it is asked for: they are most of the bytes.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Self, final

import attrs

from shardrules.core.errors import ProgramTextError

_TYPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](\{[^{}]*\})?")
_STORED_BITS = re.compile(r"E\((\d+)\)")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\(")
_REFERENCE = re.compile(r"%([^\s,()]+)")
_ASIDE = re.compile(r"\[.*?\]|\{.*?\}|\(.*?\)|/\*.*?\*/")
_BRACKET_OR_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}()\[\],]')
_ESCAPE = re.compile(rb"\\([0-7]{3}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_CONTROL = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_FIELD = re.compile(r'(\w+)=("[^"\\]*(?:\\.[^"\\]*)*"|[^\s}]+)')


@final
@attrs.frozen
class ArrayType:
    """The type of one array, as one device holds it.

    **Arguments:**

    - `dtype`: as XLA writes it: `"f32"`, `"bf16"`, `"pred"`.
    - `shape`: its shape.
    - `bits`: what an element takes in memory. Types of fewer than 8 bits take 8, unless XLA packs them.

    ```python
    assert read_types("s4[5,3]{1,0:E(4)}") == (ArrayType("s4", (5, 3), bits=4),)
    assert ArrayType("s4", (5, 3), bits=4).nbytes == 8
    ```
    """

    dtype: str
    shape: tuple[int, ...]
    bits: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """What it takes in memory, without the padding of a layout."""
        return -(-self.size * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@final
@attrs.frozen
class Instruction:
    """One instruction.

    **Arguments:**

    - `name`: its name, unique in the program.
    - `op`: what it does, as XLA writes it: `"dot"`, `"all-gather-start"`.
    - `types`: of its results; tuples are flattened.
    - `operands`: the names of what it takes.
    - `literal`: what stands in the brackets of a constant or a parameter: `"12"`.
    - `text`: its attributes as they are printed.

    ```python
    line = '%d = f32[4]{0} dot(%a, %b), lhs_contracting_dims={1}, metadata={op_name="mlp/dot" source_line=7}'
    one, is_root = read_instruction(line, {})
    assert (one.op, one.operands, one.op_name) == ("dot", ("a", "b"), "mlp/dot")
    assert one.attributes["lhs_contracting_dims"] == "{1}"
    ```
    """

    name: str
    op: str
    types: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    literal: str = ""
    text: str = attrs.field(default="", repr=False)

    @functools.cached_property
    def attributes(self) -> Mapping[str, str]:
        """Its attributes by name, each as it is printed."""
        return read_attributes(self.text)

    @functools.cached_property
    def backend_config(self) -> Mapping[str, Any]:
        """What the compiler says of its own plans for the instruction; empty where it says nothing."""
        text = self.attributes.get("backend_config", "")
        try:
            config = json.loads(_plain(text) if text.startswith('"') else text or "{}")
        except ValueError:  # some backends write a text of their own
            return {}
        return config if isinstance(config, dict) else {}

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """Where it comes from: `op_name`, `source_file`, `source_line`, `stack_frame_id`, as far as they are known."""
        fields = _FIELD.findall(self.attributes.get("metadata", ""))
        return {name: _plain(value) if value.startswith('"') else value for name, value in fields}

    @property
    def op_name(self) -> str:
        """The path of the JAX operation behind it, `"jit(step)/mlp/dot_general"`; of a parameter its argument's."""
        return self.metadata.get("op_name", "")

    @property
    def nbytes(self) -> int:
        """What its results take together."""
        return sum(one.nbytes for one in self.types)

    def dims(self, attribute: str) -> tuple[int, ...]:
        """Returns an attribute that is a list of whole numbers.

        **Arguments:**

        - `attribute`: its name, `"lhs_contracting_dims"`.

        **Returns:**

        The numbers; none where there is no such attribute.
        """
        return tuple(map(int, re.findall(r"\d+", self.attributes.get(attribute, ""))))

    def references(self, attribute: str) -> tuple[str, ...]:
        """Returns the computations that an attribute names.

        **Arguments:**

        - `attribute`: its name, `"calls"` or `"branch_computations"`.

        **Returns:**

        Their names; none where there is no such attribute.
        """
        names = self.attributes.get(attribute, "").strip("{}").split(",")
        return tuple(name.strip().removeprefix("%") for name in names if name.strip())


@final
@attrs.frozen
class Computation:
    """A computation: instructions, operands before those that use them.

    **Arguments:**

    - `name`: its name, unique in the program.
    - `instructions`: what it does.
    - `root`: the name of the instruction whose result is its own.
    """

    name: str
    instructions: tuple[Instruction, ...] = attrs.field(repr=False)
    root: str

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Its instructions by their names."""
        return {one.name: one for one in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For each instruction that is used, those which use it."""
        users: dict[str, list[Instruction]] = {}
        for one in self.instructions:
            for operand in dict.fromkeys(one.operands):
                users.setdefault(operand, []).append(one)
        return {name: tuple(each) for name, each in users.items()}

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, in their order."""
        found = [one for one in self.instructions if one.op == "parameter"]
        return tuple(sorted(found, key=lambda one: int(one.literal)))

    def operand_types(self, instruction: Instruction) -> tuple[ArrayType, ...]:
        """Returns the types of what an instruction takes.

        **Arguments:**

        - `instruction`: one of this computation.

        **Returns:**

        One after the other, tuples flattened.
        """
        return tuple(each for name in instruction.operands for each in self.by_name[name].types)

    @classmethod
    def read(cls, name: str, lines: list[str], memo: dict[str, tuple[ArrayType, ...]]) -> Self:
        """Reads the lines between the braces of a computation.

        **Arguments:**

        - `name`: the computation's.
        - `lines`: one for each instruction.
        - `memo`: types that have been read before, by their text; new ones are added.

        **Returns:**

        A `Computation`.

        **Raises:**

        `ProgramTextError` for a line that is no instruction.
        """
        read = [read_instruction(line, memo) for line in lines]
        roots = [one.name for one, is_root in read if is_root]
        if not read:
            raise ProgramTextError(f"computation {name!r} is empty")
        return cls(name, tuple(one for one, _ in read), roots[0] if roots else read[-1][0].name)


def read_types(text: str) -> tuple[ArrayType, ...]:
    """Reads a type; that of a tuple is flattened.

    **Arguments:**

    - `text`: for instance `"(f32[8]{0}, s32[])"`; layouts and comments may stand in it.

    **Returns:**

    The types of the arrays in it.
    """
    return tuple(
        ArrayType(dtype, tuple(int(size.strip("<=? ")) for size in sizes.split(",") if size), _bits(dtype, layout))
        for dtype, sizes, layout in _TYPE.findall(text)
    )


def _bits(dtype: str, layout: str) -> int:
    stored = _STORED_BITS.search(layout) if layout else None
    if stored:
        return int(stored[1])
    if dtype in _BITS:
        return _BITS[dtype]
    return max(8, int("".join(re.findall(r"\d+", dtype)[:1]) or 0))


def read_instruction(line: str, memo: dict[str, tuple[ArrayType, ...]]) -> tuple[Instruction, bool]:
    """Reads one line of a computation.

    **Arguments:**

    - `line`: the line.
    - `memo`: types that have been read before, by their text; a new one is added.

    **Returns:**

    The instruction, and whether it is the root.

    **Raises:**

    `ProgramTextError` when it is no instruction.
    """
    found = _INSTRUCTION.match(line)
    if found is None:
        raise ProgramTextError(f"this is no instruction as XLA prints them: {line[:200]!r}")
    root, name, type_text, op = found.groups()
    types = memo.get(type_text)
    if types is None:
        types = memo[type_text] = read_types(type_text)
    end = _closing(line, found.end())
    inside, rest = line[found.end() : end], line[end + 1 :].removeprefix(", ")
    if op in ("constant", "parameter"):
        return Instruction(name, op, types, (), inside, rest), bool(root)
    operands = _REFERENCE.findall(inside)
    if not operands and inside:  # printed without the percent signs
        operands = [each.split()[-1] for each in _ASIDE.sub("", inside).split(",") if each.strip()]
    return Instruction(name, op, types, tuple(operands), "", rest), bool(root)


def _closing(line: str, start: int) -> int:
    """Where the bracket closes that opened just before `start`."""
    end = line.find(")", start)
    if end < 0 or line.find("(", start, end) < 0:
        return end if end >= 0 else len(line)
    depth = 0
    for found in _BRACKET_OR_TEXT.finditer(line, start):
        if found[0] == "(":
            depth += 1
        elif found[0] == ")":
            if not depth:
                return found.start()
            depth -= 1
    return len(line)


def read_attributes(text: str) -> dict[str, str]:
    """Takes `name=value, name=value` apart.

    **Arguments:**

    - `text`: attributes, whose values may hold brackets, commas and quoted text.

    **Returns:**

    The values by name, as they are printed.

    ```python
    assert read_attributes('slice={[0:4], [1:2]}, to_apply=%add') == {"slice": "{[0:4], [1:2]}", "to_apply": "%add"}
    ```
    """
    cuts, depth = [-1], 0
    for found in _BRACKET_OR_TEXT.finditer(text):
        mark = found[0]
        if mark in "{([":
            depth += 1
        elif mark in "})]":
            depth -= 1
        elif mark == "," and not depth:
            cuts.append(found.start())
    cuts.append(len(text))
    parts = (text[start + 1 : end].strip().partition("=") for start, end in itertools.pairwise(cuts))
    return {name: value for name, equals, value in parts if equals}


def _plain(quoted: str) -> str:
    """The text between quotes, its escapes undone: XLA may write every byte that is not ASCII as one."""
    inner = quoted[1:-1]
    return _ESCAPE.sub(_unescaped, inner.encode()).decode(errors="replace") if "\\" in inner else inner


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    if code.isdigit():
        return bytes([int(code, 8) & 255])
    return bytes([int(code[1:], 16)]) if len(code) > 1 else _CONTROL.get(code, code)
