"""Collectives that no spec, constraint or line of code asks for: each finding has the arrays and the line."""

import itertools
import re
from collections.abc import Iterator
from typing import final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.core.spec import shard_shape
from shardrules.programs.audits.checks.costs import cost_text, names_text
from shardrules.programs.audits.checks.work import is_for_update
from shardrules.programs.audits.facts import AuditFacts, is_explicit
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.compiling.roles import BATCH
from shardrules.programs.costs.collective import collective_seconds

_SMALL_SHARE = 0.01
"""Collectives with a smaller share of all wire bytes are notes: removing them would hardly change the step time.

With 0.02 twice as much communication goes without a warning; with 0.005 more warnings are not worth acting on."""

_MIN_MATRIX_SIZE = 2**12
"""Arrays with fewer elements are statistics and biases: a reduction of one is never the sum of an activation.

Half as many would report vectors of 2,048 to 4,096 features; twice as many would miss a matrix of 64 x 64."""


@final
@attrs.frozen
class _MovedArray:
    """An array in a collective, the program's name of the argument that it is, if any, and its share of the bytes."""

    collective: Collective
    array: ArrayType
    argument: str
    wire_bytes: int


def _moved_arrays(collective: Collective) -> Iterator[_MovedArray]:
    total = max(1, sum(array.nbytes for array in collective.arrays))
    # Compilers may print what an all-to-all moves as one array per device. Together they are a single array.
    if collective.kind == "all-to-all" and len(collective.arrays) > 1:
        first = collective.arrays[0]
        joined = attrs.evolve(first, shape=(len(collective.arrays), *first.shape))
        argument = collective.arguments[0] if collective.arguments else ""
        yield _MovedArray(collective, joined, argument, collective.total_wire_bytes)
        return
    arguments = collective.arguments[: len(collective.arrays)]
    for array, argument in itertools.zip_longest(collective.arrays, arguments, fillvalue=""):
        assert isinstance(array, ArrayType), "there are no more arguments than arrays"
        yield _MovedArray(collective, array, argument, collective.total_wire_bytes * array.nbytes // total)


def check_moves(facts: AuditFacts) -> Iterator[Finding]:
    """Collectives that no spec, constraint or line of code asks for: one finding for each code, kind, axes and line."""
    total = max(1, sum(collective.total_wire_bytes for collective in facts.collectives))
    groups: dict[tuple[str, str, str, str], list[_MovedArray]] = {}
    for collective in facts.collectives:
        # What a kernel needs whole has a finding of its own, and so has what the update multiplies.
        if (
            collective.total_wire_bytes
            and not is_explicit(collective)
            and not facts.kernels_behind(collective)
            and not facts.is_sent_back(collective)
            and not is_for_update(facts, collective)
        ):
            for moved in _moved_arrays(collective):
                code = _move_code(facts, moved)
                line = "" if code == "fsdp" else user_line(collective.stack)
                if code:
                    groups.setdefault((code, collective.kind, collective.axes_text, line), []).append(moved)
    for (code, kind, axes, line), group in groups.items():
        wire_bytes = sum(moved.wire_bytes for moved in group)
        collectives = list({id(moved.collective): moved.collective for moved in group}.values())
        runs = sum(collective.times.count for collective in collectives)
        seconds = sum(collective_seconds(collective, facts.hardware) for collective in collectives)
        largest = max((moved.array for moved in group), key=lambda array: array.nbytes)
        names = names_text(filter(None, facts.paths_of([moved.argument for moved in group])))
        names = names or names_text(path for collective in collectives for path in facts.arguments_near(collective))
        description, nearby, remedy = _MOVES[code]
        text = (description + nearby * bool(names)).format(names=names or "An array", axes=axes)
        yield Finding(
            "note" if code == "fsdp" or wire_bytes < _SMALL_SHARE * total else "warning",
            code,
            f"{runs} x {kind} over {axes}, largest array {largest}: {bytes_text(wire_bytes)} on the wire per device "
            f"and step, {cost_text(facts, seconds)}. {text}",
            remedy=remedy,
            axis=axes if axes in facts.sizes else None,
            source=line,
        )


def _move_code(facts: AuditFacts, moved: _MovedArray) -> str:
    """The code of the finding for a moved array; empty if the move is as it should be."""
    kind, crossed = moved.collective.kind, moved.collective.crossed
    # Compilers send a matmul's operands or results from neighbor to neighbor while they compute with what is there.
    if kind == "collective-permute" and moved.collective.op_name.endswith("/dot_general"):
        return ""
    if kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
        return "" if _is_requested_exchange(facts, moved) else "resharding"
    if kind == "all-gather":
        over_batch = bool(crossed) and all(name in facts.batch_axes for name in crossed)
        if moved.argument in facts.argument_indices:
            role = facts.roles[facts.argument_indices[moved.argument]]
            # Parameters that are gathered over the axis of the batch are FSDP at work; over any other axis the plan
            # split them to be computed with in parts.
            if over_batch and role != BATCH:
                return "fsdp"
            return "" if _is_requested(facts, moved) else "gathered"
        # A gathered parameter that is not an argument is an update: where only the optimizer's state is split, each
        # device computes its part of the new parameters.
        if is_parameter_or_gradient(facts, moved.collective, moved.array) or _is_requested(facts, moved):
            return ""
        return "gathered-batch" if over_batch else "gathered-activation"
    # Sums over the axis of the batch are gradients. Any other array summed over it is an activation: a weight is split
    # along the contracted dimension and was not gathered, so that every device had to compute with the whole batch.
    if (
        kind in ("all-reduce", "reduce-scatter")
        and crossed
        and not is_parameter_or_gradient(facts, moved.collective, moved.array)
    ):
        return "partial-sums" if all(name in facts.example_axes for name in crossed) else ""
    return ""


def is_parameter_or_gradient(facts: AuditFacts, collective: Collective, array: ArrayType) -> bool:
    """Whether an array may be a parameter or its gradient, or is smaller than any matrix."""
    if array.size < _MIN_MATRIX_SIZE:
        return True
    # In a program with gradients a single sum of the forward pass is an activation, whatever its shape. Combined sums
    # have the name of one of them, which says nothing about the others.
    is_sum = collective.kind in ("all-reduce", "reduce-scatter") and len(collective.arrays) == 1
    is_forward = facts.has_gradients and "jvp(" in collective.op_name and "transpose(" not in collective.op_name
    return not (is_sum and is_forward) and facts.may_be_parameter(collective, array)


def _is_requested(facts: AuditFacts, moved: _MovedArray) -> bool:
    """Whether specs request the sharding of an array both before it is gathered and after.

    A constraint on the gathered array alone is not enough: it may be in conflict with the spec of an argument.
    """
    group_size = moved.collective.group_size
    # It is not known which dimension is gathered: any that divides may be.
    before = [
        (*moved.array.shape[:dim], size // group_size, *moved.array.shape[dim + 1 :])
        for dim, size in enumerate(moved.array.shape)
        if size % group_size == 0
    ]
    split_dims = bool(moved.argument)  # compilers may print an argument in pieces of any shape
    return facts.requested_shapes.matches(moved.array.shape, split_dims=split_dims) and any(
        shapes.matches(shape, split_dims=split_dims)
        for shape in before
        for shapes in (facts.requested_shapes, facts.argument_shapes)
    )


def _is_requested_exchange(facts: AuditFacts, moved: _MovedArray) -> bool:
    """Whether a constraint requests the result of an all-to-all, which compilers print in all kinds of pieces."""
    has_tiles = facts.hardware.torus_dims > 0  # TPUs exchange tiles, which are cut across dimensions
    if has_tiles or moved.collective.op_name.endswith("/sharding_constraint"):
        return facts.requested_shapes.matches_size(moved.array.shape)
    return facts.requested_shapes.matches(moved.array.shape, split_dims=True)


_SPLIT_THE_BATCH = "Constrain them at this line: with_sharding_constraint(x, P(<axis of the batch>, ...))"
_NEARBY = "; nearby: {names}"
_MOVES = {
    "fsdp": ("{names}: split over the axis of the batch, and gathered where they are used", "", ""),
    "gathered": (
        "The plan splits {names} over {axes}, and the step gathers them again",
        "",
        "Constrain the activations that they meet to be split over this axis as well, or do not split them over it",
    ),
    "gathered-batch": (
        "Activations that are split over the batch are gathered on every device",
        _NEARBY,
        _SPLIT_THE_BATCH,
    ),
    "gathered-activation": (
        "An activation is gathered on every device, and no constraint asks for it",
        _NEARBY,
        "Split the matrix that it meets along the contracted dimension, or constrain the activation at this line",
    ),
    "partial-sums": (
        "{names}: split along the contracted dimension, and not gathered: every device sums a part for the whole batch",
        "",
        f"{_SPLIT_THE_BATCH}; then the array is gathered",
    ),
    "resharding": (
        "An array is split in one way where it is made and in another where it is used",
        _NEARBY,
        "Constrain both places alike, or give the argument the spec that it is used with",
    ),
}
"""For each code a description, the arrays nearby if they are not in it, and the remedy."""

_REMATERIALISED = re.compile(
    r"cannot go from sharding (?P<old>\{.*?\}(?: last_tile_dim_replicate\})?) to (?P<new>\{.*?\}) efficiently for HLO "
    r"operation %?(?P<name>[\w.\-]+) = (?P<type>[a-z0-9]+\[[\d,]*\])"
)


def check_rematerialised(facts: AuditFacts) -> Iterator[Finding]:
    """Arrays that XLA gathers whole only to split them in another way; it warns about each on standard error."""
    matches = [_REMATERIALISED.search(message) for message in facts.compiled.messages]
    for array, old, new in dict.fromkeys(match.group("type", "old", "new") for match in matches if match):
        # One device calls back to Python: what goes there, and comes back, has a finding of its own.
        if facts.callbacks and any(word in old + new for word in ("maximal", "single_device")):
            continue
        # The warning names no line. The array has the shape of a shard, so constraints with such shards are candidates.
        sizes = tuple(map(int, re.findall(r"\d+", array.partition("[")[2])))
        lines = {
            user_line(stack): None
            for shape, spec, stack in facts.constraints
            if shard_shape(shape, spec, facts.sizes) == sizes
        }
        yield Finding(
            "warning",
            "rematerialised",
            f"{array} goes from {old} to {new}: XLA finds no other way than to gather the whole array on every device "
            "and split it again",
            remedy="Go there in two steps, each of which moves one mesh axis, or keep one of the two shardings",
            source=next(iter(lines)) if len(lines) == 1 else "",
        )
