"""Matmuls that several devices repeat: for the batch, or for an update of the parameters that could be split."""

import re
from collections.abc import Iterator

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import short_line, user_line
from shardrules.programs.audits.checks.costs import MAX_FLOPS_RATIO, MAX_NAMES, cost_text, names_text, severity
from shardrules.programs.audits.facts import AuditFacts
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.costs.collective import collective_seconds

_DIFFERENTIATED = re.compile(r"\b(jvp|transpose)\(")
"""What JAX calls the operations of a function that it differentiates, in their paths."""


def check_repeated_work(facts: AuditFacts) -> Iterator[Finding]:
    """Matmuls that several devices repeat, line by line."""
    update = update_lines(facts)
    by_line = {line: flops for line, flops in facts.flops_by_line.items() if line not in update}
    if facts.flops_ratio <= MAX_FLOPS_RATIO or not by_line:
        return
    model_flops, compiled_flops = (sum(flops) for flops in zip(*by_line.values(), strict=True))
    if compiled_flops <= MAX_FLOPS_RATIO * model_flops:
        return
    worst = sorted(
        (line for line, (model, compiled) in by_line.items() if line and compiled > MAX_FLOPS_RATIO * model),
        key=lambda line: by_line[line][0] - by_line[line][1],
    )
    lines = [
        f"{short_line(line)} {compiled / model:.2f} times"
        for line in worst[:MAX_NAMES]
        for model, compiled in [by_line[line]]
        if model
    ]
    yield Finding(
        "warning",
        "replicated-compute",
        f"the matmuls of all {facts.program.device_count} devices are {compiled_flops:.3g} FLOPs, the function's own "
        f"{model_flops:.3g}: {compiled_flops / model_flops:.2f} times as many, because devices repeat each other's "
        "work. " + "; ".join(lines),
        remedy="Split the batch, or the activations at these lines, over every axis of the mesh",
        source=worst[0] if worst else "",
    )


def update_lines(facts: AuditFacts) -> tuple[str, ...]:
    """Returns the lines of an update after the gradients whose matmuls several devices repeat."""
    if not facts.has_gradients:
        return ()
    differentiated = {user_line(each.stack) for each in facts.matmuls if _DIFFERENTIATED.search(each.op_name)}
    return tuple(
        line
        for line, (model, compiled) in facts.flops_by_line.items()
        if line and line not in differentiated and compiled > MAX_FLOPS_RATIO * model
    )


def check_repeated_update(facts: AuditFacts) -> Iterator[Finding]:
    """Matmuls of an optimizer (Newton-Schulz in Muon, the statistics of Shampoo) on matrices that are not split."""
    lines = update_lines(facts)
    gathers = [collective for collective in facts.collectives if is_for_update(facts, collective)]
    if not lines and not gathers:
        return
    flops = [facts.flops_by_line[line] for line in lines]
    model_flops, compiled_flops = (sum(counts[index] for counts in flops) for index in range(2))
    names = {matmul.name for matmul in facts.matmuls if user_line(matmul.stack) in lines}
    kernels = [kernel for kernel in facts.kernels if user_line(kernel.stack) in lines or kernel.name in names]
    # Split evenly, every device would do its part of the function's own work.
    share = 1 - model_flops / compiled_flops if compiled_flops else 0.0
    seconds = facts.seconds_of(kernels) * share
    seconds += sum(collective_seconds(collective, facts.hardware) for collective in gathers)
    wire_bytes = sum(collective.total_wire_bytes for collective in gathers)
    arrays = [(collective, array) for collective in gathers for array in collective.arrays]
    paths = [path for collective, array in arrays for path in facts.parameters_like(collective, array)]
    repeated = (
        f"all {facts.program.device_count} devices compute {compiled_flops:.3g} FLOPs of matmuls where the function "
        f"has {model_flops:.3g}, {compiled_flops / model_flops:.2f} times as many; "
        if model_flops
        else ""
    )
    factors = [] if arrays else list(_factors(facts, lines))
    axes = tuple(facts.sizes)
    paths += [path for factor in factors for path in facts.parameters_of(factor, axes)]
    largest = max((*(array for _, array in arrays), *factors), key=lambda array: array.nbytes, default=None)
    count = sum(collective.times.count for collective in gathers)
    sent = f"{count} collectives for its matmuls, " * bool(gathers) + f"largest array {largest}"
    sent += f", {bytes_text(wire_bytes)} on the wire per device and step" * bool(gathers)
    sources = dict.fromkeys([*lines, *(user_line(collective.stack) for collective in gathers)])
    yield Finding(
        severity(facts, seconds),
        "replicated-update",
        f"the update after the gradients multiplies matrices that every device has whole: {repeated}{sent}: "
        f"{cost_text(facts, seconds)}" + f". By shape {names_text(paths)}" * bool(paths),
        remedy="Split the work by matrix: stack the matrices of equal shape, and constrain the stack to "
        "P(<axes>, None, None) before the update, so that each device updates its own",
        source=next(filter(None, sources), ""),
    )


def _factors(facts: AuditFacts, lines: tuple[str, ...]) -> Iterator[ArrayType]:
    """Yields what the matmuls of these lines multiply on each device."""
    for matmul in facts.matmuls:
        if user_line(matmul.stack) in lines:
            inside = facts.program.find(matmul.computation)
            yield from inside.operand_types(inside.by_name[matmul.name])


def is_for_update(facts: AuditFacts, collective: Collective) -> bool:
    """Whether it brings matrices together for a matmul after the gradients, or sums up what that gives."""
    is_matmul = collective.op_name.endswith("/dot_general") and not _DIFFERENTIATED.search(collective.op_name)
    is_sum_or_gather = collective.kind in ("all-gather", "all-reduce", "reduce-scatter")
    return is_matmul and is_sum_or_gather and facts.has_gradients and collective.group_size > 1
