"""PartitionManager: resolves the logical axes of activations, the mode read off their shape if need be."""

from collections.abc import Sequence
from typing import final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.errors import SpecError
from shardrules.rules.logical.axes import MODE_TRAIN, DynamicShardingAxes, LogicalAxis
from shardrules.rules.logical.partition_axis import PartitionAxis


@final
@attrs.frozen
class PartitionManager:
    """Answers model code that asks where an array belongs.

    It is a plain value: nothing remembers the last one that was made, and there is no current one. Hand it to the
    model, or keep it in the model's configuration.

    **Arguments:**

    - `paxis`: which mesh axis splits which logical axis.

    ```python
    from shardrules.presets import eformer

    manager = eformer.PartitionManager(eformer.PartitionAxis())
    assert manager.resolve(eformer.ColumnWise) == P(("fsdp", "sp"), "tp")
    assert manager.resolve([eformer.BATCH, eformer.EMBED]) == P(("fsdp", "dp"), "tp")
    ```
    """

    paxis: PartitionAxis = attrs.field(validator=attrs.validators.instance_of(PartitionAxis))

    def resolve(
        self,
        axes: Sequence[LogicalAxis] | DynamicShardingAxes | None = None,
        mode: str | int | None = None,
        dynamic_axes: DynamicShardingAxes | None = None,
        shape: Sequence[int] | None = None,
    ) -> PartitionSpec:
        """Returns the PartitionSpec of an array.

        **Arguments:**

        - `axes`: one logical axis for each dimension, or a `DynamicShardingAxes`, such as `HiddenStateSharding`.
        - `mode`: the runtime mode; or a dimension, as an int: decoding where it has length 1, else training. By default
          that of the `DynamicShardingAxes`, and training for a plain list.
        - `dynamic_axes`: a `DynamicShardingAxes`, in place of `axes`.
        - `shape`: the shape of the array. An int mode needs it.

        **Returns:**

        A PartitionSpec with an entry for each logical axis.

        **Raises:**

        `SpecError` when both or neither of `axes` and `dynamic_axes` are given; otherwise as
        `PartitionAxis.resolve_spec`.

        ```python
        from shardrules.presets import eformer

        manager = eformer.PartitionManager(eformer.PartitionAxis())
        assert manager.resolve(eformer.HiddenStateSharding, shape=(8, 512, 64)) == P(("fsdp", "dp"), "sp", "tp")
        assert manager.resolve(eformer.HiddenStateSharding, shape=(8, 1, 64)) == P(("fsdp", "dp"), None, "tp")
        ```
        """
        given = axes if dynamic_axes is None else dynamic_axes
        if given is None or (axes is not None and dynamic_axes is not None):
            count = "neither was" if given is None else "both were"
            raise SpecError(
                f"PartitionManager.resolve takes either axes, such as [BATCH, EMBED], or dynamic_axes, such as "
                f"HiddenStateSharding, and {count} given"
            )
        if isinstance(given, DynamicShardingAxes):
            return self.paxis.resolve_spec(given.axes, given.mode if mode is None else mode, shape)
        return self.paxis.resolve_spec(given, MODE_TRAIN if mode is None else mode, shape)
