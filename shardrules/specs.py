"""The algebra of PartitionSpecs, and what an array says of its own."""

from shardrules.core.axes import Axis
from shardrules.core.spec import canonical, same, shard_bytes, shard_shape
from shardrules.core.views.spec_trees import (
    extract_sharding_structure,
    extract_shardings,
    get_names_from_partition_spec,
    get_partition_spec,
)

__all__ = [
    "Axis",
    "canonical",
    "extract_sharding_structure",
    "extract_shardings",
    "get_names_from_partition_spec",
    "get_partition_spec",
    "same",
    "shard_bytes",
    "shard_shape",
]
