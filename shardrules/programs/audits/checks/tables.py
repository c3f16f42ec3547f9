"""Tables that are computed again and again: the angles of rotary embeddings in every layer, and again to recompute it.

A table depends on positions and constants alone, so that it is the same in every layer. Compilers move it out of a loop
only where that takes no memory, and nothing can be moved over the border of `jax.checkpoint`.
"""

from collections.abc import Iterator
from typing import TypeAlias, final

import attrs
import jax.numpy as jnp

from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.core.text import bytes_text
from shardrules.programs.audits.arguments import AuditedArguments
from shardrules.programs.audits.function import TracedFunction
from shardrules.programs.audits.movement import names_text
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.text import Computation, Instruction
from shardrules.programs.compiled.uses import is_elementwise
from shardrules.programs.compiling.roles import BATCH, PARAMETERS

_EXPENSIVE = (
    *("sine", "cosine", "tan", "atan2", "tanh", "erf", "logistic"),
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "power"),
)
"""Operations that take dozens of instructions for each element."""

_BYTES_PER_VALUE = 8
"""Such an operation takes about as long as moving so many bytes through memory.

A sine of float32 with its range reduction is some 30 instructions: on an H100, of 132 x 128 lanes at 1.7 GHz, 1e12 a
second, while its memory moves 3.3e12 bytes; on a v5e, of 4 x 1024 lanes at 1.5 GHz, 0.2e12, and 0.8e12 bytes."""

_MOVES = ("copy", "bitcast", "reshape", "transpose", "copy-start", "copy-done")
_PURE = (
    "broadcast",
    "slice",
    "concatenate",
    "pad",
    "iota",
    "constant",
    "compare",
    "and",
    "or",
    "not",
    "remainder",
    *("complex", "real", "imag", "reduce-window"),
    *_EXPENSIVE,
)

_DETAILS = ("slice", "direction", "padding", "window")
"""Attributes by which operations on equal operands give different results."""

_LEARNED_EVALUATIONS = 4
"""The computations of a learned table for one use: forward, again to recompute it, and for both gradients."""

_MAX_DEPTH = 100
"""The operations that an expression may be deep, chosen by hand: tables of positions have 10 to 30."""

_Key: TypeAlias = tuple[object, ...]


@final
@attrs.frozen
class _Evaluation:
    computation: Computation
    instruction: Instruction
    runs: int
    elements: int
    """In each run; more than the table has, where a kernel computes it again for everything that uses it."""


def check_tables(arguments: AuditedArguments, function: TracedFunction, timing: Timing) -> Iterator[Finding]:
    """Expensive elementwise operations on positions and constants that give the same table several times."""
    # CPUs compute a table again for everything that they broadcast it to, and the figures of their sheet are nominal.
    if arguments.is_on_cpu:
        return
    program, reader = arguments.program, _Expressions(arguments)
    tables: dict[_Key, list[_Evaluation]] = {}
    for computation, instruction in program.walk():
        runs = program.times(computation.name).count
        if instruction.op in _EXPENSIVE and runs and instruction.types[0].size > 1:
            key = reader.key(Value(computation.name, instruction.name))
            if key is not None:
                elements = max(instruction.types[0].size, _expanded(computation, instruction))
                tables.setdefault(key, []).append(_Evaluation(computation, instruction, runs, elements))
    lines: dict[str, list[list[_Evaluation]]] = {}
    sources: dict[str, list[int]] = {}
    for key, evaluations in tables.items():
        indices = _arguments(key)
        is_learned = function.has_gradients and any(_is_learned(arguments, index) for index in indices)
        is_repeated = max(each.runs for each in evaluations) > 1
        # A learned table is computed several times for a single use, since its gradient needs it, too.
        if is_repeated or len(evaluations) > (_LEARNED_EVALUATIONS if is_learned else 1):
            first = evaluations[0]
            cause = program.cause(first.computation, first.instruction)
            line = user_line(program.stack(cause))
            lines.setdefault(line, []).append(evaluations)
            sources.setdefault(line, []).extend(indices)
    for line, group in lines.items():
        yield _finding(timing, line, group, names_text(arguments.arrays[index].path for index in sources[line]))


def _is_learned(arguments: AuditedArguments, index: int) -> bool:
    return arguments.roles[index] == PARAMETERS and jnp.issubdtype(arguments.arrays[index].dtype, jnp.floating)


def _finding(timing: Timing, line: str, group: list[list[_Evaluation]], arguments: str) -> Finding:
    excess, runs, nbytes = 0, 0, 0
    for evaluations in group:
        total = sum(each.runs * each.elements for each in evaluations)
        # One computation of the table is needed, and the rest is excess.
        excess += total - min(each.instruction.types[0].size for each in evaluations)
        runs = max(runs, sum(each.runs for each in evaluations))
        nbytes += evaluations[0].instruction.types[0].nbytes
    seconds = excess * _BYTES_PER_VALUE / timing.hardware.memory_bytes_per_second
    largest = max((each.instruction for evaluations in group for each in evaluations), key=lambda it: it.nbytes)
    names = ", ".join(dict.fromkeys(evaluations[0].instruction.op for evaluations in group))
    return Finding(
        timing.severity(seconds),
        "recomputed-table",
        f"{names}: a table {largest.types[0]} of positions and constants{f' and {arguments}' * bool(arguments)}, "
        f"{bytes_text(nbytes)}, is computed {runs} "
        f"times in a step, {excess:.3g} elements more than once: {timing.cost_text(seconds)}",
        remedy="Compute it once, before the layers (outside of scan and jax.checkpoint), and pass it to them through "
        "jax.lax.optimization_barrier, or compilers may move it back into the loop; or make it an argument of the step",
        source=line,
    )


def _expanded(computation: Computation, instruction: Instruction) -> int:
    """The elements that a kernel computes an operation for: a fusion computes it for each that it is broadcast to."""
    largest, pending = instruction.types[0].size, [instruction]
    for each in pending:  # grows while iterated
        for user in computation.users.get(each.name, ()):
            if user not in pending and (user.op == "broadcast" or user.op in _MOVES or is_elementwise(user)):
                largest = max(largest, user.types[0].size)
                pending.append(user)
    return largest


@final
@attrs.define
class _Expressions:
    """The expressions behind values. Equal keys are equal values; `None` is for those that may differ by round."""

    arguments: AuditedArguments
    _keys: dict[Value, _Key | None] = attrs.field(factory=dict, init=False)

    def key(self, value: Value, depth: int = 0) -> _Key | None:
        """Returns the expression behind a value, if it is only of positions and constants."""
        if value not in self._keys:
            if depth > _MAX_DEPTH:
                return None
            self._keys[value] = None  # a value that depends on itself goes round a loop
            self._keys[value] = self._read(value, depth + 1)
        return self._keys[value]

    def _read(self, value: Value, depth: int) -> _Key | None:
        program = self.arguments.program
        instruction = program.instruction(value)
        source = program.flow.source(value)
        if source is not None:
            return self.key(source, depth)
        if instruction.op == "parameter":
            return self._argument_key(value, instruction)
        if instruction.op in _MOVES:
            key = self.key(Value(value.computation, instruction.operands[0]), depth)
            if instruction.op != "transpose" or key is None or not _is_ambiguous(instruction):
                return key
            return ("transpose", instruction.dims("dimensions"), key)
        if instruction.op not in _PURE and not is_elementwise(instruction):
            return None
        keys = []
        for name in instruction.operands:
            keys.append(self.key(Value(value.computation, name), depth))
            if keys[-1] is None:
                return None
        # Layouts and dimensions of size 1 differ from copy to copy.
        dims = tuple(sorted(size for size in instruction.types[0].shape if size > 1))
        # The text of a large constant is cut, so that its name has to tell it apart.
        literal = instruction.literal if "..." not in instruction.literal else instruction.name
        details = [instruction.attributes.get(name) for name in _DETAILS]
        inside = [program.find(name) for name in instruction.references("to_apply")]
        details += [each.by_name[each.root].op for each in inside]
        return (instruction.op, dims, _dims(instruction), literal, *details, *keys)

    def _argument_key(self, value: Value, instruction: Instruction) -> _Key | None:
        """Positions and parameters are arguments as well; numbers of the batch are not what a table is made from."""
        index = self.arguments.index_of(value)
        is_number = index is not None and self.arguments.roles[index] == BATCH and instruction.types[0].dtype[0] in "bf"
        return None if is_number or index is None else ("argument", index)


def _dims(instruction: Instruction) -> _Key:
    """The dimensions that an operation names: by size, which no layout changes, or by index where sizes are equal."""
    dims = (*instruction.dims("iota_dimension"), *instruction.dims("dimensions"))
    shape = instruction.types[0].shape
    if _is_ambiguous(instruction):
        return tuple(sum(size > 1 for size in shape[:dim]) for dim in dims if shape[dim] > 1)
    return tuple(sorted(shape[dim] for dim in dims if shape[dim] > 1))


def _is_ambiguous(instruction: Instruction) -> bool:
    sizes = [size for size in instruction.types[0].shape if size > 1]
    return len(set(sizes)) < len(sizes)


def _arguments(key: object) -> tuple[int, ...]:
    """The indices of the arguments that a table is computed from."""
    pending, indices, seen = [key], [], set()
    for each in pending:  # grows while iterated
        if isinstance(each, tuple) and id(each) not in seen:
            seen.add(id(each))
            if each[:1] == ("argument",):
                indices.append(each[1])
            else:
                pending += each
    return tuple(dict.fromkeys(indices))
