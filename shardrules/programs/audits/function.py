"""The traced function of an audit, beside the matmuls that the devices compute for it."""

import functools
from collections.abc import Mapping
from typing import final

import attrs

from shardrules.core.source import equation_line, user_line
from shardrules.core.spec import shard_shape
from shardrules.programs.audits.shape_matching import ShapeSet
from shardrules.programs.compiled.flops import Matmul
from shardrules.programs.compiling.compile import Compiled
from shardrules.programs.compiling.constraints import Constraint, find_constraints
from shardrules.programs.compiling.model_flops import ModelMatmul, model_matmuls
from shardrules.programs.compiling.roundings import Rounding, find_roundings
from shardrules.programs.jaxprs.walk import without_dead_code

MAX_FLOPS_RATIO = 1.05
"""More than this many times the function's own FLOPs mean that devices repeat each other's work. Chosen by hand: work
is repeated over a whole mesh axis, at least twice, and uneven shards are padded."""


@final
@attrs.frozen(eq=False)
class TracedFunction:
    """A function as it was traced: the shardings that it asks for, its roundings and its matmuls."""

    compiled: Compiled
    sizes: Mapping[str, int]
    """The axes of the mesh."""
    compiled_matmuls: tuple[Matmul, ...]
    """Of one device."""
    device_count: int

    @functools.cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        return tuple(find_constraints(self.compiled.jaxpr))

    @functools.cached_property
    def requested_shapes(self) -> ShapeSet:
        """The shape that a device has of each array whose sharding the function or its caller requests."""
        results = [
            (tuple(array.struct.shape), array.requested.spec)
            for array in self.compiled.results
            if array.requested is not None
        ]
        constrained = [(shape, spec) for shape, spec, _ in self.constraints]
        return ShapeSet.of(shard_shape(shape, spec, self.sizes) for shape, spec in (*results, *constrained))

    @functools.cached_property
    def roundings(self) -> tuple[Rounding, ...]:
        """The arrays that the function rounds to 8 bits or fewer."""
        return tuple(find_roundings(self.compiled.jaxpr))

    @functools.cached_property
    def matmuls(self) -> tuple[ModelMatmul, ...]:
        return tuple(model_matmuls(without_dead_code(self.compiled.jaxpr)))

    @property
    def flops(self) -> int | None:
        """The function's own FLOPs; `None` where a loop of unknown length would make the sum a guess."""
        return sum(matmul.flops for matmul in self.matmuls) if all(each.is_certain for each in self.matmuls) else None

    @functools.cached_property
    def flops_by_line(self) -> Mapping[str, tuple[int, int]]:
        """For each line of code its FLOPs in the function, and those of all devices together.

        Lines are left out if the number of their runs is unknown, or if compilers rewrite them to other FLOPs.
        """
        model_flops: dict[str, int] = {}
        uncertain: dict[str, None] = {}
        for matmul in self.matmuls:
            line = equation_line(matmul.equation)
            model_flops[line] = model_flops.get(line, 0) + matmul.flops
            uncertain |= {} if matmul.is_certain else {line: None}
        device_flops = {line: 0 for line in model_flops if line not in uncertain}
        for matmul in self.compiled_matmuls:
            line = user_line(matmul.stack)
            # Compilers implement FFTs by matmuls, which the function's own count does not have.
            if line in device_flops and not matmul.op_name.endswith("/fft"):
                device_flops[line] += self.device_count * matmul.total_flops
        return {line: (model_flops[line], flops) for line, flops in device_flops.items()}

    @property
    def repeats_work(self) -> bool:
        """Returns whether the devices compute more FLOPs than the function has."""
        model_flops, device_flops = (sum(flops[index] for flops in self.flops_by_line.values()) for index in range(2))
        return model_flops > 0 and device_flops > MAX_FLOPS_RATIO * model_flops

    @functools.cached_property
    def has_gradients(self) -> bool:
        """Returns whether it has a backward pass, whose operations JAX names `transpose(...)`."""
        return any("transpose(" in matmul.op_name for matmul in self.compiled_matmuls)
