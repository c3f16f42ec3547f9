"""Weights and results that are gathered or computed again for the backward pass: `jax.checkpoint` does not save them.

Gathering again saves the memory of gathered weights, and costs nothing while devices compute for longer than they
gather. With few tokens on a device it is the other way around: every step waits for weights that it had already.
"""

from collections.abc import Container, Iterator, Sequence

import attrs

from shardrules.core.finding import Finding
from shardrules.core.source import equation_line
from shardrules.core.text import bytes_text
from shardrules.programs.audits.arguments import AuditedArguments
from shardrules.programs.audits.function import TracedFunction
from shardrules.programs.audits.movement import MovedArrays, Movement
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.uses import uses
from shardrules.programs.compiling.roles import PARAMETERS
from shardrules.programs.compiling.saved_names import saved_name_findings, saving_policies
from shardrules.programs.jaxprs.calls import CHECKPOINT_SCOPE, RECOMPUTED_SCOPE


def check_regathered(movement: Movement) -> Iterator[Finding]:
    """Weights that are gathered again for the backward pass, where that is not hidden and memory is left."""
    again = _gathers_again(movement)
    if not again:
        return
    timing = movement.timing
    # The work of devices meanwhile hides the gathers of the same loop.
    seconds = 0.0
    for name in dict.fromkeys(map(timing.round_of, again)):
        gathers = sum(timing.seconds(each) for each in again if timing.round_of(each) == name)
        seconds += min(gathers, timing.exposed_seconds(name))
    kept_bytes = sum(collective.total_payload_bytes for collective in again)
    if not seconds or not movement.has_room_for(kept_bytes):
        return
    moved = MovedArrays(movement, [(collective, array) for collective in again for array in collective.arrays])
    yield moved.finding(
        timing.severity(seconds),
        "gathered-twice",
        f"{moved.names}: gathered to compute with, and gathered again ({moved}, {moved.on_wire}) "
        "to compute the same again in the backward pass. Too little is computed meanwhile to hide that: "
        f"{timing.cost_text(seconds)}. To keep them takes {bytes_text(kept_bytes)}, and "
        f"{bytes_text(max(0, movement.free_bytes))} are free",
        "Give the gathered weights a name, checkpoint_name(with_sharding_constraint(w, P()), 'gathered'), and "
        "save it (jax.checkpoint_policies.save_only_these_names); or compute with more tokens on each device",
    )


def _gathers_again(movement: Movement) -> list[Collective]:
    """The gathers of parameters to recompute something, after they were gathered to compute it."""
    again: list[Collective] = []
    gathered: set[str] = set()
    for collective in movement.collectives:
        if collective.kind == "all-gather":
            if _is_recomputed(movement, collective):
                again.append(collective)
            else:
                gathered.update(collective.arguments)
    return [collective for collective in again if _are_parameters(movement.arguments, collective.arguments, gathered)]


def _are_parameters(arguments: AuditedArguments, names: Sequence[str], gathered: Container[str]) -> bool:
    # All of them are parameters, and gathered before.
    indices = [arguments.indices.get(name) for name in names if name in gathered]
    return 0 < len(indices) == len(names) and all(
        index is not None and arguments.roles[index] == PARAMETERS for index in indices
    )


def _is_recomputed(movement: Movement, collective: Collective) -> bool:
    if _is_in_backward(collective.op_name):
        return True
    # Combined gathers have the name of one of their users.
    return any(
        RECOMPUTED_SCOPE in use.instruction.op_name
        for values in movement.results_of(collective)
        for use in uses(movement.program, values)
    )


def _is_in_backward(op_name: str) -> bool:
    """An operation that repeats a part of a checkpointed function, or is of its backward pass."""
    return RECOMPUTED_SCOPE in op_name or ("transpose(" in op_name and CHECKPOINT_SCOPE in op_name)


def check_saved_names(function: TracedFunction, timing: Timing) -> Iterator[Finding]:
    """Names of policies that match nothing, with what it costs to compute everything again."""
    recomputed = [kernel for kernel in timing.kernels if RECOMPUTED_SCOPE in kernel.op_name]
    claimed = sum(kernel.total_flops for kernel in recomputed)
    flops = _repeated_flops(function, claimed)
    seconds = timing.kernel_seconds(recomputed) * (flops / claimed if claimed else 1)
    policies = [policy for policy in saving_policies(function.compiled.jaxpr) if policy.missing]
    for policy, finding in zip(policies, saved_name_findings(function.compiled.jaxpr), strict=True):
        if policy.matching:
            # The policy may leave out on purpose what is computed again although some names match.
            yield finding
        elif claimed and not flops:
            text = f"{finding.message}. It costs no matmuls here: this compiler merges those that are repeated"
            yield attrs.evolve(finding, message=text, severity="note")
        else:
            again = f"{flops:.3g} FLOPs" if flops else "no matmuls"
            text = f"{finding.message}. The backward pass computes {again} again: {timing.cost_text(seconds)}"
            yield attrs.evolve(finding, message=text, severity=timing.severity(seconds))


def _repeated_flops(function: TracedFunction, claimed: float) -> float:
    """The FLOPs on a device that matmuls are repeated for, at most `claimed`: those beyond the function's own.

    Compilers merge an operation and its repetition where nothing keeps them apart, and what is left may have the name
    of the repetition.
    """
    lines = {equation_line(matmul.equation): 0.0 for matmul in function.matmuls if matmul.is_recomputed}
    # A line with uncertain FLOPs cannot be compared, and then the claim stands.
    if not all(line in function.flops_by_line for line in lines):
        return claimed
    for matmul in function.matmuls:
        line = equation_line(matmul.equation)
        if line in lines and not matmul.is_recomputed:
            lines[line] += matmul.flops
    excess = sum(max(0.0, function.flops_by_line[line][1] - flops) for line, flops in lines.items())
    return min(claimed, excess / function.device_count)
