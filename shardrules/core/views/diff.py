"""What differs between two plans."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.check import bytes_text
from shardrules.core.finding import common_path, shape_text, template
from shardrules.core.leaf import Decision, Leaf


@final
@attrs.frozen
class Placement:
    """How one leaf is placed."""

    shape: tuple[int, ...]
    dtype: str
    spec: str
    device_bytes: int


@final
@attrs.frozen
class Placements:
    """How all leaves of a plan are placed."""

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
    """One leaf in which two plans differ."""

    path: str
    shape: tuple[int, ...]
    old: str
    new: str
    old_bytes: int
    new_bytes: int


@final
@attrs.frozen(repr=False)
class PlanDiff:
    """What differs between two plans. It is false when nothing does, and prints as a table.

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
        """Returns the difference of what two plans hold."""
        before, after = old.leaves, new.leaves
        changes = [
            _change(path, before.get(path), after.get(path))
            for path in dict.fromkeys((*before, *after))
            if before.get(path) != after.get(path)
        ]
        return PlanDiff(old.mesh, new.mesh, tuple(changes))

    def __bool__(self) -> bool:
        return bool(self.changes) or self.old_mesh != self.new_mesh

    def __str__(self) -> str:
        if not self:
            return "no difference"
        lines = [] if self.old_mesh == self.new_mesh else [f"mesh {self.old_mesh} -> {self.new_mesh}"]
        groups: dict[tuple[Any, ...], list[Change]] = {}
        for one in self.changes:
            groups.setdefault((template(one.path), one.shape, one.old, one.new), []).append(one)
        for (_, shape, old, new), same in groups.items():
            many = f"  x{len(same)}" if len(same) > 1 else ""
            path = functools.reduce(common_path, (one.path for one in same))
            lines.append(
                f"{path or '(the tree)'}{many}  {shape_text(shape)}  {old or 'absent'} -> "
                f"{new or 'absent'}  {bytes_text(sum(one.old_bytes for one in same))} -> "
                f"{bytes_text(sum(one.new_bytes for one in same))} per device"
            )
        grown = sum(one.new_bytes - one.old_bytes for one in self.changes)
        many = "1 leaf differs" if len(self.changes) == 1 else f"{len(self.changes)} leaves differ"
        lines.append(f"{many}, {'+' if grown >= 0 else ''}{bytes_text(grown)} per device")
        return "\n".join(lines)

    __repr__ = __str__


def _change(path: str, old: Placement | None, new: Placement | None) -> Change:
    known = new or old
    assert known is not None
    retyped = old is not None and new is not None and (old.shape, old.dtype) != (new.shape, new.dtype)
    was, now = _text(old, retyped), _text(new, retyped)
    return Change(path, known.shape, was, now, old.device_bytes if old else 0, new.device_bytes if new else 0)


def _text(one: Placement | None, retyped: bool) -> str:
    if one is None:
        return ""
    return f"{shape_text(one.shape)} {one.dtype} {one.spec}" if retyped else one.spec
