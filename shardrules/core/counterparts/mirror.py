"""The planned leaf that a leaf of an optimizer state mirrors, and the spec that it takes from it.

An optimizer keeps, for each parameter, leaves of the same shape (moments, averages, accumulated gradients) under a
path that ends in the parameter's own: `0/mu/layers/0/w` mirrors `layers/0/w`. Some keep leaves of other shapes:

- Factored optimizers keep the rows and the columns: the parameter's shape with one dimension left out.
- Histories and ensembles are stacks: the parameter's shape with dimensions before it.
- Projections and preconditioners have some of the parameter's sizes.

Where an optimizer keeps a container for each parameter, the parameter's path is inside: `stats/layers/0/w/1`.

A plan of all variables of a linen model has `params/Dense_0/kernel`, and an optimizer of the parameters alone has
`0/mu/Dense_0/kernel`: a state that has all paths below a first name mirrors what is planned there.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.check import LARGE_BYTES
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.spec import entries, make_spec, same
from shardrules.core.text import bytes_text

PlannedLeaf: TypeAlias = tuple[tuple[int, ...], PartitionSpec]
"""The shape of a planned leaf, and its spec."""


def _count_homes(paths: Iterable[str], planned: Mapping[str, PlannedLeaf]) -> Counter[str]:
    """The number of planned leaves below each path of a state below which a copy of the planned tree may be.

    With leaves `w` and `mu/w` planned, `0/mu/w` may mirror either: `0/mu` is the home of both, `0` of only one.
    """
    return Counter(home for path in paths for home, ending in _cuts(path) if ending in planned)


def mirror_leaves(
    leaves: Sequence[Leaf], paths: Sequence[str], planned: Mapping[str, PlannedLeaf]
) -> tuple[Decision, ...]:
    """Returns what each of `leaves` takes from the planned leaf that it mirrors.

    That is the first planned leaf whose path ends the leaf's own and whose shape is equal, or has one dimension more:
    then the leaf takes the entries of the dimensions that it kept. Without any, it is the first that the leaf stacks,
    or whose sizes it has. A leaf without a match stays as earlier rules decided, or is `P()`, with the reason. Leaves
    that fit no path may mirror what is planned below a first name, without that name.
    """
    homes = _count_homes(paths, planned)
    shorter = {path for path in paths if not _fits(path, planned)}
    trees = _whole_trees(shorter, planned)
    tree_homes = {name: _count_homes(shorter, tree) for name, tree in trees.items()}
    decisions: list[Decision] = []
    for leaf, path in zip(leaves, paths, strict=True):
        names = [name for name, tree in trees.items() if _fits(path, tree)] if leaf.ndim and path in shorter else []
        # Several trees may fit, such as a generator and its discriminator, each with other specs: none is guessed.
        if len(names) == 1:
            decision = _mirror_leaf(leaf, path, trees[names[0]], tree_homes[names[0]])
            decisions.append(attrs.evolve(decision, reason=f"{decision.reason}, below {names[0]!r}"))
        elif names:
            decisions.append(_unmirrored(leaf, f"has its path below {' and '.join(map(repr, names))} of the plan"))
        else:
            decisions.append(_mirror_leaf(leaf, path, planned, homes))
    return tuple(decisions)


def _fits(path: str, planned: Mapping[str, PlannedLeaf]) -> bool:
    return any(ending in planned for _, ending in _cuts(path)) or any(True for _ in _inner_cuts(path, planned))


def _whole_trees(paths: Iterable[str], planned: Mapping[str, PlannedLeaf]) -> dict[str, dict[str, PlannedLeaf]]:
    """The leaves planned below each first name, where `paths` have all of it; fewer leaves may be alike by chance."""
    trees: dict[str, dict[str, PlannedLeaf]] = {}
    for path, leaf in planned.items():
        name, _, rest = path.partition("/")
        trees.setdefault(name, {})[rest] = leaf
    endings = {ending for path in paths for _, ending in _cuts(path)}
    return {name: tree for name, tree in trees.items() if all(_is_name(rest) and rest in endings for rest in tree)}


def _mirror_leaf(leaf: Leaf, path: str, planned: Mapping[str, PlannedLeaf], homes: Counter[str]) -> Decision:
    if leaf.ndim == 0:
        return Decision(PartitionSpec(), "a scalar of the state")
    cuts = [(home, ending) for home, ending in _cuts(path) if ending in planned]
    cuts.sort(key=lambda cut: -homes[cut[0]])  # among equals the longest path stays first
    match = _first_match(leaf.shape, cuts, planned) or _first_match(leaf.shape, _inner_cuts(path, planned), planned)
    if match is not None:
        spec, why, is_copy = match
        # A copy is whole because the plan says so. What is only alike may be much larger than what was planned.
        return Decision(spec, why, findings=() if is_copy else _large_findings(leaf, spec, why))
    why = f"the planned leaf of that name has shape {planned[cuts[0][1]][0]}" if cuts else "mirrors no planned leaf"
    return _unmirrored(leaf, why)


def _unmirrored(leaf: Leaf, why: str) -> Decision:
    """The decision of earlier rules, or else `P()` with a note."""
    if leaf.spec is not None:
        return leaf.skip(why)
    remedy = "If it is large, put another rule before the mirror"
    note = Finding("note", "unmirrored", f"{why}, so it is replicated", leaf.path, remedy, leaf.shape)
    whole = PartitionSpec()
    return Decision(whole, why, findings=(note, *_large_findings(leaf, whole, why)) if leaf.size > 1 else ())


def _large_findings(leaf: Leaf, spec: PartitionSpec, why: str) -> tuple[Finding, ...]:
    """A warning if a large leaf is whole on every device."""
    if leaf.nbytes < LARGE_BYTES or any(part is not None for part in spec.partitions):
        return ()
    message = f"{bytes_text(leaf.nbytes)} on every device, and no rule asks for it: {why}"
    remedy = (
        "Put a rule that splits it before the mirror: CompositeShardingRule(rule, MirrorShardingRule(plan)), with "
        "ReplicateShardingRule() as the rule if this is on purpose"
    )
    return (Finding("warning", "large-replicated", message, leaf.path, remedy, leaf.shape),)


def _cuts(path: str) -> Iterator[tuple[str, str]]:
    """Every way to cut a path in two, the longest ending first."""
    yield "", path
    for index, char in enumerate(path):
        if char == "/":
            yield path[:index], path[index + 1 :]
    if path:
        yield path, ""


def _inner_cuts(path: str, planned: Mapping[str, PlannedLeaf]) -> Iterator[tuple[str, str]]:
    """The path around a planned one, and that path, where an optimizer keeps a container for each parameter.

    `stats/layers/0/w/statistics/1` has `layers/0/w` inside. The longest path comes first; indices alone name nothing.
    """
    parts = path.split("/")
    for end in range(len(parts) - 1, 0, -1):
        for start in range(end):
            inner = "/".join(parts[start:end])
            if inner in planned and _is_name(inner):
                yield "/".join((*parts[:start], *parts[end:])), inner


def _is_name(path: str) -> bool:
    return not path.replace("/", "").isdecimal() and path != ""


def _first_match(
    leaf_shape: tuple[int, ...], cuts: Iterable[tuple[str, str]], planned: Mapping[str, PlannedLeaf]
) -> tuple[PartitionSpec, str, bool] | None:
    """The spec of the planned leaf that is most alike, why, and whether the leaf is a copy of it."""
    cuts = list(cuts)
    for home, ending in cuts:
        shape, spec = planned[ending]
        if shape == leaf_shape:
            return spec, "mirrors a planned leaf of equal shape", True
        kept = _kept_dims(leaf_shape, home.rpartition("/")[2], shape, spec)
        if kept is not None:
            return *_factored(shape, spec, kept), False
    # A batch may have the path of a parameter where both are lists, or single arrays: such a path alone proves nothing.
    for home, ending in cuts:
        match = _stacked(leaf_shape, home.rpartition("/")[2], *planned[ending]) if home or _is_name(ending) else None
        if match is not None:
            return *match, False
    for home, ending in cuts:
        match = _resized(leaf_shape, home.rpartition("/")[2], *planned[ending]) if _is_name(ending) else None
        if match is not None:
            return *match, False
    return None


def _factored(shape: tuple[int, ...], spec: PartitionSpec, kept: Iterable[int]) -> tuple[PartitionSpec, str]:
    return _kept_spec(shape, spec, kept), f"factored: keeps dims {_dims_text(kept)} of a planned leaf"


def _kept_spec(shape: tuple[int, ...], spec: PartitionSpec, kept: Iterable[int]) -> PartitionSpec:
    planned_entries = entries(spec, len(shape))
    return make_spec(tuple(planned_entries[dim] for dim in kept))


def _stacked(
    leaf_shape: tuple[int, ...], field: str, shape: tuple[int, ...], spec: PartitionSpec
) -> tuple[PartitionSpec, str] | None:
    """The entries of copies of a planned leaf, its rows or its columns: dims before its own, seldom behind them."""
    depth = len(leaf_shape) - len(shape)
    if shape and depth > 0:
        copies, copy_entries = ((),) * depth, entries(spec, len(shape))
        if leaf_shape[depth:] == shape:
            return make_spec(copies + copy_entries), f"stacks a planned leaf along dims {_dims_text(range(depth))}"
        if leaf_shape[: len(shape)] == shape:
            dims = range(len(shape), len(leaf_shape))
            return make_spec(copy_entries + copies), f"stacks a planned leaf along dims {_dims_text(dims)}"
    # What has an index below its parameter is not one of several rows or columns, but a factor of its own.
    if field.isdecimal():
        return None
    depth += 1
    kept = _kept_dims(leaf_shape[depth:], field, shape, spec) if depth > 0 and len(shape) > 1 else None
    if kept is None:
        return None
    factor_spec, why = _factored(shape, spec, kept)
    stack_spec = make_spec(((),) * depth + entries(factor_spec, len(kept)))
    return stack_spec, f"stacked along dims {_dims_text(range(depth))}, {why}"


def _resized(
    leaf_shape: tuple[int, ...], field: str, shape: tuple[int, ...], spec: PartitionSpec
) -> tuple[PartitionSpec, str] | None:
    """The spec of a projection or a preconditioner of a planned leaf: the entries of the dims whose sizes it has.

    Such a dim is in the same position, the one that the field counts, or the only one of its size. An axis splits the
    first dim that can take it.
    """
    planned_entries = entries(spec, len(shape))
    sources: dict[int, int] = {}
    for dim, size in enumerate(leaf_shape):
        # Sizes of 1 are everywhere, so they say nothing about the dim that they come from.
        planned_dims = [planned_dim for planned_dim, planned_size in enumerate(shape) if planned_size == size > 1]
        same_dim = [dim] if len(shape) == len(leaf_shape) and dim in planned_dims else []
        counted = [int(field)] if field.isdecimal() and int(field) in planned_dims else []
        choices = same_dim or counted or planned_dims
        # A dim of the planned leaf serves once: its axis can split only one dim.
        if len(choices) == 1 and choices[0] not in sources.values():
            sources[dim] = choices[0]
    resized = make_spec(
        tuple(planned_entries[sources[dim]] if dim in sources else () for dim in range(len(leaf_shape)))
    )
    # What has none of the split dims follows nothing.
    if not any(part is not None for part in resized.partitions):
        return None
    return resized, f"has the sizes of dims {_dims_text(sources.values())} of a planned leaf"


def _dims_text(dims: Iterable[int]) -> str:
    return ", ".join(map(str, dims))


def _kept_dims(
    kept_shape: tuple[int, ...], field: str, shape: tuple[int, ...], spec: PartitionSpec
) -> tuple[int, ...] | None:
    """The dimensions of `shape` that a leaf with one dimension fewer kept; `None` when that is ambiguous."""
    dims = range(len(shape))
    candidates = {
        out: (*dims[:out], *dims[out + 1 :]) for out in dims if (*shape[:out], *shape[out + 1 :]) == kept_shape
    }
    if not candidates:
        return None
    first, *others = (_kept_spec(shape, spec, kept) for kept in candidates.values())
    if all(same(other, first) for other in others):
        return next(iter(candidates.values()))
    # Equal dimensions: shapes cannot tell rows from columns, but the name of the field can. Adafactor factors the two
    # largest dimensions, the last ones among equals: rows lack the largest, columns the second.
    *_, second, largest = sorted(dims, key=lambda dim: shape[dim])
    return candidates.get(largest) if "row" in field else candidates.get(second) if "col" in field else None
