"""Readers of specs and shardings for code around a model: which axes, which spec, which sharding."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.context import current_mesh
from shardrules.core.errors import NoMeshError, NoSpecError, SpecError
from shardrules.core.spec import axis_names
from shardrules.core.tree import named_leaves


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """Returns the mesh axes in a spec or a tree of specs, each once, in the order in which they appear.

    Dictionaries in `partition_specs` are read in the order in which they were written, `None` is skipped, and a string
    is an axis. A leaf that is not a spec is a `SpecError`.

    ```python
    assert sr.specs.get_names_from_partition_spec(P(("dp", "fsdp"), None, "tp")) == ["dp", "fsdp", "tp"]
    assert sr.specs.get_names_from_partition_spec({"w": P("tp"), "b": P(None, ("dp", "tp"))}) == ["tp", "dp"]
    ```
    """
    return list(dict.fromkeys(_axes_in(partition_specs)))


def _axes_in(tree: Any) -> Iterator[str]:
    if isinstance(tree, PartitionSpec):
        yield from axis_names(tree)
    elif isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for child in tree.values():
            yield from _axes_in(child)
    elif isinstance(tree, list | tuple):
        for child in tree:
            yield from _axes_in(child)
    elif tree is not None:
        leaves = jax.tree.leaves(tree)
        # A leaf flattens to itself: asking about its leaves again would never end.
        if len(leaves) == 1 and leaves[0] is tree:
            raise SpecError(
                f"get_names_from_partition_spec reads PartitionSpecs, got {type(tree).__name__} {tree!r:.80}"
            )
        for leaf in leaves:
            yield from _axes_in(leaf)


def get_partition_spec(tree: Any) -> Any:
    """Returns a tree with the PartitionSpec of each array of `tree`, and `P()` for each number.

    Leaves of other types are a `SpecError`, arrays whose sharding has no spec a `NoSpecError`; each lists all of them.

    ```python
    mesh = jax.make_mesh((8,), ("dp",))
    rows = jax.device_put(jnp.zeros(16), jax.sharding.NamedSharding(mesh, P("dp")))
    assert sr.specs.get_partition_spec({"rows": rows, "step": 3}) == {"rows": P("dp"), "step": P()}
    ```
    """
    specs: list[PartitionSpec] = []
    unsupported: list[str] = []
    without_spec: list[str] = []
    for path, leaf in named_leaves(tree):
        if isinstance(leaf, jax.Array):
            sharding = _sharding(leaf)
            if isinstance(sharding, NamedSharding):
                specs.append(sharding.spec)
            else:
                status = "traced, not placed yet" if sharding is None else type(sharding).__name__
                without_spec.append(f"{_quoted(path)} ({leaf.dtype}{list(leaf.shape)}): {status}")
        elif isinstance(leaf, int | float):
            specs.append(PartitionSpec())
        else:
            unsupported.append(f"{type(leaf)} at {_quoted(path)}")
    if unsupported:
        raise SpecError(
            f"Unsupported leaf type for get_partition_spec: {'; '.join(unsupported)}. It reads JAX arrays and Python "
            "numbers; place other arrays on a mesh first, and keep static leaves out: eqx.filter(tree, eqx.is_array)"
        )
    if without_spec:
        raise NoSpecError(
            f"get_partition_spec: arrays whose sharding has no PartitionSpec: {'; '.join(without_spec)}. Place them "
            "on a mesh first; extract_sharding_structure gives None for such leaves"
        )
    return jtu.tree_structure(tree).unflatten(specs)


def extract_shardings(tree: Any, mesh: AnyMesh | None = None) -> Any:
    """Returns the NamedSharding of each leaf of `tree`, or its PartitionSpec on `mesh`; `None` without either.

    Without `mesh` it is the mesh in force; with neither, a leaf with a bare PartitionSpec is a `NoMeshError`.

    ```python
    mesh = jax.make_mesh((8,), ("dp",))
    rows = jax.device_put(jnp.zeros(16), jax.sharding.NamedSharding(mesh, P("dp")))
    assert sr.specs.extract_shardings({"rows": rows, "step": 3}) == {"rows": rows.sharding, "step": None}
    ```
    """
    check_mesh(mesh)
    shardings = [_named_sharding(path, _sharding(leaf), mesh) for path, leaf in named_leaves(tree)]
    return jtu.tree_structure(tree).unflatten(shardings)


def extract_sharding_structure(pytree: Any) -> Any:
    """Returns the NamedSharding of each leaf of `pytree`; `None` without one, on a single device for instance.

    ```python
    assert sr.specs.extract_sharding_structure({"w": jnp.zeros(4), "step": 3}) == {"w": None, "step": None}
    ```
    """
    return jax.tree.map(lambda leaf: _named(_sharding(leaf)), pytree)


get_shardings_with_structure = extract_sharding_structure
"""The name of `extract_sharding_structure` in `eformer`."""


def _sharding(leaf: Any) -> Any:
    if isinstance(leaf, Tracer):
        # A traced array has its sharding in its type, and only Explicit axes there are final: the compiler has not
        # chosen yet for the others, which look replicated.
        typed = jax.typeof(leaf).sharding
        return typed if typed.mesh.are_all_axes_explicit else None
    return getattr(leaf, "sharding", None)  # of arrays, shapes, and what other libraries use in their place


def _named(sharding: Any) -> NamedSharding | None:
    return sharding if isinstance(sharding, NamedSharding) else None


def _named_sharding(path: str, sharding: Any, mesh: AnyMesh | None) -> NamedSharding | None:
    if not isinstance(sharding, PartitionSpec):
        return _named(sharding)
    target_mesh = current_mesh() if mesh is None else mesh
    if target_mesh is None:
        raise NoMeshError(
            f"extract_shardings: the sharding of {_quoted(path)} is {sharding}, which needs a mesh. Pass mesh=, or "
            "call inside jax.set_mesh(mesh)"
        )
    return NamedSharding(target_mesh, sharding)


def _quoted(path: str) -> str:
    return repr(path) if path else "the root of the tree"
