"""`filter_jit`: `jax.jit` for functions of any pytrees, sharded by rules, plans or specs."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, final, overload

import attrs
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.context import current_mesh, trace_mesh
from shardrules.core.errors import ConfigError, ConfigTypeError, PlanError, TreeError
from shardrules.core.finding import shape_text
from shardrules.core.jax_state import trace_key, under_trace
from shardrules.core.spec import device_dtype, spec_repr
from shardrules.core.tree import leaf_paths
from shardrules.mesh.creation import AxisTypes, normalize_axis_types
from shardrules.placement.cache import Cache, array_key, static_key
from shardrules.placement.destination import resolve_destination
from shardrules.placement.source import ArraySource
from shardrules.placement.traced import note_closure
from shardrules.placement.transfer import is_placed, put_some, put_unplaced
from shardrules.rules.how import How, HowEach

Donate: TypeAlias = Literal["none", "all", "all-except-first"] | Sequence[int | str]
"""Whose memory may be reused for the results: no argument's, all arguments', or some, by position or name."""


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

    Rules, plans or specs say how arguments and results are sharded, for every structure, shape and dtype by itself:
    another tree never gets the shardings of an earlier one, and the same tree is compiled once. Arguments that
    `in_shardings` names and that are on no particular device yet are placed first, so that the first step of a training
    is compiled for all steps, where `jax.jit` compiles two. To `jax.transfer_guard` such a transfer is explicit.

    **Arguments:**

    - `fn`: the function. A module that is called is part of its own arguments, as in `equinox.filter_jit`.
    - `mesh`: the mesh, which is in force while `fn` runs; by default the one in force at the call.
    - `in_shardings`: a tuple with one item per positional argument, or one item for all of them. An item is whatever
        `filter_shard` accepts, or `None`, which leaves the argument where it is.
    - `out_shardings`: the same for the result; a tuple has one item per item of a result that is a tuple. `None` leaves
        the choice to the compiler.
    - `donate`: `"none"`, `"all"`, `"all-except-first"`, or positions and names of arguments whose memory may be reused.
    - `axis_types`: the types of the axes while `fn` runs; `None` keeps the mesh's own. On Explicit axes JAX wants model
        code to say how every ambiguous result is split, which most layers do not do; `"auto"` leaves that to the
        compiler. Arguments and results keep their mesh. Inside another traced function its types stay.

    **Returns:**

    A function like `fn`, with a method `lower` that takes the same arguments.

    **Raises:**

    What `filter_shard` raises. `PlanError` for arguments that are placed otherwise: moving them at every call would be
    slow without a sign of it. Arrays that are on no particular device, numpy arrays among them, are placed.

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
    return functools.update_wrapper(
        FilterJit(fn, mesh, in_shardings, out_shardings, _as_donate(donate), axis_types), fn, updated=()
    )


def _as_donate(donate: Donate) -> tuple[int | str, ...] | str:
    if isinstance(donate, str):
        if donate not in ("none", "all", "all-except-first"):
            raise ConfigError(
                f"donate is 'none', 'all', 'all-except-first', or a list of positions and names; got {donate!r}"
            )
        return donate
    return tuple(donate)


@final
@attrs.frozen(eq=False)
class _Compiled:
    """What follows from structure, shapes and dtypes of one kind of call."""

    run: Any
    donated: frozenset[int]
    shardings: list[Sharding | None]
    result: "_Result"


@final
@attrs.define(eq=False)
class _Result:
    """What the trace says about the result: its structure, and its leaves that are not arrays."""

    treedef: Any = None
    static: tuple[tuple[int, Any], ...] = ()

    def tree(self, arrays: Iterable[Any]) -> Any:
        """Returns the result with these arrays in it."""
        rest, static = iter(arrays), dict(self.static)
        return self.treedef.unflatten(
            [static[n] if n in static else next(rest) for n in range(self.treedef.num_leaves)]
        )


@final
@attrs.define(eq=False, slots=False)  # with a dictionary of its own, for functools.update_wrapper
class FilterJit:
    """A compiled function; `filter_jit` makes one, and its parameters are the fields."""

    fn: Callable[..., Any]
    mesh: AnyMesh | None
    in_shardings: HowEach
    out_shardings: HowEach
    donate: tuple[int | str, ...] | str
    axis_types: AxisTypes = "auto"
    _signature: inspect.Signature | None = attrs.field(
        init=False, default=attrs.Factory(lambda self: _signature_of(self.fn), takes_self=True)
    )
    _cache: Cache[_Compiled] = attrs.field(factory=Cache, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meshes = self._meshes()
        compiled, arrays, call = self._prepare(args, kwargs, meshes)
        with self._use_mesh(meshes):
            try:
                results = compiled.run(*_split(arrays, compiled.donated))
            except ValueError as error:
                _raise_misplaced(arrays, call, compiled.shardings, error)
                raise
        return compiled.result.tree(_all_on_mesh(results, meshes.inside, meshes.outside))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Returns the function lowered for arrays or `ShapeDtypeStruct`s, as `jax.jit(...).lower(...)` does.

        ```python
        double = sr.filter_jit(lambda x: 2 * x, mesh=sr.create_mesh("data:8"), in_shardings=P("data"))
        assert "stablehlo" in double.lower(jnp.ones(8)).as_text()
        ```
        """
        meshes = self._meshes()
        args, kwargs = jax.tree.map(_as_struct, (args, kwargs))  # lowering moves nothing
        compiled, arrays, _ = self._prepare(args, kwargs, meshes)
        with self._use_mesh(meshes):
            return compiled.run.lower(*_split(arrays, compiled.donated))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _meshes(self) -> "_Meshes":
        outside = current_mesh() if self.mesh is None else self.mesh
        if self.axis_types is None or not isinstance(outside, Mesh) or under_trace():
            return _Meshes(outside, outside)  # JAX does not allow other types while something is traced
        axis_types = normalize_axis_types(self.axis_types, outside.axis_names)
        if outside.axis_types == axis_types:
            return _Meshes(outside, outside)
        return _Meshes(outside, Mesh(outside.devices, outside.axis_names, axis_types=axis_types))

    def _use_mesh(self, meshes: "_Meshes") -> contextlib.AbstractContextManager[Any]:
        mesh = self.mesh if meshes.inside is meshes.outside else meshes.inside
        if mesh is None or not isinstance(mesh, Mesh):
            return contextlib.nullcontext()
        return trace_mesh(mesh) if under_trace() else jax.set_mesh(mesh)

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], meshes: "_Meshes"
    ) -> tuple[_Compiled, list[Any], Any]:
        """Returns what is compiled for a call, the arrays of the call where they belong, and the call itself."""
        if self._signature is not None:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        # The function is a part of the call: a module's arrays are traced, not compiled in as constants.
        call = (self.fn, args, kwargs)
        leaves, treedef = jax.tree.flatten(call)
        array_indices = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]
        arrays = _all_on_mesh([leaves[index] for index in array_indices], meshes.outside, meshes.inside)
        static = {index: leaf for index, leaf in enumerate(leaves) if not _is_array(leaf)}
        if any(isinstance(leaf, ArraySource) for leaf in static.values()):
            raise ConfigTypeError("filter_jit: an ArraySource cannot be traced; place it with filter_shard first")
        # Static leaves by type too, and what else a trace depends on: settings and contexts of JAX.
        static_keys = tuple((index, static_key(leaf)) for index, leaf in static.items())
        kind = (treedef, static_keys, meshes, trace_key())
        key = (kind, tuple(map(array_key, arrays)))
        try:
            compiled = self._cache.get(key)
        except TypeError as error:
            raise ConfigTypeError(f"filter_jit: non-array arguments must be hashable: {error}") from error
        if compiled is not None:
            return compiled, put_unplaced(arrays, compiled.shardings), call
        shardings = [_on_mesh(sharding, meshes.outside, meshes.inside) for sharding in self._in_shardings(*call)]
        arrays = put_unplaced(arrays, shardings)
        # The same call with arrays that are placed already has another key, and shares what is compiled.
        placed_key = (kind, tuple(map(array_key, arrays)), tuple(shardings))
        compiled = self._cache.get(placed_key)
        if compiled is None:
            compiled = self._compile(call, treedef, static, arrays, shardings, meshes)
            self._cache.add(placed_key, compiled)
        self._cache.add(key, compiled)
        return compiled, arrays, call

    def _compile(
        self,
        call: Any,
        treedef: Any,
        static: dict[int, Any],
        arrays: list[Any],
        shardings: list[Sharding | None],
        meshes: "_Meshes",
    ) -> _Compiled:
        fn, args, kwargs = call
        result = _Result()
        donated = frozenset(_donated_indices(self.donate, fn, args, kwargs))
        is_donated = [index in donated for index in range(len(arrays))]

        # Donated arrays are an argument of their own: jit donates whole arguments.
        def run(donated: list[Any], kept: list[Any]) -> list[Any]:
            groups = {True: iter(donated), False: iter(kept)}
            traced = iter([next(groups[flag]) for flag in is_donated])
            leaves = [static[n] if n in static else next(traced) for n in range(treedef.num_leaves)]
            fn, args, kwargs = treedef.unflatten(leaves)
            values, result.treedef = jax.tree.flatten(fn(*args, **kwargs))
            result.static = tuple((n, value) for n, value in enumerate(values) if not _is_array(value))
            return [value for value in values if _is_array(value)]

        # Traced once for the shapes of the results, since `out_shardings` may be a rule for them.
        in_shardings = _split(shardings, donated)
        with self._use_mesh(meshes):
            try:
                shapes = jax.jit(run, in_shardings=in_shardings).eval_shape(*_split(arrays, donated))
            except Exception as error:  # JAX has no public class for errors about shardings
                _add_hint(error, meshes)
                raise
        out_shardings = self._out_shardings(result.tree(shapes))
        compiled = jax.jit(run, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=(0,))
        return _Compiled(compiled, donated, shardings, result)

    def _in_shardings(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sharding | None]:
        """Returns the sharding of each array of a call; `None` leaves the array where it is."""
        items = self.in_shardings if isinstance(self.in_shardings, tuple) else (self.in_shardings,) * len(args)
        if len(items) > len(args):
            raise TreeError(
                f"filter_jit: in_shardings has {len(items)} items, and the call has {len(args)} positional arguments"
            )
        items += (None,) * (len(args) - len(items))  # arguments that have defaults may be left out
        shardings = [
            sharding
            for n, (arg, how) in enumerate(zip(args, items, strict=True))
            for sharding in _shardings(arg, how, self.mesh, f"argument {n}")
        ]
        return [*_no_shardings(fn), *shardings, *_no_shardings(kwargs)]

    def _out_shardings(self, shapes: Any) -> list[Sharding | None]:
        items = self.out_shardings
        if not isinstance(items, tuple) or not isinstance(shapes, tuple):
            return _shardings(shapes, items, self.mesh, "the result")  # pyright: ignore[reportArgumentType]  (a tuple may be a tree of specs, too)
        if len(items) != len(shapes):
            raise TreeError(f"filter_jit: out_shardings has {len(items)} items, the function returns {len(shapes)}")
        return [
            sharding
            for n, (part, how) in enumerate(zip(shapes, items, strict=True))
            for sharding in _shardings(part, how, self.mesh, f"result {n}")
        ]


@final
@attrs.frozen
class _Meshes:
    """One mesh with two sets of axis types: as arguments and results have it, and as the function sees it."""

    outside: AnyMesh | None
    inside: AnyMesh | None


def _on_mesh(sharding: Any, old: AnyMesh | None, new: AnyMesh | None) -> Any:
    """Returns a sharding on `old` as the same sharding on `new`, which has the same devices."""
    if old is new or not isinstance(sharding, NamedSharding) or sharding.mesh != old or not isinstance(new, Mesh):
        return sharding
    return NamedSharding(new, sharding.spec, memory_kind=sharding.memory_kind)


def _all_on_mesh(values: list[Any], old: AnyMesh | None, new: AnyMesh | None) -> list[Any]:
    """Returns arrays on `old` as the same arrays on `new`; nothing is moved."""
    if old is new:
        return values
    shardings = {
        index: (value.sharding, _on_mesh(value.sharding, old, new))
        for index, value in enumerate(values)
        if isinstance(value, jax.Array | jax.ShapeDtypeStruct)
    }
    return put_some(values, {index: after for index, (before, after) in shardings.items() if after is not before})


def _as_struct(value: Any) -> Any:
    """Returns the shape of an array, with its sharding if it is placed; other values as they are."""
    if not _is_array(value) or isinstance(value, jax.ShapeDtypeStruct | Tracer):
        return value
    sharding = value.sharding if is_placed(value) else None
    weak = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, device_dtype(value.dtype), sharding=sharding, weak_type=weak)


def _add_hint(error: Exception, meshes: _Meshes) -> None:
    """Adds a note to an error that probably comes from the types of axes."""
    if not isinstance(meshes.inside, Mesh):
        return
    note_closure(error, "filter_jit")
    axis_types = dict(zip(meshes.inside.axis_names, meshes.inside.axis_types, strict=True))
    explicit = [name for name, axis_type in axis_types.items() if axis_type == AxisType.Explicit]
    if explicit and any(word in str(error) for word in ("sharding", *explicit)):
        error.add_note(
            f"filter_jit: on Explicit axes ({', '.join(explicit)}) JAX wants model code to say how such results are "
            "split. filter_jit(..., axis_types='auto') leaves it to the compiler"
        )
    elif meshes.inside is not meshes.outside and "type Auto" in str(error):
        error.add_note("filter_jit: the function sees Auto axes; axis_types=None keeps the mesh's own types")


def _signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except ValueError:  # a builtin function may have none
        return None


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _shardings(tree: Any, how: How, mesh: AnyMesh | None, what: str) -> list[Sharding | None]:
    if how is None:
        return _no_shardings(tree)
    _, shardings = resolve_destination(tree, how, mesh, caller=f"filter_jit, {what}").arrays()
    return list(shardings)


def _no_shardings(tree: Any) -> list[Sharding | None]:
    return [None for leaf in jax.tree.leaves(tree) if _is_array(leaf)]


def _split(values: Sequence[Any], donated: frozenset[int]) -> tuple[list[Any], list[Any]]:
    """Returns the values of donated arrays, and of the others."""
    return (
        [value for index, value in enumerate(values) if index in donated],
        [value for index, value in enumerate(values) if index not in donated],
    )


def _donated_indices(
    donate: tuple[int | str, ...] | str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int]:
    """Returns the indices of donated arrays among all arrays of a call."""
    signature = _signature_of(fn)
    names = [] if signature is None else list(signature.parameters)[: len(args)]
    items = [names.index(item) if item in names else item for item in donate] if isinstance(donate, tuple) else []
    unknown = [item for item in items if item not in range(-len(args), len(args)) and item not in kwargs]
    if unknown:
        raise ConfigError(f"filter_jit: donate names {unknown}; the arguments are {', '.join([*names, *kwargs])}")
    chosen = [item % len(args) if isinstance(item, int) else item for item in items]
    parts: list[tuple[Any, bool]] = [(fn, donate == "all")]
    parts += [
        (arg, donate == "all" or (donate == "all-except-first" and n > 0) or n in chosen) for n, arg in enumerate(args)
    ]
    # In the order in which JAX flattens a dictionary.
    parts += [(kwargs[name], donate in ("all", "all-except-first") or name in chosen) for name in sorted(kwargs)]
    flags = [is_donated for part, is_donated in parts for leaf in jax.tree.leaves(part) if _is_array(leaf)]
    return [index for index, is_donated in enumerate(flags) if is_donated]


def _array_paths(call: Any) -> Iterable[str]:
    fn, args, kwargs = call
    named = {f"argument {n}": arg for n, arg in enumerate(args)}
    for name, part in ({"the function": fn} | named | {f"argument {k!r}": kwargs[k] for k in sorted(kwargs)}).items():
        for path, leaf in zip(leaf_paths(part), jax.tree.leaves(part), strict=True):
            if _is_array(leaf):
                yield f"{name}, {path}" if path else name


def _raise_misplaced(arrays: Sequence[Any], call: Any, shardings: Sequence[Sharding | None], error: ValueError) -> None:
    """Raises an error that lists the arguments placed otherwise than `in_shardings` says, if there are any."""
    misplaced = [
        f"  {path} {shape_text(array.shape)}: is {_sharding_text(array.sharding)}, not {_sharding_text(expected)}"
        for array, path, expected in zip(arrays, _array_paths(call), shardings, strict=True)
        if expected is not None
        and isinstance(array, jax.Array)
        and array.committed
        and not array.sharding.is_equivalent_to(expected, array.ndim)
    ]
    if misplaced:
        raise PlanError(
            "filter_jit: arguments are not placed as in_shardings says; place them once with filter_shard:\n"
            + "\n".join(misplaced)
        ) from error


def _sharding_text(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    return f"{spec_repr(sharding.spec)} on {','.join(f'{name}:{size}' for name, size in sharding.mesh.shape.items())}"
