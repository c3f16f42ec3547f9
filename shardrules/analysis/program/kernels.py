"""The kernels of a compiled program: what each reads from memory and writes to it, and the FLOPs inside it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import final

import attrs

from shardrules.analysis.program.flops import Matmul
from shardrules.analysis.program.flow import Times
from shardrules.analysis.program.program import CompiledProgram, Source
from shardrules.analysis.program.text import Computation, Instruction
from shardrules.analysis.program.traffic import fused, is_collective, read_bytes, written_bytes

_STEPS_INTO = ("while", "conditional", "call", "call-start", "async-start")
"""Operations that run another computation kernel by kernel."""

_ROLES = (
    *("body", "condition", "calls", "to_apply", "called_computations"),
    *("branch_computations", "true_computation", "false_computation"),
)
_NO_KERNELS = (
    *_STEPS_INTO,
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "async-update", "after-all", "add-dependency"),
    *("optimization-barrier", "opt-barrier", "domain", "partition-id", "replica-id"),
    *("send", "recv", "infeed", "outfeed"),
    # Between the memories of a device, or to those of its host: the kernels that use the array count it.
    *("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"),
)
_NO_WORK = re.compile(r"AllocateBuffer|ConcatBitcast|AsyncCollective(Start|Done)|Sharding|SPMD|MoveTo|PinTo|annotate_")
"""Custom calls that tell the compiler something and move nothing."""


@final
@attrs.frozen
class Kernel:
    """One kernel of a compiled program, as one device runs it.

    **Arguments:**

    - `name`, `computation`: where it is in the program.
    - `op`: how the program writes it: `"fusion"`, `"dot"`, or the target of a custom call.
    - `op_name`: the path of the JAX operation behind it.
    - `stack`: the lines of Python behind it, the innermost first.
    - `read_bytes`, `written_bytes`: what it reads from memory and writes to it, each time.
    - `flops`: those of the matmuls inside it, each time, as pairs of (dtype, precision) and a number.
    - `times`: how often it runs.
    """

    name: str
    computation: str
    op: str
    op_name: str
    stack: tuple[Source, ...]
    read_bytes: int
    written_bytes: int
    flops: tuple[tuple[tuple[str, str], int], ...]
    times: Times

    @property
    def total_bytes(self) -> int:
        """What it reads and writes in one call of the program."""
        return (self.read_bytes + self.written_bytes) * self.times.count

    @property
    def total_flops(self) -> int:
        """Its FLOPs in one call of the program."""
        return sum(flops for _, flops in self.flops) * self.times.count


def find_kernels(program: CompiledProgram, matmuls: Iterable[Matmul]) -> tuple[Kernel, ...]:
    """Finds the kernels of a program: those of its loops, branches and calls too, but no collectives.

    A fusion is one kernel, whatever it does inside. Some things the text of a program does not tell. The memory that a
    TPU has beside its cores is not told from its main memory: what stays there from one kernel to the next is counted
    as if it went to main memory and back, and so is what stays in a cache.

    **Arguments:**

    - `program`: the program.
    - `matmuls`: its matmuls, as `find_matmuls` returns them.

    **Returns:**

    In the order of the text.

    ```python
    from shardrules.analysis.program.flops import find_matmuls
    from shardrules.analysis.program.program import read_program

    a, b = jnp.ones((64, 128)), jnp.ones((128, 32))
    program = read_program(jax.jit(lambda a, b: a @ b).lower(a, b).compile().as_text())
    (one,) = find_kernels(program, find_matmuls(program))
    assert (one.read_bytes, one.written_bytes) == (a.nbytes + b.nbytes, 64 * 32 * 4)
    assert one.flops == ((("f32", "default"), 2 * 64 * 128 * 32),)
    ```
    """
    inside: dict[str, list[Matmul]] = {}
    for one in matmuls:
        inside.setdefault(one.computation, []).append(one)
    return tuple(
        found
        for computation in _stepped(program)
        for one in computation.instructions
        if (found := _kernel(program, computation, one, inside)) is not None
    )


def _stepped(program: CompiledProgram) -> Iterator[Computation]:
    """Yields the computations that run kernel by kernel, in the order of the text."""
    names = [program.entry]
    for name in names:  # grows as it is walked
        called = [
            each
            for one in program.find(name).instructions
            if one.op in _STEPS_INTO
            for role in _ROLES
            for each in one.references(role)
        ]
        names += [each for each in dict.fromkeys(called) if each not in names]
    for computation in program.computations:
        if computation.name in names and program.times(computation.name).count:
            yield computation


def _kernel(
    program: CompiledProgram, computation: Computation, one: Instruction, inside: Mapping[str, list[Matmul]]
) -> Kernel | None:
    if one.op in _NO_KERNELS or one.op.endswith("-done") or is_collective(one):
        return None
    target = one.attributes.get("custom_call_target", "").strip('"') if one.op.startswith("custom-call") else ""
    if _NO_WORK.match(target):
        return None
    read = read_bytes(program, computation, one)
    within = fused(program, one)
    if within is None:
        matmuls = [each for each in inside.get(computation.name, ()) if each.name == one.name]
    elif not read and any(map(is_collective, within.top.instructions)):
        return None  # a collective with what begins or ends it
    else:
        matmuls = [each for part in within.computations for each in inside.get(part.name, ())]
    flops: dict[tuple[str, str], int] = {}
    for each in matmuls:
        flops[each.dtype, each.precision] = flops.get((each.dtype, each.precision), 0) + each.flops
    return Kernel(
        one.name,
        computation.name,
        target or one.op,
        one.op_name,
        program.stack(one),
        read,
        written_bytes(program, computation, one),
        tuple(flops.items()),
        program.times(computation.name),
    )
