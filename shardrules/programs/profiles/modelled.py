"""The modelled time of each instruction that a trace may name."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias, final

import attrs

from shardrules.core.source import short_line, user_line
from shardrules.programs.compiled.collectives import Collective, array_text
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.flow import CALL_ROLES, LOOP_ROLES
from shardrules.programs.compiled.kernels import COPY_STARTS, Kernel, control_computations, find_kernels
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import LOOP, ArrayType, Computation, Instruction, read_types
from shardrules.programs.costs.attention import is_attention
from shardrules.programs.costs.kernels import kernel_seconds
from shardrules.programs.costs.tasks import collective_seconds, copy_task, host_copy
from shardrules.programs.machine.hardware import Hardware

PartKind: TypeAlias = Literal["kernel", "collective", "copy", "control"]
"""A kernel, a collective, a copy beside kernels, or a loop, a branch or a call around others."""

KernelFamily: TypeAlias = Literal["", "matmul", "attention", "convolution", "sort", "copy", "collective"]
"""The work of a kernel that libraries have kernels for; empty for any other."""

_CONTROL_FLOW = (LOOP, "conditional", "call", "async-start", "async-done", "call-start", "call-done")


@final
@attrs.frozen
class ModelledPart:
    """A part of a program that has a time of its own."""

    name: str
    """The name of its instruction. Of a collective that is the one inside of fusions and wrappers."""
    kind: PartKind
    seconds: float
    """Modelled, all runs in one call of the program together."""
    count: int
    """The runs in one call of the program."""
    line: str
    """The line of code; empty if the compiler added it."""
    label: str
    """The operation of a kernel; kind, axes and array of a collective."""
    conditional: bool = False
    """Inside a branch, which need not be taken."""
    inside: tuple[str, ...] = ()
    """The parts inside of a loop, a branch or a call."""
    family: KernelFamily = ""


@final
@attrs.define(eq=False)
class ModelledProgram:
    """The parts of a program by the names that traces have for them."""

    name: str
    parts: Mapping[str, ModelledPart] = attrs.field(repr=False)
    """By the names of all instructions that are a part, or one end of one."""
    types: Mapping[str, tuple[ArrayType, ...]] = attrs.field(repr=False)
    launches: tuple[str, ...] = attrs.field(repr=False)
    """The names of parts that may launch kernels, in the order in which they run; loops and branches run once."""
    _same_types: dict[str, bool] = attrs.field(factory=dict, init=False, repr=False)
    """Traces have thousands of events of each text."""

    def find(self, name: str, text: str = "") -> ModelledPart | None:
        """Returns the part that an instruction is, or is an end of; `None` if the program has none of this name.

        Where the `text` of the instruction is known, it tells another program's `fusion.1` apart by its type.
        """
        part = self.parts.get(name)
        if part is None or not text:
            return part
        if text not in self._same_types:
            # Long texts are cut off: the type comes first.
            definition = text.partition(" = ")[2]
            type_text = definition.partition(") " if definition.startswith("(") else " ")[0]
            self._same_types[text] = read_types(type_text) == self.types[name]
        return part if self._same_types[text] else None

    def covered(self, names: Iterable[str]) -> float:
        """Returns the share of the modelled time that is in instructions of these names; branches need not be taken."""
        parts = {self.parts[name].name: self.parts[name] for name in names if name in self.parts}
        total = sum(part.seconds for part in self.all_parts if not part.conditional)
        return sum(part.seconds for part in parts.values() if not part.conditional) / total if total else 1.0

    def times(self, name: str) -> int:
        """Returns the number of runs of an instruction in one call; 1 if it is unknown."""
        return self.parts[name].count if name in self.parts else 1

    @functools.cached_property
    def all_parts(self) -> tuple[ModelledPart, ...]:
        """Each part once, in the order of the program."""
        return tuple({part.name: part for part in self.parts.values()}.values())


def model_program(
    program: CompiledProgram,
    collectives: Sequence[Collective],
    hardware: Hardware,
    known_seconds: Mapping[str, float] = MappingProxyType({}),
) -> ModelledProgram:
    """Models every instruction of a program that a trace may have an event of.

    `known_seconds`: the time of one run of kernels whose work the program may not have, by their instructions.
    """
    parts: dict[str, ModelledPart] = {}
    kernels = {kernel.name: kernel for kernel in find_kernels(program, find_matmuls(program))}
    distant_ends = _distant_ends(program)
    for collective in collectives:
        # A fusion that computes, too, is a kernel.
        names = [name for name in _ends(program, collective, distant_ends) if name not in kernels]
        parts |= dict.fromkeys(names, _collective_part(collective, hardware))
    control: list[tuple[Computation, Instruction]] = []
    for computation in control_computations(program):
        for instruction in computation.instructions:
            # Starts and ends of collectives are parts by now.
            if instruction.name in parts or instruction.op == "parameter":
                continue
            if instruction.op in COPY_STARTS:
                seconds = copy_task(computation, instruction, "", hardware).seconds
                label = instruction.op.removesuffix("-start")
                part = _part(program, computation, instruction, "copy", label, seconds, family="copy")
                parts |= dict.fromkeys(_starts_and_ends(computation, instruction), part)
            elif instruction.op in _CONTROL_FLOW:
                control.append((computation, instruction))
            else:
                kernel = kernels.get(instruction.name)
                seconds = 0.0 if kernel is None else _kernel_seconds(kernel, hardware, known_seconds)
                label = instruction.custom_call_target or instruction.op
                family: KernelFamily = "" if kernel is None else _family(kernel, label)
                parts[instruction.name] = _part(
                    program, computation, instruction, "kernel", label, seconds, family=family
                )
    # An instruction without time launches nothing.
    launches = [name for name in _inside(program, [program.entry], parts) if parts[name].seconds]
    # A loop, a branch or a call has no time of its own, but those of what is inside.
    parts |= {
        instruction.name: _part(
            program,
            computation,
            instruction,
            "control",
            instruction.op,
            inside=_inside(program, _callees(instruction), parts),
        )
        for computation, instruction in control
    }
    types = {instruction.name: instruction.types for _, instruction in program.walk()}
    return ModelledProgram(program.name, parts, types, tuple(launches))


def _part(
    program: CompiledProgram,
    computation: Computation,
    instruction: Instruction,
    kind: PartKind,
    label: str,
    seconds: float = 0.0,
    *,
    inside: tuple[str, ...] = (),
    family: KernelFamily = "",
) -> ModelledPart:
    """The part that an instruction is, given the seconds of one run."""
    times = program.times(computation.name)
    # The line of the nearest instruction that has one.
    line = short_line(user_line(program.stack(program.cause(computation, instruction))))
    return ModelledPart(
        instruction.name, kind, seconds * times.count, times.count, line, label, times.conditional, inside, family
    )


def _inside(
    program: CompiledProgram, computations: Iterable[str], parts: Mapping[str, ModelledPart]
) -> tuple[str, ...]:
    """The parts in computations and in the loops, branches and calls there, in order."""
    names: dict[str, None] = {}
    for computation in computations:
        for instruction in program.find(computation).instructions:
            if instruction.name in parts:
                names[parts[instruction.name].name] = None
            elif instruction.op in _CONTROL_FLOW:
                names |= dict.fromkeys(_inside(program, _callees(instruction), parts))
    return tuple(names)


def _kernel_seconds(kernel: Kernel, hardware: Hardware, known_seconds: Mapping[str, float]) -> float:
    copy = host_copy(kernel, "", hardware)
    if copy is not None:
        return copy.seconds
    return known_seconds[kernel.name] if kernel.name in known_seconds else kernel_seconds(kernel, hardware)


def _family(kernel: Kernel, label: str) -> KernelFamily:
    # XLA generates loops and reductions itself, also those with a product in them.
    if kernel.matmuls and not kernel.name.startswith(("loop_", "input_")):
        if any(is_attention(matmul) for matmul in kernel.matmuls):
            return "attention"
        return "convolution" if "conv" in label else "matmul"
    if kernel.pass_count > 1:
        return "sort"
    # GPUs copy slices beside other kernels.
    return "copy" if label in ("copy", "fusion-start") else ""


def _collective_part(collective: Collective, hardware: Hardware) -> ModelledPart:
    return ModelledPart(
        collective.name,
        "collective",
        collective_seconds(collective, hardware),
        collective.times.count,
        short_line(user_line(collective.stack)),
        f"{collective.kind} over {collective.axes_text}: {array_text(collective)}",
        collective.times.conditional,
        family="collective",
    )


def _ends(program: CompiledProgram, collective: Collective, distant_ends: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The names of a collective's instructions: its own, those around it, and those that wait for any of these."""
    computation = program.find(collective.computation)
    instruction = computation.by_name[collective.name]
    channel = instruction.attributes.get("channel_id")
    while True:
        yield from _starts_and_ends(computation, instruction)
        calls = [call for call in program.callers(computation.name) if call.role not in LOOP_ROLES]
        # Only fusions and wrappers are one with what they hold; a call or a branch runs other kernels, too.
        if len(calls) != 1 or calls[0].instruction.op not in ("fusion", "async-start"):
            break
        computation, instruction = program.find(calls[0].caller), calls[0].instruction
    yield from distant_ends.get(channel or "", ())


def _starts_and_ends(computation: Computation, start: Instruction) -> Iterator[str]:
    """The names of an instruction, and of those that wait for it in the same computation."""
    waiting = [start]
    for instruction in waiting:  # grows while iterated
        yield instruction.name
        users = computation.users.get(instruction.name, ())
        waiting += [user for user in users if _waits(user) and user not in waiting]


def _distant_ends(program: CompiledProgram) -> dict[str, list[str]]:
    """The fusions that wait for a collective of each channel.

    TPUs wait in a fusion that has a copy of the collective, far from the one that starts it.
    """
    ends: dict[str, list[str]] = {}
    for computation in program.computations:
        if any(inner.custom_call_target == "AsyncCollectiveDone" for inner in computation.instructions):
            channels = [inner.attributes.get("channel_id") for inner in computation.instructions]
            for channel in dict.fromkeys(channel for channel in channels if channel is not None):
                names = [call.instruction.name for call in program.callers(computation.name)]
                ends.setdefault(channel, []).extend(names)
    return ends


def _waits(user: Instruction) -> bool:
    """A later end of the collective whose result an instruction uses."""
    return user.op.endswith(("-done", "-update")) or user.custom_call_target in (
        "AsyncCollectiveStart",
        "AsyncCollectiveDone",
    )


def _callees(instruction: Instruction) -> list[str]:
    roles = (*LOOP_ROLES, *CALL_ROLES)
    return [callee for role in roles for callee in instruction.references(role)]
