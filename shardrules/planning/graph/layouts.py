"""Layouts: for each mesh axis the dimension of an array that it splits. What it takes to go from one to another.

A layout is a row of small numbers, one for each axis of the mesh: a dimension, `WHOLE` where the axis splits none, or
`PARTIAL` where the devices along it hold parts of a sum that is not added up yet. Several axes on one dimension split
it in the order of the mesh, the first one coarsest.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import final

import attrs
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.planning.graph.machine import COLLECTIVE_KINDS, CollectiveKind, Machine

WHOLE = -1
"""An axis that splits no dimension."""

PARTIAL = -2
"""An axis along which devices hold parts of a sum."""

Layout = tuple[int, ...]
"""For each axis a dimension, or one of these."""


def all_layouts(sizes: Sequence[int], machine: Machine, partial: bool = False) -> np.ndarray:
    """Returns all layouts of arrays that divide.

    **Arguments:**

    - `sizes`: for each dimension the number that splits have to divide; 1 for one that cannot be split.
    - `machine`: the mesh.
    - `partial`: whether parts of sums are wanted too.

    **Returns:**

    Layouts as rows, those that split least first.

    ```python
    from shardrules.planning.graph.layouts import all_layouts
    from shardrules.planning.graph.machine import Machine

    machine = Machine.of(sr.mesh_shape("data:4,model:2"))
    assert all_layouts((8, 2), machine).tolist() == [[-1, -1], [-1, 0], [-1, 1], [0, -1], [0, 0], [0, 1]]
    ```
    """
    choices = [
        [
            *([PARTIAL] if partial else []),
            WHOLE,
            *(dim for dim, whole in enumerate(sizes) if whole % size == 0 < whole - 1),
        ]
        for size in machine.sizes
    ]
    rows = [
        row
        for row in itertools.product(*choices)
        if all(whole % dim_shard_count(row, dim, machine) == 0 for dim, whole in enumerate(sizes))
    ]
    rows.sort(key=lambda row: (sum(dim != WHOLE for dim in row), row))
    return np.array(rows, np.int8).reshape(len(rows), len(machine.sizes))


def dim_shard_count(layout: Sequence[int], dim: int, machine: Machine) -> int:
    """Into how many pieces a layout cuts a dimension.

    **Arguments:**

    - `layout`: the layout.
    - `dim`: the dimension.
    - `machine`: the mesh.

    **Returns:**

    The product of the sizes of the axes on it.
    """
    count = 1
    for at, size in zip(layout, machine.sizes, strict=True):
        if at == dim:
            count *= size
    return count


def shard_counts(rows: np.ndarray, machine: Machine) -> np.ndarray:
    """Into how many pieces layouts cut an array.

    **Arguments:**

    - `rows`: layouts.
    - `machine`: the mesh.

    **Returns:**

    A number for each.
    """
    return np.where(rows >= 0, np.array(machine.sizes, np.int64), 1).prod(axis=1, dtype=np.int64)


def spec_of(layout: Sequence[int], ndim: int, machine: Machine) -> PartitionSpec:
    """Returns a layout as JAX writes it.

    **Arguments:**

    - `layout`: the layout. Sums that are not added up yet count as whole.
    - `ndim`: how many dimensions the array has.
    - `machine`: the mesh.

    **Returns:**

    A `PartitionSpec`.
    """
    entries: list[str | tuple[str, ...] | None] = []
    for dim in range(ndim):
        on = tuple(name for name, at in zip(machine.axes, layout, strict=True) if at == dim)
        entries.append(None if not on else on[0] if len(on) == 1 else on)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


@final
@attrs.frozen(eq=False)
class Moves:
    """What it takes to go from each of some layouts to each of others, for an array of one byte.

    **Arguments:**

    - `seconds`, `fixed`: the time for each byte of the whole array, and that which takes however small it is.
    - `sent`: bytes that a device sends for each byte of the whole array, by kind of collective, in the order of
        `COLLECTIVE_KINDS`.
    - `allowed`: whether there is a way: nothing becomes a part of a sum.
    """

    seconds: np.ndarray
    fixed: np.ndarray
    sent: np.ndarray
    allowed: np.ndarray


def moves(start: np.ndarray, end: np.ndarray, machine: Machine) -> Moves:
    """Models what compilers make of it when an array is to be laid out in another way, one step after the other:

    1. Parts of sums are added up. Each device keeps its own piece of the result if all pieces are along one dimension,
       and nothing else is to be sliced; else all of them get all of it.
    2. What is to be split further is sliced, which is free.
    3. What is split too far is gathered.
    4. Axes that are to split another dimension than before have their pieces exchanged, those together that go from
       the same dimension to the same.

    Where an axis comes before another one that stays on a dimension, pieces have to be sent around, too.

    **Arguments:**

    - `start`, `end`: layouts.
    - `machine`: the mesh.

    **Returns:**

    `Moves`, with a row for each of `start` and a column for each of `end`.

    ```python
    from shardrules.planning.graph.layouts import moves
    from shardrules.planning.graph.machine import Machine

    machine = Machine.of(sr.mesh_shape("data:4"))
    rows = np.array([[-1], [0], [-2]])
    sent = moves(rows, rows, machine).sent.sum(axis=0)
    assert sent[1, 0] == 3 / 4 and sent[0, 1] == 0  # gathered; sliced
    assert sent[2, 0] == 2 * 3 / 4 and sent[2, 1] == 3 / 4  # added up everywhere; only a piece of it each
    ```
    """
    shape = (len(start), len(end))
    a = np.broadcast_to(start[:, None, :], (*shape, start.shape[1])).astype(np.int16)
    b = np.broadcast_to(end[None, :, :], a.shape).astype(np.int16)
    bill = _Bill(machine, shape)
    local = 1.0 / bill.product(a >= 0)
    allowed = ~((b == PARTIAL) & (a != PARTIAL)).any(axis=2)
    summed = (a == PARTIAL) & (b != PARTIAL)
    cut = summed & _is_lone(a, b)[:, :, None]
    bill.pay("reduce-scatter", cut, local * (1 - 1 / bill.product(cut)))
    whole = summed & ~cut
    bill.pay("all-reduce", whole, 2 * local * (1 - 1 / bill.product(whole)))
    local = local / bill.product(cut)
    now = np.where(cut, b, np.where(whole, WHOLE, a))
    for step in _steps(now, b, start.shape[1]):
        after = np.where(step, b, now)
        sliced, gathered = step & (now == WHOLE), step & (b == WHOLE)
        local = local / bill.product(sliced)
        wrong = _wrong_order(step, now, after)
        bill.pay("collective-permute", wrong, local)
        bill.pay("all-gather", gathered, local * (bill.product(gathered) - 1))
        moved = step & ~sliced & ~gathered
        bill.pay("all-to-all", moved, local * (1 - 1 / bill.product(moved)))
        local = local * bill.product(gathered)
        now = after
    return Moves(np.where(allowed, bill.seconds, np.inf), bill.fixed, bill.sent, allowed)


def relayout_steps(start: Layout, end: Layout) -> list[Layout]:
    """Returns the layouts that an array goes through on its way from one to another, as `moves` has it.

    **Arguments:**

    - `start`, `end`: layouts. Sums that are not added up yet count as whole where the array starts.

    **Returns:**

    The layouts after `start`, up to `end`; none where both are the same.

    ```python
    from shardrules.planning.graph.layouts import relayout_steps

    assert relayout_steps((0, -1), (-1, 1)) == [(0, 1), (-1, 1)]  # sliced, then gathered
    ```
    """
    a, b = (np.array(row, np.int16)[None, None, :] for row in (start, end))
    summed = (a == PARTIAL) & (b != PARTIAL)
    cut = summed & _is_lone(a, b)[:, :, None]
    now = np.where(cut, b, np.where(a == PARTIAL, WHOLE, a))
    found = [now]
    for step in _steps(now, np.where(b == PARTIAL, WHOLE, b), len(start)):
        found.append(np.where(step, b, found[-1]))
    rows = [tuple(map(int, one[0, 0])) for one in found]
    first = tuple(WHOLE if dim == PARTIAL else int(dim) for dim in start)
    return [row for before, row in zip([first, *rows], rows, strict=False) if row != before]


def _is_lone(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Where all axes along which parts of sums lie are to split the same dimension, and no other axis slices."""
    summed = (start == PARTIAL) & (end != PARTIAL)
    target = np.where(summed, end, -1).max(axis=2, initial=-1)
    apart = (summed & (end != target[:, :, None])) | ((start == WHOLE) & (end >= 0))
    return (target >= 0) & ~apart.any(axis=2)


def _steps(now: np.ndarray, end: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yields which axes change in each step: those that slice, those that gather, those that move together."""
    sliced, gathered = (now == WHOLE) & (end >= 0), (now >= 0) & (end == WHOLE)
    moved = (now >= 0) & (end >= 0) & (now != end)
    yield sliced
    yield gathered
    for axis in range(count):
        first = slice(axis, axis + 1)
        alike = moved & moved[:, :, first] & (now == now[:, :, first]) & (end == end[:, :, first])
        moved = moved & ~alike
        yield alike


def _wrong_order(step: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The axes whose pieces have to be sent around: those that change, and those after them that stay on the dim."""
    found = np.zeros(step.shape, bool)
    for first in range(step.shape[2]):
        for second in range(first + 1, step.shape[2]):
            stays = (before[:, :, second] >= 0) & ~step[:, :, second]
            comes = after[:, :, first] == after[:, :, second]
            goes = before[:, :, first] == before[:, :, second]
            here = step[:, :, first] & stays & (comes | goes)
            found[:, :, first] |= here
            found[:, :, second] |= here
    return found


@final
class _Bill:
    """What the steps from layouts to layouts cost together."""

    def __init__(self, machine: Machine, shape: tuple[int, int]) -> None:
        self.machine = machine
        self.sizes = np.array(machine.sizes, np.float64)
        self.bits = 1 << np.arange(len(machine.sizes))
        self.seconds, self.fixed = np.zeros(shape), np.zeros(shape)
        self.sent = np.zeros((len(COLLECTIVE_KINDS), *shape))

    def product(self, axes: np.ndarray) -> np.ndarray:
        """How many devices there are along some axes."""
        return np.where(axes, self.sizes, 1.0).prod(axis=2)

    def pay(self, kind: CollectiveKind, axes: np.ndarray, amount: np.ndarray) -> None:
        """Adds a collective over some axes, in which a device sends an amount."""
        group = (axes * self.bits).sum(axis=2)
        rates = self.machine.rates[kind]
        self.seconds = self.seconds + rates.per_byte[group] * amount
        self.fixed = self.fixed + rates.fixed[group]
        self.sent[COLLECTIVE_KINDS.index(kind)] += np.where(group > 0, amount, 0.0)
