"""Coming from `pathways-utils`: moves by way of an intermediate sharding, and meshes split along an axis."""

from shardrules.moves.intermediate import (
    find_intermediate_sharding,
    reshard_with_intermediate_sharding,
    reshard_with_intermediate_sharding_generic,
)
from shardrules.moves.split import concatenate_by_mesh_axis, split_by_mesh_axis

__all__ = [
    "concatenate_by_mesh_axis",
    "find_intermediate_sharding",
    "reshard_with_intermediate_sharding",
    "reshard_with_intermediate_sharding_generic",
    "split_by_mesh_axis",
]
