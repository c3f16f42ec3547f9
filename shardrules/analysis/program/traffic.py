"""What an instruction of a compiled program reads from memory, and what it writes to it.

What is inside a fusion never reaches memory. Of an array that a kernel only takes a slice or rows from it reads no more
than that, and one that it updates in place it neither reads nor writes but where it is updated. That is what makes a
loop over stacked layers read each of them once.
"""

import re
from collections.abc import Iterable, Iterator
from typing import final

import attrs

from shardrules.analysis.program.collectives import KINDS
from shardrules.analysis.program.flow import Value
from shardrules.analysis.program.program import CompiledProgram
from shardrules.analysis.program.text import ArrayType, Computation, Instruction

_SCRATCH = re.compile(r"__cublas|__cudnn|cusolver")
"""Custom calls that return, last, the memory that they have worked in."""

_TAKE_A_PART = ("slice", "dynamic-slice", "gather")
_UPDATE_IN_PLACE = ("dynamic-update-slice", "scatter")
_SAME_BYTES = ("bitcast", "reshape")
_SAME_ELEMENTS = (*_SAME_BYTES, "bitcast-convert", "convert", "copy", "transpose")
_MAY_KEEP = (*_SAME_BYTES, *_UPDATE_IN_PLACE, "convert")
"""Operations after which an array may still be in its place."""


def is_collective(one: Instruction) -> bool:
    """Tells whether an instruction is a collective: what it moves goes over the wire.

    **Arguments:**

    - `one`: any instruction.

    **Returns:**

    Whether it is one, or the start of one.
    """
    return one.op.removesuffix("-start") in KINDS


def read_bytes(program: CompiledProgram, computation: Computation, one: Instruction) -> int:
    """Returns what an instruction reads from memory.

    **Arguments:**

    - `program`: the program.
    - `computation`: where the instruction is.
    - `one`: the instruction.

    **Returns:**

    The bytes of its operands, each array once, of some of them a part.

    ```python
    from shardrules.analysis.program.program import read_program

    table, rows = jnp.ones((5000, 16)), jnp.arange(4)
    program = read_program(jax.jit(lambda table, rows: table[rows]).lower(table, rows).compile().as_text())
    entry = program.entry_computation
    (one,) = [one for one in entry.instructions if one.op == "fusion"]
    assert read_bytes(program, entry, one) == 4 * 16 * 4 + rows.nbytes
    assert written_bytes(program, entry, one) == 4 * 16 * 4
    ```
    """
    inside = fused(program, one)
    given: Iterable[Instruction | None] = inside.top.parameters if inside else [None] * len(one.operands)
    read: dict[str, int] = {}
    for name, parameter in zip(one.operands, given, strict=True):
        whole = _bytes(computation.by_name[name].types)
        if inside and parameter:
            taken = inside.read_bytes(parameter)
        else:
            elements = _taken(computation, one, name)
            taken = whole if elements is None else _packed(computation.by_name[name].types[0], elements)
        array = _behind_bitcasts(computation, name)
        read[array] = min(whole, read.get(array, 0) + taken)
    return sum(read.values())


def written_bytes(program: CompiledProgram, computation: Computation, one: Instruction) -> int:
    """Returns what an instruction writes to memory.

    **Arguments:**

    - `program`: the program.
    - `computation`: where the instruction is.
    - `one`: the instruction.

    **Returns:**

    The bytes of its results; of one that is updated in place those of the update. Memory that a library works in is
    not counted.
    """
    inside = fused(program, one)
    if inside:
        return inside.written_bytes()
    if one.op in _UPDATE_IN_PLACE:
        return sum(_packed(each, _updated(computation, one)) for each in one.types)
    types = one.types
    if one.op.endswith("-start"):  # what it takes and its signals are among its results
        ends = [user for user in computation.users.get(one.name, ()) if user.op.endswith("-done")]
        types = ends[0].types if ends else types
    target = one.attributes.get("custom_call_target", "").strip('"')
    if _SCRATCH.match(target) and len(types) > 1 and types[-1].dtype in ("s8", "u8") and len(types[-1].shape) == 1:
        types = types[:-1]
    return _bytes(types)


def fused(program: CompiledProgram, one: Instruction) -> "Fused | None":
    """Returns what is inside a fusion.

    **Arguments:**

    - `program`: the program.
    - `one`: any instruction.

    **Returns:**

    A `Fused`; `None` for what is no fusion.
    """
    if one.op not in ("fusion", "fusion-start"):
        return None
    return Fused(program, program.find(one.references("calls")[0]))


@final
@attrs.frozen
class Fused:
    """What is inside a fusion. TPUs have fusions in fusions: together they are one kernel.

    **Arguments:**

    - `program`: the program.
    - `top`: the computation of the outermost fusion.
    """

    program: CompiledProgram
    top: Computation

    @property
    def computations(self) -> Iterator[Computation]:
        """Its computation and those in it."""
        inside = [self.top]
        for computation in inside:  # grows as it is walked
            inside += [self._called(one) for one in computation.instructions if one.op == "fusion"]
            yield computation

    def read_bytes(self, parameter: Instruction) -> int:
        """Returns what is read of a parameter.

        **Arguments:**

        - `parameter`: one of `top`.

        **Returns:**

        The bytes of the parts that are taken from it; of all of it where anything else is done with it. An array that
        comes out as it went in is not read.
        """
        whole = _bytes(parameter.types)
        if len(parameter.types) != 1:
            return whole
        kind, taken = parameter.types[0], dict[str, int]()
        pending = [(Value(self.top.name, parameter.name), True)]
        for place, kept in pending:  # grows as it is walked
            computation, value = self.program.find(place.computation), self.program.instruction(place)
            kept = kept and (value.op != "convert" or _keeps(kind, value.types[0]))
            comes_out = kept and value.types[0].dtype == kind.dtype
            if value.name == computation.root:
                if computation is not self.top:
                    pending.append((self._outside(computation), kept))
                elif not comes_out:
                    return whole
            for user in computation.users.get(value.name, ()):
                part = _taken(computation, user, value.name)
                if part is not None:
                    taken[user.name] = part
                if user.op in _SAME_ELEMENTS or (part is not None and user.op in _UPDATE_IN_PLACE):
                    pending.append((Value(computation.name, user.name), kept and user.op in _MAY_KEEP))
                elif user.op == "fusion":
                    called = self._called(user)
                    given = zip(user.operands, called.parameters, strict=True)
                    pending += [(Value(called.name, to.name), kept) for name, to in given if name == value.name]
                elif user.op == "tuple" and user.name == self.top.root:
                    if not comes_out:
                        return whole
                elif part is None and not _on_the_wire(user):
                    return whole
        return min(whole, _packed(kind, sum(taken.values())))

    def written_bytes(self) -> int:
        """Returns what is written.

        **Returns:**

        The bytes of the results, and of those that are arrays updated in place only what is updated.
        """
        total = 0
        for place in self._results(Value(self.top.name, self.top.root)):
            types = self.program.instruction(place).types
            elements = self._updated(place, types[0])
            total += _bytes(types) if elements is None else sum(_packed(each, elements) for each in types)
        return total

    def _called(self, one: Instruction) -> Computation:
        return self.program.find(one.references("calls")[0])

    def _outside(self, computation: Computation) -> Value:
        call = self.program.callers(computation.name)[0]
        return Value(call.caller, call.instruction.name)

    def _results(self, place: Value) -> Iterator[Value]:
        made = self._made(place)
        one = self.program.instruction(made)
        if one.op != "tuple":
            yield place
        else:
            for name in one.operands:
                yield from self._results(Value(made.computation, name))

    def _updated(self, place: Value, kind: ArrayType) -> int | None:
        """How many elements of an array that was handed in are updated to give this; `None` where it was made here."""
        place = self._made(place, kind)
        computation, one = self.program.find(place.computation), self.program.instruction(place)
        if one.op == "parameter":
            return 0 if one.types[0].dtype == kind.dtype else None
        if one.op not in _UPDATE_IN_PLACE:
            return 0 if _on_the_wire(one) else None
        before = self._updated(Value(computation.name, one.operands[0]), kind)
        return None if before is None else before + _updated(computation, one)

    def _made(self, place: Value, kind: ArrayType | None = None) -> Value:
        """What made a value, behind bitcasts, tuples and the borders of fusions in this one.

        With `kind` also behind conversions of an array of that kind to a wider one and back, which leave it as it was.
        """
        while True:
            computation, one = self.program.find(place.computation), self.program.instruction(place)
            operand = one.operands[0] if one.operands else ""
            if one.op in _SAME_BYTES or (one.op == "convert" and _keeps(kind, computation.by_name[operand].types[0])):
                place = Value(computation.name, operand)
            elif one.op == "fusion":
                called = self._called(one)
                place = Value(called.name, called.root, place.index)
            elif one.op == "get-tuple-element":
                place = Value(computation.name, operand, int(one.attributes["index"]))
            elif one.op == "tuple" and place.index is not None:
                place = Value(computation.name, one.operands[place.index])
            elif one.op == "parameter" and computation is not self.top:
                call = self.program.callers(computation.name)[0]
                place = Value(call.caller, call.instruction.operands[int(one.literal)])
            else:
                return place


def _keeps(kind: ArrayType | None, other: ArrayType) -> bool:
    """Whether an array of one kind is still all there in the other: so CPUs update bfloat16, which they lack."""
    return kind is not None and (other.dtype == kind.dtype or other.bits > kind.bits)


def _taken(computation: Computation, one: Instruction, name: str) -> int | None:
    """How many elements of one of its operands an instruction reads, where it takes or updates a part; else `None`."""
    if one.operands.count(name) == 1:
        if one.op in _TAKE_A_PART and one.operands[0] == name:
            return one.types[0].size
        if one.op == "dynamic-update-slice" and one.operands[0] == name:
            return 0
        if one.op == "scatter" and name in one.operands[: max(1, (len(one.operands) - 1) // 2)]:
            return _updated(computation, one)  # to combine them with what comes
    return None


def _updated(computation: Computation, one: Instruction) -> int:
    """How many elements an update in place touches, of each of its arrays: a scatter may have several."""
    update = one.operands[-1] if one.op == "scatter" else one.operands[1]
    return computation.by_name[update].types[0].size


def _on_the_wire(one: Instruction) -> bool:
    return is_collective(one) or "AsyncCollective" in one.attributes.get("custom_call_target", "")


def _behind_bitcasts(computation: Computation, name: str) -> str:
    """The array itself, so that it is read once, in whichever shapes it is looked at."""
    while computation.by_name[name].op == "bitcast":
        name = computation.by_name[name].operands[0]
    return name


def _bytes(types: Iterable[ArrayType]) -> int:
    return sum(each.nbytes for each in types)


def _packed(kind: ArrayType, elements: int) -> int:
    """What so many elements of an array take."""
    return -(-elements * kind.bits // 8)
