"""The transfers of a sync for a transport of your own: from slices of shards to slices of shards."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs

from shardrules.moves.sync.schedule import Leg, SyncSchedule
from shardrules.moves.sync.strided import SOURCE, TARGET, Side, StridedStep


@final
@attrs.frozen
class Transfer:
    """A part of one array on its way from one device to another.

    With `shard` as the shard of `source` on `source_device`, the part of the target's shard is
    `shard[source_slice].transpose(dims).reshape(shape)` after `changes`, where `shape` is that of `target_slice`.
    """

    source: str
    """The path of the source array; for what is passed on, of the target array."""
    source_device: Any
    source_slice: tuple[slice, ...]
    """Positions in the shard of the source device."""
    dims: tuple[int, ...]
    """The order of the dims of the source slice in the target slice; other dims have one position."""
    changes: tuple[tuple[str, Any], ...]
    """How values change: `("cast", dtype)` and `("scale", number)`, in order."""
    target: str
    """The path of the target array."""
    target_device: Any
    target_slice: tuple[slice, ...]
    """Positions in the shard of the target device."""
    bytes: int
    """The bytes on the way, in the narrower of the two dtypes."""
    round: int
    relayed: bool
    """True where the source device passes on a part of its own target shard, which it has received before."""


def transfers_of(schedule: SyncSchedule) -> Iterator[Transfer]:
    """Yields the transfers of a schedule, round by round."""
    for number, chosen in enumerate(schedule.deliveries.rounds()):
        for leg in schedule.legs(chosen):
            if leg.sender != leg.receiver and leg.flow.source is not None:
                yield from _transfers(schedule, leg, number)


def _transfers(schedule: SyncSchedule, leg: Leg, number: int) -> Iterator[Transfer]:
    flow = leg.flow
    offsets = flow.offsets(SOURCE, leg.row, leg.content), flow.offsets(TARGET, leg.row, leg.content)
    paths = (
        schedule.source.paths[flow.parts.arrays[SOURCE][leg.row]],
        schedule.target.paths[flow.parts.arrays[TARGET][leg.row]],
    )
    # A slice has one stride: of several steps along one dim of either side only the largest stays.
    kept = _sliceable(flow.inner)
    rest = [step for step in flow.inner if step not in kept]
    for positions in itertools.product(*(range(step.size) for step in rest)):
        new = _slices(kept, rest, positions, TARGET, offsets[TARGET])
        old, dims, changes = new, tuple(range(len(new))), ()
        if not leg.is_relayed:
            old = _slices(kept, rest, positions, SOURCE, offsets[SOURCE])
            order = [step.dims[SOURCE] for step in sorted(kept, key=lambda step: step.dims[TARGET])]
            dims = (*order, *(dim for dim in range(len(old)) if dim not in order))
            changes = flow.parts.changes
        yield Transfer(
            paths[TARGET] if leg.is_relayed else paths[SOURCE],
            schedule.devices[leg.sender],
            old,
            dims,
            changes,
            paths[TARGET],
            schedule.devices[leg.receiver],
            new,
            flow.content_bytes // math.prod(step.size for step in rest),
            number,
            leg.is_relayed,
        )


def _sliceable(steps: Sequence[StridedStep]) -> list[StridedStep]:
    kept: list[StridedStep] = []
    for step in sorted(steps, key=lambda step: -step.size):
        if all(step.dims[side] != other.dims[side] for other in kept for side in (SOURCE, TARGET)):
            kept.append(step)
    return kept


def _slices(
    kept: Sequence[StridedStep],
    rest: Sequence[StridedStep],
    positions: Sequence[int],
    side: Side,
    offset: Sequence[int],
) -> tuple[slice, ...]:
    starts = list(offset)
    for step, position in zip(rest, positions, strict=True):
        starts[step.dims[side]] += position * step.strides[side]
    slices = [slice(start, start + 1) for start in starts]
    for step in kept:
        dim, stride = step.dims[side], step.strides[side]
        slices[dim] = slice(starts[dim], starts[dim] + (step.size - 1) * stride + 1, stride if stride > 1 else None)
    return tuple(slices)
