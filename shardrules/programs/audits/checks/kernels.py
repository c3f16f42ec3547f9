"""Arrays that are gathered because a kernel needs them whole.

XLA splits its own operations. A custom call (a kernel of Pallas, a function of another library by FFI) is a black box:
unless it says how, it cannot be split, and every device gets the whole batch and does all of the work. A call back to
Python (`jax.pure_callback`) is one, too.
"""

from collections.abc import Iterator
from typing import final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.programs.audits.checks.costs import cost_text, names_text, severity
from shardrules.programs.audits.facts import AuditFacts
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.custom_calls import is_callback
from shardrules.programs.compiled.text import ArrayType, Instruction
from shardrules.programs.costs.collective import collective_seconds


@final
@attrs.frozen
class _KernelGather:
    collective: Collective
    array: ArrayType
    kernel: Instruction


def check_kernels(facts: AuditFacts) -> Iterator[Finding]:
    """Activations that are gathered for a kernel which cannot be split."""
    groups: dict[tuple[str, str, str], list[_KernelGather]] = {}
    for gather in _kernel_gathers(facts):
        key = (gather.kernel.custom_call_target, gather.collective.axes_text, _line(facts, gather))
        groups.setdefault(key, []).append(gather)
    for (_, axes, line), group in groups.items():
        collectives = list({id(gather.collective): gather.collective for gather in group}.values())
        names = {gather.kernel.name for gather in group}
        kernels = [kernel for kernel in facts.kernels if kernel.name in names]
        # Every device of a group does the work of all of them.
        size = max(collective.group_size for collective in collectives)
        seconds = sum(collective_seconds(collective, facts.hardware) for collective in collectives)
        seconds += facts.seconds_of(kernels) * (size - 1) / size
        wire_bytes = sum(collective.total_wire_bytes for collective in collectives)
        runs = sum(collective.times.count for collective in collectives)
        largest = max((gather.array for gather in group), key=lambda array: array.nbytes)
        paths = names_text(filter(None, facts.paths_of([name for each in collectives for name in each.arguments])))
        yield Finding(
            severity(facts, seconds),
            "gathered-for-kernel",
            f"{runs} x all-gather over {axes}, largest array {largest}: {bytes_text(wire_bytes)} on the wire "
            f"per device and step, for {_reason(group[0].kernel, size)}: {cost_text(facts, seconds)}"
            + f". Arrays: {paths}"
            * bool(paths),
            remedy=f"Call it inside jax.shard_map over {axes}"
            if is_callback(group[0].kernel)
            else f"Call the kernel inside jax.shard_map over {axes}, or tell how to split it "
            "(jax.custom_partitioning with a sharding_rule)",
            axis=axes if axes in facts.sizes else None,
            source=line,
        )


def _reason(kernel: Instruction, size: int) -> str:
    """Why a kernel needs all of an array. Calls back to Python have a name of their own in each backend."""
    if is_callback(kernel):
        name = kernel.op_name.rpartition("/")[2]
        return f"the Python function of {name!r}, which one of {size} devices calls while the others wait"
    return (
        f"the kernel {kernel.custom_call_target!r}, which cannot be split: every device gets all of it, and repeats "
        f"the work of {size} devices"
    )


def _kernel_gathers(facts: AuditFacts) -> Iterator[_KernelGather]:
    """Yields the gathers whose result a kernel takes."""
    for collective in facts.collectives:
        for array, kernel in facts.kernels_behind(collective):
            yield _KernelGather(collective, array, kernel)


def _line(facts: AuditFacts, gather: _KernelGather) -> str:
    lines = [user_line(facts.program.stack(gather.kernel)), user_line(gather.collective.stack)]
    # A callback may be another one of the same name.
    return next(filter(None, reversed(lines) if is_callback(gather.kernel) else lines), "")
