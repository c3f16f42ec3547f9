"""Moves of arrays from one plan to another: what devices send, before any array exists."""

import functools
import math
from collections import Counter
from typing import final

import attrs
import numpy as np

from shardrules.core.axes import mesh_sizes
from shardrules.core.errors import PlanError
from shardrules.core.rule import ShardingPlan
from shardrules.core.text import bytes_text
from shardrules.core.views.blocks import Blocks, blocks_of
from shardrules.programs.autoplan.graph.layouts import WHOLE, moves
from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS, Machine


@final
@attrs.frozen
class PlanMove:
    """The move from one plan to another, for the arrays that have one shape and sound specs in both."""

    collectives: tuple[tuple[str, int, int], ...] = ()
    """Each kind of collective on one mesh, the count of arrays that need it, and the bytes that each device sends."""
    received_bytes: tuple[tuple[int, int], ...] | None = None
    """The bytes that each device receives between two meshes that begin with the same devices; else `None`."""
    left_out: int = 0
    """The arrays that do not count: they are in one plan only, or of another shape, or have an unsound spec."""

    @classmethod
    def between(cls, old: ShardingPlan, new: ShardingPlan) -> "PlanMove | None":
        """Returns the move from `old` to `new`, or `None` if one of them has no mesh."""
        if old.mesh is None or new.mesh is None:
            return None
        moved = _moved(old, new)
        left_out = len({*old.paths, *new.paths}) - len(moved)
        if [*mesh_sizes(old.mesh).items()] == [*mesh_sizes(new.mesh).items()]:
            return cls(_collectives(moved, Machine.of(new.mesh)), left_out=left_out)
        return cls(received_bytes=tuple(_received_bytes(moved).items()), left_out=left_out)

    def __str__(self) -> str:
        if not self.left_out:
            return self._sends()
        arrays = "1 array is" if self.left_out == 1 else f"{self.left_out:,} arrays are"
        return f"{self._sends()}; {arrays} left out, without one shape and a sound spec in both plans"

    def _sends(self) -> str:
        start = "to move from the old plan to the new,"
        if self.received_bytes is None:
            sends = ", ".join(f"{count:,} x {kind} {bytes_text(size)}" for kind, count, size in self.collectives)
            return f"{start} each device sends {sends}" if sends else f"{start} no device sends anything"
        amounts = [amount for _, amount in self.received_bytes]
        condition = "if both meshes begin with the same devices"
        if not any(amounts):
            return f"{start} nothing is sent, {condition}"
        total, most = bytes_text(sum(amounts)), bytes_text(max(amounts))
        return f"{start} devices receive {total} in all, at most {most} each, {condition}: reshard sends just that"


@final
@attrs.frozen
class _MovedArray:
    """An array of both plans."""

    shape: tuple[int, ...]
    old_bytes: int
    new_bytes: int
    old_blocks: Blocks
    new_blocks: Blocks


def _moved(old: ShardingPlan, new: ShardingPlan) -> list[_MovedArray]:
    """The arrays that have one shape and sound specs in both plans, in the order of the new one."""
    old_kinds, new_kinds = ([_kind_blocks(plan, index) for index in range(len(plan.kinds))] for plan in (old, new))
    old_indices = dict(zip(old.paths, old.kind_indices, strict=True))
    moved: list[_MovedArray] = []
    for path, new_index in zip(new.paths, new.kind_indices, strict=True):
        if path not in old_indices:
            continue
        old_leaf, new_leaf = old.kinds[old_indices[path]], new.kinds[new_index]
        old_blocks, new_blocks = old_kinds[old_indices[path]], new_kinds[new_index]
        if old_blocks is not None and new_blocks is not None and old_leaf.shape == new_leaf.shape:
            moved.append(_MovedArray(new_leaf.shape, old_leaf.nbytes, new_leaf.nbytes, old_blocks, new_blocks))
    return moved


def _kind_blocks(plan: ShardingPlan, index: int) -> Blocks | None:
    leaf = plan.kinds[index]
    try:
        return blocks_of(leaf.path, leaf, plan.decisions[index], mesh_sizes(plan.mesh))
    except PlanError:
        return None


def _collectives(moved: list[_MovedArray], machine: Machine) -> tuple[tuple[str, int, int], ...]:
    sent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for array in moved:
        for kind, part in _steps(_layout(array.old_blocks, machine), _layout(array.new_blocks, machine), machine):
            sent[kind] += round(part * array.old_bytes)
            counts[kind] += 1
    return tuple((kind, counts[kind], sent[kind]) for kind in COLLECTIVE_KINDS if kind in sent)


def _layout(blocks: Blocks, machine: Machine) -> tuple[int, ...]:
    dims = {name: dim for dim, (_, axes) in enumerate(blocks.dims) for name in axes}
    return tuple(dims.get(axis, WHOLE) for axis in machine.axes)


@functools.cache
def _steps(old: tuple[int, ...], new: tuple[int, ...], machine: Machine) -> list[tuple[str, float]]:
    parts = moves(np.array([old]), np.array([new]), machine).sent[:, 0, 0]
    return [(kind, float(part)) for kind, part in zip(COLLECTIVE_KINDS, parts, strict=True) if part > 0]


def _received_bytes(moved: list[_MovedArray]) -> dict[int, int]:
    received: Counter[int] = Counter()
    # A model repeats its layers: each distinct pair of blocks is compared once.
    missing_elements = functools.cache(_missing_elements)
    for array in moved:
        size = math.prod(array.shape)
        for device, count in missing_elements(array.old_blocks, array.new_blocks):
            # A share of the bytes of the whole array, since elements of four bits are half a byte each.
            received[device] += round(count * array.new_bytes / size) if size else 0
    return dict(received)


def _missing_elements(old: Blocks, new: Blocks) -> list[tuple[int, int]]:
    old_bounds = {device: block.bounds for block in old.all() for device in block.devices}
    missing: list[tuple[int, int]] = []
    for block in new.all():
        size = math.prod(stop - start for start, stop in block.bounds)
        for device in block.devices:
            common_size = 0
            if device in old_bounds:
                pairs = zip(old_bounds[device], block.bounds, strict=True)
                common_size = math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)
            missing.append((device, size - common_size))
    return missing
