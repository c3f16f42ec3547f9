"""Collectives that no spec, constraint or line of code asks for: each finding has the arrays and the line."""

import itertools
import re
from collections.abc import Iterator
from typing import final

import attrs

from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.core.spec import shard_shape
from shardrules.programs.audits.checks.work import is_for_update
from shardrules.programs.audits.movement import MovedArrays, Movement, is_explicit, names_text
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.compiling.roles import BATCH

_SMALL_SHARE = 0.01
"""Collectives with a smaller share of all wire bytes are notes. Chosen by hand: without them a step takes as long."""

_MIN_MATRIX_SIZE = 2**12
"""Arrays with fewer elements, than a matrix of 64 x 64, are statistics and biases, and their reductions no sums of
activations. Chosen by hand."""


@final
@attrs.frozen
class _MovedArray:
    """An array in a collective, and the program's name of the argument that it is, if any."""

    collective: Collective
    array: ArrayType
    argument: str


def _moved_arrays(collective: Collective) -> Iterator[_MovedArray]:
    # Compilers may print what an all-to-all moves as one array per device. Together they are a single array.
    if collective.kind == "all-to-all" and len(collective.arrays) > 1:
        first = collective.arrays[0]
        joined = attrs.evolve(first, shape=(len(collective.arrays), *first.shape))
        argument = collective.arguments[0] if collective.arguments else ""
        yield _MovedArray(collective, joined, argument)
        return
    arguments = collective.arguments[: len(collective.arrays)]
    for array, argument in itertools.zip_longest(collective.arrays, arguments, fillvalue=""):
        assert isinstance(array, ArrayType), "there are no more arguments than arrays"
        yield _MovedArray(collective, array, argument)


def check_moves(movement: Movement) -> Iterator[Finding]:
    """Collectives that no spec, constraint or line of code asks for: one finding for each code, kind, axes and line."""
    arguments, timing = movement.arguments, movement.timing
    total = max(1, sum(collective.total_wire_bytes for collective in movement.collectives))
    groups: dict[tuple[str, str, str, str], list[_MovedArray]] = {}
    for collective in movement.collectives:
        # Arrays that a kernel needs whole have a finding of their own, and so have factors of the update.
        if (
            collective.total_wire_bytes
            and not is_explicit(collective)
            and not movement.kernels_behind(collective)
            and not movement.is_sent_back(collective)
            and not is_for_update(movement.function, collective)
        ):
            for moved in _moved_arrays(collective):
                code = _move_code(movement, moved)
                # Gathers of FSDP are as planned: they are one note, whatever line they come from.
                line = "" if code == "fsdp" else user_line(collective.stack)
                if code:
                    groups.setdefault((code, collective.kind, collective.axes_text, line), []).append(moved)
    for (code, _, axes, line), group in groups.items():
        moved = MovedArrays(movement, [(each.collective, each.array) for each in group])
        names = names_text(arguments.paths_of([each.argument for each in group]))
        names = names or names_text(path for each in moved.collectives for path in movement.arguments_near(each))
        description, nearby, remedy = _MOVES[code]
        text = (description + nearby * bool(names)).format(names=names or "An array", axes=axes)
        yield moved.finding(
            "note" if code == "fsdp" or moved.wire_bytes < _SMALL_SHARE * total else "warning",
            code,
            f"{moved}: {moved.on_wire}, {timing.cost_text(moved.seconds)}. {text}",
            remedy,
            line,
        )


def _move_code(movement: Movement, moved: _MovedArray) -> str:
    """The code of the finding for a moved array; empty if the move is as it should be."""
    kind, crossed, arguments = moved.collective.kind, moved.collective.crossed, movement.arguments
    # Compilers send a matmul's operands or results from neighbor to neighbor while they compute with what is there.
    if kind == "collective-permute" and moved.collective.op_name.endswith("/dot_general"):
        return ""
    if kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
        return "" if _is_requested_exchange(movement, moved) else "resharding"
    if kind == "all-gather":
        over_batch = bool(crossed) and all(name in arguments.batch_axes for name in crossed)
        if moved.argument in arguments.indices:
            role = arguments.roles[arguments.indices[moved.argument]]
            # Parameters that are gathered over the axis of the batch are FSDP at work; over any other axis the plan
            # split them to be computed with in parts.
            if over_batch and role != BATCH:
                return "fsdp"
            return "" if _is_requested(movement, moved) else "gathered"
        # A gathered parameter that is not an argument is an update: where only the optimizer's state is split, each
        # device computes its part of the new parameters.
        if is_parameter_or_gradient(movement, moved.collective, moved.array) or _is_requested(movement, moved):
            return ""
        return "gathered-batch" if over_batch else "gathered-activation"
    # Sums over the axis of the batch are gradients. Any other array summed over it is an activation: a weight is split
    # along the contracted dimension and was not gathered, so that every device had to compute with the whole batch.
    if (
        kind in ("all-reduce", "reduce-scatter")
        and crossed
        and not is_parameter_or_gradient(movement, moved.collective, moved.array)
    ):
        return "partial-sums" if all(name in arguments.example_axes for name in crossed) else ""
    return ""


def is_parameter_or_gradient(movement: Movement, collective: Collective, array: ArrayType) -> bool:
    """Returns whether an array has the shape of a parameter or its gradient, or is smaller than any matrix."""
    if array.size < _MIN_MATRIX_SIZE:
        return True
    # In a program with gradients a single sum of the forward pass is an activation, whatever its shape. Combined sums
    # have the name of one of them, which says nothing about the others.
    is_sum = collective.kind in ("all-reduce", "reduce-scatter") and len(collective.arrays) == 1
    is_forward = (
        movement.function.has_gradients and "jvp(" in collective.op_name and "transpose(" not in collective.op_name
    )
    return not (is_sum and is_forward) and movement.is_shaped_like_parameter(collective, array)


def _is_requested(movement: Movement, moved: _MovedArray) -> bool:
    # A constraint on the gathered array alone is not enough: it may be in conflict with the spec of an argument.
    group_size = moved.collective.group_size
    # It is not known which dimension is gathered: any that divides may be.
    before = [
        (*moved.array.shape[:dim], size // group_size, *moved.array.shape[dim + 1 :])
        for dim, size in enumerate(moved.array.shape)
        if size % group_size == 0
    ]
    split_dims = bool(moved.argument)  # compilers may print an argument in pieces of any shape
    requested = movement.function.requested_shapes
    return requested.matches(moved.array.shape, split_dims=split_dims) and any(
        shapes.matches(shape, split_dims=split_dims)
        for shape in before
        for shapes in (requested, movement.arguments.shapes)
    )


def _is_requested_exchange(movement: Movement, moved: _MovedArray) -> bool:
    # Compilers print the result of an all-to-all in all kinds of pieces.
    requested = movement.function.requested_shapes
    has_tiles = movement.timing.hardware.torus_dims > 0  # TPUs exchange tiles, which are cut across dimensions
    if has_tiles or moved.collective.op_name.endswith("/sharding_constraint"):
        return requested.matches_size(moved.array.shape)
    return requested.matches(moved.array.shape, split_dims=True)


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


def check_rematerialised(movement: Movement) -> Iterator[Finding]:
    """Arrays that XLA gathers whole only to split them in another way; it warns about each on standard error."""
    function = movement.function
    matches = [_REMATERIALISED.search(message) for message in function.compiled.messages]
    for array, old, new in dict.fromkeys(match.group("type", "old", "new") for match in matches if match):
        # One device calls back to Python: what goes there, and comes back, has a finding of its own.
        if movement.callbacks and any(word in old + new for word in ("maximal", "single_device")):
            continue
        # The warning names no line. The array has the shape of a shard, so constraints with such shards are candidates.
        sizes = tuple(map(int, re.findall(r"\d+", array.partition("[")[2])))
        lines = {
            user_line(stack): None
            for shape, spec, stack in function.constraints
            if shard_shape(shape, spec, function.sizes) == sizes
        }
        yield Finding(
            "warning",
            "rematerialised",
            f"{array} goes from {old} to {new}: XLA finds no other way than to gather the whole array on every device "
            "and split it again",
            remedy="Go there in two steps, each of which moves one mesh axis, or keep one of the two shardings",
            source=next(iter(lines)) if len(lines) == 1 else "",
        )
