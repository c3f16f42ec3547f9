"""A plan as patches read it: the traced program, the layouts in it, and what to compile it for."""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, Mesh, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import AxisTypeError, ConfigError
from shardrules.core.rule import ShardingPlan
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.machine.targets import Target, target_of
from shardrules.programs.patches.needs import Layouts


@final
@attrs.frozen(eq=False)
class PlannedProgram:
    """A planned function."""

    name: str
    args: tuple[Any, ...]
    mesh: AnyMesh
    hardware: Hardware
    program: ClosedJaxpr
    """The function as it was traced."""
    planned: ClosedJaxpr
    """The same with the layouts of the plan written into it."""
    layouts: Layouts
    arguments: ShardingPlan
    """The plan of the arguments."""
    structs: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]
    result_specs: tuple[PartitionSpec, ...]
    trace: Callable[[], ClosedJaxpr]
    """Traces the function again, as it was traced before."""

    @property
    def is_explicit(self) -> bool:
        """Returns whether the types of arrays say their layouts. `AxisTypeError` where this is so of some axes only."""
        explicit = [axis_type == AxisType.Explicit for axis_type in self.mesh.axis_types]
        if any(explicit) and not all(explicit):
            raise AxisTypeError(
                f"mesh {mesh_text(self.mesh)} has axes of several types. Patches are for Auto or for Explicit axes: "
                "plan for a mesh of one type"
            )
        return all(explicit)

    @property
    def target(self) -> Target:
        """The machine that the plan is for: that of the mesh's devices, else of the sheet that it was planned with."""
        device = self.mesh.devices.flat[0] if isinstance(self.mesh, Mesh) else None
        if device is not None and device.platform == "cpu":
            return Target("cpu")
        target = target_of(self.hardware, self.mesh.size)
        if target is not None:
            return target
        raise ConfigError(
            f"patches are compiled, and it is not known for which devices: {self.hardware.name!r} is no ready sheet of "
            'GPUs or CPUs, and slices of TPUs have several shapes. Pass target="tpu:v5e:4x4", say'
        )
