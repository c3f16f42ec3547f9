"""Running a function as it was planned."""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.context import current_mesh
from shardrules.core.errors import NoMeshError, TreeError, printable, shortened
from shardrules.core.jax_state import under_trace
from shardrules.core.spec import shard_bytes, spec_repr
from shardrules.core.tree import array_kind
from shardrules.placement.cache import Cache
from shardrules.placement.transfer import put_some, put_unplaced
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.run.call import HOST_MEMORY, Call, auto_mesh, axis_names_of, read_call, strong
from shardrules.programs.autoplan.run.fingerprint import first_difference
from shardrules.programs.autoplan.run.rewrite import chosen_layouts, with_layouts
from shardrules.programs.compilers.order import has_many_chains
from shardrules.programs.traced.program import is_on_host

_LIMIT_OPTION, _XLA_DEFAULT_PERCENT = "xla_gpu_memory_limit_slop_factor", 95
"""XLA's option that says how many per cent of that it fills, and its default."""

_DISABLED_PASSES = "xla_disable_hlo_passes"

_MOST_OF_LIMIT, _LEAST_OF_PEAK = 0.98, 0.95
"""Parts of the memory limit and of the modelled peak that XLA is given. It overshoots its limit by a per cent or two,
so that with all of the limit functions would exceed it; with less than the peak it computes arrays again, and may need
more memory after all."""

NEAR_RATIO = 0.9
"""The part of the limit from which a plan is near it. The model of memory may say up to a tenth less than the compiler
for most functions; with 0.8, half of all plans with a limit would be near it, and XLA hide less communication."""


@final
@attrs.frozen(eq=False)
class PlannedFunction:
    """A function that runs as planned; `AutoPlan.jit` makes them. Call it as you call `fn`."""

    fn: Callable[..., Any]
    planned: Call = attrs.field(repr=False)
    mesh: AnyMesh
    problem: Problem = attrs.field(repr=False)
    choice: tuple[int, ...] = attrs.field(repr=False)
    specs: tuple[PartitionSpec, ...] = attrs.field(repr=False)
    """Of the arrays of the arguments."""
    result_specs: tuple[PartitionSpec, ...] = attrs.field(repr=False)
    donated: tuple[int, ...]
    """The arguments whose memory may be used for results."""
    memory_limit: int
    peak_bytes: int
    _compiled: Cache[tuple[Call, Any, list[Any]]] = attrs.field(factory=Cache, repr=False, init=False)

    @property
    def __name__(self) -> str:
        """The name of the function."""
        return self.planned.name

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function, as `jax.jit(fn).lower(*args)` does; shapes are accepted as arguments."""
        _, run, arrays = self._prepared(args)
        return run.lower(*map(strong, arrays))

    def __call__(self, *args: Any) -> Any:
        """Runs the function."""
        call, run, arrays = self._prepared(args)
        return call.rebuild(run(*self._placed(arrays)))

    def _placed(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays as planned: those that are replicated, or not placed yet, are put there."""
        mesh = auto_mesh(concrete_mesh(self.mesh))
        targets = self.argument_shardings(mesh)
        traced: dict[int, NamedSharding] = {}
        moved: dict[int, NamedSharding] = {}
        misplaced: list[str] = []
        for index, (path, array, target) in enumerate(zip(self.planned.paths, arrays, targets, strict=True)):
            if isinstance(array, Tracer):
                if AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types:
                    traced[index] = target
            elif isinstance(array, jax.Array) and array.committed:
                sharding = array.sharding
                named = sharding if isinstance(sharding, NamedSharding) else None
                # An equivalent sharding under another name is put there too: to jit it has another type.
                if (
                    sharding.is_equivalent_to(target, array.ndim)
                    or (named is not None and named.is_fully_replicated)
                    or _is_in_other_memory(sharding, target, array.ndim)
                ):
                    moved[index] = target
                elif named is not None:  # JAX explains the others
                    misplaced.append(
                        f"{printable(path)} is {spec_repr(named.spec)} and was planned as {spec_repr(target.spec)}"
                    )
        if misplaced:
            raise TreeError(
                f"{self.planned.name}: {len(misplaced)} arrays are not where they were planned:\n  "
                + "\n  ".join(shortened(misplaced))
                + "\nPut them there first: sr.filter_shard(args, planned.plan)"
            )
        placed = [_without_weak_type(array) for array in put_unplaced(put_some(arrays, moved), targets)]
        for index, target in traced.items():
            placed[index] = jax.device_put(arrays[index], target)
        return placed

    def _prepared(self, args: tuple[Any, ...]) -> tuple[Call, Any, list[Any]]:
        """Returns the call, the jitted function and the arrays for some arguments: traced once for each shape."""
        leaves, treedef = jtu.tree_flatten(args)
        is_array = [array_kind(leaf) is not None for leaf in leaves]
        arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
        others = [leaf for leaf, array in zip(leaves, is_array, strict=True) if not array]
        structs = tuple((array.shape, array.dtype) for array in map(strong, arrays))
        # Under a trace, jit gets other compiler options; a mesh without devices may be another at each call.
        mesh = concrete_mesh(self.mesh)
        key = (mesh, under_trace(), treedef, tuple(is_array), structs, tuple(map(_static_key, others)))
        compiled = self._compiled.get(key)
        if compiled is None:
            # Kept with the objects whose ids are in the key, so that no other object gets the same id.
            compiled = (*self._jitted(args), others)
            self._compiled.add(key, compiled)
        call, run, _ = compiled
        return call, run, arrays

    def _jitted(self, args: tuple[Any, ...]) -> tuple[Call, Any]:
        mesh = concrete_mesh(self.mesh)
        # As planned, whatever types the arrays have now: a checkpoint restores none that are weak.
        weak_types = [array.weak_type for array in self.planned.structs]
        call = read_call(self.fn, args, mesh, self.planned.name, self.planned.on_host, weak_types)
        if call.fingerprint != self.planned.fingerprint or call.structs != self.planned.structs:
            raise TreeError(_difference(self.planned, call))
        # Constraints need Auto axes, whatever axis types the user's mesh has.
        auto = auto_mesh(mesh)
        with axis_names_of(mesh):
            program = jaxpr_as_fun(with_layouts(call.jaxpr, chosen_layouts(self.problem, self.choice), auto))

        def named(*arrays: Any) -> Any:
            with axis_names_of(mesh):
                return program(*arrays)

        # Compiled programs, profiles and audits show the user's name.
        named.__name__ = call.name
        run = jax.jit(
            named,
            in_shardings=self.argument_shardings(auto),
            out_shardings=_shardings(auto, self.result_specs, list(map(is_on_host, call.jaxpr.out_avals))),
            donate_argnums=[index for index, owner in enumerate(call.argument_indices) if owner in self.donated],
            keep_unused=True,
            compiler_options=self.compiler_options(mesh) or None,
        )
        return call, run

    def argument_shardings(self, mesh: AnyMesh) -> list[NamedSharding]:
        """Returns where each array of the arguments is, on a mesh."""
        return _shardings(mesh, self.specs, self.planned.on_host)

    def compiler_options(self, mesh: Mesh) -> dict[str, Any]:
        """Returns XLA options with the memory limit, for GPUs.

        By default XLA fills a GPU's memory, so as to overlap more. The option is a part, in whole per cent, of the
        memory that arguments and results leave. Of functions that need less than a few per cent of a GPU's memory, no
        such number may lie between what the plan needs and the limit. If the plan is near the limit, XLA is then given
        nothing, so that it saves memory wherever it can: with a little less than it needs, it may take more than
        without a limit. It would also compute much twice to get there, which is turned off, unless `XLA_FLAGS` turns
        off other passes: the option would replace that. Of functions with several chains of matmuls it would run all at
        once, which takes more memory, so they get a number all the same.
        """
        if mesh.devices.flat[0].platform != "gpu" or under_trace():
            return {}
        program, owners, sizes = self.problem.program, self.planned.argument_indices, mesh_sizes(mesh)
        feedback = self.planned.feedback
        overwriting = [result_index for result_index, index in feedback.items() if owners[index] in self.donated]

        def total_bytes(arrays: Sequence[int | None], specs: Sequence[PartitionSpec]) -> int:
            return sum(
                shard_bytes(program.arrays[array].shape, program.arrays[array].dtype, spec, sizes)
                for array, spec in zip(arrays, specs, strict=True)
                if array is not None and not program.arrays[array].on_host
            )

        argument_bytes = total_bytes(program.arguments, self.specs)
        # Results in the memory of donated arguments take none of their own.
        fresh = [None if index in overwriting else array for index, array in enumerate(program.results)]
        result_bytes = total_bytes(fresh, self.result_specs)
        # XLA schedules for four fifths of a GPU's memory.
        available = 0.8 * self.problem.machine.hardware.memory_bytes - argument_bytes - result_bytes
        if available <= 0:
            return {}
        unit = available / 100
        most = math.floor(_MOST_OF_LIMIT * (self.memory_limit - argument_bytes) / unit)
        needed = (self.peak_bytes - argument_bytes) / unit
        least = math.ceil(_LEAST_OF_PEAK * needed)
        is_near = NEAR_RATIO * self.memory_limit < self.peak_bytes <= self.memory_limit
        is_free = _DISABLED_PASSES not in os.environ.get("XLA_FLAGS", "")
        # Below 5 hundredths, chosen by hand, the next one is too far off to say what is near the limit.
        if most < min(needed, 5) and is_near and is_free and not has_many_chains(program):
            return {_LIMIT_OPTION: 0, _DISABLED_PASSES: "rematerialization"}
        percent = max(1, most, least)
        return {_LIMIT_OPTION: percent} if percent < _XLA_DEFAULT_PERCENT else {}


def _without_weak_type(array: Any) -> Any:
    """The same array in the same memory: `jax.jit` would compile once for each type."""
    if isinstance(array, Tracer) or not getattr(array, "weak_type", False):
        return array
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _is_in_other_memory(sharding: Sharding, target: NamedSharding, ndim: int) -> bool:
    """An array is where it was planned but for its memory, as after a load by a rule, which has no memories."""
    memory = target.memory_kind
    return memory is not None and sharding.with_memory_kind(memory).is_equivalent_to(target, ndim)


def _shardings(mesh: AnyMesh, specs: Sequence[PartitionSpec], on_host: Sequence[bool]) -> list[NamedSharding]:
    if not any(on_host):
        return [NamedSharding(mesh, spec) for spec in specs]
    # JAX matches donated arguments to results in the same memory only where all memories have names.
    kinds = [HOST_MEMORY if flag else "device" for flag in on_host]
    return [NamedSharding(mesh, spec, memory_kind=kind) for spec, kind in zip(specs, kinds, strict=True)]


def _static_key(leaf: Any) -> Any:
    """Returns what tells non-array leaves apart: the value of numbers and strings, the id of other objects."""
    plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
    return (type(leaf), leaf) if plain else id(leaf)


def concrete_mesh(mesh: AnyMesh) -> Mesh:
    """Returns a mesh with devices: if it has none, the mesh in force, provided that it has the same axes."""
    if isinstance(mesh, Mesh):
        return mesh
    current = current_mesh()
    if isinstance(current, Mesh) and mesh_sizes(current) == mesh_sizes(mesh):
        return current
    raise NoMeshError(
        f"the plan is for {mesh_text(mesh)}, which has no devices. Make a mesh with these axes and run the function "
        "under `with jax.set_mesh(mesh)`, or plan for that mesh"
    )


def _difference(planned: Call, called: Call) -> str:
    """Returns a message that says what differs from the plan."""
    before = dict(zip(planned.paths, planned.structs, strict=True))
    after = dict(zip(called.paths, called.structs, strict=True))
    differences = [
        f"{path} was {_struct_text(before[path])} and is {_struct_text(after[path])}"
        for path in after
        if path in before and (before[path].shape, before[path].dtype) != (after[path].shape, after[path].dtype)
    ]
    differences += [f"{path} is new" for path in after if path not in before]
    differences += [f"{path} is missing" for path in before if path not in after]
    why = (
        "; ".join(shortened([*map(printable, differences)]))
        if differences
        else "the arguments are the same, but what it computes is not: in the plan "
        + printable(first_difference(planned.jaxpr, called.jaxpr))
    )
    return f"{called.name} differs from the function that was planned: {why}. Plan again for this one"


def _struct_text(array: jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
