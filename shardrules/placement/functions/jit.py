"""`filter_jit`: `jax.jit` for functions of any pytrees, sharded by rules, plans or specs."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, final, overload

import attrs
import jax
import jax.tree_util as jtu
from equinox._jit import filter_jit as equinox_filter_jit  # equinox.filter_jit may be ours, put there by a program
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.boxes import objects_in, share_variables, shared_leaves, write_variables
from shardrules.core.callables import update_wrapper
from shardrules.core.context import current_mesh, trace_mesh
from shardrules.core.errors import ConfigTypeError
from shardrules.core.jax_state import trace_key, under_trace
from shardrules.mesh.axis_types import AxisTypes, normalize_axis_types
from shardrules.placement.cache import array_key
from shardrules.placement.functions.callbacks import CallbackErrors, errors_of, with_guard
from shardrules.placement.functions.calls import (
    FlatCall,
    PartialCall,
    as_tree,
    cache_of,
    check_same_call,
    flatten_call,
    signature_of,
)
from shardrules.placement.functions.options import Donate, Options
from shardrules.placement.functions.program import Meshes, Program, as_struct, compile_call, in_shardings_of, on_mesh
from shardrules.placement.functions.stages import LoweredFunction
from shardrules.placement.transfer import put_unplaced
from shardrules.rules.how import HowEach


@overload
def filter_jit(
    fn: Callable[..., Any],
    *,
    mesh: AnyMesh | None = None,
    in_shardings: HowEach = None,
    out_shardings: HowEach = None,
    donate: Donate = "none",
    axis_types: AxisTypes = "auto",
) -> "FilterJit": ...


@overload
def filter_jit(
    *,
    mesh: AnyMesh | None = None,
    in_shardings: HowEach = None,
    out_shardings: HowEach = None,
    donate: Donate = "none",
    axis_types: AxisTypes = "auto",
) -> "Callable[[Callable[..., Any]], FilterJit]": ...


def filter_jit(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh | None = None,
    in_shardings: HowEach = None,
    out_shardings: HowEach = None,
    donate: Donate = "none",
    axis_types: AxisTypes = "auto",
) -> "FilterJit | Callable[[Callable[..., Any]], FilterJit]":
    """Compiles a function of any pytrees. Arrays are traced; all other leaves are static and must be hashable.

    Without a mesh and shardings it is `equinox.filter_jit`. Rules, plans or specs say how arguments and results are
    sharded, for every structure, shape and dtype by itself: another tree never gets the shardings of an earlier one.
    The same tree is compiled once, by however many wrappers of the function. Arguments that `in_shardings` names and
    that are on no particular device yet are placed first, so that the first step of a training is compiled for all
    steps, where `jax.jit` compiles two. To `jax.transfer_guard` such a transfer is explicit.

    Modules, optimizers and random streams of flax nnx are written to, as by `nnx.jit`, and keep the shardings that
    `in_shardings` gives them. An `nnx.State` is a value, to be returned.

    **Arguments:**

    - `fn`: the function. A module that is called is part of its own arguments, as in `equinox.filter_jit`, and so are
        the arrays of a `functools.partial`.
    - `mesh`: the mesh, which is in force while `fn` runs; by default the one in force at the call.
    - `in_shardings`: a tuple with one item per positional argument, or one item for all of them. An item is whatever
        `filter_shard` accepts, or `None`, which leaves the argument where it is.
    - `out_shardings`: the same for the result; a tuple has one item per item of a result that is a tuple. `None` leaves
        the choice to the compiler.
    - `donate`: `"none"`, `"all"`, `"all-except-first"`, or positions and names of arguments whose memory may be reused.
        `"warn"` and `"warn-except-first"` keep JAX's warning about donated memory that no result could reuse.
    - `axis_types`: the types of the axes while `fn` runs; `None` keeps the mesh's own. On Explicit axes JAX wants model
        code to say how every ambiguous result is split, which most layers do not do; `"auto"` leaves that to the
        compiler. Arguments and results keep their mesh. Inside another traced function its types stay.

    **Returns:**

    A function like `fn`, with a method `lower` that takes the same arguments.

    **Raises:**

    What `filter_shard` raises. `PlanError` for arguments that are placed otherwise: moving them at every call would be
    slow without a sign of it. Arrays that are on no particular device, numpy arrays among them, are placed.
    `equinox.EquinoxRuntimeError` where `equinox.error_if` does, on several devices too, if nothing else is around the
    function: compile `jax.grad`, `jax.vmap` and `filter_shard_map` of it by `filter_jit`, rather than call them.

    ```python
    mesh = sr.create_mesh("data:8")
    step = sr.filter_jit(lambda w, x: w @ x, mesh=mesh, in_shardings=(P("data"), None), out_shardings=P("data"))
    assert step(jnp.ones((8, 4)), jnp.ones(4)).sharding.spec == P("data")
    ```
    """
    check_mesh(mesh)
    if fn is None:
        return functools.partial(
            filter_jit,
            mesh=mesh,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate=donate,
            axis_types=axis_types,
        )
    if not callable(fn):
        raise ConfigTypeError(
            f"filter_jit compiles a function, got {fn!r:.80}. Pass rules as in_shardings and out_shardings"
        )
    return FilterJit(as_tree(fn), Options.of(mesh, in_shardings, out_shardings, donate, axis_types))


@final
@jtu.register_pytree_node_class
@attrs.define(eq=False, slots=False)  # with a dictionary of its own, for update_wrapper
class FilterJit:
    """A compiled function; `filter_jit` makes one. As a pytree it holds the arrays of the function."""

    fn: Callable[..., Any]
    options: Options

    def __attrs_post_init__(self) -> None:
        update_wrapper(self, self.fn)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # Equinox loses writes to objects. Every call pays for this, so meshes are compared only where there is one.
        if self.options.are_equinox and not objects_in((self.fn, args, kwargs)):
            meshes = None if current_mesh() is None else self._meshes()
            if meshes is None or meshes.inside is meshes.outside:
                return self._call_equinox(args, kwargs)
        meshes = self._meshes()
        program, arrays, call = self._prepare(args, kwargs, meshes)
        return self._run(program, program.run, call, arrays, meshes)

    def lower(self, /, *args: Any, **kwargs: Any) -> LoweredFunction:
        """Returns the function lowered for arrays or `ShapeDtypeStruct`s; its `compile()` takes arguments like these.

        ```python
        double = sr.filter_jit(lambda x: 2 * x, mesh=sr.create_mesh("data:8"), in_shardings=P("data"))
        lowered = double.lower(jnp.ones(8))
        assert "stablehlo" in lowered.as_text()
        assert lowered.compile()(jnp.ones(8)).sharding.spec == P("data")
        ```
        """
        meshes = self._meshes()
        structs = jax.tree.map(as_struct, (args, kwargs))  # lowering moves nothing
        args, kwargs = share_variables(structs, shared_leaves((args, kwargs)))
        program, arrays, lowered_for = self._prepare(args, kwargs, meshes)

        def run(compiled: jax.stages.Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = self._flatten(args, kwargs)
            check_same_call(call, lowered_for)
            arrays = put_unplaced(meshes.all_inside(call.arrays), program.shardings)
            return self._run(program, compiled, call, arrays, meshes)

        with self._use_mesh(meshes):
            return LoweredFunction(program.run.lower(*arrays), run)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else PartialCall(self, (instance,), {})

    def tree_flatten(self) -> tuple[tuple[Any], Options]:
        """Returns the function, which may be a module, and what is static."""
        return (self.fn,), self.options

    @classmethod
    def tree_unflatten(cls, options: Options, children: Iterable[Any]) -> "FilterJit":
        """Makes one from what `tree_flatten` returns."""
        (fn,) = children
        return cls(fn, options)

    @functools.cached_property
    def _signature(self) -> inspect.Signature | None:
        return signature_of(self.fn)

    @functools.cached_property
    def _kept(self) -> Any:
        return cache_of(self.fn)

    @functools.cached_property
    def _equinox(self) -> Callable[..., Any]:
        return equinox_filter_jit(self.fn, donate=self.options.donate)  # pyright: ignore[reportCallIssue, reportArgumentType]

    @functools.cached_property
    def _guarded_equinox(self) -> Callable[..., Any]:
        return equinox_filter_jit(with_guard(self.fn), donate=self.options.donate)  # pyright: ignore[reportCallIssue, reportArgumentType]

    @functools.cached_property
    def _errors(self) -> CallbackErrors:
        return errors_of(self.fn)

    def _call_equinox(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        if under_trace() or jax.local_device_count() == 1:
            return self._equinox(*args, **kwargs)
        return self._errors.run(lambda: self._guarded_equinox(*args, **kwargs))

    def _meshes(self) -> Meshes:
        options = self.options
        outside = current_mesh() if options.mesh is None else options.mesh
        if options.axis_types is None or not isinstance(outside, Mesh) or under_trace():
            return Meshes(outside, outside)  # JAX does not allow other types while something is traced
        axis_types = normalize_axis_types(options.axis_types, outside.axis_names)
        if outside.axis_types == axis_types:
            return Meshes(outside, outside)
        return Meshes(outside, Mesh(outside.devices, outside.axis_names, axis_types=axis_types))

    def _use_mesh(self, meshes: Meshes) -> contextlib.AbstractContextManager[Any]:
        mesh = self.options.mesh if meshes.inside is meshes.outside else meshes.inside
        if mesh is None or not isinstance(mesh, Mesh):
            return contextlib.nullcontext()
        return trace_mesh(mesh) if under_trace() else jax.set_mesh(mesh)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        if self._signature is not None:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        return flatten_call(self.fn, args, kwargs)

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], meshes: Meshes
    ) -> tuple[Program, list[Any], FlatCall]:
        """Returns what is compiled for a call, the arrays of the call where they belong, and the call itself."""
        call = self._flatten(args, kwargs)
        arrays = meshes.all_inside(call.arrays)
        owner, cache = self._kept
        # Static leaves by type too, and what else a trace depends on: settings and contexts of JAX. Callbacks are
        # guarded at top level only.
        context = (meshes, trace_key(), under_trace())
        kind = (self.options, call.treedef, tuple(call.shared.items()), call.static_keys(owner), context)
        key = (kind, tuple(map(array_key, arrays)))
        try:
            program = cache.get(key)
        except TypeError as error:
            raise ConfigTypeError(f"filter_jit: non-array arguments must be hashable: {error}") from error
        if program is not None:
            return program, put_unplaced(arrays, program.shardings), call
        shardings = [
            on_mesh(sharding, meshes.outside, meshes.inside) for sharding in in_shardings_of(call, self.options)
        ]
        arrays = put_unplaced(arrays, shardings)
        # The same call with arrays that are placed already has another key, and shares what is compiled.
        placed_key = (kind, tuple(map(array_key, arrays)), tuple(shardings))
        program = cache.get(placed_key)
        if program is None:
            with self._use_mesh(meshes):
                program = compile_call(call, arrays, shardings, meshes, self.options)
            cache.add(placed_key, program)
        cache.add(key, program)
        return program, arrays, call

    def _run(self, program: Program, run: Callable[..., Any], call: FlatCall, arrays: list[Any], meshes: Meshes) -> Any:
        __tracebackhide__ = True
        with self._use_mesh(meshes):
            results = program.call(run, call, arrays)
        tree, writes = program.result.tree_and_writes(meshes.all_outside(results))
        write_variables((call.fn, call.args, call.kwargs), writes)
        return tree
