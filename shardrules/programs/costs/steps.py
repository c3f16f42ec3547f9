"""A compiled program as the steps that a device takes, in the order of its schedule.

Everything that takes no time and passes nothing on which something waits is left out, so that steps are quick to play
several times.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias, final

import attrs

from shardrules.core.source import Source, user_line
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.kernels import COPY_STARTS, Kernel
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import LOOP, Computation, Instruction
from shardrules.programs.compiled.traffic import fusion_of, is_collective
from shardrules.programs.costs.kernels import flops_part, kernel_seconds, traffic_part
from shardrules.programs.costs.tasks import (
    OTHER_STREAM,
    BackgroundTask,
    collective_task,
    copy_task,
    host_copy,
)
from shardrules.programs.machine.hardware import Hardware

_CALLS = ("call", "async-start", "call-start")
_CONVEYS = (
    *("get-tuple-element", "tuple", "bitcast", "optimization-barrier", "opt-barrier", "async-update"),
    "add-dependency",
)
"""Operations that hand on what was started before: whoever waits for their result waits for that, too."""

_INDEX = re.compile(r"\bindex=(\d+)")

_CHANNEL = re.compile(r"channel_id=\d+")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="[^"]*"')


@final
@attrs.frozen
class ComputeStep:
    """A kernel."""

    name: str
    line: str
    seconds: float
    is_memory_bound: bool


@final
@attrs.frozen
class StartStep:
    """A task that begins here; with `blocks` the kernels wait until it ends."""

    name: str
    task: BackgroundTask
    blocks: bool
    meeting: str = ""
    """The common key of the instructions of one task, if no value goes from the first to the last."""


@final
@attrs.frozen
class ReceiveStep:
    """The begin of a receive, which ends with the send that it meets."""

    name: str
    meeting: str


@final
@attrs.frozen
class WaitStep:
    """The end of what its operands began, or of what it meets."""

    name: str
    operands: tuple[str, ...]
    meeting: str = ""


@final
@attrs.frozen
class ConveyStep:
    """A value that consists of its operands, or is element `index` of one."""

    name: str
    operands: tuple[str, ...]
    is_tuple: bool = False
    index: int | None = None


@final
@attrs.frozen
class LoopStep:
    """A loop; one of unknown length has one round."""

    name: str
    line: str
    operand: str
    body: str
    condition: str
    rounds: int


@final
@attrs.frozen
class BranchStep:
    """A conditional with the computation and the operand of each branch."""

    name: str
    choices: tuple[tuple[str, tuple[str, ...]], ...]


@final
@attrs.frozen
class CallStep:
    """A computation that runs here; on another stream it is only begun here."""

    name: str
    line: str
    operands: tuple[str, ...]
    computation: str
    is_async: bool = False


Step: TypeAlias = ComputeStep | StartStep | ReceiveStep | WaitStep | ConveyStep | LoopStep | BranchStep | CallStep


@final
@attrs.define
class StepReader:
    """Reads the steps of the computations of a program, each once."""

    program: CompiledProgram
    hardware: Hardware
    kernels: Mapping[tuple[str, str], Kernel]
    collectives: Mapping[str, list[Collective]]
    """By the computation that they are in."""

    _steps: dict[str, tuple[Step, ...]] = attrs.Factory(dict)
    _lines: dict[int, tuple[tuple[Source, ...], str]] = attrs.Factory(dict)

    @classmethod
    def of(
        cls,
        program: CompiledProgram,
        kernels: Iterable[Kernel],
        collectives: Iterable[Collective],
        hardware: Hardware,
    ) -> "StepReader":
        """Prepares to read a program with its kernels and collectives."""
        by_computation: dict[str, list[Collective]] = {}
        for collective in collectives:
            by_computation.setdefault(collective.computation, []).append(collective)
        by_name = {(kernel.computation, kernel.name): kernel for kernel in kernels}
        return cls(program, hardware, by_name, by_computation)

    def read(self, name: str) -> tuple[Step, ...]:
        """Returns the steps of a computation."""
        if name not in self._steps:
            computation = self.program.find(name)
            here = {collective.name: collective for collective in self.collectives.get(name, ())}
            self._steps[name] = tuple(
                step
                for instruction in computation.instructions
                for step in self._steps_of(computation, instruction, here.get(instruction.name))
            )
        return self._steps[name]

    def _steps_of(
        self, computation: Computation, instruction: Instruction, collective: Collective | None
    ) -> list[Step]:
        op, name = instruction.op, instruction.name
        if op in ("parameter", "constant"):
            return []
        # A collective is one whatever operation it is written as, so it comes before the tests of operations.
        if collective is not None:
            return [self._start(instruction, [collective], blocks=_blocks(instruction))]
        if op == LOOP:
            return [self._loop(instruction)]
        if op == "conditional":
            return [_branch(instruction)]
        if op in _CALLS:
            return [self._call(computation, instruction)]
        if op == "recv":
            return [ReceiveStep(name, _meeting(instruction.text))]
        if op in COPY_STARTS:
            line = self._line_near(computation, instruction)
            task = copy_task(computation, instruction, line, self.hardware)
            return [StartStep(name, task, blocks=False)]
        if op.endswith("-done"):
            return [WaitStep(name, instruction.operands)]
        return self._fused(computation, instruction)

    def _fused(self, computation: Computation, instruction: Instruction) -> list[Step]:
        """The steps of an instruction that may be a kernel, with a collective in it or without."""
        kernel = self.kernels.get((computation.name, instruction.name))
        run = [] if kernel is None else [self._run(computation, instruction, kernel)]
        fusion = fusion_of(self.program, instruction)
        if fusion is None:
            return [_convey(instruction)] if instruction.op in _CONVEYS else run
        collectives, is_start = list[Collective](), False
        for part in fusion.computations:
            collectives += self.collectives.get(part.name, ())
            for inner in part.instructions:
                is_start |= inner.custom_call_target == "AsyncCollectiveStart"
                if inner.custom_call_target == "AsyncCollectiveDone":
                    return [WaitStep(instruction.name, (), _channel_of(part)), *run]
        if not collectives:
            return run
        # A collective whose start is printed begins after the kernel that it is fused with. Without, the round of the
        # loop before has begun it: it is first printed in a kernel that it runs beside.
        is_beside = not is_start and all("async_collective_fusion_config" in self._text(each) for each in collectives)
        start = self._start(instruction, collectives, blocks=not is_start and not is_beside)
        start = attrs.evolve(start, meeting=_meeting(self._text(collectives[0])))
        return [start, *run] if is_beside else [*run, start]

    def _text(self, collective: Collective) -> str:
        return self.program.find(collective.computation).by_name[collective.name].text

    def _run(self, computation: Computation, instruction: Instruction, kernel: Kernel) -> Step:
        line = self._line_of(kernel.stack) or self._line_near(computation, instruction)
        copy = host_copy(kernel, line, self.hardware)
        if copy is not None:
            return StartStep(kernel.name, copy, blocks=not instruction.op.endswith("-start"))
        seconds = kernel_seconds(kernel, self.hardware)
        if instruction.op.endswith("-start"):
            return StartStep(
                kernel.name, BackgroundTask(kernel.name, line, "compute", (OTHER_STREAM,), seconds), blocks=False
            )
        is_memory_bound = traffic_part(kernel, self.hardware) >= flops_part(kernel, self.hardware)
        return ComputeStep(kernel.name, line, seconds, is_memory_bound)

    def _start(self, instruction: Instruction, collectives: list[Collective], *, blocks: bool) -> StartStep:
        tasks = [collective_task(each, self._line_of_collective(each), self.hardware) for each in collectives]
        meeting = _meeting(instruction.text) if instruction.op == "send" else ""
        return StartStep(instruction.name, _joined(tasks), blocks, meeting)

    def _loop(self, instruction: Instruction) -> LoopStep:
        trips = self.program.flow.trips[instruction.name]
        (body,), (condition,) = instruction.references("body"), instruction.references("condition")
        rounds = 1 if trips is None else trips
        return LoopStep(instruction.name, self._line(instruction), instruction.operands[0], body, condition, rounds)

    def _call(self, computation: Computation, instruction: Instruction) -> Step:
        called = [
            name for role in ("to_apply", "calls", "called_computations") for name in instruction.references(role)
        ]
        line, is_async = self._line(instruction), instruction.op != "call"
        tasks = self._tasks(called[0]) if is_async else []
        # A call that goes on beside the device, and does nothing but move data, is the start of that.
        if tasks:
            near = self._line_near(computation, instruction)
            tasks = [attrs.evolve(task, line=task.line or near) for task in tasks]
            return StartStep(instruction.name, _joined(tasks), _blocks(instruction))
        return CallStep(instruction.name, line, instruction.operands, called[0], is_async)

    def _tasks(self, name: str) -> list[BackgroundTask]:
        """The collectives and copies of a computation, through calls; none of copies beside kernels."""
        steps, tasks = list(self.read(name)), list[BackgroundTask]()
        for step in steps:  # grows while iterated
            if isinstance(step, StartStep):
                tasks.append(step.task)
            elif isinstance(step, CallStep):
                steps += self.read(step.computation)
        is_move = not any(isinstance(step, ComputeStep | LoopStep | BranchStep) for step in steps)
        return tasks if is_move or any(task.kind == "communication" for task in tasks) else []

    def _line_of_collective(self, collective: Collective) -> str:
        computation = self.program.find(collective.computation)
        start = computation.by_name[collective.name]
        line = self._line_of(collective.stack) or self._line_near(computation, start)
        if not line and start.op == "send":  # what is sent is used where it arrives
            receives = (each for each in computation.instructions if each.op == "recv" and _meet(start, each))
            line = next(filter(None, (self._line_near(computation, receive) for receive in receives)), "")
        return line

    def _line_near(self, computation: Computation, instruction: Instruction) -> str:
        """The line of the nearest instruction that comes from a line of the user; empty if none does.

        Compilers add copies and conversions, and JAX operations of its own, as those around the body of a scan.
        """
        near = [instruction]
        for each in near:  # grows while iterated
            inside = fusion_of(self.program, each)
            parts = inside.top.instructions if inside else ()
            line = next(filter(None, map(self._line, (each, *parts))), "")
            if line:
                return line
            if len(near) < 24:  # of six programs for TPUs and GPUs up to 2 % of the time then has no line
                # What uses a result is more often the reason for it than what made its operands.
                near += computation.users.get(each.name, ())
                near += [computation.by_name[operand] for operand in each.operands]
        return ""

    def _line(self, instruction: Instruction) -> str:
        return self._line_of(self.program.stack(instruction))

    def _line_of(self, stack: tuple[Source, ...]) -> str:
        # Thousands of instructions share few stacks. The stack is kept, so that its id stays its own.
        if id(stack) not in self._lines:
            self._lines[id(stack)] = stack, user_line(stack)
        return self._lines[id(stack)][1]


def _joined(tasks: list[BackgroundTask]) -> BackgroundTask:
    """What one instruction begins, which may be several collectives."""
    resources = dict.fromkeys(resource for task in tasks for resource in task.resources)
    return attrs.evolve(tasks[0], resources=tuple(resources), seconds=sum(task.seconds for task in tasks))


def _blocks(instruction: Instruction) -> bool:
    """Kernels wait for a collective where it begins."""
    if instruction.op == "send":
        return False
    if not instruction.op.endswith("-start"):
        return True
    # The compiler for GPUs marks the pairs of start and end that it runs like one operation.
    configs = [instruction.backend_config, *instruction.backend_config.values()]
    return any(isinstance(config, Mapping) and config.get("is_sync") is True for config in configs)


def _meeting(text: str) -> str:
    # Between slices a send and its receive have channels of their own, but one name.
    match = _RENDEZVOUS.search(text) or _CHANNEL.search(text)
    return "" if match is None else match[0]


def _meet(send: Instruction, receive: Instruction) -> bool:
    return _meeting(send.text) == _meeting(receive.text)


def _channel_of(computation: Computation) -> str:
    channels = [_meeting(inner.text) for inner in computation.instructions if is_collective(inner)]
    return channels[0] if channels else ""


def _convey(instruction: Instruction) -> ConveyStep:
    match = _INDEX.search(instruction.text) if instruction.op == "get-tuple-element" else None
    if match is not None:
        return ConveyStep(instruction.name, instruction.operands, index=int(match[1]))
    return ConveyStep(instruction.name, instruction.operands, is_tuple=instruction.op == "tuple")


def _branch(instruction: Instruction) -> BranchStep:
    roles = ("branch_computations", "true_computation", "false_computation")
    computations = [name for role in roles for name in instruction.references(role)]
    operands = [(operand,) for operand in instruction.operands[1:]]
    return BranchStep(instruction.name, tuple(zip(computations, operands, strict=False)))
