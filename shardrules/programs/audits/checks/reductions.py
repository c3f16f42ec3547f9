"""Sums of which every device keeps a slice, and which it gets whole: an all-reduce in place of a reduce-scatter.

The compiler for TPUs scatters only what it can cut between tiles of 512 bytes. If the last dimension of a weight is
split into shorter rows, its gradient is summed whole on every device, with twice the bytes, and cut afterwards.
"""

from collections.abc import Iterator
from typing import final

import attrs

from shardrules.core.finding import Finding
from shardrules.programs.audits.movement import MovedArrays, Movement, grouped, place_of, share_of
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.compiled.uses import is_elementwise, is_move, uses

TILE_ROW_BYTES = 512
"""The row of a TPU's tile: 128 lanes of 4 bytes. Shorter rows cannot be cut out of it."""

_SLICES = ("dynamic-slice", "slice")


@final
@attrs.frozen
class _WholeSum:
    collective: Collective
    array: ArrayType
    kept: ArrayType
    seconds: float
    """The time that a reduce-scatter in its place would save."""


def check_whole_reductions(movement: Movement) -> Iterator[Finding]:
    """All-reduces of which devices use a slice only, except on CPUs, whose compiler has no reduce-scatter."""
    if movement.arguments.is_on_cpu:
        return
    groups = grouped(_whole_sums(movement), lambda each: (place_of(each.collective), _is_narrow(movement, each)))
    for ((*_, line), is_narrow), group in groups.items():
        moved = MovedArrays(movement, [(whole.collective, whole.array) for whole in group])
        seconds = sum(whole.seconds for whole in group)
        kept = max(group, key=lambda whole: whole.array.nbytes).kept
        reason = (
            f": its rows of {kept.shape[-1] * kept.bits // 8} bytes are shorter than those of a tile, "
            f"{TILE_ROW_BYTES} bytes, so that the compiler cannot scatter the sum"
            if is_narrow
            else ""
        )
        yield moved.finding(
            movement.timing.severity(seconds),
            "reduced-whole",
            f"{moved}: {moved.on_wire}, of which a reduce-scatter sends half: {movement.timing.cost_text(seconds)}. "
            f"Every device keeps {kept} of it{reason}"
            + f". By shape the gradient of {moved.parameters}"
            * bool(moved.parameters),
            f"Split another dimension over this axis, so that the last one keeps rows of {TILE_ROW_BYTES} bytes or more"
            if is_narrow
            else "Split another dimension over this axis, one that it divides",
            line,
        )


def _whole_sums(movement: Movement) -> Iterator[_WholeSum]:
    for collective in movement.collectives:
        if collective.kind != "all-reduce" or not collective.crossed:
            continue
        # A reduce-scatter sends half of what an all-reduce sends, which gathers the sums again.
        scatter = attrs.evolve(collective, kind="reduce-scatter", wire_bytes=-(-collective.wire_bytes // 2))
        saved = movement.timing.seconds(collective) - movement.timing.seconds(scatter)
        for array, values in zip(collective.arrays, movement.results_of(collective), strict=True):
            kept = [
                use.instruction.types[0] if use.instruction.op in _SLICES else None
                for use in uses(movement.program, values, lambda user: is_move(user) or is_elementwise(user))
            ]
            slices = [each for each in kept if each is not None]
            # A scalar has no slices, and what one use needs whole has to be whole.
            if (
                slices
                and len(slices) == len(kept)
                and all(each.size * collective.group_size <= array.size for each in slices)
            ):
                yield _WholeSum(collective, array, slices[0], saved * share_of(collective, array))


def _is_narrow(movement: Movement, whole: _WholeSum) -> bool:
    """Rows shorter than a tile's, where the last dimension is the split one."""
    kept, array = whole.kept, whole.array
    has_tiles = movement.timing.hardware.torus_dims > 0
    if not has_tiles or not kept.shape or kept.shape[-1] * kept.bits // 8 >= TILE_ROW_BYTES:
        return False
    return kept.shape[-1] < array.shape[-1]
