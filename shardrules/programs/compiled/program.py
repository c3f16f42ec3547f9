"""A compiled program as values, read from the text that XLA prints of it on any of its backends.

Every backend and version gives this text, while the structure behind it is private to JAX. This module does not know
what a collective is or what a matmul costs: see `collectives` and `flops`.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import final

import attrs

from shardrules.core.errors import ProgramTextError
from shardrules.core.source import Source
from shardrules.programs.compiled.flow import LOOP_ROLES, CallSite, Flow, Times, Value
from shardrules.programs.compiled.text import (
    LOOP,
    ArrayType,
    Computation,
    Instruction,
    begins_instruction,
    read_attributes,
)

# ENTRY %main.4 (x: f32[8]) -> f32[8] {
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+)(?: \(| \{)")
# input_output_alias={ {0}: (1, {}, may-alias) }: output 0 is written over argument 1
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}(?:, ([\w-]+))?\)")
# A row of a table: 3 "model.py" or 3 {file_name_id=1 line=7}
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})\s*$')

_MAX_VALUES = 100
"""The values that `nearby` and `downstream` queue, chosen by hand: it bounds the work per instruction in large
programs."""

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@final
@attrs.frozen
class Alias:
    """An output that is written over an argument."""

    output: tuple[int, ...]  # the index of the output; empty where the program has only one
    parameter: int  # the index of the argument
    must: bool  # whether the program relies on it; otherwise the caller decides


@final
@attrs.frozen
class CompiledProgram:
    """A compiled program, as one of its devices runs it."""

    name: str
    computations: tuple[Computation, ...] = attrs.field(repr=False)  # in the order of the text
    entry: str
    """The name of the computation that runs first."""

    partition_count: int = 1
    """The devices of the mesh."""

    aliases: tuple[Alias, ...] = ()
    stacks: Mapping[int, tuple[Source, ...]] = attrs.field(factory=dict, repr=False, hash=False)
    """For the id of each stack frame its lines of Python, the innermost first."""

    @functools.cached_property
    def flow(self) -> Flow:
        """The calls between its computations, and the flow of values through them."""
        return Flow(self.computations, self.entry)

    @property
    def entry_computation(self) -> Computation:
        """The computation that runs first. Its parameters are the arguments of the program."""
        return self.find(self.entry)

    @functools.cached_property
    def token_count(self) -> int:
        """The tokens that come first in its parameters and results: JAX orders calls back to Python by them."""
        return sum(parameter.types[0].dtype == "token" for parameter in self.entry_computation.parameters)

    @property
    def arguments(self) -> tuple[Instruction, ...]:
        """The parameters, without tokens."""
        return self.entry_computation.parameters[self.token_count :]

    @property
    def outputs(self) -> tuple[ArrayType, ...]:
        """The types of what it returns, without tokens."""
        return self.entry_computation.by_name[self.entry_computation.root].types[self.token_count :]

    def find(self, computation: str) -> Computation:
        """Returns the computation of this name."""
        return self.flow.by_name[computation]

    def instruction(self, value: Value) -> Instruction:
        """Returns the instruction whose result a value is, or is an element of."""
        return self.find(value.computation).by_name[value.instruction]

    def times(self, computation: str) -> Times:
        """Returns how often a computation runs in one call of the program."""
        return self.flow.times[computation]

    def callers(self, computation: str) -> tuple[CallSite, ...]:
        """Returns the calls of a computation; none for the entry."""
        return self.flow.callers[computation]

    @functools.cached_property
    def unknown_loops(self) -> tuple[Instruction, ...]:
        """The loops whose number of rounds depends on data: each counts as one round."""
        return tuple(
            instruction
            for computation, instruction in self.walk()
            if instruction.op == LOOP
            and self.flow.trips[instruction.name] is None
            and self.times(computation.name).count
        )

    def walk(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields every instruction with its computation, in the order of the text."""
        for computation in self.computations:
            for instruction in computation.instructions:
                yield computation, instruction

    def argument_path(self, value: Value) -> str:
        """Finds the argument of the program that a value is, or is a part of, perhaps cast or in another layout.

        Returns JAX's path of the argument, `"layers['up']"`; empty for a computed value.
        """
        origin = self.flow.origin(value)
        maker = self.instruction(origin)
        return maker.op_name if origin.computation == self.entry and maker.op == "parameter" else ""

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """Returns an instruction's lines of Python, the innermost first; none if the compiler added it."""
        metadata = instruction.metadata
        if "source_line" in metadata:  # older versions print one line instead of a stack
            return (Source(metadata.get("source_file", ""), int(metadata["source_line"])),)
        return self.stacks.get(int(metadata.get("stack_frame_id", 0)), ())

    def cause(self, computation: Computation, instruction: Instruction) -> Instruction:
        """Finds the nearest instruction that comes from a line of Python, for one that the compiler may have added.

        Returns the instruction itself where it comes from a line, or where nothing near it does.
        """
        return next((near for near in self.nearby(computation, instruction) if self.stack(near)), instruction)

    def nearby(self, computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction, its callers, what made its operands and what uses its result, each the nearest first.

        The most reliable come first. A fusion knows its line when its parts do not. What a compiler combined
        from several operations has no line, but its operands do. And an all-gather of an argument has no line, but
        the matmul that uses it does.
        """
        yield instruction
        # Stop at loops: their line is the whole scan, not the operation in it.
        calls = self.callers(computation.name)
        while len(calls) == 1 and calls[0].role not in LOOP_ROLES:
            yield calls[0].instruction
            calls = self.callers(calls[0].caller)
        values = [Value(computation.name, name) for name in instruction.operands]
        for value in values:  # grows while iterated
            origin = self.flow.origin(value)
            maker = self.instruction(origin)
            # A parameter has the path of its argument, but no line of Python.
            if maker.op != "parameter":
                yield maker
            if len(values) < _MAX_VALUES:
                values += [Value(origin.computation, name) for name in maker.operands]
        yield instruction
        yield from self.downstream(computation, instruction)

    def downstream(self, computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the users of an instruction in its computation, then their users, each the nearest first."""
        users = list(computation.users.get(instruction.name, ()))
        for user in users:  # grows while iterated
            yield user
            if len(users) < _MAX_VALUES:
                users += computation.users.get(user.name, ())


def read_program(text: str) -> CompiledProgram:
    """Reads the text of a compiled program: what `compiled.as_text()` returns.

    ```python
    from shardrules.programs.compiled.program import read_program

    def repeat(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=12)[0]

    program = read_program(jax.jit(repeat).lower(jnp.ones((8, 8))).compile().as_text())
    (loop,) = [instruction for _, instruction in program.walk() if instruction.op == "while"]
    assert program.times(loop.references("body")[0]).count == 12 and program.unknown_loops == ()
    ```
    """
    lines = text.split("\n")  # splitlines would also split at characters that names may contain
    start = next((index for index, line in enumerate(lines) if line.startswith("HloModule ")), None)
    if start is None:
        raise ProgramTextError(
            f"a compiled program starts with 'HloModule', this text with {text[:60]!r}: "
            "pass what jax.jit(f).lower(...).compile().as_text() returns"
        )
    name, _, rest = lines[start].removeprefix("HloModule ").partition(", ")
    header = read_attributes(rest)
    tables, computations, entry = _sections(lines[start + 1 :])
    if entry is None:
        raise ProgramTextError(f"program {name!r} has no ENTRY: its text is incomplete")
    return CompiledProgram(
        name,
        computations,
        entry,
        int(header.get("num_partitions", 1)),
        tuple(
            Alias(tuple(map(int, re.findall(r"\d+", output))), int(parameter), kind == "must-alias")
            for output, parameter, _, kind in _ALIAS.findall(header.get("input_output_alias", ""))
        ),
        _read_stacks(tables),
    )


def _sections(lines: list[str]) -> tuple[dict[str, list[str]], tuple[Computation, ...], str | None]:
    """Returns the lines of each table before the computations, the computations, and the name of the entry."""
    tables: dict[str, list[str]] = {title: [] for title in _TABLES}
    table: list[str] = []
    computations: list[Computation] = []
    types_by_text: dict[str, tuple[ArrayType, ...]] = {}
    name, entry, body = None, None, []
    for line in lines:
        if name is not None:
            # Other lines with a brace may be of a kernel's metadata: }, metadata={...}
            if line == "}" or line.startswith(("} ", "}, execution_thread=")):
                computations.append(Computation.read(name, body, types_by_text))
                name, body = None, []
            elif not line or line.isspace():
                continue
            elif not body or line.startswith(("  %", "  ROOT %")) or begins_instruction(line):
                body.append(line)
            else:
                body[-1] += line  # kernels may have metadata of several lines
        # The tables before the computations have no line that ends in a brace.
        elif line.endswith("{") and (match := _COMPUTATION.match(line)):
            name = match[2]
            entry = name if match[1] else entry
        elif line in tables:
            table = tables[line]
        else:
            table.append(line)
    return tables, tuple(computations), entry if name is None else None


def _read_stacks(tables: dict[str, list[str]]) -> dict[int, tuple[Source, ...]]:
    """Returns the lines of Python of each stack frame, the innermost first.

    A frame refers to a location and to its parent frame, a location to a file and a function:

        StackFrames
        2 {file_location_id=5 parent_frame_id=1}
    """
    files, functions = ({row: text for row, text, _ in _rows(tables[title])} for title in _TABLES[:2])
    locations = {row: _integers(fields) for row, _, fields in _rows(tables["FileLocations"])}
    frames = {row: _integers(fields) for row, _, fields in _rows(tables["StackFrames"])}
    stacks: dict[int, tuple[Source, ...]] = {}
    # The table has parents before their children, and their ids are one too high: without a parent, it is 1.
    for frame_id, frame in frames.items():
        location = locations.get(frame.get("file_location_id", 0), {})
        file = files.get(location.get("file_name_id", 0), "")
        source = Source(file, location.get("line", 0), functions.get(location.get("function_name_id", 0), ""))
        stacks[frame_id] = (source, *stacks.get(frame.get("parent_frame_id", 0) - 1, ()))
    return stacks


def _rows(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    for line in lines:
        if match := _ROW.match(line):
            yield int(match[1]), match[2] or "", match[3] or ""


def _integers(fields: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", fields)}
