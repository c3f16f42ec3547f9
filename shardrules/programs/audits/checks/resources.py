"""Memory that does not suffice or is not reused, and what the figures of an audit leave out."""

from collections.abc import Iterator

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.core.tree import array_kind
from shardrules.programs.audits.checks.costs import names_text
from shardrules.programs.audits.facts import AuditFacts
from shardrules.programs.audits.memory import MEMORY_REMEDIES
from shardrules.programs.compiled.custom_calls import may_be_matmul, names_of
from shardrules.programs.compiled.flops import uncounted_kernels
from shardrules.programs.machine.hardware import Hardware

_LARGE_CONSTANT_BYTES = 2**20
"""Arrays that a function closes over are reported from a MiB on: weights are larger, masks and position tables smaller.

With 2 MiB a matrix of 512 x 512 in float32 would pass, with half a MiB a table of positions might be reported."""


def check_memory(facts: AuditFacts) -> Iterator[Finding]:
    """A program that does not fit the memory of a device."""
    peak, capacity = facts.memory.peak_bytes, facts.hardware.memory_bytes
    refusal = facts.compiled.refusal
    # The devices of a CPU share the memory of the machine, whose size the sheet does not know.
    if (peak <= capacity and not refusal) or facts.hardware == Hardware.named("cpu"):
        return
    excess = f"{bytes_text(peak - capacity)} too much" if peak > capacity else f"and the compiler says: {refusal}"
    shares = facts.memory.shares()
    largest = max(shares, key=lambda name: shares[name])
    heaviest = sorted(zip(facts.device_bytes, facts.arguments, strict=True), key=lambda pair: -pair[0])[:3]
    arrays = ", ".join(f"{array.path} {bytes_text(size)}" for size, array in heaviest)
    yield Finding(
        "error",
        "does-not-fit",
        f"a device needs {bytes_text(peak)}, and {facts.hardware.name} has {bytes_text(capacity)}: {excess}. Largest "
        f"share: {largest}, {bytes_text(shares[largest])}; largest arguments: {arrays}",
        remedy=MEMORY_REMEDIES[largest],
    )


def check_constants(facts: AuditFacts) -> Iterator[Finding]:
    """Arrays that are part of the program: every device has all of them, and compilers do not count them."""
    arrays = [constant for constant in facts.compiled.jaxpr.consts if array_kind(constant) is not None]
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


def check_uncounted(facts: AuditFacts) -> Iterator[Finding]:
    """Kernels of unknown FLOPs and loops of unknown length."""
    names = {
        call.name: names_of(computation, call, facts.kernel_facts)
        for computation, call in facts.program.walk()
        if call.op == "custom-call"
    }
    for kernel in uncounted_kernels(facts.program, facts.kernel_facts):
        # The call of a library has no name of its own but its target.
        is_written = may_be_matmul(kernel)
        name = names[kernel.name][0] if is_written else kernel.custom_call_target
        yield Finding(
            "note",
            "uncounted-kernel",
            f"the FLOPs of kernel {name!r} ({kernel.custom_call_target}) are unknown and count as 0",
            remedy=f"{'Give pallas_call a cost_estimate, or pass' if is_written else 'Pass'} "
            f"kernel_costs=[kernel_cost({name!r}, flops=...)]",
            source=user_line(facts.program.stack(kernel)),
        )
    for cost in facts.kernel_facts.unused(names.values()):
        yield Finding(
            "warning",
            "unused-kernel-cost",
            f"kernel_cost({cost.name!r}) matches no kernel of the program",
            remedy="Name a kernel as the program has it, or leave it out",
        )
    for loop in facts.program.unknown_loops:
        yield Finding(
            "note",
            "unknown-loop",
            "the length of a loop is unknown; its body counts once",
            source=user_line(facts.program.stack(loop)),
        )


def check_donation(facts: AuditFacts) -> Iterator[Finding]:
    """Donated arrays whose memory no result reuses."""
    unused = [array_index for array_index in facts.compiled.donated if array_index not in facts.aliased]
    if unused:
        size = sum(facts.device_bytes[array_index] for array_index in unused)
        paths = names_text(facts.arguments[array_index].path for array_index in unused)
        yield Finding(
            "warning",
            "donated-in-vain",
            f"{len(unused)} donated arrays, {bytes_text(size)} per device, are not reused: no remaining result has the "
            f"shape, dtype and sharding of {paths}",
            remedy="Give the results the shardings of the arguments (out_shardings), or do not donate these",
        )
