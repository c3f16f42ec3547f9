"""Questions about specs and shardings that code around a model asks: which axes, which spec, which sharding."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.context import current_mesh
from shardrules.core.errors import NoMeshError, NoSpecError, SpecError
from shardrules.core.spec import axis_names


@runtime_checkable
class _Placed(Protocol):
    """What says where it lies: arrays, `ShapeDtypeStruct`, and other people's stand-ins for them."""

    @property
    def sharding(self) -> Any: ...


def get_names_from_partition_spec(tree: Any) -> list[str]:
    """Returns the mesh axes that a spec, or a tree of specs, names: each once, in the order in which they appear.

    ```python
    assert sr.specs.get_names_from_partition_spec(P(("dp", "fsdp"), None, "tp")) == ["dp", "fsdp", "tp"]
    assert sr.specs.get_names_from_partition_spec({"w": P("tp"), "b": P(None, ("dp", "tp"))}) == ["tp", "dp"]
    ```
    """
    return list(dict.fromkeys(_names(tree)))


def _names(tree: Any) -> Iterator[str]:
    if isinstance(tree, PartitionSpec):
        yield from axis_names(tree)
    elif isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for child in tree.values():
            yield from _names(child)
    elif isinstance(tree, list | tuple):
        for child in tree:
            yield from _names(child)
    elif tree is not None:
        leaves = jax.tree.leaves(tree)
        if len(leaves) == 1 and leaves[0] is tree:
            raise SpecError(f"axis names are read from PartitionSpecs, got {type(tree).__name__} {tree!r:.80}")
        for leaf in leaves:
            yield from _names(leaf)


def get_partition_spec(tree: Any) -> Any:
    """Returns the PartitionSpec by which each array of a tree is placed.

    ```python
    mesh = jax.make_mesh((8,), ("dp",))
    rows = jax.device_put(jnp.zeros(16), jax.sharding.NamedSharding(mesh, P("dp")))
    assert sr.specs.get_partition_spec({"rows": rows, "step": 3}) == {"rows": P("dp"), "step": P()}
    ```
    """
    named, treedef = jtu.tree_flatten_with_path(tree)
    specs: list[PartitionSpec] = []
    unsupported: list[str] = []
    unplaced: list[str] = []
    for path, leaf in named:
        if isinstance(leaf, jax.Array):
            sharding = _sharding(leaf)
            if isinstance(sharding, NamedSharding):
                specs.append(sharding.spec)
            else:
                kind = "traced, not placed yet" if sharding is None else type(sharding).__name__
                unplaced.append(f"{_where(path)} ({leaf.dtype}{list(leaf.shape)}): {kind}")
        elif isinstance(leaf, int | float):
            specs.append(PartitionSpec())
        else:
            unsupported.append(f"{type(leaf)} at {_where(path)}")
    if unsupported:
        raise SpecError(
            f"Unsupported leaf type for get_partition_spec: {'; '.join(unsupported)}. It reads JAX arrays and Python "
            "numbers; place other arrays on a mesh first, and keep static leaves out: eqx.filter(tree, eqx.is_array)"
        )
    if unplaced:
        raise NoSpecError(
            f"get_partition_spec: arrays whose sharding has no PartitionSpec: {'; '.join(unplaced)}. Place them on a "
            "mesh first; extract_sharding_structure gives None for such leaves"
        )
    return treedef.unflatten(specs)


def extract_shardings(tree: Any, mesh: AnyMesh | None = None) -> Any:
    """Returns the NamedSharding of each leaf that has one, or that has a PartitionSpec for one.

    ```python
    mesh = jax.make_mesh((8,), ("dp",))
    rows = jax.device_put(jnp.zeros(16), jax.sharding.NamedSharding(mesh, P("dp")))
    assert sr.specs.extract_shardings({"rows": rows, "step": 3}) == {"rows": rows.sharding, "step": None}
    ```
    """
    check_mesh(mesh)
    return jtu.tree_map_with_path(lambda path, leaf: _on_mesh(path, _sharding(leaf), mesh), tree)


def extract_sharding_structure(tree: Any) -> Any:
    """Returns the NamedSharding of each leaf, and `None` for leaves without one.

    ```python
    assert sr.specs.extract_sharding_structure({"w": jnp.zeros(4), "step": 3}) == {"w": None, "step": None}
    ```
    """

    def named(leaf: Any) -> NamedSharding | None:
        sharding = _sharding(leaf)
        return sharding if isinstance(sharding, NamedSharding) else None

    return jax.tree.map(named, tree)


get_shardings_with_structure = extract_sharding_structure
"""Another name of `extract_sharding_structure`."""


def _sharding(leaf: Any) -> Any:
    """Where `leaf` lies, as far as it says so."""
    if isinstance(leaf, Tracer):
        # A traced array has its sharding in its type, and there only Explicit axes are to be trusted: the compiler has
        # yet to choose for the others, which read as replicated.
        typed = jax.typeof(leaf).sharding
        return typed if typed.mesh.are_all_axes_explicit else None
    return leaf.sharding if isinstance(leaf, _Placed) else None


def _on_mesh(path: tuple[Any, ...], sharding: Any, mesh: AnyMesh | None) -> NamedSharding | None:
    if not isinstance(sharding, PartitionSpec):
        return sharding if isinstance(sharding, NamedSharding) else None
    found = current_mesh() if mesh is None else mesh
    if found is None:
        raise NoMeshError(
            f"extract_shardings: the sharding of {_where(path)} is {sharding}, which needs a mesh, and there is none. "
            "Pass mesh=, or call inside jax.set_mesh(mesh)"
        )
    return NamedSharding(found, sharding)


def _where(path: tuple[Any, ...]) -> str:
    return repr(jtu.keystr(path, simple=True, separator="/")) if path else "the root of the tree"
