"""The uses of a value of a compiled program, across the borders of fusions, calls and loops.

The opposite of `flow`, which finds the origin of a value. From the result of a gather in a loop:

    %g = f32[64] all-gather(%w)
    %f = bf16[8] fusion(%x, %g), calls=%fused      the value is parameter 1 of %fused, and used by what is in there
    ROOT %t = (s32[], bf16[8]) tuple(%i, %f)       element 1 goes to the next round, and out of the loop
"""

from collections.abc import Callable, Iterable, Iterator
from typing import final

import attrs

from shardrules.programs.compiled.flow import LOOP_ROLES, Value
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import LOOP, Computation, Instruction

MOVES = (
    *("copy", "copy-start", "copy-done", "bitcast", "reshape", "transpose", "optimization-barrier"),
    *("async-update", "async-done", "add-dependency"),
)
"""Operations whose result is their operand, in another layout or memory."""

ELEMENTWISE = (
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "clamp", "select", "negate", "abs", "sign"),
    *("convert", "round-nearest-even", "round-nearest-afz", "floor", "ceil", "power", "sqrt", "rsqrt"),
    "reduce-precision",
)
"""Operations on every element by itself."""


@final
@attrs.frozen
class Use:
    """An instruction that uses a value, and the name of the operand that is the value."""

    computation: Computation
    instruction: Instruction
    operand: str

    @property
    def is_result(self) -> bool:
        """The program returns the value."""
        return self.instruction.op in ("tuple", "return")


def is_move(instruction: Instruction) -> bool:
    """The result of an instruction is its operand, in another layout or memory."""
    is_end = instruction.op.endswith("-done") or instruction.custom_call_target == "AsyncCollectiveDone"
    return is_end or instruction.op in MOVES


def is_elementwise(instruction: Instruction) -> bool:
    """Each element of the result depends on the same element of the operands alone."""
    return instruction.op in ELEMENTWISE


def uses(
    program: CompiledProgram, values: Iterable[Value], passes_on: Callable[[Instruction], bool] = is_move
) -> Iterator[Use]:
    """Yields what uses any of these values, or what `passes_on` instructions make of them.

    The same instruction may come several times. What the program returns is a use by the root of its entry.
    """
    pending = list(dict.fromkeys(values))
    seen = set(pending)
    for value in pending:  # grows while iterated
        for following in _steps(program, value, passes_on):
            if isinstance(following, Use):
                yield following
            # Bounds the search. Chosen by hand: few arrays are passed on more than a hundred times.
            elif following not in seen and len(pending) < 2_000:
                seen.add(following)
                pending.append(following)


def _steps(program: CompiledProgram, value: Value, passes_on: Callable[[Instruction], bool]) -> Iterator[Value | Use]:
    """The values that a value is one operation later, and what uses it there."""
    computation = program.find(value.computation)
    if value.instruction == computation.root:
        yield from _outside(program, computation, value)
    for user in computation.users.get(value.instruction, ()):
        if user.custom_call_target == "AsyncCollectiveStart":
            continue  # the result comes out of a copy of the collective where it ends
        if user.op == "get-tuple-element":
            index = int(user.attributes["index"])
            # An index of `None` is the whole tuple: each of its elements has a part of the value.
            if value.index in (None, index):
                yield Value(computation.name, user.name)
        elif user.op in ("tuple", "fusion", "call", LOOP, "async-start"):
            for position, name in enumerate(user.operands):
                if name == value.instruction:
                    yield from _inside(program, computation, user, position, value)
        elif passes_on(user):
            yield Value(computation.name, user.name, value.index)
        else:
            yield Use(computation, user, value.instruction)


def _inside(
    program: CompiledProgram, computation: Computation, user: Instruction, position: int, value: Value
) -> Iterator[Value]:
    """Operand `position` of a tuple, a call or a loop, as it is named inside."""
    if user.op == "tuple":
        yield Value(computation.name, user.name, position)
        return
    roles = LOOP_ROLES if user.op == LOOP else ("calls", "to_apply")
    for name in (name for role in roles for name in user.references(role)):
        parameters = program.find(name).parameters
        if position < len(parameters):
            yield Value(name, parameters[position].name, value.index)


def _outside(program: CompiledProgram, computation: Computation, value: Value) -> Iterator[Value | Use]:
    """The result of a computation, as its callers name it; a use in the result of the program."""
    root = computation.by_name[computation.root]
    if computation.name == program.entry:
        yield Use(computation, root, value.instruction)
        return
    for call in program.callers(computation.name):
        if call.role == "body":
            (parameter,) = computation.parameters
            yield Value(computation.name, parameter.name, value.index)
            yield Value(call.caller, call.instruction.name, value.index)
        elif call.role in ("calls", "to_apply") and call.instruction.op in ("fusion", "call", "async-start"):
            yield Value(call.caller, call.instruction.name, value.index)
