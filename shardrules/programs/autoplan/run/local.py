"""The work of each device on its own pieces (`jax.shard_map`), where XLA would gather the whole arrays instead."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.programs.autoplan.run.call import axis_names_of
from shardrules.programs.autoplan.run.kernels import kernel_of_pieces
from shardrules.programs.autoplan.run.ragged import ragged_dot_of_pieces
from shardrules.programs.regions.function import ShardFunction
from shardrules.programs.traced.factors.fused import is_maximum


@final
@attrs.frozen
class RegionRun:
    """The alternative of a region that runs, and the axes that it uses."""

    alternative: int
    """The index of the alternative that runs; 0 where there are none."""
    exchange: tuple[str, ...]
    """The axes along which its function communicates."""


@final
@attrs.frozen
class LocalSplit:
    """The split of an operation over devices."""

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    summed: tuple[tuple[str, ...], ...]
    """For each result the axes along which each device has a part of a sum, or of a maximum."""
    region: RegionRun | None = None


def local_jaxpr(equation: Any, split: LocalSplit, mesh: AnyMesh) -> ClosedJaxpr:
    """Returns an equation as a program in which each device computes its pieces of the results."""
    name = equation.primitive.name

    def on_device(*operands: jax.Array) -> list[jax.Array]:
        # The parts of a sum lie side by side in a new dim, one on each device.
        return [
            lax.expand_dims(result, (0,)) if axes else result
            for result, axes in zip(_results_of_pieces(equation, operands, split), split.summed, strict=True)
        ]

    def on_all(*operands: jax.Array) -> list[jax.Array]:
        out_specs = [
            PartitionSpec(axes, *spec) if axes else spec for spec, axes in zip(split.results, split.summed, strict=True)
        ]
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=split.operands, out_specs=out_specs, check_vma=False)
        results = mapped(*operands)
        # The partitioner completes it as it does any reduction: with an all-reduce, or a reduce-scatter. The largest
        # elements that FP8 attention returns are maxima.
        return [
            (lax.reduce_max if is_maximum(name, index) else lax.reduce_sum)(result, (0,)) if axes else result
            for index, (result, axes) in enumerate(zip(results, split.summed, strict=True))
        ]

    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars]
    with axis_names_of(mesh):
        return jax.make_jaxpr(on_all)(*avals)


def row_major_jaxpr(struct: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: AnyMesh) -> ClosedJaxpr:
    """Returns a program that changes nothing, but keeps an array's pieces in memory in the order of its dims."""

    def on_device(piece: jax.Array) -> jax.Array:
        return with_layout_constraint(piece, Layout(tuple(range(piece.ndim))))

    with axis_names_of(mesh):
        return jax.make_jaxpr(jax.shard_map(on_device, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False))(
            struct
        )


def _results_of_pieces(equation: Any, operands: Sequence[jax.Array], split: LocalSplit) -> Sequence[jax.Array]:
    """Returns what an equation computes from pieces of its operands."""
    if split.region is not None:
        function: ShardFunction = equation.params["function"]
        return function.alternative(split.region.alternative).run(split.region.exchange, *operands)
    if equation.primitive.name == "ragged_dot_general":
        return [ragged_dot_of_pieces(equation, operands, split.operands, split.results[0])]
    if equation.primitive.name == "pallas_call":
        return kernel_of_pieces(equation, operands, split.operands)
    results = equation.primitive.bind(*operands, **_params_of_pieces(equation, operands))
    return results if equation.primitive.multiple_results else [results]


def _params_of_pieces(equation: Any, operands: Sequence[jax.Array]) -> dict[str, Any]:
    """Returns the parameters that an equation has for the pieces of its operands."""
    params = dict(equation.params)
    if equation.primitive.name == "conv_general_dilated":
        # A device with 1/n of the kernel's output features has 1/n of the groups, whole ones; a count of 1 means none.
        dim = params["dimension_numbers"].rhs_spec[0]
        shard_count = equation.invars[1].aval.shape[dim] // operands[1].shape[dim]
        for name in ("feature_group_count", "batch_group_count"):
            params[name] = max(1, params[name] // shard_count)
    return params
