"""Arrays paired with the specs they should have: where every analysis starts."""

import itertools
import math
from collections.abc import Callable
from typing import Any, final

import attrs
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.core.context import current_mesh
from shardrules.core.errors import ConfigTypeError, NoMeshError, printable, shortened
from shardrules.core.leaf import Leaf
from shardrules.core.spec import array_bytes, packs, shard_shape
from shardrules.core.tree import flatten_specs, survey


@final
@attrs.frozen
class PlacedLeaf:
    """An array and the spec it should have, on the mesh of the leaf."""

    leaf: Leaf
    spec: PartitionSpec

    @property
    def device_bytes(self) -> int:
        """The bytes of the largest shard. Axes that the mesh lacks split nothing."""
        return self._bytes(self._largest_shard)

    @property
    def nbytes(self) -> int:
        return self._bytes(self.leaf.shape)

    @property
    def shards_bytes(self) -> int:
        """The bytes of all shards, one copy of each: each sub-byte shard is rounded up to whole bytes."""
        largest = self._largest_shard
        if 0 in largest:
            return 0
        # Per dimension (shard size, number of such shards). XLA fills shards from the front, so that all are full but
        # one, which has the remainder, and those after it, which are empty.
        cuts = [
            [(full, dim // full), (dim % full, 1)] if dim % full else [(full, dim // full)]
            for dim, full in zip(self.leaf.shape, largest, strict=True)
        ]
        return sum(
            self._bytes(tuple(size for size, _ in shard)) * math.prod(count for _, count in shard)
            for shard in itertools.product(*cuts)
        )

    @property
    def _largest_shard(self) -> tuple[int, ...]:
        return shard_shape(self.leaf.shape, self.spec, mesh_sizes(self.leaf.mesh))

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return array_bytes(shape, self.leaf.dtype, packed=packs(self.leaf.mesh, self.leaf.dtype))


def pair_leaves(tree: Any, specs: Any, mesh: AnyMesh | None) -> tuple[tuple[Leaf, Any], ...]:
    """Returns every array of a tree with the leaf of `specs` in the same position, whatever that is."""
    tree_survey = survey(tree, mesh)
    flat = flatten_specs(specs, tree_survey.treedef, "specs")
    return tuple(
        (tree_survey.kinds[kind], spec) for kind, spec in zip(tree_survey.kind_of, flat, strict=True) if kind >= 0
    )


def as_spec(spec: object) -> PartitionSpec:
    """Returns the PartitionSpec of a spec, a `NamedSharding`, or `None` (replicated)."""
    if spec is None:
        return PartitionSpec()
    if isinstance(spec, NamedSharding):
        return spec.spec
    if isinstance(spec, PartitionSpec):
        return spec
    raise ConfigTypeError(f"expected a PartitionSpec, a NamedSharding or None, got {type(spec).__name__} {spec!r:.60}")


def place_leaves(tree: Any, specs: Any, mesh: AnyMesh | None) -> tuple[PlacedLeaf, ...]:
    """Returns every array of a tree with its spec. One error lists all leaves of `specs` that are not specs."""
    placed: list[PlacedLeaf] = []
    # All leaves are checked before anything is raised.
    problems: list[str] = []
    for leaf, spec in pair_leaves(tree, specs, mesh):
        try:
            placed.append(PlacedLeaf(leaf, as_spec(spec)))
        except ConfigTypeError as error:
            problems.append(f"  {printable(leaf.path) or 'the tree'}: {error}")
    if problems:
        raise ConfigTypeError("specs must have a spec for each array:\n" + "\n".join(shortened(problems)))
    return tuple(placed)


def mesh_for(mesh: AnyMesh | None, tree: Callable[[], Any], problem: str) -> AnyMesh:
    """Returns `mesh`, else the mesh of the arrays, else the mesh in force.

    `problem` says in the error what is missing and how to pass it.
    """
    if mesh is None:
        mesh = survey(tree(), None, in_force=current_mesh(), reads_index="no").mesh
    if mesh is None:
        raise NoMeshError(f"{problem}, use arrays that are on a mesh, or call inside jax.set_mesh(mesh)")
    return mesh
