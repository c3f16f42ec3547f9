"""Which planned leaf an optimizer's leaf mirrors, and what it takes from it.

An optimizer keeps, for each parameter, leaves of the same shape (moments, averages, accumulated gradients) under a
path that ends in the parameter's own: `0/mu/layers/0/w` mirrors `layers/0/w`. Factored optimizers keep a leaf for the
rows and one for the columns: the parameter's shape with one dimension left out.
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from jax.sharding import PartitionSpec

from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.spec import entries, make_spec, same

Planned: TypeAlias = tuple[tuple[int, ...], PartitionSpec]
"""The shape of a planned leaf, and its spec."""


def mirror(leaf: Leaf, planned: Mapping[str, Planned]) -> Decision:
    """Returns what `leaf` takes from the planned leaf that it mirrors.

    **Arguments:**

    - `leaf`: a leaf of an optimizer state, of gradients, of an average.
    - `planned`: shape and spec of each planned leaf, by path.

    **Returns:**

    The spec of the planned leaf with the longest path that ends the leaf's own and whose shape is the same; for a
    factored leaf the entries of the dimensions that it kept; else `P()`, with the reason.

    ```python
    found = mirror(sr.Leaf("0/mu/w", (8, 4), jnp.float32), {"w": ((8, 4), P("data"))})
    assert found.spec == P("data")
    ```
    """
    if leaf.ndim == 0:
        return leaf.replicate("a scalar of the state")
    other = ""
    for path in _endings(leaf.path):
        if path not in planned:
            continue
        shape, spec = planned[path]
        if shape == leaf.shape:
            return Decision(spec, "mirrors a planned leaf of equal shape")
        kept = _kept_dims(leaf, shape, spec)
        if kept is not None:
            found = entries(spec, len(shape))
            dims = ", ".join(map(str, kept))
            return Decision(
                make_spec(tuple(found[dim] for dim in kept)), f"factored: keeps dims {dims} of a planned leaf"
            )
        other = other or f"its namesake among the planned leaves has shape {shape}"
    why = other or "mirrors no planned leaf"
    note = Finding(
        "note",
        "unmirrored",
        f"{why}, so it is replicated",
        leaf.path,
        "If it is large, put a rule of your own before the mirror",
        leaf.shape,
    )
    return Decision(PartitionSpec(), why, findings=(note,) if leaf.size > 1 else ())


def _endings(path: str) -> Iterator[str]:
    yield path
    while "/" in path:
        path = path.partition("/")[2]
        yield path
    yield ""


def _kept_dims(leaf: Leaf, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...] | None:
    """The dimensions of `shape` that a leaf with one dimension fewer kept; `None` when that cannot be told."""
    if leaf.ndim != len(shape) - 1:
        return None
    dims = tuple(range(len(shape)))
    candidates = [
        (*dims[:out], *dims[out + 1 :])
        for out in dims
        if tuple(shape[dim] for dim in (*dims[:out], *dims[out + 1 :])) == leaf.shape
    ]
    if not candidates:
        return None
    found = entries(spec, len(shape))
    specs = [make_spec(tuple(found[dim] for dim in kept)) for kept in candidates]
    if all(same(one, specs[0]) for one in specs):
        return candidates[0]
    # Equal dimensions: shapes cannot tell rows from columns, names can. A row factor lacks the last of the equal
    # dimensions, a column factor the one before it (the two largest are factored, and ties are taken in order).
    if "row" in leaf.path:
        return candidates[-1]
    return candidates[-2] if "col" in leaf.path else None
