"""`how`: the ways to say where the arrays of a tree go, and the one place that reads them.

`filter_shard`, `filter_init`, `filter_jit`, `reshard`, the loaders and the audits accept the same things: a rule, a
plan, specs, shardings, devices, or a function from the tree to any of those. `resolve` turns all of them into either a
plan for the tree or one entry per leaf, so that they mean the same everywhere and are refused in the same words.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, final

import attrs
import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.core.check import check_spec
from shardrules.core.errors import PlanError, TreeError
from shardrules.core.finding import Finding, plan_error
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.tree import leaf_paths, spread

_T = TypeVar("_T")


class Device(Protocol):
    """A `jax.Device`, which jaxlib ships without types."""

    @property
    def id(self) -> int: ...

    @property
    def platform(self) -> str: ...


class Dataclass(Protocol):
    """Any dataclass: Equinox modules and many other pytrees of specs are."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


HowEntry: TypeAlias = PartitionSpec | Sharding | Device | None
"""The place of one array, or of every array below it in a prefix."""

SpecTree: TypeAlias = "HowEntry | Sequence[SpecTree] | Mapping[Any, SpecTree] | Dataclass"
"""A tree of entries with the structure of the arrays' tree, or a prefix of it."""

How: TypeAlias = "SpecTree | ShardingRule | ShardingPlan | Callable[[Any], SpecTree | ShardingRule | ShardingPlan]"
"""The places of the arrays of one tree. A function gets the tree: `plan.mirror` is one."""

HowEach: TypeAlias = "How | tuple[How, ...]"
"""`in_shardings` and `out_shardings`: one `How` for all arguments or results, or a tuple with one for each."""


@final
@attrs.frozen(eq=False)
class Resolved:
    """The meaning of `how` for a tree: a plan for it, or one entry for each leaf."""

    plan: ShardingPlan | None
    entries: Sequence[Any]
    """Empty where there is a plan. Entries of a wrong type are kept: the error that names them lists all arrays."""
    meshes: tuple[AnyMesh | None, ...]
    """The meshes that `how` and the caller name, those that count most first."""


def resolve(how: How, tree: Any, mesh: AnyMesh | None, caller: str) -> Resolved:
    """Returns the plan or the entries that `how` gives the leaves of `tree`.

    ```python
    from shardrules.rules.how import resolve

    tree = {"w": [np.ones(8), np.ones(4)], "b": np.ones(4)}
    assert resolve({"w": P("data"), "b": None}, tree, None, "me").entries == [None, P("data"), P("data")]
    ```
    """
    # A module may hold specs and be callable, too: only a leaf is a function to call.
    if callable(how) and jtu.all_leaves([how]):
        how = how(tree)
    if isinstance(how, ShardingRule):
        plan = how.plan(tree, mesh)
        meshes = (plan.mesh, mesh)  # a rule may bring a mesh of its own, which wins over the caller's
    elif isinstance(how, ShardingPlan):
        plan = how.bind(tree)
        meshes = (mesh, how.mesh)
    else:
        return Resolved(None, spread(how, tree, is_entry, caller, "specs"), (mesh,))
    return Resolved(plan, [], meshes)


def is_entry(node: Any) -> bool:
    """Returns whether a node of a tree of specs is an entry rather than a container."""
    return node is None or isinstance(node, PartitionSpec | Sharding | jax.Device)


def checked_plan(plan: ShardingPlan, mesh: AnyMesh, caller: str) -> ShardingPlan:
    """Returns the plan on `mesh`; raises its errors, with a note that names `caller`."""
    if mesh_sizes(plan.mesh) != mesh_sizes(mesh):
        plan = attrs.evolve(plan, mesh=mesh)
    try:
        return plan.check()
    except PlanError as error:
        error.add_note(f"from {caller}")
        raise


def by_leaf(plan: ShardingPlan, kind_values: Sequence[_T], leaf_count: int, caller: str) -> list[_T | None]:
    """Returns one value for each leaf from one for each kind of `plan`; `None` for leaves that are not arrays."""
    if len(plan.survey.kind_of) != leaf_count:
        raise TreeError(f"{caller}: a box in the tree holds several arrays or none; unbox it first")
    return [None if kind_index < 0 else kind_values[kind_index] for kind_index in plan.survey.kind_of]


_REMEDIES = {
    "indivisible": "Split another dimension, or make this one a multiple",
    "unknown-axis": "Correct the name, or use a mesh that has this axis",
    "rank-overflow": "Give it at most one entry per dimension",
}
"""The remedy for a spec that the user wrote out: `check_spec` suggests to wrap the rule, and there is none."""


def spec_errors(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh, path: str = "") -> list[Finding]:
    """Returns the errors in a spec that the user wrote out for an array."""
    return [
        attrs.evolve(finding, remedy=_REMEDIES.get(finding.code, finding.remedy))
        for finding in check_spec(path, shape, spec, mesh_sizes(mesh))
        if finding.severity == "error"
    ]


def not_an_entry(entry: Any, shape: tuple[int, ...], accepted: str, path: str = "") -> Finding:
    """Returns the finding about an entry of a type that the caller does not accept."""
    return Finding("error", "no-sharding", f"expected {accepted}, got {entry!r:.60}", path, shape=shape)


def refusal(caller: str, findings: Iterable[Finding]) -> PlanError:
    """Returns the error that lists the arrays that cannot be placed, each finding with its path."""
    findings = list(findings)
    counts = {finding.path: finding.count for finding in findings}  # an array may have several findings
    count = sum(counts.values())
    return plan_error(f"{caller}: {count} array{'s' * (count > 1)} cannot be placed", findings)


def refuse_leaves(caller: str, tree: Any, problems: Sequence[tuple[int, Finding]]) -> None:
    """Raises one error for all `problems`, which are pairs of a leaf index and a finding, if there are any."""
    if problems:
        paths = leaf_paths(tree)
        raise refusal(caller, [attrs.evolve(finding, path=paths[leaf_index]) for leaf_index, finding in problems])
