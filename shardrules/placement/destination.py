"""From `how` to one sharding for each array of a tree.

`rules.how` reads what the caller passes. Here it meets devices: the mesh is chosen, arrays keep their memory, and all
that cannot be placed is collected before anything moves.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardrules.core.axes import AnyMesh, check_mesh, mesh_text
from shardrules.core.boxes import refuse_cycles, share_variables, shared_leaves
from shardrules.core.context import current_mesh
from shardrules.core.errors import NoMeshError, ShardingWarning
from shardrules.core.finding import Finding, listing
from shardrules.core.jax_state import under_trace
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import UNCONSTRAINED, axis_names, spec_repr
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.placement.traced import axis_types, host_memory
from shardrules.rules.how import (
    How,
    Resolved,
    by_leaf,
    checked_plan,
    not_an_entry,
    refusal,
    refuse_leaves,
    resolve,
    spec_errors,
)

_WARNINGS = ("large-replicated", "mesh-ignored")
"""Findings of a plan that are warned about when it is applied: large arrays on every device, and an ignored mesh."""


@final
@attrs.frozen(eq=False)
class Destination:
    """A flattened tree with the sharding that each of its arrays is to have."""

    values: Sequence[Any]
    treedef: Any
    shardings: Sequence[Sharding | None]
    """One for each leaf; `None` for leaves that are not arrays, and for those with a problem."""
    problems: Sequence[tuple[int, Finding]] = attrs.field(factory=list)
    """Findings about single arrays: pairs of a leaf index and a finding."""
    shared: Mapping[int, int] = attrs.field(factory=dict)
    """Leaves of variables that occur twice: each leaf index with that of the first occurrence."""

    def arrays(self) -> tuple[list[Any], list[Sharding]]:
        """Returns the arrays, and the sharding of each."""
        pairs = zip(self.values, self.shardings, strict=True)
        return (
            [value for value, sharding in pairs if sharding is not None],
            [sharding for sharding in self.shardings if sharding is not None],
        )

    def with_arrays(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with `arrays`, as many as `arrays()` gives, in the places of its arrays."""
        rest = iter(arrays)
        pairs = zip(self.values, self.shardings, strict=True)
        tree = self.treedef.unflatten([value if sharding is None else next(rest) for value, sharding in pairs])
        return share_variables(tree, self.shared)


def resolve_destination(
    tree: Any, how: How, mesh: AnyMesh | None = None, *, caller: str = "filter_shard", strict: bool = True
) -> Destination:
    """Returns where each array of a tree goes.

    The mesh is `mesh`, or the mesh of the rule or the plan, else the one that the arrays are on, else the one in force.
    With `strict=False`, problems with single arrays are returned instead of raised, so that the caller can add its own.
    """
    check_mesh(mesh)
    refuse_cycles(tree)
    resolved = resolve(how, tree, mesh, caller)
    values, treedef = jax.tree.flatten(tree)
    if resolved.plan is not None:
        shardings, problems = _planned_shardings(values, resolved.plan, resolved.meshes, caller), []
    else:
        shardings, problems = _entry_shardings(values, resolved, caller)
    shared = shared_leaves(tree)
    problems += _shared_problems(tree, values, shardings, shared)
    if strict:
        refuse_leaves(caller, tree, problems)
    return Destination(values, treedef, shardings, problems, shared)


def _shared_problems(
    tree: Any, values: Sequence[Any], shardings: list[Sharding | None], shared: Mapping[int, int]
) -> list[tuple[int, Finding]]:
    """Returns the leaves of variables that occur twice in a tree and are to be placed in two ways."""
    differing = {
        index: first
        for index, first in shared.items()
        if shardings[index] is not None and shardings[index] != shardings[first]
    }
    paths = leaf_paths(tree) if differing else ()
    remedy = "Give both paths one spec, or place nnx.state(model), which has the variable once"
    findings: list[tuple[int, Finding]] = []
    for index, first in differing.items():
        message = f"this variable is also at {paths[first]}, and would be placed in two ways"
        findings.append((index, Finding("error", "shared-variable", message, "", remedy, tuple(values[index].shape))))
        shardings[index] = None
    return findings


def _planned_shardings(
    values: Sequence[Any], plan: ShardingPlan, meshes: tuple[AnyMesh | None, ...], caller: str
) -> list[Sharding | None]:
    mesh = usable_mesh((*meshes, current_mesh()), caller)
    manual = [
        attrs.evolve(finding, path=leaf.path)
        for leaf, spec in zip(plan.kinds, plan.kind_specs, strict=True)
        for finding in _manual_axes(leaf.shape, spec, mesh)
    ]
    if manual:  # before the plan is checked: sizes inside shard_map are sizes of shards
        raise refusal(caller, manual)
    plan = checked_plan(plan, mesh, caller)
    notes = [finding for finding in plan.findings if finding.code in _WARNINGS]
    if notes:
        warnings.warn(f"{caller}:\n{listing(notes)}", ShardingWarning, stacklevel=4)
    shardings = [NamedSharding(mesh, spec) for spec in plan.kind_specs]
    pairs = zip(values, by_leaf(plan, shardings, len(values), caller), strict=True)
    return [None if sharding is None else _in_same_memory(value, sharding) for value, sharding in pairs]


def usable_mesh(candidates: Sequence[AnyMesh | None], caller: str) -> AnyMesh:
    """Returns the first mesh with devices; while tracing, the shape of a mesh is enough."""
    meshes = [mesh for mesh in candidates if mesh is not None]
    concrete = [mesh for mesh in meshes if isinstance(mesh, Mesh)]
    if concrete:
        return concrete[0]
    if meshes and under_trace():
        return meshes[0]
    if meshes:
        text = mesh_text(meshes[0])
        raise NoMeshError(
            f"{caller} needs devices, and {text} is only the shape of a mesh. Pass a mesh that has them: "
            f"sr.create_mesh({text!r}), or call it under `with jax.set_mesh(mesh)`"
        )
    raise NoMeshError(f"{caller} needs a mesh and there is none. Pass one, or call it inside jax.set_mesh(mesh)")


def _in_same_memory(value: Any, sharding: NamedSharding) -> NamedSharding:
    """A spec says nothing about memory: an array in the host's memory stays there."""
    current = getattr(value, "sharding", None)  # numpy arrays have none
    memory = host_memory(current) if isinstance(current, Sharding) else None
    return sharding if memory is None else sharding.with_memory_kind(memory)


def _entry_shardings(
    values: Sequence[Any], resolved: Resolved, caller: str
) -> tuple[list[Sharding | None], list[tuple[int, Finding]]]:
    kinds = [array_kind(value) for value in values]
    pairs = zip(resolved.entries, kinds, strict=True)
    # A tree of shardings needs no other mesh, so none is asked for.
    mesh = None
    if any(kind is not None and (entry is None or isinstance(entry, PartitionSpec)) for entry, kind in pairs):
        mesh = usable_mesh((*resolved.meshes, common_mesh(values), current_mesh()), caller)
    shardings: list[Sharding | None] = [None] * len(values)
    problems: list[tuple[int, Finding]] = []
    # Layers repeat: one check per shape and entry, not per leaf. By identity, since hashing a spec costs more.
    checked: dict[tuple[tuple[int, ...], int], tuple[Sharding | None, list[Finding]]] = {}
    for leaf_index, (value, entry, kind) in enumerate(zip(values, resolved.entries, kinds, strict=True)):
        if kind is None:
            continue
        key = (kind[0], id(entry))
        if key not in checked:
            checked[key] = _as_sharding(kind[0], entry, mesh)
        sharding, findings = checked[key]
        problems += [(leaf_index, finding) for finding in findings]
        if not isinstance(entry, Sharding) and isinstance(sharding, NamedSharding):
            sharding = _in_same_memory(value, sharding)
        shardings[leaf_index] = sharding
    return shardings, problems


def common_mesh(values: Sequence[Any]) -> Mesh | None:
    """The mesh that the arrays are on, if there is exactly one."""
    meshes: list[Mesh] = []
    for value in values:
        sharding = getattr(value, "sharding", None)  # numpy arrays have none
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and sharding.mesh not in meshes:
            meshes.append(sharding.mesh)
    return meshes[0] if len(meshes) == 1 else None


def _as_sharding(shape: tuple[int, ...], entry: Any, mesh: AnyMesh | None) -> tuple[Sharding | None, list[Finding]]:
    """Returns the sharding for an array, or `None` and what is wrong; `mesh` is for specs, which name none."""
    match entry:
        case jax.Device():
            return SingleDeviceSharding(entry), []
        case NamedSharding():
            sharding, problems = entry, _errors(shape, entry.spec, entry.mesh)
        case Sharding():
            sharding, problems = entry, []
            # Other shardings have no spec to check, and JAX itself knows what they divide.
            try:
                entry.shard_shape(shape)
            except ValueError as error:
                problems = [Finding("error", "misfit", str(error), shape=shape)]
        case None | PartitionSpec():
            assert mesh is not None
            spec = PartitionSpec() if entry is None else entry
            problems = _errors(shape, spec, mesh)
            sharding = None if problems else NamedSharding(mesh, spec)
        case _:
            return None, [not_an_entry(entry, shape, "a PartitionSpec, a sharding, a device or None")]
    return (None, problems) if problems else (sharding, [])


def _errors(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> list[Finding]:
    return _manual_axes(shape, spec, mesh) or spec_errors(shape, spec, mesh)


def _manual_axes(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> list[Finding]:
    """Inside `shard_map` an array is one device's shard already, and the mapped axes cannot split it again."""
    if not under_trace():
        return []
    manual = [name for name, axis_type in axis_types(mesh).items() if axis_type == AxisType.Manual]
    why = "is Manual here: inside shard_map each device has its own shard"
    remedy = "Leave the axis out, or place arrays outside of shard_map"
    return [
        Finding("error", "manual-axis", f"axis {name!r} of {spec_repr(spec)} {why}", "", remedy, shape, axis=name)
        for name in axis_names(spec)
        if name in manual
    ]


def not_placeable(destination: Destination, *, values: bool = True) -> list[tuple[int, Finding]]:
    """Returns what cannot be put on devices outside of jit, as pairs of a leaf index and a finding.

    With `values=False`, shapes without values are accepted.
    """
    problems: list[tuple[int, Finding]] = []
    for leaf_index, (value, sharding) in enumerate(zip(destination.values, destination.shardings, strict=True)):
        if sharding is None:
            continue
        if values and isinstance(value, jax.ShapeDtypeStruct):
            what, remedy = "it has a shape and no values", "Make it with filter_init, or load it"
        elif not isinstance(sharding, NamedSharding):
            continue
        elif not isinstance(sharding.mesh, Mesh):
            what, remedy = "its sharding is on the shape of a mesh, without devices", "Use a mesh that has devices"
        elif UNCONSTRAINED in sharding.spec.partitions:
            what = "outside of jit no compiler chooses how an UNCONSTRAINED dimension is split"
            remedy = "Name the axes that split it, or None"
        else:
            continue
        problems.append((leaf_index, Finding("error", "not-placeable", what, "", remedy, tuple(value.shape))))
    return problems
