"""Layouts: for each mesh axis the dim of an array that it splits. And what changing the layout takes.

A layout is a row of small integers, one for each axis of the mesh: a dim, `WHOLE` where the axis splits none, or
`PARTIAL` where the devices along it hold parts of a sum that is not completed yet. Several axes on one dim split it in
the order of the mesh, the first one coarsest.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import final

import attrs
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS, CollectiveKind, Machine

WHOLE = -1
"""An axis that splits no dim."""

PARTIAL = -2
"""An axis along which devices hold parts of a sum."""

Layout = tuple[int, ...]
"""For each axis a dim, `WHOLE` or `PARTIAL`."""


def all_layouts(sizes: Sequence[int], machine: Machine, partial: bool = False) -> np.ndarray:
    """All layouts of an array, as rows, those that split least first.

    The pieces of each dim divide its size in `sizes`, which is 1 for a dim that cannot be split. `partial`: also as
    parts of sums.
    """
    choices = [
        [
            *([PARTIAL] if partial else []),
            WHOLE,
            *(dim for dim, length in enumerate(sizes) if length % size == 0 < length - 1),
        ]
        for size in machine.sizes
    ]
    rows = [
        row
        for row in itertools.product(*choices)
        if all(length % dim_shard_count(row, dim, machine) == 0 for dim, length in enumerate(sizes))
    ]
    # Searches prefer the first of equal choices: the one that splits least.
    rows.sort(key=lambda row: (sum(dim != WHOLE for dim in row), row))
    return np.array(rows, np.int8).reshape(len(rows), len(machine.sizes))


def dim_shard_count(layout: Sequence[int], dim: int, machine: Machine) -> int:
    count = 1
    for split_dim, size in zip(layout, machine.sizes, strict=True):
        if split_dim == dim:
            count *= size
    return count


def dim_axes(layout: Sequence[int], dim: int | None, machine: Machine) -> tuple[str, ...]:
    """The axes that split a dim in a layout; those along which it is in parts for `PARTIAL`."""
    return tuple(axis for axis, split_dim in zip(machine.axes, layout, strict=True) if split_dim == dim)


def shard_counts(rows: np.ndarray, machine: Machine) -> np.ndarray:
    return np.where(rows >= 0, np.array(machine.sizes, np.int64), 1).prod(axis=1, dtype=np.int64)


def spec_of(layout: Sequence[int], ndim: int, machine: Machine) -> PartitionSpec:
    """A layout as a `PartitionSpec`, in which partial sums count as whole."""
    entries: list[str | tuple[str, ...] | None] = []
    for dim in range(ndim):
        axes = dim_axes(layout, dim, machine)
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


@final
@attrs.frozen(eq=False)
class Moves:
    """The cost of changing each of some layouts to each of others, for an array of one byte: tables of start × end."""

    seconds: np.ndarray  # for each byte of the whole array
    fixed: np.ndarray  # seconds however small the array is
    sent: np.ndarray
    """Bytes that a device sends for each byte of the whole array, by kind of collective first (`COLLECTIVE_KINDS`)."""
    allowed: np.ndarray
    """The possible moves: no array becomes a part of a sum."""


def moves(start: np.ndarray, end: np.ndarray, machine: Machine) -> Moves:
    """Models how an array changes from each layout of `start` to each of `end`, one step after the other:

    1. Partial sums are added up. Each device keeps only its piece of the result if all of these axes split the same
       dim, and nothing else is sliced; otherwise all devices get all of it.
    2. Dims that are split further are sliced, which is free.
    3. Dims that are split less are gathered.
    4. Axes that split another dim than before exchange pieces, those together that have the same two dims.

    Where one of these axes comes before another that stays on a dim, pieces also have to be sent around, since they are
    in the order of the axes.

    ```python
    from shardrules.programs.autoplan.graph.layouts import moves
    from shardrules.programs.autoplan.graph.machine import Machine

    machine = Machine.of(sr.mesh_shape("data:4"))
    rows = np.array([[-1], [0], [-2]])
    sent = moves(rows, rows, machine).sent.sum(axis=0)
    assert sent[1, 0] == 3 / 4 and sent[0, 1] == 0  # gathered; sliced
    assert sent[2, 0] == 2 * 3 / 4 and sent[2, 1] == 3 / 4  # added up everywhere; only a piece of it each
    ```
    """
    # All pairs at once: arrays of start × end × axis.
    shape = (len(start), len(end))
    before = np.broadcast_to(start[:, None, :], (*shape, start.shape[1])).astype(np.int16)
    after = np.broadcast_to(end[None, :, :], before.shape).astype(np.int16)
    bill = _Bill(machine, shape)
    # What a device has of the array at each moment, as a fraction. Collectives send a fraction of that.
    local = 1.0 / bill.device_counts(before >= 0)
    allowed = ~((after == PARTIAL) & (before != PARTIAL)).any(axis=2)
    summed = (before == PARTIAL) & (after != PARTIAL)
    scattered = summed & _is_reduce_scatter(before, after)[:, :, None]
    bill.add("reduce-scatter", scattered, local * (1 - 1 / bill.device_counts(scattered)))
    reduced = summed & ~scattered
    bill.add("all-reduce", reduced, 2 * local * (1 - 1 / bill.device_counts(reduced)))
    local = local / bill.device_counts(scattered)
    bill.add("collective-permute", _permuted_axes(scattered, before, np.where(scattered, after, before)), local)
    now = np.where(scattered, after, np.where(reduced, WHOLE, before))
    for step in _steps(now, after):
        following = np.where(step, after, now)
        sliced, gathered = step & (now == WHOLE), step & (after == WHOLE)
        local = local / bill.device_counts(sliced)
        bill.add("collective-permute", _permuted_axes(step, now, following), local)
        bill.add("all-gather", gathered, local * (bill.device_counts(gathered) - 1))
        exchanged = step & ~sliced & ~gathered
        bill.add("all-to-all", exchanged, local * (1 - 1 / bill.device_counts(exchanged)))
        local = local * bill.device_counts(gathered)
        now = following
    return Moves(np.where(allowed, bill.seconds, np.inf), bill.fixed, bill.sent, allowed)


def relayout_steps(start: Layout, end: Layout) -> list[Layout]:
    """The layouts that an array goes through from `start` to `end`, which is the last; none where both are the same.

    They are the steps that `moves` pays for. Partial sums in `start` count as whole.
    """
    before, after = (np.array(row, np.int16)[None, None, :] for row in (start, end))
    scattered = (before == PARTIAL) & (after != PARTIAL) & _is_reduce_scatter(before, after)[:, :, None]
    now = np.where(scattered, after, np.where(before == PARTIAL, WHOLE, before))
    stages = [now]
    for step in _steps(now, np.where(after == PARTIAL, WHOLE, after)):
        stages.append(np.where(step, after, stages[-1]))
    rows = [tuple(map(int, stage[0, 0])) for stage in stages]
    first = tuple(WHOLE if dim == PARTIAL else int(dim) for dim in start)
    return [row for previous, row in zip([first, *rows], rows, strict=False) if row != previous]


def _is_reduce_scatter(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The pairs in which all axes with partial sums are to split the same dim, and no other axis slices."""
    summed = (start == PARTIAL) & (end != PARTIAL)
    target = np.where(summed, end, -1).max(axis=2, initial=-1)
    other_dims = (summed & (end != target[:, :, None])) | ((start == WHOLE) & (end >= 0))
    return (target >= 0) & ~other_dims.any(axis=2)


def _steps(now: np.ndarray, end: np.ndarray) -> Iterator[np.ndarray]:
    """Yields which axes change in each step: those that slice, those that gather, those that move together."""
    sliced, gathered = (now == WHOLE) & (end >= 0), (now >= 0) & (end == WHOLE)
    moved = (now >= 0) & (end >= 0) & (now != end)
    yield sliced
    yield gathered
    for axis in range(now.shape[2]):
        # All axes with the two dims of this one go with it, so they have had their turn when theirs comes.
        index = slice(axis, axis + 1)
        together = moved & moved[:, :, index] & (now == now[:, :, index]) & (end == end[:, :, index])
        moved = moved & ~together
        yield together


def _permuted_axes(step: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The axes whose pieces are sent around: those that change, and later ones that stay on the dim they come or go."""
    permuted = np.zeros(step.shape, bool)
    for first in range(step.shape[2]):
        for second in range(first + 1, step.shape[2]):
            stays = (before[:, :, second] >= 0) & ~step[:, :, second]
            comes = after[:, :, first] == after[:, :, second]
            goes = before[:, :, first] == before[:, :, second]
            out_of_order = step[:, :, first] & stays & (comes | goes)
            permuted[:, :, first] |= out_of_order
            permuted[:, :, second] |= out_of_order
    return permuted


@final
class _Bill:
    """The summed cost of the steps between all pairs of layouts."""

    def __init__(self, machine: Machine, shape: tuple[int, int]) -> None:
        self.machine = machine
        self.sizes = np.array(machine.sizes, np.float64)
        self.bits = 1 << np.arange(len(machine.sizes))
        self.seconds, self.fixed = np.zeros(shape), np.zeros(shape)
        self.sent = np.zeros((len(COLLECTIVE_KINDS), *shape))

    def device_counts(self, axes: np.ndarray) -> np.ndarray:
        return np.where(axes, self.sizes, 1.0).prod(axis=2)

    def add(self, kind: CollectiveKind, axes: np.ndarray, amount: np.ndarray) -> None:
        group = (axes * self.bits).sum(axis=2)  # the bit mask that rates are indexed by; 0, for no axes, costs nothing
        rates = self.machine.rates[kind]
        self.seconds = self.seconds + rates.per_byte[group] * amount
        self.fixed = self.fixed + rates.fixed[group]
        self.sent[COLLECTIVE_KINDS.index(kind)] += np.where(group > 0, amount, 0.0)
