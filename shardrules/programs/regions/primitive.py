"""The primitive of regions: what plans, `vmap` and compilers see of them.

Where a plan or an Explicit mesh says how operands are split, devices run the function on their shards in
`jax.shard_map`. Elsewhere the compiler decides, and gets the declaration as a rule for its partitioner.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardrules.core.errors import ConfigError, SpecError
from shardrules.core.jax_state import decoded_spec, require_devices
from shardrules.core.spec import spec_repr
from shardrules.programs.jaxprs.walk import equations
from shardrules.programs.regions.declaration import Declaration, ShardAxes
from shardrules.programs.regions.function import ShardFunction

region_p = Primitive("region")
region_p.multiple_results = True
require_devices(region_p)


def call_region(function: ShardFunction, operands: Sequence[Any]) -> list[Any]:
    """Runs a function on whole arrays, and on shards where these are split."""
    function, program = function.traced(operands)
    return region_p.bind(*operands, function=function, program=program, rule=function.text_of(program))


def _result_avals(*operands: Any, function: ShardFunction, program: ClosedJaxpr, rule: str) -> list[ShapedArray]:
    """The types of the results; on an Explicit mesh they say how these are split."""
    split = _explicit_split(function, operands)
    avals = [ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in program.out_avals]
    if split is None:
        return avals
    mesh, fitting, axes = split
    _, specs = fitting.declaration.specs(axes)
    return [aval.update(sharding=NamedSharding(mesh, spec)) for aval, spec in zip(avals, specs, strict=True)]


def _explicit_split(function: ShardFunction, avals: Sequence[Any]) -> tuple[Any, ShardFunction, ShardAxes] | None:
    """The mesh, the function and its axes where the types of operands say how they are split, else `None`."""
    mesh = next((aval.sharding.mesh for aval in avals if AxisType.Explicit in aval.sharding.mesh.axis_types), None)
    if mesh is None:
        return None
    if set(mesh.axis_types) != {AxisType.Explicit}:
        function.refuse([f"the mesh has axes of several types, {mesh.axis_types}; make all of them Auto or Explicit"])
    specs = [aval.sharding.spec for aval in avals]
    # Nothing is known of how results are to be split, so the operands alone decide.
    results = [PartitionSpec()] * len(function.declaration.results)
    function, axes = function.fitting(specs, results, dict(mesh.shape), avals)
    declaration = function.declaration
    problems = []
    for index, (aval, before, after) in enumerate(zip(avals, specs, declaration.specs(axes)[0], strict=True)):
        pairs = zip(_entries(before, aval.ndim), _entries(after, aval.ndim), strict=True)
        if any(entry is not None and entry != needed for entry, needed in pairs):  # what is whole can be sliced
            problems.append(
                f"operand {index} of shape {aval.shape} is split as {spec_repr(before)}; reshard it: "
                f"jax.reshard(x, {spec_repr(after)})"
            )
    if problems:
        raise SpecError(f"region {function.name} ({declaration}): {'; '.join(problems)}")
    return mesh, function, axes


def _entries(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...] | None]:
    entries = [None if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in tuple(spec)]
    return [*entries, *[None] * (ndim - len(entries))]


def _run(*operands: Any, function: ShardFunction, **params: Any) -> list[Any]:
    return function.compiled(lambda *arrays: region_p.bind(*arrays, function=function, **params))(*operands)


def _batched(
    operands: Sequence[Any], dims: Sequence[Any], *, function: ShardFunction, program: ClosedJaxpr, rule: str
) -> Any:
    is_batched = tuple(dim is not None for dim in dims)
    moved = [
        jnp.moveaxis(operand, dim, 0) if flag else operand
        for operand, dim, flag in zip(operands, dims, is_batched, strict=True)
    ]
    return call_region(function.mapped(is_batched), moved), [0] * len(program.out_avals)


def _no_jvp(primals: Any, tangents: Any, *, function: ShardFunction, program: ClosedJaxpr, rule: str) -> Any:
    raise ConfigError(
        f"region {function.name}: only derivatives in reverse mode are known (jax.grad, jax.vjp). For others, call the "
        "region inside a function with a jax.custom_jvp"
    )


def _lower(ctx: Any, *operands: Any, function: ShardFunction, program: ClosedJaxpr, rule: str) -> Any:
    lowered = mlir.lower_fun(_lowered(ctx, function, program, _partitioned), multiple_results=True)
    return lowered(_on_mesh(ctx), *operands)


def _on_mesh(ctx: Any) -> Any:
    """The context with the mesh of `jax.set_mesh`, which JAX leaves out where no argument of a program is on a mesh."""
    module, mesh = ctx.module_context, jax.sharding.get_abstract_mesh()
    axes = module.axis_context
    if getattr(axes, "abstract_mesh", mesh) is not None or mesh.size != axes.num_devices:
        return ctx
    return ctx.replace(module_context=module.replace(axis_context=dataclasses.replace(axes, abstract_mesh=mesh)))


def _lower_for_tpu(ctx: Any, *operands: Any, function: ShardFunction, program: ClosedJaxpr, rule: str) -> Any:
    """As `_lower`, without asking the partitioner: libtpu's asks nobody."""
    return mlir.lower_fun(_lowered(ctx, function, program, _unasked), multiple_results=True)(ctx, *operands)


def _lowered(
    ctx: Any, function: ShardFunction, program: ClosedJaxpr, partitioned: Callable[..., Any]
) -> Callable[..., Any]:
    """The function that is compiled for a region."""
    split = _explicit_split(function, ctx.avals_in)
    # Types that say how operands are split leave no choice to the compiler.
    if split is not None:
        return _on_shards(*split)
    # Inside of `shard_map` nothing is partitioned: its context has no number of devices.
    is_partitioned = getattr(ctx.module_context.axis_context, "num_devices", 1) > 1
    return partitioned(function, program) if is_partitioned else jaxpr_as_fun(program)


def _on_shards(mesh: Any, function: ShardFunction, axes: ShardAxes) -> Callable[..., Any]:
    operand_specs, result_specs = function.declaration.specs(axes)
    mapped = jax.shard_map(
        lambda *shards: function.run_on_shard(axes, shards),
        mesh=mesh,
        in_specs=operand_specs,
        out_specs=list(result_specs),
        check_vma=False,
    )

    def run(*operands: Any) -> Any:
        shardings = [NamedSharding(mesh, spec) for spec in operand_specs]
        return mapped(*(jax.reshard(operand, sharding) for operand, sharding in zip(operands, shardings, strict=True)))

    return run


_KERNELS = ("pallas_call", "ffi_call", "custom_partitioning", "core_map", "mpmd_map")

_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "buffer_callback")

_INSTEAD = "Plan the function (shardrules.autoplan), or make the mesh's axes Explicit: both run the region on shards"


def _unasked(function: ShardFunction, program: ClosedJaxpr) -> Callable[..., Any]:
    names = {equation.primitive.name for equation in equations(program)}
    if any(name in names for name in _KERNELS):
        function.refuse([f"the compiler for TPUs cannot be told how to split a kernel. {_INSTEAD}"])
    return jaxpr_as_fun(program)


def _partitioned(function: ShardFunction, program: ClosedJaxpr) -> Callable[..., Any]:
    """A function that the partitioner asks how to split."""
    names = {equation.primitive.name for equation in equations(program)}
    if any(name in names for name in _CALLBACKS):
        function.refuse([f"compilers cannot split a function that calls back to Python. {_INSTEAD}"])
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in (*program.in_avals, *program.out_avals)):
        function.refuse([f"compilers cannot split typed keys; pass jax.random.key_data(key). Or: {_INSTEAD}"])

    # Partitioners replace the call; only the shapes of what it returns are read.
    def stand_in(*operands: Any) -> list[Any]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in program.out_avals]

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        fitting, axes = function.fitting(
            [_spec(function, operand, mesh) for operand in operands],
            [_spec(function, result, mesh) for result in results],
            dict(mesh.shape),
            program.in_avals,
        )
        shardings = [tuple(NamedSharding(mesh, spec) for spec in side) for side in fitting.declaration.specs(axes)]
        return mesh, lambda *shards: fitting.run_on_shard(axes, shards), list(shardings[1]), shardings[0]

    called = custom_partitioning(stand_in)
    called.def_partition(partition, sharding_rule=sharding_rule(function.declaration), decode_shardings=False)
    return called


def _spec(function: ShardFunction, array: Any, mesh: Any) -> PartitionSpec:
    if mesh.empty:
        function.refuse(
            [f"it is compiled for several devices without a mesh ({array.sharding}): call it under jax.set_mesh"]
        )
    spec = decoded_spec(array.sharding, mesh)
    if spec is not None:
        return spec
    raise ConfigError(
        f"region {function.name} ({function.declaration}): an array of shape {array.shape} is split over part of a "
        "mesh axis, as after a reshape; split it over whole axes with jax.lax.with_sharding_constraint, or make "
        "several axes of this one"
    )


def sharding_rule(declaration: Declaration) -> SdyShardingRule:
    """The rule that compilers propagate shardings by."""
    in_results = {letter for term in declaration.results for letter in term}
    splits = (*declaration.split, *declaration.exchange)
    letters = dict.fromkeys(letter for term in (*declaration.operands, *declaration.results) for letter in term)
    # A letter that no result has is summed over; one that may not be split has to be whole in every array.
    return SdyShardingRule(
        tuple(ArrayMapping(*term) for term in declaration.operands),
        tuple(ArrayMapping(*term) for term in declaration.results),
        reduction_factors=tuple(letter for letter in letters if letter in splits and letter not in in_results),
        need_replication_factors=tuple(letter for letter in letters if letter not in splits),
    )


def _without_unused(used: Sequence[bool], *arguments: Any) -> Any:
    """Drops results that nothing needs, such as gradients of frozen parameters."""
    equation = arguments[-1]  # before it, from JAX 0.11 on, which operands are live
    if all(used):
        return [True] * len(equation.invars), equation
    if not any(used):
        return [False] * len(equation.invars), None
    kept = tuple(index for index, flag in enumerate(used) if flag)
    fewer = equation.params["function"].with_results(kept)
    program = equation.params["program"]
    jaxpr = program.jaxpr.replace(outvars=[program.jaxpr.outvars[index] for index in kept])
    return [True] * len(equation.invars), equation.replace(
        outvars=[equation.outvars[index] for index in kept],
        params={
            "function": fewer,
            "program": ClosedJaxpr(jaxpr, program.consts),
            "rule": fewer.text_of(program),
        },
    )


region_p.def_abstract_eval(_result_avals)
region_p.def_impl(_run)
batching.primitive_batchers[region_p] = _batched
ad.primitive_jvps[region_p] = _no_jvp
mlir.register_lowering(region_p, _lower)
mlir.register_lowering(region_p, _lower_for_tpu, platform="tpu")
partial_eval.dce_rules[region_p] = _without_unused
