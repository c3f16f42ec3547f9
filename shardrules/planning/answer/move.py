"""What devices send to bring arrays from one plan to another, before any array exists."""

import functools
import math
from collections import Counter
from typing import final

import attrs
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.core.axes import mesh_sizes
from shardrules.core.check import bytes_text
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import entries
from shardrules.drawing.blocks import Blocks
from shardrules.planning.graph.layouts import WHOLE, moves
from shardrules.planning.graph.machine import COLLECTIVE_KINDS, Machine


@final
@attrs.frozen
class PlanMove:
    """What the move from one plan to another sends, for the arrays that have the same shape in both."""

    collectives: tuple[tuple[str, int, int], ...] = ()
    """On one mesh: each kind of collective, how many arrays need it, and the bytes that each device sends."""
    received_bytes: tuple[tuple[int, int], ...] | None = None
    """Between two meshes that begin with the same devices: the bytes that each device receives; else `None`."""

    @classmethod
    def between(cls, old: ShardingPlan, new: ShardingPlan) -> "PlanMove | None":
        """Returns the move from `old` to `new`, or `None` if one of them has no mesh."""
        if old.mesh is None or new.mesh is None:
            return None
        if [*mesh_sizes(old.mesh).items()] == [*mesh_sizes(new.mesh).items()]:
            return cls(collectives=_collectives(old, new))
        return cls(received_bytes=tuple(_received_bytes(old, new).items()))

    def __str__(self) -> str:
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


def _collectives(old: ShardingPlan, new: ShardingPlan) -> tuple[tuple[str, int, int], ...]:
    sent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    assert new.mesh is not None
    machine = Machine.of(new.mesh)
    new_arrays = {path: (shape, spec) for path, shape, spec in new.planned()}
    sizes = {path: leaf.nbytes for path, leaf in zip(old.paths, old.leaves, strict=True)}
    for path, shape, spec in old.planned():
        new_shape, new_spec = new_arrays.get(path, (None, None))
        if new_shape != shape or new_spec is None:
            continue
        for kind, part in _steps(_layout(spec, machine), _layout(new_spec, machine), machine):
            sent[kind] += round(part * sizes[path])
            counts[kind] += 1
    return tuple((kind, counts[kind], sent[kind]) for kind in COLLECTIVE_KINDS if kind in sent)


def _layout(spec: PartitionSpec, machine: Machine) -> tuple[int, ...]:
    """For each axis of the machine the dim that it splits."""
    dims = {name: dim for dim, entry in enumerate(entries(spec)) if isinstance(entry, tuple) for name in entry}
    return tuple(dims.get(axis, WHOLE) for axis in machine.axes)


@functools.cache
def _steps(old: tuple[int, ...], new: tuple[int, ...], machine: Machine) -> list[tuple[str, float]]:
    """The collectives between two layouts, each with the part of an array that a device sends."""
    parts = moves(np.array([old]), np.array([new]), machine).sent[:, 0, 0]
    return [(kind, float(part)) for kind, part in zip(COLLECTIVE_KINDS, parts, strict=True) if part > 0]


def _received_bytes(old: ShardingPlan, new: ShardingPlan) -> dict[int, int]:
    old_leaf_blocks, new_leaf_blocks = (dict(zip(plan.paths, plan.leaf_blocks(), strict=True)) for plan in (old, new))
    leaves = dict(zip(new.paths, new.leaves, strict=True))
    received: Counter[int] = Counter()
    # A model repeats its layers: each distinct pair of blocks is compared once.
    missing_elements = functools.cache(_missing_elements)
    for path, new_blocks in new_leaf_blocks.items():
        old_blocks = old_leaf_blocks.get(path)
        if old_blocks is None or [size for size, _ in old_blocks.dims] != [size for size, _ in new_blocks.dims]:
            continue
        size = math.prod(leaves[path].shape)
        for device, count in missing_elements(old_blocks, new_blocks):
            # A share of the bytes of the whole array, since elements of four bits are half a byte each.
            received[device] += round(count * leaves[path].nbytes / size) if size else 0
    return dict(received)


def _missing_elements(old: Blocks, new: Blocks) -> list[tuple[int, int]]:
    """For each device how many elements of its new block are not in its old one."""
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
