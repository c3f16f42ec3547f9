"""From what a caller gives (a rule, a plan, specs, shardings, a device) to one sharding for each array of a tree.

Everything that places arrays starts here, so that all of it takes the same things, means the same by them, and refuses
them in the same words.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.tree_util as jtu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardrules.core.axes import AnyMesh, check_mesh, mesh_sizes, mesh_text
from shardrules.core.check import check_spec
from shardrules.core.context import current_mesh
from shardrules.core.errors import NoMeshError, PlanError, ShardingWarning, TreeError
from shardrules.core.finding import Finding, listing, plan_error
from shardrules.core.jax_state import under_trace
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.spec import UNCONSTRAINED, axis_names, spec_repr
from shardrules.core.tree import array_kind, leaf_paths, spread
from shardrules.placement.traced import axis_types, host_memory

How: TypeAlias = Any
"""A rule, a plan, a PartitionSpec, a sharding, a device, a tree (or prefix) of specs and shardings, or a function from
the tree to one of those, such as `plan.mirror`."""

_TOLD = ("large-replicated", "mesh-ignored")
"""The warnings of a plan that are told when it is applied: what is left whole, and where the mesh is another one."""


@final
@attrs.frozen(eq=False)
class Destination:
    """A tree taken apart, with where each of its arrays is to be.

    **Arguments:**

    - `values`: its leaves.
    - `treedef`: its structure.
    - `shardings`: one for each leaf; `None` for what is no array and stays as it is.
    """

    values: list[Any]
    treedef: Any
    shardings: list[Sharding | None]

    def arrays(self) -> tuple[list[Any], list[Sharding]]:
        """Returns the arrays and their shardings.

        **Returns:**

        Two lists of one length.
        """
        pairs = [(value, one) for value, one in zip(self.values, self.shardings, strict=True) if one is not None]
        return [value for value, _ in pairs], [one for _, one in pairs]

    def with_arrays(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with other arrays in it.

        **Arguments:**

        - `arrays`: as many as `arrays` gives.

        **Returns:**

        The tree.
        """
        rest = iter(arrays)
        pairs = zip(self.values, self.shardings, strict=True)
        return self.treedef.unflatten([value if one is None else next(rest) for value, one in pairs])

    def tree(self) -> Any:
        """Returns the tree of shardings: one at every array, `None` at the rest.

        **Returns:**

        A tree.
        """
        return self.treedef.unflatten(self.shardings)


def resolve_destination(
    tree: Any,
    how: How,
    mesh: AnyMesh | None = None,
    *,
    caller: str = "filter_shard",
    problems: list[tuple[int, Finding]] | None = None,
) -> Destination:
    """Returns where each array of a tree is to be.

    **Arguments:**

    - `tree`: any pytree of arrays, `ShapeDtypeStruct`s or `ArraySource`s. Other leaves stay as they are.
    - `how`: a rule, a plan, a PartitionSpec, a sharding, a device, or a tree or prefix of specs and shardings, or
        a function from the tree to one of those. `None` in a tree of specs means what it means everywhere: nothing was
        said, so the array is replicated.
    - `mesh`: the mesh; by default that of the rule or the plan, the one that arrays are on, or the one in force.
    - `caller`: the caller's name, for messages.
    - `problems`: a list that takes what is wrong with single arrays, by their numbers among the leaves, for the caller to
        raise with more. Those have no sharding in the result.

    **Returns:**

    A `Destination`.

    **Raises:**

    `PlanError`, listing everything that is wrong with any array; `TreeError` where `how` does not have the structure
    of the tree; `NoMeshError`.

    ```python
    found = resolve_destination({"w": np.ones((8, 4))}, P("data"), sr.create_mesh("data:8"))
    assert found.shardings[0].spec == P("data")
    ```
    """
    check_mesh(mesh)
    if callable(how) and jtu.all_leaves([how]):  # a module that stands for a tree of specs can be called, too
        how = how(tree)
    values, treedef = jax.tree.flatten(tree)
    if isinstance(how, ShardingRule):
        plan = how.plan(tree, mesh)
        return _by_plan(values, treedef, plan, (plan.mesh, mesh), caller)
    if isinstance(how, ShardingPlan):
        return _by_plan(values, treedef, how.bind(tree), (mesh, how.mesh), caller)
    return _by_prefix(tree, values, treedef, how, mesh, caller, problems)


def _by_plan(
    values: list[Any], treedef: Any, plan: ShardingPlan, meshes: tuple[AnyMesh | None, ...], caller: str
) -> Destination:
    where = _mesh((*meshes, current_mesh()), caller)
    if mesh_sizes(plan.mesh) != mesh_sizes(where):
        plan = attrs.evolve(plan, mesh=where)
    pairs = [(leaf.path, leaf.shape, spec) for leaf, spec in zip(plan.kinds, plan.kind_specs, strict=True)]
    _refuse(caller, [(path, finding) for path, shape, spec in pairs for finding in _manual(shape, spec, where)])
    plan.check()
    told = [finding for finding in plan.findings if finding.code in _TOLD]
    if told:
        warnings.warn(f"{caller}:\n{listing(told)}", ShardingWarning, stacklevel=4)
    kinds = plan.survey.kind_of
    if len(kinds) != len(values):
        raise TreeError(f"{caller}: a box in the tree holds more than one array, or none; unbox it first")
    placed = [NamedSharding(where, spec) for spec in plan.kind_specs]
    return Destination(
        values,
        treedef,
        [None if kind < 0 else _in_its_memory(value, placed[kind]) for value, kind in zip(values, kinds, strict=True)],
    )


def _mesh(candidates: Sequence[AnyMesh | None], caller: str) -> AnyMesh:
    """The first mesh that has devices; while tracing its shape is enough."""
    known = [mesh for mesh in candidates if mesh is not None]
    concrete = [mesh for mesh in known if isinstance(mesh, Mesh)]
    if concrete:
        return concrete[0]
    if known and under_trace():
        return known[0]
    if known:
        raise NoMeshError(
            f"{caller} needs devices, and {mesh_text(known[0])} is only the shape of a mesh. Pass a mesh that has them: "
            f"sr.create_mesh({mesh_text(known[0])!r})"
        )
    raise NoMeshError(f"{caller} needs a mesh and there is none. Pass one, or call it inside jax.set_mesh(mesh)")


def _in_its_memory(value: Any, sharding: NamedSharding) -> NamedSharding:
    """A spec says nothing about memory: an array that was put into the host's memory stays there."""
    own = getattr(value, "sharding", None)  # numpy arrays have none
    kind = host_memory(own) if isinstance(own, Sharding) else None
    return sharding if kind is None else sharding.with_memory_kind(kind)


def _stands(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | Sharding | jax.Device)


def _by_prefix(
    tree: Any,
    values: list[Any],
    treedef: Any,
    how: Any,
    mesh: AnyMesh | None,
    caller: str,
    collected: list[tuple[int, Finding]] | None,
) -> Destination:
    said = spread(how, tree, _stands, caller)
    kinds = [array_kind(value) for value in values]
    default: list[AnyMesh] = []
    if any(one is None or isinstance(one, PartitionSpec) for one, kind in zip(said, kinds, strict=True) if kind):
        default.append(_mesh((mesh, *_meshes_of(values), current_mesh()), caller))
    wrong: list[tuple[int, Finding]] = []
    shardings: list[Sharding | None] = []
    known: dict[Any, tuple[Any, list[Finding]]] = {}
    for number, (value, one, kind) in enumerate(zip(values, said, kinds, strict=True)):
        if kind is None:
            shardings.append(None)
            continue
        key = (kind[0], id(one))
        if key not in known:
            known[key] = _as_sharding(kind[0], one, default, caller)
        sharding, findings = known[key]
        if findings:
            wrong += [(number, finding) for finding in findings]
            shardings.append(None)
            continue
        if not isinstance(one, Sharding) and isinstance(sharding, NamedSharding):
            sharding = _in_its_memory(value, sharding)
        shardings.append(sharding)
    if collected is None:
        refuse_leaves(caller, tree, wrong)
    else:
        collected += wrong
    return Destination(values, treedef, shardings)


def refuse_leaves(caller: str, tree: Any, wrong: Sequence[tuple[int, Finding]]) -> None:
    """Raises one error that lists everything that is wrong with leaves of a tree, if anything is.

    **Arguments:**

    - `caller`: the caller's name.
    - `tree`: the tree.
    - `wrong`: pairs of a leaf's number and a finding about it.

    **Raises:**

    `PlanError`.
    """
    if wrong:
        paths = leaf_paths(tree)
        _refuse(caller, [(paths[number], finding) for number, finding in wrong])


def _refuse(caller: str, wrong: Sequence[tuple[str, Finding]]) -> None:
    if wrong:
        raise refusal(caller, [attrs.evolve(finding, path=path) for path, finding in wrong])


def refusal(caller: str, findings: Sequence[Finding]) -> PlanError:
    """Returns the error that lists what is wrong with arrays.

    **Arguments:**

    - `caller`: the caller's name.
    - `findings`: what is wrong, each with its path.

    **Returns:**

    A `PlanError`.
    """
    counts = {finding.path: finding.count for finding in findings}  # an array may have several
    count = sum(counts.values())
    return plan_error(f"{caller}: {count} array{'s' * (count > 1)} cannot be placed", findings)


def _manual(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> list[Finding]:
    """Inside `shard_map` an array is one device's part already, of which the axes that are mapped say nothing."""
    if not under_trace():
        return []
    manual = [name for name, kind in axis_types(mesh).items() if kind == AxisType.Manual]
    why = "is Manual here: inside shard_map each device has its own part"
    remedy = "Leave the axis out, or place arrays outside of shard_map"
    return [
        Finding("error", "manual-axis", f"axis {name!r} of {spec_repr(spec)} {why}", "", remedy, shape, axis=name)
        for name in axis_names(spec)
        if name in manual
    ]


def check_placeable(tree: Any, found: Destination, caller: str) -> None:
    """Refuses what cannot be put on devices outside of jit.

    **Arguments:**

    - `tree`, `found`: the tree, and the same taken apart.
    - `caller`: the caller's name, for messages.

    **Raises:**

    `PlanError`, listing shapes that have no values, shardings without devices, and dimensions that are left open.
    """
    refuse_leaves(caller, tree, not_placeable(found))


def not_placeable(found: Destination, *, values: bool = True) -> list[tuple[int, Finding]]:
    """Returns what cannot be put on devices outside of jit.

    **Arguments:**

    - `found`: a tree taken apart.
    - `values`: whether arrays must have values; else shapes will do.

    **Returns:**

    Pairs of a leaf's number and a finding about it.
    """
    wrong: list[tuple[int, Finding]] = []
    for number, (value, one) in enumerate(zip(found.values, found.shardings, strict=True)):
        shape = () if one is None else tuple(value.shape)
        why = ""
        if values and one is not None and isinstance(value, jax.ShapeDtypeStruct):
            why = "it has a shape and no values", "Make it with filter_init, or load it"
        elif isinstance(one, NamedSharding) and not isinstance(one.mesh, Mesh):
            why = "its sharding is on the shape of a mesh, without devices", "Name a mesh that has them"
        elif isinstance(one, NamedSharding) and UNCONSTRAINED in one.spec.partitions:
            why = "outside of jit there is no compiler to leave a dimension to", "Say how it is split, or None"
        if why:
            wrong.append((number, Finding("error", "not-placeable", why[0], "", why[1], shape)))
    return wrong


def _meshes_of(values: Sequence[Any]) -> Iterator[AnyMesh]:
    """The mesh that the arrays are on, where there is only one."""
    found: list[Mesh] = []
    for value in values:
        own = getattr(value, "sharding", None)  # numpy arrays have none
        if isinstance(own, NamedSharding) and isinstance(own.mesh, Mesh) and own.mesh not in found:
            found.append(own.mesh)
    if len(found) == 1:
        yield found[0]


def _as_sharding(
    shape: tuple[int, ...], one: Any, default: Sequence[AnyMesh], caller: str
) -> tuple[Sharding | None, list[Finding]]:
    if isinstance(one, jax.Device):
        return SingleDeviceSharding(one), []
    if isinstance(one, NamedSharding):
        return one, _errors(shape, one.spec, one.mesh)
    if isinstance(one, Sharding):
        try:
            one.shard_shape(shape)
        except ValueError as error:
            return None, [Finding("error", "misfit", str(error), shape=shape)]
        return one, []
    if one is None or isinstance(one, PartitionSpec):
        spec = PartitionSpec() if one is None else one
        problems = _errors(shape, spec, default[0])
        return (None, problems) if problems else (NamedSharding(default[0], spec), [])
    what = f"{one!r:.60} stands where {caller} wants a PartitionSpec, a sharding, a device or None"
    return None, [Finding("error", "no-sharding", what, shape=shape)]


_REMEDIES = {
    "indivisible": "Split another dimension, or make this one a multiple",
    "unknown-axis": "Correct the name, or place on a mesh that has it",
    "rank-overflow": "Give it at most one entry for each dimension",
}
"""What to do about a spec that was given as it is: no rule stands behind it that could be wrapped."""


def _errors(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> list[Finding]:
    return _manual(shape, spec, mesh) or [
        attrs.evolve(found, remedy=_REMEDIES.get(found.code, found.remedy))
        for found in check_spec("", shape, spec, mesh_sizes(mesh))
        if found.severity == "error"
    ]
