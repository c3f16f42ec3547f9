"""The findings that every plan computes, from shapes alone."""

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_sizes, shown_mesh
from shardrules.core.errors import shortened, suggest
from shardrules.core.finding import UNKNOWN_AXIS_REMEDY, Finding, shape_text
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, RuleCall
from shardrules.core.spec import UNCONSTRAINED, Entry, axis_names, divisible_prefix, entries, make_spec, spec_repr
from shardrules.core.text import bytes_text
from shardrules.core.tree import Survey

LARGE_BYTES = 16 * 2**20
"""From this size on, a leaf that no rule decided is a warning. Chosen by hand: a 4096 x 4096 matrix in bfloat16 has 32
MiB, and tables of a few thousand rows have less."""


def check_spec(
    path: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int] | None, *, count: int = 1
) -> Iterator[Finding]:
    """Yields what is wrong with one spec for one array; `count` is how many arrays share it.

    Without the `sizes` of the mesh axes, what depends on a mesh is not checked.
    """
    where: dict[str, Any] = {"path": path, "shape": shape, "count": count}
    spec_entries = entries(spec)
    if len(spec_entries) > len(shape):
        yield Finding(
            "error",
            "rank-overflow",
            f"{spec_repr(spec)} has {len(spec_entries)} entries, the array has {len(shape)} dimensions",
            remedy=f"Write {len(shape)} entries, or apply the rule to fewer leaves",
            **where,
        )
        # The entries that have a dimension are still checked: one report has all mistakes.
        spec_entries = spec_entries[: len(shape)]
    first_dims: dict[str, int] = {}
    for dim, entry in enumerate(spec_entries):
        if entry == () or entry is UNCONSTRAINED:
            continue
        for name in entry:
            if name in first_dims:
                yield Finding(
                    "error",
                    "duplicate-axis",
                    f"{spec_repr(spec)} uses axis {name!r} twice (duplicate entries for `{name}`): dimensions "
                    f"{first_dims[name]} and {dim}",
                    remedy="An axis can split only one dimension of an array: keep the other one whole",
                    dim=dim,
                    axis=name,
                    **where,
                )
            first_dims.setdefault(name, dim)
        if sizes is not None:
            yield from _check_entry(shape, spec, dim, sizes, {**where, "dim": dim})


def _check_entry(
    shape: tuple[int, ...],
    spec: PartitionSpec,
    dim: int,
    sizes: Mapping[str, int],
    where: Mapping[str, Any],
) -> Iterator[Finding]:
    entry = entries(spec)[dim]
    unknown = [name for name in entry if name not in sizes]
    for name in unknown:
        mesh_text = ", ".join(shortened([*sizes])) or "none"
        why = f"unknown axis {name!r}{suggest(name, sizes)}; the mesh has {mesh_text}"
        yield Finding("error", "unknown-axis", why, remedy=UNKNOWN_AXIS_REMEDY, axis=name, **where)
    split = math.prod(sizes.get(name, 1) for name in entry)
    # The size of an unknown axis is unknown, so there is nothing to divide by.
    if unknown or shape[dim] % split == 0:
        return
    axis = entry[0] if len(entry) == 1 else None
    yield Finding(
        "error",
        "indivisible",
        f"Array shape {shape_text(shape)} not divisible by mesh axis {' x '.join(entry)} size {split}: dimension {dim} "
        f"is {shape[dim]}, remainder {shape[dim] % split}",
        remedy=f"Make it a multiple of {split}, split another dimension, or wrap the rule in FittedShardingRule",
        axis=axis,
        **where,
    )
    # JAX weakens all dimensions of a spec at once, so the finding shows the whole spec that it would use.
    pairs = list(zip(entries(spec), shape, strict=False))
    weaker = make_spec(
        tuple(part if part is UNCONSTRAINED else divisible_prefix(part, size, sizes) for part, size in pairs)
    )
    alternative = ""
    if any(part is not UNCONSTRAINED and _divides_in_part(part, size, sizes) for part, size in pairs):
        alternative = ", or from JAX 0.11 on a split by part of an axis"
    yield Finding(
        "warning",
        "weakened",
        f"a constraint inside jit would silently become {spec_repr(weaker)}{alternative}: {(axis or entry)!r} does not "
        f"divide dimension {dim}",
        remedy=f"Write {spec_repr(weaker)} if that is what you want",
        axis=axis,
        **where,
    )


def _divides_in_part(entry: Entry, dim_size: int, sizes: Mapping[str, int]) -> bool:
    """A factor of the first axis of `entry` that the prefix leaves out divides what remains of `dim_size`."""
    fitting = divisible_prefix(entry, dim_size, sizes)
    if len(fitting) == len(entry):
        return False
    remaining = dim_size // math.prod(sizes[name] for name in fitting)
    return math.gcd(remaining, sizes.get(entry[len(fitting)], 1)) > 1


def check_leaves(
    kinds: Sequence[Leaf], decisions: Sequence[Decision], counts: Sequence[int], mesh: AnyMesh | None
) -> Iterator[Finding]:
    """Yields the findings about a whole plan, leaf by leaf and then about the whole; `counts` are leaves per kind."""
    sizes = None if mesh is None else mesh_sizes(mesh)
    used: dict[str, None] = {}
    splittable = False
    explicit = mesh is not None and _all_explicit(mesh)
    for leaf, decision, count in zip(kinds, decisions, counts, strict=True):
        splittable = splittable or leaf.size > 1
        spec = decision.spec
        if spec is None:
            yield from _check_undecided(leaf, decision, count)
        elif spec.partitions:
            used.update(dict.fromkeys(axis_names(spec)))
            yield from check_spec(leaf.path, leaf.shape, spec, sizes, count=count)
            if explicit and UNCONSTRAINED in spec.partitions:
                yield _unconstrained(leaf, spec, count)
        # Findings of decisions are about one leaf; the plan reports them for all leaves of the kind.
        for finding in decision.findings:
            yield finding if count == 1 else attrs.evolve(finding, count=finding.count * count)
    # An axis of size 1 splits nothing anyway, and a tree without arrays has nothing to split.
    for name, size in (sizes or {}).items():
        if splittable and size > 1 and name not in used:
            yield Finding(
                "warning",
                "unused-axis",
                f"no leaf is split over axis {name!r} of size {size}, so its devices hold {size} copies of everything",
                remedy=f"Add a rule such as FSDPShardingRule({name!r}), or remove the axis from the mesh "
                f"({shown_mesh(mesh)}) if it is not for data",
                axis=name,
            )


def _all_explicit(mesh: AnyMesh) -> bool:
    axis_types = mesh.axis_types if isinstance(mesh, Mesh | AbstractMesh) else ()
    return bool(axis_types) and all(axis_type == AxisType.Explicit for axis_type in axis_types)


def _unconstrained(leaf: Leaf, spec: PartitionSpec, count: int) -> Finding:
    why = (
        f"{spec_repr(spec)} leaves a dimension to the compiler, but all axes of the mesh are Explicit, which the "
        "compiler does not choose"
    )
    remedy = "Write None or an axis for UNCONSTRAINED, or use a mesh with Auto axes: "
    remedy += "sr.create_mesh(..., axis_types='auto')"
    return Finding("error", "unconstrained", why, leaf.path, remedy, leaf.shape, count=count)


def _check_undecided(leaf: Leaf, decision: Decision, count: int) -> Iterator[Finding]:
    # Scalars cannot be split, so it does not matter that no rule decides them.
    if leaf.size <= 1:
        return
    why = f": {decision.reason}" if decision.reason else ""
    why = f"no rule has an opinion, so it is replicated{why}"
    remedy = "Add a rule for it, or ReplicateShardingRule() if this is on purpose"
    yield Finding("note", "unmatched", why, leaf.path, remedy, leaf.shape, count=count)
    if leaf.nbytes >= LARGE_BYTES:
        why = f"{bytes_text(leaf.nbytes)} on every device, and no rule asks for it"
        remedy = (
            "Split it (FSDPShardingRule splits what is large), or add ReplicateShardingRule() if this is on purpose"
        )
        yield Finding("warning", "large-replicated", why, leaf.path, remedy, leaf.shape, count=count)


def ambiguous_paths(survey: Survey) -> Iterator[Finding]:
    """Yields an error for each path that several leaves share, which a key with a slash in it can cause."""
    if not survey.has_slashes:
        return
    for path, count in collections.Counter(survey.paths()).items():
        if count > 1:
            why = f"{count} leaves have this path, since a key has a slash or is empty; plans tell leaves apart by path"
            yield Finding("error", "ambiguous-path", why, path, "Rename one of the keys")


def over_budget(limits: Sequence[int], leaves: Leaves, decisions: Sequence[Decision]) -> Iterator[Finding]:
    """Yields an error for each limit on the whole tree that a plan misses, with leaves that other rules decided."""
    sizes = mesh_sizes(leaves.survey.mesh)
    device_bytes = sum(
        decision.device_bytes(leaf, sizes) * count
        for leaf, decision, count in zip(leaves.items, decisions, leaves.counts, strict=True)
    )
    for limit in dict.fromkeys(limits):
        if device_bytes > limit:
            why = f"all arrays together take {device_bytes:,} bytes per device, the limit for the tree is {limit:,}"
            remedy = "Let the rule with the limit come last in a CompositeShardingRule, so that it sees all the others"
            yield Finding("error", "over-budget", why, remedy=remedy)


def idle_patterns(calls: Iterable[RuleCall]) -> Iterator[Finding]:
    """Yields the finding of each pattern that won no leaf in any call of its rule, or of an equal rule."""
    every_call = list(_nested_calls(calls))
    types = {type(call.rule) for call in every_call if call.verdict.idle}
    # A rule may stand in several places, and a pattern that wins in one of them is not idle.
    equal_calls: dict[int, list[list[RuleCall]]] = {}
    for call in every_call:
        if type(call.rule) in types:
            groups = equal_calls.setdefault(_rule_hash(call.rule), [])
            # Equal hashes may belong to different rules, and rules without one all have 0: equality decides.
            group = next((group for group in groups if group[0].rule is call.rule or group[0].rule == call.rule), None)
            if group is None:
                groups.append([call])
            else:
                group.append(call)
    for first, *others in (group for groups in equal_calls.values() for group in groups):
        idle_elsewhere = [{pattern_index for pattern_index, _ in other.verdict.idle} for other in others]
        for pattern_index, finding in first.verdict.idle:
            if all(pattern_index in indices for indices in idle_elsewhere):
                yield finding


def _rule_hash(rule: object) -> int:
    try:
        return hash(rule)
    except TypeError:  # rules of users may have none, and are compared
        return 0


def _nested_calls(calls: Iterable[RuleCall]) -> Iterator[RuleCall]:
    for call in calls:
        yield from _nested_calls(call.leaves.calls)
        yield call


def with_templates(findings: Iterable[Finding], survey: Survey) -> Iterator[Finding]:
    """Yields findings about several leaves with the path template of all of them, instead of the first one's path."""
    templates: dict[str, str] | None = None
    for finding in findings:
        if finding.count == 1:
            yield finding
            continue
        if templates is None:  # spelled out only when a finding needs them
            templates = dict(zip((leaf.path for leaf in survey.kinds), survey.templates(), strict=True))
        yield attrs.evolve(finding, path=templates.get(finding.path, finding.path))
