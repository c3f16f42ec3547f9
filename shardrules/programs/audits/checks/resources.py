"""Memory that does not suffice or is not reused, and what the figures of an audit leave out."""

from collections.abc import Iterator

from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.core.text import bytes_text
from shardrules.core.tree import array_kind
from shardrules.programs.audits.arguments import AuditedArguments
from shardrules.programs.audits.function import TracedFunction
from shardrules.programs.audits.movement import names_text
from shardrules.programs.compiled.custom_calls import may_be_matmul, names_of
from shardrules.programs.compiled.flops import uncounted_kernels
from shardrules.programs.compiled.kernel_costs import KernelFacts
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.machine.hardware import Hardware

_LARGE_CONSTANT_BYTES = 2**20
"""Arrays that a function closes over are reported from a MiB on. Chosen by hand: weights are larger, masks smaller."""


def check_memory(arguments: AuditedArguments, hardware: Hardware) -> Iterator[Finding]:
    """A program that does not fit the memory of a device."""
    peak, capacity = arguments.memory.peak_bytes, hardware.memory_bytes
    refusal = arguments.compiled.refusal
    # The devices of a CPU share the memory of the machine, whose size the sheet does not know.
    if (peak <= capacity and not refusal) or hardware == Hardware.named("cpu"):
        return
    excess = f"{bytes_text(peak - capacity)} too much" if peak > capacity else f"and the compiler says: {refusal}"
    largest, nbytes = arguments.memory.largest_share
    heaviest = sorted(zip(arguments.device_bytes, arguments.arrays, strict=True), key=lambda pair: -pair[0])[:3]
    arrays = ", ".join(f"{array.path} {bytes_text(size)}" for size, array in heaviest)
    yield Finding(
        "error",
        "does-not-fit",
        f"a device needs {bytes_text(peak)}, and {hardware.name} has {bytes_text(capacity)}: {excess}. Largest "
        f"share: {largest}, {bytes_text(nbytes)}; largest arguments: {arrays}",
        remedy=arguments.memory.remedy,
    )


def check_constants(function: TracedFunction) -> Iterator[Finding]:
    """Arrays that are part of the program: every device has all of them, and compilers do not count them."""
    arrays = [constant for constant in function.compiled.jaxpr.consts if array_kind(constant) is not None]
    size = sum(array.nbytes for array in arrays)
    if size >= _LARGE_CONSTANT_BYTES:
        largest = sorted(arrays, key=lambda array: -array.nbytes)[:3]
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in largest)
        yield Finding(
            "warning",
            "closed-over",
            f"the function closes over {bytes_text(size)} of arrays ({shapes}). They are constants of the program, "
            "whole on every device, and not counted as memory here",
            remedy="Pass them as arguments",
        )


def check_uncounted(program: CompiledProgram, kernel_facts: KernelFacts) -> Iterator[Finding]:
    """Kernels of unknown FLOPs and loops of unknown length."""
    names = {
        call.name: names_of(computation, call, kernel_facts)
        for computation, call in program.walk()
        if call.op == "custom-call"
    }
    for kernel in uncounted_kernels(program, kernel_facts):
        # The call of a library has no name of its own but its target.
        is_written = may_be_matmul(kernel)
        name = names[kernel.name][0] if is_written else kernel.custom_call_target
        yield Finding(
            "note",
            "uncounted-kernel",
            f"the FLOPs of kernel {name!r} ({kernel.custom_call_target}) are unknown and count as 0",
            remedy=f"{'Give pallas_call a cost_estimate, or pass' if is_written else 'Pass'} "
            f"kernel_costs=[kernel_cost({name!r}, flops=...)]",
            source=user_line(program.stack(kernel)),
        )
    for cost in kernel_facts.unused(names.values()):
        yield Finding(
            "warning",
            "unused-kernel-cost",
            f"kernel_cost({cost.name!r}) matches no kernel of the program",
            remedy="Name a kernel as the program has it, or leave it out",
        )
    for loop in program.unknown_loops:
        yield Finding(
            "note",
            "unknown-loop",
            "the length of a loop is unknown; its body counts once",
            source=user_line(program.stack(loop)),
        )


def check_donation(arguments: AuditedArguments) -> Iterator[Finding]:
    """Donated arrays whose memory no result reuses."""
    unused = [array_index for array_index in arguments.compiled.donated if array_index not in arguments.aliased]
    if unused:
        size = sum(arguments.device_bytes[array_index] for array_index in unused)
        paths = names_text(arguments.arrays[array_index].path for array_index in unused)
        yield Finding(
            "warning",
            "donated-in-vain",
            f"{len(unused)} donated arrays, {bytes_text(size)} per device, are not reused: no remaining result has the "
            f"shape, dtype and sharding of {paths}",
            remedy="Give the results the shardings of the arguments (out_shardings), or do not donate these",
        )
