"""A compiled program as values: read from the text that XLA prints of it, on any of its backends.

The text is what every backend and version gives; the structure behind it is private to JAX. Nothing here knows what a
collective is or what a matmul costs: see `collectives` and `flops`.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import final

import attrs

from shardrules.analysis.program.flow import LOOP, CallSite, Flow, Times, Value
from shardrules.analysis.program.text import ArrayType, Computation, Instruction, read_attributes
from shardrules.core.errors import ProgramTextError

_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+)(?: \(| \{)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}(?:, ([\w-]+))?\)")
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})\s*$')
_FAR = 100
"""How many values to look at for the line of Python behind one."""

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@final
@attrs.frozen
class Alias:
    """An output that is written over an argument.

    **Arguments:**

    - `output`: the index of the output; none where the program has only one.
    - `parameter`: the number of the argument.
    - `must`: whether the program relies on it; else it is up to the caller.
    """

    output: tuple[int, ...]
    parameter: int
    must: bool


@final
@attrs.frozen
class Source:
    """A place in Python source.

    **Arguments:**

    - `file`: its path.
    - `line`: the line, from 1.
    - `function`: the name of the function; may be empty.
    """

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@final
@attrs.frozen
class CompiledProgram:
    """A compiled program, as one of its devices runs it.

    **Arguments:**

    - `name`: its name: `"jit_step"`.
    - `computations`: in the order of the text.
    - `entry`: the name of the computation that runs first.
    - `partition_count`, `replica_count`: the devices it runs on: those of the mesh, and, with `pmap`, copies.
    - `aliases`: the outputs that are written over arguments.
    - `stacks`: for each number of a stack frame its lines of Python, the innermost first.

    ```python
    text = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile().as_text()
    program = read_program(text)
    assert (program.partition_count, program.entry_computation.parameters[0].op_name) == (1, "x")
    ```
    """

    name: str
    computations: tuple[Computation, ...] = attrs.field(repr=False)
    entry: str
    partition_count: int = 1
    replica_count: int = 1
    aliases: tuple[Alias, ...] = ()
    stacks: Mapping[int, tuple[Source, ...]] = attrs.field(factory=dict, repr=False, hash=False)

    @property
    def device_count(self) -> int:
        """How many devices run it."""
        return self.partition_count * self.replica_count

    @functools.cached_property
    def flow(self) -> Flow:
        """How its computations call each other, and how values flow through them."""
        return Flow(self.computations, self.entry)

    @property
    def entry_computation(self) -> Computation:
        """The computation that runs first. Its parameters are the arguments of the program."""
        return self.find(self.entry)

    @property
    def outputs(self) -> tuple[ArrayType, ...]:
        """The types of what it returns."""
        return self.entry_computation.by_name[self.entry_computation.root].types

    def find(self, computation: str) -> Computation:
        """Returns a computation.

        **Arguments:**

        - `computation`: its name.

        **Returns:**

        The `Computation`.

        **Raises:**

        `KeyError` where there is none.
        """
        return self.flow.by_name[computation]

    def instruction(self, place: Value) -> Instruction:
        """Returns the instruction at a place.

        **Arguments:**

        - `place`: where it is.

        **Returns:**

        The `Instruction`.
        """
        return self.find(place.computation).by_name[place.instruction]

    def times(self, computation: str) -> Times:
        """Returns how often a computation runs in one call of the program.

        **Arguments:**

        - `computation`: its name.

        **Returns:**

        The product of the loops around it, summed over all who call it.
        """
        return self.flow.times[computation]

    def callers(self, computation: str) -> tuple[CallSite, ...]:
        """Returns who calls a computation.

        **Arguments:**

        - `computation`: its name.

        **Returns:**

        A `CallSite` for each; none for the entry.
        """
        return self.flow.callers[computation]

    @functools.cached_property
    def unknown_loops(self) -> tuple[Instruction, ...]:
        """The loops of which nobody can tell beforehand how often they go round: each counts as one round."""
        return tuple(
            one
            for computation, one in self.walk()
            if one.op == "while" and self.flow.trips[one.name] is None and self.times(computation.name).count
        )

    def walk(self) -> Iterator[tuple[Computation, Instruction]]:
        """Returns every instruction with the computation that it is in, in the order of the text."""
        for computation in self.computations:
            for one in computation.instructions:
                yield computation, one

    def argument_path(self, place: Value) -> str:
        """Finds the argument of the program that a value is, or is a part of, perhaps cast, in another layout.

        **Arguments:**

        - `place`: the value.

        **Returns:**

        The path that JAX gave the argument, `"layers['up']"`; empty where the value was computed.
        """
        place = self.flow.origin(place)
        made = self.instruction(place)
        return made.op_name if place.computation == self.entry and made.op == "parameter" else ""

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """Returns the lines of Python that an instruction comes from.

        **Arguments:**

        - `instruction`: one of this program.

        **Returns:**

        The innermost first; none where the compiler made it up.
        """
        known = instruction.metadata
        if "source_line" in known:
            return (Source(known.get("source_file", ""), int(known["source_line"])),)
        return self.stacks.get(int(known.get("stack_frame_id", 0)), ())

    def cause(self, computation: Computation, one: Instruction) -> Instruction:
        """Finds the instruction that tells why another one is there, which a compiler may have made up.

        **Arguments:**

        - `computation`: where the instruction is.
        - `one`: the instruction.

        **Returns:**

        The nearest that comes from a line of Python: itself, one that calls it, that made what it takes or that uses
        what it gives. Itself where there is none near.
        """
        return next((each for each in self.nearby(computation, one) if self.stack(each)), one)

    def nearby(self, computation: Computation, one: Instruction) -> Iterator[Instruction]:
        """Yields an instruction, its callers, what made its operands and what uses its result, each the nearest first.

        A fusion knows where it comes from when its parts do not, what a compiler put together from several has no
        origin of its own, and an argument that is gathered has none but what it is gathered for.

        **Arguments:**

        - `computation`: where the instruction is.
        - `one`: the instruction.

        **Returns:**

        An iterator, which ends after some hundred instructions.
        """
        yield one
        calls = self.callers(computation.name)
        while len(calls) == 1 and calls[0].role not in LOOP:
            yield calls[0].instruction
            calls = self.callers(calls[0].caller)
        places = [Value(computation.name, name) for name in one.operands]
        for place in places:  # grows as it is walked
            place = self.flow.origin(place)
            made = self.instruction(place)
            if made.op != "parameter":
                yield made
            if len(places) < _FAR:
                places += [Value(place.computation, name) for name in made.operands]
        yield one
        yield from self.downstream(computation, one)

    def downstream(self, computation: Computation, one: Instruction) -> Iterator[Instruction]:
        """Yields what uses the result of an instruction, and what uses that, each the nearest first.

        **Arguments:**

        - `computation`: where the instruction is.
        - `one`: the instruction.

        **Returns:**

        An iterator, which ends after some hundred instructions.
        """
        users = list(computation.users.get(one.name, ()))
        for user in users:  # so does this
            yield user
            if len(users) < _FAR:
                users += computation.users.get(user.name, ())


def read_program(text: str) -> CompiledProgram:
    """Reads the text of a compiled program.

    **Arguments:**

    - `text`: what `compiled.as_text()` returned.

    **Returns:**

    A `CompiledProgram`.

    **Raises:**

    `ProgramTextError` when it is no such text.

    ```python
    def repeat(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=12)[0]

    program = read_program(jax.jit(repeat).lower(jnp.ones((8, 8))).compile().as_text())
    (loop,) = [one for _, one in program.walk() if one.op == "while"]
    assert program.times(loop.references("body")[0]).count == 12 and program.unknown_loops == ()
    ```
    """
    lines = text.split("\n")  # not splitlines, which also splits at characters that names may hold
    start = next((at for at, line in enumerate(lines) if line.startswith("HloModule ")), None)
    if start is None:
        raise ProgramTextError(
            f"a compiled program starts with 'HloModule', this with {text[:60]!r}: "
            "pass what jax.jit(f).lower(...).compile().as_text() returns"
        )
    name, _, rest = lines[start].removeprefix("HloModule ").partition(", ")
    header = read_attributes(rest)
    tables, computations, entry = _sections(lines[start + 1 :])
    if entry is None:
        raise ProgramTextError(f"program {name!r} has no ENTRY: its text is cut off")
    return CompiledProgram(
        name,
        computations,
        entry,
        int(header.get("num_partitions", 1)),
        int(header.get("replica_count", 1)),
        tuple(
            Alias(tuple(map(int, re.findall(r"\d+", output))), int(parameter), kind == "must-alias")
            for output, parameter, _, kind in _ALIAS.findall(header.get("input_output_alias", ""))
        ),
        _stacks(tables),
    )


def _sections(lines: list[str]) -> tuple[dict[str, list[str]], tuple[Computation, ...], str | None]:
    """Returns the lines of each table before the computations, the computations, and which of them is the entry."""
    tables: dict[str, list[str]] = {title: [] for title in _TABLES}
    table: list[str] = []
    computations: list[Computation] = []
    memo: dict[str, tuple[ArrayType, ...]] = {}
    name, entry, body = None, None, []
    for line in lines:
        if name is not None:
            if line.startswith("}"):
                computations.append(Computation.read(name, body, memo))
                name, body = None, []
            elif line and not line.isspace():
                body.append(line)
        elif line.endswith("{") and (found := _COMPUTATION.match(line)):
            name = found[2]
            entry = name if found[1] else entry
        elif line in tables:
            table = tables[line]
        else:
            table.append(line)
    return tables, tuple(computations), entry if name is None else None


def _stacks(tables: dict[str, list[str]]) -> dict[int, tuple[Source, ...]]:
    """Returns the lines of Python behind each stack frame, the innermost first."""
    files, functions = ({key: text for key, text, _ in _rows(tables[title])} for title in _TABLES[:2])
    locations = {key: _numbers(fields) for key, _, fields in _rows(tables["FileLocations"])}
    frames = {key: _numbers(fields) for key, _, fields in _rows(tables["StackFrames"])}
    # Some versions print the number of the parent one too high. The first frame has none, which should read 0.
    shift = frames.get(1, {}).get("parent_frame_id", 0)
    stacks: dict[int, tuple[Source, ...]] = {}
    for key, frame in frames.items():  # parents first
        at = locations.get(frame.get("file_location_id", 0), {})
        file = files.get(at.get("file_name_id", 0), "")
        source = Source(file, at.get("line", 0), functions.get(at.get("function_name_id", 0), ""))
        stacks[key] = (source, *stacks.get(frame.get("parent_frame_id", 0) - shift, ()))
    return stacks


def _rows(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    for line in lines:
        if found := _ROW.match(line):
            yield int(found[1]), found[2] or "", found[3] or ""


def _numbers(fields: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", fields)}
