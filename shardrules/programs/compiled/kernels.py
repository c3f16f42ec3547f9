"""The kernels of a compiled program: what each reads from memory and writes to it, and the FLOPs inside it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import final

import attrs

from shardrules.core.source import Source
from shardrules.programs.compiled.custom_calls import NO_WORK, kernel_names
from shardrules.programs.compiled.flops import Matmul
from shardrules.programs.compiled.flow import CALL_ROLES, LOOP_ROLES, Times, printed_trips
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import HOST_MEMORY, LOOP, Computation, Instruction
from shardrules.programs.compiled.traffic import (
    fusion_of,
    gathered_bytes,
    is_collective,
    pass_count,
    read_bytes,
    result_types,
    written_bytes,
)

_CONTROL_FLOW = (LOOP, "conditional", "call", "call-start", "async-start")
"""Operations that run another computation kernel by kernel."""

COPY_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
"""Operations that begin a copy from one memory to another, or inside one."""

_NO_KERNELS = (
    *_CONTROL_FLOW,
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "async-update", "after-all", "add-dependency"),
    *("optimization-barrier", "opt-barrier", "domain", "partition-id", "replica-id"),
    *("send", "recv", "infeed", "outfeed"),
    # Copies between the memories of a device, or to its host: the kernels that use the array count its bytes.
    *COPY_STARTS,
)


@final
@attrs.frozen
class Kernel:
    """One kernel of a compiled program, as one device runs it. Bytes and FLOPs are for each time that it runs."""

    name: str  # of the instruction
    computation: str
    op: str  # how the program writes it: "fusion", "dot", or the target of a custom call
    op_name: str  # the path of the JAX operation
    stack: tuple[Source, ...]  # lines of Python, the innermost first
    read_bytes: int
    written_bytes: int
    flops: tuple[tuple[tuple[str, str], int], ...]
    """The FLOPs of the matmuls inside it, in pairs of (dtype, precision) and FLOPs."""

    times: Times
    matmuls: tuple[Matmul, ...] = ()
    """The same matmuls with their shapes: hardware has a rate for each."""

    estimated_cycles: int = 0
    """The time that the compiler expects, in cycles of a TPU's clock; 0 without an estimate."""

    names: tuple[str, ...] = ()
    """For a custom call the name of its kernel and its target."""

    is_scalar: bool = False
    """Its results are scalars, such as the counter of a loop."""

    gathered_bytes: int = 0
    """The bytes read and written in short rows at arbitrary positions."""

    pass_count: int = 1
    """The number of times that it reads and writes all of that: sorting takes several passes."""

    host_bytes: tuple[int, int] = (0, 0)
    """The bytes read from the memory of the host, and written to it."""

    @property
    def device_bytes(self) -> int:
        """The bytes that each pass reads from the memory of the device, and writes to it."""
        return self.read_bytes + self.written_bytes - sum(self.host_bytes)

    @property
    def is_host_copy(self) -> bool:
        """It does little but fetch an array from the memory of the host, or send one there."""
        return sum(self.host_bytes) > 0 and not self.flops and self.device_bytes <= 2 * sum(self.host_bytes)

    @property
    def total_bytes(self) -> int:
        """The bytes that it reads and writes in one call of the program."""
        return (self.read_bytes + self.written_bytes) * self.times.count

    @property
    def total_flops(self) -> int:
        """Its FLOPs in one call of the program."""
        return sum(flops for _, flops in self.flops) * self.times.count


def find_kernels(program: CompiledProgram, matmuls: Iterable[Matmul]) -> tuple[Kernel, ...]:
    """Finds the kernels of a program in the order of the text: those in loops, branches and calls, but no collectives.

    A fusion is one kernel. The text does not tell the memories of a TPU apart: what stays in the memory beside the
    cores between two kernels counts as if it went to main memory and back. So does what stays in a cache.

    ```python
    from shardrules.programs.compiled.flops import find_matmuls
    from shardrules.programs.compiled.kernels import find_kernels
    from shardrules.programs.compiled.program import read_program

    a, b = jnp.ones((64, 128)), jnp.ones((128, 32))
    program = read_program(jax.jit(lambda a, b: a @ b).lower(a, b).compile().as_text())
    (kernel,) = find_kernels(program, find_matmuls(program))
    assert (kernel.read_bytes, kernel.written_bytes) == (a.nbytes + b.nbytes, 64 * 32 * 4)
    assert kernel.flops == ((("f32", "default"), 2 * 64 * 128 * 32),)
    ```
    """
    matmuls_in: dict[str, list[Matmul]] = {}
    for matmul in matmuls:
        matmuls_in.setdefault(matmul.computation, []).append(matmul)
    kernels = (
        _read_kernel(program, computation, instruction, matmuls_in)
        for computation in control_computations(program)
        if not _is_idle_condition(program, computation)
        for instruction in computation.instructions
    )
    return tuple(kernel for kernel in kernels if kernel is not None)


def _is_idle_condition(program: CompiledProgram, computation: Computation) -> bool:
    """The condition of a loop with known rounds: nothing has to compute it."""
    calls = program.callers(computation.name)
    return bool(calls) and all(
        call.role == "condition" and printed_trips(call.instruction) is not None for call in calls
    )


def control_computations(program: CompiledProgram) -> Iterator[Computation]:
    """Yields the computations that run kernel by kernel, in the order of the text."""
    names = [program.entry]
    for name in names:  # grows while iterated
        called = [
            callee
            for instruction in program.find(name).instructions
            if instruction.op in _CONTROL_FLOW
            for role in (*LOOP_ROLES, *CALL_ROLES)
            for callee in instruction.references(role)
        ]
        names += [callee for callee in dict.fromkeys(called) if callee not in names]
    # In the order of the text; the walk above has callers first.
    for computation in program.computations:
        if computation.name in names and program.times(computation.name).count:
            yield computation


def _read_kernel(
    program: CompiledProgram, computation: Computation, instruction: Instruction, matmuls_in: Mapping[str, list[Matmul]]
) -> Kernel | None:
    if instruction.op in _NO_KERNELS or instruction.op.endswith("-done") or is_collective(instruction):
        return None
    if NO_WORK.match(instruction.custom_call_target):
        return None
    bytes_read = read_bytes(program, computation, instruction)
    fusion = fusion_of(program, instruction)
    if fusion is None:
        matmuls = [matmul for matmul in matmuls_in.get(computation.name, ()) if matmul.name == instruction.name]
    elif not bytes_read and any(map(is_collective, fusion.top.instructions)):
        return None  # a collective, fused with what starts or ends it
    else:
        matmuls = [matmul for part in fusion.computations for matmul in matmuls_in.get(part.name, ())]
    # By dtype and precision: hardware has a rate for each.
    flops: dict[tuple[str, str], int] = {}
    for matmul in matmuls:
        flops[matmul.dtype, matmul.precision] = flops.get((matmul.dtype, matmul.precision), 0) + matmul.flops
    bytes_written = written_bytes(program, computation, instruction)
    known_bytes = [matmul.nbytes for matmul in matmuls if matmul.nbytes is not None]
    if known_bytes:  # a kernel need not read all of its operands, and may read some of them many times
        bytes_written = min(bytes_written, sum(known_bytes))
        bytes_read = sum(known_bytes) - bytes_written
    host_results = sum(
        result.nbytes for result in result_types(computation, instruction) if result.memory_space == HOST_MEMORY
    )
    from_host = min(bytes_read, read_bytes(program, computation, instruction, of_host=True))
    return Kernel(
        instruction.name,
        computation.name,
        instruction.custom_call_target or instruction.op,
        instruction.op_name,
        program.stack(instruction),
        bytes_read,
        bytes_written,
        tuple(item for item in flops.items() if item[1]),
        program.times(computation.name),
        tuple(matmuls),
        _estimated_cycles(instruction),
        kernel_names(instruction) if instruction.op == "custom-call" else (),
        instruction.op != "custom-call" and not any(each.shape for each in instruction.types),
        min(bytes_read + bytes_written, gathered_bytes(program, computation, instruction)),
        pass_count(program, computation, instruction),
        (from_host, min(bytes_written, host_results)),
    )


def _estimated_cycles(instruction: Instruction) -> int:
    """The compiler's own estimate, which libtpu prints for nearly everything but kernels that users wrote."""
    # Reading a configuration is slow, and it may hold a whole kernel: look for the word first.
    if "estimated_cycles" not in instruction.text:
        return 0
    window = instruction.backend_config.get("window_config")
    cycles = int(window.get("estimated_cycles", 0)) if isinstance(window, dict) else 0
    # The largest integer stands where it expects nothing.
    return max(0, cycles) if cycles < 2**63 - 1 else 0
