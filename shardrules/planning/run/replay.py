"""Running a function as it was planned."""

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.context import current_mesh
from shardrules.core.errors import NoMeshError, TreeError
from shardrules.core.jax_state import under_trace
from shardrules.core.spec import shard_bytes, spec_repr
from shardrules.core.tree import array_kind
from shardrules.placement.transfer import put
from shardrules.planning.graph.problem import Problem
from shardrules.planning.run.call import Call, automatic, naming, read_call, struct
from shardrules.planning.run.rewrite import held, rewritten

_XLA_TAKES = 0.8
"""The part of a GPU's memory that XLA reckons with."""

_XLA_LEAVES = 95
"""How many per cent of that it fills by default."""

_SURE, _ENOUGH = 0.98, 0.95


@final
@attrs.frozen(eq=False)
class PlannedFunction:
    """A function that runs as planned. `AutoPlan.jit` makes them.

    **Arguments:**

    - `fn`: the function.
    - `planned`: what was planned.
    - `mesh`: the mesh.
    - `problem`, `choice`: where everything in it is.
    - `specs`, `result_specs`: where arguments and results are.
    - `donated`: the arguments whose memory may be used for results.
    - `memory_limit`, `peak_bytes`: the most that may lie in the memory of a device, and that does, as modelled.
    """

    fn: Callable[..., Any]
    planned: Call = attrs.field(repr=False)
    mesh: AnyMesh
    problem: Problem = attrs.field(repr=False)
    choice: tuple[int, ...] = attrs.field(repr=False)
    specs: tuple[PartitionSpec, ...] = attrs.field(repr=False)
    result_specs: tuple[PartitionSpec, ...] = attrs.field(repr=False)
    donated: tuple[int, ...]
    memory_limit: int
    peak_bytes: int
    _known: dict[Any, tuple[Call, Any, list[Any]]] = attrs.field(factory=dict, repr=False, init=False)

    @property
    def __name__(self) -> str:
        """The name of the function."""
        return self.planned.name

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function, to be compiled: `planned.lower(*args).compile()`.

        **Arguments:**

        - `args`: its arguments; shapes will do.

        **Returns:**

        What `jax.jit(fn).lower(*args)` returns.
        """
        _, run, arrays = self._prepared(args)
        return run.lower(*[struct(one) for one in arrays])

    def __call__(self, *args: Any) -> Any:
        """Runs the function."""
        call, run, arrays = self._prepared(args)
        return call.rebuilt(run(*self._there(arrays)))

    def _there(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays where they are to be. Those that lie whole everywhere, or nowhere yet, are put there.

        To jit an array that it has to place is of another type than one that is there already: it would compile twice.
        """
        where = automatic(placed(self.mesh))
        found, wrong = list(arrays), []
        to_put: dict[int, NamedSharding] = {}
        for at, (path, array, spec) in enumerate(zip(self.planned.paths, arrays, self.specs, strict=True)):
            there = NamedSharding(where, spec)
            if isinstance(array, Tracer):
                own = jax.typeof(array).sharding
                if AxisType.Explicit in own.mesh.axis_types:
                    found[at] = jax.device_put(array, there)
            elif isinstance(array, jax.Array) and array.committed:
                own = array.sharding
                named = own if isinstance(own, NamedSharding) else None
                if own.is_equivalent_to(there, array.ndim) or (named is not None and named.is_fully_replicated):
                    to_put[at] = there
                elif named is not None:  # of others JAX says why not
                    wrong.append(f"{path} is {spec_repr(named.spec)} and was planned as {spec_repr(spec)}")
            elif not under_trace():
                to_put[at] = there
        if wrong:
            raise TreeError(
                f"{self.planned.name}: {len(wrong)} arrays lie elsewhere than planned:\n  "
                + "\n  ".join(wrong)
                + "\nPut them there first: sr.filter_shard(args, planned.plan)"
            )
        for at, array in zip(to_put, put([arrays[at] for at in to_put], [*to_put.values()]), strict=True):
            found[at] = array
        return found

    def _prepared(self, args: tuple[Any, ...]) -> tuple[Call, Any, list[Any]]:
        leaves, treedef = jtu.tree_flatten(args)
        kinds = [array_kind(leaf) is not None for leaf in leaves]
        arrays = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind]
        others = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if not kind]
        structs = tuple((one.shape, one.dtype, one.weak_type) for one in map(struct, arrays))
        key = (placed(self.mesh), under_trace(), treedef, tuple(kinds), structs, tuple(map(_static, others)))
        if key not in self._known:
            call, run = self._made(args)
            self._known[key] = (call, run, others)  # whose numbers stay theirs while they are kept
        call, run, _ = self._known[key]
        return call, run, arrays

    def _made(self, args: tuple[Any, ...]) -> tuple[Call, Any]:
        mesh = placed(self.mesh)
        call = read_call(self.fn, args, mesh, self.planned.name)
        if call.fingerprint != self.planned.fingerprint or call.structs != self.planned.structs:
            raise TreeError(_difference(self.planned, call))
        there = automatic(mesh)
        program = jaxpr_as_fun(rewritten(call.jaxpr, held(self.problem, self.choice), there))

        def named(*arrays: Any) -> Any:
            with naming(mesh):
                return program(*arrays)

        named.__name__ = call.name
        given = [NamedSharding(there, spec) for spec in self.specs]
        taken = [NamedSharding(there, spec) for spec in self.result_specs]
        donated = [number for number, owner in enumerate(call.owners) if owner in self.donated]
        run = jax.jit(
            named,
            in_shardings=given,
            out_shardings=taken,
            donate_argnums=donated,
            keep_unused=True,
            compiler_options=self._told(mesh) or None,
        )
        return call, run

    def _told(self, mesh: Mesh) -> dict[str, Any]:
        """What the compiler is told of the limit.

        XLA fills what a GPU has, so as to overlap more, if it is told nothing. It takes a part, in whole per cent, of
        what arguments and results leave; told too little, it computes things twice and needs more after all.
        """
        if mesh.devices.flat[0].platform != "gpu" or under_trace():
            return {}
        program, owners, sizes = self.problem.program, self.planned.owners, mesh_sizes(mesh)
        over = dict.fromkeys(at for at, number in self.planned.feedback.items() if owners[number] in self.donated)
        given = [*zip(program.arguments, self.specs, strict=True)]
        made = [pair for at, pair in enumerate(zip(program.results, self.result_specs, strict=True)) if at not in over]
        held, new = (
            sum(
                shard_bytes(program.arrays[array].shape, program.arrays[array].dtype, spec, sizes)
                for array, spec in pairs
                if array is not None
            )
            for pairs in (given, made)  # others are written over arguments
        )
        hundredth = (_XLA_TAKES * self.problem.machine.hardware.memory_bytes - held - new) / 100
        if hundredth <= 0:
            return {}
        most = math.floor(_SURE * (self.memory_limit - held) / hundredth)
        least = math.ceil(_ENOUGH * (self.peak_bytes - held) / hundredth)
        part = max(1, most, least)
        return {"xla_gpu_memory_limit_slop_factor": part} if part < _XLA_LEAVES else {}


def _static(leaf: Any) -> Any:
    """What tells one leaf that is no array from another: its value if it is a number or a text, else the object."""
    plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
    return (type(leaf), leaf) if plain else id(leaf)


def placed(mesh: AnyMesh) -> Mesh:
    """Returns a mesh on devices.

    **Arguments:**

    - `mesh`: the mesh; if it has none, that in force is taken, if it has the same axes.

    **Returns:**

    A `Mesh`.

    **Raises:**

    `NoMeshError` where none is in force.
    """
    if isinstance(mesh, Mesh):
        return mesh
    here = current_mesh()
    if isinstance(here, Mesh) and mesh_sizes(here) == mesh_sizes(mesh):
        return here
    raise NoMeshError(
        f"the plan is for {mesh_text(mesh)}, which has no devices: make a mesh of these axes, and run it under "
        "`with jax.set_mesh(mesh)`, or plan for that mesh"
    )


def _difference(planned: Call, called: Call) -> str:
    """What is other than planned."""
    then = dict(zip(planned.paths, planned.structs, strict=True))
    now = dict(zip(called.paths, called.structs, strict=True))
    other = [
        f"{path} was {_kind(then[path])} and is {_kind(now[path])}"
        for path in now
        if path in then and (then[path].shape, then[path].dtype) != (now[path].shape, now[path].dtype)
    ]
    other += [f"{path} is new" for path in now if path not in then]
    other += [f"{path} is gone" for path in then if path not in now]
    why = "; ".join(other) if other else "its arguments are the same, but what it computes of them is not"
    return f"{called.name} was planned otherwise: {why}. Call autoplan for this"


def _kind(one: jax.ShapeDtypeStruct) -> str:
    return f"{one.dtype.name}{list(one.shape)}"
