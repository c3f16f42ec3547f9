"""PartitionManager: resolves the logical axes of activations, with the mode read off their shape if need be."""

from collections.abc import Sequence
from typing import Any, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.presets.eformer.axes import DynamicShardingAxes
from shardrules.presets.eformer.partition_axis import PartitionAxis
from shardrules.rules.logical import MODE_TRAIN, LogicalAxis


def _check_partition_axis(manager: Any, field: Any, value: Any) -> None:
    if not isinstance(value, PartitionAxis):
        raise ConfigTypeError(f"Expected PartitionAxis as the {field.name} of a PartitionManager, got {value!r:.80}")


@final
@attrs.frozen
class PartitionManager:
    """Tells model code how to split an array, according to a `PartitionAxis`.

    It is a plain value without global state: pass it to the model, or keep it in the model's configuration.
    """

    paxis: PartitionAxis = attrs.field(validator=_check_partition_axis)

    def resolve(
        self,
        axes: Sequence[LogicalAxis] | DynamicShardingAxes | None = None,
        mode: str | int | None = None,
        dynamic_axes: DynamicShardingAxes | None = None,
        shape: Sequence[int] | None = None,
    ) -> PartitionSpec:
        """Returns the PartitionSpec of an array, with an entry for each logical axis.

        Pass either `axes`, a list or a `DynamicShardingAxes`, or `dynamic_axes`. `mode` and `shape` are as in
        `PartitionAxis.resolve_spec`; the default is the mode of the `DynamicShardingAxes`, or training for a list.

        ```python
        from shardrules.presets import eformer

        manager = eformer.PartitionManager(eformer.PartitionAxis())
        assert manager.resolve(eformer.ColumnWise) == P(("fsdp", "sp"), "tp")
        assert manager.resolve(eformer.HiddenStateSharding, shape=(8, 512, 64)) == P(("fsdp", "dp"), "sp", "tp")
        assert manager.resolve(eformer.HiddenStateSharding, shape=(8, 1, 64)) == P(("fsdp", "dp"), None, "tp")
        ```
        """
        if (axes is None) == (dynamic_axes is None):
            count = "neither was" if axes is None else "both were"
            raise ConfigError(
                f"PartitionManager.resolve takes either axes, such as [BATCH, EMBED], or dynamic_axes, such as "
                f"HiddenStateSharding, and {count} passed"
            )
        dims = axes if dynamic_axes is None else dynamic_axes
        assert dims is not None
        if isinstance(dims, DynamicShardingAxes):
            return self.paxis.resolve_spec(dims.axes, dims.mode if mode is None else mode, shape)
        return self.paxis.resolve_spec(dims, MODE_TRAIN if mode is None else mode, shape)
