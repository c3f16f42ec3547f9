"""Findings and messages about a plan, from what the searches returned."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.finding import Finding, Severity
from shardrules.core.spec import spec_repr
from shardrules.core.text import bytes_text
from shardrules.programs.autoplan.answer.whole import whole_findings
from shardrules.programs.autoplan.graph.machine import has_sheet
from shardrules.programs.autoplan.run.call import Call
from shardrules.programs.autoplan.solve.peak import Peak
from shardrules.programs.autoplan.solve.proof import AT_REST, MemoryBound
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.compiling.saved_names import saved_name_findings
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.traced.program import TracedProgram

COSTLY_RATIO = 2.0
"""The ratio of times from which a pin is called costly, chosen by hand: pins have reasons that the planner does not
know."""

_SHOWN_ARRAYS = 5
"""The arrays that an error lists behind a bound, the largest first; chosen by hand."""

_SHOWN_PINS = 8
"""The pinned arguments that a finding lists, the largest first; chosen by hand."""


_Remark = TypeVar("_Remark")


@final
@attrs.define(eq=False)
class Remarks:
    """Remarks on a plan that is made. Where one fails, the plan is not lost, and a finding says why."""

    findings: list[Finding] = attrs.field(factory=list, init=False)
    """The remarks that failed, and why."""

    def of(
        self, subject: str, compute: Callable[[], _Remark], default: _Remark, severity: Severity = "note"
    ) -> _Remark:
        """Returns what a function computes; the default, and a finding, where it raises an error."""
        try:
            return compute()
        except Exception as error:  # noqa: BLE001  whatever it is, it is in the plan's findings
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self.findings.append(Finding(severity, "not-said", f"{subject} is unknown: {reason:.300}"))
            return default

    def each(self, subject: str, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Returns findings as far as they can be said."""
        results: list[Finding] = []
        self.of(subject, lambda: results.extend(findings), None, "warning")  # what came before an error stays
        return tuple(results)


@final
@attrs.frozen
class PinCosts:
    """The cost of pins, from searches without them and with some of them."""

    is_complete: bool = False
    """True once a search without pins is done."""
    free_seconds: float | None = None
    """The time of a call without pins; `None` if unknown, or if nothing fits."""
    group_seconds: tuple[tuple[tuple[int, ...], float], ...] = ()
    """For groups of pinned arrays, which get the same layout by the same pin, the time with no other pin."""


def machine_findings(mesh: AnyMesh, hardware: Hardware | None) -> Iterator[Finding]:
    if hardware is None and not has_sheet(mesh):
        yield Finding(
            "note",
            "assumed-hardware",
            f"{mesh_text(mesh)} has no devices with a hardware sheet; planned for H100s",
            remedy="Pass hardware=",
        )


def program_findings(call: Call, task: Task, choice: Sequence[int]) -> Iterator[Finding]:
    program = task.problem.program
    # First what the plan assumes about the call, then what it could not plan for.
    yield from _feedback_findings(call)
    yield from whole_findings(task.problem, choice, task.problem.cost(choice))
    yield from _operation_findings(program)
    yield from saved_name_findings(call.jaxpr)
    for spec in task.problem.ignored_specs:
        yield Finding(
            "warning",
            "constraint-ignored",
            f"the function has a constraint {spec}, which does not divide its array or is not a layout of this mesh: "
            "the plan ignores it, and the compiler may not",
            remedy="Correct it, or remove it",
        )
    constant_bytes = sum(program.arrays[array].nbytes for array in program.constants)
    if constant_bytes >= 2**20:  # chosen by hand
        yield Finding(
            "warning",
            "whole-constant",
            f"the function closes over {bytes_text(constant_bytes)} of arrays, which every device holds whole",
            remedy="Pass them as arguments",
        )


def _feedback_findings(call: Call) -> Iterator[Finding]:
    arguments = dict.fromkeys(call.argument_names[call.argument_indices[index]] for index in call.feedback.values())
    if arguments:
        verb = "come" if len(arguments) > 1 else "comes"
        yield Finding(
            "note",
            "fed-back",
            f"{', '.join(arguments)} {verb} back as results of the same structure: in the same layout, and in the same "
            "memory if donated",
        )


def _operation_findings(program: TracedProgram) -> Iterator[Finding]:
    callbacks = sum(operation.name.startswith("debug_") for operation in program.operations)
    if callbacks:
        yield Finding(
            "note",
            "debug-callback",
            f"{callbacks} debug callback{'s gather their' if callbacks > 1 else ' gathers its'} operands",
            remedy="Remove them, or pass them less",
        )
    opaque = sum(operation.role == "opaque" for operation in program.operations)
    if opaque:
        stay = "shard_maps stay" if opaque > 1 else "shard_map stays"
        yield Finding("note", "opaque", f"{opaque} {stay} as written; no figure counts what is computed inside")
    fixed = sum(operation.role == "fixed" for operation in program.operations)
    if fixed:
        yield Finding(
            "note",
            "constrained",
            f"{fixed} constraint{'s' * (fixed > 1)} in the function {'are' if fixed > 1 else 'is'} obeyed",
            remedy="Remove them to leave these layouts to the planner",
        )


def pin_findings(call: Call, pinned: Mapping[int, PartitionSpec], seconds: float, costs: PinCosts) -> Iterator[Finding]:
    """Yields the pins that make a call, which takes `seconds`, much slower: those that do by themselves, else all."""
    if not costs.is_complete:
        yield Finding(
            "note",
            "pins-not-compared",
            "the time limit was reached before the plan could be compared with one without pins",
            remedy="Raise time_limit",
        )
    if costs.free_seconds is None or seconds < COSTLY_RATIO * costs.free_seconds:
        return
    costly = [
        (indices, pin_seconds)
        for indices, pin_seconds in costs.group_seconds
        if pin_seconds >= COSTLY_RATIO * costs.free_seconds
    ]
    # If no pin is costly by itself, they are together.
    for indices, pin_seconds in costly or [(tuple(pinned), seconds)]:
        first = indices[0]
        spec = spec_repr(pinned[first])
        yield Finding(
            "warning",
            "costly-pin",
            f"pinned as {spec}, a call takes {1000 * pin_seconds:.4g} ms; {1000 * costs.free_seconds:.4g} ms without",
            call.paths[first],
            "Remove the pin, or note why you need it",
            tuple(call.structs[first].shape),
            count=len(indices),
        )


def nothing_split(call: Call) -> Finding:
    return Finding(
        "note", "nothing-split", f"nothing in {call.name} is worth splitting: every device computes all of it"
    )


def untried_meshes(meshes: Sequence[str]) -> Finding:
    return Finding(
        "warning",
        "untried-meshes",
        f"the time limit was reached before {', '.join(meshes)} could be tried",
        remedy="Raise time_limit",
    )


def time_is_up(time_limit: float, gap: float) -> Finding:
    """Returns the finding that the search was not done when its time was up."""
    return Finding(
        "warning",
        "time-is-up",
        f"the search was not done after time_limit={time_limit:.3g} s: a plan may exist that is up to "
        f"{100 * gap:.1f} % faster, and another run may find another plan",
        remedy="Raise time_limit",
    )


def may_not_fit(call: Call, limit_bytes: int, peak: Peak, pinned: Sequence[int], costs: PinCosts) -> Finding:
    """Returns the finding that no plan is expected to fit that was found: if pins are behind it, and what to do."""
    message = (
        f"no plan was found that is expected to fit in {bytes_text(limit_bytes)}; this one is modelled to take {peak}"
    )
    remedy = "Pass prove=True to ask the compiler; use more devices, a smaller batch, or jax.checkpoint"
    if pinned and costs.free_seconds is not None:
        # Those that take most memory come first: they are the likely reason.
        largest = sorted(pinned, key=lambda index: -math.prod(call.structs[index].shape))
        message += f". Without the pins one fits. Pinned: {_pins_text([call.paths[index] for index in largest])}"
        remedy = "Remove the pins that split least, or pass prove=True to ask the compiler"
    elif pinned and not costs.is_complete:
        message += "; the time limit was reached before a search without the pins"
    return Finding("warning", "may-not-fit", message, remedy=remedy)


def _pins_text(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN_PINS} more" if len(paths) > _SHOWN_PINS else ""
    return ", ".join(paths[:_SHOWN_PINS]) + more


def near_the_limit(limit_bytes: int, peak: Peak, is_tight: bool = False) -> Finding:
    """Returns the finding that a plan is expected to fit, but may not: as far as is known what compilers do."""
    beyond = f"; of some programs it keeps up to {peak.margin:.2f} times the most" * (peak.at_most <= limit_bytes)
    saved = "; it fits where XLA saves memory, for which it hides less of the communication" * is_tight
    return Finding(
        "note",
        "near-the-limit",
        f"modelled to take {peak} of {bytes_text(limit_bytes)}, as the compiler decides{beyond}{saved}",
        remedy="Pass prove=True to ask the compiler",
    )


def does_not_fit_text(
    name: str,
    devices: str,
    limit_bytes: int,
    bound: MemoryBound,
    pinned_paths: Sequence[str] = (),
    free: MemoryBound | None = None,
    *,
    host_bytes: int = 0,
) -> str:
    """Returns the message where a bound proves that no plan fits. `free` is the bound without pins; `host_bytes` are on
    the host of each device, which the bound leaves out."""
    arrays = [f"{array.name} ({bytes_text(array.nbytes)})" for array in bound.arrays[:_SHOWN_ARRAYS]]
    if len(bound.arrays) > _SHOWN_ARRAYS:
        arrays.append(f"{len(bound.arrays) - _SHOWN_ARRAYS} more")
    pins = " with these pins" if pinned_paths else ""
    hosts = f" and {bytes_text(host_bytes)} of its host" if host_bytes else ""
    text = (
        f"{name} does not fit in {bytes_text(limit_bytes)} on {devices}{pins}: whatever its layouts, it needs "
        f"at least {bytes_text(bound.nbytes)}{hosts} {bound.operation}, for {', '.join(arrays)}"
    )
    if free is not None and free.nbytes <= limit_bytes:
        sizes = {array.name: array.nbytes for array in bound.arrays}
        paths = sorted(pinned_paths, key=lambda path: -sizes.get(path, 0))
        pins = _pins_text(paths)
        return f"{text}. Without the pins nothing proves that. Pinned: {pins}. Remove the pins that split least"
    if bound.operation == AT_REST:
        return f"{text}. Use more devices, or a smaller batch"
    return f"{text}. Use more devices, a smaller batch, or recompute activations (jax.checkpoint)"
