"""The primitive of regions: what plans, `vmap` and compilers see of them.

Where a plan or an Explicit mesh says how operands are split, devices run the function on their shards in
`jax.shard_map`. Elsewhere the compiler decides, and gets the declaration as a rule for its partitioner.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardrules.analysis.compiling.jaxprs import equations
from shardrules.analysis.compiling.kernel_calls import find_kernel_calls
from shardrules.analysis.compiling.model_flops import model_flops
from shardrules.core.errors import ConfigError, SpecError
from shardrules.core.jax_state import require_devices, trace_key
from shardrules.core.spec import spec_repr
from shardrules.regions.declaration import Axes, Declaration


@final
@attrs.frozen(eq=False)
class ShardFunction:
    """A function of arrays that devices can run on shards, and returns a list of arrays."""

    name: str
    run: Callable[..., list[Any]]
    declaration: Declaration
    cost: Callable[..., Any] | None = None
    """Returns FLOPs, from shapes of shards: `None` where they are counted."""

    def refuse(self, problems: Sequence[str]) -> None:
        """Raises an error that lists what is wrong, if anything is."""
        if problems:
            raise ConfigError(f"region {self.name} ({self.declaration}): {'; '.join(problems)}")

    def flops(self, program: ClosedJaxpr) -> int:
        """The FLOPs of a program of this function: what its author says, or those of its matmuls and kernels."""
        if self.cost is None:
            kernels = sum(call.flops or 0 for call in find_kernel_calls(program))
            return kernels or model_flops(program)
        flops = self.cost(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals))
        if not isinstance(flops, int | float) or not 0 <= flops < math.inf:
            self.refuse([f"its cost must return a number of at least 0, got {flops!r:.60}"])
        return int(flops)

    def run_on_shard(self, axes: Mapping[str, Axes], operands: Sequence[Any]) -> list[Any]:
        """Runs on the shards of one device, and completes sums over letters that are split over `axes`."""
        results = []
        for index, result in enumerate(self.run(*operands)):
            names = tuple(name for letter in self.declaration.summed(index) for name in axes.get(letter, ()))
            results.append(lax.psum(result, names) if names else result)
        return results


region_p = Primitive("region")
region_p.multiple_results = True
require_devices(region_p)


def call_region(function: ShardFunction, operands: Sequence[Any]) -> list[Any]:
    """Runs a function on whole arrays, or on shards where the operands' types say how they are split."""
    mesh = jax.sharding.get_abstract_mesh()
    types = set(mesh.axis_types) if not mesh.empty else set()
    if types == {AxisType.Manual}:
        return function.run(*operands)
    function, program = traced(function, kinds_of(operands))
    if AxisType.Explicit in types:
        return _call_split(function, operands, mesh)
    return region_p.bind(*operands, function=function, program=program, rule=function.declaration.text)


Kind: TypeAlias = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype and whether the dtype is weak."""


def kinds_of(operands: Sequence[Any]) -> tuple[Kind, ...]:
    """The kind of each operand."""
    types = map(jax.typeof, operands)
    return tuple((tuple(aval.shape), aval.dtype, bool(aval.weak_type)) for aval in types)


def traced(function: ShardFunction, kinds: tuple[Kind, ...]) -> tuple[ShardFunction, ClosedJaxpr]:
    """A function and its program on whole operands. What does not fit the declaration raises."""
    return _traced(function, kinds, trace_key())


@functools.lru_cache(maxsize=1024)
def _traced(function: ShardFunction, kinds: tuple[Kind, ...], key: Hashable) -> tuple[ShardFunction, ClosedJaxpr]:
    declaration, shapes = function.declaration, [shape for shape, _, _ in kinds]
    function.refuse(declaration.misfits(shapes, None))
    structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak) for shape, dtype, is_weak in kinds]
    program = jax.make_jaxpr(function.run)(*structs)
    if any(isinstance(const, Tracer) for const in program.consts):
        function.refuse(["it uses arrays that are traced outside of it; pass them as arguments"])
    function.refuse(declaration.misfits(shapes, [tuple(aval.shape) for aval in program.out_avals]))
    sources = tuple(sources_of(program, index) for index in range(len(program.out_avals)))
    return attrs.evolve(function, declaration=attrs.evolve(declaration, sources=sources)), program


def sources_of(program: ClosedJaxpr, result_index: int) -> tuple[int, ...]:
    """The operands that a result of a program is computed from."""
    used = [index == result_index for index in range(len(program.out_avals))]
    return tuple(index for index, flag in enumerate(partial_eval.dce_jaxpr(program.jaxpr, used)[1]) if flag)


def _call_split(function: ShardFunction, operands: Sequence[Any], mesh: Any) -> list[Any]:
    """Runs on shards of operands whose types have shardings."""
    declaration, problems = function.declaration, []
    specs = [jax.typeof(operand).sharding.spec for operand in operands]
    sizes = declaration.sizes([jnp.shape(operand) for operand in operands])
    axes = declaration.axes_of(specs, [PartitionSpec()] * len(declaration.results), dict(mesh.shape), sizes)
    operand_specs, result_specs = declaration.specs(axes)
    for index, (before, after) in enumerate(zip(specs, operand_specs, strict=True)):
        if spec_repr(_filled(before, len(after))) != spec_repr(after):
            problems.append(
                f"operand {index} of shape {jnp.shape(operands[index])} is split as {spec_repr(before)}; reshard it: "
                f"jax.reshard(x, {spec_repr(after)})"
            )
    if problems:
        raise SpecError(f"region {function.name} ({declaration}): {'; '.join(problems)}")

    def on_shard(*shards: Any) -> list[Any]:
        return function.run_on_shard(axes, shards)

    return jax.shard_map(on_shard, mesh=mesh, in_specs=operand_specs, out_specs=list(result_specs), check_vma=False)(
        *operands
    )


def _filled(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    entries = [None if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in tuple(spec)]
    return PartitionSpec(*entries, *(None,) * (ndim - len(entries)))


@region_p.def_abstract_eval
def _abstract_eval(*operands: Any, program: ClosedJaxpr, **_: Any) -> list[ShapedArray]:
    return [ShapedArray(aval.shape, aval.dtype) for aval in program.out_avals]


@region_p.def_impl
def _run(*operands: Any, **params: Any) -> list[Any]:
    return _compiled(**params)(*operands)


@functools.lru_cache(maxsize=1024)
def _compiled(**params: Any) -> Callable[..., list[Any]]:
    return jax.jit(lambda *arrays: region_p.bind(*arrays, **params))


def _batched(
    operands: Sequence[Any], dims: Sequence[Any], *, function: ShardFunction, program: ClosedJaxpr, rule: str
) -> Any:
    is_batched = [dim is not None for dim in dims]
    moved = [
        jnp.moveaxis(operand, dim, 0) if flag else operand
        for operand, dim, flag in zip(operands, dims, is_batched, strict=True)
    ]
    mapped = attrs.evolve(
        function,
        run=jax.vmap(function.run, in_axes=[0 if flag else None for flag in is_batched]),
        declaration=attrs.evolve(function.declaration.with_dim(is_batched), sources=()),
        cost=None if function.cost is None else _cost_of_all(function.cost, is_batched),
    )
    return call_region(mapped, moved), [0] * len(program.out_avals)


def _cost_of_all(cost: Callable[..., Any], is_batched: Sequence[bool]) -> Callable[..., Any]:
    """The cost of a mapped function: that of one call, times the calls."""

    def cost_of_all(*operands: jax.ShapeDtypeStruct) -> Any:
        calls = next(operand.shape[0] for operand, flag in zip(operands, is_batched, strict=True) if flag)
        each = (
            jax.ShapeDtypeStruct(operand.shape[flag:], operand.dtype)
            for operand, flag in zip(operands, is_batched, strict=True)
        )
        return calls * cost(*each)

    return cost_of_all


def _no_jvp(primals: Any, tangents: Any, *, function: ShardFunction, program: ClosedJaxpr, rule: str) -> Any:
    raise ConfigError(
        f"region {function.name}: only first derivatives in reverse mode are known (jax.grad, jax.vjp). For others, "
        "call the region inside a function with a jax.custom_jvp or jax.custom_vjp"
    )


def _lower(ctx: Any, *operands: Any, function: ShardFunction, program: ClosedJaxpr, rule: str) -> Any:
    run = _partitioned(function, program) if _is_partitioned(ctx) else jaxpr_as_fun(program)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _lower_for_tpu(ctx: Any, *operands: Any, function: ShardFunction, program: ClosedJaxpr, rule: str) -> Any:
    """As `_lower`, without asking the partitioner: libtpu's asks nobody."""
    kernels = [equation for equation in equations(program) if equation.primitive.name in _KERNELS]
    if kernels and _is_partitioned(ctx):
        raise ConfigError(
            f"region {function.name}: the compiler for TPUs cannot be told how to split a kernel. Plan the function "
            "(shardrules.autoplan), or make the mesh's axes Explicit: both run the region on shards"
        )
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(ctx, *operands)


_KERNELS = ("pallas_call", "ffi_call", "custom_partitioning")


def _is_partitioned(ctx: Any) -> bool:
    """Whether a compiler splits what is lowered here over several devices."""
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        return set(context.manual_axes) != set(context.mesh.axis_names)
    return getattr(context, "num_devices", 1) > 1


def _partitioned(function: ShardFunction, program: ClosedJaxpr) -> Callable[..., Any]:
    """A function that the partitioner asks how to split."""
    declaration = function.declaration

    # Partitioners replace the call; only the shapes of what it returns are read.
    def stand_in(*operands: Any) -> list[Any]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in program.out_avals]

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        axes = declaration.axes_of(
            [_spec(function, operand.sharding) for operand in operands],
            [_spec(function, result.sharding) for result in results],
            dict(mesh.shape),
            declaration.sizes([operand.shape for operand in operands], [result.shape for result in results]),
        )
        shardings = [tuple(NamedSharding(mesh, spec) for spec in side) for side in declaration.specs(axes)]
        return mesh, lambda *shards: function.run_on_shard(axes, shards), list(shardings[1]), shardings[0]

    called = custom_partitioning(stand_in)
    called.def_partition(partition, sharding_rule=sharding_rule(declaration))
    return called


def _spec(function: ShardFunction, sharding: Any) -> PartitionSpec:
    if not isinstance(sharding, NamedSharding):
        function.refuse([f"it is compiled for several devices without a mesh ({sharding}): call it under jax.set_mesh"])
    return sharding.spec


def sharding_rule(declaration: Declaration) -> SdyShardingRule:
    """The rule that compilers propagate shardings by."""
    in_results = {letter for term in declaration.results for letter in term}
    letters = dict.fromkeys(letter for term in (*declaration.operands, *declaration.results) for letter in term)
    return SdyShardingRule(
        tuple(ArrayMapping(*term) for term in declaration.operands),
        tuple(ArrayMapping(*term) for term in declaration.results),
        reduction_factors=tuple(letter for letter in declaration.split if letter not in in_results),
        need_replication_factors=tuple(letter for letter in letters if letter not in declaration.split),
    )


def _without_unused(used: Sequence[bool], *arguments: Any) -> Any:
    """Drops results that nothing needs, such as gradients of frozen parameters."""
    equation = arguments[-1]  # before it, from JAX 0.11 on, which operands are live
    if all(used):
        return [True] * len(equation.invars), equation
    if not any(used):
        return [False] * len(equation.invars), None
    function, declaration = equation.params["function"], equation.params["function"].declaration
    kept = [index for index, flag in enumerate(used) if flag]

    def run(*operands: Any) -> list[Any]:
        results = function.run(*operands)
        return [results[index] for index in kept]

    fewer = attrs.evolve(
        function,
        run=run,
        declaration=attrs.evolve(
            declaration,
            results=tuple(declaration.results[index] for index in kept),
            sources=tuple(declaration.sources[index] for index in kept),
        ),
    )
    program = equation.params["program"]
    jaxpr = program.jaxpr.replace(outvars=[program.jaxpr.outvars[index] for index in kept])
    return [True] * len(equation.invars), equation.replace(
        outvars=[equation.outvars[index] for index in kept],
        params={
            "function": fewer,
            "program": ClosedJaxpr(jaxpr, program.consts),
            "rule": fewer.declaration.text,
        },
    )


batching.primitive_batchers[region_p] = _batched
ad.primitive_jvps[region_p] = _no_jvp
mlir.register_lowering(region_p, _lower)
mlir.register_lowering(region_p, _lower_for_tpu, platform="tpu")
partial_eval.dce_rules[region_p] = _without_unused
