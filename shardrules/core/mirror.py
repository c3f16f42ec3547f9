"""Which planned leaf the leaf of an optimizer state mirrors, and the spec that it takes from it.

An optimizer keeps, for each parameter, leaves of the same shape (moments, averages, accumulated gradients) under a
path that ends in the parameter's own: `0/mu/layers/0/w` mirrors `layers/0/w`. Factored optimizers keep a leaf for the
rows and one for the columns: the parameter's shape with one dimension left out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from jax.sharding import PartitionSpec

from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.spec import entries, make_spec, same

PlannedLeaf: TypeAlias = tuple[tuple[int, ...], PartitionSpec]
"""The shape of a planned leaf, and its spec."""


def count_homes(paths: Iterable[str], planned: Mapping[str, PlannedLeaf]) -> Counter[str]:
    """Counts the planned leaves below each path of a state below which a copy of the planned tree may be.

    With leaves `w` and `mu/w` planned, `0/mu/w` may mirror either: `0/mu` is the home of both, `0` of only one.

    ```python
    from shardrules.core.mirror import count_homes

    planned = {path: ((8,), P()) for path in ("w", "mu/w")}
    assert count_homes(["0/mu/w", "0/mu/mu/w"], planned) == {"0/mu": 2, "0": 1, "0/mu/mu": 1}
    ```
    """
    return Counter(home for path in paths for home, ending in _cuts(path) if ending in planned)


def mirror_leaf(
    leaf: Leaf, path: str, planned: Mapping[str, PlannedLeaf], homes: Mapping[str, int] | None = None
) -> Decision:
    """Returns what `leaf`, with this `path`, takes from the planned leaf that it mirrors.

    This is the first planned leaf whose path ends the leaf's own and whose shape is equal, or has one dimension more:
    then the leaf takes the entries of the dimensions that it kept. Several matches are tried in the order of `homes`,
    the counts of `count_homes`, and then the longest path first. A leaf without a match stays as earlier rules
    decided, or is `P()`, with the reason.

    ```python
    from shardrules.core.mirror import mirror_leaf

    decision = mirror_leaf(sr.Leaf("0/mu/w", (8, 4), jnp.float32), "0/mu/w", {"w": ((8, 4), P("data"))})
    assert decision.spec == P("data")
    ```
    """
    if leaf.ndim == 0:
        return Decision(PartitionSpec(), "a scalar of the state")
    other = ""
    cuts = [(home, ending) for home, ending in _cuts(path) if ending in planned]
    if homes is not None and len(cuts) > 1:
        cuts.sort(key=lambda cut: -homes.get(cut[0], 0))
    for home, ending in cuts:
        shape, spec = planned[ending]
        if shape == leaf.shape:
            return Decision(spec, "mirrors a planned leaf of equal shape")
        kept = _kept_dims(leaf.shape, home.rpartition("/")[2], shape, spec)
        if kept is not None:
            planned_entries = entries(spec, len(shape))
            dims = ", ".join(map(str, kept))
            kept_spec = make_spec(tuple(planned_entries[dim] for dim in kept))
            return Decision(kept_spec, f"factored: keeps dims {dims} of a planned leaf")
        other = other or f"the planned leaf of that name has shape {shape}"
    why = other or "mirrors no planned leaf"
    if leaf.spec is not None:
        return leaf.skip(why)
    note = Finding(
        "note",
        "unmirrored",
        f"{why}, so it is replicated",
        leaf.path,
        "If it is large, put another rule before the mirror",
        leaf.shape,
    )
    return Decision(PartitionSpec(), why, findings=(note,) if leaf.size > 1 else ())


def _cuts(path: str) -> Iterator[tuple[str, str]]:
    """Every way to cut a path in two, the longest ending first."""
    yield "", path
    for index, char in enumerate(path):
        if char == "/":
            yield path[:index], path[index + 1 :]
    if path:
        yield path, ""


def _kept_dims(
    kept_shape: tuple[int, ...], field: str, shape: tuple[int, ...], spec: PartitionSpec
) -> tuple[int, ...] | None:
    """The dimensions of `shape` that a leaf with one dimension fewer kept; `None` when that is ambiguous."""
    dims = range(len(shape))
    candidates = {
        out: kept
        for out in dims
        for kept in [tuple(dim for dim in dims if dim != out)]
        if tuple(shape[dim] for dim in kept) == kept_shape
    }
    if not candidates:
        return None
    planned_entries = entries(spec, len(shape))
    first, *others = (make_spec(tuple(planned_entries[dim] for dim in kept)) for kept in candidates.values())
    if all(same(other, first) for other in others):
        return next(iter(candidates.values()))
    # Equal dimensions: shapes cannot tell rows from columns, but the name of the field can. Adafactor factors the two
    # largest dimensions, the last ones among equals: rows lack the largest, columns the second.
    *_, second, largest = sorted(dims, key=lambda dim: shape[dim])
    return candidates.get(largest) if "row" in field else candidates.get(second) if "col" in field else None
