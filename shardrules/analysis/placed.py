"""Arrays beside the specs they are to have: what every analysis starts from."""

from typing import Any, final

import attrs
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.core.errors import TreeError
from shardrules.core.leaf import Leaf
from shardrules.core.spec import axis_names, shard_bytes, ways
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
    def is_split(self) -> bool:
        """Whether the spec names an axis."""
        return bool(axis_names(self.spec))

    @property
    def ways(self) -> int:
        """Into how many parts the spec splits it on this mesh."""
        return ways(self.spec, mesh_sizes(self.leaf.mesh))


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

    `TreeError` when the structures differ, or something else than a spec stands at an array.
    """
    found = survey(tree, mesh)
    flat = flatten_specs(specs, found.treedef, "specs")
    pairs = [(found.leaves[kind], spec) for kind, spec in zip(found.kinds, flat, strict=True) if kind >= 0]
    wrong = [
        f"  {leaf.path}: {type(spec).__name__} {str(spec)[:60]}"
        for leaf, spec in pairs
        if not (spec is None or isinstance(spec, PartitionSpec | NamedSharding))
    ]
    if wrong:
        raise TreeError("specs must hold a PartitionSpec, a NamedSharding or None for each array:\n" + "\n".join(wrong))
    return tuple(Placed(leaf, _spec(spec)) for leaf, spec in pairs)


def _spec(spec: PartitionSpec | NamedSharding | None) -> PartitionSpec:
    if spec is None:
        return PartitionSpec()
    return spec.spec if isinstance(spec, NamedSharding) else spec
