"""Arrays beside the specs they are to have: what every analysis starts from."""

import itertools
import math
from collections.abc import Callable
from typing import Any, final

import attrs
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.core.context import current_mesh
from shardrules.core.errors import NoMeshError, TreeError
from shardrules.core.leaf import Leaf
from shardrules.core.spec import array_bytes, axis_names, shard_bytes, shard_shape, ways
from shardrules.core.tree import flatten_specs, survey


@final
@attrs.frozen
class Placed:
    """One array and the spec it is to have.

    **Arguments:**

    - `leaf`: the array; `leaf.mesh` is the mesh.
    - `spec`: its PartitionSpec.
    """

    leaf: Leaf
    spec: PartitionSpec

    @property
    def device_bytes(self) -> int:
        """Its bytes on one device, those of the largest shard. Axes that the mesh lacks split nothing."""
        return shard_bytes(self.leaf.shape, self.leaf.dtype, self.spec, mesh_sizes(self.leaf.mesh))

    @property
    def shards_bytes(self) -> int:
        """Its bytes in all shards together, one copy of each: sub-byte shards are rounded up one by one."""
        largest = shard_shape(self.leaf.shape, self.spec, mesh_sizes(self.leaf.mesh))
        if 0 in largest:
            return 0
        # Along a dimension so many shards are full, and where it does not divide one holds the rest.
        cuts = [
            [(full, dim // full), (dim % full, 1)] if dim % full else [(full, dim // full)]
            for dim, full in zip(self.leaf.shape, largest, strict=True)
        ]
        return sum(
            array_bytes(tuple(size for size, _ in shard), self.leaf.dtype) * math.prod(count for _, count in shard)
            for shard in itertools.product(*cuts)
        )

    @property
    def is_split(self) -> bool:
        """Whether the spec names an axis."""
        return bool(axis_names(self.spec))

    @property
    def ways(self) -> int:
        """Into how many parts the spec splits it on this mesh."""
        return ways(self.spec, mesh_sizes(self.leaf.mesh))


def pair(tree: Any, specs: Any, mesh: AnyMesh | None) -> tuple[tuple[Leaf, Any], ...]:
    """Returns every array of a tree with what stands at its place in a tree of specs, whatever that is.

    **Arguments:**

    - `tree`: any pytree.
    - `specs`: a tree of the same structure.
    - `mesh`: the mesh, or `None`.

    **Returns:**

    One pair for each array, in the order of the tree.

    **Raises:**

    `TreeError` when the structures differ.
    """
    found = survey(tree, mesh)
    flat = flatten_specs(specs, found.treedef, "specs")
    return tuple((found.kinds[kind], spec) for kind, spec in zip(found.kind_of, flat, strict=True) if kind >= 0)


def as_spec(found: object) -> PartitionSpec:
    """Returns the PartitionSpec that a leaf of a tree of specs stands for.

    **Arguments:**

    - `found`: a PartitionSpec, a `NamedSharding`, or `None` (replicated).

    **Returns:**

    A PartitionSpec.

    **Raises:**

    `TreeError` for anything else.
    """
    if found is None:
        return PartitionSpec()
    if isinstance(found, NamedSharding):
        return found.spec
    if isinstance(found, PartitionSpec):
        return found
    raise TreeError(f"a PartitionSpec, a NamedSharding or None is wanted, got {type(found).__name__} {found!r:.60}")


def place(tree: Any, specs: Any, mesh: AnyMesh | None) -> tuple[Placed, ...]:
    """Returns every array of a tree with its spec.

    **Arguments:**

    - `tree`: any pytree.
    - `specs`: a tree of the same structure with a PartitionSpec, a `NamedSharding`, or `None` (replicated) at every
        array.
    - `mesh`: the mesh, or `None`.

    **Returns:**

    One item for each array, in the order of the tree.

    **Raises:**

    `TreeError` when the structures differ, or something else than a spec stands at an array: it lists every such array.
    """
    placed: list[Placed] = []
    wrong: list[str] = []
    for leaf, spec in pair(tree, specs, mesh):
        try:
            placed.append(Placed(leaf, as_spec(spec)))
        except TreeError as error:
            wrong.append(f"  {leaf.path or 'the tree'}: {error}")
    if wrong:
        raise TreeError("specs must hold a spec for each array:\n" + "\n".join(wrong))
    return tuple(placed)


def mesh_for(mesh: AnyMesh | None, tree: Callable[[], Any], needs: str) -> AnyMesh:
    """Returns the mesh to analyse for, looked for where rules look for theirs.

    **Arguments:**

    - `mesh`: the one that was named, if one was.
    - `tree`: gives the arrays, which may be on one.
    - `needs`: what is missing and how to name it, for the message.

    **Returns:**

    The mesh.

    **Raises:**

    `NoMeshError` where there is none.
    """
    found = survey(tree(), None, in_force=current_mesh(), reads_index="no").mesh if mesh is None else mesh
    if found is None:
        raise NoMeshError(f"{needs}, arrays that are on one, or call inside jax.set_mesh(mesh)")
    return found
