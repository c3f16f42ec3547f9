"""Layouts: for each mesh axis the dimension of an array that it splits. What it takes to go from one to another.

A layout is a row of small numbers, one for each axis of the mesh: a dimension, `WHOLE` where the axis splits none, or
`PARTIAL` where the devices along it hold parts of a sum that is not added up yet. Several axes on one dimension split
it in the order of the mesh, the first one coarsest.
"""

import itertools
from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.planning.machine import KINDS, Machine

WHOLE = -1
PARTIAL = -2

Layout = tuple[int, ...]


def layouts(sizes: Sequence[int], machine: Machine, partial: bool = False) -> np.ndarray:
    """Returns all layouts of arrays that divide.

    **Arguments:**

    - `sizes`: for each dimension the number that splits have to divide; 1 for one that cannot be split.
    - `machine`: the mesh.
    - `partial`: whether parts of sums are wanted too.

    **Returns:**

    Layouts as rows, those that split least first.

    ```python
    from shardrules.planning.layouts import layouts
    from shardrules.planning.machine import Machine

    machine = Machine.of(sr.mesh_shape("data:4,model:2"))
    assert layouts((8, 2), machine).tolist() == [[-1, -1], [-1, 0], [-1, 1], [0, -1], [0, 0], [0, 1]]
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
        if all(whole % split(row, dim, machine) == 0 for dim, whole in enumerate(sizes))
    ]
    rows.sort(key=lambda row: (sum(dim != WHOLE for dim in row), row))
    return np.array(rows, np.int8).reshape(len(rows), len(machine.sizes))


def split(layout: Sequence[int], dim: int, machine: Machine) -> int:
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


def pieces(rows: np.ndarray, machine: Machine) -> np.ndarray:
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
    - `sent`: bytes that a device sends for each byte of the whole array, by kind of collective, as `KINDS` has them.
    - `allowed`: whether there is a way: nothing becomes a part of a sum.
    """

    seconds: np.ndarray
    fixed: np.ndarray
    sent: np.ndarray
    allowed: np.ndarray


def moves(start: np.ndarray, end: np.ndarray, machine: Machine) -> Moves:
    """Models what compilers make of it when an array is to be laid out in another way.

    They slice first, which is free, then add up parts of sums, each device keeping its own piece of the result where
    the axis is to split it, gather, and then exchange pieces. Sums over several axes of which not all
    go to the same dimension are added up everywhere and sliced after that. Where an axis comes before one that stays on
    a dimension, pieces have to be sent around, too.

    **Arguments:**

    - `start`, `end`: layouts.
    - `machine`: the mesh.

    **Returns:**

    `Moves`, with a row for each of `start` and a column for each of `end`.

    ```python
    from shardrules.planning.layouts import KINDS, moves
    from shardrules.planning.machine import Machine

    machine = Machine.of(sr.mesh_shape("data:4"))
    rows = np.array([[-1], [0], [-2]])
    sent = moves(rows, rows, machine).sent.sum(axis=0)
    assert sent[1, 0] == 3 / 4 and sent[0, 1] == 0  # gathered; sliced
    assert sent[2, 0] == 2 * 3 / 4 and sent[2, 1] == 3 / 4  # added up everywhere; only a piece of it each
    ```
    """
    count = len(machine.sizes)
    a, b = start[:, None, :].astype(np.int16), end[None, :, :].astype(np.int16)
    allowed = ~((b == PARTIAL) & (a != PARTIAL)).any(axis=2)
    sliced, gathered = (a == WHOLE) & (b >= 0), (a >= 0) & (b == WHOLE)
    moved = (a >= 0) & (b >= 0) & (a != b)
    scattered, added = (a == PARTIAL) & (b >= 0), (a == PARTIAL) & (b == WHOLE)
    sizes = np.array(machine.sizes, np.float64)
    bits = 1 << np.arange(count)

    def mask(which: np.ndarray) -> np.ndarray:
        return (which * bits).sum(axis=2)

    def product(which: np.ndarray) -> np.ndarray:
        return np.where(which, sizes, 1.0).prod(axis=2)

    seconds = np.zeros(allowed.shape)
    fixed = np.zeros(allowed.shape)
    sent = np.zeros((len(KINDS), *allowed.shape))

    def pay(kind: str, group: np.ndarray, amount: np.ndarray) -> None:
        nonlocal seconds, fixed
        rates = machine.rates[kind]
        seconds = seconds + rates.per_byte[group] * amount
        fixed = fixed + rates.fixed[group]
        sent[KINDS.index(kind)] += np.where(group > 0, amount, 0.0)  # pyright: ignore[reportArgumentType]

    local = 1.0 / (np.where(a >= 0, sizes, 1.0).prod(axis=2) * product(sliced))
    # A reduce-scatter cuts one dimension only.
    target = np.where(scattered, b, -1).max(axis=2)
    lone = ~(scattered & (b != target[:, :, None])).any(axis=2) & ~added.any(axis=2)
    cut = scattered & lone[:, :, None]
    summed = (scattered | added) & ~lone[:, :, None]
    pay("reduce-scatter", mask(cut), local * (1 - 1 / product(cut)))
    pay("all-reduce", mask(summed), 2 * local * (1 - 1 / product(summed)))
    local = local / product(scattered)
    # What is in the wrong order on a dimension is sent around, once.
    wrong = np.zeros(allowed.shape, bool)
    touched = np.zeros(allowed.shape, np.int64)
    for first in range(count):
        for second in range(first + 1, count):
            stays = (a[:, :, second] >= 0) & (a[:, :, second] == b[:, :, second])
            comes = (b[:, :, first] == b[:, :, second]) & (a[:, :, first] != b[:, :, first])
            goes = (a[:, :, first] == a[:, :, second]) & (a[:, :, first] != b[:, :, first])
            here = stays & (comes | goes)
            wrong |= here
            touched |= np.where(here, (1 << first) | (1 << second), 0)
    pay("collective-permute", np.where(wrong, touched, 0), local)
    pay("all-gather", mask(gathered), local * (product(gathered) - 1))
    local = local * product(gathered)
    for axis in range(count):
        here = moved[:, :, axis]
        pay("all-to-all", np.where(here, 1 << axis, 0), local * (1 - 1 / sizes[axis]))
    return Moves(np.where(allowed, seconds, np.inf), fixed, sent, allowed)
