"""Matmuls that several devices repeat: for the batch, or for an update of the parameters that could be split."""

import re
from collections.abc import Iterator, Mapping

from shardrules.core.finding import Finding
from shardrules.core.source import short_line, user_line
from shardrules.programs.audits.function import MAX_FLOPS_RATIO, TracedFunction
from shardrules.programs.audits.movement import MAX_NAMES, MovedArrays, Movement, names_text
from shardrules.programs.compiled.collectives import Collective

_DIFFERENTIATED = re.compile(r"\b(jvp|transpose)\(")
"""The operations of a function that JAX differentiates, in their paths."""


def check_repeated_work(function: TracedFunction) -> Iterator[Finding]:
    """Matmuls that several devices repeat, line by line."""
    update = _update_lines(function)
    by_line = {line: flops for line, flops in function.flops_by_line.items() if line not in update}
    if not function.repeats_work or not by_line:
        return
    model_flops, device_flops = (sum(flops) for flops in zip(*by_line.values(), strict=True))
    if device_flops <= MAX_FLOPS_RATIO * model_flops:
        return
    worst = sorted(filter(None, _repeated(by_line)), key=lambda line: by_line[line][0] - by_line[line][1])
    ratios = [(line, *by_line[line]) for line in worst[:MAX_NAMES] if by_line[line][0]]
    yield Finding(
        "warning",
        "replicated-compute",
        f"the matmuls of all {function.device_count} devices are {device_flops:.3g} FLOPs, the function's own "
        f"{model_flops:.3g}: {device_flops / model_flops:.2f} times as many, because devices repeat each other's "
        "work. " + "; ".join(f"{short_line(line)} {repeated / single:.2f} times" for line, single, repeated in ratios),
        remedy="Split the batch, or the activations at these lines, over every axis of the mesh",
        source=worst[0] if worst else "",
    )


def _repeated(flops_by_line: Mapping[str, tuple[int, int]]) -> list[str]:
    return [
        line
        for line, (model_flops, device_flops) in flops_by_line.items()
        if device_flops > MAX_FLOPS_RATIO * model_flops
    ]


def _update_lines(function: TracedFunction) -> list[str]:
    """The lines of an update after the gradients whose matmuls several devices repeat."""
    if not function.has_gradients:
        return []
    matmuls = function.compiled_matmuls
    # A line with a backward pass belongs to the model: what is left repeated comes after the gradients.
    differentiated = {user_line(each.stack) for each in matmuls if _DIFFERENTIATED.search(each.op_name)}
    return [line for line in _repeated(function.flops_by_line) if line and line not in differentiated]


def check_repeated_update(movement: Movement) -> Iterator[Finding]:
    """Matmuls of an optimizer (Newton-Schulz in Muon, the statistics of Shampoo) on matrices that are not split."""
    function, timing = movement.function, movement.timing
    lines = _update_lines(function)
    gathers = [collective for collective in movement.collectives if is_for_update(function, collective)]
    if not lines and not gathers:
        return
    flops = [function.flops_by_line[line] for line in lines]
    model_flops, device_flops = (sum(counts[index] for counts in flops) for index in range(2))
    matmuls = [matmul for matmul in timing.matmuls if user_line(matmul.stack) in lines]
    names = {matmul.name for matmul in matmuls}
    kernels = [kernel for kernel in timing.kernels if user_line(kernel.stack) in lines or kernel.name in names]
    moved = MovedArrays(movement, [(each, array) for each in gathers for array in each.arrays])
    # Split evenly, every device would do its part of the function's own work.
    share = 1 - model_flops / device_flops if device_flops else 0.0
    seconds = timing.kernel_seconds(kernels) * share + moved.seconds
    if gathers:
        largest, paths = moved.largest, moved.parameters
    else:
        places = [(movement.program.find(matmul.computation), matmul.name) for matmul in matmuls]
        factors = [factor for inside, name in places for factor in inside.operand_types(inside.by_name[name])]
        largest = max(factors, key=lambda array: array.nbytes)
        axes = tuple(function.sizes)
        paths = names_text(path for factor in factors for path in movement.arguments.parameters_shaped(factor, axes))
    repeated = (
        f"all {function.device_count} devices compute {device_flops:.3g} FLOPs of matmuls where the function "
        f"has {model_flops:.3g}, {device_flops / model_flops:.2f} times as many; "
        if model_flops
        else ""
    )
    sent = f"{moved.runs} collectives for its matmuls, " * bool(gathers) + f"largest array {largest}"
    sent += f", {moved.on_wire}" * bool(gathers)
    sources = dict.fromkeys([*lines, *(user_line(collective.stack) for collective in gathers)])
    yield Finding(
        timing.severity(seconds),
        "replicated-update",
        f"the update after the gradients multiplies matrices that every device has whole: {repeated}{sent}: "
        f"{timing.cost_text(seconds)}" + f". By shape {paths}" * bool(paths),
        remedy="Split the work by matrix: stack the matrices of equal shape, and constrain the stack to "
        "P(<axes>, None, None) before the update, so that each device updates its own",
        source=next(filter(None, sources), ""),
    )


def is_for_update(function: TracedFunction, collective: Collective) -> bool:
    """Returns whether it brings matrices together for a matmul after the gradients, or sums up the products."""
    is_matmul = collective.op_name.endswith("/dot_general") and not _DIFFERENTIATED.search(collective.op_name)
    is_sum_or_gather = collective.kind in ("all-gather", "all-reduce", "reduce-scatter")
    return is_matmul and is_sum_or_gather and function.has_gradients and collective.group_size > 1
