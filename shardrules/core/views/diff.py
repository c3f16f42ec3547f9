"""Differences between two plans."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.errors import printable
from shardrules.core.finding import common_path, shape_text, template
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.text import bytes_text
from shardrules.core.views.table import MOST_ROWS


@final
@attrs.frozen
class Placement:
    """The placement of one leaf; `spec` is its placement in canonical form, as text."""

    shape: tuple[int, ...]
    dtype: str
    spec: str
    device_bytes: int


_ABSENT = Placement((), "", "", 0)


@final
@attrs.frozen
class Placements:
    """The placements of all leaves of a plan, from path to placement, and the mesh as text."""

    mesh: str
    leaves: Mapping[str, Placement]


def placements(
    kind_by_path: Mapping[str, int], kinds: Sequence[Leaf], decisions: Sequence[Decision], mesh: AnyMesh | None
) -> Placements:
    """Returns how the leaves of a plan are placed."""
    sizes = mesh_sizes(mesh)
    each = [
        Placement(leaf.shape, str(leaf.dtype), decision.placement, decision.device_bytes(leaf, sizes))
        for leaf, decision in zip(kinds, decisions, strict=True)
    ]
    return Placements(mesh_text(mesh), {path: each[kind] for path, kind in kind_by_path.items()})


@final
@attrs.frozen
class Change:
    """One leaf that two plans place differently; `old` or `new` is empty where a plan has no such leaf.

    The texts have shape and dtype where these changed, too.
    """

    path: str
    shape: tuple[int, ...]
    old: str
    new: str
    old_bytes: int
    new_bytes: int


@final
@attrs.frozen
class ChangeGroup:
    """Equal changes of leaves whose paths differ in nothing but indices; the bytes are those of all of them."""

    path: str
    changes: tuple[Change, ...]

    @property
    def old_bytes(self) -> int:
        """The bytes on one device before."""
        return sum(change.old_bytes for change in self.changes)

    @property
    def new_bytes(self) -> int:
        """The bytes on one device after."""
        return sum(change.new_bytes for change in self.changes)


@final
@attrs.frozen(repr=False)
class PlanDiff:
    """The differences between two plans. It is false without any, and prints as a table.

    ```python
    plan = sr.DimShardingRule("data", 0).plan({"w": np.ones(8)}, sr.mesh_shape("data:4"))
    assert not plan.diff(plan)
    ```
    """

    old_mesh: str
    new_mesh: str
    changes: tuple[Change, ...]

    @staticmethod
    def between(old: "Placements", new: "Placements") -> "PlanDiff":
        """Returns the differences between the `placements()` of two plans."""
        before, after = old.leaves, new.leaves
        changes = [
            _change(path, before.get(path, _ABSENT), after.get(path, _ABSENT))
            # A dictionary rather than a set, since sets are not in the same order on every host.
            for path in dict.fromkeys((*before, *after))
            if before.get(path) != after.get(path)
        ]
        return PlanDiff(old.mesh, new.mesh, tuple(changes))

    def __bool__(self) -> bool:
        return bool(self.changes) or self.old_mesh != self.new_mesh

    def groups(self) -> tuple[ChangeGroup, ...]:
        """Returns the changes with equal layers together, in the order of the tree."""
        groups: dict[tuple[Any, ...], list[Change]] = {}
        for change in self.changes:
            groups.setdefault((template(change.path), change.shape, change.old, change.new), []).append(change)
        return tuple(
            ChangeGroup(functools.reduce(common_path, (change.path for change in group)), tuple(group))
            for group in groups.values()
        )

    def __str__(self) -> str:
        if not self:
            return "no difference"
        lines = [] if self.old_mesh == self.new_mesh else [printable(f"mesh {self.old_mesh} -> {self.new_mesh}")]
        groups = self.groups()
        for group in groups[:MOST_ROWS]:
            first = group.changes[0]
            count = f"  x{len(group.changes)}" if len(group.changes) > 1 else ""
            lines.append(
                f"{printable(group.path) or '(the tree)'}{count}  {shape_text(first.shape)}  "
                f"{printable(first.old) or 'absent'} -> {printable(first.new) or 'absent'}  "
                f"{bytes_text(group.old_bytes)} -> {bytes_text(group.new_bytes)} per device"
            )
        if len(groups) > MOST_ROWS:
            lines.append(f"and {len(groups) - MOST_ROWS:,} more: diff.groups() has all")
        growth = sum(change.new_bytes - change.old_bytes for change in self.changes)
        count = "1 leaf differs" if len(self.changes) == 1 else f"{len(self.changes)} leaves differ"
        lines.append(f"{count}, {'+' if growth >= 0 else ''}{bytes_text(growth)} per device")
        return "\n".join(lines)

    __repr__ = __str__


def _change(path: str, old: Placement, new: Placement) -> Change:
    # Shape and dtype are the same on both sides of most changes, and only clutter the line then.
    retyped = bool(old.spec and new.spec) and (old.shape, old.dtype) != (new.shape, new.dtype)
    before, after = (
        f"{shape_text(side.shape)} {side.dtype} {side.spec}" if retyped else side.spec for side in (old, new)
    )
    return Change(path, (new if new.spec else old).shape, before, after, old.device_bytes, new.device_bytes)
