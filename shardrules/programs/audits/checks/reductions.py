"""Sums of which every device keeps a slice, and which it gets whole: an all-reduce in place of a reduce-scatter.

The compiler for TPUs scatters only what it can cut between tiles of 512 bytes. If the last dimension of a weight is
split into shorter rows, its gradient is summed whole on every device, with twice the bytes, and cut afterwards.
"""

from collections.abc import Iterator
from typing import final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.programs.audits.checks.costs import cost_text, names_text, severity, share_of
from shardrules.programs.audits.facts import AuditFacts
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.compiled.uses import is_elementwise, is_move
from shardrules.programs.costs.collective import collective_seconds

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
    """What a reduce-scatter in its place would save."""


def check_whole_reductions(facts: AuditFacts) -> Iterator[Finding]:
    """All-reduces of which devices use a slice only, except on CPUs, whose compiler has no reduce-scatter."""
    if facts.is_on_cpu:
        return
    groups: dict[tuple[str, str, bool], list[_WholeSum]] = {}
    for whole in _whole_sums(facts):
        key = (whole.collective.axes_text, user_line(whole.collective.stack), _is_narrow(facts, whole))
        groups.setdefault(key, []).append(whole)
    for (axes, line, is_narrow), group in groups.items():
        seconds = sum(whole.seconds for whole in group)
        runs = sum(whole.collective.times.count for whole in group)
        largest = max(group, key=lambda whole: whole.array.nbytes)
        names = names_text(path for whole in group for path in facts.parameters_like(whole.collective, whole.array))
        wire_bytes = sum(_wire_bytes(whole) for whole in group)
        reason = (
            f": its rows of {largest.kept.shape[-1] * largest.kept.bits // 8} bytes are shorter than those of a tile, "
            f"{TILE_ROW_BYTES} bytes, so that the compiler cannot scatter the sum"
            if is_narrow
            else ""
        )
        yield Finding(
            severity(facts, seconds),
            "reduced-whole",
            f"{runs} x all-reduce over {axes}, largest array {largest.array}: {bytes_text(wire_bytes)} on the wire per "
            f"device and step, of which a reduce-scatter sends half: {cost_text(facts, seconds)}. Every device keeps "
            f"{largest.kept} of it{reason}" + f". By shape the gradient of {names}" * bool(names),
            remedy="Split another dimension over this axis, so that the last one keeps rows of "
            f"{TILE_ROW_BYTES} bytes or more"
            if is_narrow
            else "Split another dimension over this axis, one that it divides",
            axis=axes if axes in facts.sizes else None,
            source=line,
        )


def _whole_sums(facts: AuditFacts) -> Iterator[_WholeSum]:
    for collective in facts.collectives:
        if collective.kind != "all-reduce" or not collective.crossed:
            continue
        scatter = attrs.evolve(collective, kind="reduce-scatter", wire_bytes=-(-collective.wire_bytes // 2))
        saved = collective_seconds(collective, facts.hardware) - collective_seconds(scatter, facts.hardware)
        for array, values in zip(collective.arrays, facts.results_of(collective), strict=True):
            kept = [
                use.instruction.types[0] if use.instruction.op in _SLICES else None
                for use in facts.uses_of(values, lambda user: is_move(user) or is_elementwise(user))
            ]
            slices = [each for each in kept if each is not None]
            # A scalar has no slices, and what one use needs whole has to be whole.
            if (
                slices
                and len(slices) == len(kept)
                and all(each.size * collective.group_size <= array.size for each in slices)
            ):
                yield _WholeSum(collective, array, slices[0], saved * share_of(collective, array))


def _wire_bytes(whole: _WholeSum) -> int:
    total = max(1, sum(array.nbytes for array in whole.collective.arrays))
    return whole.collective.total_wire_bytes * whole.array.nbytes // total


def _is_narrow(facts: AuditFacts, whole: _WholeSum) -> bool:
    """Whether rows are shorter than those of a tile, and the last dimension is the split one."""
    kept, array = whole.kept, whole.array
    if not facts.hardware.torus_dims or not kept.shape or kept.shape[-1] * kept.bits // 8 >= TILE_ROW_BYTES:
        return False
    return kept.shape[-1] < array.shape[-1]
