"""What is gathered or computed again for the backward pass, because `jax.checkpoint` does not save it.

Gathering again saves the memory of gathered weights, and costs nothing while devices compute for longer than they
gather. With few tokens on a device it is the other way around: every step waits for weights that it had already.
"""

from collections.abc import Container, Iterator, Sequence

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import equation_line, user_line
from shardrules.programs.audits.checks.costs import cost_text, names_text, severity
from shardrules.programs.audits.facts import AuditFacts
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiling.roles import PARAMETERS
from shardrules.programs.compiling.saved_names import saved_name_findings, saving_policies
from shardrules.programs.costs.collective import collective_seconds
from shardrules.programs.jaxprs.calls import CHECKPOINT_SCOPE, RECOMPUTED_SCOPE


def check_regathered(facts: AuditFacts) -> Iterator[Finding]:
    """Weights that are gathered again for the backward pass, where that is not hidden and memory is left."""
    again = _gathers_again(facts)
    if not again:
        return
    # What devices compute meanwhile hides the gathers of the same loop.
    seconds = 0.0
    for name in dict.fromkeys(facts.round_of(collective) for collective in again):
        gathers = sum(collective_seconds(each, facts.hardware) for each in again if facts.round_of(each) == name)
        seconds += min(gathers, facts.exposed_seconds(name))
    kept_bytes = sum(collective.total_payload_bytes for collective in again)
    free_bytes = facts.hardware.memory_bytes - facts.memory.peak_bytes
    if not seconds or (kept_bytes > free_bytes and not facts.is_on_cpu):
        return
    wire_bytes = sum(collective.total_wire_bytes for collective in again)
    runs = sum(collective.times.count for collective in again)
    largest = max((array for collective in again for array in collective.arrays), key=lambda array: array.nbytes)
    paths = filter(None, facts.paths_of([path for collective in again for path in collective.arguments]))
    axes = list(dict.fromkeys(collective.axes_text for collective in again))
    yield Finding(
        severity(facts, seconds),
        "gathered-twice",
        f"{names_text(paths)}: gathered to compute with, and gathered again ({runs} x all-gather over "
        f"{', '.join(axes)}, largest array {largest}, {bytes_text(wire_bytes)} on the wire per device and step) "
        "to compute the same again in the backward pass. Too little is computed meanwhile to hide that: "
        f"{cost_text(facts, seconds)}. To keep them takes {bytes_text(kept_bytes)}, and "
        f"{bytes_text(max(0, free_bytes))} are free",
        remedy="Give the gathered weights a name, checkpoint_name(with_sharding_constraint(w, P()), 'gathered'), and "
        "save it (jax.checkpoint_policies.save_only_these_names); or compute with more tokens on each device",
        axis=axes[0] if len(axes) == 1 and axes[0] in facts.sizes else None,
        source=next(filter(None, (user_line(collective.stack) for collective in again)), ""),
    )


def _gathers_again(facts: AuditFacts) -> list[Collective]:
    """The gathers of parameters to recompute something, after they were gathered to compute it."""
    again: list[Collective] = []
    gathered: set[str] = set()
    for collective in facts.collectives:
        if collective.kind == "all-gather":
            if _is_recomputed(facts, collective):
                again.append(collective)
            else:
                gathered.update(collective.arguments)
    return [collective for collective in again if _are_parameters(facts, collective.arguments, gathered)]


def _are_parameters(facts: AuditFacts, names: Sequence[str], gathered: Container[str]) -> bool:
    """Whether all of these are parameters that are `gathered` before."""
    indices = [facts.argument_indices.get(name) for name in names if name in gathered]
    return 0 < len(indices) == len(names) and all(
        index is not None and facts.roles[index] == PARAMETERS for index in indices
    )


def _is_recomputed(facts: AuditFacts, collective: Collective) -> bool:
    if _is_in_backward(collective.op_name):
        return True
    # Combined gathers have the name of one of their users.
    return any(
        RECOMPUTED_SCOPE in use.instruction.op_name
        for values in facts.results_of(collective)
        for use in facts.uses_of(values)
    )


def _is_in_backward(op_name: str) -> bool:
    """Whether an operation repeats a part of a checkpointed function, or is of its backward pass."""
    return RECOMPUTED_SCOPE in op_name or ("transpose(" in op_name and CHECKPOINT_SCOPE in op_name)


def check_saved_names(facts: AuditFacts) -> Iterator[Finding]:
    """Names of policies that match nothing, with what it costs to compute everything again."""
    recomputed = [kernel for kernel in facts.kernels if RECOMPUTED_SCOPE in kernel.op_name]
    claimed = sum(kernel.total_flops for kernel in recomputed)
    flops = _repeated_flops(facts, claimed)
    seconds = facts.seconds_of(recomputed) * (flops / claimed if claimed else 1)
    policies = [policy for policy in saving_policies(facts.compiled.jaxpr) if policy.missing]
    for policy, finding in zip(policies, saved_name_findings(facts.compiled.jaxpr), strict=True):
        if policy.matching:
            # What is computed again although some names match may be what the policy leaves out.
            yield finding
        elif claimed and not flops:
            text = f"{finding.message}. It costs no matmuls here: this compiler merges those that are repeated"
            yield attrs.evolve(finding, message=text, severity="note")
        else:
            again = f"{flops:.3g} FLOPs" if flops else "no matmuls"
            text = f"{finding.message}. The backward pass computes {again} again: {cost_text(facts, seconds)}"
            yield attrs.evolve(finding, message=text, severity=severity(facts, seconds))


def _repeated_flops(facts: AuditFacts, claimed: float) -> float:
    """The FLOPs on a device that matmuls are repeated for, at most `claimed`: those beyond the function's own.

    Compilers merge an operation and its repetition where nothing keeps them apart, and what is left may have the name
    of the repetition.
    """
    lines = {equation_line(matmul.equation): 0.0 for matmul in facts.model_matmuls if matmul.is_recomputed}
    if not all(line in facts.flops_by_line for line in lines):
        return claimed
    for matmul in facts.model_matmuls:
        line = equation_line(matmul.equation)
        if line in lines and not matmul.is_recomputed:
            lines[line] += matmul.flops
    excess = sum(max(0.0, facts.flops_by_line[line][1] - flops) for line, flops in lines.items())
    return min(claimed, excess / facts.program.device_count)
