"""`filter_jit`: `jax.jit` for functions of any pytrees, sharded by rules, plans or specs."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, final, overload

import attrs
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.context import current_mesh, trace_mesh
from shardrules.core.errors import PlanError, RuleTypeError, TreeError
from shardrules.core.finding import shape_text
from shardrules.core.jax_state import trace_key, under_trace
from shardrules.core.spec import device_dtype, spec_repr
from shardrules.core.tree import leaf_paths
from shardrules.mesh.creation import AxisTypes, normalize_axis_types
from shardrules.placement.cache_keys import array_key, static_key
from shardrules.placement.destination import How, resolve_destination
from shardrules.placement.source import ArraySource
from shardrules.placement.traced import note_closure
from shardrules.placement.transfer import put

Donate: TypeAlias = Literal["none", "all", "all-except-first"] | Sequence[int | str]
"""Whose memory may be used for the results: nobody's, that of all arguments, or of some, by position or name."""


@overload
def filter_jit(
    fn: Callable[..., Any],
    *,
    mesh: AnyMesh | None = None,
    in_shardings: How = None,
    out_shardings: How = None,
    donate: Donate = "none",
    axis_types: AxisTypes = "auto",
) -> "FilterJit": ...


@overload
def filter_jit(
    *,
    mesh: AnyMesh | None = None,
    in_shardings: How = None,
    out_shardings: How = None,
    donate: Donate = "none",
    axis_types: AxisTypes = "auto",
) -> "Callable[[Callable[..., Any]], FilterJit]": ...


def filter_jit(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh | None = None,
    in_shardings: How = None,
    out_shardings: How = None,
    donate: Donate = "none",
    axis_types: AxisTypes = "auto",
) -> "FilterJit | Callable[[Callable[..., Any]], FilterJit]":
    """Compiles a function of any pytrees. Arrays are traced; everything else in them is static and must have a hash.

    Where arguments and results are to be follows from rules, plans or specs, anew for every structure, shape and dtype:
    another tree never meets the shardings of an earlier one, and the same tree is compiled once. What
    `in_shardings` speaks of and nobody has placed yet is placed first, so that a training's first step is compiled for
    all that follow, where `jax.jit` compiles two; to `jax.transfer_guard` such a transfer is one that was asked for.

    **Arguments:**

    - `fn`: the function. A module that is called is part of its own arguments, as in `equinox.filter_jit`.
    - `mesh`: the mesh, which is in force while `fn` runs; by default the one in force at the call.
    - `in_shardings`: a tuple with one item for each positional argument, or one item that is for each of them. An item
        is whatever `filter_shard` takes, or `None`: as the argument comes.
    - `out_shardings`: the same for the result; a tuple stands for the items of a tuple. `None`: as the compiler likes.
    - `donate`: `"none"`, `"all"`, `"all-except-first"`, or positions and names of arguments whose memory may be reused.
    - `axis_types`: the types that the axes have while `fn` runs; `None`: those of the mesh. On Explicit axes JAX has
        model code say how every ambiguous result is to be split, which layers written without a mesh in mind do not do;
        `"auto"` leaves that to the compiler. Arguments and results keep the mesh that they have. Inside of another
        traced function its types stay.

    **Returns:**

    A function like `fn`, with a method `lower` that takes the same arguments.

    **Raises:**

    What `filter_shard` raises. `PlanError` for arguments that lie elsewhere already: moving them at every call would be
    the silent kind of slow. Arrays that lie nowhere in particular, numpy arrays among them, are placed.

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
        raise RuleTypeError(
            f"filter_jit compiles a function, got {fn!r:.80}. Rules go to in_shardings and out_shardings"
        )
    return functools.update_wrapper(
        FilterJit(fn, mesh, in_shardings, out_shardings, _as_donated(donate), axis_types), fn, updated=()
    )


def _as_donated(donate: Donate) -> tuple[int | str, ...] | str:
    if isinstance(donate, str):
        if donate not in ("none", "all", "all-except-first"):
            raise TreeError(
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
    """What the trace found out about the result: its structure, and those of its leaves that are no arrays."""

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
    """A compiled function; `filter_jit` makes one.

    **Arguments:**

    - `fn`, `mesh`, `in_shardings`, `out_shardings`: as for `filter_jit`.
    - `donated`: `donate` of `filter_jit`, as a tuple or a word.
    - `axis_types`: as for `filter_jit`.
    """

    fn: Callable[..., Any]
    mesh: AnyMesh | None
    in_shardings: How
    out_shardings: How
    donated: tuple[int | str, ...] | str
    axis_types: AxisTypes = "auto"
    _signature: inspect.Signature | None = attrs.field(
        init=False, default=attrs.Factory(lambda self: _signature(self.fn), takes_self=True)
    )
    _known: dict[Hashable, _Compiled] = attrs.field(factory=dict, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meshes = self._meshes()
        compiled, arrays, names = self._ready(args, kwargs, meshes)
        with self._in_force(meshes):
            try:
                results = compiled.run(*_split(arrays, compiled.donated))
            except ValueError as error:
                _explain(arrays, names(), compiled.shardings, error)
                raise
        return compiled.result.tree(_renamed(results, meshes.inside, meshes.outside))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Returns the function lowered for these arguments, to look at or to compile ahead of time.

        **Arguments:**

        - `args`, `kwargs`: arguments of the function; `ShapeDtypeStruct`s stand for arrays.

        **Returns:**

        What `jax.jit(...).lower(...)` returns.

        ```python
        double = sr.filter_jit(lambda x: 2 * x, mesh=sr.create_mesh("data:8"), in_shardings=P("data"))
        assert "stablehlo" in double.lower(jnp.ones(8)).as_text()
        ```
        """
        meshes = self._meshes()
        args, kwargs = jax.tree.map(_shape_of, (args, kwargs))  # lowering moves nothing
        compiled, arrays, _ = self._ready(args, kwargs, meshes)
        with self._in_force(meshes):
            return compiled.run.lower(*_split(arrays, compiled.donated))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _meshes(self) -> "_Meshes":
        outside = current_mesh() if self.mesh is None else self.mesh
        if self.axis_types is None or not isinstance(outside, Mesh) or under_trace():
            return _Meshes(outside, outside)  # while something is traced, JAX lets nobody change the types
        types = normalize_axis_types(self.axis_types, outside.axis_names)
        if outside.axis_types == types:
            return _Meshes(outside, outside)
        return _Meshes(outside, Mesh(outside.devices, outside.axis_names, axis_types=types))

    def _in_force(self, meshes: "_Meshes") -> contextlib.AbstractContextManager[Any]:
        mesh = self.mesh if meshes.inside is meshes.outside else meshes.inside
        if mesh is None or not isinstance(mesh, Mesh):
            return contextlib.nullcontext()
        return trace_mesh(mesh) if under_trace() else jax.set_mesh(mesh)

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], meshes: "_Meshes"
    ) -> tuple[_Compiled, list[Any], Callable[[], tuple[str, ...]]]:
        if self._signature is not None:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        call = (self.fn, args, kwargs)
        leaves, treedef = jax.tree.flatten(call)
        numbers = [number for number, leaf in enumerate(leaves) if _is_array(leaf)]
        arrays = _renamed([leaves[number] for number in numbers], meshes.outside, meshes.inside)
        static = {number: leaf for number, leaf in enumerate(leaves) if not _is_array(leaf)}
        if any(isinstance(leaf, ArraySource) for leaf in static.values()):
            raise TreeError("filter_jit: an ArraySource is no array yet; place it with filter_shard first")
        said = tuple((number, static_key(leaf)) for number, leaf in static.items())
        kind = (treedef, said, meshes, trace_key())
        key = (kind, tuple(map(array_key, arrays)))
        try:
            compiled = self._known.get(key)
        except TypeError as error:
            raise TreeError(f"filter_jit: an argument that is no array must have a hash: {error}") from error
        if compiled is not None:
            arrays = _placed(arrays, compiled.shardings)
        else:
            shardings = [_under(one, meshes.outside, meshes.inside) for one in self._arguments(*call)]
            arrays = _placed(arrays, shardings)
            there = (kind, tuple(map(array_key, arrays)), tuple(shardings))
            if there not in self._known:  # else they lay elsewhere when it was compiled
                self._known[there] = self._compile(call, treedef, static, arrays, shardings, meshes)
            compiled = self._known[key] = self._known[there]
        return compiled, arrays, lambda: tuple(_array_paths(call))

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
        donated = frozenset(_donated(self.donated, fn, args, kwargs))
        given = [number in donated for number in range(len(arrays))]

        def run(donated: list[Any], kept: list[Any]) -> list[Any]:
            parts = {True: iter(donated), False: iter(kept)}
            traced = iter([next(parts[is_given]) for is_given in given])
            leaves = [static[n] if n in static else next(traced) for n in range(treedef.num_leaves)]
            fn, args, kwargs = treedef.unflatten(leaves)
            values, result.treedef = jax.tree.flatten(fn(*args, **kwargs))
            result.static = tuple((n, value) for n, value in enumerate(values) if not _is_array(value))
            return [value for value in values if _is_array(value)]

        wanted = _split(shardings, donated)
        with self._in_force(meshes):
            try:
                shaped = jax.jit(run, in_shardings=wanted).eval_shape(*_split(arrays, donated))
            except Exception as error:  # JAX has no public name for those that are about shardings
                _hint(error, meshes)
                raise
        outputs = self._results(result.tree(shaped))
        compiled = jax.jit(run, in_shardings=wanted, out_shardings=outputs, donate_argnums=(0,))
        return _Compiled(compiled, donated, shardings, result)

    def _arguments(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sharding | None]:
        """Where each array of a call is to be; `None`: where it is."""
        said = self.in_shardings
        items = said if isinstance(said, tuple) else (said,) * len(args)
        if len(items) > len(args):
            raise TreeError(
                f"filter_jit: in_shardings has {len(items)} items, the call {len(args)} positional arguments"
            )
        rest = len(args) - len(items)
        pairs = zip(args, (*items, *[None] * rest), strict=True)
        found = [_shardings(arg, one, self.mesh, f"argument {n}") for n, (arg, one) in enumerate(pairs)]
        return [*_unsaid(fn), *(one for part in found for one in part), *_unsaid(kwargs)]

    def _results(self, shaped: Any) -> list[Sharding | None]:
        said = self.out_shardings
        if not isinstance(said, tuple) or not isinstance(shaped, tuple):
            return _shardings(shaped, said, self.mesh, "the result")
        if len(said) != len(shaped):
            raise TreeError(f"filter_jit: out_shardings has {len(said)} items, the function returns {len(shaped)}")
        return [
            one
            for n, (part, how) in enumerate(zip(shaped, said, strict=True))
            for one in _shardings(part, how, self.mesh, f"result {n}")
        ]


@final
@attrs.frozen
class _Meshes:
    """One mesh by two names: as arguments and results have it, and as the function sees it."""

    outside: AnyMesh | None
    inside: AnyMesh | None


def _under(sharding: Any, old: AnyMesh | None, new: AnyMesh | None) -> Any:
    """The same sharding under another name of its mesh."""
    if old is new or not isinstance(sharding, NamedSharding) or sharding.mesh != old or not isinstance(new, Mesh):
        return sharding
    return NamedSharding(new, sharding.spec, memory_kind=sharding.memory_kind)


def _renamed(values: list[Any], old: AnyMesh | None, new: AnyMesh | None) -> list[Any]:
    """The same arrays under another name of their mesh; nothing is moved."""
    if old is new:
        return values
    owns = {n: value.sharding for n, value in enumerate(values) if isinstance(value, jax.Array | jax.ShapeDtypeStruct)}
    found = {number: _under(own, old, new) for number, own in owns.items()}
    return _with_shardings(values, {number: one for number, one in found.items() if one is not owns[number]})


def _placed(values: list[Any], shardings: Sequence[Sharding | None]) -> list[Any]:
    """What lies nowhere yet, put where it is to be.

    To jit an array that it has to place is of another type than one that is there already: it would compile the first
    step of a training twice.
    """
    if under_trace():
        return values
    return _with_shardings(
        values,
        {
            number: wanted
            for number, (value, wanted) in enumerate(zip(values, shardings, strict=True))
            if isinstance(wanted, NamedSharding) and not _lies(value)
        },
    )


def _shape_of(value: Any) -> Any:
    """What stands for an array where its values do not matter: where it lies, if it does, is part of it."""
    if not _is_array(value) or isinstance(value, jax.ShapeDtypeStruct | Tracer):
        return value
    own = value.sharding if _lies(value) else None
    weak = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, device_dtype(value.dtype), sharding=own, weak_type=weak)


def _lies(value: Any) -> bool:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding is not None
    return isinstance(value, jax.Array) and value.committed


def _with_shardings(values: list[Any], shardings: dict[int, Any]) -> list[Any]:
    """The values, some of them put elsewhere; of a shape without values it is only said."""
    if not shardings:
        return values
    result = list(values)
    structs = [number for number in shardings if isinstance(values[number], jax.ShapeDtypeStruct)]
    for number in structs:
        result[number] = values[number].update(sharding=shardings[number])
    arrays = [number for number in shardings if number not in structs]
    for number, array in zip(
        arrays, put([values[number] for number in arrays], [shardings[number] for number in arrays]), strict=True
    ):
        result[number] = array
    return result


def _hint(error: Exception, meshes: _Meshes) -> None:
    """Says what can be done about an error that the types of axes are likely to be behind."""
    if not isinstance(meshes.inside, Mesh):
        return
    note_closure(error, "filter_jit")
    types = dict(zip(meshes.inside.axis_names, meshes.inside.axis_types, strict=True))
    explicit = [name for name, kind in types.items() if kind == AxisType.Explicit]
    if explicit and any(word in str(error) for word in ("sharding", *explicit)):
        error.add_note(
            f"filter_jit: on Explicit axes ({', '.join(explicit)}) JAX has model code say how such results are split. "
            "filter_jit(..., axis_types='auto') leaves it to the compiler"
        )
    elif meshes.inside is not meshes.outside and "type Auto" in str(error):
        error.add_note("filter_jit: the function sees Auto axes; axis_types=None keeps those of the mesh")


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except ValueError:  # a builtin function may have none
        return None


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _shardings(tree: Any, how: How, mesh: AnyMesh | None, what: str) -> list[Sharding | None]:
    if how is None:
        return _unsaid(tree)
    _, shardings = resolve_destination(tree, how, mesh, caller=f"filter_jit, {what}").arrays()
    return list(shardings)


def _unsaid(tree: Any) -> list[Sharding | None]:
    return [None for leaf in jax.tree.leaves(tree) if _is_array(leaf)]


def _split(values: Sequence[Any], donated: frozenset[int]) -> tuple[list[Any], list[Any]]:
    """The values of the arrays that are given away, and those of the others."""
    return (
        [value for number, value in enumerate(values) if number in donated],
        [value for number, value in enumerate(values) if number not in donated],
    )


def _donated(donate: tuple[int | str, ...] | str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The numbers of the arrays that are given away."""
    signature = _signature(fn)
    names = [] if signature is None else list(signature.parameters)[: len(args)]
    positions = [names.index(one) if one in names else one for one in donate] if isinstance(donate, tuple) else []
    unknown = [one for one in positions if one not in range(-len(args), len(args)) and one not in kwargs]
    if unknown:
        raise TreeError(f"filter_jit: donate names {unknown}, and the arguments are {', '.join([*names, *kwargs])}")
    chosen = [one % len(args) if isinstance(one, int) else one for one in positions]
    parts: list[tuple[Any, bool]] = [(fn, donate == "all")]
    parts += [
        (arg, donate == "all" or (donate == "all-except-first" and n > 0) or n in chosen) for n, arg in enumerate(args)
    ]
    parts += [(kwargs[name], donate in ("all", "all-except-first") or name in chosen) for name in sorted(kwargs)]
    flags = [is_given for part, is_given in parts for leaf in jax.tree.leaves(part) if _is_array(leaf)]
    return [number for number, is_given in enumerate(flags) if is_given]


def _array_paths(call: Any) -> Iterable[str]:
    fn, args, kwargs = call
    named = {f"argument {number}": arg for number, arg in enumerate(args)}
    for name, part in ({"the function": fn} | named | {f"argument {k!r}": kwargs[k] for k in sorted(kwargs)}).items():
        for path, leaf in zip(leaf_paths(part), jax.tree.leaves(part), strict=True):
            if _is_array(leaf):
                yield f"{name}, {path}" if path else name


def _explain(
    arrays: Sequence[Any], names: Sequence[str], shardings: Sequence[Sharding | None], error: ValueError
) -> None:
    """Raises an error that lists the arguments which lie elsewhere, if that is what `error` is about."""
    away = [
        f"  {name} {shape_text(array.shape)}: lies as {_text(array.sharding)}, is to be {_text(wanted)}"
        for array, name, wanted in zip(arrays, names, shardings, strict=True)
        if wanted is not None
        and isinstance(array, jax.Array)
        and array.committed
        and not array.sharding.is_equivalent_to(wanted, array.ndim)
    ]
    if away:
        raise PlanError(
            "filter_jit: arguments lie elsewhere than in_shardings says; place them once with filter_shard:\n"
            + "\n".join(away)
        ) from error


def _text(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    return f"{spec_repr(sharding.spec)} on {','.join(f'{name}:{size}' for name, size in sharding.mesh.shape.items())}"
