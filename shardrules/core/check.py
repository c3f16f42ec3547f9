"""The findings that every plan computes, from shapes alone."""

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_sizes, shown_mesh
from shardrules.core.errors import shortened, suggest
from shardrules.core.finding import UNKNOWN_AXIS_REMEDY, Finding, shape_text
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, RuleCall
from shardrules.core.spec import UNCONSTRAINED, Entry, divisible_prefix, entries, make_spec, spec_repr
from shardrules.core.text import bytes_text
from shardrules.core.tree import Survey

LARGE_BYTES = 16 * 2**20
"""From this size on, a leaf that no rule decided is a warning. Half as much warns about tables of a few thousand rows,
too; four times as much misses the 4096 x 4096 matrices of a 7B model in bfloat16."""


def check_spec(
    path: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int] | None, *, count: int = 1
) -> Iterator[Finding]:
    """Yields what is wrong with one spec for one array; `count` is how many arrays share it.

    Without the `sizes` of the mesh axes, what depends on a mesh is not checked.

    ```python
    from shardrules.core.check import check_spec

    codes = [finding.code for finding in check_spec("w", (8, 15), P("data", "model"), {"data": 2, "model": 4})]
    assert codes == ["indivisible", "weakened"]
    ```
    """
    spec_entries = entries(spec)
    if len(spec_entries) > len(shape):
        yield Finding(
            "error",
            "rank-overflow",
            f"{spec_repr(spec)} has {len(spec_entries)} entries, the array has {len(shape)} dimensions",
            path,
            f"Write {len(shape)} entries, or apply the rule to fewer leaves",
            shape,
            count=count,
        )
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
                    path,
                    "An axis can split only one dimension of an array: keep the other one whole",
                    shape,
                    dim,
                    name,
                    count,
                )
            first_dims.setdefault(name, dim)
        if sizes is not None:
            yield from _check_entry(path, shape, spec, dim, entry, sizes, count)


def _check_entry(
    path: str,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    dim: int,
    entry: Entry,
    sizes: Mapping[str, int],
    count: int,
) -> Iterator[Finding]:
    unknown = [name for name in entry if name not in sizes]
    for name in unknown:
        yield Finding(
            "error",
            "unknown-axis",
            f"unknown axis {name!r}{suggest(name, sizes)}; the mesh has {', '.join(shortened([*sizes])) or 'none'}",
            path,
            UNKNOWN_AXIS_REMEDY,
            shape,
            dim,
            name,
            count,
        )
    split = math.prod(sizes.get(name, 1) for name in entry)
    # The size of an unknown axis is unknown, so there is nothing to divide by.
    if unknown or shape[dim] % split == 0:
        return
    label = repr(entry[0]) if len(entry) == 1 else repr(entry)
    yield Finding(
        "error",
        "indivisible",
        f"Array shape {shape_text(shape)} not divisible by mesh axis {' x '.join(entry)} size {split}: dimension {dim} "
        f"is {shape[dim]}, remainder {shape[dim] % split}",
        path,
        f"Make it a multiple of {split}, split another dimension, or wrap the rule in FittedShardingRule",
        shape,
        dim,
        entry[0] if len(entry) == 1 else None,
        count,
    )
    # JAX weakens all dimensions of a spec at once, so the finding shows the whole spec that it would use.
    pairs = tuple(zip(entries(spec), shape, strict=False))
    weaker = make_spec(
        tuple(part if part is UNCONSTRAINED else divisible_prefix(part, size, sizes) for part, size in pairs)
    )
    alternative = ""
    if any(part is not UNCONSTRAINED and _divides_in_part(part, size, sizes) for part, size in pairs):
        alternative = ", or from JAX 0.11 on a split by part of an axis"
    yield Finding(
        "warning",
        "weakened",
        f"a constraint inside jit would silently become {spec_repr(weaker)}{alternative}: {label} does not divide "
        f"dimension {dim}",
        path,
        f"Write {spec_repr(weaker)} if that is what you want",
        shape,
        dim,
        entry[0] if len(entry) == 1 else None,
        count,
    )


def _divides_in_part(entry: Entry, dim_size: int, sizes: Mapping[str, int]) -> bool:
    """Returns whether a factor of the first axis of `entry` that does not divide the rest of `dim_size` does."""
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
            if any(part is not None for part in spec.partitions):
                used.update(
                    dict.fromkeys(name for entry in entries(spec) if entry is not UNCONSTRAINED for name in entry)
                )
                yield from check_spec(leaf.path, leaf.shape, spec, sizes, count=count)
                if explicit and any(part is UNCONSTRAINED for part in spec.partitions):
                    yield _unconstrained(leaf, spec, count)
            # A replicated leaf, the usual case in a large tree, can be wrong in nothing but its rank.
            elif len(spec.partitions) > leaf.ndim:
                yield from check_spec(leaf.path, leaf.shape, spec, sizes, count=count)
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
    return Finding(
        "error",
        "unconstrained",
        f"{spec_repr(spec)} leaves a dimension to the compiler, but all axes of the mesh are Explicit, which the "
        "compiler does not choose",
        leaf.path,
        "Write None or an axis for UNCONSTRAINED, or use a mesh with Auto axes: sr.create_mesh(..., axis_types='auto')",
        leaf.shape,
        count=count,
    )


def _check_undecided(leaf: Leaf, decision: Decision, count: int) -> Iterator[Finding]:
    # Scalars cannot be split, so it does not matter that no rule decides them.
    if leaf.size <= 1:
        return
    why = f": {decision.reason}" if decision.reason else ""
    yield Finding(
        "note",
        "unmatched",
        f"no rule has an opinion, so it is replicated{why}",
        leaf.path,
        "Add a rule for it, or ReplicateShardingRule() if this is on purpose",
        leaf.shape,
        count=count,
    )
    if leaf.nbytes >= LARGE_BYTES:
        yield Finding(
            "warning",
            "large-replicated",
            f"{bytes_text(leaf.nbytes)} on every device, and no rule asks for it",
            leaf.path,
            "Split it (FSDPShardingRule splits what is large), or add ReplicateShardingRule() if this is on purpose",
            leaf.shape,
            count=count,
        )


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
